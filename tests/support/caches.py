# SPDX-License-Identifier: Apache-2.0
"""Caches of one test over one volume: opened, closed, and the volume checked."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyclone_kv import Cache, CacheConfig

__all__ = ["CAPACITY", "Caches", "OpenCache", "key_of"]

CAPACITY = 64 << 20

OpenCache = Callable[..., Cache]


def key_of(number: int) -> bytes:
    """A 32-byte key: as it is given to the engine by inference servers."""
    return number.to_bytes(8, "little") * 4


class Caches:
    """What a fixture hands out: ``open``; and what it does at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: list[Cache] = []

    def open(self, config: CacheConfig | None = None, **options: Any) -> Cache:
        """Open the volume, of 64 MiB where nothing else is said."""
        if config is None:
            config = CacheConfig(capacity=CAPACITY)
        self._opened.append(Cache.open(self.path, config, **options))
        return self._opened[-1]

    def close(self) -> None:
        """Close what is open."""
        for cache in self._opened:
            cache.close()
        gc.collect()

    def verify(self) -> None:
        """Read the volume from end to end; nothing of it may be pinned any more."""
        if self.path.exists():
            with Cache.open(self.path) as cache:
                report = cache.verify()
                assert report.ok, report.first_fault
                assert cache.stats().volume.pinned_entries == 0
