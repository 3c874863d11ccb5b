# SPDX-License-Identifier: Apache-2.0
"""The table of system calls, and the wrappers that retry over it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import struct
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from os_faults import OsTable

LOCK_BYTE = 1 << 62


@pytest.fixture
def table(core):
    with OsTable(core) as table:
        yield table


@pytest.fixture
def os_lib(core):
    return core.lib.ckv_os


def native_path(path) -> bytes:
    return os.fsencode(str(path))


# ---- reading and writing everything -------------------------------------------------


@given(st.data())
def test_vectors_survive_short_and_interrupted_calls(core, tmp_path_factory, data):
    """Whatever the kernel cuts off or interrupts, all bytes arrive in order."""
    ffi, lib = core.ffi, core.lib
    seed = data.draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    sizes = data.draw(st.lists(st.integers(0, 300), min_size=0, max_size=20))
    offset = data.draw(st.integers(0, 5000))
    blob = rng.randbytes(sum(sizes))
    path = tmp_path_factory.mktemp("os") / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def shorten(native):
        def call(fd, iov, count, at):
            if rng.random() < 0.3:
                return -errno.EINTR
            first = ffi.new("struct iovec *")
            first.iov_base = iov[0].iov_base
            first.iov_len = rng.randint(1, iov[0].iov_len)
            return native(fd, first if rng.random() < 0.7 else iov, 1, at)

        return call

    try:
        with OsTable(core) as table:
            table.replace("write_at", shorten(table.native.write_at))
            table.replace("read_at", shorten(table.native.read_at))
            source = ffi.new("char[]", len(blob) or 1)
            ffi.memmove(source, blob, len(blob))
            assert lib.ckv_os_writev_all(fd, *vector(ffi, source, sizes), offset) == 0
            target = ffi.new("char[]", len(blob) or 1)
            assert lib.ckv_os_readv_all(fd, *vector(ffi, target, sizes), offset) == 0
        assert bytes(ffi.buffer(target, len(blob))) == blob
        assert os.pread(fd, len(blob) + 1, offset) == blob
    finally:
        os.close(fd)


def vector(ffi, memory, sizes):
    iov = ffi.new("struct iovec[]", max(len(sizes), 1))
    at = 0
    for i, size in enumerate(sizes):
        iov[i].iov_base = memory + at
        iov[i].iov_len = size
        at += size
    return iov, len(sizes)


def test_a_file_that_ends_early_is_told_apart(core, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    fd = os.open(path, os.O_RDONLY)
    target = core.ffi.new("char[11]")
    assert core.lib.ckv_os_read_all(fd, target, 10, 0) == 0
    assert core.lib.ckv_os_read_all(fd, target, 11, 0) == -errno.ENODATA
    assert core.lib.ckv_os_write_all(fd, target, 1, 0) == -errno.EBADF
    os.close(fd)


def test_a_write_of_nothing_is_an_error_not_a_loop(core, table, tmp_path):
    table.replace("write_at", lambda fd, iov, count, offset: 0)
    assert core.lib.ckv_os_write_all(1, core.ffi.new("char[4]"), 4, 0) == -errno.EIO


def test_open_retries_interruptions_and_closes_on_exec(core, table, tmp_path):
    answers = [-errno.EINTR, -errno.EINTR]
    native = table.native.open_file
    table.replace(
        "open_file", lambda *args: answers.pop() if answers else native(*args)
    )
    path = native_path(tmp_path / "file")
    fd = core.lib.ckv_os_open(path, os.O_RDWR | os.O_CREAT, 0o600)
    assert fd >= 0
    assert answers == []
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)
    missing = core.lib.ckv_os_open(native_path(tmp_path / "none"), os.O_RDONLY, 0)
    assert missing == -errno.ENOENT


# ---- byte locks ---------------------------------------------------------------------


def test_a_lock_belongs_to_the_description(os_lib, tmp_path):
    """Two of one process exclude each other; closing a third is harmless."""
    path = tmp_path / "file"
    path.touch()
    first, second, third = (os.open(path, os.O_RDWR) for _ in range(3))
    assert os_lib.lock_byte(first, LOCK_BYTE) == 0
    assert os_lib.lock_byte(second, LOCK_BYTE) == -errno.EAGAIN
    assert os_lib.lock_byte(second, LOCK_BYTE + 1) == 0
    os.close(third)
    assert os_lib.byte_held(second, LOCK_BYTE, 1) == 1
    assert os_lib.byte_held(first, LOCK_BYTE, 1) == 0  # its own
    assert os_lib.byte_held(first, LOCK_BYTE, 64) == 1
    assert os_lib.unlock_byte(first, LOCK_BYTE) == 0
    assert os_lib.lock_byte(second, LOCK_BYTE) == 0
    os.close(second)
    assert os_lib.byte_held(first, LOCK_BYTE, 64) == 0
    os.close(first)


def test_a_read_only_description_may_ask(os_lib, tmp_path):
    path = tmp_path / "file"
    path.touch()
    holder = os.open(path, os.O_RDWR)
    asker = os.open(path, os.O_RDONLY)
    assert os_lib.byte_held(asker, LOCK_BYTE, 1) == 0
    assert os_lib.lock_byte(holder, LOCK_BYTE) == 0
    assert os_lib.byte_held(asker, LOCK_BYTE, 1) == 1
    assert os_lib.lock_byte(asker, LOCK_BYTE) == -errno.EBADF
    os.close(holder)
    os.close(asker)


def test_a_lock_ends_with_its_process(os_lib, tmp_path):
    path = tmp_path / "file"
    path.touch()
    script = (
        "import fcntl, os, struct, sys, time\n"
        f"fd = os.open({str(path)!r}, os.O_RDWR)\n"
        f"fcntl.fcntl(fd, 37, {struct.pack('hhqqi4x', 1, 0, LOCK_BYTE, 1, 0)!r})\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    fd = os.open(path, os.O_RDWR)
    try:
        assert child.stdout.readline() == b"held\n"
        assert os_lib.lock_byte(fd, LOCK_BYTE) == -errno.EAGAIN
        child.kill()
        child.wait()
        assert os_lib.lock_byte(fd, LOCK_BYTE) == 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        os.close(fd)


# ---- files --------------------------------------------------------------------------


def test_allocation_takes_blocks_and_sets_the_length(os_lib, volume_folder):
    fd = os.open(volume_folder / "file", os.O_RDWR | os.O_CREAT, 0o600)
    assert os_lib.allocate(fd, 0, 1 << 20) == 0
    info = os.fstat(fd)
    assert info.st_size == 1 << 20
    assert info.st_blocks * 512 >= 1 << 20
    assert os_lib.truncate_file(fd, 100) == 0
    assert os.fstat(fd).st_size == 100
    assert os_lib.truncate_file(fd, 1 << 63) == -errno.EFBIG
    os.close(fd)


def test_allocation_that_is_impossible_says_so(os_lib):
    """Pipes answer ESPIPE, which stays; "cannot" in other words becomes EOPNOTSUPP."""
    reader, writer = os.pipe()
    assert os_lib.allocate(writer, 0, 4096) == -errno.ESPIPE
    assert os_lib.allocate(-1, 0, 4096) == -errno.EBADF
    assert os_lib.allocate(reader, 0, 0) == -errno.EOPNOTSUPP  # EINVAL
    os.close(reader)
    os.close(writer)


def test_file_systems_have_names_and_space(core, disk_folder, tmpfs_folder):
    info = core.ffi.new("struct ckv_file_system *")
    for folder, kind in ((tmpfs_folder, core.lib.CKV_FS_MEMORY), (disk_folder, None)):
        fd = os.open(folder, os.O_RDONLY)
        assert core.lib.ckv_os.file_system(fd, info) == 0
        os.close(fd)
        assert core.ffi.string(info.name)
        found = os.statvfs(folder)
        free = found.f_bavail * found.f_frsize
        assert abs(info.free_bytes - free) < 1 << 30 or found.f_blocks == 0
        assert kind is None or info.kind == kind
    assert core.ffi.string(core.ffi.addressof(info, "name")[0])


def test_write_back_and_sync_succeed(os_lib, volume_folder):
    fd = os.open(volume_folder / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, b"x" * 8192)
    assert os_lib.start_write_back(fd, 0, 8192) == 0
    assert os_lib.pending_error(fd, 0, 4096) == 0
    assert os_lib.sync_file(fd) == 0
    for advice in range(3):
        assert os_lib.advise_file(fd, 0, 8192, advice) == 0
    assert os_lib.set_no_cow(fd) == 0
    assert os_lib.change_mode(fd, 0o640) == 0
    assert os.fstat(fd).st_mode & 0o777 == 0o640
    os.close(fd)
    assert os_lib.sync_file(fd) == -errno.EBADF


def test_resolving_follows_directories(core, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    result = core.ffi.new("char **")
    path = native_path(tmp_path / "link" / "..")
    assert core.lib.ckv_os.resolve_path(path, result) == 0
    assert core.ffi.string(result[0]) == native_path(tmp_path.resolve())
    core.lib.free(result[0])
    missing = native_path(tmp_path / "none")
    assert core.lib.ckv_os.resolve_path(missing, result) == -errno.ENOENT
    assert result[0] == core.ffi.NULL


# ---- memory -------------------------------------------------------------------------


def map_shared(core, fd, length, protection=mmap.PROT_READ):
    result = core.ffi.new("void **")
    code = core.lib.ckv_os.map(
        core.ffi.NULL, length, protection, mmap.MAP_SHARED, fd, 0, result
    )
    assert code == 0
    return result[0]


def test_populating_reports_what_a_load_would_raise(core, volume_folder):
    fd = os.open(volume_folder / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, 8192)
    address = map_shared(core, fd, 8192)
    answer = core.lib.ckv_os.populate_read(address, 8192)
    if answer in (-errno.EINVAL, -errno.ENOSYS):
        pytest.skip("this kernel does not know MADV_POPULATE_READ")
    assert answer == 0
    os.truncate(fd, 4096)
    assert core.lib.ckv_os.populate_read(address, 8192) == -errno.EFAULT
    assert core.lib.ckv_os.unmap(address, 8192) == 0
    os.close(fd)


def test_faults_of_huge_pages_show_the_same_bytes(core, volume_folder):
    """And reach no further than the mapping."""
    data = os.urandom(5 << 20)
    fd = os.open(volume_folder / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, data)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    address = map_shared(core, fd, len(data))
    answer = core.lib.ckv_os.large_faults(address, len(data))
    assert answer in (0, -errno.EINVAL, -errno.ENOSYS, -errno.EPERM)
    assert core.ffi.buffer(address, len(data))[:] == data
    assert core.lib.ckv_os.unmap(address, len(data)) == 0
    assert core.lib.ckv_os.large_faults(address + 1, 4096) < 0
    os.close(fd)


def test_a_mapping_shows_what_is_written(core, volume_folder):
    fd = os.open(volume_folder / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, 4096)
    address = map_shared(core, fd, 4096)
    os.pwrite(fd, b"abc", 100)
    assert core.ffi.buffer(address, 4096)[100:103] == b"abc"
    assert core.lib.ckv_os.drop_pages(address, 4096) == 0
    assert core.ffi.buffer(address, 4096)[100:103] == b"abc"
    assert core.lib.ckv_os.unmap(address, 4096) == 0
    os.close(fd)


def test_mapping_errors_are_returned(core, tmp_path):
    result = core.ffi.new("void **")
    arguments = (core.ffi.NULL, 4096, mmap.PROT_READ, mmap.MAP_SHARED, -1, 0, result)
    assert core.lib.ckv_os.map(*arguments) == -errno.EBADF
    assert result[0] == core.ffi.NULL


def test_a_child_sees_the_wiped_page_and_not_the_private_one(core):
    lib, ffi = core.lib, core.ffi
    result = ffi.new("void **")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = []
    for _ in range(2):
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        assert lib.ckv_os.map(ffi.NULL, 4096, protection, flags, -1, 0, result) == 0
        pages.append(result[0])
        ffi.buffer(result[0], 1)[:] = b"\x01"
    assert lib.ckv_os.wipe_on_fork(pages[0], 4096) == 0
    assert lib.ckv_os.dont_fork(pages[1], 4096) == 0
    child = os.fork()
    if child == 0:
        wiped = ffi.buffer(pages[0], 1)[0] == b"\x00"
        with open("/proc/self/maps") as maps:
            starts = [int(line.split("-")[0], 16) for line in maps]
        gone = int(ffi.cast("uintptr_t", pages[1])) not in starts
        os._exit(0 if wiped and gone else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ffi.buffer(pages[0], 1)[0] == b"\x01"
    for page in pages:
        assert lib.ckv_os.unmap(page, 4096) == 0


# ---- time and the rest --------------------------------------------------------------


def test_clocks_and_sleep(os_lib):
    before = os_lib.monotonic_ns()
    os_lib.sleep_ns(5_000_000)
    assert os_lib.monotonic_ns() - before >= 5_000_000
    assert abs(os_lib.realtime_ns() - time.time_ns()) < 10**10


def test_random_bytes_fill_everything(core):
    for length in (0, 1, 16, 300, 5000):
        first, second = (core.ffi.new("char[]", length + 8) for _ in range(2))
        assert core.lib.ckv_os.random_bytes(first, length) == 0
        assert core.lib.ckv_os.random_bytes(second, length) == 0
        assert bytes(core.ffi.buffer(first)[length:]) == bytes(8)
        if length >= 16:
            assert bytes(core.ffi.buffer(first)) != bytes(core.ffi.buffer(second))
            assert bytes(core.ffi.buffer(first)[length - 16 : length]) != bytes(16)


def test_identity_of_the_process(core):
    assert core.lib.ckv_os.process_id() == os.getpid()
    assert core.lib.ckv_os.user_id() == os.geteuid()
    assert core.ffi.string(core.lib.ckv_os.program_name())


# ---- status.c -----------------------------------------------------------------------


def test_every_status_has_a_text(core):
    texts = set()
    for number in [*range(10), *range(-16, 0)]:
        text = core.ffi.string(core.lib.ckv_status_text(number))
        assert text != b"unknown status"
        texts.add(text)
    assert len(texts) == 26
    assert core.ffi.string(core.lib.ckv_status_text(99)) == b"unknown status"


def test_a_long_sentence_is_cut_at_a_character(core):
    """The path is the only long part: whatever its length, the text stays UTF-8."""
    error = core.ffi.new("struct ckv_error *")
    resolved = core.ffi.new("char **")
    for length in range(60, 80):
        path = ("/nowhere/" + "x" * length + "é€😀" * 120 + "/kv").encode()
        status = core.lib.ckv_file_resolve(path, resolved, error)
        assert status == core.lib.CKV_E_OS
        assert core.ffi.string(error.text).decode().startswith("the directory")


def test_the_log_can_change_while_others_log(core, tmp_path):
    """A sink never gets the context of another."""
    ffi, lib = core.ffi, core.lib
    seen = []
    handles = [ffi.new_handle(str(i)) for i in range(2)]

    def sink_of(expected):
        def sink(context, level, text):
            seen.append(ffi.from_handle(context) == expected)

        return ffi.callback("void(void *, enum ckv_log_level, const char *)", sink)

    sinks = [sink_of("0"), sink_of("1")]
    path = tmp_path / "kv"
    path.touch()
    os.link(path, tmp_path / "kv2")  # each open warns
    options = ffi.new("struct ckv_options *")
    lib.ckv_options_init(options)
    stop = threading.Event()

    def work():
        file = ffi.new("struct ckv_file *")
        while not stop.is_set():
            name = native_path(path)
            assert lib.ckv_file_open(options, name, file, ffi.NULL) == lib.CKV_OK
            lib.ckv_file_close(file)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        for i in range(2):
            lib.ckv_set_log(sinks[i], handles[i])
            time.sleep(0.001)
    stop.set()
    for thread in threads:
        thread.join()
    lib.ckv_set_log(ffi.NULL, ffi.NULL)
    assert seen
    assert all(seen)
