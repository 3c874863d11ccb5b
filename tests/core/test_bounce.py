# SPDX-License-Identifier: Apache-2.0
"""The buffers of direct reads: few, aligned, waited for, and given up for good."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from os_faults import OsTable

TIMEOUT = 30


class Bounces:
    def __init__(self, core: Any, count: int) -> None:
        self.lib, self.ffi = core.lib, core.ffi
        self.pointer = self.ffi.new("struct ckv_bounce_pool **")
        self.huge = 0
        self.mapped: set[int] = set()
        error = self.ffi.new("struct ckv_error *")
        assert core.lib.ckv_bounce_pool_new(count, self.pointer, error) == 0

    def take(self) -> Any:
        return self.lib.ckv_bounce_take(self.pointer[0])

    def give(self, buffer: Any) -> None:
        self.lib.ckv_bounce_give(self.pointer[0], buffer)

    @property
    def usable(self) -> bool:
        return bool(self.lib.ckv_bounce_usable(self.pointer[0]))

    def free(self) -> None:
        self.lib.ckv_bounce_pool_free(self.pointer)
        assert self.pointer[0] == self.ffi.NULL


@pytest.fixture
def table(core) -> Iterator[OsTable]:
    """Small pages are good enough: not every machine has huge ones to give."""
    with OsTable(core) as table:
        table.replace("make_huge", lambda address, length: 0)
        yield table


def test_buffers_are_made_when_needed_and_used_again(core, table):
    made: list[int] = []

    def make_huge(address, length):
        made.append(int(core.ffi.cast("uintptr_t", address)))
        assert length == core.lib.CKV_BOUNCE_BYTES
        return 0

    table.replace("make_huge", make_huge)
    pool = Bounces(core, 3)
    assert made == []
    for _ in range(5):
        buffer = pool.take()
        core.ffi.memmove(buffer, b"x" * core.lib.CKV_BOUNCE_BYTES, 2 << 20)
        pool.give(buffer)
    assert len(made) == 1
    buffers = [pool.take() for _ in range(3)]
    assert sorted(int(core.ffi.cast("uintptr_t", b)) for b in buffers) == sorted(made)
    assert all(address % core.lib.CKV_BOUNCE_BYTES == 0 for address in made)
    for buffer in buffers:
        pool.give(buffer)
    pool.free()


def test_everything_mapped_is_unmapped(core, table):
    live: dict[int, int] = {}

    def map_(hint, length, protection, flags, fd, offset, result):
        status = table.native.map(hint, length, protection, flags, fd, offset, result)
        live[int(core.ffi.cast("uintptr_t", result[0]))] = length
        return status

    def unmap(address, length):
        begin = int(core.ffi.cast("uintptr_t", address))
        for at in list(live):
            size = live[at]
            if at <= begin < at + size:
                del live[at]
                if begin > at:
                    live[at] = begin - at
                if begin + length < at + size:
                    live[begin + length] = at + size - begin - length
        return table.native.unmap(address, length)

    table.replace("map", map_)
    table.replace("unmap", unmap)
    pool = Bounces(core, 4)
    for buffer in [pool.take() for _ in range(4)]:
        pool.give(buffer)
    assert sum(live.values()) == 4 * core.lib.CKV_BOUNCE_BYTES
    pool.free()
    assert live == {}


def test_who_finds_none_waits_for_one(core, table):
    pool = Bounces(core, 2)
    held = [pool.take(), pool.take()]
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(pool.take()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert got == []
    pool.give(held[0])
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert got == [held[0]]
    pool.give(held[1])
    pool.give(got[0])
    pool.free()


def test_many_threads_share_few(core, table):
    pool = Bounces(core, 2)
    held: set[int] = set()
    lock = threading.Lock()
    most = 0

    def work() -> None:
        nonlocal most
        for _ in range(200):
            buffer = pool.take()
            address = int(core.ffi.cast("uintptr_t", buffer))
            with lock:
                assert address not in held
                held.add(address)
                most = max(most, len(held))
            os.sched_yield()
            with lock:
                held.remove(address)
            pool.give(buffer)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert 1 <= most <= 2
    pool.free()


@pytest.mark.parametrize("what", ["map", "make_huge"])
def test_without_memory_there_is_none_for_good(core, table, what):
    asked = 0

    def refuse(*_arguments):
        nonlocal asked
        asked += 1
        return -errno.ENOMEM

    table.replace(what, refuse)
    pool = Bounces(core, 4)
    assert pool.usable
    assert pool.take() == core.ffi.NULL
    assert not pool.usable
    assert pool.take() == core.ffi.NULL
    assert asked == 1
    pool.free()


def test_those_that_exist_outlive_a_refusal(core, table):
    pool = Bounces(core, 4)
    first = pool.take()
    table.replace("make_huge", lambda address, length: -errno.EINVAL)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(pool.take()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()  # it waits for the one that there is
    assert pool.usable
    pool.give(first)
    thread.join(TIMEOUT)
    assert got == [first]
    pool.give(first)
    pool.free()


def test_free_of_nothing_does_nothing(core):
    core.lib.ckv_bounce_pool_free(core.ffi.new("struct ckv_bounce_pool **"))
