# SPDX-License-Identifier: Apache-2.0
"""N7: what a get of a view, contains and longest_prefix ask the system for: nothing.

With one exception, which is part of the promise: when 256 MiB came into the page cache
since the pages of a block were populated, the next get of a view of it populates them
again (mapped.c, X4).  All calls of the table are counted, clocks too, but only those of
this thread: the volume's own thread has work to do.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from os_faults import OsTable

from models import MIB, OK, Engine, pattern

BLOCKS = [b"block %d" % number for number in range(8)]
BLOCK_BYTES = 100_000
ABSENT = [b"absent %d" % number for number in range(8)]
MOVED_BYTES = 256 * MIB
POPULATE = collections.Counter(cached=1, populate_read=1)


class Calls(collections.Counter[str]):
    """Every call of the table that the thread which made this object makes."""

    def __init__(self, table: OsTable) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        for name, _kind in table._members():
            table.replace(name, self._counted(name, getattr(table.native, name)))

    def _counted(self, name: str, native: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if threading.get_ident() == self._thread:
                self[name] += 1
            return native(*arguments)

        return call

    def take(self) -> collections.Counter[str]:
        """What was called since this was asked last."""
        taken = collections.Counter(self)
        self.clear()
        return taken


@pytest.fixture
def calls(core) -> Iterator[Calls]:
    with OsTable(core) as table:
        yield Calls(table)


@pytest.fixture
def engine(core, calls, volume_path) -> Iterator[Engine]:
    with Engine(core, volume_path, 64 * MIB) as engine:
        for key in BLOCKS:
            assert engine.put(key, pattern(1, BLOCK_BYTES)) == OK
            view(engine, key)
        assert calls.take(), "nothing is counted"
        yield engine


def view(engine: Engine, key: bytes) -> None:
    lease = engine.get(key)
    assert lease is not None
    lease.release()


def ask(engine: Engine) -> None:
    """Everything that N7 names but views."""
    assert all(engine.contains(*BLOCKS))
    assert not any(engine.contains(*ABSENT))
    assert engine.longest_prefix(BLOCKS + ABSENT) == len(BLOCKS)
    assert engine.longest_prefix(BLOCKS, touch=True) == len(BLOCKS)
    assert all(engine.get(key) is None for key in ABSENT)


def test_warm_lookups_call_nothing_however_much_is_copied(engine, calls):
    large, target = pattern(2, 8 * MIB), bytearray(8 * MIB)
    assert engine.put(b"large", large) == OK
    for _ in range(2):
        assert engine.get_into(b"large", target) == (OK, len(large))
        view(engine, b"large")
    for _ in range(MOVED_BYTES // len(large) + 3):
        assert engine.get_into(b"large", target) == (OK, len(large))
        calls.take()
        view(engine, b"large")
        for key in BLOCKS:
            view(engine, key)
        ask(engine)
        assert not calls.take()


def test_a_view_asks_for_its_pages_once_more_after_256_mib(engine, calls):
    held = [engine.get(key) for key in BLOCKS]  # what is pinned is not evicted
    data = pattern(3, MIB)
    for number in range(MOVED_BYTES // MIB + 4):
        assert engine.put(b"other %d" % number, data) == OK
    deadline = time.monotonic() + 60  # the volume's thread looks once a second
    while engine.volume.moved_bytes < MOVED_BYTES:
        assert time.monotonic() < deadline, "what was put has not been counted"
        time.sleep(0.01)
    for lease in held:
        lease.release()
    calls.take()
    ask(engine)
    assert not calls.take()
    for key in BLOCKS:
        view(engine, key)
        assert calls.take() - collections.Counter(advise_file=1) == POPULATE
    for _ in range(3):
        for key in BLOCKS:
            view(engine, key)
        ask(engine)
    assert not calls.take()
