# SPDX-License-Identifier: Apache-2.0
"""Volume files: which paths are safe (P1 to P4), creation, headers, mappings."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import core_child
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from os_faults import OsTable

MIB = 1 << 20
PAGE = 4096
CAPACITY = 16 * MIB
ROOT = os.geteuid() == 0

needs_root = pytest.mark.skipif(not ROOT, reason="needs to be root")


class Failure(Exception):
    def __init__(self, core, status: int, error) -> None:
        self.status = status
        self.errno = error.os_errno
        self.text = os.fsdecode(core.ffi.string(error.text))
        super().__init__(f"{status}: {self.text}")


class Files:
    """ckv_file_... with exceptions, and a list of what was opened."""

    def __init__(self, core) -> None:
        self.core, self.lib, self.ffi = core, core.lib, core.ffi
        self.opened = []
        self.messages: list[str] = []
        self._sink = self.ffi.callback(
            "void(void *, enum ckv_log_level, const char *)",
            lambda context, level, text: self.messages.append(
                self.ffi.string(text).decode()
            ),
        )
        self.lib.ckv_set_log(self._sink, self.ffi.NULL)

    def end(self) -> None:
        for file in self.opened:
            self.lib.ckv_file_close(file)
        self.opened.clear()
        self.lib.ckv_set_log(self.ffi.NULL, self.ffi.NULL)

    def call(self, function, *arguments):
        """Returns CKV_OK or a positive status; raises Failure."""
        error = self.ffi.new("struct ckv_error *")
        status = function(*arguments, error)
        if status < 0:
            assert error.status == status
            assert error.text[0] != b"\0"
            raise Failure(self.core, status, error)
        return status

    def options(self, **values):
        options = self.ffi.new("struct ckv_options *")
        self.lib.ckv_options_init(options)
        for name, value in values.items():
            setattr(options, name, value)
        return options

    def resolve(self, path) -> str:
        result = self.ffi.new("char **")
        self.call(self.lib.ckv_file_resolve, os.fsencode(path), result)
        resolved = os.fsdecode(self.ffi.string(result[0]))
        self.lib.free(result[0])
        return resolved

    def open(self, path, **options):
        """The file, or None for a miss."""
        file = self.ffi.new("struct ckv_file *")
        resolved = os.fsencode(self.resolve(path))
        status = self.call(
            self.lib.ckv_file_open, self.options(**options), resolved, file
        )
        self.opened.append(file)
        return file if status == self.lib.CKV_OK else None

    def close(self, file) -> None:
        self.opened.remove(file)
        self.lib.ckv_file_close(file)

    @contextlib.contextmanager
    def locked(self, file, timeout_s: float = 5.0):
        lock_fd = self.ffi.new("int *")
        deadline = self.lib.ckv_os.monotonic_ns() + int(timeout_s * 1e9)
        status = self.call(self.lib.ckv_file_lock_open, file, deadline, lock_fd)
        if status != self.lib.CKV_OK:
            assert status == self.lib.CKV_BUSY
            assert lock_fd[0] == -1
            raise BlockingIOError
        try:
            yield lock_fd[0]
        finally:
            os.close(lock_fd[0])
            self.lib.ckv_slot_fork_unblock()

    def blank(self, file) -> bool:
        answer = self.ffi.new("bool *")
        self.call(self.lib.ckv_file_is_blank, file, answer)
        return bool(answer[0])

    def geometry(self, capacity=CAPACITY, stripes=0):
        geometry = self.ffi.new("struct ckv_geometry *")
        self.call(self.lib.ckv_geometry_plan, capacity, stripes, 0, geometry)
        return geometry

    def identity(self, geometry):
        header = self.ffi.new("struct ckv_file_header *")
        header.member_count = 1
        header.event_capacity = 1024
        header.set_id = os.urandom(16)
        header.file_id = os.urandom(16)
        header.members[0].file_id = bytes(header.file_id)
        header.members[0].data_bytes = geometry.data_bytes
        return header

    def format(self, file, geometry=None, **options):
        geometry = geometry or self.geometry()
        identity = self.identity(geometry)
        self.call(
            self.lib.ckv_file_format, file, self.options(**options), geometry, identity
        )
        return identity

    def create(self, path, geometry=None, **options):
        file = self.open(path, **options)
        assert file is not None
        with self.locked(file):
            assert self.blank(file)
            self.format(file, geometry, **options)
        return file

    def read_header(self, file):
        self.call(self.lib.ckv_file_read_header, file)
        return file.header


@pytest.fixture
def files(core):
    files = Files(core)
    yield files
    files.end()


@pytest.fixture
def table(core):
    with OsTable(core) as table:
        yield table


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def refused(files, path, **options) -> Failure:
    with pytest.raises(Failure) as caught:
        files.open(path, **options)
    return caught.value


# ---- resolving (P1) -----------------------------------------------------------------


def test_spellings_of_one_place(files, tmp_path, monkeypatch):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("HOME", str(real))
    monkeypatch.chdir(real)
    expected = str(real.resolve() / "kv.cyc")
    for spelling in (
        "kv.cyc",
        "./kv.cyc",
        "~/kv.cyc",
        f"{tmp_path}/link/kv.cyc",
        f"{tmp_path}//real/../link/./kv.cyc",
        expected,
    ):
        assert files.resolve(spelling) == expected
    assert files.resolve("/kv.cyc") == "/kv.cyc"
    assert files.resolve("./~kv") == str(real.resolve() / "~kv")
    assert files.resolve(b"\xff\xfe.cyc") == str(real.resolve() / "\udcff\udcfe.cyc")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "empty"),
        ("/", "names a directory"),
        ("x/", "names a directory"),
        (".", "names a directory"),
        ("x/..", "names a directory"),
        ("~", "home of another user"),
        ("~nobody/kv", "home of another user"),
        ("file:///tmp/kv", "URL"),
        ("file://kv", "URL"),
        ("s3://bucket/kv", "URL"),
        ("/" + "x" * 5000, "5001 bytes"),
    ],
)
def test_spellings_that_make_no_sense(files, path, says):
    with pytest.raises(Failure, match=says) as caught:
        files.resolve(path)
    assert caught.value.status == files.lib.CKV_E_INVALID


def test_a_missing_directory_is_named(files, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "kv", tmp_path / "file" / "kv", "$HOME/kv"):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(Failure, match="does not exist; create it") as caught:
            files.resolve(path)
        assert caught.value.status == files.lib.CKV_E_OS
        assert caught.value.errno in (errno.ENOENT, errno.ENOTDIR)
    monkeypatch.delenv("HOME")
    with pytest.raises(Failure, match="HOME"):
        files.resolve("~/kv")


@given(st.binary(min_size=1, max_size=60).filter(lambda path: b"\0" not in path))
def test_no_spelling_escapes_its_directory(core, path):
    """The last component stays as it is, below a directory without links."""
    files = Files(core)
    try:
        resolved = os.fsencode(files.resolve(path))
    except Failure:
        return
    finally:
        files.end()
    directory, name = os.path.split(resolved)
    assert name == path.rsplit(b"/", 1)[-1]
    assert os.path.realpath(directory) == directory


# ---- what may be opened (P1) --------------------------------------------------------


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_is_refused(files, tmp_path, dangling):
    target = tmp_path / "target"
    if not dangling:
        target.write_bytes(b"precious")
    (tmp_path / "kv").symlink_to(target)
    failure = refused(files, tmp_path / "kv")
    assert failure.status == files.lib.CKV_E_UNSAFE_PATH
    assert "symbolic link" in failure.text
    assert target.exists() is not dangling
    assert dangling or target.read_bytes() == b"precious"


def test_a_link_put_there_in_between_is_refused(files, table, tmp_path):
    """lstat() sees a file, open() would follow a link."""
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "kv").symlink_to(target)
    native = table.native.lstat_path
    answers = [os.fsencode(target)]

    def lstat(path, result):
        return native(answers.pop() if answers else path, result)

    table.replace("lstat_path", lstat)
    assert "symbolic link" in refused(files, tmp_path / "kv").text
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("mode", [0, 1])
def test_a_fifo_does_not_hang(files, tmp_path, table, mode):
    os.mkfifo(tmp_path / "kv")
    assert "a FIFO" in refused(files, tmp_path / "kv", mode=mode).text
    # Also when it takes the place of a file after lstat().
    (tmp_path / "file").touch()
    native = table.native.lstat_path
    plain = os.fsencode(tmp_path / "file")
    table.replace("lstat_path", lambda path, result: native(plain, result))
    before = descriptors()
    failure = refused(files, tmp_path / "kv", mode=mode)
    assert failure.status == files.lib.CKV_E_UNSAFE_PATH
    assert descriptors() == before


def test_what_is_not_a_file_is_refused(files, tmp_path):
    (tmp_path / "folder").mkdir()
    assert "a directory" in refused(files, tmp_path / "folder").text
    failure = refused(files, "/dev/null")
    assert failure.status == files.lib.CKV_E_UNSAFE_PATH
    assert "a character device" in failure.text


def test_a_hard_link_is_a_warning(files, tmp_path):
    files.create(tmp_path / "kv")
    os.link(tmp_path / "kv", tmp_path / "other")
    file = files.open(tmp_path / "kv")
    assert any("hard links" in message for message in files.messages)
    files.read_header(file)


def test_a_missing_file_is_a_miss(files, tmp_path):
    assert files.open(tmp_path / "kv", create=False) is None
    assert files.open(tmp_path / "kv", mode=files.lib.CKV_MODE_READ) is None
    assert list(tmp_path.iterdir()) == []
    file = files.opened[-1]
    assert not file.present
    assert os.fsdecode(files.ffi.string(file.path)) == str(tmp_path.resolve() / "kv")


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("mode", [0, 0o600, 0o660, 0o644])
def test_the_mode_is_exact_whatever_the_umask(files, tmp_path, umask, mask, mode):
    umask(mask)
    file = files.open(tmp_path / "kv", file_mode=mode)
    assert file.created
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == (mode or 0o600)


def test_a_mode_with_other_bits_is_invalid(files, tmp_path):
    failure = refused(files, tmp_path / "kv", file_mode=0o4600)
    assert failure.status == files.lib.CKV_E_INVALID
    assert list(tmp_path.iterdir()) == []


# ---- directories (P2) ---------------------------------------------------------------


@needs_root
def test_a_foreign_directory_is_refused(files, tmp_path):
    os.chown(tmp_path, 4321, -1)
    failure = refused(files, tmp_path / "kv")
    assert failure.status == files.lib.CKV_E_UNSAFE_PATH
    assert "user 4321" in failure.text
    assert list(tmp_path.iterdir()) == []
    assert files.open(tmp_path / "kv", allow_shared_directory=True) is not None


@needs_root
def test_a_planted_file_is_refused(files, tmp_path):
    (tmp_path / "kv").touch()
    os.chown(tmp_path / "kv", 4321, -1)
    assert "user 4321" in refused(files, tmp_path / "kv").text
    assert files.open(tmp_path / "kv", allow_shared_directory=True) is not None


@needs_root
def test_files_of_root_are_trusted(files, table, tmp_path):
    table.replace("user_id", lambda: 4321)
    assert files.open(tmp_path / "kv") is not None


@pytest.mark.parametrize(
    ("mode", "accepted"),
    [(0o777, False), (0o702, False), (0o1777, True), (0o770, True), (0o700, True)],
)
def test_world_writable_directories(files, tmp_path, mode, accepted):
    tmp_path.chmod(mode)
    if accepted:
        assert files.open(tmp_path / "kv") is not None
        return
    failure = refused(files, tmp_path / "kv")
    assert failure.status == files.lib.CKV_E_UNSAFE_PATH
    assert f"mode {mode:04o}" in failure.text
    assert list(tmp_path.iterdir()) == []
    assert files.open(tmp_path / "kv", allow_shared_directory=True) is not None


# ---- file systems (P3) --------------------------------------------------------------


def pretend(table, core, kind: str, name: bytes, free: int = 1 << 40) -> None:
    def file_system(fd, result):
        result.kind = getattr(core.lib, f"CKV_FS_{kind}")
        core.ffi.memmove(result.name, name + b"\0", len(name) + 1)
        result.free_bytes = free
        return 0

    table.replace("file_system", file_system)


@pytest.mark.parametrize(
    ("kind", "name", "switch"),
    [
        ("NETWORK", b"nfs", "allow_network_fs"),
        ("FUSE", b"fuse", "allow_network_fs"),
        ("COW", b"zfs", "allow_sparse"),
    ],
)
def test_file_systems_that_cannot_keep_promises(
    files, core, table, tmp_path, kind, name, switch
):
    pretend(table, core, kind, name)
    before = descriptors()
    failure = refused(files, tmp_path / "kv")
    assert failure.status == files.lib.CKV_E_UNSUPPORTED
    assert name.decode() in failure.text
    assert switch in failure.text
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before
    files.create(tmp_path / "kv", **{switch: True})


def test_an_existing_file_on_a_refused_file_system_stays(files, core, table, tmp_path):
    (tmp_path / "kv").write_bytes(b"precious")
    pretend(table, core, "NETWORK", b"nfs")
    refused(files, tmp_path / "kv")
    assert (tmp_path / "kv").read_bytes() == b"precious"


def test_overlay_is_a_warning_and_others_are_silent(files, core, table, tmp_path):
    pretend(table, core, "UNKNOWN", b"0x12345678")
    assert files.open(tmp_path / "a") is not None
    assert files.messages == []
    pretend(table, core, "OVERLAY", b"overlay")
    assert files.open(tmp_path / "b") is not None
    assert any("overlay" in message for message in files.messages)


# ---- space --------------------------------------------------------------------------


@contextlib.contextmanager
def small_tmpfs(point: Path, size: int):
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "none", point]
    if not ROOT or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", point], check=True)


@pytest.mark.parametrize("lying", [False, True])
def test_a_full_disk_is_an_error_in_words(files, core, table, tmp_path, lying):
    """Also when the free space that was reported is gone by the time it is taken."""
    if lying:
        pretend(table, core, "MEMORY", b"tmpfs", free=1 << 40)
    with small_tmpfs(tmp_path / "small", 4 * MIB) as folder:
        before = descriptors()
        with pytest.raises(Failure) as caught:
            files.create(folder / "kv")
        assert caught.value.status == files.lib.CKV_E_NO_SPACE
        assert caught.value.errno == errno.ENOSPC
        geometry = files.geometry()
        for part in (str(folder / "kv"), str(geometry.file_bytes), "free"):
            assert part in caught.value.text
        assert list(folder.iterdir()) == []
        files.end()
        assert descriptors() == before
        remount = ["mount", "-o", f"remount,size={64 * MIB}", folder]
        subprocess.run(remount, check=True)
        files.create(folder / "kv")
        files.end()


def test_f2_emptied_between_look_and_read_is_blank(core, files, tmp_path):
    """Its creator was killed, and the next one begins while a third looks."""
    path = tmp_path / "kv.cyc"
    path.write_bytes(b"\0" * 16 * 4096)
    file = files.open(path)

    def look(fd, info):
        result = table.native.stat_file(fd, info)
        os.truncate(path, 0)
        return result

    with OsTable(core) as table:
        table.replace("stat_file", look)
        assert files.blank(file)


def test_a_blank_file_of_somebody_is_left_blank(files, tmp_path):
    with small_tmpfs(tmp_path / "small", 4 * MIB) as folder:
        (folder / "kv").touch()
        with pytest.raises(Failure):
            files.create(folder / "kv")
        assert (folder / "kv").stat().st_size == 0
        files.end()


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_all_space_is_taken_at_creation(files, volume_folder):
    path = volume_folder / "kv"
    files.create(path)
    assert allocated(path) >= path.stat().st_size == files.geometry().file_bytes


@pytest.mark.parametrize("kind", ["LOCAL", "MEMORY", "OVERLAY", "UNKNOWN", "FUSE"])
def test_without_fallocate_zeros_are_written(files, core, table, volume_folder, kind):
    pretend(table, core, kind, b"odd")
    table.replace("allocate", lambda fd, offset, length: -errno.EOPNOTSUPP)
    path = volume_folder / "kv"
    files.create(path, allow_network_fs=True)
    assert allocated(path) >= path.stat().st_size


def test_an_allocation_that_did_nothing_is_noticed(files, table, volume_folder):
    """Holes would end in SIGBUS or lost puts when the disk is full."""

    def hole(fd, offset, length):
        os.truncate(fd, offset + length)
        return 0

    table.replace("allocate", hole)
    path = volume_folder / "kv"
    with pytest.raises(Failure, match="reserved") as caught:
        files.create(path)
    assert caught.value.status == files.lib.CKV_E_UNSUPPORTED
    assert not path.exists()
    files.create(path, allow_sparse=True)
    assert any("are reserved" in message for message in files.messages)


def test_copy_on_write_that_cannot_be_turned_off(files, table, tmp_path):
    table.replace("set_no_cow", lambda fd: -errno.EOPNOTSUPP)
    with pytest.raises(Failure, match="allow_sparse"):
        files.create(tmp_path / "kv")
    assert list(tmp_path.iterdir()) == []
    files.create(tmp_path / "kv", allow_sparse=True)


def test_signals_do_not_stop_an_allocation(files, table, tmp_path):
    native = table.native.allocate
    answers = [-errno.EINTR] * 3
    table.replace("allocate", lambda *args: answers.pop() if answers else native(*args))
    files.create(tmp_path / "kv")


def test_metadata_is_written_and_not_only_reserved(files, table, tmp_path):
    """Every byte before the data area goes through a write."""
    geometry = files.geometry()
    covered = bytearray(geometry.data_offset)
    native = table.native.write_at

    def write_at(fd, iov, count, offset):
        done = native(fd, iov, count, offset)
        if done > 0 and offset < len(covered):
            end = min(offset + done, len(covered))
            covered[offset:end] = b"\1" * (end - offset)
        return done

    table.replace("write_at", write_at)
    files.create(tmp_path / "kv")
    assert covered.count(0) == 0


@pytest.mark.parametrize("code", [errno.ENODEV, errno.ENOSYS])
def test_a_mount_without_mmap_is_refused(files, core, table, tmp_path, code):
    pretend(table, core, "LOCAL", b"mergerfs")
    table.replace("map", lambda *arguments: -code)
    with pytest.raises(Failure, match="refuses mmap") as caught:
        files.create(tmp_path / "kv")
    assert caught.value.status == files.lib.CKV_E_UNSUPPORTED
    assert caught.value.errno == code
    assert "mergerfs" in caught.value.text
    assert list(tmp_path.iterdir()) == []


def test_too_little_address_space_is_named(files, table, tmp_path):
    table.replace("map", lambda *arguments: -errno.ENOMEM)
    with pytest.raises(Failure, match="ulimit -v") as caught:
        files.create(tmp_path / "kv")
    assert caught.value.status == files.lib.CKV_E_NO_MEMORY


def test_a_mapping_that_shows_other_bytes_is_refused(files, core, table, tmp_path):
    """What a file system without coherent mappings would do."""
    native = table.native.map
    zeros = os.open(tmp_path / "zeros", os.O_RDWR | os.O_CREAT)
    os.truncate(zeros, MIB)

    def other_file(hint, length, protection, flags, fd, offset, result):
        return native(hint, length, protection, flags, zeros, 0, result)

    table.replace("map", other_file)
    with pytest.raises(Failure, match="other bytes") as caught:
        files.create(tmp_path / "kv")
    assert caught.value.status == files.lib.CKV_E_UNSUPPORTED
    os.close(zeros)
    assert not (tmp_path / "kv").exists()


def test_every_stripe_is_tried_and_left_zero(files, tmp_path):
    geometry = files.geometry(32 * MIB, stripes=4)
    file = files.create(tmp_path / "kv", geometry)
    fd = file.data_fd
    rest = os.pread(fd, geometry.file_bytes, 4 * PAGE)
    assert rest.count(0) == len(rest) == geometry.file_bytes - 4 * PAGE


# ---- the n-th call fails ------------------------------------------------------------


def create_as_an_open_does(files, path) -> None:
    file = files.open(path)
    try:
        with files.locked(file):
            try:
                assert files.blank(file)
                files.format(file)
                files.read_header(file)
                files.call(files.lib.ckv_file_map, file)
            except Failure:
                files.lib.ckv_file_discard(file)
                raise
    finally:
        files.close(file)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENOMEM])
def test_whichever_call_fails_nothing_stays_behind(files, core, tmp_path, code):
    """Also no descriptor and no mapping; the next attempt succeeds."""
    path = tmp_path / "kv"
    before = descriptors()
    failed_calls = []
    n = 0
    while True:
        n += 1
        calls = []

        def decide(name, calls=calls, n=n):
            calls.append(name)
            return -code if len(calls) == n else 0

        with OsTable(core) as table:
            table.watch(decide)
            try:
                create_as_an_open_does(files, path)
                failed = False
            except (Failure, BlockingIOError):
                failed = True
        assert descriptors() == before, calls[n - 1 :]
        maps = Path("/proc/self/maps").read_text()
        assert str(tmp_path) not in maps, calls[n - 1 :]
        if len(calls) < n:
            assert not failed
            break
        if failed:
            failed_calls.append(calls[n - 1])
            if calls[n - 1] != "lstat_path":
                assert list(tmp_path.iterdir()) == [], calls[n - 1]
        for left in tmp_path.iterdir():
            left.unlink()
    for name in (
        "open_file",
        "stat_file",
        "file_system",
        "lock_byte",
        "truncate_file",
        "set_no_cow",
        "allocate",
        "write_at",
        "read_at",
        "map",
        "sync_file",
        "resolve_path",
        "change_mode",
    ):
        assert name in failed_calls


@pytest.mark.parametrize("point", ["begin", "marked", "reserved", "tested", "written"])
def test_a_creator_may_die_anywhere(files, tmp_path, point):
    """What it leaves is blank, and never blocks the next one."""
    path = tmp_path / "kv"
    script = "import test_file\ntest_file.Files(core).create(sys.argv[1])\n"
    plan = f"format.{point}:kill:1"
    child = core_child.run(script, path, CYCLONE_KV_TEST_POINT=plan)
    assert child.returncode == -signal.SIGKILL
    file = files.open(path)
    with files.locked(file, timeout_s=1):
        assert files.blank(file)
        files.lib.ckv_file_write_note(file, b"opening")  # leaves the mark alone
        assert files.blank(file)
        files.format(file)
    files.read_header(file)


# ---- blank or foreign (P4) ----------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"\x7fELF" + bytes(100),
        b"x",
        bytes(1),
        bytes(4 * PAGE - 1),
        bytes(4 * PAGE + 1),
        bytes(32768) + b"\x01CD001" + bytes(5000),  # an optical image begins with zeros
        bytes(2 * PAGE) + b"x" + bytes(20 * PAGE),
        bytes(3 * PAGE) + b"cyclone_kv: created" + bytes(20 * PAGE),
        os.urandom(50_000),
        bytes(20 * PAGE),
    ],
    ids=range(10),
)
def test_a_foreign_file_is_never_altered(files, tmp_path, content):
    path = tmp_path / "kv"
    path.write_bytes(content)
    file = files.open(path)
    with files.locked(file):
        assert not files.blank(file)
        files.lib.ckv_file_write_note(file, b"opening")
        with pytest.raises(Failure, match="not a volume") as caught:
            files.read_header(file)
        assert caught.value.status == files.lib.CKV_E_FORMAT
        assert file.header.magic == 0
        with pytest.raises(Failure, match="not ours") as caught:
            files.format(file)
        files.lib.ckv_file_discard(file)
    assert path.read_bytes() == content


def test_what_an_unfinished_creation_looks_like(files, tmp_path):
    mark = b"cyclone_kv: creating, process 7 (x)\n"
    for number, content in enumerate(
        [
            b"",
            bytes(PAGE),  # a part of the first write, after a power cut
            bytes(4 * PAGE),
            bytes(3 * PAGE) + mark + bytes(PAGE),
            b"torn" + bytes(3 * PAGE - 4) + mark + bytes(PAGE),
        ]
    ):
        path = tmp_path / str(number)
        path.write_bytes(content)
        file = files.create(path)
        files.read_header(file)


# ---- headers (P4) -------------------------------------------------------------------


@pytest.fixture
def volume(files, tmp_path) -> Path:
    """A volume that nobody has open."""
    path = tmp_path / "volume"
    files.close(files.create(path))
    return path


def change_header(files, path, copy: int, change, *, seal: bool = True) -> None:
    with open(path, "r+b") as raw:
        raw.seek(copy * PAGE)
        header = files.ffi.new("struct ckv_file_header *")
        files.ffi.memmove(header, raw.read(PAGE), PAGE)
        change(header)
        if seal:
            offset = files.ffi.offsetof("struct ckv_file_header", "seal")
            header.seal = files.lib.ckv_seal_of(header, offset)
        raw.seek(copy * PAGE)
        raw.write(files.ffi.buffer(header)[:])


def fail_to_read(files, path) -> Failure:
    before = path.read_bytes()
    file = files.open(path)
    with pytest.raises(Failure) as caught:
        files.read_header(file)
    caught.value.ours = file.header.magic == files.lib.CKV_FORMAT_MAGIC
    files.close(file)
    assert caught.value.status == files.lib.CKV_E_FORMAT
    assert path.read_bytes() == before
    return caught.value


def test_what_was_written_is_read(files, tmp_path):
    geometry = files.geometry()
    file = files.open(tmp_path / "kv")
    with files.locked(file):
        identity = files.format(file, geometry)
    other = files.open(tmp_path / "kv", mode=files.lib.CKV_MODE_READ)
    header = files.read_header(other)
    assert bytes(header.set_id) == bytes(identity.set_id)
    assert bytes(header.file_id) == bytes(identity.file_id)
    assert header.event_capacity == 1024
    size = files.ffi.sizeof("struct ckv_geometry")
    assert (
        files.ffi.buffer(files.ffi.addressof(other, "geometry"), size)[:]
        == files.ffi.buffer(geometry, size)[:]
    )
    assert not other.created


@given(offset=st.integers(0, PAGE - 1), bit=st.integers(0, 7), copy=st.integers(0, 1))
@settings(max_examples=60)
def test_damage_of_one_copy_does_no_harm(core, tmp_path_factory, offset, bit, copy):
    files = Files(core)
    try:
        path = tmp_path_factory.mktemp("header") / "kv"
        file = files.create(path)
        set_id = bytes(file.header.set_id)
        with open(path, "r+b") as raw:
            raw.seek(copy * PAGE + offset)
            byte = raw.read(1)[0] ^ 1 << bit
            raw.seek(copy * PAGE + offset)
            raw.write(bytes([byte]))
        again = files.open(path)
        assert bytes(files.read_header(again).set_id) == set_id
        # The next write repairs the broken copy, not the good one.
        files.call(files.lib.ckv_file_write_header, again)
        with open(path, "r+b") as raw:
            raw.seek((1 - copy) * PAGE)
            raw.write(random.randbytes(PAGE))
        third = files.open(path)
        assert bytes(files.read_header(third).set_id) == set_id
    finally:
        files.end()
        path.unlink()


def test_both_copies_damaged(files, volume):
    for copy in range(2):
        change_header(files, volume, copy, lambda h: setattr(h, "seal", 1), seal=False)
    failure = fail_to_read(files, volume)
    assert "damaged" in failure.text
    assert failure.ours


@pytest.mark.parametrize("seal", [True, False])
@pytest.mark.parametrize("copies", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize(
    ("member", "value", "says"),
    [
        ("version", 3, "format version 3, expected 2"),
        ("version", 0, "format version 0, expected 2"),
        ("endian_mark", 0x04030201, "0x04030201, expected 0x01020304"),
        ("page_bytes", 16384, "16384 bytes, expected 4096"),
    ],
)
def test_other_formats_are_named(files, volume, member, value, says, copies, seal):
    for copy in copies:
        change_header(
            files, volume, copy, lambda h: setattr(h, member, value), seal=seal
        )
    if len(copies) == 1 and not seal:  # damage: the other copy counts
        files.read_header(files.open(volume))
        return
    failure = fail_to_read(files, volume)
    assert says in failure.text
    assert not failure.ours
    file = files.open(volume)
    before = volume.read_bytes()
    files.lib.ckv_file_write_note(file, b"opening")
    assert volume.read_bytes() == before
    with files.locked(file), pytest.raises(Failure, match="not ours"):
        files.format(file)


def test_the_other_byte_order_is_told_apart(files, volume):
    def swap(header):
        header.magic = int.from_bytes(header.magic.to_bytes(8, "little"), "big")
        header.endian_mark = 0x04030201

    for copy in range(2):
        change_header(files, volume, copy, swap)
    assert "byte order" in fail_to_read(files, volume).text


def test_a_truncated_file_is_refused(files, volume):
    size = volume.stat().st_size
    for length in (size - 1, size // 2, 3 * PAGE, 2 * PAGE):
        os.truncate(volume, length)
        failure = fail_to_read(files, volume)
        assert f"{length} bytes, expected {size}" in failure.text
        assert failure.ours
    os.truncate(volume, PAGE - 64)  # fewer bytes may all be zero
    assert "damaged" in fail_to_read(files, volume).text
    os.truncate(volume, 7)
    assert "not a volume" in fail_to_read(files, volume).text


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("member_count", 0),
        ("member_count", 17),
        ("member_index", 1),
        ("member_index", 2**32 - 1),
        ("event_capacity", 0),
        ("event_capacity", 1000),
        ("file_id", bytes(16)),
        ("shm_directory", b"x" * 1024),
        ("table_offset", 1),
        ("data_bytes", 2**63),
        ("entry_count", 2**32 - 1),
        ("stripe_bytes", 0),
    ],
)
def test_sealed_nonsense_is_refused(files, volume, member, value):
    for copy in range(2):
        change_header(files, volume, copy, lambda h: setattr(h, member, value))
    assert fail_to_read(files, volume).ours


@given(st.data())
@settings(max_examples=60)
def test_hostile_headers_are_an_error_or_sound(core, tmp_path_factory, data):
    """Any bytes in both copies, sealed: refused, or a layout inside the file."""
    files = Files(core)
    path = tmp_path_factory.mktemp("hostile") / "kv"
    try:
        files.create(path)
        rng = random.Random(data.draw(st.integers(0, 2**32)))
        places = data.draw(
            st.lists(st.tuples(st.integers(24, 760), st.integers(1, 8)), max_size=4)
        )

        def scramble(header):
            raw = files.ffi.buffer(header)
            for at, length in places:
                raw[at : at + length] = rng.randbytes(length)

        for copy in range(2):
            rng.seed(len(places))
            change_header(files, path, copy, scramble)
        file = files.open(path)
        try:
            files.read_header(file)
        except Failure:
            return
        layout = file.geometry
        assert layout.data_offset + layout.data_bytes <= path.stat().st_size
        assert layout.table_offset + layout.table_bytes <= layout.data_offset
        files.call(files.lib.ckv_file_map, file)
    finally:
        files.end()
        path.unlink()


def test_writers_of_headers_may_race(files, volume):
    """Generations only grow, the newest copy is never the one replaced, and a synced
    sequence never goes back."""
    handles = [files.open(volume) for _ in range(3)]
    for handle in handles:
        files.read_header(handle)
    rng = random.Random(5)
    highest, generation = 0, 2
    for step in range(30):
        handle = rng.choice(handles)
        handle.header.synced_sequence = step if rng.random() < 0.5 else 0
        highest = max(highest, handle.header.synced_sequence)
        files.call(files.lib.ckv_file_write_header, handle)
        seen = files.read_header(files.open(volume))
        assert seen.generation == generation + 1
        assert seen.synced_sequence == highest
        generation = seen.generation
        files.close(files.opened[-1])


def test_threads_may_write_one_header(files, volume):
    file = files.open(volume)
    files.read_header(file)
    status = []

    def work():
        for _ in range(50):
            status.append(files.lib.ckv_file_write_header(file, files.ffi.NULL))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(status) == {files.lib.CKV_OK}
    assert files.read_header(files.open(volume)).generation == 202


def test_a_damaged_volume_may_be_laid_out_anew(files, volume):
    file = files.open(volume)
    old = bytes(files.read_header(file).file_id)
    os.truncate(volume, MIB)
    with pytest.raises(Failure):
        files.read_header(file)
    with files.locked(file):
        identity = files.format(file)
    assert bytes(files.read_header(file).file_id) == bytes(identity.file_id) != old
    assert volume.stat().st_size == files.geometry().file_bytes


# ---- mappings and records -----------------------------------------------------------


@pytest.fixture
def mapped(files, volume_folder):
    file = files.create(volume_folder / "kv")
    files.call(files.lib.ckv_file_map, file)
    return file


def test_records_show_in_the_table(files, mapped):
    last = mapped.geometry.entry_count - 1
    record = files.ffi.new("struct ckv_record *")
    for number in (0, 1, last):
        record.sequence = number + 10
        record.seal = 77
        assert files.lib.ckv_file_write_record(mapped, number, record) == 0
        assert mapped.table[number].sequence == number + 10
        assert mapped.table[number].seal == 77
    assert files.lib.ckv_file_strike_record(mapped, 1) == 0
    assert mapped.table[1].seal == 0
    assert mapped.table[1].sequence == 11
    assert mapped.table[2].sequence == 0


def test_the_head_is_mapped(files, mapped):
    head = files.ffi.buffer(mapped.head, 4 * PAGE)
    assert int.from_bytes(head[:8], "little") == files.lib.CKV_FORMAT_MAGIC
    files.lib.ckv_file_write_note(mapped, b"testing")
    assert head[3 * PAGE :].startswith(b"cyclone_kv: testing, process %d" % os.getpid())
    assert bytes(head[2 * PAGE : 3 * PAGE]) == bytes(PAGE)


def test_a_header_is_replaced_when_the_other_is_on_the_medium(files, mapped, table):
    """Of two that were not, a power cut may leave a part each: none would be left."""
    ranges = []
    table.replace(
        "sync_range",
        lambda fd, address, offset, length: ranges.append((offset, length)) or 0,
    )

    def write() -> None:
        files.call(files.lib.ckv_file_write_header, mapped)

    write()  # creation has synced the one that it finds
    assert ranges == []
    write()
    assert ranges == [(0, 2 * PAGE)]
    assert files.lib.ckv_file_sync(mapped) == 0
    write()
    assert len(ranges) == 1
    another = files.open(files.ffi.string(mapped.path).decode())
    files.read_header(another)
    files.call(files.lib.ckv_file_map, another)
    assert files.lib.ckv_file_sync(mapped) == 0
    files.call(files.lib.ckv_file_write_header, another)  # it knows of no sync
    assert len(ranges) == 2
    write()  # and this one not of the header that the other has written
    assert len(ranges) == 3
    assert files.lib.ckv_file_sync(mapped) == 0
    copy = 1 - int(mapped.header.generation) % 2
    path = files.ffi.string(mapped.path).decode()
    change_header(files, path, copy, lambda header: None)
    write()
    assert len(ranges) == 3
    assert files.lib.ckv_file_sync(mapped) == 0

    def by_another(header) -> None:  # at the same moment, and the same generation
        assert header.generation == mapped.header.generation
        header.synced_sequence += 1

    change_header(files, path, 1 - copy, by_another)
    write()
    assert len(ranges) == 4
    before = bytes(files.ffi.buffer(mapped.head, 2 * PAGE))
    table.replace("sync_range", lambda *_: -errno.EIO)
    with pytest.raises(Failure, match="write the header"):
        write()
    assert bytes(files.ffi.buffer(mapped.head, 2 * PAGE)) == before


def test_a_sync_of_a_range_writes_it(core, mapped, disk_folder):
    """Through a mapping that only reads, of a description that writes."""
    lib, ffi = core.lib, core.ffi
    counts = ffi.new("struct ckv_cached *")
    far = mapped.geometry.data_offset + MIB
    os.pwrite(mapped.data_fd, bytes(2 * PAGE), 0)
    os.pwrite(mapped.data_fd, bytes(PAGE), far)
    if lib.ckv_os_native.cached(mapped.data_fd, 0, 4 * PAGE, counts) != 0:
        pytest.skip("this kernel does not tell what is dirty")
    if not counts.dirty_pages:
        pytest.skip("this file system has no dirty pages")
    head = ffi.cast("void *", mapped.head)
    assert lib.ckv_os_native.sync_range(mapped.data_fd, head, 0, 2 * PAGE) == 0
    assert lib.ckv_os_native.cached(mapped.data_fd, 0, 2 * PAGE, counts) == 0
    assert counts.dirty_pages == 0
    assert lib.ckv_os_native.cached(mapped.data_fd, far, PAGE, counts) == 0
    assert counts.dirty_pages == 1


def test_data_is_mapped_window_by_window(files, mapped):
    layout = mapped.geometry
    assert mapped.window_count == 1
    assert mapped.windows[0].address == 0
    os.pwrite(mapped.data_fd, b"hello", layout.data_offset + 3 * PAGE)
    address = files.lib.ckv_file_data(mapped, 3 * PAGE)
    assert files.ffi.buffer(address, 5)[:] == b"hello"
    assert files.lib.ckv_file_data(mapped, 0) == address - 3 * PAGE
    assert files.lib.ckv_file_data(mapped, layout.data_bytes) == files.ffi.NULL
    assert files.lib.ckv_file_data(mapped, 2**63) == files.ffi.NULL


def test_a_window_that_cannot_be_mapped_is_null(files, mapped, table):
    table.replace("map", lambda *arguments: -errno.ENOMEM)
    assert files.lib.ckv_file_data(mapped, 0) == files.ffi.NULL


def test_threads_agree_on_one_window(files, volume, table):
    """The loser of the race gives its mapping back."""
    native = table.native.map
    barrier = threading.Barrier(4, timeout=10)
    file = files.open(volume)
    files.read_header(file)
    files.call(files.lib.ckv_file_map, file)

    def map_together(*arguments):
        answer = native(*arguments)
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait()
        return answer

    table.replace("map", map_together)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(files.lib.ckv_file_data(file, 0)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert sum(str(volume) in line for line in maps) == 3  # head, table, one window
    files.close(file)
    assert str(volume) not in Path("/proc/self/maps").read_text()


def test_write_back_errors_are_passed_on(files, mapped, table):
    assert files.lib.ckv_file_pending_error(mapped) == 0
    asked = []

    def pending(fd, offset, length):
        asked.append((offset, length))
        return -errno.EINTR if len(asked) == 1 else -errno.EIO

    table.replace("pending_error", pending)
    assert files.lib.ckv_file_pending_error(mapped) == -errno.EIO
    assert asked == [(2 * PAGE, PAGE)] * 2
    table.replace("pending_error", lambda *arguments: -errno.ENOSYS)
    assert files.lib.ckv_file_pending_error(mapped) == 0


# ---- the open lock ------------------------------------------------------------------


def test_the_open_lock_excludes_and_quotes_its_holder(files, volume):
    holder, waiter = files.open(volume), files.open(volume)
    files.read_header(holder)
    with files.locked(holder):
        files.lib.ckv_file_write_note(holder, b"rebuilding")
        start = time.monotonic()
        waiting = files.locked(waiter, timeout_s=0.2)
        with pytest.raises(Failure, match="rebuilding, process") as caught, waiting:
            pass
        assert 0.2 <= time.monotonic() - start < 2
        assert caught.value.status == files.lib.CKV_E_TIMEOUT
        assert str(os.getpid()) in caught.value.text
    with files.locked(waiter, timeout_s=0):
        pass


def test_a_hostile_note_is_not_quoted(files, volume):
    holder, waiter = files.open(volume), files.open(volume)
    with files.locked(holder):
        for note in (b"\x1b[31m" * 100, b"cyclone_kv: ok\x1b[31mred", b"%s%n" * 50):
            os.pwrite(holder.data_fd, note, 3 * PAGE)
            with pytest.raises(Failure) as caught, files.locked(waiter, timeout_s=0):
                pass
            assert caught.value.text.isprintable()


def test_a_file_that_was_replaced_is_not_locked(files, volume):
    file = files.open(volume)
    assert files.lib.ckv_file_attached(file)
    volume.rename(volume.with_name("moved"))
    assert not files.lib.ckv_file_attached(file)
    volume.touch()
    assert not files.lib.ckv_file_attached(file)
    before = descriptors()
    with pytest.raises(BlockingIOError), files.locked(file):
        pass
    assert descriptors() == before


def test_the_same_inode_can_be_opened_again_after_a_move(files, volume):
    file = files.open(volume)
    volume.rename(volume.with_name("moved"))
    fd = files.lib.ckv_file_reopen(file, os.O_RDONLY)
    assert fd >= 0
    assert os.fstat(fd).st_ino == file.inode
    os.close(fd)


def test_without_proc_the_name_has_to_do(files, volume, table):
    native = table.native.open_file

    def no_proc(path, flags, mode):
        if files.ffi.string(path).startswith(b"/proc/"):
            return -errno.ENOENT
        return native(path, flags, mode)

    table.replace("open_file", no_proc)
    file = files.open(volume)
    fd = files.lib.ckv_file_reopen(file, os.O_RDONLY)
    assert os.fstat(fd).st_ino == file.inode
    os.close(fd)
    before = descriptors()
    volume.rename(volume.with_name("moved"))
    assert files.lib.ckv_file_reopen(file, os.O_RDONLY) == -errno.ENOENT
    volume.touch()
    assert files.lib.ckv_file_reopen(file, os.O_RDONLY) == -errno.ESTALE
    assert descriptors() == before


def test_creators_that_race_share_one_file(files, tmp_path):
    """The one with the lock creates, the others find a volume."""
    path = tmp_path / "kv"
    ids, failures = [], []

    def work():
        try:
            file = files.open(path)
            with files.locked(file):
                if files.blank(file):
                    files.format(file)
                ids.append(bytes(files.read_header(file).file_id))
        except Exception as error:
            failures.append(error)

    for _ in range(10):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(ids) == 8
        assert len(set(ids)) == 1
        ids.clear()
        files.end()
        path.unlink()
