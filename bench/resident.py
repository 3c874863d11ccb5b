# SPDX-License-Identifier: Apache-2.0
"""The limit of a warm copy: plain memcpy of the same resident, mapped pages."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from bench.stores.interface import Store

__all__ = ["ResidentCopies"]


class ResidentCopies:
    """Holds a view of each block of our store, its pages present in this process.

    ``get_into`` finds the address in a dict and copies by the C library, without the
    GIL; it does nothing else, so it is what a copy costs at least from Python.
    """

    def __init__(self, store: Store, keys: Sequence[bytes]) -> None:
        cache: Any = getattr(store, "cache")  # noqa: B009  (only ours has one)
        self._views = [cache.get(key) for key in keys]
        arrays = [np.frombuffer(view, dtype=np.uint8) for view in self._views]
        for array in arrays:
            int(array[::4096].sum())
        self._places = {
            key: (int(array.ctypes.data), array.nbytes)
            for key, array in zip(keys, arrays, strict=True)
        }
        self._targets: dict[int, int] = {}

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        """Copy a block into a buffer that stays alive as long as this object."""
        address = self._targets.get(id(target))
        if address is None:
            array = np.frombuffer(target, dtype=np.uint8)
            address = self._targets[id(target)] = int(array.ctypes.data)
        source, nbytes = self._places[key]
        ctypes.memmove(address, source, nbytes)
        return nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._places.clear()
        self._views.clear()
