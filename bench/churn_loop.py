# SPDX-License-Identifier: Apache-2.0
"""kv_churn v1: get or insert, by threads that each follow a stream of their own.

What the clocks see is decided here:

  L1  A hit's time is that of ``get_into``, an insert's that of ``insert``; a miss's
      look-up belongs to neither, but to the active time.
  L2  A thread's active time is all of its time but the making of blocks, the drawing
      of requests and the check of one hit in 64 against the bytes that it must have.
  L3  Requests are drawn before a phase. A thread that runs out draws more, outside its
      active time.
  L4  A refused insert counts as such, not as an insert and not in their latencies.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

from bench import generators
from bench.churn_blocks import BlockMaker, equal
from bench.churn_tiers import Block, Tier

__all__ = ["CHECK_EVERY", "Phase", "ThreadResult", "Worker", "percentile", "run_phase"]

CHECK_EVERY = 64
_DRAW = 64
_NEVER = 1 << 62


def percentile(ordered: Sequence[int], q: float) -> int | None:
    """Return element floor(q * (n - 1)) of sorted values, None of none."""
    return ordered[int(q * (len(ordered) - 1))] if ordered else None


@dataclasses.dataclass(slots=True)
class ThreadResult:
    """What one thread did in one phase; times in nanoseconds."""

    gets: int = 0
    refused: int = 0
    checked: int = 0
    active_ns: int = 0
    hit_ns: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    hit_ends_ns: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    insert_ns: array[int] = dataclasses.field(default_factory=lambda: array("q"))


@dataclasses.dataclass(slots=True)
class Phase:
    """When a phase ends: at a time, or at a number of inserts of all threads.

    ``inserted`` is counted without a lock: what gets lost makes the phase longer by as
    much.
    """

    seconds: float | None = None
    inserts: int | None = None
    begin_ns: int = 0
    inserted: int = 0
    failure: BaseException | None = None

    def deadline_ns(self) -> int:
        """Return when it ends at the latest."""
        if self.seconds is None:
            return _NEVER
        return self.begin_ns + int(self.seconds * 1e9)

    def full(self) -> bool:
        """Return whether enough was inserted."""
        return self.inserts is not None and self.inserted >= self.inserts


class Worker:
    """One thread's stream and buffers, which outlast a phase."""

    def __init__(
        self,
        tier: Tier,
        maker: BlockMaker,
        stream: Iterator[int],
        *,
        header_bytes: int,
    ) -> None:
        self._tier = tier
        self._maker = maker
        self._stream = stream
        self._drawn: Iterator[tuple[int, bytes]] = iter(())
        self._block = Block(maker.nbytes, header_bytes)
        self._target = Block(maker.nbytes, 0).payload
        self._hits = 0

    def draw(self, count: int) -> None:
        """Draw that many requests more (L3)."""
        more = [
            (index, generators.key(index))
            for index in itertools.islice(self._stream, count)
        ]
        self._drawn = itertools.chain(self._drawn, more)

    def run(self, phase: Phase) -> ThreadResult:
        """Get or insert until the phase ends."""
        result = ThreadResult()
        tier, block, target = self._tier, self._block, self._target
        clock = time.perf_counter_ns
        deadline = phase.deadline_ns()
        excluded = 0
        begin = end = clock()
        while end < deadline and not phase.full():
            request = next(self._drawn, None)
            if request is None:
                before = clock()
                self.draw(_DRAW)
                request = next(self._drawn)
                excluded += clock() - before
            index, key = request
            before = clock()
            found = tier.get_into(key, target)
            end = clock()
            result.gets += 1
            if found:
                result.hit_ns.append(end - before)
                result.hit_ends_ns.append(end - phase.begin_ns)
                self._hits += 1
                if self._hits % CHECK_EVERY == 0:
                    self._check(index, key)
                    result.checked += 1
                    excluded += clock() - end
                continue
            self._make(index, key)
            before = clock()
            excluded += before - end
            stored = tier.insert(key, block)
            end = clock()
            if stored:
                result.insert_ns.append(end - before)
                phase.inserted += 1
            else:
                result.refused += 1
        result.active_ns = clock() - begin - excluded
        return result

    def _make(self, index: int, key: bytes) -> None:
        header = self._block.header
        header[:] = (key * 2)[: len(header)]
        self._maker.fill(index, self._block.payload)

    def _check(self, index: int, key: bytes) -> None:
        self._make(index, key)
        if not equal(self._block.payload, self._target):
            raise RuntimeError(f"block {index} came back with other bytes")


def run_phase(
    workers: Sequence[Worker],
    phase: Phase,
    *,
    on_start: Callable[[], None] = lambda: None,
) -> list[ThreadResult]:
    """Run all workers at once, each in a thread; the first failure is raised."""
    results: list[ThreadResult | None] = [None] * len(workers)

    def start() -> None:
        on_start()
        phase.begin_ns = time.perf_counter_ns()

    barrier = threading.Barrier(len(workers), action=start)

    def follow(number: int) -> None:
        try:
            barrier.wait()
            results[number] = workers[number].run(phase)
        except BaseException as error:
            phase.failure = phase.failure or error
            phase.inserts = 0  # the others stop too
            barrier.abort()

    threads = [
        threading.Thread(target=follow, args=(number,))
        for number in range(len(workers))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if phase.failure is not None:
        raise phase.failure
    return [result for result in results if result is not None]
