# SPDX-License-Identifier: Apache-2.0
"""Volumes for tests of size: as many blocks as wanted, almost no room for their data.

A volume reserves its space, so ten million blocks of a page would take 41 GB. Here the
volume is created in a process whose ``fallocate`` makes the file longer and reserves
nothing, and whose ``fstatfs`` says that there is room. All blocks are zeros: what was
stored is punched out again, and reads as before. Table, index and shared region are as
large as in a volume in use.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cyclone_kv import Cache, CacheConfig

__all__ = ["BLOCK_BYTES", "Unavailable", "create", "fill", "keys", "needed_bytes"]

BLOCK_BYTES = 4096
"""Of the blocks that ``fill`` stores."""

_MIB = 1 << 20
_BATCH = 4096
_TABLE_AND_REGION_BYTES = 320  # of an entry, rounded up; for a look at the room only
_FALLOC_FL_KEEP_SIZE_PUNCH_HOLE = 3
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/vfs.h>
#include <unistd.h>

int fallocate(int fd, int mode, off_t offset, off_t length);

int fallocate(int fd, int mode, off_t offset, off_t length) {
    char name[64], path[4096];
    snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(name, path, sizeof(path));
    if (n > 4 && memcmp(path + n - 4, "-shm", 4) == 0) {
        return ((int (*)(int, int, off_t, off_t))dlsym(RTLD_NEXT, "fallocate"))(
            fd, mode, offset, length);
    }
    struct stat info;
    if (fstat(fd, &info) != 0) return -1;
    return info.st_size >= offset + length ? 0 : ftruncate(fd, offset + length);
}

int fstatfs(int fd, struct statfs *info) {
    const int result = ((int (*)(int, struct statfs *))dlsym(RTLD_NEXT, "fstatfs"))(
        fd, info);
    if (result == 0) info->f_bavail = info->f_bfree = info->f_blocks = 1L << 40;
    return result;
}
"""
_CREATE = """
import sys
from cyclone_kv import Cache, CacheConfig
path, capacity, object_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = CacheConfig(capacity=capacity, expected_object_size=object_size,
                     allow_sparse=True)
Cache.open(path, config).close()
"""


class Unavailable(RuntimeError):
    """Such a volume cannot be made here; the text says why."""


def needed_bytes(count: int) -> int:
    """Return about how many bytes of the file system ``count`` blocks take."""
    return count * _TABLE_AND_REGION_BYTES + 64 * _MIB


def _compile(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        raise Unavailable("a sparse volume needs Linux and a C compiler")
    source, library = folder / "sparse.c", folder / "sparse.so"
    source.write_text(_SOURCE)
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"the C compiler failed: {done.stderr.strip()[-300:]}")
    return library


def create(path: Path, *, capacity: int, object_size: int) -> None:
    """Create a volume that reserves nothing; open it with ``allow_sparse=True``."""
    with tempfile.TemporaryDirectory(prefix="ckv-sparse-") as folder:
        library = _compile(Path(folder))
        done = subprocess.run(
            [sys.executable, "-c", _CREATE, path, str(capacity), str(object_size)],
            env=os.environ | {"LD_PRELOAD": str(library)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise Unavailable(f"no sparse volume: {done.stderr.strip()[-300:]}")


def keys(count: int, first: int = 0) -> Iterator[bytes]:
    """Yield the keys of ``count`` blocks: 32 bytes, well spread, always the same."""
    for number in range(first, first + count):
        low = (number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        yield low.to_bytes(8, "little") + number.to_bytes(24, "little")


def fill(path: Path, count: int) -> Cache:
    """Store ``count`` blocks of zeros in a new volume at ``path``; return it open.

    Needs room for ``needed_bytes(count)``; raises ``Unavailable``.
    """
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes(count):
        raise Unavailable(
            f"{count} entries take {needed_bytes(count) >> 20} MiB; "
            f"{path.parent} has {free >> 20} free"
        )
    capacity = max(16 * _MIB, -(-count * BLOCK_BYTES * 5 // 4 // _MIB) * _MIB)
    create(path, capacity=capacity, object_size=BLOCK_BYTES)
    config = CacheConfig(allow_sparse=True, write_behind=False, sync_interval=None)
    cache = Cache.open(path, config)
    zeros = bytes(BLOCK_BYTES)
    punch = _Punch(path, cache)
    for first in range(0, count, _BATCH):
        names = keys(min(_BATCH, count - first), first)
        if not all(cache.put_many([(key, zeros) for key in names])):
            raise RuntimeError(f"a put was refused: {cache.stats().process}")
        punch()
    if len(cache) != count:
        raise RuntimeError(f"{count} blocks were stored, {len(cache)} are there")
    return cache


class _Punch:
    """Gives back the pages of the data area."""

    def __init__(self, path: Path, cache: Cache) -> None:
        self._path = path
        place = cache.info().paths[0]
        self._offset, self._length = place.data_offset, place.data_bytes
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            failed = self._libc.fallocate(
                descriptor,
                _FALLOC_FL_KEEP_SIZE_PUNCH_HOLE,
                ctypes.c_int64(self._offset),
                ctypes.c_int64(self._length),
            )
        finally:
            os.close(descriptor)
        if failed:
            raise Unavailable(f"no holes here: {os.strerror(ctypes.get_errno())}")
