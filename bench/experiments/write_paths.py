# SPDX-License-Identifier: Apache-2.0
"""Ways of writing blocks into a preallocated file, timed in interleaved rounds.

========== =======================================================================
plain      ``pwritev`` in pieces of 1 MiB; the kernel writes back when it likes
behind     the same, and ``sync_file_range(WRITE)`` after each block
dontcache  ``pwritev2(RWF_DONTCACHE)``: write-back begins at once, and the pages
           leave the page cache when it is done
========== =======================================================================

The clock stops after the last block, and again after ``syncfs``. "read" copies every
block once more in stored order: what a reader of fresh blocks gets. "second lap"
writes over what was written: extents are no longer fresh then.
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.machine import describe, settle, syncfs
from cyclone_kv import parse_size

__all__ = ["write_paths"]

_RWF_DONTCACHE = 0x80
_SYNC_FILE_RANGE_WRITE = 2
_PIECE = 1 << 20
_WAYS = ("plain", "behind", "dontcache")
_libc = ctypes.CDLL(None, use_errno=True)


def _write_back(descriptor: int, offset: int, nbytes: int) -> None:
    arguments = (ctypes.c_int64(offset), ctypes.c_int64(nbytes))
    if _libc.sync_file_range(descriptor, *arguments, _SYNC_FILE_RANGE_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "sync_file_range")


def _lap(
    descriptor: int, folder: Path, data: memoryview, count: int, way: str
) -> float:
    """Write every block; return seconds, those of ``syncfs`` included."""
    flags = _RWF_DONTCACHE if way == "dontcache" else 0
    pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
    begin = time.perf_counter()
    for block in range(count):
        at = block * len(data)
        for piece in pieces:
            if os.pwritev(descriptor, [piece], at, flags) != len(piece):
                raise OSError("a short write")
            at += len(piece)
        if way == "behind":
            _write_back(descriptor, block * len(data), len(data))
    syncfs(folder)
    return time.perf_counter() - begin


def _read(descriptor: int, target: memoryview, count: int) -> float:
    begin = time.perf_counter()
    for block in range(count):
        os.preadv(descriptor, [target], block * len(target))
    return time.perf_counter() - begin


@click.command("write-paths")
@click.option("--block", default="2MiB", show_default=True)
@click.option("--dataset", default="256MiB", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/bench"),
    show_default=True,
)
def write_paths(*, block: str, dataset: str, rounds: int, folder: Path) -> None:
    """Compare ways of writing blocks into a preallocated file."""
    console = Console(highlight=False)
    nbytes, total = parse_size(block, "block"), parse_size(dataset, "dataset")
    count = total // nbytes
    folder.mkdir(parents=True, exist_ok=True)
    about = describe(folder)
    console.print(f"{about['cpu']}, {about['kernel']}, {about['file_system']}")
    data = memoryview(random.Random(1).randbytes(nbytes))
    target = memoryview(bytearray(nbytes))
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="paths-", dir=folder) as name:
        scratch = Path(name)
        for number in range(rounds):
            turn = number % len(_WAYS)
            for way in (*_WAYS[turn:], *_WAYS[:turn]):
                path = scratch / way
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    os.posix_fallocate(descriptor, 0, total)
                    os.fsync(descriptor)
                    settle(scratch, total + total // 2)
                    syncfs(scratch)
                    for phase, seconds in (
                        ("first lap", _lap(descriptor, scratch, data, count, way)),
                        ("read", _read(descriptor, target, count)),
                        ("second lap", _lap(descriptor, scratch, data, count, way)),
                    ):
                        rate = count * nbytes / seconds / 1e9
                        found[way, phase].append(rate)
                finally:
                    os.close(descriptor)
                    path.unlink()
    table = Table(title=f"{block} blocks, GB/s, syncfs in the clock of the laps")
    phases = ("first lap", "read", "second lap")
    for head in ("way", *phases):
        table.add_column(head)
    for way in _WAYS:
        cells = []
        for phase in phases:
            values = found[way, phase]
            median = statistics.median(values)
            cells.append(f"{median:.2f} ({min(values):.2f}-{max(values):.2f})")
        table.add_row(way, *cells)
    console.print(table)
