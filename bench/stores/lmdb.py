# SPDX-License-Identifier: Apache-2.0
"""LMDB: a transaction a block; nothing is synced but by ``sync``."""
# ruff: noqa: D102  (what the methods do is said once, in Store)

from __future__ import annotations

from typing import ClassVar

import lmdb
import numpy as np

from bench.stores.interface import PAGE_BYTES, Pooled, StoreError

__all__ = ["LmdbStore"]

_MIB = 1 << 20


class LmdbStore(Pooled):
    """The default readahead stays on, and ``writemap`` off: the safe defaults."""

    name: ClassVar[str] = "lmdb"
    label: ClassVar[str] = "LMDB"
    writemap: bool = False
    _env: lmdb.Environment | None = None

    @classmethod
    def version(cls) -> str:
        return ".".join(map(str, lmdb.version())) + f" (py-lmdb {lmdb.__version__})"

    @property
    def env(self) -> lmdb.Environment:
        """The open environment."""
        if self._env is None:
            raise StoreError("the store is not open")
        return self._env

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
        super().close()
        if self._env is not None:
            self._env.close()
            self._env = None

    def put(self, key: bytes, value: memoryview) -> None:
        with self.env.begin(write=True) as transaction:
            if not transaction.put(key, value):
                raise StoreError("a put was refused")

    def sync(self) -> None:
        self.env.sync(True)

    def contains(self, key: bytes) -> bool:
        # A cursor: get would touch every page of the value.
        with self.env.begin() as transaction, transaction.cursor() as cursor:
            return bool(cursor.set_key(key))

    def remove(self, key: bytes) -> None:
        with self.env.begin(write=True) as transaction:
            transaction.delete(key)

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        with self.env.begin(buffers=True) as transaction:
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
        with self.env.begin(buffers=True) as transaction:
            found = transaction.get(key)
            return None if found is None else len(found)

    def view_touch(self, key: bytes) -> bytes | None:
        with self.env.begin(buffers=True) as transaction:
            found = transaction.get(key)
            return None if found is None else found[::PAGE_BYTES].tobytes()
