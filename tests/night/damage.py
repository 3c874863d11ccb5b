# SPDX-License-Identifier: Apache-2.0
"""What happens to the files while nobody has the volume open.

A power cut is modelled on the bytes: an image is taken when a sync has returned, and at
the cut each page that has changed since is new, old, or torn in sectors of 512 bytes.
The records of namespaces are always new: each clear ends in an fsync.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from night.plan import PAGE

__all__ = ["Noise", "cut", "drop_pages", "flip", "keep_image", "noise"]

SECTOR = 512
CHUNK = 1024 * PAGE
RECORD_BYTES = 80
# Of struct ckv_file_header, docs/format.md; from byte 72 on.
_AREAS = struct.Struct("<6Q")


def _areas(file: BinaryIO) -> tuple[int, ...]:
    """Offsets of namespaces, checkpoint; its bytes; table; its bytes; data."""
    for copy in range(2):  # one of them may be noise
        file.seek(copy * PAGE + 72)
        areas = _AREAS.unpack(file.read(_AREAS.size))
        if _sound(areas):
            return areas
    raise ValueError("both headers are damaged")


def _sound(areas: tuple[int, ...]) -> bool:
    names, checkpoint, _, table, _, data = areas
    return names == 4 * PAGE and names < checkpoint < table < data < 1 << 40


def keep_image(paths: Iterable[str]) -> None:
    """Copies the files: what is on the medium whatever happens later."""
    for path in paths:
        shutil.copyfile(path, f"{path}.synced")


def cut(paths: Iterable[str], dice: random.Random) -> int:
    """Makes the files those that a power cut could have left; returns pages changed."""
    share = dice.choice((0.0, 0.05, 0.5, 0.9, 0.99))
    torn = dice.choice((0.0, 0.2))
    changed = 0
    for path in paths:
        with open(f"{path}.synced", "rb") as old, open(path, "r+b") as new:
            names, checkpoint, *_ = _areas(new)
            at = 0
            new.seek(0)
            while True:
                now, then = new.read(CHUNK), old.read(CHUNK)
                if not now:
                    break
                if at < checkpoint:  # the first chunk; areas lie on pages
                    kept = slice(names, checkpoint)
                    then = then[:names] + now[kept] + then[checkpoint:]
                if now != then:
                    mixed, count = _mix(now, then, dice, share, torn)
                    new.seek(at)
                    new.write(mixed)
                    changed += count
                at += len(now)
        os.unlink(f"{path}.synced")
    return changed


def _mix(
    now: bytes, then: bytes, dice: random.Random, share: float, torn: float
) -> tuple[bytes, int]:
    mixed = bytearray(now)
    changed = 0
    for first in range(0, len(now), PAGE):
        page = slice(first, first + PAGE)
        if now[page] == then[page]:
            continue
        if dice.random() < torn:
            for start in range(first, first + PAGE, SECTOR):
                if dice.randrange(2):
                    mixed[start : start + SECTOR] = then[start : start + SECTOR]
                    changed += 1
        elif dice.random() >= share:
            mixed[page] = then[page]
            changed += 1
    return bytes(mixed), changed


def flip(path: str, offset: int, length: int, dice: random.Random) -> None:
    """Damages a payload: a bit, some bytes, or a page of it."""
    how = dice.randrange(3)
    at = dice.randrange(length)
    size = (1, 1, PAGE)[how]
    size = min(size, length - at)
    with open(path, "r+b") as file:
        file.seek(offset + at)
        found = file.read(size)
        file.seek(offset + at)
        if how == 0:
            file.write(bytes([found[0] ^ 1 << dice.randrange(8)]))
        else:
            file.write(bytes(byte ^ 0xFF for byte in found))


@dataclasses.dataclass
class Noise:
    """What pages of noise may have cost."""

    pages: int = 0
    blocks: int = 0
    """At most so many blocks are gone."""
    clears: bool = False
    """What was cleared may be back."""


def noise(paths: Iterable[str], dice: random.Random) -> Noise:
    """Overwrites pages of metadata, but never both copies of a header."""
    result = Noise()
    for path in paths:
        with open(path, "r+b") as file:
            names, checkpoint, _, table, table_bytes, data = _areas(file)
            pages = {dice.randrange(2), 2, 3}
            pages |= {dice.randrange(4, data // PAGE) for _ in range(3)}
            for page in dice.sample(sorted(pages), 2):
                at = page * PAGE
                file.seek(at)
                file.write(dice.randbytes(PAGE))
                result.pages += 1
                if table <= at < table + table_bytes:
                    result.blocks += PAGE // RECORD_BYTES + 2
                if names <= at < checkpoint:
                    result.clears = True
    return result


def drop_pages(paths: Iterable[str]) -> None:
    """Writes back and drops the page cache of the files."""
    for path in paths:
        with Path(path).open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
