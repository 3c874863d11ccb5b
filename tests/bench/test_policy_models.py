# SPDX-License-Identifier: Apache-2.0
"""The models in C, against plain ones in Python and against what was published."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict, deque

import pytest

for needed in ("click", "numpy", "rich"):
    pytest.importorskip(needed)

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from bench import generators  # noqa: E402
from bench.policy import policies, published, workloads  # noqa: E402
from bench.policy.native import (  # noqa: E402
    Arm,
    Filter,
    Kind,
    Options,
    Stream,
    churn_indices,
    replay,
    warm_up,
)
from bench.policy.search import CANDIDATES, Judge  # noqa: E402

KEYS = st.lists(st.integers(0, 11), min_size=80, max_size=300)
CHAINS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=20, max_size=80
)


def single(keys):
    return Stream(np.array(keys, dtype=np.uint32), None, 12)


def chains(paths):
    """Chains whose blocks are named by the path that leads to them."""
    names = {}
    blocks, ends = [], []
    for path in paths:
        for length in range(1, len(path) + 1):
            blocks.append(names.setdefault(tuple(path[:length]), len(names)))
        ends.append(len(blocks))
    return Stream(
        np.array(blocks, dtype=np.uint32), np.array(ends, dtype=np.uint64), len(names)
    )


def requests(stream):
    ends = range(1, len(stream.blocks) + 1) if stream.ends is None else stream.ends
    begin = 0
    for end in ends:
        yield stream.blocks[begin:end].tolist()
        begin = int(end)


class PlainLru:
    def __init__(self, capacity):
        self.capacity = capacity
        self.held = OrderedDict()

    def hit(self, key):
        self.held.move_to_end(key)

    def put(self, key):
        if len(self.held) == self.capacity:
            self.held.popitem(last=False)
        self.held[key] = True


class PlainClock:
    """Stripes as lists of [key, heat]; the front is at the cursor."""

    def __init__(self, capacity, stripes, counter_max):
        self.counter_max = counter_max
        stripes = min(stripes, capacity)
        sizes = [capacity // stripes + (s < capacity % stripes) for s in range(stripes)]
        self.rings = [deque([None, 0] for _ in range(size)) for size in sizes]
        self.times = [0] * stripes  # in 2**-32 of a lap, rounded down at each put

    @property
    def held(self):
        return {key for ring in self.rings for key, _ in ring if key is not None}

    def hit(self, key):
        for slot in itertools.chain(*self.rings):
            if slot[0] == key:
                slot[1] = min(slot[1] + 1, self.counter_max)

    def put(self, key):
        number = self.times.index(min(self.times))
        ring = self.rings[number]
        for walked in itertools.count(1):
            slot = ring.popleft()
            if slot[0] is None or slot[1] == 0:
                self.times[number] += (walked << 32) // (len(ring) + 1)
                ring.append([key, 0])
                return slot[0]
            slot[1] -= 1
            ring.append(slot)


class PlainSecondTouch:
    def __init__(self, capacity, ghost):
        self.clock = PlainClock(capacity, 1, 2)
        self.capacity = capacity
        self.ghost = OrderedDict()
        self.log = []
        self.room = ghost

    @property
    def held(self):
        return self.clock.held

    def hit(self, key):
        self.clock.hit(key)

    def remember(self, key):
        self.log.append(key)

    def remembers(self, key):
        recent = self.log[-self.room :] if self.room else []
        return key in recent

    def put(self, key):
        full = len(self.held) == self.capacity
        if full and not self.remembers(key):
            self.remember(key)
            return
        self.log = [None if other == key else other for other in self.log]
        victim = self.clock.put(key)
        if victim is not None:
            self.remember(victim)


class PlainRetention:
    def __init__(self, capacity, chunks):
        self.slots = [None] * capacity
        self.chunk = -(-capacity // chunks)
        self.written = self.frontier = 0

    @property
    def held(self):
        return {key for key in self.slots if key is not None}

    def hit(self, key):
        pass

    def clean(self):
        end = min(self.frontier + self.chunk, len(self.slots))
        self.slots[self.frontier : end] = [None] * (end - self.frontier)
        self.frontier = end

    def put(self, key):
        if self.written == len(self.slots):
            self.written = self.frontier = 0
        if self.written == self.frontier:
            self.clean()
        self.slots[self.written] = key
        self.written += 1
        ahead = self.frontier - self.written
        if self.frontier < len(self.slots) and ahead < self.chunk // 2 + 1:
            self.clean()


class PlainFlush:
    def __init__(self, capacity):
        self.capacity = capacity
        self.held = set()

    def hit(self, key):
        pass

    def put(self, key):
        if len(self.held) == self.capacity:
            self.held.clear()
        self.held.add(key)


class PlainSieve:
    def __init__(self, capacity):
        self.capacity = capacity
        self.queue = []  # the newest first
        self.marked = set()
        self.hand = None

    @property
    def held(self):
        return self.queue

    def hit(self, key):
        self.marked.add(key)

    def put(self, key):
        if len(self.queue) == self.capacity:
            at = len(self.queue) - 1 if self.hand is None else self.hand
            while self.queue[at] in self.marked:
                self.marked.remove(self.queue[at])
                at = at - 1 if at > 0 else len(self.queue) - 1
            del self.queue[at]
            self.hand = at - 1 if at > 0 else None
        self.queue.insert(0, key)
        if self.hand is not None:
            self.hand += 1


def plain_hits(stream, model, *, head_first=False):
    hits = 0
    for keys in requests(stream):
        found = 0
        while found < len(keys) and keys[found] in model.held:
            found += 1
        hits += found
        first, rest = keys[:found], keys[found:]
        if not head_first:
            first.reverse()
            rest.reverse()
        for key in first:
            model.hit(key)
        for key in rest:
            if key not in model.held:
                model.put(key)
    return hits


CASES = {
    "LRU": (Options(kind=Kind.LRU), PlainLru),
    "FIFO": (Options(kind=Kind.CLOCK, counter_max=0), lambda c: PlainClock(c, 1, 0)),
    "CLOCK": (Options(kind=Kind.CLOCK, counter_max=1), lambda c: PlainClock(c, 1, 1)),
    "GCLOCK3, 2 stripes": (
        Options(kind=Kind.CLOCK, counter_max=3, stripes=2, lead=0, search_max=0),
        lambda c: PlainClock(c, 2, 3),
    ),
    "second touch": (
        Options(kind=Kind.DUEL, arms=(Arm(filter=Filter.SECOND_TOUCH),)),
        lambda c: PlainSecondTouch(c, c),
    ),
    "retention": (
        Options(kind=Kind.RETENTION, chunks=2),
        lambda c: PlainRetention(c, 2),
    ),
    "flush": (Options(kind=Kind.FLUSH), PlainFlush),
    "SIEVE": (Options(kind=Kind.SIEVE), PlainSieve),
}


@pytest.mark.parametrize("name", CASES)
@given(keys=KEYS, capacity=st.integers(1, 12))
@settings(max_examples=40)
def test_single_gets_hit_as_in_a_plain_model(name, keys, capacity):
    options, plain = CASES[name]
    stream = single(keys)
    assert replay(stream, options, capacity).hits == plain_hits(stream, plain(capacity))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_first", [False, True])
@given(paths=CHAINS, capacity=st.integers(1, 40))
@settings(max_examples=30)
def test_chains_hit_as_in_a_plain_model(name, head_first, paths, capacity):
    options, plain = CASES[name]
    options = Options(**{**vars_of(options), "head_first": head_first})
    stream = chains(paths)
    expected = plain_hits(stream, plain(capacity), head_first=head_first)
    assert replay(stream, options, capacity).hits == expected


def vars_of(options):
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def best_hits(keys, capacity):
    """Try every choice: after a miss bypass, or store in place of any."""

    @functools.cache
    def best(at, held):
        if at == len(keys):
            return 0
        key = keys[at]
        if key in held:
            return 1 + best(at + 1, held)
        choices = [held]
        if len(held) < capacity:
            choices.append(held | {key})
        choices += [held - {victim} | {key} for victim in held]
        return max(best(at + 1, choice) for choice in choices)

    return best(0, frozenset())


@given(
    keys=st.lists(st.integers(0, 5), min_size=1, max_size=14),
    capacity=st.integers(1, 4),
)
def test_minimum_is_the_best_of_all_choices(keys, capacity):
    outcome = replay(single(keys), Options(kind=Kind.MINIMUM), capacity)
    assert outcome.hits == best_hits(tuple(keys), capacity)


EVERY = {**policies.OURS, **policies.OTHERS, **CANDIDATES}


@pytest.mark.parametrize("name", EVERY)
@given(paths=CHAINS, capacity=st.integers(1, 60))
@settings(max_examples=20)
def test_no_policy_hits_more_than_the_bound_and_counts_add_up(name, paths, capacity):
    stream = chains(paths)
    if EVERY[name].by_key:
        capacity *= EVERY[name].stripes
    outcome = replay(stream, EVERY[name], capacity)
    bound = replay(stream, Options(kind=Kind.MINIMUM), capacity)
    assert outcome.accesses == len(stream.blocks)
    assert outcome.hits <= bound.hits
    assert outcome.writes <= outcome.offers


@pytest.mark.parametrize("name", EVERY)
def test_what_fits_stays(name):
    """A ring that holds all of a stream misses each block once (P1 from above)."""
    stream = single(list(range(12)) * 5)
    if name.startswith("W-TinyLFU"):
        pytest.skip("its window is apart from its main part")
    stripes = 16 if name == "retain/64" else 1
    outcome = replay(stream, EVERY[name], 12 * 16 * stripes)
    assert outcome.hits == len(stream.blocks) - 12


@pytest.mark.parametrize("name", EVERY)
def test_the_same_stream_gives_the_same_result(name):
    stream = single(np.random.default_rng(5).integers(12, size=3000).tolist())
    capacity = 5 * (EVERY[name].stripes if EVERY[name].by_key else 1)
    first, second = (replay(stream, EVERY[name], capacity) for _ in range(2))
    assert first == second


def test_a_loop_just_above_capacity_is_lost_on_a_clock_but_not_on_prefix_eviction():
    load = next(load for load in workloads.drifting(512, 60_000) if "1.25" in load.name)
    run = functools.partial(replay, load.stream, capacity=load.capacity)
    assert run(policies.engine_clock(), from_request=load.from_request).hits == 0
    learned = run(policies.prefix(), from_request=load.from_request)
    assert learned.hit_ratio > 0.6  # the bound is 0.8


def test_prefix_eviction_keeps_the_head_of_a_chain_that_is_longer_than_the_tier():
    chain = list(range(40))
    stream = Stream(
        np.array(chain * 30, dtype=np.uint32),
        np.arange(40, 1201, 40, dtype=np.uint64),
        40,
    )
    clock = replay(stream, policies.engine_clock(1), 20)
    prefix = replay(stream, policies.prefix(stripes=1), 20)
    assert prefix.hits > clock.hits
    assert prefix.hits >= 28 * 16  # of 20 that fit


def test_prefix_eviction_leaves_no_gaps():
    load = workloads.trace(None, 8)
    prefix = replay(load.stream, policies.prefix(), load.capacity)
    described = replay(load.stream, policies.prefix(flags=0), load.capacity)
    by_key = replay(
        load.stream, Options(kind=Kind.CLOCK, stripes=16, by_key=True), load.capacity
    )
    assert prefix.stranded == described.stranded == 0
    assert by_key.stranded > by_key.accesses // 100


def test_tail_first_strands_less_than_head_first():
    load = workloads.trace(None, 8)
    tail, head = (
        replay(
            load.stream,
            Options(kind=Kind.CLOCK, stripes=4, head_first=head_first),
            load.capacity,
        )
        for head_first in (False, True)
    )
    assert tail.stranded < head.stranded
    assert tail.hits > head.hits


def test_adaptive_admission_follows_the_better_arm():
    scan = workloads.churn(2 << 20, 1 << 30, scan=True, gets=100_000)
    phases = next(x for x in workloads.drifting(1024, 100_000) if x.name == "phases")

    def ratio(load, options):
        from_request = load.from_request
        outcome = replay(load.stream, options, load.capacity, from_request=from_request)
        return outcome.hit_ratio

    for load in (scan, phases):
        arms = (
            ratio(load, policies.engine_clock()),
            ratio(load, policies.second_touch()),
        )
        assert abs(arms[0] - arms[1]) > 0.04
        assert ratio(load, policies.duel()) > max(arms) - 0.015


def test_churn_in_c_is_the_stream_of_the_generators():
    for universe, thread, scan in ((6144, 0, False), (3072, 1, True)):
        stream = generators.churn_stream(universe, thread, scan=scan)
        expected = list(itertools.islice(stream, 3000))
        assert churn_indices(universe, thread, 3000, scan=scan).tolist() == expected


@pytest.mark.parametrize("scan", [False, True])
def test_published_row(scan):
    row = next(r for r in published.rows() if r.capacity == 2 << 30 and r.scan == scan)
    values = list(published.compare(row))
    assert len(values) == 8
    assert [value.column for value in values if not value.agrees] == []
    assert not all(value.found == values[0].found for value in values)


def test_a_published_value_that_is_off_by_one_in_the_third_digit_differs():
    assert published.Comparison("r", "c", 0.8154, 0.8150).agrees
    assert not published.Comparison("r", "c", 0.8154, 0.8144).agrees


def test_warm_up_ends_when_lru_has_missed_so_often():
    stream = single([0, 1, 0, 2, 0, 1])
    assert warm_up(stream, 2, 1) == 1
    assert warm_up(stream, 2, 3) == 4
    assert warm_up(stream, 2, 4) == 6
    assert warm_up(stream, 2, 99) == 6


def test_judge_compares_with_the_clock_and_names_the_worst():
    loads = workloads.drifting(256, 12_000)
    judge = Judge({"drifting": loads}, salts=2)
    same = judge.judge(policies.engine_clock(), ["drifting"])
    assert same.over_clock == 0
    assert same.worst_clock[0] == 0
    flush = judge.judge(Options(kind=Kind.FLUSH), ["drifting"])
    assert flush.over_clock < -1
    assert flush.worst_clock[1] in {load.name for load in loads}
    assert flush.by_group["drifting"] == pytest.approx(flush.over_clock)


@pytest.mark.parametrize(
    ("stream", "options", "capacity"),
    [
        (single([0]), Options(kind=Kind.LRU), 0),
        (single([0]), Options(kind=Kind.DUEL), 4),
        (single([0]), Options(kind=Kind.FLUSH, stripes=16), 4),
        (single([0]), Options(kind=Kind.LRU, stripes=16, by_key=True), 4),
        (Stream(np.array([3], dtype=np.uint32), None, 3), Options(kind=Kind.LRU), 4),
        (
            Stream(np.array([1], dtype=np.uint32), np.array([2], dtype=np.uint64), 3),
            *(Options(kind=Kind.LRU), 4),
        ),
    ],
)
def test_nonsense_is_refused(stream, options, capacity):
    with pytest.raises(ValueError, match=r"refuses|universe|ends"):
        replay(stream, options, capacity)
