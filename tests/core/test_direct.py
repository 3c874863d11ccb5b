# SPDX-License-Identifier: Apache-2.0
"""Reads around the page cache: when, how, and what happens when they fail.

`cold` makes the engine believe that nothing is in memory; the reads are real.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from os_faults import OsTable
from test_put_get import damage, forget_checks, key

from models import MIB, MISS, OK, PAGE, Engine, pattern

KIB = 1024


class Cold:
    """A volume none of whose pages seem to be in memory, and its direct reads."""

    def __init__(self, core: Any, table: OsTable, engine: Engine) -> None:
        self.core, self.table, self.engine = core, table, engine
        self.reads: list[tuple[int, int]] = []  # offset in the data area, bytes
        self.asked = 0
        self.fault: Any = lambda number, bytes_: None
        self.base = int(engine.volume.files[0].geometry.data_offset)
        table.replace("cached", self._cached)
        table.replace("read_at", self._read_at)
        table.replace("make_huge", lambda address, length: 0)

    @property
    def fd(self) -> int:
        return int(self.engine.volume.files[0].direct_fd) - 1

    def _cached(self, fd, offset, length, result):
        self.asked += 1
        result.pages = result.dirty_pages = 0
        return 0

    def _read_at(self, fd, iov, count, offset):
        if fd == self.fd:
            self.reads.append((offset - self.base, iov[0].iov_len))
            failure = self.fault(len(self.reads), iov[0].iov_len)
            if failure is not None and failure < 0:
                return failure
            if failure is not None:
                iov[0].iov_len = failure
        return self.table.native.read_at(fd, iov, count, offset)

    def forget(self) -> None:
        """As after a restart: nothing was verified or read."""
        forget_checks(self.engine)
        for entry in range(self.engine.region.layout.entry_count):
            self.engine.region.heats[entry] = 0
        for i in range(8):
            self.engine.volume.files[0].read_ends[i] = 0
        self.reads.clear()


@pytest.fixture
def table(core) -> Iterator[OsTable]:
    with OsTable(core) as table:
        yield table


@pytest.fixture
def cold(core, table, disk_folder) -> Iterator[Cold]:
    with Engine(core, disk_folder / "kv", 64 * MIB) as engine:
        cold = Cold(core, table, engine)
        probe = cold.core.lib.ckv_file_direct(engine.volume.files)
        if probe < 0:
            pytest.skip("no direct I/O on this file system (CKV_TEST_DISK)")
        yield cold
        assert engine.stats.pinned_entries == 0


def pages(size: int) -> int:
    return max(1, -(-size // PAGE)) * PAGE


def split(total: int, *lengths: int) -> list[bytearray]:
    return [*(bytearray(n) for n in lengths), bytearray(total - sum(lengths))]


@pytest.mark.parametrize(
    ("size", "head"),
    [
        (64 * KIB, b""),
        (64 * KIB + 1, b"h"),
        (2 * MIB, b""),
        (2 * MIB - 1, b"head" * 500),
        (2 * MIB + 4095, b"header"),
        (4 * MIB, b"h" * 65535),
        (9 * MIB + 77, b""),
    ],
)
def test_bytes_and_header_are_read_and_verified(cold, size, head):
    engine = cold.engine
    data = pattern(1, size)
    assert engine.put(b"k", data, header=head) == OK
    cold.forget()
    targets = split(size, 1, 0, 4097, size // 2)
    assert engine.get_into(b"k", *targets) == (OK, size)
    assert b"".join(targets) == data
    stats = engine.stats
    assert (
        stats.direct_bytes == pages(size + len(head)) == sum(n for _, n in cold.reads)
    )
    assert stats.verified_blocks == stats.hits == 1
    assert stats.verified_bytes == size
    assert max(n for _, n in cold.reads) <= 2 * MIB
    # It was read before now: the second reading goes through the page cache.
    assert engine.get_into(b"k", *targets) == (OK, size)
    assert b"".join(targets) == data
    assert engine.stats.direct_bytes == pages(size + len(head))
    assert engine.stats.verified_blocks == 1


def test_small_blocks_are_not_read_directly(cold):
    size = 64 * KIB - 1
    assert cold.engine.put(b"k", pattern(1, size)) == OK
    cold.forget()
    assert cold.engine.get_into(b"k", bytearray(size)) == (OK, size)
    assert cold.reads == []
    assert cold.asked == 0


def test_neighbours_of_a_batch_share_pieces(cold):
    engine = cold.engine
    size, count = 96 * KIB, 64  # 6 MiB: three pieces
    for i in range(count):
        assert engine.put(key(i), pattern(i, size)) == OK
    cold.forget()
    order = sorted(range(count), key=lambda i: i * 37 % count)
    targets = [[bytearray(size)] for _ in order]
    wanted = [(key(i), target) for i, target in zip(order, targets, strict=True)]
    assert engine.get_many_into(wanted) == [(OK, size)] * count
    for i, target in zip(order, targets, strict=True):
        assert target[0] == pattern(i, size)
    assert sorted(n for _, n in cold.reads) == [2 * MIB] * 3
    assert engine.stats.direct_bytes == count * size
    assert engine.stats.hits == engine.stats.verified_blocks == count


def test_a_batch_with_everything(cold):
    """Absent, short, twice, small, large, read before: each as if alone."""
    engine = cold.engine
    sizes = [5 * MIB + 1, 100, 200_000, 0, 3 * MIB, 64 * KIB]
    for i, size in enumerate(sizes):
        assert engine.put(key(i), pattern(i, size), header=b"h" * i) == OK
    cold.forget()
    assert engine.get_into(key(2), bytearray(sizes[2])) == (OK, sizes[2])
    names = [0, 1, 2, 3, 4, 5, 0, 99, 4]
    targets = [[bytearray(sizes[i] if i < 6 else 1)] for i in names]
    targets[-1] = [bytearray(3 * MIB - 1)]
    results = engine.get_many_into(
        [(key(i), target) for i, target in zip(names, targets, strict=True)]
    )
    assert [status for status, _ in results] == [OK] * 7 + [MISS, 9]
    for i, target in zip(names[:7], targets, strict=False):
        assert target[0] == pattern(i, sizes[i])


def test_a_batch_larger_than_a_group(cold):
    engine = cold.engine
    size, count = 70_000, 300
    for i in range(count):
        assert engine.put(key(i), pattern(i, size)) == OK
    cold.forget()
    targets = [[bytearray(size)] for _ in range(count)]
    results = engine.get_many_into([(key(i), targets[i]) for i in range(count)])
    assert results == [(OK, size)] * count
    assert all(targets[i][0] == pattern(i, size) for i in range(count))
    # Of the last 44, less than 4 MiB, each follows another: left to readahead.
    assert engine.stats.direct_bytes == 256 * pages(size)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sizes_and_any_targets(cold, data):
    engine = cold.engine
    engine.clear()
    near = st.sampled_from([64 * KIB, 2 * MIB, 4 * MIB]).flatmap(
        lambda n: st.integers(n - 5000, n + 5000)
    )
    sizes = data.draw(st.lists(near | st.integers(0, 300_000), min_size=1, max_size=6))
    wanted = []
    for i, size in enumerate(sizes):
        head = b"H" * data.draw(st.sampled_from([0, 0, 1, 4096, 65535]))
        assert engine.put(key(i), pattern(i, size), header=head) == OK
        cuts = data.draw(st.lists(st.integers(0, size), max_size=4))
        edges = [0, *sorted(cuts), size + data.draw(st.integers(0, 2))]
        wanted.append(
            (
                key(i),
                [bytearray(b - a) for a, b in itertools.pairwise(edges)],
            )
        )
    cold.forget()
    for i, (status, length) in enumerate(engine.get_many_into(wanted)):
        assert (status, length) == (OK, sizes[i])
        joined = b"".join(wanted[i][1])
        assert joined[: sizes[i]] == pattern(i, sizes[i])
        assert not any(joined[sizes[i] :])


# ---- when ---------------------------------------------------------------------------


def test_stored_order_is_left_to_readahead(cold):
    engine = cold.engine
    size = 128 * KIB
    for i in range(12):
        assert engine.put(key(i), pattern(i, size)) == OK
    cold.forget()
    for i in range(12):
        assert engine.get_into(key(i), bytearray(size)) == (OK, size)
    assert len(cold.reads) == 1  # the first follows nothing
    cold.forget()
    for i in (3, 1, 7, 5, 11, 9, 0):
        assert engine.get_into(key(i), bytearray(size)) == (OK, size)
    assert len(cold.reads) == 7


def test_what_readahead_brought_in_is_part_of_stored_order(cold, table):
    engine = cold.engine
    size = 128 * KIB
    for i in range(12):
        assert engine.put(key(i), pattern(i, size)) == OK
    cold.forget()
    asked = 0

    def cached(fd, offset, length, result):
        nonlocal asked
        asked += 1
        result.pages = length // PAGE if asked % 4 else 0
        result.dirty_pages = 0
        return 0

    table.replace("cached", cached)
    for i in range(12):
        assert engine.get_into(key(i), bytearray(size)) == (OK, size)
    assert cold.reads == []  # those that are not in memory follow some that are


def test_several_readers_in_stored_order_are_told_apart(cold):
    engine = cold.engine
    size = 128 * KIB
    for i in range(30):
        assert engine.put(key(i), pattern(i, size)) == OK
    cold.forget()
    for i in range(10):
        for reader in range(3):
            assert engine.get_into(key(10 * reader + i), bytearray(size))[0] == OK
    assert len(cold.reads) == 3


@pytest.mark.parametrize(
    ("cached", "dirty", "direct"),
    [(0, 0, True), (64, 0, True), (65, 0, False), (1, 1, False), (512, 0, False)],
)
def test_what_is_in_memory_decides(cold, table, cached, dirty, direct):
    asked: list[tuple[int, int]] = []

    def counts(fd, offset, length, result):
        asked.append((offset - cold.base, length))
        result.pages, result.dirty_pages = cached, dirty
        return 0

    engine = cold.engine
    assert engine.put(b"k", pattern(1, 2 * MIB)) == OK
    cold.forget()
    table.replace("cached", counts)
    target = bytearray(2 * MIB)
    assert engine.get_into(b"k", target) == (OK, 2 * MIB)
    assert target == pattern(1, 2 * MIB)
    assert bool(cold.reads) == direct
    info = engine.list()[0]
    # Once more before it is brought in.
    assert set(asked) == {(info.offset_bytes - cold.base, 2 * MIB)}
    assert len(asked) <= 2


@pytest.mark.parametrize(
    ("evicted", "recent", "direct"),
    [(0, 0, 0), (256, 0, 0), (257, 0, 15), (512, 256, 15), (512, 257, 0)],
)
@pytest.mark.parametrize("batch", [False, True])
def test_what_found_no_room_in_memory_is_not_brought_in_again(
    cold, table, evicted, recent, direct, batch
):
    """But for one reading in sixteen."""

    def counts(fd, offset, length, result):
        result.pages = result.dirty_pages = 0
        result.evicted_pages, result.recent_pages = evicted, recent
        return 0

    engine = cold.engine
    data = pattern(1, 2 * MIB)
    assert engine.put(b"k", data, header=b"h") == OK
    cold.forget()
    table.replace("cached", counts)
    target = bytearray(2 * MIB)
    assert engine.get_into(b"k", target) == (OK, 2 * MIB)
    assert cold.reads  # the first reading, whatever the kernel remembers
    cold.reads.clear()
    for _ in range(16):
        cold.engine.volume.files[0].read_ends[0] = 0
        target = bytearray(2 * MIB)
        if batch:
            assert engine.get_many_into([(b"k", [target])]) == [(OK, 2 * MIB)]
        else:
            assert engine.get_into(b"k", target) == (OK, 2 * MIB)
        assert target == data
    assert sum(n for _, n in cold.reads) == direct * (2 * MIB + PAGE)


def test_damage_of_a_block_that_is_read_directly_again(cold, table):
    """Its mark says that it was sound; each direct reading is checked all the same."""

    def counts(fd, offset, length, result):
        result.pages = result.dirty_pages = result.recent_pages = 0
        result.evicted_pages = length // PAGE
        return 0

    engine = cold.engine
    data = stored(cold)
    table.replace("cached", counts)
    target = bytearray(len(data))
    assert engine.get_into(b"k", target) == (OK, len(data))
    engine.volume.crowded_reads = 1
    cold.reads.clear()
    zeros = cold.core.ffi.new("char[]", 2 * MIB)

    def read_at(fd, iov, count, offset):
        if fd != cold.fd:
            return cold.table.native.read_at(fd, iov, count, offset)
        cold.core.ffi.memmove(iov[0].iov_base, zeros, iov[0].iov_len)
        cold.reads.append((offset, iov[0].iov_len))
        return iov[0].iov_len

    table.replace("read_at", read_at)
    assert engine.get_into(b"k", target) == (OK, len(data))
    assert cold.reads
    assert target == data  # by the plain way, from sound pages


def test_the_kernel_knows_what_is_in_memory(core, disk_folder):
    """Nothing is faked: what was just stored is not read directly."""
    with Engine(core, disk_folder / "kv", 64 * MIB) as engine:
        assert engine.put(b"k", pattern(1, 5 * MIB)) == OK
        assert engine.get_into(b"k", bytearray(5 * MIB)) == (OK, 5 * MIB)
        assert engine.stats.direct_bytes == 0


def test_in_memory_there_is_nothing_to_go_around(core, table, tmpfs_folder):
    with Engine(core, tmpfs_folder / "kv", 16 * MIB) as engine:
        cold = Cold(core, table, engine)
        assert engine.put(b"k", pattern(1, 5 * MIB)) == OK
        cold.forget()
        assert engine.get_into(b"k", bytearray(5 * MIB)) == (OK, 5 * MIB)
        assert engine.stats.direct_bytes == 0
        assert cold.asked == 0


def test_readers_without_a_slot_read_through_the_page_cache(core, cold, disk_folder):
    assert cold.engine.put(b"k", pattern(1, 5 * MIB)) == OK
    cold.forget()
    with Engine(core, disk_folder / "kv", 0, mode=core.lib.CKV_MODE_READ) as reader:
        target = bytearray(5 * MIB)
        assert reader.get_into(b"k", target) == (OK, 5 * MIB)
        assert target == pattern(1, 5 * MIB)
        assert reader.get_many_into([(b"k", [target])]) == [(OK, 5 * MIB)]
        assert reader.volume.files[0].direct_fd == 0


# ---- what goes wrong ----------------------------------------------------------------


def stored(cold: Cold, size: int = 5 * MIB + 3) -> bytes:
    data = pattern(1, size)
    assert cold.engine.put(b"k", data, header=b"head") == OK
    cold.forget()
    return data


@pytest.mark.parametrize("code", [errno.EIO, errno.EAGAIN, errno.ENOMEM])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_failed_read_is_done_again_in_the_plain_way(cold, code, number):
    data = stored(cold)
    cold.fault = lambda n, _bytes: -code if n == number else None
    target = bytearray(len(data))
    assert cold.engine.get_into(b"k", target) == (OK, len(data))
    assert target == data
    stats = cold.engine.stats
    assert stats.read_errors == 0
    assert stats.hits == 1
    assert cold.fd >= 0  # it may work the next time


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_it_is_not_asked_again(cold, code):
    data = stored(cold)
    cold.fault = lambda n, _bytes: -code
    target = bytearray(len(data))
    for _ in range(3):
        assert cold.engine.get_into(b"k", target) == (OK, len(data))
        assert target == data
        tried, asked = len(cold.reads), cold.asked
        cold.forget()
    assert tried == 0
    assert asked == 1
    assert cold.core.lib.ckv_file_direct(cold.engine.volume.files) == -1


def test_interrupted_and_short_reads_are_gone_on_with(cold):
    data = stored(cold)
    faults = iter([-errno.EINTR, 4096, -errno.EINTR, 512 * KIB, 8192])
    cold.fault = lambda n, _bytes: next(faults, None)
    target = bytearray(len(data))
    assert cold.engine.get_into(b"k", target) == (OK, len(data))
    assert target == data
    assert cold.engine.stats.direct_bytes == pages(len(data) + 4)


def test_a_file_that_ends_early(cold):
    data = stored(cold)
    cold.fault = lambda n, _bytes: 0
    target = bytearray(len(data))
    assert cold.engine.get_into(b"k", target) == (OK, len(data))
    assert target == data


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("at", [0, 2 * MIB, 5 * MIB + 2])
def test_damage_is_a_miss_and_counted_once(cold, at, batch):
    data = stored(cold)
    damage(cold.engine, b"k", at)
    target = bytearray(len(data))
    if batch:
        assert cold.engine.get_many_into([(b"k", [target])]) == [(MISS, 0)]
    else:
        assert cold.engine.get_into(b"k", target) == (MISS, 0)
    stats = cold.engine.stats
    assert cold.reads
    assert stats.corrupt == stats.misses == 1
    assert cold.engine.contains(b"k") == [False]


def test_a_damaged_header_leaves_no_mark(cold):
    """The payload is sound and is copied; who asks for the header gets a miss."""
    data = stored(cold)
    damage(cold.engine, b"k", -1)
    target = bytearray(len(data))
    assert cold.engine.get_into(b"k", target) == (OK, len(data))
    assert target == data
    assert cold.reads
    assert cold.engine.get(b"k") is None
    assert cold.engine.stats.corrupt == 1


def test_lost_sectors_behind_a_sound_page_cache(cold):
    """Bytes of the device that differ from those in memory are never handed out."""
    data = stored(cold)
    zeros = cold.core.ffi.new("char[]", 2 * MIB)

    def read_at(fd, iov, count, offset):
        if fd != cold.fd:
            return cold.table.native.read_at(fd, iov, count, offset)
        cold.core.ffi.memmove(iov[0].iov_base, zeros, iov[0].iov_len)
        return iov[0].iov_len

    cold.table.replace("read_at", read_at)
    target = bytearray(len(data))
    assert cold.engine.get_into(b"k", target) == (OK, len(data))
    assert target == data
    assert cold.engine.stats.corrupt == 0


def test_a_kernel_that_does_not_tell_is_asked_once(cold, table):
    data = stored(cold)
    asked = 0

    def cached(fd, offset, length, result):
        nonlocal asked
        asked += 1
        return -errno.ENOSYS

    table.replace("cached", cached)
    for _ in range(3):
        target = bytearray(len(data))
        assert cold.engine.get_into(b"k", target) == (OK, len(data))
        assert target == data
        assert cold.reads == []
        cold.forget()
    assert asked == 1


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EMFILE])
def test_a_description_that_cannot_be_opened(core, table, disk_folder, code):
    flag = core.lib.ckv_os_direct_flag
    opened = 0

    def open_file(path, flags, mode):
        nonlocal opened
        if flags & flag == flag:
            opened += 1
            return -code
        return table.native.open_file(path, flags, mode)

    with Engine(core, disk_folder / "kv", 64 * MIB) as engine:
        cold = Cold(core, table, engine)
        table.replace("open_file", open_file)
        data = stored(cold)
        for _ in range(3):
            target = bytearray(len(data))
            assert engine.get_into(b"k", target) == (OK, len(data))
            assert target == data
            cold.forget()
        assert opened == 1


def test_without_huge_pages_nothing_is_read_directly(cold, table):
    data = stored(cold)
    asked = 0

    def make_huge(address, length):
        nonlocal asked
        asked += 1
        return -errno.ENOMEM

    table.replace("make_huge", make_huge)
    seen = set()
    for _ in range(3):
        target = bytearray(len(data))
        assert cold.engine.get_into(b"k", target) == (OK, len(data))
        assert target == data
        cold.forget()
        seen.add(asked)
    # By the threads that were at it at the same time, and never again.
    assert len(seen) == 1
    assert 1 <= asked <= 3
    assert cold.engine.stats.direct_bytes == 0


def test_memory_stays_bounded_with_many_callers(cold, table):
    made = 0
    lock = threading.Lock()

    def make_huge(address, length):
        nonlocal made
        with lock:
            made += 1
        return 0

    table.replace("make_huge", make_huge)
    engine = cold.engine
    size, count = 4 * MIB, 8
    for i in range(count):
        assert engine.put(key(i), pattern(i, size)) == OK
    cold.forget()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            targets = [[bytearray(size)] for _ in range(count)]
            found = engine.get_many_into([(key(i), targets[i]) for i in range(count)])
            assert found == [(OK, size)] * count
            assert all(targets[i][0] == pattern(i, size) for i in range(count))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []
    assert 1 <= made <= 4


def test_the_description_is_closed_with_the_file(core, table, disk_folder):
    closed: list[int] = []

    def close_file(fd):
        closed.append(fd)
        return table.native.close_file(fd)

    with Engine(core, disk_folder / "kv", 64 * MIB) as engine:
        cold = Cold(core, table, engine)
        data = stored(cold)
        assert engine.get_into(b"k", bytearray(len(data))) == (OK, len(data))
        fd = cold.fd
        assert fd >= 0
        core.lib.ckv_file_no_direct(engine.volume.files)
        assert core.lib.ckv_file_direct(engine.volume.files) == -1
        table.replace("close_file", close_file)
        assert fd not in closed  # others may be reading from it
    assert closed.count(fd) == 1
