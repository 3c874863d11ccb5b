# SPDX-License-Identifier: Apache-2.0
"""The blocks of one size, and the buffers that they are copied to."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import generators
from bench.stores.interface import PAGE_BYTES
from cyclone_kv import _core

__all__ = ["BATCH", "CHECK_EVERY", "ZIPF_DRAWS", "Dataset", "buffers"]

BATCH = 64
"""Blocks of a batch, where they fit ``_BATCH_BYTES_MAX``."""
CHECK_EVERY = 64
"""Of so many reads the bytes of one are checked."""
ZIPF_DRAWS = 1 << 14
"""Requests of a warm reader that are drawn beforehand; then they come again."""

_BATCH_BYTES_MAX = 512 << 20
_UNALIGNED = 16
_GROUP_BYTES = 8 << 20


def _memory(nbytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory that starts on a page, all of it present."""
    array = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    array[::PAGE_BYTES] = 0
    return array


def buffers(count: int, nbytes: int, alignment: int = 1) -> list[memoryview]:
    """Return buffers that start 16 bytes behind a page, or on one if they must."""
    stride = -(-(nbytes + _UNALIGNED) // PAGE_BYTES) * PAGE_BYTES
    shift = 0 if alignment > 1 else _UNALIGNED
    rows = _memory(count * stride).reshape(count, stride)
    return [row[shift : shift + nbytes].data for row in rows]


class Dataset:
    """Generated, and in memory, before anything is timed."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self.count = count
        self.keys = [generators.key(index) for index in range(count)]
        self.values = _memory(count * nbytes).reshape(count, nbytes)
        group = max(1, _GROUP_BYTES // nbytes)
        for first in range(0, count, group):
            indices = range(first, min(first + group, count))
            self.values[first : first + len(indices)] = generators.values(
                indices, nbytes
            )
        self.checksums = [_core.crc32c(row.data) for row in self.values]
        self.touched_checksums = [
            _core.crc32c(row[::PAGE_BYTES].tobytes()) for row in self.values
        ]
        self.batch = max(1, min(BATCH, count, _BATCH_BYTES_MAX // nbytes))
        self._made: dict[tuple[int, int], list[memoryview]] = {}

    @property
    def total(self) -> int:
        """Bytes of all values."""
        return self.count * self.nbytes

    def targets(self, count: int, alignment: int) -> list[memoryview]:
        """Return that many buffers, the same ones each time."""
        made = self._made.get((count, alignment))
        if made is None:
            made = self._made[count, alignment] = buffers(count, self.nbytes, alignment)
        return made

    def check(self, index: int, target: Any) -> None:
        """Compare the bytes of a copy with those of the block."""
        if _core.crc32c(target) != self.checksums[index]:
            raise RuntimeError(f"block {index} came back with other bytes")

    def spread_targets(
        self, order: Sequence[int], shift: int, alignment: int
    ) -> list[memoryview]:
        """Return where each block goes: one buffer for most, each 64th to its own.

        So the bytes can be checked when the clock has stopped: a comparison between two
        reads would give the kernel's readahead a head start.
        """
        apart = iter(self.targets(-(-len(order) // CHECK_EVERY) + 1, alignment))
        shared = next(apart)
        return [
            next(apart) if (position + shift) % CHECK_EVERY == 0 else shared
            for position in range(len(order))
        ]

    def check_spread(
        self, order: Sequence[int], targets: Sequence[memoryview], shift: int
    ) -> None:
        """Check what ``spread_targets`` set apart, and the last."""
        last = len(order) - 1
        for position, (index, target) in enumerate(zip(order, targets, strict=True)):
            if (position + shift) % CHECK_EVERY == 0 or position == last:
                self.check(index, target)
