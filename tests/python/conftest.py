# SPDX-License-Identifier: Apache-2.0
"""Caches for the tests of the package; each ends with a full check of its volume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.caches import CAPACITY, Caches, OpenCache, key_of

from cyclone_kv import Cache

__all__ = ["CAPACITY", "OpenCache", "key_of"]


@pytest.fixture
def open_cache(volume_path: Path) -> Iterator[OpenCache]:
    """Opens `volume_path`; at the end everything is closed and the volume verified."""
    caches = Caches(volume_path)
    yield caches.open
    caches.close()
    caches.verify()


@pytest.fixture
def cache(open_cache: OpenCache) -> Cache:
    return open_cache()
