# SPDX-License-Identifier: Apache-2.0
"""What a call costs that does not move bytes, by pytest-benchmark.

``python -m bench --suite calls`` runs this; ``pytest bench/calls`` does too. A round is
a loop over keys that no other round has, in random order, so that most of what a call
touches is in no cache of the processor; ``divide_by`` says how many calls or keys a
round has. The loop itself is measured too, as ``nothing``.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench import generators
from bench.calls import volume
from cyclone_kv import Cache

CALLS = 1000
KEYS = 10_000
CLOCKED = 20_000


class Meter:
    """Measures one call with the same keys as all others."""

    def __init__(self, benchmark: BenchmarkFixture, entries: int, rounds: int) -> None:
        self._benchmark = benchmark
        self._entries = entries
        self._rounds = rounds

    def first(self, call: Callable[[Any], object], things: Sequence[Any]) -> None:
        """Measure ``call(thing)`` once with each thing, 1000 of them a round."""
        self.each(call, things, clocked=False)

    def each(
        self,
        call: Callable[[Any], object],
        things: Sequence[Any],
        *,
        clocked: bool = True,
    ) -> None:
        """Measure ``call(thing)``, 1000 of them a round, and 20 000 one by one."""

        def run(group: Sequence[Any]) -> None:
            for thing in group:
                call(thing)

        groups = itertools.cycle(
            [things[first : first + CALLS] for first in range(0, len(things), CALLS)]
        )
        self._run(run, lambda: next(groups), len(things[:CALLS]))
        if clocked:
            self._clock(call, things[:CLOCKED])

    def many(self, call: Callable[[Any], object], groups: Iterator[Any]) -> None:
        """Measure ``call(keys)``; a round is one call of 10 000 keys."""
        self._run(call, lambda: next(groups), KEYS)

    def alone(self, call: Callable[[], object], calls: int = CALLS) -> None:
        """Measure a call without an argument."""
        self.each(lambda _: call(), range(calls))

    def _run(
        self, call: Callable[[Any], object], given: Callable[[], Any], divide_by: int
    ) -> None:
        self._benchmark.extra_info["divide_by"] = divide_by
        self._benchmark.extra_info["entries"] = self._entries
        self._benchmark.pedantic(  # type: ignore[no-untyped-call]
            call,
            setup=lambda: ((given(),), {}),
            rounds=self._rounds,
            iterations=1,
            warmup_rounds=2,
        )

    def _clock(self, call: Callable[[Any], object], things: Sequence[Any]) -> None:
        """Time each call alone: its percentiles, with the clock's own cost in them."""
        clock = time.perf_counter_ns
        times = []
        for thing in things:
            begin = clock()
            call(thing)
            times.append(clock() - begin)
        times.sort()
        for name, part in (("p50", 0.5), ("p99", 0.99)):
            value = times[int(part * (len(times) - 1))] / 1e3
            self._benchmark.extra_info[f"clocked_{name}_us"] = value


@pytest.fixture
def meter(benchmark: BenchmarkFixture, entries: int, rounds: int) -> Meter:
    """Return a meter for the call of this test."""
    return Meter(benchmark, entries, rounds)


@pytest.fixture(scope="module")
def keys(entries: int, rounds: int) -> list[bytes]:
    """Keys of stored blocks, no object twice."""
    return volume.asked(entries, max(CLOCKED, (rounds + 2) * CALLS))


@pytest.fixture(scope="module")
def key_groups(entries: int, rounds: int) -> list[list[bytes]]:
    """Keys of stored blocks, 10 000 together."""
    found = volume.asked(entries, 8 * KEYS)
    return [found[first : first + KEYS] for first in range(0, len(found), KEYS)]


def test_nothing(meter: Meter, keys: list[bytes]) -> None:
    """The loop, with a call that does nothing."""
    meter.each(bool, keys)


def test_memoryview(meter: Meter, keys: list[bytes]) -> None:
    """A view of each of as many objects: the least that a view can cost."""
    meter.each(memoryview, keys)


