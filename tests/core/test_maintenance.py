# SPDX-License-Identifier: Apache-2.0
"""The maintenance thread, sync, failed paths, and what statistics say of them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from os_faults import OsTable

MIB = 1 << 20
PATIENCE = 20  # seconds until something that happens once a second must have happened
NEVER = 2**32 - 1


class Volume:
    """A cache through the public interface, as far as these tests need it."""

    def __init__(self, core: Any, path: Path, sync_interval_ms: int = NEVER) -> None:
        self.lib, self.ffi = core.lib, core.ffi
        self.path = path
        self.error = self.ffi.new("struct ckv_error *")
        name = self.ffi.new("char[]", os.fsencode(path))
        paths = self.ffi.new("struct ckv_path[1]")
        paths[0].path = name
        paths[0].capacity_bytes = 16 * MIB
        options = self.ffi.new("struct ckv_options *")
        self.lib.ckv_options_init(options)
        options.paths = paths
        options.path_count = 1
        options.sync_interval_ms = sync_interval_ms
        options.allow_shared_directory = True
        self.cache = self.ffi.new("struct ckv_cache **")
        self.check(self.lib.ckv_open(options, self.cache, self.error))

    def check(self, status: int) -> int:
        assert status >= 0, self.ffi.string(self.error.text).decode()
        return status

    def key(self, number: int) -> Any:
        data = self.ffi.new("char[]", b"%032d" % number)
        return data, {"data": data, "length": 32}

    def put(self, number: int, length: int = 5000) -> int:
        kept, key = self.key(number)
        data = self.ffi.new("char[]", length)
        segment = self.ffi.new("struct ckv_segment *", (data, length))
        item = self.ffi.new("struct ckv_item *")
        item.key = key
        item.segments, item.segment_count = segment, 1
        status = self.lib.ckv_put(self.cache[0], item, 0, self.error)
        del kept
        return self.check(status)

    def get(self, number: int) -> tuple[int, Any]:
        kept, value = self.key(number)
        key = self.ffi.new("struct ckv_key *", value)
        lease = self.ffi.new("struct ckv_lease **")
        status = self.lib.ckv_get(self.cache[0], key, lease, self.error)
        del kept
        return self.check(status), lease

    def sync(self) -> int:
        return self.check(self.lib.ckv_sync(self.cache[0], self.error))

    def recover(self) -> int:
        paths = self.ffi.new("uint64_t *")
        self.check(self.lib.ckv_recover(self.cache[0], paths, self.error))
        return int(paths[0])

    def stats(self) -> tuple[Any, Any]:
        total = self.ffi.new("struct ckv_stats *")
        process = self.ffi.new("struct ckv_stats *")
        self.check(self.lib.ckv_get_stats(self.cache[0], total, process, self.error))
        return total, process

    def header(self) -> Any:
        """The newer copy of the header in the file."""
        raw = self.path.read_bytes()[: 2 * 4096]
        copies = self.ffi.new("struct ckv_file_header[2]")
        self.ffi.memmove(copies, raw, len(raw))
        return max(copies, key=lambda copy: copy.generation)

    def close(self) -> None:
        self.lib.ckv_close(self.cache)


@contextlib.contextmanager
def opened(core: Any, path: Path, **options: Any) -> Iterator[Volume]:
    volume = Volume(core, path, **options)
    try:
        yield volume
    finally:
        volume.close()


@contextlib.contextmanager
def log_of(core: Any) -> Iterator[list[str]]:
    lines: list[str] = []

    @core.ffi.callback("void(void *, enum ckv_log_level, const char *)")
    def sink(_context, _level, text):
        lines.append(core.ffi.string(text).decode())

    core.lib.ckv_set_log(sink, core.ffi.NULL)
    try:
        yield lines
    finally:
        core.lib.ckv_set_log(core.ffi.NULL, core.ffi.NULL)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="needs /proc"
)


# ---- sync -------------------------------------------------------------------------


def test_header_says_what_is_durable_after_the_fsync_that_made_it_so(core, volume_path):
    with opened(core, volume_path) as volume, OsTable(core) as table:
        calls: list[str] = []

        def sync_file(fd):
            calls.append("fsync")
            return table.native.sync_file(fd)

        def write_at(fd, iov, count, offset):
            calls.append("header" if offset < 2 * 4096 else "other")
            return table.native.write_at(fd, iov, count, offset)

        for number in range(7):
            assert volume.put(number) == core.lib.CKV_OK
        assert volume.header().synced_sequence == 0
        table.replace("sync_file", sync_file)
        table.replace("write_at", write_at)
        assert volume.sync() == core.lib.CKV_OK
        assert calls == ["fsync", "header"]
        assert volume.header().synced_sequence == 7

        calls.clear()
        assert volume.sync() == core.lib.CKV_OK
        assert calls == ["fsync"]  # nothing new to say
        assert volume.stats()[0].syncs == 2


def test_sync_that_is_interrupted_goes_on(core, volume_path):
    with opened(core, volume_path) as volume, OsTable(core) as table:
        answers = [-errno.EINTR, -errno.EINTR, 0]
        table.replace("sync_file", lambda _fd: answers.pop(0))
        assert volume.sync() == core.lib.CKV_OK
        assert answers == []
        total, _ = volume.stats()
        assert (total.syncs, total.sync_failures, total.failed_paths) == (1, 0, 0)


@pytest.mark.parametrize("failure", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_failed_fsync_takes_the_path_out_of_use(core, volume_path, failure):
    with (
        opened(core, volume_path) as volume,
        OsTable(core) as table,
        log_of(core) as log,
    ):
        assert volume.put(1) == core.lib.CKV_OK
        table.replace("sync_file", lambda _fd: -failure)
        for _ in range(2):
            assert core.lib.ckv_sync(volume.cache[0], volume.error) < 0
        assert volume.get(1)[0] == core.lib.CKV_MISS
        assert volume.put(2) == core.lib.CKV_FAILED_PATH
        total, _ = volume.stats()
        assert (total.syncs, total.sync_failures, total.failed_paths) == (1, 1, 1)
        assert total.last_sync_age_seconds == -1
        assert volume.header().synced_sequence == 0

    said = [line for line in log if "out of use" in line]
    assert len(said) == 1
    for part in (str(volume_path), "fsync", os.strerror(failure), str(failure)):
        assert part in said[0]


def test_age_of_the_last_sync_is_that_of_its_beginning(core, volume_path):
    with opened(core, volume_path) as volume, OsTable(core) as table:
        now = table.native.realtime_ns()
        table.replace("realtime_ns", lambda: now)
        assert volume.stats()[0].last_sync_age_seconds == -1
        assert volume.sync() == core.lib.CKV_OK
        now += 42 * 10**9
        assert volume.stats()[0].last_sync_age_seconds == 42
        now -= 100 * 10**9  # somebody set the clock back
        assert volume.stats()[0].last_sync_age_seconds == 0


# ---- the thread -------------------------------------------------------------------


def test_thread_asks_for_lost_writes(core, volume_path):
    with (
        opened(core, volume_path) as volume,
        OsTable(core) as table,
        log_of(core) as log,
    ):
        assert volume.put(1) == core.lib.CKV_OK
        table.replace("pending_error", lambda _fd, _offset, _length: -errno.EIO)
        assert eventually(lambda: volume.stats()[0].failed_paths == 1)
        assert volume.get(1)[0] == core.lib.CKV_MISS
    assert sum("write-back" in line for line in log) == 1


def test_a_thread_that_met_an_error_never_works_again(core, volume_path):
    """Everything later would be lost in silence, with a service that looks well."""
    with (
        opened(core, volume_path, sync_interval_ms=100) as volume,
        OsTable(core) as table,
    ):
        for number, failure in enumerate((errno.EIO, errno.ENOSPC), 1):
            table.replace("sync_file", lambda _fd, code=failure: -code)
            assert volume.put(10 * number) == core.lib.CKV_OK
            assert eventually(lambda: volume.stats()[0].failed_paths == 1)
            table.replace("sync_file", lambda fd: table.native.sync_file(fd))
            assert volume.recover() == 1
            assert volume.stats()[0].sync_failures >= number
            for more in range(number):
                assert volume.put(10 * number + 1 + more) == core.lib.CKV_OK
            before = volume.stats()[0].syncs
            assert eventually(lambda before=before: volume.stats()[0].syncs > before)
            assert volume.stats()[0].failed_paths == 0
            assert volume.get(10 * number + 1)[0] == core.lib.CKV_OK


def test_thread_syncs_when_nobody_did(core, volume_path):
    with opened(core, volume_path, sync_interval_ms=100) as volume:
        assert volume.put(1) == core.lib.CKV_OK
        assert eventually(lambda: volume.header().synced_sequence == 1)
        assert volume.stats()[0].last_sync_age_seconds >= 0


def test_clock_that_was_set_back_does_not_end_syncing(core, volume_path):
    with (
        OsTable(core) as table,
        opened(core, volume_path, sync_interval_ms=60_000) as volume,
    ):
        assert volume.sync() == core.lib.CKV_OK
        # An hour earlier, and ten seconds later at each look.
        clock = itertools.count(table.native.realtime_ns() - 3600 * 10**9, 10 * 10**9)
        table.replace("realtime_ns", lambda: next(clock))
        assert eventually(lambda: volume.stats()[0].syncs >= 2)


def test_oldest_pin_has_an_age_and_a_process(core, volume_path):
    with opened(core, volume_path) as volume:
        assert volume.put(1) == core.lib.CKV_OK
        status, lease = volume.get(1)
        assert status == core.lib.CKV_OK
        total, _ = volume.stats()
        assert (total.pinned_entries, total.pinned_bytes) == (1, 8192)
        assert eventually(lambda: volume.stats()[0].longest_pin_seconds >= 1)
        assert volume.stats()[0].longest_pin_pid == os.getpid()
        core.lib.ckv_lease_release(lease)
        assert eventually(lambda: volume.stats()[0].longest_pin_pid == 0)
        assert volume.stats()[0].pinned_entries == 0


@needs_proc
def test_thread_leaves_signals_to_the_application_and_ends_with_the_volume(
    core, volume_path
):
    before = tasks()
    with opened(core, volume_path):
        (started,) = tasks() - before

        def heard() -> set[int]:
            status = Path(f"/proc/self/task/{started}/status").read_text()
            mask = int(status.split("SigBlk:")[1].split()[0], 16)
            return {n for n in signal.valid_signals() if not mask >> (n - 1) & 1}

        # A thread that was just created may not have its mask yet.
        own = {signal.SIGKILL, signal.SIGSTOP, signal.SIGBUS, signal.SIGSEGV}
        assert eventually(lambda: heard() == own)
    assert eventually(lambda: tasks() == before)


def test_close_does_not_wait_for_the_second_to_end(core, volume_path):
    began = time.monotonic()
    for _ in range(10):
        with opened(core, volume_path):
            pass
    assert time.monotonic() - began < 5


# ---- statistics -------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_totals_are_of_all_processes_and_outlive_them(core, volume_path):
    with opened(core, volume_path) as volume:
        for number in range(3):
            assert volume.put(number) == core.lib.CKV_OK
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork
            child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)
            code = 1
            with (
                contextlib.suppress(BaseException),
                opened(core, volume_path) as other,
            ):
                stored = [other.put(number) for number in range(2, 7)]
                total, process = other.stats()
                good = stored == [core.lib.CKV_PRESENT] + [core.lib.CKV_OK] * 4
                good = good and (total.processes, total.entries) == (2, 7)
                good = good and (total.puts_stored, process.puts_stored) == (7, 4)
                code = 0 if good else 2
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        total, process = volume.stats()
        assert (total.puts_stored, process.puts_stored) == (7, 3)
        assert (total.puts_present, process.puts_present) == (1, 0)
        assert (total.processes, process.processes) == (1, 1)
        assert total.entries == process.entries == 7
        assert total.resident_bytes == 7 * 8192
        assert total.capacity_bytes > 14 * MIB
        assert total.entries_max > 100
        assert (total.detached, total.failed_paths) == (0, 0)

        # A new owner of the child's slot begins at nothing, the total goes on.
        os.unlink(volume_path)
        assert volume.stats()[0].detached == 1


def test_statistics_may_be_read_while_others_write(core, volume_path):
    with opened(core, volume_path) as volume:
        ended = threading.Event()

        def write():
            for number in range(400):
                assert volume.put(number) == core.lib.CKV_OK
            ended.set()

        writer = threading.Thread(target=write)
        writer.start()
        last = 0
        while not ended.is_set() and writer.is_alive():
            total, _ = volume.stats()
            assert last <= total.puts_stored <= 400
            assert total.entries >= 0
            last = total.puts_stored
        writer.join()
        assert ended.is_set()
        assert volume.stats()[0].puts_stored == 400
