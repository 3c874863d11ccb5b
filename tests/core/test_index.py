# SPDX-License-Identifier: Apache-2.0
"""The index against a dict: full buckets, stale slots, sequences that wrap, noise."""

from __future__ import annotations

import itertools
import tempfile
import threading
from pathlib import Path

import pytest
from callbacks import lasting_callback
from hypothesis import given, settings
from hypothesis import strategies as st
from os_faults import OsTable

from models import LIVE, MIB, MISS, NO_RUN, OK, OVERWRITE, PAGE, Engine, pattern

LOW = (1 << 20) - 1


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def pair_of(engine: Engine, key: bytes) -> tuple[int, int]:
    """The two buckets of a key (index.c)."""
    value = int(engine.identity(key).hash)
    count = int(engine.region.layout.bucket_count)
    first = (value % 2**32) * count >> 32
    second = (value * 0x9E3779B97F4A7C15 % 2**64 >> 32) * count >> 32
    return first, (first + 1) % count if first == second else second


def colliding(engine: Engine, count: int) -> list[bytes]:
    """Keys that share both buckets."""
    found: dict[frozenset[int], list[bytes]] = {}
    for i in itertools.count():
        key = name(i)
        mates = found.setdefault(frozenset(pair_of(engine, key)), [])
        mates.append(key)
        if len(mates) == count:
            return mates
    raise AssertionError


def words_of(engine: Engine, key: bytes) -> list[int]:
    return [
        int(engine.region.buckets[b].slots[s])
        for b in pair_of(engine, key)
        for s in range(7)
    ]


@pytest.fixture
def engine(core, volume_path):
    """32 numbers, 10 buckets; clean at the end."""
    with Engine(core, volume_path, expected_object_bytes=512 * 1024) as engine:
        assert engine.region.layout.bucket_count == 10
        yield engine
        engine.assert_clean()


def test_both_buckets_full(engine):
    keys = colliding(engine, 20)
    for i, key in enumerate(keys[:14]):
        assert engine.put(key, b"%d" % i) == OK
    assert engine.stats.bucket_evictions == 0
    assert 0 not in words_of(engine, keys[0])
    for i, key in enumerate(keys[:14]):
        assert engine.read(key) == b"%d" % i
        if i != 9:
            assert engine.read(key) is not None
    assert engine.put(keys[14], b"14") == OK  # the coldest gives way
    assert engine.stats.bucket_evictions == 1
    assert engine.stats.evictions == 1
    assert engine.contains(*keys[:15]) == [i != 9 for i in range(15)]
    # Pinned ones stay; the only one that is not goes, hot or not.
    held = [engine.get(key) for i, key in enumerate(keys[:14]) if i not in (3, 9)]
    held.append(engine.get(keys[14]))
    engine.touch(keys[3:4])
    assert engine.put(keys[15], b"15") == OK
    assert engine.contains(keys[3]) == [False]
    held.append(engine.get(keys[15]))
    before = engine.count()
    assert engine.put(keys[16], b"16") == NO_RUN
    assert engine.contains(keys[16]) == [False]
    assert engine.count() == before
    for lease in held:
        lease.release()
    assert engine.put(keys[16], b"16") == OK
    events = [(e.kind, bytes(e.key)) for e in engine.events()[0]]
    assert (2, keys[9]) in events
    assert (2, keys[16]) not in events


def test_an_overwrite_in_full_buckets_is_never_a_miss(engine):
    """The coldest of fourteen is the older version of the very key."""
    keys = colliding(engine, 14)
    for key in keys:
        assert engine.put(key, b"old") == OK
    engine.touch(keys[1:])
    seen: list[bytes | None] = []

    def reached(text) -> None:
        point = engine.ffi.string(text)
        if not busy and not point.startswith((b"pin.", b"maintenance.")):
            busy.append(True)
            seen.append(engine.read(keys[0]))
            engine.region.heats[engine.find(keys[0]).entry] = 0
            busy.clear()

    busy: list[bool] = []
    callback = lasting_callback(engine.ffi, "void (*)(const char *)", reached)
    engine.lib.ckv_point_hook = callback
    status = engine.put(keys[0], b"newer", flags=OVERWRITE)
    engine.lib.ckv_point_hook = engine.ffi.NULL
    assert status == OK
    assert set(seen) == {b"old", b"newer"}
    assert seen == sorted(seen, reverse=True)  # never back
    assert engine.read(keys[0]) == b"newer"
    assert engine.contains(*keys).count(False) == 1  # one of the others made room
    assert engine.count() == 13


