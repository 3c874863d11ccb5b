# SPDX-License-Identifier: Apache-2.0
"""The ring of events against a plain list, stalled writers, threads and noise."""

from __future__ import annotations

import hashlib
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

WRITING = 1 << 63
WAIT_SECONDS = 0.1  # of one read, for writers that are late
STORED, REMOVED, CLEARED = 1, 2, 3


class Ring:
    """A volume that has nothing but a ring of events."""

    def __init__(self, core, capacity: int) -> None:
        self.lib, self.ffi = core.lib, core.ffi
        self.capacity = capacity
        self.header = self.ffi.new("struct ckv_region_header *")
        self.slots = self.ffi.new("struct ckv_shared_event[]", capacity)
        self.counters = self.ffi.new("uint64_t[64]")
        self.volume = self.ffi.new("struct ckv_volume *")
        self.volume.region.header = self.header
        self.volume.region.events = self.slots
        self.volume.region.layout.event_capacity = capacity
        self.volume.counters = self.counters

    def record(self, kind: int, tag: bytes, key: bytes, digested: int) -> None:
        self.lib.ckv_event_record(self.volume, kind, tag, key, digested)

    def read(self, since: int, capacity: int = 1000):
        events = self.ffi.new("struct ckv_event[]", max(capacity, 1))
        count = self.ffi.new("size_t *")
        lost = self.ffi.new("uint64_t *")
        last = self.ffi.new("uint64_t *")
        self.lib.ckv_event_read(self.volume, since, events, capacity, count, lost, last)
        found = [
            (
                event.number,
                event.kind,
                bytes(event.namespace_tag),
                bytes(event.key),
                bool(event.digested),
            )
            for event in events[0 : count[0]]
        ]
        return found, lost[0], last[0]

    @property
    def dropped(self) -> int:
        return int(self.counters[self.lib.CKV_COUNTER_events_dropped])

    def slot_of(self, number: int):
        return self.slots[number % self.capacity]


def payload(number: int) -> tuple[bytes, bytes]:
    """A tag, and a key that follows from it: torn words would show."""
    tag = hashlib.md5(b"%d" % number, usedforsecurity=False).digest()
    return tag, hashlib.sha256(tag).digest()


def test_events_come_back_as_they_were(core):
    ring = Ring(core, 8)
    tag, key = payload(1)
    ring.record(STORED, bytes(16), key, False)
    ring.record(REMOVED, tag, key, True)
    ring.record(CLEARED, tag, bytes(32), False)
    assert ring.read(0) == (
        [
            (1, STORED, bytes(16), key, False),
            (2, REMOVED, tag, key, True),
            (3, CLEARED, tag, bytes(32), False),
        ],
        0,
        3,
    )
    assert ring.read(3) == ([], 0, 3)


@given(
    bits=st.integers(0, 5),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("record"), st.integers(1, 12)),
            st.tuples(st.just("read"), st.integers(0, 12)),
            st.tuples(st.just("jump"), st.integers(0, 60)),
        ),
        max_size=40,
    ),
)
def test_ring_agrees_with_a_list(core, bits, steps):
    ring = Ring(core, 1 << bits)
    written: list[tuple] = []
    since = 0
    for step, amount in steps:
        if step == "record":
            for _ in range(amount):
                number = len(written) + 1
                tag, key = payload(number)
                event = (number, 1 + number % 3, tag, key, number % 2 == 0)
                ring.record(*event[1:])
                written.append(event)
        elif step == "jump":
            since = min(amount, len(written))
        else:
            events, lost, last = ring.read(since, amount)
            oldest = max(len(written) - ring.capacity, 0) if amount else 0
            first = max(since, oldest)
            assert events == written[first : first + amount]
            assert lost == first - since
            assert len(events) + lost == last - since  # D4
            since = last
    assert ring.dropped == 0


def test_from_now_on_skips_what_there_is(core):
    ring = Ring(core, 8)
    for number in range(20):
        ring.record(STORED, *payload(number), False)
    assert ring.read(2**64 - 1) == ([], 0, 20)
    assert ring.read(2**64 - 1, 0) == ([], 0, 20)


def test_number_from_an_earlier_life_is_a_gap(core):
    ring = Ring(core, 8)
    ring.record(STORED, *payload(1), False)
    events, lost, last = ring.read(since=1000)
    assert [event[0] for event in events] == [1]
    assert (lost, last) == (1, 1)


