# SPDX-License-Identifier: Apache-2.0
"""Copies out of the mapping: of what is in memory, and safe when it is not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from os_faults import OsTable
from test_put_get import damage

from models import MIB, MISS, OK, PAGE, Engine, pattern

KIB = 1024


@pytest.fixture
def table(core) -> Iterator[OsTable]:
    with OsTable(core) as table:
        yield table


@pytest.fixture
def engine(core, volume_folder) -> Iterator[Engine]:
    with Engine(core, volume_folder / "kv", 64 * MIB) as engine:
        yield engine
        assert engine.stats.pinned_entries == 0


class Reads:
    """Counts read calls to the data area."""

    def __init__(self, table: OsTable, engine: Engine) -> None:
        self.count = 0
        base = engine.volume.files[0].geometry.data_offset

        def read_at(fd: int, iov: Any, count: int, offset: int) -> int:
            self.count += offset >= base
            return int(table.native.read_at(fd, iov, count, offset))

        table.replace("read_at", read_at)


def store(engine: Engine, name: bytes, data: bytes, header: bytes = b"") -> None:
    """Stores a block and reads it, which verifies it."""
    assert engine.put(name, data, header=header) == OK
    assert engine.get_into(name, bytearray(len(data))) == (OK, len(data))


def fake(table: OsTable, pages: int | None = None) -> list[int]:
    """Every page asked for is in memory, or as many as given."""
    asked: list[int] = []

    def cached(_fd: int, _offset: int, length: int, result: Any) -> int:
        asked.append(length)
        result.pages = -(-length // PAGE) if pages is None else pages
        result.dirty_pages = 1  # no direct read
        return 0

    table.replace("cached", cached)
    return asked


SIZES = [32 * KIB, 64 * KIB + 1, 2 * MIB, 9 * MIB - 7]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_in_memory_is_copied_without_a_read_call(engine, table, size):
    data = pattern(1, size)
    store(engine, b"k", data, b"head")
    fake(table)
    reads = Reads(table, engine)
    for _ in range(3):
        targets = [bytearray(n) for n in (1, 0, 4095, size // 2)]
        targets.append(bytearray(size - sum(map(len, targets)) + 3))
        assert engine.get_into(b"k", *targets) == (OK, size)
        assert b"".join(targets) == data + bytes(3)
        assert engine.get_many_into([(b"k", targets)] * 2) == [(OK, size)] * 2
    assert reads.count == 0
    assert all(window.pins == 0 for window in engine.volume.files[0].windows[0:1])
    assert engine.stats.hits == 10
    assert engine.stats.verified_blocks == 1


@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_wholly_in_memory_is_read(engine, table, size):
    data = pattern(1, size)
    store(engine, b"k", data)
    whole = -(-size // PAGE)
    asked = fake(table, pages=whole - 1)
    reads = Reads(table, engine)
    target = bytearray(size)
    assert engine.get_into(b"k", target) == (OK, size)
    assert target == data
    if size < 2 * MIB:  # the others are brought in, see below
        assert reads.count > 0
    assert asked[-1] == whole * PAGE


def test_small_blocks_and_unverified_ones_are_read(engine, table):
    for size in (100, 32 * KIB - 1):
        store(engine, b"%d" % size, pattern(1, size))
    assert engine.put(b"new", pattern(2, MIB)) == OK
    fake(table)
    reads = Reads(table, engine)
    for size in (100, 32 * KIB - 1):
        assert engine.get_into(b"%d" % size, bytearray(size)) == (OK, size)
    assert reads.count == 2
    for entry in range(engine.region.layout.entry_count):
        engine.region.marks[entry] = 0
    assert engine.get_into(b"new", bytearray(MIB)) == (OK, MIB)
    assert reads.count > 2


def test_a_kernel_that_does_not_tell(engine, table):
    table.replace("cached", lambda fd, offset, length, result: -errno.ENOSYS)
    for size in SIZES:
        data = pattern(size, size)
        store(engine, b"%d" % size, data)
        target = bytearray(size)
        assert engine.get_into(b"%d" % size, target) == (OK, size)
        assert target == data


@pytest.mark.parametrize("populated", [False, True])
@pytest.mark.parametrize("sigbus_guard", [False, True])
def test_pages_that_are_lost_under_a_copy_are_a_miss(
    core, table, volume_folder, populated, sigbus_guard
):
    """The file is cut off while the engine believes that its pages are in memory."""
    path = volume_folder / "kv"
    with Engine(core, path, 64 * MIB, sigbus_guard=sigbus_guard) as engine:
        data = pattern(1, 3 * MIB)
        assert engine.put(b"before", pattern(2, MIB)) == OK
        store(engine, b"k", data)
        fake(table)
        target = bytearray(3 * MIB)
        if populated:
            assert engine.get_into(b"k", target) == (OK, 3 * MIB)
        else:  # advice that finds nothing wrong: the loads meet the hole
            table.replace("populate_read", lambda address, length: -errno.EINVAL)
        info = next(i for i in engine.list() if i.payload_length == 3 * MIB)
        with open(path, "r+b") as file:
            file.truncate(info.offset_bytes + MIB)
        assert engine.get_into(b"k", target) == (MISS, 0)
        assert engine.get_many_into([(b"k", [target])]) == [(MISS, 0)]
        stats = engine.stats
        assert stats.read_errors == 2
        assert stats.media_errors == 0
        # What lies before the cut is still served.
        target = bytearray(MIB)
        assert engine.get_into(b"before", target) == (OK, MIB)
        assert target == pattern(2, MIB)
        assert engine.stats.pinned_entries == 0


@pytest.mark.parametrize("code", [errno.EFAULT, errno.EIO])
def test_pages_that_cannot_be_populated_are_read(engine, table, code):
    data = pattern(1, MIB)
    store(engine, b"k", data)
    fake(table)
    table.replace("populate_read", lambda address, length: -code)
    target = bytearray(MIB)
    assert engine.get_into(b"k", target) == (OK, MIB)  # the read call succeeds
    assert target == data


def test_a_window_that_cannot_be_mapped(engine, table):
    data = pattern(1, MIB)
    store(engine, b"k", data)
    fake(table)
    table.replace("map", lambda *_: -errno.ENOMEM)
    target = bytearray(MIB)
    assert engine.get_into(b"k", target) == (OK, MIB)
    assert target == data


def test_copies_count_towards_the_page_tables(core, table, volume_folder):
    with Engine(
        core, volume_folder / "kv", 64 * MIB, page_table_budget_bytes=4096
    ) as engine:
        for i in range(8):
            store(engine, b"%d" % i, pattern(i, MIB))
        fake(table)
        for _ in range(2):
            for i in range(8):
                target = bytearray(MIB)
                assert engine.get_into(b"%d" % i, target) == (OK, MIB)
                assert target == pattern(i, MIB)
        assert engine.volume.touched_bytes == 8 * MIB  # each block once


def replaced(engine: Engine, path: Path, name: bytes) -> Any:
    """A view of a block one of whose pages was lost for a while; the file is whole."""
    lease = engine.get(name)
    size = path.stat().st_size
    info = next(i for i in engine.list() if i.offset_bytes and i.payload_length == MIB)
    with open(path, "r+b") as file:
        kept = os.pread(file.fileno(), size - info.offset_bytes, info.offset_bytes)
        file.truncate(info.offset_bytes)
        assert lease.data == bytes(MIB)
        os.pwrite(file.fileno(), kept, info.offset_bytes)
    assert engine.volume.media_errors == MIB // PAGE
    return lease


def test_zeros_under_a_view_are_served_to_nobody_else(core, table, volume_folder):
    """Neither as bytes of its own block nor of one that takes its place later."""
    path = volume_folder / "kv"
    with Engine(core, path, 16 * MIB, sigbus_guard=True) as engine:
        data = pattern(1, MIB)
        store(engine, b"k", data)
        fake(table)
        lease = replaced(engine, path, b"k")
        target = bytearray(MIB)
        assert engine.get_into(b"k", target) == (OK, MIB)
        assert target == data
        assert engine.read(b"k") == data
        assert not engine.lib.ckv_lease_ok(lease.pointer[0]) or lease.data == data
        lease.release()
        place = {i.offset_bytes for i in engine.list()}
        others = iter(range(1000))
        for i in others:  # a lap of others, the last at the place of the first
            assert engine.put(b"%d" % i, pattern(i, MIB)) == OK
            assert engine.read(b"%d" % i) == pattern(i, MIB)
            assert engine.get_into(b"%d" % i, target) == (OK, MIB)
            assert target == pattern(i, MIB)
            if i > 20:
                break
        assert place <= {i.offset_bytes for i in engine.list()}
        assert engine.stats.corrupt <= 1


def test_zeros_that_come_during_a_copy(core, table, volume_folder):
    """Another thread's view loses its page between the look and the end of a copy."""
    path = volume_folder / "kv"
    with Engine(core, path, 16 * MIB, sigbus_guard=True) as engine:
        data = pattern(1, MIB)
        store(engine, b"k", data)
        leases = []
        asked = 0

        def cached(_fd: int, _offset: int, length: int, result: Any) -> int:
            nonlocal asked
            asked += 1
            if asked == 1:  # the view below asks as well
                leases.append(replaced(engine, path, b"k"))
            result.pages = -(-length // PAGE)
            result.dirty_pages = 1
            return 0

        table.replace("cached", cached)
        target = bytearray(MIB)
        assert engine.get_into(b"k", target) == (OK, MIB)
        assert target == data
        leases[0].release()


# ---- what is not in memory, or was thrown out of it ---------------------------------


class Advice:
    """Records what is populated and asked for; `answer` is what populating says."""

    def __init__(self, table: OsTable, engine: Engine) -> None:
        self.populated: list[int] = []
        self.asked: list[tuple[int, int]] = []
        self.answer = 0
        self._base = engine.volume.files[0].geometry.data_offset

        def populate_read(address: Any, length: int) -> int:
            self.populated.append(length)
            if self.answer:
                return self.answer
            return int(table.native.populate_read(address, length))

        def advise_file(_fd: int, offset: int, length: int, _advice: int) -> int:
            self.asked.append((offset - self._base, length))
            return 0

        table.replace("populate_read", populate_read)
        table.replace("advise_file", advise_file)


def large_faults(engine: Engine) -> None:
    if not engine.lib.ckv_file_large_faults(engine.volume.files, 0):
        pytest.skip("faults in this mapping read no huge pages (tmpfs, old kernels)")


@pytest.mark.parametrize("size", [2 * MIB, 9 * MIB - 7])
def test_a_large_block_is_brought_in_by_huge_pages(engine, table, size):
    data = pattern(1, size)
    store(engine, b"k", data, b"head")
    large_faults(engine)
    fake(table, pages=0)
    reads = Reads(table, engine)
    advice = Advice(table, engine)
    for _ in range(2):
        target = bytearray(size)
        assert engine.get_into(b"k", target) == (OK, size)
        assert target == data
    assert reads.count == 0
    assert advice.populated == [-(-(size + 4) // PAGE) * PAGE] * 2
    assert advice.asked == []
    advice.answer = -errno.EIO  # a read call may do better
    target = bytearray(size)
    assert engine.get_into(b"k", target) == (OK, size)
    assert target == data
    assert reads.count > 0


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM])
def test_a_system_without_large_faults_reads(core, table, volume_folder, code):
    table.replace("large_faults", lambda address, length: -code)
    with Engine(core, volume_folder / "kv", 64 * MIB) as engine:
        data = pattern(1, 4 * MIB)
        store(engine, b"k", data)
        assert not engine.lib.ckv_file_large_faults(engine.volume.files, 0)
        fake(table, pages=0)
        reads = Reads(table, engine)
        target = bytearray(4 * MIB)
        assert engine.get_into(b"k", target) == (OK, 4 * MIB)
        assert target == data
        assert reads.count > 0
        assert engine.read(b"k") == data


@pytest.mark.parametrize("damaged", [None, 0, 3 * MIB + 4, -1])
def test_a_first_view_is_checked_in_the_mapping(engine, table, damaged):
    size = 3 * MIB + 5
    data = pattern(1, size)
    assert engine.put(b"k", data, header=b"head") == OK
    large_faults(engine)
    for entry in range(engine.region.layout.entry_count):
        engine.region.marks[entry] = 0
    if damaged is not None:
        damage(engine, b"k", damaged)
    fake(table, pages=0)
    reads = Reads(table, engine)
    assert engine.read(b"k") == (data if damaged is None else None)
    assert (reads.count == 0) == (damaged is None)  # a read call decides about damage
    stats = engine.stats
    assert stats.verified_blocks == (damaged is None)
    assert stats.corrupt == (damaged is not None)


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
def test_a_first_view_of_pages_that_are_lost(core, table, volume_folder, code):
    """Populating says so, or says nothing and the loads meet the hole."""
    path = volume_folder / "kv"
    with Engine(core, path, 64 * MIB) as engine:
        assert engine.put(b"k", pattern(1, 4 * MIB)) == OK
        large_faults(engine)
        for entry in range(engine.region.layout.entry_count):
            engine.region.marks[entry] = 0
        fake(table, pages=0)
        Advice(table, engine).answer = -code
        offset = engine.list()[0].offset_bytes
        with open(path, "r+b") as file:
            file.truncate(offset + MIB)
        assert engine.read(b"k") is None
        assert engine.stats.read_errors == 1
        assert engine.stats.media_errors == 0


@pytest.mark.parametrize("size", [100, MIB, 4 * MIB])
def test_views_are_populated_again_after_much_was_moved(engine, table, size):
    data = pattern(1, size)
    store(engine, b"k", data)
    assert engine.read(b"k") == data
    touched = engine.volume.touched_bytes
    fake(table, pages=0)
    advice = Advice(table, engine)
    for _ in range(3):
        assert engine.read(b"k") == data
    assert advice.populated == []
    length = -(-size // PAGE) * PAGE
    moved = engine.volume.moved_bytes
    engine.volume.moved_bytes = moved + 256 * MIB
    for _ in range(3):
        assert engine.read(b"k") == data
    assert advice.populated == [length]
    place = engine.list()[0].offset_bytes - engine.volume.files[0].geometry.data_offset
    assert advice.asked == ([] if size > 2 * MIB else [(place, length)])
    assert engine.volume.moved_bytes == moved + 256 * MIB + length
    assert engine.volume.touched_bytes == touched  # once for each life
    advice.answer = -errno.EIO
    engine.volume.moved_bytes += 256 * MIB
    assert engine.read(b"k") is None
    assert engine.stats.read_errors == 1
    advice.answer = 0
    assert engine.read(b"k") == data
