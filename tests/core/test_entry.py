# SPDX-License-Identifier: Apache-2.0
"""The life of an entry: states, records, marks, heat, counts."""

from __future__ import annotations

import errno
import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from os_faults import OsTable

from models import (
    DEAD,
    DYING,
    FREE,
    LIVE,
    OK,
    PAGE,
    RESERVED,
    Engine,
    pattern,
)


@pytest.fixture
def engine(core, volume_path):
    with Engine(core, volume_path) as engine:
        yield engine
        engine.assert_clean()


def record_of(engine: Engine, entry: int):
    return engine.volume.files[0].table[entry]


def sealed(engine: Engine, entry: int) -> bool:
    file = engine.volume.files[0]
    record = engine.ffi.addressof(file.table[entry])
    return bool(engine.lib.ckv_record_sealed(record, file.header.file_id, entry))


def reason(engine: Engine, name: str) -> int:
    return int(getattr(engine.lib, f"CKV_KILL_{name}"))


def test_the_states_of_a_life(engine):
    lib, volume = engine.lib, engine.volume
    mine = lib.ckv_state_owned
    status, extent = engine.reserve_pages(3)
    entry = int(extent.entry)
    assert status == OK
    assert engine.region.states[entry] == mine(
        RESERVED, volume.slot, volume.incarnation
    )
    assert not sealed(engine, entry)
    crc = lib.ckv_crc32c(0, bytes(3 * PAGE), 3 * PAGE)
    assert engine.publish(b"k", extent, 3 * PAGE, crc)
    live = int(engine.region.states[entry])
    assert live == lib.ckv_state_live(1)
    assert sealed(engine, entry)
    assert (engine.count(), engine.stats.resident_bytes) == (1, 3 * PAGE)
    assert lib.ckv_entry_condemn(volume, entry, live, reason(engine, "REMOVE"))
    assert engine.region.states[entry] == mine(DYING, volume.slot, volume.incarnation)
    assert engine.find(b"k") is None
    assert sealed(engine, entry)  # struck before it is DEAD (E2)
    assert not lib.ckv_entry_kill(volume, entry, live, reason(engine, "EVICT"))
    lib.ckv_entry_bury(volume, entry)
    assert engine.region.states[entry] == DEAD
    assert not sealed(engine, entry)
    assert record_of(engine, entry).seal == 0
    assert (engine.count(), engine.stats.resident_bytes) == (0, 0)
    assert engine.stats.removed == 1


def test_a_kill_is_won_once(engine):
    assert engine.put(b"k", b"v") == OK
    entry = int(engine.find(b"k").entry)
    state = int(engine.region.states[entry])
    kill = engine.lib.ckv_entry_kill
    assert not kill(engine.volume, entry, state + 8, reason(engine, "REMOVE"))
    assert kill(engine.volume, entry, state, reason(engine, "REMOVE"))
    assert not kill(engine.volume, entry, state, reason(engine, "REMOVE"))
    assert engine.count() == 0
    assert engine.stats.removed == 1


@pytest.mark.parametrize(
    ("name", "counter", "event"),
    [
        ("EVICT", "evictions", True),
        ("REMOVE", "removed", True),
        ("REPLACE", "removed", False),
        ("CORRUPT", "corrupt", True),
        ("CLEAR", None, False),
    ],
)
def test_why_it_was_killed(engine, name, counter, event):
    assert engine.put(b"k", b"v") == OK
    found = engine.find(b"k")
    assert engine.lib.ckv_entry_kill(
        engine.volume, found.entry, found.state, reason(engine, name)
    )
    for other in ("evictions", "removed", "corrupt"):
        assert getattr(engine.stats, other) == (other == counter)
    kinds = [e.kind for e in engine.events()[0]]
    assert kinds == ([1, 2] if event else [2])  # the last one says what is true
    assert engine.stats.evicted_bytes == (name == "EVICT")


def test_an_aborted_put_leaves_nothing(engine):
    assert engine.put(b"k", pattern(1, 100)) == OK
    entry = int(engine.find(b"k").entry)
    assert engine.remove(b"k") == OK
    for _ in range(300):
        _, extent = engine.reserve_pages(16)
        engine.lib.ckv_entry_abort(engine.volume, extent.entry)
        assert engine.kind(extent.entry) == DEAD
        assert not sealed(engine, extent.entry)
    assert engine.count() == 0
    assert engine.events()[2] == 2
    assert engine.kind(entry) in (DEAD, FREE)


