# SPDX-License-Identifier: Apache-2.0
"""Full disks, refused calls, hostile files; each function is a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from pathlib import Path

from crash.blobs import blob, key_of, right
from crash.disks import fill
from crash.nursery import fork

from cyclone_kv import (
    Cache,
    CacheConfig,
    CycloneError,
    FormatError,
    NoSpaceError,
    VolumeError,
)

MIB = 1 << 20


def small_disk(folder: str, too_large: int = 256 * MIB) -> None:
    """D1, N6: on a small file system that is full but for the volume."""
    path = f"{folder}/kv.cyc"
    try:
        Cache.open(path, CacheConfig(capacity=too_large))
    except NoSpaceError as error:
        refusal = (error.errno, str(error))
    else:
        raise AssertionError("a volume larger than its disk was created")
    assert refusal[0] == errno.ENOSPC
    assert path in refusal[1]
    assert "bytes" in refusal[1]
    assert not list(Path(folder).iterdir()), "something was left behind"

    cache = Cache.open(path, CacheConfig(capacity=32 * MIB))
    for file in Path(folder).iterdir():
        status = file.stat()
        assert status.st_blocks * 512 >= status.st_size, f"{file} is sparse"
    fill(f"{folder}/other")
    for number in range(100):
        key = key_of("d1", number)
        assert cache.put(key, blob(key, MIB)), "a full disk refused a put"
        view = cache.get(key)
        assert view is not None
        assert right(view, key, MIB)
        del view
    cache.sync()
    cache.close()
    with Cache.open(path) as cache:
        report = cache.verify()
        assert report.ok, report.first_fault


def no_fallocate(folder: str) -> None:
    path = f"{folder}/kv.cyc"
    try:
        cache = Cache.open(path, CacheConfig(capacity=16 * MIB))
    except CycloneError:
        assert not list(Path(folder).iterdir()), "something was left behind"
        return
    for file in Path(folder).iterdir():
        status = file.stat()
        assert status.st_blocks * 512 >= status.st_size, f"{file} is sparse, in silence"
    cache.close()


def no_mmap(folder: str) -> None:
    try:
        Cache.open(f"{folder}/kv.cyc", CacheConfig(capacity=16 * MIB))
    except VolumeError as error:
        text = str(error)
    else:
        raise AssertionError("opened without mappings")
    assert len(text) > 20, f"no sentence: {text}"
    left = list(Path(folder).iterdir())
    assert not left, f"left behind: {left}"


def second_of_four_fails(path: str, code: int) -> None:
    """B1: a store that failed is visible to nobody, now or later."""
    names = [key_of("b1", number) for number in range(4)]
    cache = Cache.open(path, CacheConfig(capacity=64 * MIB))
    os.environ["CKV_SHIM"] = f"write={code}:5"  # of the pieces of 1 MiB
    answers = cache.put_many([(key, blob(key, 3 * MIB)) for key in names])
    assert not answers[1], "a failed write was acknowledged"
    assert answers[0]
    assert cache.stats().volume.puts_io_failed == 1
    for key, answer in zip(names, answers, strict=True):
        if not answer:
            assert not cache.contains(key)
            assert cache.get(key) is None
    # An error of the medium takes the path out of use until it was verified.
    if cache.stats().volume.failed_paths:
        assert not any(cache.contains_many(names))
        assert cache.recover() == 1
    _right_or_absent(cache, names, answers)
    cache.close()
    with Cache.open(path) as cache:
        _right_or_absent(cache, names, answers)
        report = cache.verify()
        assert report.ok, report.first_fault


def _right_or_absent(cache: Cache, names: list[bytes], answers: list[bool]) -> None:
    for key, answer in zip(names, answers, strict=True):
        view = cache.get(key)
        assert (view is not None) == answer
        if view is not None:
            assert right(view, key, 3 * MIB)


def sync_fails(path: str) -> None:
    """N3: sync() that could not write says so, and the path is out of use."""
    key = key_of("sync")
    cache = Cache.open(path, CacheConfig(capacity=16 * MIB, sync_interval=None))
    assert cache.put(key, blob(key, 5000))
    os.environ["CKV_SHIM"] = f"fsync={errno.EIO}"
    try:
        cache.sync()
    except VolumeError:
        pass
    else:
        raise AssertionError("sync() reported what did not happen")
    assert cache.get(key) is None
    assert not cache.put(key_of("other"), b"x")
    assert cache.stats().volume.failed_paths == 1
    os.environ["CKV_SHIM"] = "none"
    assert cache.recover() == 1
    view = cache.get(key)
    assert view is not None
    assert right(view, key, 5000)


# ---- H: hostile names and files ----------------------------------------------------


def hostile_names(folder: str) -> None:
    """H6: links, foreign folders, FIFOs; and the modes of what is created."""
    old = os.umask(0)
    home = Path(folder, "home")
    home.mkdir(mode=0o700)
    target = Path(folder, "target")
    target.write_bytes(b"not a volume" * 1000)
    config = CacheConfig(capacity=16 * MIB)

    _refused(home / "link.cyc", target, config)
    _refused(home / "dangling.cyc", Path(folder, "nothing"), config)
    assert not Path(folder, "nothing").exists()
    path = home / "kv.cyc"
    Path(f"{path}-shm").symlink_to(target)
    with Cache.open(path, config) as cache:
        assert cache.put(b"k" * 32, b"v")
        for file in home.iterdir():
            if file.is_file() and not file.is_symlink():
                assert file.stat().st_mode & 0o777 == 0o600, file
    assert target.read_bytes() == b"not a volume" * 1000

    os.mkfifo(home / "fifo.cyc")
    _expect(home / "fifo.cyc", config, CycloneError)
    world = Path(folder, "world")
    world.mkdir(mode=0o777)
    _expect(world / "kv.cyc", config, PermissionError)
    assert not list(world.iterdir())
    os.umask(old)


def _refused(link: Path, target: Path, config: CacheConfig) -> None:
    link.symlink_to(target)
    _expect(link, config, CycloneError)
    assert link.is_symlink()
    link.unlink()


def _expect(path: Path, config: CacheConfig, kind: type[Exception]) -> str:
    for options in (config, config.replace(on_mismatch="recreate")):
        try:
            Cache.open(path, options).close()
        except kind as error:
            text = str(error)
        else:
            raise AssertionError(f"{path} was opened")
    return text


HEADER = struct.Struct("<QIII")  # magic, version, byte order, page size


def other_formats(folder: str) -> None:
    """H11: another version is refused with numbers, a foreign file is never touched."""
    path = Path(folder, "kv.cyc")
    config = CacheConfig(capacity=16 * MIB)
    with Cache.open(path, config) as cache:
        assert cache.put(b"k" * 32, b"v")
    original = path.read_bytes()
    magic, version, order, page = HEADER.unpack_from(original)
    for changed, words in (
        ((magic, version + 1, order, page), (str(version + 1), str(version))),
        ((magic, 0, order, page), ("0", str(version))),
        ((magic, version, 0x04030201, page), ("byte order",)),
        ((magic, version, order, 16384), ("16384", "4096")),
    ):
        content = bytearray(original)
        HEADER.pack_into(content, 0, *changed)
        HEADER.pack_into(content, 4096, *changed)
        path.write_bytes(content)
        try:
            Cache.open(path, config)
        except FormatError as error:
            text = str(error)
        else:
            raise AssertionError(f"{changed} was opened")
        assert all(word in text for word in words), text
        assert path.read_bytes() == content
    path.write_bytes(b"something else" * 9999)
    for options in (config, config.replace(on_mismatch="recreate")):
        try:
            Cache.open(path, options)
        except FormatError:
            pass
        else:
            raise AssertionError("a foreign file was opened")
    assert path.read_bytes() == b"something else" * 9999


def truncated_under_us(path: str, which: str) -> None:
    """N4: no content of a file, and no length, ends the process."""
    cache = Cache.open(path, CacheConfig(capacity=16 * MIB))
    names = [key_of("n4", number) for number in range(40)]
    for key in names:
        assert cache.put(key, blob(key, 200_000))
    os.truncate(
        path if which != "shm" else f"{path}-shm", 8192 if which == "table" else 0
    )
    buffer = bytearray(200_000)
    for key in names:
        cache.contains(key)
        length = cache.get_into(key, buffer)
        assert length is None or right(buffer[:length], key, 200_000)
        cache.put(key_of(key), b"x" * 9000)
        cache.remove(key)
    cache.get_many_into(names, [bytearray(200_000) for _ in names])
    cache.stats()
    cache.events()
    list(cache.ls())
    for care in (cache.verify, cache.sync, cache.clear, cache.recover):
        with contextlib.suppress(CycloneError):
            care()
    cache.close()


# ---- N7 ----------------------------------------------------------------------------


class _Filter(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter)))


# What the interpreter may do between two calls of ours: memory, the end, a raised flag.
_ALLOWED_X86 = "1 9 10 11 12 13 14 15 25 28 60 231"  # write, mmap ... exit_group
_ALLOWED_ARM = "64 93 94 134 135 139 214 215 216 222 226 233"


def _refuse_system_calls() -> None:
    """From here on any other system call of this thread ends the process (SIGSYS)."""
    names = _ALLOWED_X86 if os.uname().machine == "x86_64" else _ALLOWED_ARM
    allowed = [int(number) for number in names.split()]
    code = [_Filter(0x20, 0, 0, 0)]
    for at, number in enumerate(allowed):
        code.append(_Filter(0x15, len(allowed) - at, 0, number))
    code.append(_Filter(0x06, 0, 0, 0x80000000))
    code.append(_Filter(0x06, 0, 0, 0x7FFF0000))
    array = (_Filter * len(code))(*code)
    program = _Program(len(code), array)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()


def warm_lookups(path: str) -> None:
    """N7: a process in which every other system call is deadly."""

    def run() -> None:
        cache = Cache.open(path, CacheConfig(capacity=64 * MIB))
        names = [key_of("n7", number) for number in range(200)]
        for key in names:
            assert cache.put(key, blob(key, 100_000))
        joined = b"".join(names)
        for _ in range(2):
            for key in names:
                view = cache.get(key)
                assert view is not None
                assert view[0] == blob(key, 8)[0]
                del view
        absent = [key_of("absent", number) for number in range(50)]
        _refuse_system_calls()
        for _ in range(3):
            for key in names:
                view = cache.get(key)
                del view
                cache.contains(key)
            for key in absent:
                cache.contains(key)
                cache.get(key)
            cache.contains_many(joined)
            cache.longest_prefix(names, touch=True)
        os._exit(0)

    status = fork(run).wait()
    assert status == 0, f"a warm lookup made a system call (status {status})"


def filter_works() -> None:
    def run() -> None:
        _refuse_system_calls()
        os.getppid()
        os._exit(0)

    assert fork(run).wait() == -31  # SIGSYS
