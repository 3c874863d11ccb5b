# SPDX-License-Identifier: Apache-2.0
"""Throughput over threads, processes, blocks of a batch, and bytes of a block."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench import generators
from bench.machine import CacheDropper, syncfs
from bench.records import Better, Sample
from bench.scaling.workers import Job, Rate, Team, run_threads
from cyclone_kv import Cache, CacheConfig

__all__ = ["BENCH", "MIX", "STORE", "Plan", "batches", "blocks", "processes", "threads"]

BENCH, STORE = "scaling", "cyclone_kv"
MIX = (64 << 10, 256 << 10, 2 << 20, 2 << 20, 8 << 20)
"""Sizes of the mixed blocks, over and over: small ones between large ones."""

_MIB = 1 << 20
_PAGE = 4096
Add = Callable[[Sample], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How much is done."""

    dataset: int
    """Bytes that are stored, and that are read warm."""
    rounds: int
    seconds: float
    """Of one load at one number of workers."""
    workers: Sequence[int]
    batches: Sequence[int]
    block_sizes: Sequence[int]
    batch_block: int
    """Bytes of the blocks of a batch, of threads and of processes; small ones apart."""
    small_block: int = 64 << 10


_seeds = itertools.count(1)


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="scaling-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _groups(keys: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    for first in range(0, len(keys), size):
        yield keys[first : first + size]


