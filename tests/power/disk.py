# SPDX-License-Identifier: Apache-2.0
"""What a medium may hold after the power went out, made from a stream of calls.

What Linux promises about a file: after fsync or fdatasync returned 0, what was written
before is on the medium.  What was written and not synced may be there or not, in any
order, by pages.  sync_file_range is no barrier: it starts or awaits the write-out of
pages, and says nothing about the cache of the device.  (msync is fsync of a range; the
engine has no mapping to store to.)  A device tears a page at its sectors.

What the model assumes:

  W1  After a barrier every byte written before it is there.
  W2  A block of 512 or of 4 096 bytes (drawn for each cut) is there in one of the
      versions that the page cache had of it since the barrier: never bytes that were
      never together in the cache.  Each block makes its own choice, so writes are
      lost, torn and reordered, and an older image of a page may be the one that stays.
  W3  Lengths: truncating and allocating take effect in order or not at all.  A write
      after a truncation that was lost is lost with it.  A write that was kept in part
      makes the file as long as the last page of it that was kept.  Nothing is
      allocated later: the engine takes all of its space at creation.
  W4  A new file may be missing until its folder was synced.
  W5  Files do not depend on each other.
  W6  The file system shows zeros, and nothing of another file, where nothing was
      written.

The choice of each block is not left to chance alone, which would nearly never lose just
the one page that matters: see `_moments`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from power.stream import Event

__all__ = ["Disk"]

PAGE = 4096
SECTORS = (512, 4096)
META = ("truncate", "allocate")


class FileModel:
    """One file: what is surely there, and what was written since."""

    def __init__(self, path: Path, capacity: int, *, exists: bool = False) -> None:
        self.path = path
        self.stable = bytearray(capacity)
        self.size = 0
        self.exists = exists  # whether its name is
        self.pending: list[Event] = []
        self.dirty = np.ones(capacity // PAGE, dtype=bool)  # the file against `stable`
        self.areas = (0, 2 * PAGE, 4 * PAGE, capacity)

    # ---- the stream ----------------------------------------------------------------

    def feed(self, event: Event) -> None:
        if event.kind == "sync":
            self._settle(self.pending)
            self.pending = []
        elif event.kind == "named":
            self.exists = True
        elif event.kind == "barrier":
            self._settle_range(event.offset, event.offset + int(event.data))
        else:
            self.pending.append(event)

    def _settle(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind == "write":
                end = event.offset + len(event.data)
                self.stable[event.offset : end] = event.data
                self.size = max(self.size, end)
                self.dirty[event.offset // PAGE : (end + PAGE - 1) // PAGE] = True
            else:
                self._resize(event)
                self.dirty[:] = True

    def _resize(self, event: Event) -> None:
        length = event.offset
        if event.kind == "truncate":
            if length < self.size:
                self.stable[length : self.size] = bytes(self.size - length)
            self.size = length
        else:
            self.size = max(self.size, length)

    def _settle_range(self, begin: int, end: int) -> None:
        left: list[Event] = []
        for event in self.pending:
            stop = event.offset + len(event.data)
            if event.kind != "write" or stop <= begin or event.offset >= end:
                left.append(event)
                continue
            low, high = max(begin, event.offset), min(end, stop)
            inside = event.data[low - event.offset : high - event.offset]
            self._settle([Event("write", event.file, low, inside)])
            if event.offset < low:
                left.append(event._replace(data=event.data[: low - event.offset]))
            if high < stop:
                rest = event.data[high - event.offset :]
                left.append(event._replace(offset=high, data=rest))
        self.pending = left

    # ---- a cut ---------------------------------------------------------------------

    def cut(self, dice: random.Random, limit: int | None = None) -> str:
        """Makes the file what the medium may hold; says how in a few words."""
        pending = self.pending[:limit]
        if not self.exists and dice.random() < 0.5:
            self.path.unlink(missing_ok=True)
            self.dirty[:] = True
            return "no file"
        if any(event.kind in META for event in pending):
            return self._cut_new(dice, pending)
        self.restore()
        block = dice.choice(SECTORS)
        moments, how = self._moments(dice, pending, block)
        with self.path.open("r+b", buffering=0) as file:
            for at, event in enumerate(pending):
                for low, high in _kept(event, at, moments, block):
                    data = event.data[low - event.offset : high - event.offset]
                    os.pwrite(file.fileno(), data, low)
                    self.dirty[low // PAGE : (high + PAGE - 1) // PAGE] = True
        return f"{how} by {block}"

    def _cut_new(self, dice: random.Random, pending: Sequence[Event]) -> str:
        """The same with changes of the length among what was not synced (W3)."""
        changes = sum(event.kind in META for event in pending)
        kept = dice.randint(0, changes)
        block = dice.choice(SECTORS)
        moments, how = self._moments(dice, pending, block)
        content, size, seen = bytearray(self.stable), self.size, 0
        truncated = any(event.kind == "truncate" for event in pending)
        for at, event in enumerate(pending):
            if event.kind in META:
                seen += 1
                if seen > kept:
                    continue
                if event.kind == "truncate":
                    content[event.offset :] = bytes(len(content) - event.offset)
                    size = event.offset
                else:
                    size = max(size, event.offset)
            elif seen <= kept or not truncated:
                for low, high in _kept(event, at, moments, block):
                    data = event.data[low - event.offset : high - event.offset]
                    content[low:high] = data
                    page_end = (high + PAGE - 1) // PAGE * PAGE
                    end = event.offset + len(event.data)
                    size = max(size, min(page_end, end))
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(content[:size])
        self.path.chmod(0o600)
        self.dirty[:] = True
        return f"{how} by {block}, {kept} of {changes} changes of length"

    def restore(self) -> None:
        """Makes the file what is surely there."""
        if not self.path.exists() or self.path.stat().st_size != self.size:
            self.path.unlink(missing_ok=True)
            self.path.write_bytes(self.stable[: self.size])
            self.path.chmod(0o600)
            self.dirty[:] = False
            return
        with self.path.open("r+b", buffering=0) as file:
            view = memoryview(self.stable)
            for low, high in _runs(self.dirty):
                end = min(high * PAGE, self.size)
                if low * PAGE < end:
                    os.pwrite(file.fileno(), view[low * PAGE : end], low * PAGE)
        self.dirty[:] = False

    def touch(self, event: Event) -> None:
        """Somebody else wrote into the file: it is to be restored there."""
        if event.kind == "write":
            end = event.offset + len(event.data)
            self.dirty[event.offset // PAGE : (end + PAGE - 1) // PAGE] = True
        elif event.kind in META:
            self.dirty[:] = True

    def _moments(
        self, dice: random.Random, pending: Sequence[Event], block: int
    ) -> tuple[np.ndarray, str]:
        """For each block the number of pending writes that its image has seen (W2)."""
        count = len(pending)
        blocks = len(self.stable) // block
        draw = np.random.default_rng(dice.getrandbits(64))
        kind = dice.choice(KINDS)
        fixed = np.full(blocks, count)
        if kind == "all" or count == 0:
            return fixed, "all"
        if kind == "nothing":
            return np.zeros(blocks, dtype=int), kind
        if kind == "first":
            first = dice.randint(0, count)
            return np.full(blocks, first), f"the first {first}"
        if kind == "any":
            return draw.integers(0, count + 1, blocks), kind
        if kind == "some":
            share = dice.choice((0.02, 0.2, 0.5, 0.8, 0.98))
            return np.where(draw.random(blocks) < share, count, 0), f"{share:.0%}"
        if kind == "areas":  # headers, notes and namespaces, table, data
            parts = []
            for low, high in zip(self.areas, self.areas[1:], strict=False):
                choice = dice.choice(("all", "nothing", "any", "first"))
                parts.append(choice)
                part = slice(low // block, high // block)
                if choice == "nothing":
                    fixed[part] = 0
                elif choice == "first":
                    fixed[part] = dice.randint(0, count)
                elif choice == "any":
                    fixed[part] = draw.integers(0, count + 1, len(fixed[part]))
            return fixed, " ".join(parts)
        # One write is lost, or is all that came: wholly or in part.
        at = dice.randrange(count)
        event = pending[at]
        end = event.offset + max(len(event.data), 1)
        part = slice(event.offset // block, (end + block - 1) // block)
        chosen = draw.random(len(fixed[part])) < dice.choice((0.5, 1.0))
        if kind == "but one":
            fixed[part] = np.where(chosen, at, count)
        else:
            fixed = np.full(blocks, dice.choice((0, at)))
            fixed[part] = np.where(chosen, at + 1, fixed[part])
        return fixed, f"{kind}, write {at} at {event.offset}"


KINDS = (
    "all",
    "nothing",
    "first",
    "any",
    "any",
    "some",
    "areas",
    "areas",
    "areas",
    "but one",
    "but one",
    "only one",
)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Where the mask is set, as [low, high)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.view(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _kept(
    event: Event, at: int, moments: np.ndarray, block: int
) -> list[tuple[int, int]]:
    """The bytes of a write that the images of its blocks have."""
    begin, end = event.offset, event.offset + len(event.data)
    first = begin // block
    mask = moments[first : (end + block - 1) // block] > at
    return [
        (max(begin, (first + low) * block), min(end, (first + high) * block))
        for low, high in _runs(mask)
    ]


class Disk:
    """All files of a volume."""

    def __init__(self, paths: Sequence[Path], capacities: Sequence[int]) -> None:
        self.files = [
            FileModel(path, capacity)
            for path, capacity in zip(paths, capacities, strict=True)
        ]

    @classmethod
    def of(cls, events: Sequence[Event], paths: Sequence[Path]) -> Disk:
        """Large enough for a stream."""
        sizes = [PAGE] * len(paths)
        for event in events:
            if event.kind in ("write", *META):
                end = event.offset + len(event.data)
                sizes[event.file] = max(sizes[event.file], end)
        return cls(paths, [(size + PAGE - 1) // PAGE * PAGE for size in sizes])

    @classmethod
    def found(cls, paths: Sequence[Path], spare: Disk) -> Disk:
        """What lies in the folder now is what is surely there."""
        disk = cls(paths, [len(file.stable) for file in spare.files])
        for file in disk.files:
            file.exists = file.path.exists()
            if file.exists:
                content = file.path.read_bytes()
                file.stable[: len(content)] = content
                file.size = len(content)
                file.dirty[:] = False
        return disk

    def feed(self, event: Event) -> None:
        if event.file >= 0:
            self.files[event.file].feed(event)

    def cut(self, dice: random.Random) -> str:
        return "; ".join(file.cut(dice) for file in self.files)

    def touch(self, event: Event) -> None:
        if event.file >= 0:
            self.files[event.file].touch(event)
