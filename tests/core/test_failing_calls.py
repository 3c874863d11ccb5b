# SPDX-License-Identifier: Apache-2.0
"""What the sweep over failing calls (tests/faults) found once, each by itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opened import LIVE, PAGE, Opened, Refused, payload_of
from os_faults import OsTable

SIZE = 60_000
KEYS = [f"key {number}".encode() for number in range(12)]
INTERRUPTED = ("truncate_file", "allocate", "sync_file", "lock_byte", "byte_held")


@pytest.fixture
def table(core) -> Iterator[OsTable]:
    with OsTable(core) as table:
        yield table


def filled(core: Any, path: Any) -> Opened:
    cache = Opened(core, path)
    for key in KEYS:
        assert cache.put(key, payload_of(key, SIZE)) == core.lib.CKV_OK
    return cache


def in_table(cache: Opened, offset: int) -> bool:
    geometry = cache.volume.files[0].geometry
    return 0 <= offset - geometry.table_offset < geometry.table_bytes


def fail_strikes(cache: Opened, table: OsTable, code: int) -> None:
    """Every write of four bytes into the table: that strikes a record."""

    def write(fd: int, iov: Any, count: int, offset: int) -> int:
        if in_table(cache, offset) and count == 1 and iov[0].iov_len == 4:
            return -code
        return table.native.write_at(fd, iov, count, offset)

    table.replace("write_at", write)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENOMEM])
def test_n3_a_removal_that_could_not_be_recorded_is_not_called_durable(
    core, table, volume_path, code
):
    with filled(core, volume_path) as cache:
        fail_strikes(cache, table, code)
        assert cache.remove(KEYS[3])
        table.replace("write_at", table.native.write_at)
        assert not cache.contains(KEYS[3])
        with pytest.raises(Refused):  # "durable with the next sync"
            cache._call(core.lib.ckv_sync, cache.cache)
        assert cache.recover() == 1
        cache.assert_sound()
        assert not cache.contains(KEYS[3])
        assert all(cache.contains(key) for key in KEYS if key != KEYS[3])
        cache._call(core.lib.ckv_sync, cache.cache)
    with Opened(core, volume_path) as cache:
        assert not cache.contains(KEYS[3])
        assert cache.count() == len(KEYS) - 1


def test_an_evicted_block_whose_record_stays_fails_the_path(core, table, volume_path):
    """Else its record would come back over the pages of another block."""
    with Opened(core, volume_path) as cache:
        number = 0
        while cache.stats().evictions == 0:
            cache.put(b"%032d" % number, bytes(400_000))
            number += 1
        fail_strikes(cache, table, errno.EDQUOT)
        for other in range(4):
            cache.put(b"new %028d" % other, bytes(900_000))
        table.replace("write_at", table.native.write_at)
        assert cache.stats().failed_paths == 1
        assert cache.recover() == 1
        cache.assert_sound()


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EAGAIN, errno.EINVAL])
@pytest.mark.parametrize("care", ["repair", "recover"])
def test_n3_a_read_that_fails_for_want_of_memory_costs_no_block(
    core, table, volume_path, code, care
):
    with filled(core, volume_path) as cache:
        data = cache.volume.files[0].geometry.data_offset

        def read(fd: int, iov: Any, count: int, offset: int) -> int:
            if offset >= data + 20 * PAGE:
                return -code
            return table.native.read_at(fd, iov, count, offset)

        if care == "recover":
            file = core.ffi.addressof(cache.volume.files[0])
            core.lib.ckv_volume_fail_path(cache.volume, file, b"a test", errno.EIO)
        table.replace("read_at", read)
        if care == "repair":
            assert cache.verify(repair=True).unreadable > 0
        else:
            assert cache.recover() == 0
        table.replace("read_at", table.native.read_at)
        if care == "recover":
            assert cache.recover() == 1
        assert len(cache.states(LIVE)) == len(KEYS)
        assert all(cache.get(key) == payload_of(key, SIZE) for key in KEYS)


def test_repair_gives_up_what_the_medium_does_not_deliver(core, table, volume_path):
    with filled(core, volume_path) as cache:
        data = cache.volume.files[0].geometry.data_offset
        first = cache.region.places[cache.states(LIVE)[5]].first_page * PAGE + data

        def read(fd: int, iov: Any, count: int, offset: int) -> int:
            if first <= offset < first + SIZE:
                return -errno.EIO
            return table.native.read_at(fd, iov, count, offset)

        table.replace("read_at", read)
        assert cache.verify(repair=True).repaired == 1
        table.replace("read_at", table.native.read_at)
        assert len(cache.states(LIVE)) == len(KEYS) - 1
        cache.assert_sound()


def every_other_time(table: OsTable, name: str) -> Callable[..., int]:
    turn = [0]

    def call(*arguments: Any) -> int:
        turn[0] += 1
        if turn[0] % 2:
            return -errno.EINTR
        return int(getattr(table.native, name)(*arguments))

    return call


@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_signal_in_the_middle_of_a_call_changes_nothing(
    core, table, volume_path, name
):
    table.replace(name, every_other_time(table, name))
    with filled(core, volume_path) as cache:
        cache._call(core.lib.ckv_sync, cache.cache)
        assert cache.stats().failed_paths == 0
        file = core.ffi.addressof(cache.volume.files[0])
        core.lib.ckv_volume_fail_path(cache.volume, file, b"a test", errno.EIO)
        assert cache.recover() == 1
        assert cache.count() == len(KEYS)
        assert cache.clear() == len(KEYS)
        assert cache.stats().failed_paths == 0
    with Opened(core, volume_path) as cache:
        assert cache.count() == 0


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_locate_without_a_descriptor_is_an_error_that_names_the_file(
    core, table, volume_path, code
):
    with filled(core, volume_path) as cache:
        assert cache.get(KEYS[0]) is not None
        table.replace("open_file", lambda path, flags, mode: -code)
        lease = core.ffi.new("struct ckv_lease **")
        fd = core.ffi.new("int *")
        offset = core.ffi.new("uint64_t *")
        name, kept = cache._key(KEYS[0])
        with pytest.raises(Refused) as refused:
            cache._call(core.lib.ckv_locate, cache.cache, name, lease, fd, offset)
        assert kept is not None
        assert str(volume_path) in refused.value.text
        assert (lease[0], fd[0]) == (core.ffi.NULL, -1)
        assert cache.region.slots[cache.volume.slot].pinned_entries == 0


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EDQUOT])
def test_the_first_file_of_a_set_goes_when_the_second_cannot_be_made(
    core, table, volume_path, code
):
    second = volume_path.with_name("second.cyc")

    def open_file(path: Any, flags: int, mode: int) -> int:
        name = core.ffi.string(path)
        if name == os.fsencode(second) and flags & os.O_CREAT:
            return -code
        return int(table.native.open_file(path, flags, mode))

    table.replace("open_file", open_file)
    with pytest.raises(Refused):
        Opened(core, volume_path, second)
    assert list(volume_path.parent.iterdir()) == []
    table.replace("open_file", table.native.open_file)
    with Opened(core, volume_path, second) as cache:
        assert cache.put(b"k", b"x") == core.lib.CKV_OK
