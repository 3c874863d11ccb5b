# SPDX-License-Identifier: Apache-2.0
"""The three contenders behind one interface: this engine, LMDB, a file per block.

Each is used as a careful user would use it, in one process, without tricks that the
others could not play too. A store lives in a folder of its own, holds ``count`` blocks
of ``nbytes`` bytes, and is opened and closed between phases.
"""
# ruff: noqa: D102  (what the methods do is said once, in Store)

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import lmdb
import numpy as np

from cyclone_kv import Cache, CacheConfig

__all__ = ["BATCH_THREADS", "CycloneStore", "FileStore", "LmdbStore", "Store"]

BATCH_THREADS = 4
"""Threads of a batch call: of ours, and of the pool that the others get."""

_MIB = 1 << 20


class Store(Protocol):
    """What the phases do to a store."""

    name: str

    def __init__(self, folder: Path, count: int, nbytes: int) -> None: ...
    def open(self) -> None:
        """Open, and create when there is nothing."""

    def close(self) -> None:
        """Close, so that no mapping holds pages."""

    def destroy(self) -> None:
        """Remove every file."""

    def put(self, key: bytes, value: memoryview) -> None:
        """Store a block; raise when it is refused."""

    def sync(self) -> None:
        """Make all puts durable, as far as this store has a call of its own."""

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        """Copy a block; return its length, None for a miss."""

    def get_many_into(
        self, keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> bool:
        """Copy many blocks; return whether all were there."""

    def view(self, key: bytes) -> int | None:
        """Take a view without a copy, look at its length, give it back."""

    def files(self) -> list[Path]:
        """Return every file of the store."""


class _Folder:
    name = ""

    def __init__(self, folder: Path, count: int, nbytes: int) -> None:
        self.folder = folder / self.name
        self.count = count
        self.nbytes = nbytes

    def destroy(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]


class CycloneStore(_Folder):
    """The engine, with ``CacheConfig.for_kv_tier()`` and a capacity."""

    name = "cyclone_kv"
    _cache: Cache

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Room for the blocks, a page more each, and for stripes to be uneven.
        block = (-(-self.nbytes // 4096) + 1) * 4096
        capacity = max(64 * _MIB, -(-self.count * block * 5 // 4 // _MIB) * _MIB)
        capacity += 4 * -(-self.nbytes // _MIB) * _MIB
        path = self.folder / "kv.cyc"
        config = CacheConfig.for_kv_tier(capacity=capacity)
        self._cache = Cache.open(path, config)

    def close(self) -> None:
        self._cache.close()

    def put(self, key: bytes, value: memoryview) -> None:
        if not self._cache.put(key, value):
            raise RuntimeError(f"a put was refused: {self._cache.stats()}")

    def sync(self) -> None:
        self._cache.sync()

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        return self._cache.get_into(key, target)

    def get_many_into(
        self, keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> bool:
        return all(self._cache.get_many_into(keys, targets))

    def view(self, key: bytes) -> int | None:
        view = self._cache.get(key)
        return None if view is None else view.nbytes


class _Pooled(_Folder):
    """get_many_into for stores that have none: a pool of threads."""

    _pool: ThreadPoolExecutor | None = None

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        raise NotImplementedError

    def get_many_into(
        self, keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> bool:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(BATCH_THREADS)
        found = self._pool.map(self.get_into, keys, targets)
        return None not in list(found)

    def _stop_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class LmdbStore(_Pooled):
    """LMDB: a transaction a block; nothing is synced but by ``sync``.

    The default readahead stays on. ``writemap`` is off, the safe default; the command
    can turn it on.
    """

    name = "lmdb"
    writemap = False
    _env: lmdb.Environment

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        data = self.count * (self.nbytes + 8192)
        self._env = lmdb.open(
            str(self.folder),
            map_size=max(64 * _MIB, data * 3 // 2),
            sync=False,
            metasync=False,
            writemap=self.writemap,
            max_readers=64,
        )

    def close(self) -> None:
        self._stop_pool()
        self._env.close()

    def put(self, key: bytes, value: memoryview) -> None:
        with self._env.begin(write=True) as transaction:
            if not transaction.put(key, value):
                raise RuntimeError("a put was refused")

    def sync(self) -> None:
        self._env.sync(True)

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        with self._env.begin(buffers=True) as transaction:
            found = transaction.get(key)
            if found is None:
                return None
            # numpy copies without the GIL, a slice assignment would hold it.
            np.copyto(
                np.frombuffer(target, dtype=np.uint8)[: len(found)],
                np.frombuffer(found, dtype=np.uint8),
            )
            return len(found)

    def view(self, key: bytes) -> int | None:
        with self._env.begin(buffers=True) as transaction:
            found = transaction.get(key)
            return None if found is None else len(found)


class FileStore(_Pooled):
    """A file per block, in 256 folders, as engines with a file backend do it.

    A block is written under a temporary name and renamed.
    """

    name = "files"

    def open(self) -> None:
        for number in range(256):
            (self.folder / f"{number:02x}").mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        self._stop_pool()

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.folder}/{name[:2]}/{name}"

    def put(self, key: bytes, value: memoryview) -> None:
        path = self._path(key)
        with open(path + ".part", "wb", buffering=0) as file:
            if file.write(value) != len(value):
                raise RuntimeError("a short write")
        os.rename(path + ".part", path)

    def sync(self) -> None:
        """Leave it to the syncfs that follows."""

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                return file.readinto(target)
        except FileNotFoundError:
            return None

    def view(self, key: bytes) -> int | None:
        try:
            with (
                open(self._path(key), "rb", buffering=0) as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
            ):
                return len(mapping)
        except FileNotFoundError:
            return None
