# SPDX-License-Identifier: Apache-2.0
"""Slots: who is alive, what the dead left, and fork (S1 to S3)."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import struct
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opened import (
    CAPACITY,
    DEAD,
    DYING,
    FREE,
    LIVE,
    RESERVED,
    Opened,
    Peer,
    Refused,
    payload_of,
    stopped,
)
from os_faults import OsTable

F_OFD_SETLK = 37


def lock_byte(path, byte: int) -> int:
    """Locks a byte as a process does that holds a slot; returns the descriptor."""
    fd = os.open(path, os.O_RDWR)
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    fcntl.fcntl(fd, F_OFD_SETLK, lock)
    return fd


def mask_of(cache: Opened) -> int:
    masks = cache.region.masks
    union = 0
    for entry in range(cache.region.layout.entry_count):
        union |= masks[entry]
    return union


# ---- alive or dead -----------------------------------------------------------------


def test_each_process_has_a_slot_of_its_own(core, volume_path):
    with Opened(core, volume_path) as cache, Peer(volume_path) as peer:
        assert (cache.volume.slot, peer.hello["slot"]) == (0, 1)
        assert core.lib.ckv_slot_alive(cache.volume, 1, peer.hello["incarnation"])
        assert cache.stats().processes == 2
        peer.close()
        assert not core.lib.ckv_slot_alive(cache.volume, 1, peer.hello["incarnation"])
        assert cache.region.slots[1].unswept == 0  # left in order
        assert cache.stats().swept_slots == 0


def test_a_slot_has_a_new_incarnation_with_every_owner(core, volume_path):
    with Opened(core, volume_path) as cache:
        seen = []
        for _ in range(3):
            with Peer(volume_path) as peer:
                seen.append(peer.hello["incarnation"])
                assert peer.hello["slot"] == 1
                peer.kill()
        assert seen == [1, 2, 3]
        # S3: alive as to its own incarnation only.
        with Peer(volume_path) as peer:
            assert core.lib.ckv_slot_alive(cache.volume, 1, 4)
            assert not core.lib.ckv_slot_alive(cache.volume, 1, 3)
            assert not core.lib.ckv_slot_alive(cache.volume, 1, 5)
        assert not core.lib.ckv_slot_alive(cache.volume, 64, 1)


def test_a_stopped_process_is_alive_and_a_killed_one_is_not(core, volume_path):
    with Opened(core, volume_path) as cache, Peer(volume_path) as peer:
        cache.put(b"k", b"x" * 5000)
        assert peer.ask("pin", "k")
        with stopped(peer):
            assert core.lib.ckv_slot_alive(cache.volume, 1, 1)
            assert core.lib.ckv_slot_sweep_dead(cache.volume, 0b11) == 0b11
            assert not core.lib.ckv_slot_sweep(cache.volume, 1)
            assert mask_of(cache) == 0b10
        peer.kill()
        assert not core.lib.ckv_slot_alive(cache.volume, 1, 1)
        assert core.lib.ckv_slot_sweep_dead(cache.volume, 0b11) == 0b01
        assert mask_of(cache) == 0
        assert cache.stats().swept_slots == 1
        assert cache.stats().pinned_entries == 0


def test_a_forked_child_does_not_keep_its_parent_alive(core, volume_path):
    with Opened(core, volume_path) as cache, Peer(volume_path) as peer:
        child = peer.ask("fork")
        try:
            peer.kill()
            os.kill(child, 0)  # the child lives
            assert not core.lib.ckv_slot_alive(cache.volume, 1, 1)
        finally:
            os.kill(child, signal.SIGKILL)


def test_closing_every_descriptor_does_not_give_the_slot_up(core, volume_path):
    with Opened(core, volume_path) as cache, Peer(volume_path) as peer:
        assert peer.ask("closerange")
        assert core.lib.ckv_slot_alive(cache.volume, 1, 1)


def test_a_plain_open_and_close_of_the_file_does_not_give_the_slot_up(
    core, volume_path
):
    with Opened(core, volume_path), Peer(volume_path) as peer:
        with open(volume_path, "rb"):
            pass
        assert peer.ask("put", "k", 100) == core.lib.CKV_OK


def test_a_child_must_open_for_itself(core, volume_path):
    with Opened(core, volume_path), Peer(volume_path) as peer:
        inherited, slot, status = peer.ask("fork-open", str(volume_path))
        assert inherited == core.lib.CKV_E_FORKED
        assert slot == 2
        assert status == core.lib.CKV_OK
        assert peer.ask("put", "after", 100) == core.lib.CKV_OK


def test_the_sixty_fifth_process_is_told_so(core, volume_path):
    with Opened(core, volume_path):
        base = core.lib.CKV_SLOT_LOCK_BYTE
        held = [lock_byte(volume_path, base + slot) for slot in range(1, 64)]
        try:
            with Peer(volume_path) as peer:
                assert peer.hello["status"] == core.lib.CKV_E_NO_SLOT
                assert "64 processes" in peer.hello["text"]
                assert 'mode "r"' in peer.hello["text"]
        finally:
            for fd in held:
                os.close(fd)
        with Peer(volume_path) as peer:
            assert peer.hello["slot"] == 1


def test_fork_is_kept_out_while_an_anchor_is_made(core, volume_path):
    """Children forked at any moment of an open hold no lock of their parent."""
    with Peer(volume_path) as peer:
        second = str(volume_path.parent / "second.cyc")
        children, slot, incarnation = peer.ask("fork-storm", second, timeout=60)
        assert children > 3
        # No child holds a byte of the closed ones, so a new life began each time.
        assert (slot, incarnation) == (0, 1)


@pytest.mark.parametrize("member", ["lock_byte", "map", "dont_fork"])
def test_a_claim_that_fails_leaves_no_lock(core, volume_path, member):
    with Opened(core, volume_path):
        pass
    armed = []
    with OsTable(core) as table:

        def fail(*arguments):
            # The first page of the file, mapped for an anchor; or any lock, any advice.
            if member == "map" and arguments[1] != 4096:
                return getattr(table.native, member)(*arguments)
            if member == "lock_byte" and arguments[1] < core.lib.CKV_SLOT_LOCK_BYTE:
                return getattr(table.native, member)(*arguments)
            armed.append(arguments)
            return -errno.ENOMEM

        table.replace(member, fail)
        with pytest.raises(Refused) as refused:
            Opened(core, volume_path)
    assert armed
    assert refused.value.text
    with Opened(core, volume_path) as cache:
        assert (cache.volume.slot, cache.volume.incarnation) == (0, 1)


# ---- sweeping ----------------------------------------------------------------------


def owned(kind: int, slot: int, incarnation: int) -> int:
    return incarnation << 9 | slot << 3 | kind


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), swept=st.integers(1, 63))
def test_a_sweep_clears_one_column_and_nothing_else(core, sweep_cache, seed, swept):
    cache, rng = sweep_cache, random.Random(seed)
    region, count = cache.region, cache.region.layout.entry_count
    masks, states = [], []
    for entry in range(count):
        kind = rng.choice([FREE, FREE, RESERVED, DYING, DEAD, LIVE])
        slot = rng.choice([swept, rng.randrange(1, 64)])
        state = owned(kind, slot, rng.randrange(1, 4))
        if kind in (FREE, DEAD):
            state = kind
        elif kind == LIVE:
            state = rng.randrange(1, 10**6) << 3 | LIVE
        masks.append(rng.getrandbits(64) & rng.getrandbits(64))
        states.append(state)  # every bit is put back to 0 at the end
        region.masks[entry], region.states[entry] = masks[-1], state
    hints = [rng.choice([0, rng.getrandbits(64)]) for _ in range(core.lib.CKV_HINTS)]
    for number, word in enumerate(hints):
        region.hints[number].word = word
    slot = region.slots[swept]
    slot.unswept = slot.pinned_entries = slot.pinned_bytes = slot.oldest_pin_ns = 1
    before = cache.stats().swept_slots

    assert core.lib.ckv_slot_sweep(cache.volume, swept)

    bit = 1 << swept
    for entry in range(count):
        assert region.masks[entry] == masks[entry] & ~bit
        left = states[entry]
        if left & 7 in (RESERVED, DYING) and left >> 3 & 63 == swept:
            left = DEAD
        assert region.states[entry] == left
        region.masks[entry], region.states[entry] = 0, FREE
    for number, word in enumerate(hints):
        of_slot = word != 0 and word >> 32 & 63 == swept
        assert region.hints[number].word == (0 if of_slot else word)
        region.hints[number].word = 0
    assert slot.unswept == slot.pinned_entries == slot.pinned_bytes == 0
    assert slot.oldest_pin_ns == 0
    assert cache.stats().swept_slots == before + 1


@pytest.fixture
def sweep_cache(core, volume_path):
    with Opened(core, volume_path) as cache:
        yield cache


def test_our_own_slot_is_never_swept(core, volume_path):
    with Opened(core, volume_path) as cache:
        cache.put(b"k", b"x" * 5000)
        lease = cache.pin(b"k")
        assert not core.lib.ckv_slot_sweep(cache.volume, 0)
        assert core.lib.ckv_slot_sweep_dead(cache.volume, 1) == 1
        assert mask_of(cache) == 1
        core.lib.ckv_lease_release(lease)


# ---- death at every step of a put and a kill ---------------------------------------

PUT_POINTS = [
    "put.hint",
    "put.locked",
    "put.evicted",
    "put.occupy",
    "put.reserved",
    "put.sealed",
    "put.recorded",
    "put.published",
    "put.strike",
    "stripe.link",
    "stripe.unlink",
    "stripe.unlock",
    "index.inserted",
    "index.erased",
    "kill.condemn",
    "kill.condemned",
    "kill.strike",
    "kill.struck",
]


@pytest.mark.parametrize("point", PUT_POINTS)
@pytest.mark.parametrize("count", [1, 70])
def test_a_death_inside_a_put_costs_nobody_anything(core, volume_path, point, count):
    """The survivor finds what was stored, can store, and every invariant holds."""
    size = 60_000
    with Opened(core, volume_path) as cache:
        cache.put(b"mine", payload_of(b"mine", size))
        acknowledged = []
        with Peer(volume_path, point=f"{point}:kill:{count}") as peer:
            for number in range(400):
                key = f"k{number % 320}"
                flags = core.lib.CKV_PUT_OVERWRITE if number >= 320 else 0
                answer = peer.ask("put", key, size, flags)
                if answer is None:
                    break
                assert answer in (core.lib.CKV_OK, core.lib.CKV_PRESENT)
                acknowledged.append(key)
            else:
                pytest.skip(f"{point} is not reached {count} times")
            peer.process.wait(timeout=30)
        begin = time.monotonic()
        assert cache.put(b"next", payload_of(b"next", size)) == core.lib.CKV_OK
        assert time.monotonic() - begin < 2
        cache.assert_sound()
        assert cache.states(RESERVED) == cache.states(DYING) == []
        for key in {*acknowledged, "mine", "next"}:
            stored = cache.get(key.encode())
            assert stored in (None, payload_of(key.encode(), size))
        # Three laps go over everything that was left behind.
        for number in range(3 * CAPACITY // size):
            key = f"lap{number}".encode()
            assert cache.put(key, payload_of(key, size)) == core.lib.CKV_OK
        cache.assert_sound()
        live = len(cache.states(LIVE))
    with Opened(core, volume_path) as cache:  # and so it is after a rebuild
        cache.assert_sound()
        assert len(cache.states(LIVE)) == live


@pytest.mark.parametrize(
    "point", ["sweep.begin", "sweep.strike", "sweep.struck", "sweep.mask", "sweep.end"]
)
def test_a_death_inside_a_sweep_leaves_it_to_the_next(core, volume_path, point):
    with Opened(core, volume_path) as cache:
        cache.put(b"k", payload_of(b"k", 5000))
        with Peer(volume_path, point="put.recorded:kill") as first:
            assert first.ask("pin", "k")
            assert first.ask("put", "lost", 5000) is None
            first.process.wait(timeout=30)
        assert cache.region.slots[1].unswept == 1
        with Peer(volume_path, point=f"{point}:kill") as second:  # sweeps as it claims
            assert second.hello is None
            second.process.wait(timeout=30)
        with Peer(volume_path) as third:
            assert third.hello["slot"] == 1
            assert third.ask("put", "more", 5000) == core.lib.CKV_OK
        assert mask_of(cache) == 0
        cache.assert_sound()
        assert cache.get(b"lost") is None
        assert cache.get(b"k") == payload_of(b"k", 5000)
    with Opened(core, volume_path) as cache:
        assert cache.get(b"lost") is None  # struck, not only forgotten


def test_views_survive_the_death_of_those_who_share_them(core, volume_path):
    """The dead one's bit goes, ours stays."""
    with Opened(core, volume_path) as cache:
        data = payload_of(b"k", 60_000)
        cache.put(b"k", data)
        lease = cache.pin(b"k")
        with Peer(volume_path) as peer:
            assert peer.ask("pin", "k")
            assert mask_of(cache) == 0b11
            peer.kill()
        length = core.ffi.new("size_t *")
        view = core.ffi.buffer(core.lib.ckv_lease_data(lease[0], length), len(data))
        for number in range(3 * CAPACITY // 60_000):
            key = f"lap{number}".encode()
            cache.put(key, payload_of(key, 60_000))
        assert bytes(view) == data
        assert mask_of(cache) & ~1 == 0
        core.lib.ckv_lease_release(lease)
