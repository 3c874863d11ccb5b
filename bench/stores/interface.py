# SPDX-License-Identifier: Apache-2.0
"""What a bench does to a store, and what stores have in common."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Protocol

__all__ = [
    "BATCH_THREADS",
    "PAGE_BYTES",
    "Folder",
    "Pooled",
    "Store",
    "StoreError",
    "UnavailableError",
]

BATCH_THREADS = 4
"""Threads of a batch call: of ours, and of the pool that the others get."""

PAGE_BYTES = 4096
"""A view that is looked at has one byte of each so many read."""


class StoreError(Exception):
    """A store refused, or did other than it should: the run ends, it is no result."""


class UnavailableError(Exception):
    """A store cannot be used on this machine; the message says why, for the reader."""


class Store(Protocol):
    """A store of blocks of one size, in a folder of its own.

    It is used as a careful user would use it, without tricks that the others could not
    play too, and is opened and closed between phases. Methods may be called from
    several threads at once, except ``open``, ``close`` and ``destroy``. A store that is
    not open has no file mapped.
    """

    name: ClassVar[str]
    """For records: "cyclone_kv", "lmdb", "rocksdb", "files", "vllm_fs", ..."""
    label: ClassVar[str]
    """For readers, with what it really is."""
    processes: ClassVar[bool]
    """Whether several processes may have it open at once, to read."""
    restarts: ClassVar[bool]
    """Whether it still has its blocks when it was closed and opened again."""
    target_alignment: ClassVar[int]
    """What the address of a target must be a multiple of; 1 where any will do."""
    folder: Path

    def __init__(self, folder: Path, count: int, nbytes: int) -> None:
        """``folder``: parent; room is made for ``count`` blocks of ``nbytes``."""

    @classmethod
    def version(cls) -> str:
        """Return the version of the rival; UnavailableError where there is none."""

    def open(self) -> None:
        """Open, and create when there is nothing."""

    def open_reader(self) -> None:
        """Open in one of several processes, to read."""

    def close(self) -> None:
        """Close, so that no mapping holds pages; harmless when not open."""

    def destroy(self) -> None:
        """Close, and remove every file."""

    def put(self, key: bytes, value: memoryview) -> None:
        """Store a block; StoreError when it is refused."""

    def sync(self) -> None:
        """Make all puts durable, as far as this store has a call of its own."""

    def contains(self, key: bytes) -> bool:
        """Return whether it is there."""

    def remove(self, key: bytes) -> None:
        """Forget a block; harmless when there is none."""

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        """Copy a block; return its length, None for a miss."""

    def get_many_into(
        self, keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> bool:
        """Copy many blocks, in one call; return whether all were there."""

    def view(self, key: bytes) -> int | None:
        """Take a view without a copy, give it back; return its length, None for a miss.

        A store that cannot do without a copy makes one.
        """

    def view_touch(self, key: bytes) -> bytes | None:
        """Take a view and read a byte of each 4096; return them, None for a miss."""

    def files(self) -> list[Path]:
        """Return every file of the store."""


class Folder:
    """A store in a folder of its own."""

    name: ClassVar[str] = ""
    label: ClassVar[str] = ""
    processes: ClassVar[bool] = True
    restarts: ClassVar[bool] = True
    target_alignment: ClassVar[int] = 1

    def __init__(self, folder: Path, count: int, nbytes: int) -> None:
        self.folder = folder / self.name
        self.count = count
        self.nbytes = nbytes

    @classmethod
    def version(cls) -> str:
        """Return nothing: there is no version of a layout."""
        return ""

    def open(self) -> None:
        """Open, and create when there is nothing."""
        raise NotImplementedError

    def open_reader(self) -> None:
        """Open in one of several processes, to read."""
        self.open()

    def close(self) -> None:
        """Close; harmless when not open."""

    def sync(self) -> None:
        """Leave it to the syncfs that follows."""

    def destroy(self) -> None:
        """Close, and remove every file."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def files(self) -> list[Path]:
        """Return every file of the store."""
        return [path for path in self.folder.rglob("*") if path.is_file()]


class Pooled(Folder):
    """get_many_into for stores that have none: a pool of threads."""

    threads: ClassVar[int] = BATCH_THREADS
    _pool: ThreadPoolExecutor | None = None

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        """Copy a block; return its length, None for a miss."""
        raise NotImplementedError

    def get_many_into(
        self, keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> bool:
        """Copy many blocks by the pool, an equal share for each thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads)
        shares = min(self.threads, len(keys))

        def copy(share: int) -> bool:
            pairs = zip(keys[share::shares], targets[share::shares], strict=True)
            return all([self.get_into(*pair) is not None for pair in pairs])

        return all(list(self._pool.map(copy, range(shares))))

    def close(self) -> None:
        """Stop the pool."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
