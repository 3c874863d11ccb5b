# SPDX-License-Identifier: Apache-2.0
"""The contenders, behind one interface.

``RIVALS`` lists them; those that cannot be imported here are left out of a run and
named with the reason (``available``).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from bench.stores.interface import BATCH_THREADS, Store, StoreError, UnavailableError

__all__ = [
    "BATCH_THREADS",
    "OURS",
    "RIVALS",
    "Store",
    "StoreError",
    "UnavailableError",
    "available",
    "store_type",
]

OURS = "cyclone_kv"

_MODULES = {
    OURS: ("bench.stores.cyclone", "CycloneStore"),
    "lmdb": ("bench.stores.lmdb", "LmdbStore"),
    "rocksdb": ("bench.stores.rocksdb", "RocksdbStore"),
    "files": ("bench.stores.files", "FileStore"),
    "vllm_fs": ("bench.stores.vllm_fs", "VllmFsStore"),
    "lmcache_disk": ("bench.stores.lmcache_disk", "LmcacheDiskStore"),
}

RIVALS = tuple(name for name in _MODULES if name != OURS)
"""Names of the stores that ours is measured against."""


def store_type(name: str) -> type[Store]:
    """Return the class of a store; ``UnavailableError`` with the reason."""
    module, attribute = _MODULES[name]
    try:
        kind: type[Store] = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise UnavailableError(f"not importable here: {error}") from error
    kind.version()
    return kind


def available(
    names: Iterable[str] = _MODULES,
) -> tuple[list[type[Store]], dict[str, str]]:
    """Return the stores that can be used, and for each other one why it cannot."""
    found, missing = [], {}
    for name in names:
        try:
            found.append(store_type(name))
        except UnavailableError as error:
            missing[name] = str(error)
    return found, missing
