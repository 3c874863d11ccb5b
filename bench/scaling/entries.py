# SPDX-License-Identifier: Apache-2.0
"""What each call costs in a volume of a thousand blocks, and of ten million.

The blocks are zeros in a sparse volume (``sparse``), best on tmpfs, so that no device
is measured. Keys are asked for in random order: most of what a call touches is in no
cache.
"""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.records import Sample
from bench.scaling import sparse
from bench.scaling.loads import BENCH, STORE, Add
from cyclone_kv import Cache, CacheConfig

__all__ = ["CALLS", "OPENS", "measure"]

CALLS = (
    *("view", "contains", "contains_absent", "contains_many", "longest_prefix"),
    *("touch", "put_present", "put_new", "stats", "len"),
)
"""Calls whose cost must not depend on the number of blocks; a key each where there are
keys."""

OPENS = ("open_first", "open_second")
"""``open_first`` builds the region from the table; ``open_second`` finds it there."""

_KEYS = 10_000
_CALLS = 2000
_KEEP_OPEN = """
import sys
from cyclone_kv import Cache, CacheConfig
cache = Cache.open(sys.argv[1], CacheConfig(allow_sparse=True, sync_interval=None))
print("open", flush=True)
sys.stdin.read()
"""


def _per_call(call: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        return (time.perf_counter() - begin) / _CALLS * 1e6

    return measure


def _measures(
    cache: Cache, names: Sequence[bytes], absent: Sequence[bytes]
) -> dict[str, Callable[[], float]]:
    """Return for each call a function that returns microseconds a call, or a key."""
    few, zeros = names[:_CALLS], bytes(sparse.BLOCK_BYTES)
    clock = time.perf_counter

    def each(call: Callable[[bytes], object], keys: Sequence[bytes]) -> float:
        begin = clock()
        for key in keys:
            call(key)
        return (clock() - begin) / len(keys) * 1e6

    def many(call: Callable[[list[bytes]], object], keys: Sequence[bytes]) -> float:
        given = list(keys)
        begin = clock()
        call(given)
        return (clock() - begin) / len(given) * 1e6

    return {
        "view": lambda: each(cache.get, names),
        "contains": lambda: each(cache.contains, names),
        "contains_absent": lambda: each(cache.contains, absent),
        "contains_many": lambda: many(cache.contains_many, names),
        "longest_prefix": lambda: many(cache.longest_prefix, names),
        "touch": lambda: many(cache.touch, names),
        "put_present": lambda: each(lambda key: cache.put(key, zeros), few),
        "stats": _per_call(cache.stats),
        "len": _per_call(cache.__len__),
    }


@contextmanager
def _peer(path: Path) -> Iterator[None]:
    """Keep the volume open in another process."""
    with subprocess.Popen(
        [sys.executable, "-c", _KEEP_OPEN, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        if process.stdout is None or process.stdout.readline() != "open\n":
            raise RuntimeError("the other process did not open the volume")
        try:
            yield
        finally:
            process.communicate("")


def _open_seconds(path: Path, count: int) -> float:
    config = CacheConfig(allow_sparse=True, sync_interval=None)
    begin = time.perf_counter()
    cache = Cache.open(path, config)
    seconds = time.perf_counter() - begin
    found = len(cache)
    cache.close()
    if found != count:
        raise RuntimeError(f"{found} blocks after opening; {count} were stored")
    return seconds


def _sample(phase: str, value: float, number: int, count: int, unit: str) -> Sample:
    return Sample(
        bench=BENCH,
        phase=f"entries.{phase}",
        store=STORE,
        value=value,
        unit=unit,
        better="lower",
        block_bytes=sparse.BLOCK_BYTES,
        round=number,
        params={"entries": count},
    )


def _measure_one(path: Path, count: int, rounds: int, add: Add) -> None:
    cache = sparse.fill(path, count)
    choice = random.Random(count)
    places = [choice.randrange(count) for _ in range(_KEYS)]
    names = [next(sparse.keys(1, place)) for place in places]
    absent = [next(sparse.keys(1, count + place)) for place in places]
    measures = _measures(cache, names, absent)
    for once in measures.values():
        once()  # maps and verifies what is done once
    for number in range(rounds):
        for phase, call in measures.items():
            value = statistics.median(call() for _ in range(3))
            add(_sample(phase, value, number, count, "us"))
    region = cache.info().shm_bytes
    add(_sample("region_per_entry", region / count, 0, count, "bytes"))
    cache.close()
    for number in range(rounds):
        seconds = _open_seconds(path, count)
        add(_sample("open_first", seconds * 1e6, number, count, "us"))
    with _peer(path):
        for number in range(rounds):
            seconds = _open_seconds(path, count)
            add(_sample("open_second", seconds * 1e6, number, count, "us"))
    with Cache.open(path, CacheConfig(allow_sparse=True)) as cache:
        for number in range(rounds):  # last, since these evict
            new = sparse.keys(_CALLS, 2 * count + number * _CALLS)
            seconds = _put_seconds(cache, list(new))
            add(_sample("put_new", seconds / _CALLS * 1e6, number, count, "us"))
        begin = time.perf_counter()
        cleared = cache.clear()
        seconds = time.perf_counter() - begin
        if len(cache):
            raise RuntimeError(f"clear removed {cleared} blocks and left {len(cache)}")
        add(_sample("clear", seconds * 1e6, 0, count, "us"))


def _put_seconds(cache: Cache, names: Sequence[bytes]) -> float:
    zeros = bytes(sparse.BLOCK_BYTES)
    begin = time.perf_counter()
    stored = [cache.put(key, zeros) for key in names]
    seconds = time.perf_counter() - begin
    if not all(stored):
        raise RuntimeError(f"a put was refused: {cache.stats().process}")
    return seconds


def measure(
    parent: Path,
    counts: Sequence[int],
    rounds: int,
    add: Add,
    note: Callable[[str], None],
) -> None:
    """Measure at each number of blocks; ``note`` is told what was left out, and why."""
    for count in counts:
        folder = Path(tempfile.mkdtemp(prefix="entries-", dir=parent))
        try:
            _measure_one(folder / "kv.cyc", count, rounds, add)
        except sparse.Unavailable as reason:
            note(f"{count} entries left out: {reason}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