def _data(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


def _open(folder: Path, dataset: int, nbytes: int) -> Cache:
    """Open a volume with room for the data set in such blocks, and to spare."""
    pages = (-(-nbytes // _PAGE) + 1) * _PAGE * -(-dataset // nbytes)
    capacity = -(-pages * 5 // 4 // _MIB) * _MIB + 8 * -(-nbytes // _MIB) * _MIB
    # Every put is to be stored, also after the volume has once been full.
    config = CacheConfig.for_kv_tier(
        capacity=max(64 * _MIB, capacity), admission="always"
    )
    return Cache.open(folder / "kv.cyc", config)


def _fill(cache: Cache, count: int, nbytes: int) -> None:
    """Store blocks, and read each once: what is verified once is not timed."""
    data, target = _data(nbytes), bytearray(nbytes)
    for index in range(count):
        if not cache.put(generators.key(index), data):
            raise RuntimeError(f"a put was refused: {cache.stats().process}")
        if cache.get_into(generators.key(index), target) != nbytes:
            raise RuntimeError("a block is missing right after it was stored")


def _sample(
    phase: str,
    value: float,
    unit: str,
    block: int,
    number: int,
    *,
    store: str = STORE,
    **params: Any,
) -> Sample:
    better: Better = "lower" if unit == "us" else "higher"
    return Sample(
        bench=BENCH,
        phase=phase,
        store=store,
        value=value,
        unit=unit,
        better=better,
        block_bytes=block,
        round=number,
        params=params,
    )


class _Dropper(CacheDropper):
    """Drops the volume alone: others on this machine go on with their work."""

    def __init__(self) -> None:
        self.global_drop = False


def _of_rate(
    phase: str, load: str, rate: Rate, block: int, number: int, **params: Any
) -> Sample:
    """Return bytes a second where bytes move, else calls (or keys) a second."""
    if load == "loop":
        return _sample(
            phase, rate.operations, "turns/s", block, number, store="loop", **params
        )
    if load == "memcpy":
        speed = rate.nbytes / 1e9
        return _sample(phase, speed, "GB/s", block, number, store="memcpy", **params)
    if load in ("copy", "put"):
        return _sample(phase, rate.nbytes / 1e9, "GB/s", block, number, **params)
    unit = "keys/s" if load == "contains" else "calls/s"
    return _sample(phase, rate.operations, unit, block, number, **params)


def _jobs(loads: Sequence[str], count: int, nbytes: int, seconds: float) -> list[Job]:
    return [Job(load, count, nbytes, seconds, next(_seeds)) for load in loads]


def threads(parent: Path, plan: Plan, add: Add) -> None:
    """From one thread to eight: copies, views, lookups, puts."""
    for nbytes in (plan.small_block, plan.batch_block):
        count = max(1, plan.dataset // nbytes)
        small = nbytes == plan.small_block
        loads = ["copy", "view", "contains", "put"] if small else ["copy", "put"]
        with _scratch(parent) as folder, _open(folder, plan.dataset, nbytes) as cache:
            for number in range(plan.rounds):
                _fill(cache, count, nbytes)  # again: puts have evicted
                for load, workers in itertools.product(loads, plan.workers):
                    jobs = _jobs([load] * workers, count, nbytes, plan.seconds)
                    rate = Rate.total(run_threads(cache, jobs))
                    phase = f"threads.{load}"
                    add(_of_rate(phase, load, rate, nbytes, number, threads=workers))
                    if load == "put":
                        syncfs(folder)


def processes(parent: Path, plan: Plan, add: Add) -> None:
    """From one process to eight: readers, writers, and half of each."""
    nbytes = plan.batch_block
    count = max(1, plan.dataset // nbytes)
    with (
        _scratch(parent) as folder,
        _open(folder, plan.dataset, nbytes) as cache,
        Team(folder / "kv.cyc", max(plan.workers)) as team,
    ):
        for number in range(plan.rounds):
            for name, workers in itertools.product(
                ("loop", "memcpy", "copy", "contains", "view", "both", "put"),
                plan.workers,
            ):
                if name == "both":
                    loads = [("copy", "put")[place % 2] for place in range(workers)]
                else:
                    loads = [name] * workers
                if name == "both" and workers == 1:
                    continue
                if name != "put":
                    _fill(cache, count, nbytes)
                # The limit copies between fewer blocks, which is no worse for it.
                stored = 16 if name == "memcpy" else count
                jobs = _jobs(loads, stored, nbytes, plan.seconds)
                rates = team.run(jobs)
                for load in dict.fromkeys(loads):
                    total = Rate.total(
                        [
                            rate
                            for rate, job in zip(rates, jobs, strict=True)
                            if job.load == load
                        ]
                    )
                    phase = f"processes.{'both.' if name == 'both' else ''}{load}"
                    params = {"processes": workers}
                    add(_of_rate(phase, load, total, nbytes, number, **params))
                syncfs(folder)


def batches(parent: Path, plan: Plan, add: Add) -> None:
    """From one block a call to 128: puts, copies cold and warm, lookups."""
    dropper = _Dropper()
    for nbytes in (plan.small_block, plan.batch_block):
        most = max(plan.batches)
        count = max(most, plan.dataset // nbytes)
        keys = [generators.key(index) for index in range(count)]
        targets = [memoryview(bytearray(nbytes + 16))[16:] for _ in range(most)]
        data, total = _data(nbytes), count * nbytes
        with _scratch(parent) as folder:
            _open(folder, 2 * total, nbytes).close()
            for number, size in itertools.product(range(plan.rounds), plan.batches):
                path = folder / "kv.cyc"
                seconds = {}
                with Cache.open(path) as cache:
                    cache.clear()
                    seconds["put"] = _write(cache, keys, data, size)
                dropper.drop(folder, [path])
                with Cache.open(path) as cache:
                    seconds["copy_cold"] = _read(cache, keys, targets, size)
                    _read(cache, keys, targets, size)
                    seconds["copy_warm"] = _read(cache, keys, targets, size)
                    for name, spent in seconds.items():
                        phase, speed = f"batch.{name}", total / spent / 1e9
                        add(_sample(phase, speed, "GB/s", nbytes, number, batch=size))
                    if nbytes == plan.small_block:
                        each = _contains(cache, keys, size)
                        phase = "batch.contains"
                        add(_sample(phase, each, "us", nbytes, number, batch=size))


def _write(cache: Cache, keys: Sequence[bytes], data: bytes, size: int) -> float:
    seconds = 0.0
    for group in _groups(keys, size):
        items = [(key, data) for key in group]
        begin = time.perf_counter()
        stored = cache.put_many(items)
        seconds += time.perf_counter() - begin
        if not all(stored):
            raise RuntimeError(f"a put was refused: {cache.stats().process}")
    return seconds


def _read(
    cache: Cache, keys: Sequence[bytes], targets: Sequence[memoryview], size: int
) -> float:
    # Each batch size fills all targets in turn: a buffer that is used again and again
    # stays in the caches of the processor.
    buffers = itertools.cycle(targets)
    seconds = 0.0
    for group in _groups(keys, size):
        into = list(itertools.islice(buffers, len(group)))
        begin = time.perf_counter()
        found = cache.get_many_into(group, into)
        seconds += time.perf_counter() - begin
        if not all(found):
            raise RuntimeError("a block is missing")
    return seconds


def _contains(cache: Cache, keys: Sequence[bytes], size: int) -> float:
    """Return microseconds a key."""
    groups = [b"".join(group) for group in _groups(keys, size)]
    seconds = 0.0
    for _ in range(3):  # the last one counts
        begin = time.perf_counter()
        for group in groups:
            cache.contains_many(group)
        seconds = time.perf_counter() - begin
    return seconds / len(keys) * 1e6


def blocks(parent: Path, plan: Plan, add: Add) -> None:
    """From 64 KiB a block to 32 MiB, and a mix: put, cold copy, warm copy, view."""
    dropper = _Dropper()
    for number in range(plan.rounds):
        for nbytes in (*plan.block_sizes, 0):
            cycle = itertools.cycle((nbytes,) if nbytes else MIX)
            sizes: list[int] = []
            while sum(sizes) < plan.dataset:
                sizes.append(next(cycle))
            with _scratch(parent) as folder:
                for phase, value, unit in _one_block_size(folder, sizes, dropper):
                    add(_sample(f"block.{phase}", value, unit, nbytes, number))


def _one_block_size(
    folder: Path, sizes: Sequence[int], dropper: CacheDropper
) -> Iterator[tuple[str, float, str]]:
    data = memoryview(_data(max(sizes)))
    target = memoryview(bytearray(max(sizes) + 16))[16:]
    keys = [generators.key(index) for index in range(len(sizes))]
    pieces = [data[:nbytes] for nbytes in sizes]
    total, path = sum(sizes), folder / "kv.cyc"
    clock = time.perf_counter
    # Small blocks take a page more each; the mix leaves holes.
    with _open(folder, total * 5 // 4, min(sizes) if len(set(sizes)) > 1 else sizes[0]):
        pass
    with Cache.open(path) as cache:
        begin = clock()
        for key, piece in zip(keys, pieces, strict=True):
            if not cache.put(key, piece):
                raise RuntimeError("a put was refused")
        yield "put", total / (clock() - begin) / 1e9, "GB/s"
    dropper.drop(folder, [path])
    with Cache.open(path) as cache:
        for phase in ("copy_cold", "again", "copy_warm"):
            missed = 0
            begin = clock()
            for key in keys:
                missed += cache.get_into(key, target) is None
            seconds = clock() - begin
            if missed:
                raise RuntimeError(f"{missed} of {len(keys)} blocks are missing")
            if phase != "again":
                yield phase, total / seconds / 1e9, "GB/s"
        laps = -(-4000 // len(keys))
        get = cache.get
        for key in keys:
            get(key)
        begin = clock()
        for _ in range(laps):
            for key in keys:
                get(key)
        yield "view", (clock() - begin) / laps / len(keys) * 1e6, "us"