def test_dict_lookup(meter: Meter, keys: list[bytes], entries: int) -> None:
    """A dict with as many keys."""
    stored = {generators.key(number): number for number in range(entries)}
    meter.each(stored.get, keys)


def test_view_first(meter: Meter, verified: Cache, keys: list[bytes]) -> None:
    """The first view of a block in this process, which maps its pages."""
    # Keys come again now and then; with 500 000 entries not often.
    meter.first(verified.get, keys)


def test_view(meter: Meter, cache: Cache, keys: list[bytes]) -> None:
    """A view taken and given back."""
    meter.each(cache.get, keys)


def test_get_absent(
    meter: Meter, cache: Cache, keys: list[bytes], entries: int
) -> None:
    """A view of what is not there."""
    meter.each(cache.get, volume.absent_keys(entries, len(keys)))


def test_contains(meter: Meter, cache: Cache, keys: list[bytes]) -> None:
    """One key."""
    meter.each(cache.contains, keys)


def test_contains_many(
    meter: Meter, cache: Cache, key_groups: list[list[bytes]]
) -> None:
    """10 000 keys in a list."""
    meter.many(cache.contains_many, itertools.cycle(key_groups))


def test_contains_many_rows(
    meter: Meter, cache: Cache, key_groups: list[list[bytes]]
) -> None:
    """10 000 keys in one buffer."""
    rows = [b"".join(group) for group in key_groups]
    meter.many(cache.contains_many, itertools.cycle(rows))


def test_longest_prefix(
    meter: Meter, cache: Cache, key_groups: list[list[bytes]]
) -> None:
    """10 000 keys in a list, all there."""
    meter.many(cache.longest_prefix, itertools.cycle(key_groups))


def test_longest_prefix_rows(
    meter: Meter, cache: Cache, key_groups: list[list[bytes]]
) -> None:
    """10 000 keys in one buffer."""
    rows = [b"".join(group) for group in key_groups]
    assert cache.longest_prefix(rows[0]) == KEYS
    meter.many(cache.longest_prefix, itertools.cycle(rows))


def test_dict_lookup_many(
    meter: Meter, key_groups: list[list[bytes]], entries: int
) -> None:
    """The same 10 000 keys in a dict, by ``map``."""
    stored = {generators.key(number): number for number in range(entries)}
    meter.many(
        lambda group: list(map(stored.__contains__, group)), itertools.cycle(key_groups)
    )


def test_touch(meter: Meter, cache: Cache, key_groups: list[list[bytes]]) -> None:
    """10 000 keys in a list."""
    meter.many(cache.touch, itertools.cycle(key_groups))


def test_put_present(meter: Meter, cache: Cache, keys: list[bytes]) -> None:
    """A block that is stored already."""
    value = bytes(volume.BLOCK_BYTES)
    meter.each(lambda key: cache.put(key, value), keys)


def test_get_into(meter: Meter, cache: Cache, keys: list[bytes]) -> None:
    """A copy of a page."""
    target = bytearray(volume.BLOCK_BYTES)
    meter.each(lambda key: cache.get_into(key, target), keys)


def test_len(meter: Meter, cache: Cache) -> None:
    """How many blocks there are."""
    meter.alone(cache.__len__)


def test_stats(meter: Meter, cache: Cache) -> None:
    """All statistics, as Python objects."""
    meter.alone(cache.stats, calls=200)


def test_events(meter: Meter, cache: Cache) -> None:
    """The 64 newest events."""
    last = volume.make_events(cache)
    meter.alone(lambda: cache.events(last - 64, limit=64), calls=200)


def test_open_handle(meter: Meter, cache: Cache, volume_path: Path) -> None:
    """One more handle in a process that has the volume open, and its end."""
    meter.alone(lambda: volume.open_cache(volume_path).close(), calls=20)


def test_keys_are_random_and_stored(cache: Cache, keys: list[bytes]) -> None:
    """What the numbers rest on."""
    assert all(cache.contains_many(keys))
    assert random.Random(1).sample(keys, 100) != keys[:100]
