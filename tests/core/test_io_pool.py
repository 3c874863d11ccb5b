# SPDX-License-Identifier: Apache-2.0
"""The I/O threads: each piece once, several callers, signals, start, end and fork."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TIMEOUT = 30


class Pool:
    def __init__(self, core, threads: int) -> None:
        self.lib, self.ffi = core.lib, core.ffi
        self.pool = self.ffi.new("struct ckv_io_pool **")
        error = self.ffi.new("struct ckv_error *")
        status = self.lib.ckv_io_pool_new(threads, self.pool, error)
        self.error = self.ffi.string(error.text).decode()
        self.status = status

    def run(self, count: int, piece) -> None:
        """Calls piece(index) on the threads; the first exception is raised here."""
        errors: list[BaseException] = []

        @self.ffi.callback("void(void *, size_t)")
        def run(_context, index):
            try:
                piece(index)
            except BaseException as error:
                errors.append(error)

        self.lib.ckv_io_pool_run(self.pool[0], count, run, self.ffi.NULL)
        if errors:
            raise errors[0]

    def free(self) -> None:
        self.lib.ckv_io_pool_free(self.pool)
        assert self.pool[0] == self.ffi.NULL

    def __enter__(self) -> Pool:
        assert self.status == self.lib.CKV_OK, self.error
        return self

    def __exit__(self, *_exception) -> None:
        self.free()


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="needs /proc"
)


@settings(max_examples=40)
@given(threads=st.integers(0, 6), counts=st.lists(st.integers(0, 40), max_size=5))
def test_every_piece_is_run_once(core, threads, counts):
    with Pool(core, threads) as pool:
        for count in counts:
            seen: Counter[int] = Counter()
            lock = threading.Lock()

            def piece(index, seen=seen, lock=lock):
                with lock:
                    seen[index] += 1

            pool.run(count, piece)
            assert seen == Counter(range(count))


def test_without_threads_the_caller_does_all_in_order(core):
    order: list[int] = []
    with Pool(core, 0) as pool:
        pool.run(100, order.append)
    assert order == list(range(100))


def test_pieces_start_in_rising_order(core):
    # Each piece notes which pieces had begun before it took its number.
    with Pool(core, 3) as pool:
        begun: list[int] = []
        gate = threading.Barrier(4)

        def piece(index):
            begun.append(index)
            gate.wait(TIMEOUT)

        pool.run(12, piece)
    # Four at a time are held at the gate: none of a later four may be among them.
    for first in range(0, 12, 4):
        assert sorted(begun[first : first + 4]) == list(range(first, first + 4))


def test_caller_and_threads_work_at_the_same_time(core):
    together = threading.Barrier(4)
    workers: set[int] = set()
    with Pool(core, 3) as pool:

        def piece(_index):
            workers.add(threading.get_ident())
            together.wait(TIMEOUT)  # broken unless four are here at once

        pool.run(4, piece)
    assert len(workers) == 4
    assert threading.get_ident() in workers


def test_several_callers_share_the_threads(core):
    callers, count = 5, 60
    results: list[Counter[int]] = [Counter() for _ in range(callers)]
    failures: list[BaseException] = []
    with Pool(core, 2) as pool:

        def call(own: int) -> None:
            lock = threading.Lock()

            def piece(index):
                with lock:
                    results[own][index] += 1

            try:
                for _ in range(20):
                    pool.run(count, piece)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=call, args=(i,)) for i in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()
    assert failures == []
    assert results == [Counter(dict.fromkeys(range(count), 20))] * callers


def test_a_short_batch_does_not_wait_for_a_long_one(core):
    hold = threading.Event()
    held = threading.Barrier(3)  # the long caller, one thread, and this test
    short: set[int] = set()
    with Pool(core, 2) as pool:

        def long_piece(index):
            if index < 2:
                held.wait(TIMEOUT)
                assert hold.wait(TIMEOUT)

        caller = threading.Thread(target=pool.run, args=(50, long_piece))
        caller.start()
        held.wait(TIMEOUT)
        pool.run(10, short.add)
        assert short == set(range(10))
        assert caller.is_alive()
        hold.set()
        caller.join(TIMEOUT)
        assert not caller.is_alive()


def test_a_piece_may_bring_a_batch_of_its_own(core):
    seen: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()
    with Pool(core, 2) as pool:

        def outer(i):
            def inner(j):
                with lock:
                    seen[i, j] += 1

            pool.run(5, inner)

        pool.run(6, outer)
    assert seen == Counter((i, j) for i in range(6) for j in range(5))


@needs_proc
def test_threads_start_at_first_use_and_end_with_the_pool(core):
    before = tasks()
    with Pool(core, 3) as pool:
        assert tasks() == before
        pool.run(1, lambda _index: None)  # nothing to share
        assert tasks() == before
        pool.run(2, lambda _index: None)
        assert len(tasks() - before) == 1  # as many as there is work for
        pool.run(50, lambda _index: None)
        started = tasks() - before
        assert len(started) == 3
        pool.run(50, lambda _index: None)
        assert tasks() - before == started
    # The kernel removes a task a moment after it was joined.
    for _ in range(1000):
        if not started & tasks():
            break
        os.sched_yield()
    assert not started & tasks()


@needs_proc
def test_threads_leave_signals_to_the_application(core):
    masks: dict[int, int] = {}
    together = threading.Barrier(3)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with Pool(core, 2) as pool:

        def piece(_index):
            together.wait(TIMEOUT)
            tid = threading.get_native_id()
            status = Path(f"/proc/self/task/{tid}/status").read_text()
            masks[tid] = int(status.split("SigBlk:")[1].split()[0], 16)

        pool.run(3, piece)
    masks.pop(threading.get_native_id())
    assert len(masks) == 2
    for mask in masks.values():
        blocked = {
            number for number in signal.valid_signals() if mask >> (number - 1) & 1
        }
        open_signals = {signal.SIGKILL, signal.SIGSTOP, signal.SIGBUS, signal.SIGSEGV}
        assert set(signal.valid_signals()) - blocked == open_signals
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_too_many_threads_are_refused_in_words(core):
    pool = Pool(core, 1_000_000)
    assert pool.status == core.lib.CKV_E_INVALID
    assert "1000000" in pool.error
    assert pool.pool[0] == core.ffi.NULL


def test_free_of_nothing_does_nothing(core):
    core.lib.ckv_io_pool_free(core.ffi.new("struct ckv_io_pool **"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_free_the_pool(core):
    with Pool(core, 2) as pool:
        pool.run(20, lambda _index: None)
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork
            child = os.fork()
        if child == 0:
            signal.alarm(TIMEOUT)  # a join would wait for ever
            core.lib.ckv_io_pool_free(pool.pool)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        pool.run(20, lambda _index: None)  # the parent goes on