def test_writer_drops_its_event_at_a_stalled_slot(core):
    ring = Ring(core, 4)
    ring.slot_of(1).number = WRITING | 1  # somebody claimed event 1 and died
    ring.header.event_head = 1
    for number in range(2, 10):
        ring.record(STORED, *payload(number), False)
    assert ring.dropped == 2  # 5 and 9
    assert ring.slot_of(1).number == WRITING | 1

    began = time.monotonic()
    events, lost, last = ring.read(0)
    assert time.monotonic() - began < 20 * WAIT_SECONDS
    assert [event[0] for event in events] == [6, 7, 8]
    assert (lost, last) == (6, 9)


def test_writer_that_was_overtaken_drops_its_event(core):
    ring = Ring(core, 4)
    ring.slot_of(1).number = 5  # a lap ahead of the one who now writes event 1
    before = list(ring.slot_of(1).words)
    ring.record(STORED, *payload(1), False)
    assert ring.dropped == 1
    assert ring.slot_of(1).number == 5
    assert list(ring.slot_of(1).words) == before


def test_reader_waits_once_for_all_late_writers(core):
    ring = Ring(core, 64)
    ring.header.event_head = 40  # forty numbers drawn, not one slot claimed
    began = time.monotonic()
    events, lost, last = ring.read(0)
    waited = time.monotonic() - began
    assert (events, lost, last) == ([], 40, 40)
    assert WAIT_SECONDS * 0.9 <= waited < 20 * WAIT_SECONDS


def test_reader_gets_the_event_of_a_writer_that_is_only_late(core):
    ring = Ring(core, 8)
    tag, key = payload(1)
    other = Ring(core, 8)
    other.record(REMOVED, tag, key, True)
    ring.header.event_head = 1
    ring.slot_of(1).number = WRITING | 1

    def finish():
        time.sleep(WAIT_SECONDS / 10)
        for i in range(7):
            ring.slot_of(1).words[i] = other.slot_of(1).words[i]
        ring.slot_of(1).number = 1

    late = threading.Thread(target=finish)
    late.start()
    result = ring.read(0)
    late.join()
    assert result in [([(1, REMOVED, tag, key, True)], 0, 1), ([], 1, 1)]
    # The second answer is that of a machine that let the writer sleep too long.
    assert ring.read(0)[0] == [(1, REMOVED, tag, key, True)]


@given(
    numbers=st.lists(
        st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)), min_size=8, max_size=8
    ),
    first_words=st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=8),
    head=st.one_of(st.integers(0, 30), st.integers(0, 2**64 - 1)),
    since=st.one_of(st.integers(0, 30), st.integers(0, 2**64 - 2)),
    room=st.integers(0, 10),
)
def test_noise_in_the_region_ends_in_losses_not_in_faults(
    core, numbers, first_words, head, since, room
):
    ring = Ring(core, 8)
    for slot, number, word in zip(ring.slots, numbers, first_words, strict=True):
        # Not "late": that costs a tenth of a second and has tests of its own.
        slot.number = number if number > head else head
        slot.words[0] = word
    ring.header.event_head = head
    events, lost, last = ring.read(since, room)
    known_since = since if since <= head else 0
    assert len(events) + lost - (since > head) == last - known_since
    assert all(STORED <= event[1] <= CLEARED for event in events)
    assert last <= head


@pytest.mark.parametrize("capacity", [4, 64, 4096])
def test_threads_write_while_one_reads(core, capacity):
    ring = Ring(core, capacity)
    writers, rounds = 4, 3000
    payloads = [payload(i) for i in range(50)]

    def write(own: int) -> None:
        for i in range(rounds):
            tag, key = payloads[(own + i) % 50]
            ring.record(STORED, tag, key, False)

    threads = [threading.Thread(target=write, args=(own,)) for own in range(writers)]
    for thread in threads:
        thread.start()
    since = delivered = gone = 0
    running = True
    while running or since < writers * rounds:
        running = any(thread.is_alive() for thread in threads)
        events, lost, last = ring.read(since, 500)
        assert len(events) + lost == last - since
        numbers = [event[0] for event in events]
        assert numbers == sorted(set(numbers))
        assert all(since < number <= last for number in numbers)
        for _, _, tag, key, _ in events:
            assert key == hashlib.sha256(tag).digest()
        since, delivered, gone = last, delivered + len(events), gone + lost
    for thread in threads:
        thread.join()
    assert ring.header.event_head == writers * rounds
    assert delivered + gone == writers * rounds
    assert delivered > 0
    if capacity == 4096 and ring.dropped == 0:
        # Whoever comes late finds the last lap whole.
        events, lost, _ = ring.read(0, 5000)
        assert len(events) == capacity
