# SPDX-License-Identifier: Apache-2.0
"""The ways in which blocks reach a device, ours and those beside it.

A way starts the copies of a batch and finishes them, and may have two batches under
way. What it needs besides (opening, registering, buffers) is done before the clock
starts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from bench.dataset import Dataset
from bench.gpu_upload.device import Gpu
from bench.stores.files import FileStore
from cyclone_kv import Cache, CacheConfig

__all__ = ["WAYS", "Batch", "Way", "WayError"]

_PAGE = mmap.PAGESIZE
Batch = Sequence[int]


class WayError(Exception):
    """The way does not exist on this machine; the message says why."""


class Way(Protocol):
    """See above."""

    name: ClassVar[str]
    label: ClassVar[str]
    bytes_direct: int
    """Copied by DMA out of a mapping, where that is known."""

    def start(self, batch: Batch, places: Sequence[tuple[int, int]], half: int) -> Any:
        """Start the copies of blocks to places; two halves of buffers alternate."""

    def finish(self, started: Any) -> None:
        """Wait for them."""


class _Events:
    """Copies by our own calls: an event for each half."""

    bytes_direct = 0

    def __init__(self, gpu: Gpu, data: Dataset) -> None:
        self.gpu = gpu
        self.data = data
        self.events = [gpu.driver.create_event() for _ in range(2)]

    def finish(self, started: Any) -> None:
        self.gpu.driver.wait_event(started)

    def record(self, half: int) -> int:
        self.gpu.driver.record(self.events[half], self.gpu.stream)
        return self.events[half]

    def close(self) -> None:
        for event in self.events:
            self.gpu.driver.destroy_event(event)


class Pinned(_Events):
    """What the bus gives: copies out of pinned memory, and no store at all."""

    name: ClassVar[str] = "pinned"
    label: ClassVar[str] = "pinned memory alone (the limit)"

    def __init__(self, gpu: Gpu, data: Dataset, batch: int) -> None:
        super().__init__(gpu, data)
        self.address, view = gpu.pinned(batch * data.nbytes)
        for i in range(batch):
            view[i * data.nbytes : (i + 1) * data.nbytes] = data.values[
                i % data.count
            ].data

    def start(self, batch: Batch, places: Sequence[tuple[int, int]], half: int) -> Any:
        copy, stream = self.gpu.driver.copy_to_device, self.gpu.stream
        nbytes = self.data.nbytes
        for i, (pointer, _) in enumerate(places):
            copy(pointer, self.address + i * nbytes, nbytes, stream)
        return self.record(half)


class Ours:
    """``upload_async``; what is registered decides which way blocks take."""

    bytes_direct = 0

    def __init__(self, gpu: Gpu, data: Dataset, cache: Cache) -> None:
        self.gpu = gpu
        self.data = data
        self.cache = cache

    def start(self, batch: Batch, places: Sequence[tuple[int, int]], half: int) -> Any:
        keys = self.data.keys
        result = self.cache.upload_async(
            [keys[i] for i in batch], places, self.gpu.stream
        )
        self.bytes_direct += result.registered_bytes
        return result

    def finish(self, started: Any) -> None:
        started.wait()
        if None in started.lengths:
            raise RuntimeError("a block that was stored is not there")


class Registered(Ours):
    """The whole mapping registered once."""

    name: ClassVar[str] = "registered"
    label: ClassVar[str] = "cyclone_kv, registered once"


class Partial(Ours):
    """As much of it as a budget of about half allows."""

    name: ClassVar[str] = "partial"
    label: ClassVar[str] = "cyclone_kv, larger than the budget"


class Staged(Ours):
    """The pinned ring."""

    name: ClassVar[str] = "staged"
    label: ClassVar[str] = "cyclone_kv, pinned ring"


class Pageable(_Events):
    """Plain copies out of views."""

    name: ClassVar[str] = "pageable"
    label: ClassVar[str] = "cyclone_kv, views, not pinned"

    def __init__(self, gpu: Gpu, data: Dataset, cache: Cache) -> None:
        super().__init__(gpu, data)
        self.cache = cache
        self.views: list[list[Any]] = [[], []]

    def start(self, batch: Batch, places: Sequence[tuple[int, int]], half: int) -> Any:
        copy, stream = self.gpu.driver.copy_to_device, self.gpu.stream
        self.views[half].clear()
        for index, (pointer, nbytes) in zip(batch, places, strict=True):
            lease = self.cache._lease(self.data.keys[index])
            assert lease is not None
            self.views[half].append(lease)
            copy(pointer, lease.address, nbytes, stream)
        return self.record(half)

    def finish(self, started: Any) -> None:
        super().finish(started)
        self.views[self.events.index(started)].clear()


class PerSpan(Pageable):
    """Each view is registered, copied and unregistered."""

    name: ClassVar[str] = "per_span"
    label: ClassVar[str] = "cyclone_kv, each view registered"

    def start(self, batch: Batch, places: Sequence[tuple[int, int]], half: int) -> Any:
        driver, stream = self.gpu.driver, self.gpu.stream
        spans = []
        for index in batch:
            lease = self.cache._lease(self.data.keys[index])
            assert lease is not None
            spans.append((lease, lease.address))
        # Twice in a batch is registered once: overlapping spans are refused.
        addresses = sorted({address for _, address in spans})
        size = -(-self.data.nbytes // _PAGE) * _PAGE
        for address in addresses:
            driver.register(address, size)
        for (_, address), (pointer, nbytes) in zip(spans, places, strict=True):
            driver.copy_to_device(pointer, address, nbytes, stream)
        # Not to be unregistered before they are done, so nothing overlaps here.
        driver.wait_event(self.record(half))
        for address in addresses:
            driver.unregister(address)
        return self.events[half]


class Lmdb(_Events):
    """LMDB's map, registered from its first block to its last."""

    name: ClassVar[str] = "lmdb"
    label: ClassVar[str] = "LMDB, registered once"

    def __init__(self, gpu: Gpu, data: Dataset, folder: Path) -> None:
        try:
            import lmdb
        except ImportError as error:
            raise WayError(f"lmdb cannot be imported: {error}") from error
        super().__init__(gpu, data)
        self.env = lmdb.open(
            str(folder / "lmdb"),
            map_size=data.total * 3 // 2 + (64 << 20),
            sync=False,
        )
        with self.env.begin(write=True) as writing:
            for key, row in zip(data.keys, data.values, strict=True):
                writing.put(key, row.data)
        self.reading = self.env.begin(buffers=True)
        self.addresses = [
            np.frombuffer(self.reading.get(key), dtype=np.uint8).ctypes.data
            for key in data.keys
        ]
        first = min(self.addresses) // _PAGE * _PAGE
        last = -(-(max(self.addresses) + data.nbytes) // _PAGE) * _PAGE
        gpu.driver.register(first, last - first)
        self.registered = first

    def start(self, batch: Batch, places: Sequence[tuple[int, int]], half: int) -> Any:
        copy, stream = self.gpu.driver.copy_to_device, self.gpu.stream
        for index, (pointer, nbytes) in zip(batch, places, strict=True):
            copy(pointer, self.addresses[index], nbytes, stream)
        return self.record(half)

    def close(self) -> None:
        self.gpu.driver.synchronize()
        self.gpu.driver.unregister(self.registered)
        super().close()
        self.reading.abort()
        self.env.close()


class Files(_Events):
    """A file per block, read into pinned memory, two halves of it in turn."""

    name: ClassVar[str] = "files"
    label: ClassVar[str] = "file per block, read into pinned memory"

    def __init__(self, gpu: Gpu, data: Dataset, folder: Path, batch: int) -> None:
        super().__init__(gpu, data)
        self.store = FileStore(folder, data.count, data.nbytes)
        self.store.open()
        for key, row in zip(data.keys, data.values, strict=True):
            self.store.put(key, row.data)
        size = batch * data.nbytes
        self.halves = [gpu.pinned(size) for _ in range(2)]

    def start(self, batch: Batch, places: Sequence[tuple[int, int]], half: int) -> Any:
        copy, stream = self.gpu.driver.copy_to_device, self.gpu.stream
        address, view = self.halves[half]
        nbytes = self.data.nbytes
        keys = [self.data.keys[i] for i in batch]
        parts = [view[i * nbytes : (i + 1) * nbytes] for i in range(len(keys))]
        if not self.store.get_many_into(keys, parts):
            raise RuntimeError("a file that was stored is not there")
        for i, (pointer, _) in enumerate(places):
            copy(pointer, address + i * nbytes, nbytes, stream)
        return self.record(half)

    def close(self) -> None:
        super().close()
        self.store.destroy()


WAYS = (Pinned, Registered, Partial, Staged, Pageable, PerSpan, Lmdb, Files)


@contextlib.contextmanager
def opened(path: Path, capacity: int) -> Iterator[Cache]:
    """Open our volume."""
    config = CacheConfig.for_kv_tier(capacity=capacity, admission="always")
    existing = None if os.path.exists(path) else config
    with Cache.open(path, existing) as cache:
        yield cache
