# SPDX-License-Identifier: Apache-2.0
"""admission.h: the same words as a plain model, at any content of the memory; and the
engine's use of it against a model of a whole tier."""

from __future__ import annotations

import importlib.util
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from admission_model import PUT, PUT_KNOWN, READ, TOUCH, Admission, Tier
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opened import LIVE, MIB, Opened, Peer
from support.compile import ROOT

# By its file: under sanitizers the tree is not on the path, and tests/bench is.
_spec = importlib.util.spec_from_file_location(
    "bench_generators", ROOT / "bench" / "generators.py"
)
assert _spec is not None
assert _spec.loader is not None
generators = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generators)
churn_stream, key = generators.churn_stream, generators.key

ALWAYS, SECOND_TOUCH, ADAPTIVE = 0, 1, 2
POLICIES = {"always": ALWAYS, "second-touch": SECOND_TOUCH, "adaptive": ADAPTIVE}
PAGE = 4096


class Memory:
    """The state of admission.c in memory of our own."""

    def __init__(self, core: Any, entries: int, content: bytes | None = None) -> None:
        self.lib, self.ffi = core.lib, core.ffi
        size = self.lib.ckv_admission_bytes(entries)
        self._raw = self.ffi.new("char[]", size + 64)
        address = int(self.ffi.cast("uintptr_t", self._raw))
        self.memory = self._raw + (-address % 64)
        self.buffer = self.ffi.buffer(self.memory, size)
        if content is not None:
            self.buffer[:] = content
        self.state = self.ffi.new("struct ckv_admission_memory *")
        self.lib.ckv_admission_attach(self.state, self.memory, entries)

    def access(self, hashed: int, kind: int) -> None:
        if self.lib.ckv_admission_samples(self.state, hashed):
            self.lib.ckv_admission_access(self.state, hashed, kind)

    def knows(self, hashed: int) -> bool:
        return bool(self.lib.ckv_admission_knows(self.state, hashed))

    def remember(self, hashed: int) -> None:
        self.lib.ckv_admission_remember(self.state, hashed)

    def resize(self, blocks: int) -> None:
        self.lib.ckv_admission_resize(self.state, blocks)

    def words(self, pointer: Any, count: int) -> list[int]:
        return list(struct.unpack(f"={count}I", self.ffi.buffer(pointer, 4 * count)))


def assert_same(memory: Memory, model: Admission) -> None:
    state, head = memory.state, memory.state.head
    assert memory.words(state.ghost.words, 16 * state.ghost.buckets) == (
        model.ghost.words
    )
    assert memory.words(state.shadow_ghost.words, 16 * state.shadow_ghost.buckets) == (
        model.shadow_ghost.words
    )
    assert memory.words(state.touched, len(model.touched)) == model.touched
    for number, shadow in enumerate(model.shadows):
        real = state.shadows[number]
        assert memory.words(real.ring, len(shadow.ring)) == shadow.ring
        assert memory.words(real.index, len(shadow.index)) == shadow.index
        assert (head.hands[number], head.misses[number]) == (shadow.hand, shadow.misses)
    assert (head.ghost_clock, head.shadow_clock) == (
        model.ghost.clock,
        model.shadow_ghost.clock,
    )
    for name in (
        "capacity",
        "sample_mask",
        "second_touch",
        "samples",
        "period",
        "requests",
        "switches",
    ):
        assert getattr(head, name) == getattr(model, name), name