def test_stale_slots_are_as_good_as_empty(engine):
    keys = colliding(engine, 14)
    first, second = pair_of(engine, keys[0])
    engine.region.header.sequence = 5 << 20
    for bucket in (first, second):
        for s in range(7):
            # entry numbers that are free, out of range, or live under another sequence
            entry = (s * 5, 31, 32, 2**32 - 1)[s % 4]
            engine.region.buckets[bucket].slots[s] = (7 << 52) | (s << 32) | entry
    for i, key in enumerate(keys):
        assert engine.put(key, b"%d" % i) == OK
        assert engine.read(key) == b"%d" % i
    assert engine.stats.bucket_evictions == 0
    assert engine.contains(*keys) == [True] * 14


def test_the_slot_of_a_put_that_ends_meanwhile_is_not_stale(engine):
    """I1: its entry becomes LIVE between any two looks of who wants the slot."""
    lib, ffi, region = engine.lib, engine.ffi, engine.region
    keys = colliding(engine, 15)
    for key in keys[:14]:
        assert engine.put(key, b"x") == OK
    held = [engine.get(key) for key in keys[:14]]  # none of them gives way
    entry = int(engine.find(keys[9]).entry)
    live = int(region.states[entry])
    reserved = lib.ckv_state_owned(
        lib.CKV_STATE_RESERVED, engine.volume.slot, engine.volume.incarnation
    )
    words = words_of(engine, keys[0])
    me = threading.get_ident()
    looks = 0
    end_at = 0

    def about_to_look() -> None:
        nonlocal looks
        if threading.get_ident() == me:
            looks += 1
            if looks == end_at:
                region.states[entry] = live

    callback = lasting_callback(ffi, "void (*)(void)", about_to_look)
    before = lib.ckv_yield_hook
    while looks >= end_at:  # until it is over before the put ends
        end_at += 1
        looks = 0
        region.states[entry] = reserved
        lib.ckv_yield_hook = callback
        inserted = lib.ckv_index_insert(
            engine.volume, engine.identity(keys[14]).hash, 31, 1000
        )
        lib.ckv_yield_hook = before
        region.states[entry] = live
        assert not inserted, f"at look {end_at}"
        assert words_of(engine, keys[0]) == words
    assert end_at > 3 * 14
    for lease in held:
        lease.release()
    assert engine.contains(*keys[:14]) == [True] * 14


def test_the_slot_of_a_put_that_ended_before_its_process_is_not_stale(engine):
    """I1: what a process stored before it was gone is not what it left half done."""
    lib, region = engine.lib, engine.region
    keys = colliding(engine, 15)
    for key in keys[:14]:
        assert engine.put(key, b"x") == OK
    held = [engine.get(key) for key in keys[:14]]  # none of them gives way
    entry = int(engine.find(keys[9]).entry)
    live = int(region.states[entry])
    words = words_of(engine, keys[0])
    region.states[entry] = lib.ckv_state_owned(lib.CKV_STATE_RESERVED, 60, 7)
    asked: list[int] = []

    with OsTable(engine) as table:

        def lock_byte(fd: int, byte: int) -> int:
            asked.append(byte)
            region.states[entry] = live  # by slot 60, just before it is swept
            return int(table.native.lock_byte(fd, byte))

        table.replace("lock_byte", lock_byte)
        assert not lib.ckv_index_insert(
            engine.volume, engine.identity(keys[14]).hash, 31, 1000
        )
    assert asked
    assert words_of(engine, keys[0]) == words
    for lease in held:
        lease.release()
    assert engine.contains(*keys[:14]) == [True] * 14


