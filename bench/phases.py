# SPDX-License-Identifier: Apache-2.0
"""What kv_bench times, one store at a time.

P1  The clock runs over the calls of a store alone. Blocks and the order of the requests
    are there before it starts.
P2  Every 64th read has its bytes checked: cold ones when the clock has stopped, in a
    buffer of their own; warm ones at once, with the clock of that thread stopped.
P3  A cold phase begins with nothing of the store in memory and the store just opened.
P4  In a round every phase runs on all stores before the next phase begins; who comes
    first rotates with the rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench import generators, readers
from bench.dataset import CHECK_EVERY, ZIPF_DRAWS, Dataset
from bench.machine import CacheDropper, DeviceLimit, settle, syncfs
from bench.records import Better, Sample, Writer
from bench.resident import ResidentCopies
from bench.stores import OURS, Store, StoreError
from cyclone_kv import _core

__all__ = ["BENCH", "PHASES", "Bench", "Phase", "Plan", "run_round"]

BENCH = "kv_bench"

_VIEWS_MIN = 2000
_CLOCK_BYTES = 1 << 20  # a thread looks at the clock after about so many copied bytes
_CLOCK_VIEWS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A row of the tables."""

    name: str
    label: str
    unit: str
    better: Better
    limit: str | None = None
    """The limit measured beside it, a store of its own in the records."""


PHASES = (
    Phase("put", "put", "GB/s", "higher"),
    Phase("put_synced", "put, then sync and syncfs", "GB/s", "higher"),
    Phase("cold_first", "cold, first touch after the puts", "GB/s", "higher", "device"),
    Phase("cold_ordered", "cold copy, stored order", "GB/s", "higher", "device"),
    Phase("cold_ordered_p50", "the same, p50", "us", "lower"),
    Phase("cold_ordered_p99", "the same, p99", "us", "lower"),
    Phase("cold_random", "cold copy, random order", "GB/s", "higher", "device"),
    Phase("cold_batch", "cold copy, batches", "GB/s", "higher", "device"),
    Phase("warm_copy", "warm copy", "GB/s", "higher", "memcpy"),
    Phase("warm_view", "warm view, a byte a page read", "ops/s", "higher"),
    Phase("view_p50", "warm view, not looked at, p50", "us", "lower"),
    Phase("processes_copy", "warm copy, processes", "GB/s", "higher"),
    Phase("processes_view", "warm view, processes", "ops/s", "higher"),
)

