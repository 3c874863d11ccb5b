# SPDX-License-Identifier: Apache-2.0
"""LMCache's ``local_disk`` backend, where LMCache and torch can be imported.

Its index lives in memory and is gone when the process ends, so it is kept open through
all phases. A put copies the block into LMCache's own memory (as an engine does), hands
it over and waits until it is written; a get reads into LMCache's memory and copies from
there.
"""
# ruff: noqa: D102  (what the methods do is said once, in Store)

from __future__ import annotations

import asyncio
import importlib
import shutil
import threading
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.stores.interface import (
    BATCH_THREADS,
    PAGE_BYTES,
    Folder,
    StoreError,
    UnavailableError,
)

__all__ = ["LmcacheDiskStore"]

_GIB = 1 << 30
_PUT_SECONDS = 60
_BATCH = 64


class LmcacheDiskStore(Folder):
    """The backend with its defaults, and no memory tier in front."""

    name: ClassVar[str] = "lmcache_disk"
    label: ClassVar[str] = "LMCache local_disk"
    processes: ClassVar[bool] = False
    restarts: ClassVar[bool] = False

    def __init__(self, folder: Path, count: int, nbytes: int) -> None:
        super().__init__(folder, count, nbytes)
        self._backend: Any = None
        self._staging: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def version(cls) -> str:
        for name in ("torch", "lmcache.v1.storage_backend.local_disk_backend"):
            try:
                importlib.import_module(name)
            except Exception as error:  # of many kinds, by what its parts lack
                raise UnavailableError(f"{name} is not importable: {error}") from error
        return f"lmcache {metadata.version('lmcache')}"

    def open(self) -> None:
        if self._backend is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        torch: Any = importlib.import_module("torch")
        utils: Any = importlib.import_module("lmcache.utils")
        config: Any = importlib.import_module("lmcache.v1.config")
        memory: Any = importlib.import_module("lmcache.v1.memory_management")
        parts = "lmcache.v1.storage_backend"
        cpu: Any = importlib.import_module(f"{parts}.local_cpu_backend")
        disk: Any = importlib.import_module(f"{parts}.local_disk_backend")
        settings = config.LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            local_disk=str(self.folder),
            max_local_disk_size=4 * (self.count + 1) * self.nbytes / _GIB + 1,
            extra_config={"disk_io_threads": BATCH_THREADS},
        )
        self._torch, self._utils = torch, utils
        self._format = memory.MemoryFormat.KV_2LTD
        self._shape = torch.Size([2, 1, 1, self.nbytes // 2])
        room = (2 * _BATCH + 8) * self.nbytes + (64 << 20)
        self._staging = cpu.LocalCPUBackend(
            settings,
            dst_device="cpu",
            memory_allocator=memory.MixedMemoryAllocator(room),
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._backend = disk.LocalDiskBackend(
            settings, self._loop, self._staging, dst_device="cpu"
        )

    def close(self) -> None:
        """Do nothing: closed, it would forget its blocks. Nothing is mapped."""

    def destroy(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _key(self, key: bytes) -> Any:
        return self._utils.CacheEngineKey(
            "model", 1, 0, int.from_bytes(key[:8], "little"), self._torch.uint8
        )

    def put(self, key: bytes, value: memoryview) -> None:
        block = self._staging.allocate(self._shape, self._torch.uint8, self._format)
        if block is None:
            raise StoreError("no staging memory")
        np.copyto(
            np.frombuffer(block.byte_array, dtype=np.uint8),
            np.frombuffer(value, dtype=np.uint8),
        )
        written = threading.Event()
        self._backend.submit_put_task(
            self._key(key), block, on_complete_callback=lambda _: written.set()
        )
        if not written.wait(_PUT_SECONDS):
            raise StoreError("a put was not finished")
        block.ref_count_down()

    def contains(self, key: bytes) -> bool:
        return bool(self._backend.contains(self._key(key)))

    def remove(self, key: bytes) -> None:
        if self.contains(key):
            self._backend.remove(self._key(key))

    def _give(self, block: Any, target: memoryview) -> int:
        found = np.frombuffer(block.byte_array, dtype=np.uint8)
        np.copyto(np.frombuffer(target, dtype=np.uint8)[: len(found)], found)
        length = len(found)
        del found
        block.ref_count_down()
        return length

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        block = self._backend.get_blocking(self._key(key))
        return None if block is None else self._give(block, target)

    def get_many_into(
        self, keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> bool:
        blocks = self._backend.batched_get_blocking([self._key(key) for key in keys])
        for block, target in zip(blocks, targets, strict=True):
            if block is not None:
                self._give(block, target)
        return None not in blocks

    def view(self, key: bytes) -> int | None:
        block = self._backend.get_blocking(self._key(key))
        if block is None:
            return None
        length = len(block.byte_array)
        block.ref_count_down()
        return length

    def view_touch(self, key: bytes) -> bytes | None:
        block = self._backend.get_blocking(self._key(key))
        if block is None:
            return None
        touched = bytes(memoryview(block.byte_array)[::PAGE_BYTES])
        block.ref_count_down()
        return touched
