# SPDX-License-Identifier: Apache-2.0
"""The verifier finds each fault that is put in, and no other; repair ends it."""

from __future__ import annotations

import errno
import random

import pytest
from opened import DEAD, FREE, LIVE, PAGE, Opened, Peer, Refused, payload_of, stopped
from os_faults import OsTable

SIZE = 60_000
KEYS = [f"key {number}".encode() for number in range(20)]


@pytest.fixture
def filled(core, volume_path):
    with Opened(core, volume_path) as cache:
        for key in KEYS:
            assert cache.put(key, payload_of(key, SIZE), 0, b"head") == core.lib.CKV_OK
        yield cache


def raw_write(cache: Opened, offset: int, data: bytes) -> None:
    path = cache.ffi.string(cache.volume.files[0].path)
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def raw_read(cache: Opened, offset: int, length: int) -> bytes:
    with open(cache.ffi.string(cache.volume.files[0].path), "rb") as file:
        file.seek(offset)
        return file.read(length)


def flip(cache: Opened, offset: int) -> None:
    raw_write(cache, offset, bytes([raw_read(cache, offset, 1)[0] ^ 0x10]))


def data_offset(cache: Opened, entry: int) -> int:
    first_page = cache.region.places[entry].first_page
    return cache.volume.files[0].geometry.data_offset + first_page * PAGE


def record_offset(cache: Opened, entry: int) -> int:
    return cache.volume.files[0].geometry.table_offset + entry * 80


def test_a_sound_volume_has_no_faults(filled):
    report = filled.verify()
    assert report.entries_checked == len(KEYS)
    assert report.bytes_checked == len(KEYS) * (SIZE + 4)
    assert report.structure_faults == report.damaged_payloads == report.repaired == 0
    assert report.first_fault == ""


