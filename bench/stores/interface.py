# SPDX-License-Identifier: Apache-2.0
"""What a bench does to a store, and what stores have in common."""
# ruff: noqa: D102  (what the methods do is said once, in Store)

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Protocol

__all__ = ["BATCH_THREADS", "Folder", "Pooled", "Store", "StoreError"]

BATCH_THREADS = 4
"""Threads of a batch call: of ours, and of the pool that the others get."""


class StoreError(Exception):
    """A store refused, or did other than it should: the run ends, it is no result."""


class Store(Protocol):
    """A store of blocks of one size, in a folder of its own.

    It is used as a careful user would use it, without tricks that the others could not
    play too, and is opened and closed between phases. Methods may be called from
    several threads at once, except ``open``, ``close`` and ``destroy``.
    """

    name: ClassVar[str]
    """For records: "cyclone_kv", "lmdb", "rocksdb", "files", "vllm_fs", ..."""
    label: ClassVar[str]
    """For readers, with what it really is."""
    processes: ClassVar[bool]
    """Whether several processes may have it open at once, to read."""

    def __init__(self, folder: Path, count: int, nbytes: int) -> None:
        """``folder``: parent; room is made for ``count`` blocks of ``nbytes``."""

    @classmethod
    def version(cls) -> str:
        """Return the version of the rival; ImportError with a reason if it is not here."""

    def open(self) -> None:
        """Open, and create when there is nothing."""

    def open_reader(self) -> None:
        """Open in one of several processes, to read."""

    def close(self) -> None:
        """Close, so that no mapping holds pages; harmless when not open."""

    def destroy(self) -> None:
        """Remove every file."""

    def put(self, key: bytes, value: memoryview) -> None:
        """Store a block; StoreError when it is refused."""

    def sync(self) -> None:
        """Make all puts durable, as far as this store has a call of its own."""

    def contains(self, key: bytes) -> bool:
        """Whether it is there."""

    def remove(self, key: bytes) -> None:
        """Forget a block."""

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        """Copy a block; return its length, None for a miss."""

    def get_many_into(
        self, keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> bool:
        """Copy many blocks; return whether all were there."""

    def view(self, key: bytes) -> int | None:
        """Take a view without a copy, look at its length, give it back.

        A store that cannot do without a copy makes one.
        """

    def view_touch(self, key: bytes) -> int | None:
        """The same, and read a byte of each 4096; return how many bytes that were."""

    def files(self) -> list[Path]:
        """Return every file of the store."""


class Folder:
    """A store in a folder of its own."""

    name: ClassVar[str] = ""
    label: ClassVar[str] = ""
    processes: ClassVar[bool] = True

    def __init__(self, folder: Path, count: int, nbytes: int) -> None:
        self.folder = folder / self.name
        self.count = count
        self.nbytes = nbytes

    def open(self) -> None:
        raise NotImplementedError

    def open_reader(self) -> None:
        self.open()

    def destroy(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def sync(self) -> None:
        """Leave it to the syncfs that follows."""


class Pooled(Folder):
    """get_many_into for stores that have none: a pool of threads."""

    _pool: ThreadPoolExecutor | None = None

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        raise NotImplementedError

    def get_many_into(
        self, keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> bool:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(BATCH_THREADS)
        return None not in list(self._pool.map(self.get_into, keys, targets))

    def _stop_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
