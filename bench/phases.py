# SPDX-License-Identifier: Apache-2.0
"""What is timed, one store at a time.

The clock runs over the calls of a store alone. Every 64th block is copied into memory
of its own and compared with what was stored after the clock has stopped: a comparison
between two calls would give the kernel's readahead a head start.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import generators
from bench.machine import CacheDropper, memcpy_limit, settle, syncfs
from bench.stores import Store

__all__ = ["PHASES", "Dataset", "Phase", "Sample", "run_round"]

BATCH = 64
CHECK_EVERY = 64
_VIEW_ROUNDS_MIN = 2000


class Dataset:
    """The blocks of one size, generated and in memory before anything is timed."""

    def __init__(self, nbytes: int, total: int) -> None:
        self.nbytes = nbytes
        self.count = max(1, total // nbytes)
        self.keys = [generators.key(index) for index in range(self.count)]
        self.values: NDArray[np.uint8] = np.empty((self.count, nbytes), dtype=np.uint8)
        group = max(1, (8 << 20) // nbytes)
        for first in range(0, self.count, group):
            indices = range(first, min(first + group, self.count))
            self.values[first : first + len(indices)] = generators.values(
                indices, nbytes
            )
        # Unaligned on purpose: engines hand over what they have.
        self._target = np.zeros(nbytes + 16, dtype=np.uint8)
        self._batch = np.zeros((min(BATCH, self.count), nbytes + 16), dtype=np.uint8)
        self._samples = np.zeros(
            (-(-self.count // CHECK_EVERY), nbytes), dtype=np.uint8
        )

    @property
    def total(self) -> int:
        """Bytes of all values."""
        return self.count * self.nbytes

    @property
    def target(self) -> memoryview:
        """The buffer that copies go to, again and again."""
        return self._target[16:].data

    def batch_targets(self, count: int) -> list[memoryview]:
        """Return that many buffers for a batch."""
        return [row[16:].data for row in self._batch[:count]]

    def targets(self, order: Sequence[int], shift: int) -> list[memoryview]:
        """Return where each block goes: the buffer, or memory apart, to be checked."""
        shared = self.target
        samples = iter(self._samples)
        return [
            next(samples).data if (position + shift) % CHECK_EVERY == 0 else shared
            for position in range(len(order))
        ]

    def check(self, order: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Compare what ``targets`` set apart; the last shared one too."""
        shared = self._target[16:].ctypes.data
        last = len(order) - 1
        for position, (index, target) in enumerate(zip(order, targets, strict=True)):
            found = np.frombuffer(target, dtype=np.uint8)
            apart = found.ctypes.data != shared or position == last
            if apart and not np.array_equal(found, self.values[index]):
                raise RuntimeError(f"block {index} came back with other bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A row of the table."""

    name: str
    label: str
    unit: str  # "GB/s", more is better, or "us", less is
    limit: str | None  # the limit printed beside it: "device", "memcpy" or None


PHASES = (
    Phase("put", "put", "GB/s", "memcpy"),
    Phase("put_synced", "put, then sync and syncfs", "GB/s", None),
    Phase("cold_ordered", "cold copy, stored order", "GB/s", "device"),
    Phase("cold_random", "cold copy, random order", "GB/s", "device"),
    Phase("cold_batch", f"cold copy, batches of {BATCH}", "GB/s", "device"),
    Phase("warm_copy", "warm copy", "GB/s", "memcpy"),
    Phase("warm_view", "warm view, p50", "us", None),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One result of one round."""

    phase: str
    store: str
    value: float


def _put(store: Store, data: Dataset, folder: Path) -> tuple[float, float]:
    """Return seconds of the puts, and with all of it on the device."""
    values = [row.data for row in data.values]
    syncfs(folder)
    begin = time.perf_counter()
    for key, value in zip(data.keys, values, strict=True):
        store.put(key, value)
    written = time.perf_counter() - begin
    store.sync()
    syncfs(folder)
    return written, time.perf_counter() - begin


def _copy(store: Store, data: Dataset, order: Sequence[int], shift: int) -> float:
    targets = data.targets(order, shift)
    work = [
        (data.keys[index], target) for index, target in zip(order, targets, strict=True)
    ]
    get_into = store.get_into
    missed = 0
    begin = time.perf_counter()
    for key, target in work:
        if get_into(key, target) is None:
            missed += 1
    seconds = time.perf_counter() - begin
    if missed:
        raise RuntimeError(f"{store.name}: {missed} of {len(work)} blocks are missing")
    data.check(order, targets)
    return seconds


def _batches(store: Store, data: Dataset) -> float:
    seconds = 0.0
    for first in range(0, data.count, BATCH):
        indices = range(first, min(first + BATCH, data.count))
        keys = [data.keys[index] for index in indices]
        targets = data.batch_targets(len(keys))
        begin = time.perf_counter()
        found = store.get_many_into(keys, targets)
        seconds += time.perf_counter() - begin
        if not found:
            raise RuntimeError(f"{store.name}: blocks are missing")
        # One of each batch, which is one in 64.
        target = np.frombuffer(targets[0], dtype=np.uint8)
        if not np.array_equal(target, data.values[first]):
            raise RuntimeError(f"block {first} came back with other bytes")
    return seconds


def _views(store: Store, data: Dataset) -> float:
    """Return the median microseconds of a view that nobody looks at."""
    view = store.view
    clock = time.perf_counter_ns
    for key in data.keys:  # the first view of a block makes its pages present
        view(key)
    laps = -(-_VIEW_ROUNDS_MIN // data.count)
    times = []
    for _ in range(laps):
        for key in data.keys:
            begin = clock()
            length = view(key)
            times.append(clock() - begin)
            if length != data.nbytes:
                raise RuntimeError(f"{store.name}: a view has {length} bytes")
    return float(np.median(times)) / 1e3


def run_round(
    number: int,
    stores: Sequence[Store],
    data: Dataset,
    folder: Path,
    dropper: CacheDropper,
) -> list[Sample]:
    """Run every phase on every store, phase by phase, from fresh stores to none.

    The order of the stores rotates with the rounds: who comes first differs.
    """
    samples: list[Sample] = []
    settled = data.total * 3 // 2
    turn = number % len(stores)
    order = [*stores[turn:], *stores[:turn]]
    ordered = range(data.count)
    shuffled = list(ordered)
    random.Random(number).shuffle(shuffled)

    def record(phase: str, store: Store, seconds: float) -> None:
        samples.append(Sample(phase, store.name, data.total / seconds / 1e9))

    def cold(phase: str, measure: Callable[[Store], float]) -> None:
        for store in order:
            store.close()
            dropper.drop(folder, store.files())
            settle(folder, settled)
            store.open()
            record(phase, store, measure(store))

    try:
        for store in order:
            store.destroy()
            settle(folder, settled)
            store.open()
            written, synced = _put(store, data, folder)
            record("put", store, written)
            record("put_synced", store, synced)
        cold("cold_ordered", lambda store: _copy(store, data, ordered, number))
        cold("cold_random", lambda store: _copy(store, data, shuffled, number))
        cold("cold_batch", lambda store: _batches(store, data))
        for store in order:
            _copy(store, data, ordered, number)  # warms
            record("warm_copy", store, _copy(store, data, ordered, number))
        memcpy = memcpy_limit(data.values, data.target)
        samples.append(Sample("memcpy", "limit", memcpy))
        for store in order:
            samples.append(Sample("warm_view", store.name, _views(store, data)))
    finally:
        for store in stores:
            _close_quietly(store)
            store.destroy()
    return samples


def _close_quietly(store: Any) -> None:
    """Close a store that may not be open, on the way out of a failed round."""
    try:
        store.close()
    except AttributeError:
        return
