# SPDX-License-Identifier: Apache-2.0
"""The engine itself, with the preset that it recommends and nothing else."""
# ruff: noqa: D102  (what the methods do is said once, in Store)

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from bench.stores.interface import PAGE_BYTES, Folder, StoreError
from cyclone_kv import Cache, CacheConfig, __version__

__all__ = ["CycloneStore"]

_MIB = 1 << 20


class CycloneStore(Folder):
    """``CacheConfig.for_kv_tier()`` and a capacity."""

    name: ClassVar[str] = "cyclone_kv"
    label: ClassVar[str] = "cyclone_kv"
    capacity: int | None = None
    """Of the volume; None makes room for the blocks."""
    _cache: Cache | None = None

    @classmethod
    def version(cls) -> str:
        return __version__

    @property
    def cache(self) -> Cache:
        """The open cache."""
        if self._cache is None:
            raise StoreError("the store is not open")
        return self._cache

    @property
    def path(self) -> Path:
        """Of the volume."""
        return self.folder / "kv.cyc"

    def _capacity(self) -> int:
        if self.capacity is not None:
            return self.capacity
        # Room for the blocks, a page more each, and for stripes to be uneven.
        block = (-(-self.nbytes // PAGE_BYTES) + 1) * PAGE_BYTES
        capacity = max(64 * _MIB, -(-self.count * block * 5 // 4 // _MIB) * _MIB)
        return capacity + 4 * -(-self.nbytes // _MIB) * _MIB

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = CacheConfig.for_kv_tier(capacity=self._capacity())
        self._cache = Cache.open(self.path, config)

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def put(self, key: bytes, value: memoryview) -> None:
        if not self.cache.put(key, value):
            raise StoreError(f"a put was refused: {self.cache.stats()}")

    def sync(self) -> None:
        self.cache.sync()

    def contains(self, key: bytes) -> bool:
        return self.cache.contains(key)

    def remove(self, key: bytes) -> None:
        self.cache.remove(key)

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        return self.cache.get_into(key, target)

    def get_many_into(
        self, keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> bool:
        return all(self.cache.get_many_into(keys, targets))

    def view(self, key: bytes) -> int | None:
        view = self.cache.get(key)
        return None if view is None else view.nbytes

    def view_touch(self, key: bytes) -> bytes | None:
        view = self.cache.get(key)
        return None if view is None else view[::PAGE_BYTES].tobytes()
