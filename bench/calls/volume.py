# SPDX-License-Identifier: Apache-2.0
"""The volume that the calls are measured on, and the keys that are asked for."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import generators
from cyclone_kv import Cache, CacheConfig

__all__ = [
    "BLOCK_BYTES",
    "ENTRIES",
    "absent_keys",
    "asked",
    "make",
    "make_events",
    "open_cache",
]

BLOCK_BYTES = 4096
ENTRIES = 500_000
"""Blocks that are stored: of a page each, so that so many fit into memory."""

_MIB = 1 << 20
_BATCH = 4096
_SHM = Path("/dev/shm")


def open_cache(path: Path) -> Cache:
    """Open the volume; nothing is synced meanwhile."""
    return Cache.open(path, CacheConfig(sync_interval=None))


def asked(entries: int, count: int) -> list[bytes]:
    """Return the keys of ``count`` stored blocks, in random order."""
    choice = random.Random(entries)
    return [generators.key(choice.randrange(entries)) for _ in range(count)]


def absent_keys(entries: int, count: int) -> list[bytes]:
    """Return keys of blocks that are not stored."""
    return [generators.key(entries + number) for number in range(count)]


def make_events(cache: Cache) -> int:
    """Make 64 events or more, by overwriting a block; return the number of the last."""
    name = generators.key(0)
    for _ in range(64):
        if not cache.put(name, name * (BLOCK_BYTES // len(name)), overwrite=True):
            raise RuntimeError(f"a put was refused: {cache.stats().process}")
    last = 0
    while (found := cache.events(last)).items:
        last = found.last
    return last


@contextmanager
def make(folder: Path | None, entries: int) -> Iterator[Path]:
    """Make a volume with so many blocks, on tmpfs unless a folder is given."""
    capacity = max(64 * _MIB, -(-entries * BLOCK_BYTES * 9 // 8 // _MIB) * _MIB)
    parent = folder
    if parent is None:
        roomy = _SHM.is_dir() and shutil.disk_usage(_SHM).free > 2 * capacity
        parent = _SHM if roomy else Path(tempfile.gettempdir())
    own = Path(tempfile.mkdtemp(prefix="calls-", dir=parent))
    try:
        path = own / "kv.cyc"
        config = CacheConfig(
            capacity=capacity,
            expected_object_size=BLOCK_BYTES,
            write_behind=False,
            sync_interval=None,
        )
        with Cache.open(path, config) as cache:
            for first in range(0, entries, _BATCH):
                names = range(first, min(first + _BATCH, entries))
                keys = [generators.key(name) for name in names]
                items = [(key, key * (BLOCK_BYTES // len(key))) for key in keys]
                if not all(cache.put_many(items)):
                    raise RuntimeError(f"a put was refused: {cache.stats().process}")
            if len(cache) != entries:
                raise RuntimeError(f"{len(cache)} of {entries} blocks are there")
        yield path
    finally:
        shutil.rmtree(own, ignore_errors=True)
