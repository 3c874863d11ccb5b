# SPDX-License-Identifier: Apache-2.0
"""Ways of reading blocks of one preallocated file, timed in interleaved rounds.

A way is ``METHOD:THREADS:PIECE``, with ``-raw`` behind the method for one without
checksum. Each call reads ``--batch`` blocks; the next begins when it has ended.

========== =======================================================================
pread      buffered, 256 KiB at a time, checked while in cache
whole      buffered, the piece in one call
willneed   ``POSIX_FADV_WILLNEED`` over the piece, then as pread
fault      copied out of a mapping
populate   ``MADV_POPULATE_READ`` over the piece, then copied out of the mapping
nowait     ``preadv2(RWF_NOWAIT)`` first, then what it did not give
dontcache  ``preadv2(RWF_DONTCACHE)``
direct     O_DIRECT into the destination (which must be aligned)
bounce     O_DIRECT into memory of the thread, copied to the destination
small      the same into pages of 4 KiB instead of huge ones
own        as pread, but each thread has a description, so readahead, of its own
uring      O_DIRECT by io_uring from one thread, THREADS requests in flight, copied
========== =======================================================================
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.machine import CacheDropper, describe, settle
from cyclone_kv import parse_size

__all__ = ["read_paths"]

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent
_WAYS = (
    "pread:1:64MiB",
    "whole:1:1MiB",
    "willneed:1:64MiB",
    "fault:1:64MiB",
    "populate:1:1MiB",
    "nowait:1:64MiB",
    "dontcache:1:64MiB",
    "bounce:1:2MiB",
    "bounce:4:512KiB",
    "bounce:8:512KiB",
    "bounce:4:2MiB",
    "uring:8:512KiB",
)


def _compile(folder: Path) -> Path:
    program = folder / "read_paths"
    sources = [_HERE / "read_paths.c", *sorted((_ROOT / "csrc/core").glob("crc32c*.c"))]
    command = [
        os.environ.get("CC", "cc"),
        *("-O3", "-std=gnu17", "-pthread"),
        *(f"-I{_ROOT / 'csrc' / name}" for name in ("core", "include")),
        *("-o", str(program), *map(str, sources)),
    ]
    subprocess.run(command, check=True)
    return program


def _make_file(path: Path, nbytes: int) -> None:
    """Allocate, then write in order: as a volume is."""
    piece = random.Random(1).randbytes(4 << 20)
    with open(path, "wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        for _ in range(0, nbytes, len(piece)):
            file.write(piece)
        os.fsync(file.fileno())


@click.command("read-paths")
@click.option("--block", default="2MiB", show_default=True)
@click.option("--dataset", default="256MiB", show_default=True)
@click.option("--batch", default=1, show_default=True, help="Blocks of one call.")
@click.option("--order", type=click.Choice(["stored", "random"]), default="stored")
@click.option("--warm", is_flag=True, help="Everything in the page cache.")
@click.option("--shift", default=16, show_default=True, help="Of the destinations.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--way", "ways", multiple=True, default=_WAYS, help="May be repeated.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/bench"),
    show_default=True,
)
def read_paths(
    *,
    block: str,
    dataset: str,
    batch: int,
    order: str,
    warm: bool,
    shift: int,
    rounds: int,
    ways: Sequence[str],
    folder: Path,
) -> None:
    """Compare ways of reading blocks of a file."""
    console = Console(highlight=False)
    nbytes, total = parse_size(block, "block"), parse_size(dataset, "dataset")
    folder.mkdir(parents=True, exist_ok=True)
    about = describe(folder)
    console.print(
        f"{about['cpu']}, {about['cpus']} CPUs, {about['kernel']}, "
        f"{about['file_system']}, readahead {about['queue']['read_ahead_kb']} KiB",
    )
    dropper = CacheDropper()
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="paths-", dir=folder) as name:
        scratch = Path(name)
        program = _compile(scratch)
        path = scratch / "data"
        _make_file(path, total)
        for number in range(rounds):
            seed = 0 if order == "stored" else number + 1
            turn = number % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                method, threads, piece = way.split(":")
                words = (nbytes, method, seed, shift, threads, parse_size(piece, "way"))
                command = [str(program), str(path), *map(str, (*words, batch))]
                if warm:
                    subprocess.run(command, check=True, capture_output=True)
                else:
                    dropper.drop(scratch, [path])
                    settle(scratch, total + total // 2)
                done = subprocess.run(
                    command, check=True, capture_output=True, text=True
                )
                found[way].append(total // nbytes * nbytes / float(done.stdout) / 1e9)
    temperature = "warm" if warm else "cold"
    table = Table(
        title=f"{block} blocks, {batch} a call, {temperature}, {order} order, "
        f"destinations + {shift}: GB/s",
        title_justify="left",
    )
    for head in ("way", "median", "least", "most"):
        table.add_column(head, justify="left" if head == "way" else "right")
    for way in ways:
        values = found[way]
        numbers = (statistics.median(values), min(values), max(values))
        table.add_row(way, *(f"{number:.2f}" for number in numbers))
    console.print(table)