_BY_NAME = {phase.name: phase for phase in PHASES}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything."""

    rounds: int
    bytes_max: int
    """Of the blocks of one size."""
    blocks_max: int
    warm_up_seconds: float
    warm_seconds: float
    copy_threads: tuple[int, ...]
    view_threads: tuple[int, ...]
    processes: int
    process_blocks: tuple[int, ...]
    """Block sizes that several processes read."""
    first_touch: bool
    capacity: int | None
    """Of our volume; None makes it as large as the blocks need."""
    fio_seconds: float

    def count(self, nbytes: int) -> int:
        """Return how many blocks of a size there are."""
        return max(1, min(self.blocks_max, self.bytes_max // nbytes))


@dataclasses.dataclass(slots=True)
class Bench:
    """Where a run happens and where its samples go."""

    folder: Path
    dropper: CacheDropper
    writer: Writer
    plan: Plan

    def record(
        self,
        phase: str,
        store: str,
        data: Dataset,
        number: int,
        value: float,
        **params: Any,
    ) -> None:
        """Write a sample of a phase."""
        about = _BY_NAME[phase]
        self.writer.sample(
            Sample(
                bench=BENCH,
                phase=phase,
                store=store,
                value=value,
                unit=about.unit,
                better=about.better,
                block_bytes=data.nbytes,
                round=number,
                params=params,
            )
        )


def _put(store: Store, data: Dataset, folder: Path) -> tuple[float, float]:
    """Return seconds of the puts, and with all of it on the device."""
    work = [(key, row.data) for key, row in zip(data.keys, data.values, strict=True)]
    put = store.put
    syncfs(folder)
    begin = time.perf_counter()
    for key, value in work:
        put(key, value)
    written = time.perf_counter() - begin
    store.sync()
    syncfs(folder)
    return written, time.perf_counter() - begin


def _copy(
    store: Store, data: Dataset, order: Sequence[int], shift: int
) -> tuple[float, list[int]]:
    """Copy blocks one by one; return seconds, and nanoseconds of each."""
    targets = data.spread_targets(order, shift, store.target_alignment)
    work = [
        (data.keys[index], target) for index, target in zip(order, targets, strict=True)
    ]
    get_into, clock = store.get_into, time.perf_counter_ns
    ends = []
    missed = 0
    begin = clock()
    for key, target in work:
        if get_into(key, target) is None:
            missed += 1
        ends.append(clock())
    if missed:
        raise StoreError(f"{store.name}: {missed} of {len(work)} blocks are missing")
    data.check_spread(order, targets, shift)
    times = [end - start for start, end in itertools.pairwise([begin, *ends])]
    return (ends[-1] - begin) / 1e9, times


def _batches(store: Store, data: Dataset) -> float:
    targets = data.targets(data.batch, store.target_alignment)
    seconds = 0.0
    for first in range(0, data.count, data.batch):
        indices = range(first, min(first + data.batch, data.count))
        keys = [data.keys[index] for index in indices]
        some = targets[: len(keys)]
        begin = time.perf_counter()
        found = store.get_many_into(keys, some)
        seconds += time.perf_counter() - begin
        if not found:
            raise StoreError(f"{store.name}: blocks are missing")
        for place in range(0, len(keys), CHECK_EVERY):
            data.check(first + place, some[place])
    return seconds


def _views(store: Store, data: Dataset) -> float:
    """Return the median microseconds of a view that nobody looks at."""
    view, clock = store.view, time.perf_counter_ns
    for key in data.keys:  # the first view of a block makes its pages present
        view(key)
    times = []
    for _ in range(-(-_VIEWS_MIN // data.count)):
        for key in data.keys:
            begin = clock()
            length = view(key)
            times.append(clock() - begin)
            if length != data.nbytes:
                raise StoreError(f"{store.name}: a view has {length} bytes")
    return float(np.median(times)) / 1e3


class _Copies(Protocol):
    def get_into(self, key: bytes, target: memoryview) -> int | None: ...


class _Rate:
    """Runs one operation in some threads for a time; operations in a second."""

    def __init__(self, plan: Plan, data: Dataset, step: int) -> None:
        self._plan = plan
        self._data = data
        self._step = step
        self._failures: list[BaseException] = []

    def measure(
        self, threads: int, make: Callable[[int], Callable[[int, bool], float]]
    ) -> float:
        """``make`` returns the operation of a thread.

        That takes the index of a block and whether to check its bytes, and returns the
        seconds that the check took.
        """
        rates: list[float] = []
        barrier = threading.Barrier(threads)

        def run(thread: int) -> None:
            try:
                operation = make(thread)
                order = itertools.cycle(
                    generators.zipf_order(self._data.count, thread, ZIPF_DRAWS)
                )
                barrier.wait()
                self._loop(operation, order, self._plan.warm_up_seconds)
                barrier.wait()
                rates.append(self._loop(operation, order, self._plan.warm_seconds))
            except BaseException as error:  # told to the caller below
                barrier.abort()
                self._failures.append(error)

        workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for failure in self._failures:
            if not isinstance(failure, threading.BrokenBarrierError):
                raise failure
        return sum(rates)

    def _loop(
        self,
        operation: Callable[[int, bool], float],
        order: Any,
        seconds: float,
    ) -> float:
        """Return operations a second of active time."""
        clock = time.perf_counter
        step = self._step
        done, excluded = 0, 0.0
        begin = now = clock()
        while now - begin < seconds:
            for index in itertools.islice(order, step):
                done += 1
                excluded += operation(index, done % CHECK_EVERY == 0)
            now = clock()
        return done / max(now - begin - excluded, 1e-9)


def _copier(
    store: _Copies, data: Dataset, targets: Sequence[memoryview]
) -> Callable[[int], Callable[[int, bool], float]]:
    keys, clock = data.keys, time.perf_counter

    def make(thread: int) -> Callable[[int, bool], float]:
        target, get_into = targets[thread], store.get_into

        def operation(index: int, check: bool) -> float:  # noqa: FBT001
            if get_into(keys[index], target) is None:
                raise StoreError("a block is missing")
            if not check:
                return 0.0
            begin = clock()
            data.check(index, target)
            return clock() - begin

        return operation

    return make


def _viewer(
    store: Store, data: Dataset
) -> Callable[[int], Callable[[int, bool], float]]:
    keys, clock, view = data.keys, time.perf_counter, store.view_touch

    def make(thread: int) -> Callable[[int, bool], float]:
        def operation(index: int, check: bool) -> float:  # noqa: FBT001
            touched = view(keys[index])
            if touched is None:
                raise StoreError("a block is missing")
            if not check:
                return 0.0
            begin = clock()
            if _core.crc32c(touched) != data.touched_checksums[index]:
                raise StoreError(f"the view of block {index} has other bytes")
            return clock() - begin

        return operation

    return make


def _warm(bench: Bench, number: int, order: Sequence[Store], data: Dataset) -> None:
    plan = bench.plan
    step = max(1, _CLOCK_BYTES // data.nbytes)
    threads_max = max(1, *plan.copy_threads)
    for store in order:
        _copy(store, data, range(data.count), number)  # warms
        targets = data.targets(threads_max, store.target_alignment)
        for threads in plan.copy_threads:
            rate = _Rate(plan, data, step).measure(
                threads, _copier(store, data, targets)
            )
            speed = rate * data.nbytes / 1e9
            bench.record("warm_copy", store.name, data, number, speed, threads=threads)
        if store.name == OURS:
            # The limit: the same pages, resident and mapped, to the same buffers.
            with ResidentCopies(store, data.keys) as limit:
                for threads in plan.copy_threads:
                    rate = _Rate(plan, data, step).measure(
                        threads, _copier(limit, data, targets)
                    )
                    speed = rate * data.nbytes / 1e9
                    bench.record(
                        "warm_copy", "memcpy", data, number, speed, threads=threads
                    )
        for threads in plan.view_threads:
            rate = _Rate(plan, data, _CLOCK_VIEWS).measure(
                threads, _viewer(store, data)
            )
            bench.record("warm_view", store.name, data, number, rate, threads=threads)
        bench.record("view_p50", store.name, data, number, _views(store, data))


def _processes(
    bench: Bench, number: int, order: Sequence[Store], data: Dataset
) -> None:
    plan = bench.plan
    for store in order:
        if not store.processes:
            continue
        store.close()
        copies, views = readers.measure(
            store,
            data,
            plan.processes,
            warm_up_seconds=plan.warm_up_seconds,
            seconds=plan.warm_seconds,
        )
        params = {"processes": plan.processes}
        speed = copies * data.nbytes / 1e9
        bench.record("processes_copy", store.name, data, number, speed, **params)
        bench.record("processes_view", store.name, data, number, views, **params)


def run_round(
    bench: Bench,
    number: int,
    stores: Sequence[Store],
    data: Dataset,
    device: DeviceLimit,
) -> None:
    """Run every phase on every store, from fresh stores to none."""
    plan = bench.plan
    settled = data.total * 3 // 2
    turn = number % len(stores)
    order = [*stores[turn:], *stores[:turn]]
    ordered = range(data.count)
    shuffled = list(ordered)
    random.Random(number).shuffle(shuffled)

    def gigabytes(seconds: float) -> float:
        return data.total / seconds / 1e9

    def cold(
        phase: str,
        measure: Callable[[Store], float],
        *,
        reopen: bool = True,
        **params: Any,
    ) -> None:
        for store in order:
            if reopen:
                store.close()
            bench.dropper.drop(bench.folder, store.files())
            settle(bench.folder, settled)
            if reopen:
                store.open()
            speed = gigabytes(measure(store))
            bench.record(phase, store.name, data, number, speed, **params)
        limit = device.measure()
        if limit is not None:
            bench.record(phase, "device", data, number, limit, **params)

    def copy_ordered(store: Store) -> float:
        seconds, times = _copy(store, data, ordered, number)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            place = int(share * (len(times) - 1))
            value = sorted(times)[place] / 1e3
            bench.record(f"cold_ordered_{name}", store.name, data, number, value)
        return seconds

    try:
        for store in order:
            store.destroy()
            settle(bench.folder, settled)
            store.open()
            written, synced = _put(store, data, bench.folder)
            bench.record("put", store.name, data, number, gigabytes(written))
            bench.record("put_synced", store.name, data, number, gigabytes(synced))
        if plan.first_touch:
            cold(
                "cold_first",
                lambda store: _copy(store, data, ordered, number)[0],
                reopen=False,
            )
        cold("cold_ordered", copy_ordered)
        cold("cold_random", lambda store: _copy(store, data, shuffled, number)[0])
        cold("cold_batch", lambda store: _batches(store, data), batch=data.batch)
        _warm(bench, number, order, data)
        if data.nbytes in plan.process_blocks:
            _processes(bench, number, order, data)
    finally:
        for store in stores:
            store.destroy()