@pytest.mark.parametrize("where", [0, SIZE // 2, SIZE - 1, SIZE, SIZE + 3])
def test_each_flipped_bit_is_found_and_repair_drops_the_block(filled, where):
    damaged = filled.states(LIVE)[::4]
    for entry in damaged:
        flip(filled, data_offset(filled, entry) + where)
    report = filled.verify()
    assert report.damaged_payloads == len(damaged)
    assert report.structure_faults == report.repaired == 0
    assert f"entry {damaged[0]}" in report.first_fault
    assert len(filled.states(LIVE)) == len(KEYS)
    report = filled.verify(repair=True)
    assert report.repaired == len(damaged)
    assert len(filled.states(LIVE)) == len(KEYS) - len(damaged)
    filled.assert_sound()
    found = [filled.get(key) for key in KEYS]
    assert sum(data is None for data in found) == len(damaged)
    assert all(
        data in (None, payload_of(key, SIZE))
        for key, data in zip(KEYS, found, strict=True)
    )


def test_bytes_of_the_last_page_that_belong_to_nobody_do_not_matter(filled):
    entry = filled.states(LIVE)[3]
    flip(filled, data_offset(filled, entry) + SIZE + 4)
    filled.assert_sound()


def test_what_the_device_does_not_deliver_is_told_apart(core, filled):
    entry = filled.states(LIVE)[5]
    begin = data_offset(filled, entry)
    with OsTable(core) as table:

        def read(fd, iov, count, offset):
            if begin <= offset < begin + SIZE:
                return -errno.EIO
            return table.native.read_at(fd, iov, count, offset)

        table.replace("read_at", read)
        report = filled.verify()
    assert (report.unreadable, report.damaged_payloads) == (1, 0)
    assert "does not deliver" in report.first_fault
    filled.assert_sound()


# ---- structure ---------------------------------------------------------------------


def break_index(cache: Opened, entry: int) -> None:
    region = cache.region
    for number in range(region.layout.bucket_count):
        for slot in range(7):
            word = region.buckets[number].slots[slot]
            if word != 0 and word & 0xFFFFFFFF == entry:
                region.buckets[number].slots[slot] = 0


def granule_of(cache: Opened, entry: int) -> int:
    granule_pages = cache.volume.files[0].geometry.granule_bytes // PAGE
    return cache.region.places[entry].first_page // granule_pages


def break_page_map(cache: Opened, entry: int) -> None:
    cache.region.page_map[granule_of(cache, entry)] = 0


def break_chain(cache: Opened, entry: int) -> None:
    cache.region.links[entry] = entry + 1  # a circle


def break_foreign(cache: Opened, entry: int) -> None:
    other = next(
        e
        for e in cache.states(LIVE)
        if granule_of(cache, e) != granule_of(cache, entry)
    )
    cache.region.page_map[granule_of(cache, entry)] = other + 1


def break_far(cache: Opened, entry: int) -> None:
    cache.region.links[entry] = cache.region.layout.entry_count + 7


def break_total(cache: Opened, entry: int) -> None:
    cache.region.namespaces[cache.region.owners[entry]].entries += 3


def break_bytes(cache: Opened, entry: int) -> None:
    cache.region.namespaces[cache.region.owners[entry]].bytes -= PAGE


def break_state(cache: Opened, entry: int) -> None:
    free = cache.states(FREE)[0]
    cache.region.states[free] = 7


def break_record(cache: Opened, entry: int) -> None:
    flip(cache, record_offset(cache, entry) + 40)


def break_place(cache: Opened, entry: int) -> None:
    cache.region.places[entry].pages += 1


def break_owner(cache: Opened, entry: int) -> None:
    cache.region.owners[entry] = 200


def break_sequence(cache: Opened, entry: int) -> None:
    cache.region.header.sequence = 1


def break_cursor(cache: Opened, entry: int) -> None:
    cache.region.stripes[0].cursor_page = 1 << 31


def break_holes(cache: Opened, entry: int) -> None:
    cache.region.stripes[0].hole_count = 65


def break_strike(cache: Opened, entry: int) -> None:
    """A record that comes back although its number is free."""
    record = raw_read(cache, record_offset(cache, entry), 80)
    key = next(k for k in KEYS if cache.get(k) is not None)
    before = cache.states(LIVE)
    assert cache.remove(key)
    (gone,) = set(before) - set(cache.states(LIVE))
    raw = cache.ffi.new("struct ckv_record *")
    cache.ffi.buffer(raw)[:] = record
    file_id = cache.ffi.new("uint8_t[16]", bytes(cache.volume.files[0].header.file_id))
    cache.lib.ckv_record_seal(raw, file_id, gone)
    raw_write(cache, record_offset(cache, gone), bytes(cache.ffi.buffer(raw)))
    assert cache.region.states[gone] == DEAD


BREAKS = [value for name, value in globals().items() if name.startswith("break_")]


@pytest.mark.parametrize("damage", BREAKS, ids=lambda value: value.__name__)
def test_each_broken_structure_is_found_and_repaired(filled, damage):
    entry = filled.states(LIVE)[7]
    damage(filled, entry)
    report = filled.verify()
    assert report.structure_faults >= 1
    assert report.first_fault
    assert report.repaired == 0
    assert filled.verify(repair=True).repaired >= 1
    filled.verify(repair=True)  # what a first repair uncovered
    filled.assert_sound()
    for key in KEYS:
        assert filled.get(key) in (None, payload_of(key, SIZE))
    for number in range(600):
        key = f"lap {number}".encode()
        assert filled.put(key, payload_of(key, SIZE)) == filled.lib.CKV_OK
    filled.assert_sound()


@pytest.mark.parametrize(
    "damage", [break_index, break_page_map, break_total, break_cursor]
)
def test_a_repair_of_volatile_structure_loses_no_block(filled, damage):
    damage(filled, filled.states(LIVE)[7])
    filled.verify(repair=True)
    filled.assert_sound()
    assert all(filled.get(key) == payload_of(key, SIZE) for key in KEYS)
    assert filled.count() == len(KEYS)


def test_of_two_that_overlap_the_older_one_goes(filled):
    older, newer = filled.states(LIVE)[:2]
    if filled.region.states[older] > filled.region.states[newer]:
        older, newer = newer, older
    # The newer one claims to begin in the middle of the older one.
    granule = granule_of(filled, newer)
    raw = filled.ffi.new("struct ckv_record *")
    buffer = filled.ffi.buffer(raw)
    buffer[:] = raw_read(filled, record_offset(filled, newer), 80)
    raw.first_page = filled.region.places[older].first_page + 1
    file_id = filled.ffi.new(
        "uint8_t[16]", bytes(filled.volume.files[0].header.file_id)
    )
    filled.lib.ckv_record_seal(raw, file_id, newer)
    raw_write(filled, record_offset(filled, newer), bytes(buffer))
    filled.region.page_map[granule] = filled.region.links[newer]
    filled.region.places[newer].first_page = raw.first_page
    filled.lib.ckv_stripe_link(filled.volume, newer)
    report = filled.verify()
    assert "overlap" in report.first_fault
    filled.verify(repair=True)
    assert older not in filled.states(LIVE)
    filled.verify(repair=True)
    filled.assert_sound()


def test_progress_is_told_and_can_stop_the_walk(filled):
    seen = []
    filled.verify(progress=lambda done, total: seen.append((done, total)) or 0)
    assert seen == sorted(seen)
    assert seen[-1] == (256, 256)
    report = filled.verify(progress=lambda done, total: 1)
    assert report.entries_checked == 0


def test_a_reader_verifies_and_is_refused_a_repair(core, volume_path, filled):
    filled.close()
    with Opened(
        core, volume_path, capacity=0, mode=core.lib.CKV_MODE_READ, create=False
    ) as cache:
        report = cache.verify()
        assert (report.entries_checked, report.structure_faults) == (len(KEYS), 0)
        with pytest.raises(Refused) as refused:
            cache.verify(repair=True)
        assert refused.value.status == core.lib.CKV_E_READ_ONLY


# ---- beside others -----------------------------------------------------------------


def test_live_traffic_is_not_taken_for_faults(core, volume_path, rng: random.Random):
    with (
        Opened(core, volume_path) as cache,
        Peer(volume_path) as one,
        Peer(volume_path) as two,
    ):
        for peer, size in ((one, 60_000), (two, 9_000)):
            peer.process.stdin.write(f'["churn", {size}, 6]\n')
            peer.process.stdin.flush()
        rounds = 0
        while not select_ready(one) and rounds < 1000:
            report = cache.verify(repair=rng.random() < 0.3)
            assert report.structure_faults == 0, report.first_fault
            assert report.damaged_payloads == 0, report.first_fault
            rounds += 1
        assert rounds > 2
        assert one._answer() > 0
        assert two._answer() > 0
        cache.assert_sound()


def select_ready(peer: Peer) -> bool:
    import select

    return bool(select.select([peer.process.stdout], [], [], 0)[0])


def test_a_stopped_lock_holder_does_not_stop_the_walk(core, volume_path):
    with Opened(core, volume_path) as cache:
        cache.put(b"k", payload_of(b"k", SIZE))
        with Peer(volume_path, point="put.locked:stop") as peer:
            peer.process.stdin.write('["put", "other", 5000]\n')
            peer.process.stdin.flush()
            import time

            deadline = time.monotonic() + 10
            while cache.region.stripes[0].lock == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            report = cache.verify()
            assert report.structure_faults == 0, report.first_fault
            assert report.entries_checked == 1
            with stopped(peer):
                pass  # goes on
            assert peer._answer() == core.lib.CKV_OK
        cache.assert_sound()


# ---- recovery ----------------------------------------------------------------------


def fail(cache: Opened) -> None:
    cache.lib.ckv_volume_fail_path(
        cache.volume, cache.ffi.addressof(cache.volume.files[0]), b"a test", errno.EIO
    )
    assert cache.get(KEYS[0]) is None
    assert cache.put(b"new", b"x" * 100) == cache.lib.CKV_FAILED_PATH


def test_a_sound_path_comes_back(filled):
    fail(filled)
    assert filled.recover() == 1
    assert all(filled.get(key) == payload_of(key, SIZE) for key in KEYS)
    assert filled.put(b"new", b"x" * 100) == filled.lib.CKV_OK
    filled.assert_sound()


def test_recovery_believes_no_mark_and_drops_what_was_lost(filled):
    for key in KEYS:
        assert filled.get(key) is not None  # every mark is set
    lost = filled.states(LIVE)[2::5]
    for entry in lost:
        raw_write(filled, data_offset(filled, entry), bytes(SIZE))
    fail(filled)
    assert filled.recover() == 1
    assert not set(lost) & set(filled.states(LIVE))
    filled.assert_sound()


def test_a_path_that_fails_again_stays_out_of_use(core, filled):
    fail(filled)
    with OsTable(core) as table:
        table.replace("sync_file", lambda fd: -errno.EIO)
        assert filled.recover() == 0
    assert filled.get(KEYS[0]) is None
    assert filled.recover() == 1
    assert filled.get(KEYS[0]) == payload_of(KEYS[0], SIZE)
