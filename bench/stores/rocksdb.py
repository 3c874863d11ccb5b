# SPDX-License-Identifier: Apache-2.0
"""RocksDB with blob files: values apart from keys, uncompressed, log on, not synced."""
# ruff: noqa: D102  (what the methods do is said once, in Store)

from __future__ import annotations

from importlib import metadata
from typing import ClassVar

import numpy as np
import rocksdict

from bench.stores.interface import PAGE_BYTES, Pooled, StoreError

__all__ = ["RocksdbStore"]

_MIB = 1 << 20


class RocksdbStore(Pooled):
    """``get`` returns a copy, so that a view costs one and a copy two.

    A put takes ``bytes``, which costs a copy of the value too. ``sync`` writes the
    memtable out.
    """

    name: ClassVar[str] = "rocksdb"
    label: ClassVar[str] = "RocksDB, blob files"
    _database: rocksdict.Rdict | None = None

    @classmethod
    def version(cls) -> str:
        return f"rocksdict {metadata.version('rocksdict')}"

    @property
    def database(self) -> rocksdict.Rdict:
        """The open database."""
        if self._database is None:
            raise StoreError("the store is not open")
        return self._database

    def _options(self) -> rocksdict.Options:
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(1024)
        options.set_blob_file_size(256 * _MIB)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_blob_compression_type(rocksdict.DBCompressionType.none())
        options.set_write_buffer_size(max(64 * _MIB, 2 * self.nbytes))
        return options

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._database = rocksdict.Rdict(str(self.folder), self._options())

    def open_reader(self) -> None:
        self._database = rocksdict.Rdict(
            str(self.folder),
            self._options(),
            access_type=rocksdict.AccessType.read_only(),
        )

    def close(self) -> None:
        super().close()
        if self._database is not None:
            self._database.close()
            self._database = None

    def put(self, key: bytes, value: memoryview) -> None:
        self.database.put(key, bytes(value))

    def sync(self) -> None:
        self.database.flush(True)

    def contains(self, key: bytes) -> bool:
        return key in self.database

    def remove(self, key: bytes) -> None:
        self.database.delete(key)

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        found = self.database.get(key)
        if found is None:
            return None
        np.copyto(
            np.frombuffer(target, dtype=np.uint8)[: len(found)],
            np.frombuffer(found, dtype=np.uint8),
        )
        return len(found)

    def view(self, key: bytes) -> int | None:
        found = self.database.get(key)
        return None if found is None else len(found)

    def view_touch(self, key: bytes) -> bytes | None:
        found = self.database.get(key)
        return None if found is None else found[::PAGE_BYTES]