def test_low_bits_of_the_sequence_wrap(engine):
    keys = colliding(engine, 6)
    engine.region.header.sequence = (1 << 20) - 3
    for i, key in enumerate(keys):
        assert engine.put(key, b"%d" % i) == OK
    assert [engine.read(key) for key in keys] == [b"%d" % i for i in range(6)]
    lows = [int(engine.find(key).record.sequence) & LOW for key in keys]
    assert lows == [(1 << 20) - 2, (1 << 20) - 1, 0, 1, 2, 3]
    # Over the wrap the newer one still wins: whole sequences are compared.
    engine.region.header.sequence = (2 << 20) - 1
    assert engine.put(keys[0], b"newer", flags=OVERWRITE) == OK
    assert engine.read(keys[0]) == b"newer"
    assert engine.count() == 6
    # A word that is stale by exactly 2^20 sequences looks alive: no harm.
    entry = int(engine.find(keys[1]).entry)
    old = words_of(engine, keys[1])
    mine = next(word for word in old if word & 0xFFFFFFFF == entry and word)
    other = name(123456)
    bucket = pair_of(engine, other)[0]
    tag = max(int(engine.identity(other).hash) >> 52, 1)
    engine.region.buckets[bucket].slots[6] = (mine & (1 << 52) - 1) | tag << 52
    assert engine.read(other) is None
    assert engine.put(other, b"other") == OK
    assert engine.read(other) == b"other"
    assert engine.read(keys[1]) == b"1"
    assert engine.remove(other) == OK


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_duplicates(engine, order):
    """Two live entries of one key: the newer is the answer, and then the only one."""
    lib, ffi = engine.lib, engine.ffi
    key = b"k"
    extents = [engine.reserve_pages(1)[1] for _ in range(2)]
    crc = lib.ckv_crc32c(0, bytes(4096), 4096)
    for i in order:
        assert engine.publish(key, extents[i], 4096, crc)
    newest = extents[order[1]].entry
    found = engine.find(key)
    assert found.entry == newest
    assert found.record.sequence == 2
    assert lib.ckv_index_keep_newest(engine.volume, engine.identity(key)) == 2
    assert engine.kind(newest) == LIVE
    assert engine.kind(extents[order[0]].entry) != LIVE
    assert engine.count() == 1
    assert engine.remove(key) == OK
    assert engine.find(key) is None
    assert lib.ckv_index_keep_newest(engine.volume, engine.identity(key)) == 0
    assert ffi is not None


def test_remove_takes_all_of_a_key(engine):
    key = b"k"
    crc = engine.lib.ckv_crc32c(0, bytes(4096), 4096)
    for _ in range(3):
        assert engine.publish(key, engine.reserve_pages(1)[1], 4096, crc)
    assert engine.count() == 3
    assert engine.remove(key) == OK
    assert engine.remove(key) == MISS
    assert engine.count() == 0


def test_identities_differ_in_each_part(core, volume_path):
    with (
        Engine(core, volume_path) as plain,
        Engine(core, volume_path, namespace=b"ns") as spaced,
    ):
        digest = plain.stored_key(b"k")
        assert (
            len(
                {
                    int(e.identity(k).hash)
                    for e in (plain, spaced)
                    for k in (b"k", digest)
                }
            )
            == 4
        )
        for i, (engine, key) in enumerate(
            [(plain, b"k"), (plain, digest), (spaced, b"k"), (spaced, digest)]
        ):
            assert engine.contains(key) == [False]
            assert engine.put(key, b"%d" % i) == OK
        assert [plain.read(b"k"), plain.read(digest)] == [b"0", b"1"]
        assert [spaced.read(b"k"), spaced.read(digest)] == [b"2", b"3"]
        plain.assert_clean()


KEYS = st.integers(0, 39)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS),
        st.tuples(st.just("put"), KEYS),
        st.tuples(st.just("overwrite"), KEYS),
        st.tuples(st.just("remove"), KEYS),
        st.tuples(st.just("read"), KEYS),
        st.tuples(st.just("pin"), KEYS),
        st.tuples(st.just("unpin"), KEYS),
        st.tuples(st.just("sequence"), st.sampled_from([1, 2**20, 2**20 - 3, 2**32])),
        st.tuples(st.just("clear"), st.just(0)),
    ),
    max_size=80,
)