def test_a_record_that_cannot_be_written(core, engine):
    _, extent = engine.reserve_pages(1)
    record = engine.ffi.new("struct ckv_record *")
    record.first_page = extent.first_page
    with OsTable(core) as table:
        table.replace("write_at", lambda fd, iov, count, offset: -errno.EIO)
        status = engine.lib.ckv_entry_publish(
            engine.volume, engine.identity(b"k"), extent.entry, record
        )
    assert status == engine.lib.CKV_IO_FAILED
    assert engine.kind(extent.entry) == RESERVED
    assert engine.count() == 0
    engine.lib.ckv_entry_abort(engine.volume, extent.entry)


def test_marks_belong_to_a_sequence(engine):
    lib, volume = engine.lib, engine.volume
    assert engine.put(b"k", b"v") == OK
    entry = int(engine.find(b"k").entry)
    assert not lib.ckv_entry_verified(volume, entry, 1)
    assert engine.read(b"k") == b"v"
    assert lib.ckv_entry_verified(volume, entry, 1)
    assert not lib.ckv_entry_verified(volume, entry, 2)
    for sequence in (2**32 - 1, 2**32 + 1, 2**60):
        lib.ckv_entry_set_verified(volume, entry, sequence)
        # Low bits of 0 are never a mark: it costs a check, not an answer.
        assert lib.ckv_entry_verified(volume, entry, sequence) == (
            sequence & 0xFFFFFFFF != 0
        )


@pytest.mark.parametrize("sequence", [2**32 - 3, 2**52, 2**60])
def test_large_sequences(engine, sequence):
    engine.region.header.sequence = sequence
    for i in range(6):
        assert engine.put(b"%d" % i, pattern(i, 5000)) == OK
        for _ in range(2):
            assert engine.read(b"%d" % i) == pattern(i, 5000)
    assert [i.sequence for i in engine.list()] == [sequence + 1 + i for i in range(6)]
    assert engine.put(b"3", b"newer") == OK
    assert engine.read(b"3") == b"newer"


def test_heat_is_0_to_2(engine):
    assert engine.put(b"k", b"v") == OK
    entry = int(engine.find(b"k").entry)
    for before, amount in itertools.product((0, 1, 2), (1, 2)):
        engine.region.heats[entry] = before
        engine.lib.ckv_entry_heat(engine.volume, entry, amount)
        assert engine.region.heats[entry] == min(2, before + amount)


def test_cleared_entries_are_dead_for_everybody(engine):
    for i in range(20):
        assert engine.put(b"%d" % i, b"v") == OK
    found = engine.find(b"7")
    assert engine.clear() == 20
    assert engine.lib.ckv_entry_cleared(engine.volume, 0, found.record.sequence)
    assert not engine.lib.ckv_entry_cleared(engine.volume, 0, 21)
    assert engine.kind(found.entry) == LIVE
    assert engine.find(b"7") is None
    assert engine.list() == []
    assert engine.put(b"7", b"w") == OK
    assert engine.read(b"7") == b"w"
    # Its elder, still LIVE, was cleared: killing it counts nothing.
    before = engine.stats.evictions
    assert engine.lib.ckv_entry_kill(
        engine.volume, found.entry, found.state, reason(engine, "EVICT")
    ) in (False, True)
    assert engine.stats.evictions == before
    assert engine.count() == 1


@settings(max_examples=50)
@given(st.data())
def test_a_copy_is_consistent_or_refused(core, data):
    """ckv_entry_read() under states that do not fit, and numbers out of range."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as where,
        Engine(core, Path(where) / "kv") as engine,
    ):
        for i in range(5):
            assert engine.put(b"%d" % i, b"v") == OK
        record = engine.ffi.new("struct ckv_record *")
        for _ in range(20):
            entry = data.draw(st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1)))
            state = data.draw(st.one_of(st.integers(0, 80), st.integers(0, 2**64 - 1)))
            result = engine.lib.ckv_entry_read(engine.volume, entry, state, record)
            count = int(engine.region.layout.entry_count)
            if result:
                assert entry < count
                assert engine.region.states[entry] == state
            if entry < count and engine.region.states[entry] == state:
                assert result == (engine.kind(entry) == LIVE or state == 0)
        engine.assert_clean()