def hash_of(number: int) -> int:
    mixed = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    return (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 % 2**64


KINDS = {"read": READ, "touch": TOUCH, "put": PUT, "known": PUT_KNOWN}

OPERATION = st.tuples(
    st.sampled_from(["read", "touch", "put", "known", "resize", "scan", "again"]),
    st.integers(0, 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(
    entries=st.sampled_from([1, 7, 64, 300, 8192]),
    universe=st.integers(1, 600),
    operations=st.lists(OPERATION, min_size=1, max_size=60),
)
@example(64, 40, [("resize", 20), ("scan", 3), ("again", 5), ("touch", 2), ("read", 2)])
def test_model_has_the_same_words(core, entries, universe, operations):
    memory, model = Memory(core, entries), Admission(entries)

    def request(number: int, kind: int) -> None:
        hashed = hash_of(number)
        assert memory.knows(hashed) == model.knows(hashed)
        sampled = bool(memory.lib.ckv_admission_samples(memory.state, hashed))
        assert sampled == model.samples_key(hashed)
        memory.access(hashed, kind)
        if sampled:
            model.access(hashed, kind)
        if kind == PUT:
            memory.remember(hashed)
            model.remember(hashed)

    memory.resize(entries)
    model.resize(entries)
    for name, value in operations:
        number = value % universe
        if name == "resize":
            memory.resize(value % (2 * entries))
            model.resize(value % (2 * entries))
        elif name == "scan":  # keys that come once
            for each in range(value % 200):
                request(value + each, PUT)
        elif name == "again":  # and some that come back
            for each in range(value % 200):
                request((number + each * each) % universe, PUT if each % 3 else READ)
        else:
            request(number, KINDS[name])
    assert_same(memory, model)


def test_model_has_the_same_words_after_many_decisions(core):
    memory, model = Memory(core, 512), Admission(512)
    memory.resize(300)
    model.resize(300)
    stream = random.Random(5)
    for step in range(30_000):
        hot = stream.random() < 0.6
        number = stream.randrange(200) if hot else 10**6 + step
        hashed, kind = hash_of(number), stream.choice([READ, PUT, PUT_KNOWN, TOUCH])
        memory.access(hashed, kind)
        if model.samples_key(hashed):
            model.access(hashed, kind)
    assert model.period > 100
    assert_same(memory, model)


# ---- what it is for ----------------------------------------------------------------


def follow(core: Any, stream: Iterator[int], entries: int, requests: int) -> Memory:
    memory = Memory(core, entries)
    memory.resize(entries)
    for _ in range(requests):
        memory.access(hash_of(next(stream)), PUT)
    return memory


def scan_stream(hot: int) -> Iterator[int]:
    """Half of the requests go to `hot` keys, the others to keys that come once."""
    stream, once = random.Random(1), 10**9
    while True:
        once += 1
        yield stream.randrange(hot) if stream.random() < 0.5 else once


def recent_stream() -> Iterator[int]:
    """Each key comes twice, the second time soon; a filter only costs."""
    stream, number = random.Random(2), 0
    waiting: list[int] = []
    while True:
        number += 1
        yield number
        waiting.append(number)
        if len(waiting) > 200:
            yield waiting.pop(stream.randrange(3))


def test_a_scan_makes_it_ask_twice(core):
    memory = follow(core, scan_stream(1200), 1024, 40_000)
    assert memory.lib.ckv_admission_asks_twice(memory.state)
    head = memory.state.head
    assert head.misses[1] < 0.9 * head.misses[0]


def test_reuse_that_comes_once_and_soon_keeps_it_admitting_all(core):
    memory = follow(core, recent_stream(), 1024, 40_000)
    assert not memory.lib.ckv_admission_asks_twice(memory.state)
    head = memory.state.head
    assert head.misses[0] < 0.6 * head.misses[1]


def test_it_changes_its_mind_both_ways(core):
    memory = follow(core, scan_stream(1200), 1024, 40_000)
    recent = recent_stream()
    for _ in range(40_000):
        memory.access(hash_of(10**12 + next(recent)), PUT)
    assert not memory.lib.ckv_admission_asks_twice(memory.state)
    assert memory.state.head.switches == 2


@pytest.mark.parametrize("capacity", [100, 1000, 8192])
def test_ghost_knows_the_last_capacity_of_insertions(core, capacity):
    memory = Memory(core, 8192)
    memory.resize(capacity)
    total = 3 * capacity
    for number in range(total):
        memory.remember(hash_of(number))
    known = [memory.knows(hash_of(number)) for number in range(total)]
    unit = capacity // 256 + 1
    assert not any(known[: total - capacity - 2 * unit])
    newest = known[total - capacity + 2 * unit :]
    # A bucket forgets its oldest word when it is full: a few of 16 384 words.
    assert sum(newest) >= 0.99 * len(newest)


def test_a_touch_and_its_read_are_one_request(core):
    def requests(*kinds: int) -> int:
        memory = Memory(core, 4096)
        memory.resize(2048)
        while not memory.lib.ckv_admission_samples(memory.state, hash_of(0)):
            memory.resize(512)  # a small shadow follows every key
        for kind in kinds:
            memory.access(hash_of(0), kind)
        return int(memory.state.head.samples)

    assert requests(READ) == requests(PUT) == requests(TOUCH) == 1
    assert requests(TOUCH, READ) == 1
    assert requests(TOUCH, TOUCH, TOUCH, READ) == 1  # a scheduler that asks again
    assert requests(TOUCH, READ, TOUCH, READ) == 2
    assert requests(READ, READ) == 2
    assert requests(TOUCH, READ, READ) == 2


def test_at_most_13_bytes_an_entry(core):
    for entries in (8192, 10**6, 2**24, 2**31):
        size = core.lib.ckv_admission_bytes(entries)
        assert size <= 13 * entries, entries
        assert size <= 9.76 * entries + 16384, entries
    assert core.lib.ckv_admission_bytes(1) < 64 * 1024


# ---- hostile memory ------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    entries=st.sampled_from([1, 16, 300]),
    seed=st.integers(0, 2**32),
    ones=st.booleans(),
)
def test_any_content_is_harmless(core, entries, seed, ones):
    """Run under AddressSanitizer this also proves that nothing beyond it is touched."""
    size = core.lib.ckv_admission_bytes(entries)
    source = random.Random(seed)
    content = b"\xff" * size if ones else source.randbytes(size)
    memory = Memory(core, entries, content)
    for number in range(300):
        hashed = source.getrandbits(64)
        memory.lib.ckv_admission_access(memory.state, hashed, number % 4)
        memory.knows(hashed)
        memory.remember(hashed)
        if number % 50 == 0:
            memory.resize(source.getrandbits(40))
            at = source.randrange(size)
            memory.buffer[at : at + 1] = source.randbytes(1)
    assert 0 <= memory.lib.ckv_admission_capacity(memory.state) <= entries
    assert not any(bytes(memory.ffi.buffer(memory.memory + size, 1)))


# ---- the engine ----------------------------------------------------------------------

CAPACITY = 16 * MIB  # the smallest volume; 4 096 pages
BLOCK = bytes(PAGE)


def open_small(core: Any, path: Any, admission: int, **options: Any) -> Opened:
    return Opened(
        core,
        path,
        capacity=CAPACITY,
        expected_object_bytes=PAGE,
        stripe_count=1,
        admission=admission,
        **options,
    )


def get_or_insert(cache: Opened, name: bytes) -> bool:
    lease = cache.pin(name)
    if lease is None:
        cache.put(name, BLOCK)
        return False
    cache.lib.ckv_lease_release(lease)
    return True


@pytest.mark.parametrize("scan", [False, True], ids=["zipf", "zipf+scan"])
@pytest.mark.parametrize("policy", POLICIES)
def test_engine_hits_as_often_as_the_model(core, volume_path, policy, scan):
    capacity = CAPACITY // PAGE
    universe, requests, warm = 3 * capacity, 40_000, 40_000
    stream = churn_stream(universe, 0, scan=scan)
    tier = Tier(capacity, policy)
    hits = model_hits = 0
    tag = bytes(16)
    with open_small(core, volume_path, POLICIES[policy]) as cache:
        cache.volume.hash_key = 1  # the same keys are sampled in each run
        for number in range(warm + requests):
            index = next(stream)
            name = key(index)
            hashed = core.lib.ckv_index_hash(cache.volume, tag, name, False)
            model_hit = tier.get_or_insert(hashed)
            hit = get_or_insert(cache, name)
            if number >= warm:
                hits += hit
                model_hits += model_hit
        stats = cache.stats()
        assert abs(hits - model_hits) / requests < 0.005
        assert (stats.puts_not_admitted > 0) == (policy != "always")
        assert stats.admission_asks_twice == (policy == "adaptive")
        cache.assert_sound()


def fill(cache: Opened, count: int, who: str = "fill") -> list[bytes]:
    names = [f"{who} {number}".encode() for number in range(count)]
    for name in names:
        cache.put(name, BLOCK)
    return names


def test_nothing_is_refused_until_the_volume_evicts(core, volume_path):
    blocks = CAPACITY // PAGE
    with open_small(core, volume_path, SECOND_TOUCH) as cache:
        fill(cache, blocks)
        assert cache.count() == blocks
        assert cache.stats().puts_not_admitted == 0
        assert cache.put(b"one more", BLOCK) == core.lib.CKV_OK  # evicts
        assert cache.put(b"and another", BLOCK) == core.lib.CKV_NOT_ADMITTED
        assert cache.get(b"and another") is None
        assert cache.put(b"and another", BLOCK) == core.lib.CKV_OK  # second touch
        assert cache.stats().puts_not_admitted == 1
        assert cache.stats().admission_capacity == blocks


def test_an_evicted_block_is_taken_back(core, volume_path):
    with open_small(core, volume_path, SECOND_TOUCH) as cache:
        names = fill(cache, CAPACITY // PAGE + 1)
        gone = [name for name in names if not cache.contains(name)]
        assert len(gone) == 1
        assert cache.put(gone[0], BLOCK) == core.lib.CKV_OK


def test_a_present_block_is_replaced_whatever_the_policy(core, volume_path):
    overwrite = core.lib.CKV_PUT_OVERWRITE
    with open_small(core, volume_path, SECOND_TOUCH) as cache:
        names = fill(cache, CAPACITY // PAGE + 1)
        kept = [name for name in names if cache.contains(name)]
        for name in kept[:20]:
            assert cache.put(name, BLOCK[:100], overwrite) == core.lib.CKV_OK
        for name in kept[20:40]:  # other lengths: replaced as well
            assert cache.put(name, BLOCK[:50]) == core.lib.CKV_OK
        assert cache.put(b"new", BLOCK, overwrite) == core.lib.CKV_NOT_ADMITTED
        assert cache.stats().puts_not_admitted == 1


def test_room_that_was_cleared_is_filled_by_anything(core, volume_path):
    blocks = CAPACITY // PAGE
    with open_small(core, volume_path, SECOND_TOUCH) as cache:
        fill(cache, blocks + 1)
        assert cache.put(b"no", BLOCK) == core.lib.CKV_NOT_ADMITTED
        cache.clear()
        fill(cache, blocks * 3 // 4, "after")
        assert cache.count() == blocks * 3 // 4
        assert cache.stats().puts_not_admitted == 1


def test_a_full_bucket_of_the_index_is_no_full_volume(core, volume_path):
    with open_small(core, volume_path, SECOND_TOUCH) as cache:
        fill(cache, 20)
        entry = cache.states(LIVE)[0]
        state = cache.region.states[entry]
        reason = core.lib.CKV_KILL_CROWD  # as index.c does it
        assert core.lib.ckv_entry_kill(cache.volume, entry, state, reason)
        fill(cache, 100, "more")
        assert cache.stats().evictions == 1
        assert cache.stats().puts_not_admitted == 0


def test_half_a_volume_that_was_cleared_is_filled_by_anything(core, volume_path):
    blocks = CAPACITY // PAGE
    with (
        open_small(core, volume_path, SECOND_TOUCH) as cache,
        open_small(core, volume_path, SECOND_TOUCH, namespace=b"other") as other,
    ):
        for number in range(blocks // 2):  # mixed up
            cache.put(f"one {number}".encode(), BLOCK)
            other.put(f"two {number}".encode(), BLOCK)
        assert cache.put(b"evicts", BLOCK) == core.lib.CKV_OK
        assert cache.put(b"no", BLOCK) == core.lib.CKV_NOT_ADMITTED
        other.clear()
        before = cache.count()
        for number in range(blocks // 2):
            cache.put(f"three {number}".encode(), BLOCK)
        assert cache.stats().puts_not_admitted == 1
        assert cache.count() > 1.3 * before


def test_the_capacity_is_the_blocks_that_fit_and_not_the_table(core, volume_path):
    with Opened(core, volume_path, capacity=64 * MIB, admission=ADAPTIVE) as cache:
        for number in range(80):
            cache.put(f"large {number}".encode(), bytes(1 << 20))
        assert cache.stats().entries_max == 1024
        assert 58 <= cache.stats().admission_capacity <= 66


def learn(cache: Opened) -> None:
    """A full volume whose shadows favour a second touch."""
    fill(cache, CAPACITY // PAGE + 1)
    head = cache.region.admission.head
    head.second_touch, head.requests = 1, 1000
    head.misses[0], head.misses[1] = 300, 200
    assert cache.put(b"refused before", BLOCK) == cache.lib.CKV_NOT_ADMITTED


def test_what_was_learnt_survives_a_restart(core, volume_path):
    with open_small(core, volume_path, ADAPTIVE) as cache:
        learn(cache)
        before = cache.stats()
    with open_small(core, volume_path, ADAPTIVE) as cache:
        after = cache.stats()
        for name in (
            "admission_asks_twice",
            "admission_capacity",
            "admission_requests",
            "admission_misses_always",
            "admission_misses_second_touch",
        ):
            assert getattr(after, name) == getattr(before, name) != 0, name
        assert cache.put(b"not seen", BLOCK) == core.lib.CKV_NOT_ADMITTED
        assert cache.put(b"refused before", BLOCK) == core.lib.CKV_OK


@pytest.mark.parametrize("damage", ["ghost", "head", "cut"])
def test_a_damaged_checkpoint_is_ignored(core, volume_path, damage):
    with open_small(core, volume_path, ADAPTIVE) as cache:
        learn(cache)
        geometry = cache.volume.files[0].geometry
        offset, size = geometry.checkpoint_offset, geometry.checkpoint_bytes
        ghost = PAGE + -(-geometry.entry_count // PAGE) * PAGE
    with open(volume_path, "r+b") as file:
        for copy in range(2):
            begin = offset + copy * size
            file.seek(begin + {"ghost": ghost + 1000, "head": 40, "cut": 0}[damage])
            file.write(bytes(size) if damage == "cut" else b"\xa5" * 64)
    with open_small(core, volume_path, ADAPTIVE) as cache:
        known = damage == "ghost"  # its counts are in the head
        assert cache.stats().admission_asks_twice == known
        expected = core.lib.CKV_NOT_ADMITTED if known else core.lib.CKV_OK
        assert cache.put(b"refused before", BLOCK) == expected
        cache.assert_sound()


def test_checkpointed_numbers_are_checked(core, volume_path):
    """Sealed as they should be, but numbers that this volume cannot have."""
    with open_small(core, volume_path, ADAPTIVE) as cache:
        fill(cache, CAPACITY // PAGE + 100)
        head = cache.region.admission.head
        head.full_bytes = 2**63
        head.ghost_clock = 2**64 - 1
        head.requests = 2**62
        head.misses[0] = 2**63
        head.second_touch = 0xFFFFFFFF
        head.live_sum = 2**64 - 1
    with open_small(core, volume_path, ADAPTIVE) as cache:
        assert cache.stats().admission_capacity == 0
        assert cache.stats().admission_requests == 0
        fill(cache, CAPACITY // PAGE, "again")
        cache.assert_sound()


def test_a_set_of_files_remembers_over_all_of_them(core, tmp_path):
    paths = [tmp_path / "one.cyc", tmp_path / "two.cyc"]
    options = {"expected_object_bytes": PAGE, "admission": SECOND_TOUCH}
    blocks = 2 * CAPACITY // PAGE
    refused = [f"refused {number}".encode() for number in range(400)]
    with Opened(core, *paths, capacity=CAPACITY, **options) as cache:
        fill(cache, blocks + 20)
        known = [name for name in refused if cache.put(name, BLOCK) != core.lib.CKV_OK]
        assert len(known) == len(refused)
    with Opened(core, *reversed(paths), capacity=CAPACITY, **options) as cache:
        taken = sum(cache.put(name, BLOCK) == core.lib.CKV_OK for name in refused)
        assert taken >= 396  # a full bucket forgets


def test_processes_share_what_they_know(core, volume_path):
    options = {
        "capacity": CAPACITY,
        "expected_object_bytes": PAGE,
        "admission": SECOND_TOUCH,
    }
    with Opened(core, volume_path, **options) as cache:
        fill(cache, CAPACITY // PAGE + 1)
        with Peer(volume_path, **options) as peer:
            assert peer.ask("put", "asked twice", PAGE) == core.lib.CKV_NOT_ADMITTED
            assert cache.put(b"asked twice", BLOCK) == core.lib.CKV_OK
            assert cache.put(b"asked here", BLOCK) == core.lib.CKV_NOT_ADMITTED
            assert peer.ask("put", "asked here", PAGE) == core.lib.CKV_OK
            peer.close()


def test_a_process_that_admits_always_is_not_held_by_others(core, volume_path):
    options = {"capacity": CAPACITY, "expected_object_bytes": PAGE}
    with Opened(core, volume_path, admission=SECOND_TOUCH, **options) as cache:
        fill(cache, CAPACITY // PAGE + 1)
        with Peer(volume_path, admission=ALWAYS, **options) as peer:
            assert peer.ask("put", "at once", PAGE) == core.lib.CKV_OK
            assert cache.put(b"not at once", BLOCK) == core.lib.CKV_NOT_ADMITTED
            peer.close()


def test_lookups_that_are_no_requests_are_not_counted(core, volume_path):
    with open_small(core, volume_path, ADAPTIVE) as cache:
        names = fill(cache, 64)
        head = cache.region.admission.head
        before = (head.samples, head.period)
        for name in names:
            cache.contains(name)
            cache.put(name, BLOCK)  # present
            cache.get(b"absent " + name)
        assert (head.samples, head.period) == before
        for name in names:
            cache.get(name)
        assert (head.samples, head.period) != before


def test_an_unknown_policy_is_refused_in_words(core, volume_path):
    with pytest.raises(Exception, match="admission 3"):
        open_small(core, volume_path, 3)
