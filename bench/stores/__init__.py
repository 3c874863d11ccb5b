# SPDX-License-Identifier: Apache-2.0
"""The contenders, behind one interface."""

from __future__ import annotations

from bench.stores.interface import BATCH_THREADS, Store, StoreError
from bench.stores.old import CycloneStore, FileStore, LmdbStore

__all__ = [
    "BATCH_THREADS",
    "CycloneStore",
    "FileStore",
    "LmdbStore",
    "Store",
    "StoreError",
]
