# SPDX-License-Identifier: Apache-2.0
"""Caches for the tests of the package; each ends with a full check of its volume."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cyclone_kv import Cache, CacheConfig

CAPACITY = 64 << 20

OpenCache = Callable[..., Cache]


def key_of(number: int) -> bytes:
    """A 32-byte key: as it is given to the engine by inference servers."""
    return number.to_bytes(8, "little") * 4


@pytest.fixture
def open_cache(volume_path: Path) -> Iterator[OpenCache]:
    """Opens `volume_path`; at the end everything is closed and the volume verified."""
    opened: list[Cache] = []

    def open_one(config: CacheConfig | None = None, **options: Any) -> Cache:
        if config is None:
            config = CacheConfig(capacity=CAPACITY)
        opened.append(Cache.open(volume_path, config, **options))
        return opened[-1]

    yield open_one
    for cache in opened:
        cache.close()
    gc.collect()
    if volume_path.exists():
        with Cache.open(volume_path) as cache:
            report = cache.verify()
            assert report.ok, report.first_fault
            assert cache.stats().volume.pinned_entries == 0


@pytest.fixture
def cache(open_cache: OpenCache) -> Cache:
    return open_cache()