def run_against_a_dict(core, granule: int, crowded: int, steps) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as where,
        Engine(core, Path(where) / "kv", expected_object_bytes=granule) as engine,
    ):
        keys = colliding(engine, crowded) + [
            name(10**6 + i) for i in range(40 - crowded)
        ]
        model: dict[bytes, bytes] = {}
        pins: dict[bytes, list] = {}
        seen = 0
        for number, (step, value) in enumerate(steps):
            key = keys[value % 40]
            data = b"%d of %d" % (number, value)
            if step in ("put", "overwrite"):
                status = engine.put(key, data, flags=OVERWRITE * (step == "overwrite"))
                if status == OK:
                    model[key] = data
                elif status == NO_RUN:
                    assert pins
                else:
                    assert step == "put"
                    assert len(model[key]) == len(data)
            elif step == "remove":
                assert (engine.remove(key) == OK) == (key in model)
                model.pop(key, None)
            elif step == "clear":
                assert engine.clear() == len(model)
                model.clear()
            elif step == "read":
                assert engine.read(key) == model.get(key)
            elif step == "pin":
                lease = engine.get(key)
                assert (lease is not None) == (key in model)
                if lease is not None:
                    pins.setdefault(key, []).append((lease, model[key]))
            elif step == "unpin" and key in pins:
                lease, expected = pins[key].pop()
                assert lease.data == expected
                lease.release()
                if not pins[key]:
                    del pins[key]
            elif step == "sequence":
                engine.region.header.sequence += value
            # What was evicted meanwhile says so, and was not pinned.
            events, lost, seen = engine.events(seen)
            assert lost == 0
            stored = set()
            for event in events:
                gone = bytes(event.key)
                if event.kind == 1:
                    stored.add(gone)
                elif event.kind == 2 and step in ("put", "overwrite"):
                    assert gone in model
                    if gone != key or gone in stored:
                        assert gone not in pins
                        del model[gone]
            present = engine.contains(*keys)
            assert [k in model for k in keys] == present
            assert engine.count() == len(model)
        for lease, expected in itertools.chain(*pins.values()):
            assert lease.data == expected
            lease.release()
        for key in keys:
            assert engine.read(key) == model.get(key)
        assert engine.assert_clean() == len(model)


@settings(max_examples=60)
@given(STEPS)
def test_small_index_agrees_with_a_dict(core, steps):
    run_against_a_dict(core, 512 * 1024, 20, steps)


@settings(max_examples=40)
@given(STEPS)
def test_index_agrees_with_a_dict(core, steps):
    run_against_a_dict(core, 64 * 1024, 4, steps)


def test_many_keys_at_the_planned_load(core, volume_path, rng):
    """Every number in use: no bucket overflows."""
    with Engine(core, volume_path, 64 * MIB, expected_object_bytes=PAGE) as engine:
        count = int(engine.region.layout.entry_count)
        for i in range(count):
            assert engine.put(name(i), b"%d" % i) == OK
        assert engine.stats.entries == count
        assert engine.stats.bucket_evictions == 0
        order = list(range(count))
        rng.shuffle(order)
        for i in order[:2000]:
            assert engine.read(name(i)) == b"%d" % i
        assert sum(engine.contains(*[name(i) for i in range(count)])) == count
        assert not any(engine.contains(*[name(count + i) for i in range(2000)]))
        for i in order[: count // 2]:
            assert engine.remove(name(i)) == OK
        for i in range(count // 2):
            assert engine.put(name(10**7 + i), b"again") == OK
        assert engine.stats.bucket_evictions == 0


@settings(max_examples=40)
@given(st.data())
def test_noise_in_the_buckets(core, data):
    """Words of an attacker: no crash, no foreign bytes, and puts go on."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as where,
        Engine(core, Path(where) / "kv", expected_object_bytes=512 * 1024) as engine,
    ):
        for i in range(20):
            assert engine.put(name(i), pattern(i, 100)) == OK
        for _ in range(data.draw(st.integers(1, 30))):
            word = data.draw(
                st.one_of(
                    st.integers(0, 2**64 - 1),
                    st.tuples(
                        st.integers(0, 4095), st.integers(0, 30), st.integers(0, 40)
                    ).map(lambda t: t[0] << 52 | t[1] << 32 | t[2]),
                )
            )
            bucket = engine.region.buckets[data.draw(st.integers(0, 15))]
            bucket.slots[data.draw(st.integers(0, 6))] = word
        for i in range(20):
            assert engine.read(name(i)) in (None, pattern(i, 100))
        for i in range(40):
            status = engine.put(name(i), pattern(i, 100))
            assert status >= 0
            assert engine.read(name(i)) in (None, pattern(i, 100))
            if status == OK:
                assert engine.read(name(i)) is not None
        engine.verify(repair=True)
        engine.verify(repair=True)
        engine.assert_clean()
