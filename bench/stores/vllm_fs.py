# SPDX-License-Identifier: Apache-2.0
"""The layout of vLLM's ``fs`` tier: a file per block, two levels of folders, O_DIRECT.

Where vLLM can be imported, its own functions store and load the blocks; elsewhere this
is a re-creation of what they do, and says so. Either way only the input and output is
measured, without the queue between scheduler and threads that the tier has in front of
it. A batch is shared out over 16 threads, the tier's default.

Direct input and output needs aligned addresses, which vLLM's own block pool has; so
this store is given aligned targets where the others get unaligned ones. On a file
system without O_DIRECT it goes through the page cache, as the tier does.
"""
# ruff: noqa: D102  (what the methods do is said once, in Store)

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import mmap
import os
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from bench.stores.interface import PAGE_BYTES, Pooled, StoreError

__all__ = ["VllmFsStore"]

_READ_THREADS = 16
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_PARAMETERS = 5  # path, buffer, offset, block size, whether direct

_Transfer = Callable[[str, memoryview, int, int, bool], None]


def _import_vllm() -> tuple[_Transfer, _Transfer] | None:
    """Return vLLM's own (store, load), None where they are not, or are others."""
    try:
        module: Any = importlib.import_module("vllm.v1.kv_offload.tiering.fs.io")
        found = module.store_block, module.load_block
    except (ImportError, AttributeError):
        return None
    if any(len(inspect.signature(f).parameters) != _PARAMETERS for f in found):
        return None
    return found


class VllmFsStore(Pooled):
    """A block is written under a temporary name and replaces; present ones are kept."""

    name: ClassVar[str] = "vllm_fs"
    label: ClassVar[str] = "vLLM fs layout"
    threads: ClassVar[int] = _READ_THREADS
    target_alignment: ClassVar[int] = PAGE_BYTES

    def __init__(self, folder: Path, count: int, nbytes: int) -> None:
        super().__init__(folder, count, nbytes)
        model = "model_" + hashlib.sha256(b"a configuration").hexdigest()[:12] + "_r0"
        self._root = self.folder / model
        self._direct = 0
        self._transfers = _import_vllm()
        self._local = threading.local()

    @classmethod
    def version(cls) -> str:
        if _import_vllm() is None:
            return "re-creation, vllm is not importable here"
        return f"vllm {metadata.version('vllm')}"

    def open(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        self._direct = _O_DIRECT if _probe(self._root) else 0

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/{name[:3]}/{name[3:5]}_g0/{name}.bin"

    def put(self, key: bytes, value: memoryview) -> None:
        path = self._path(key)
        if self._transfers is not None:
            self._transfers[0](path, value, 0, len(value), self._direct != 0)
            return
        if os.path.exists(path):
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        beside = f"{path}_{threading.get_ident()}.tmp"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | self._direct
        try:
            descriptor = os.open(beside, flags, 0o644)
            try:
                if os.write(descriptor, value) != len(value):
                    raise StoreError("a short write")
            finally:
                os.close(descriptor)
            os.replace(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise

    def contains(self, key: bytes) -> bool:
        return os.path.exists(self._path(key))

    def remove(self, key: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        if self._transfers is not None:
            try:
                part = target[: self.nbytes]
                self._transfers[1](
                    self._path(key), part, 0, self.nbytes, self._direct != 0
                )
            except FileNotFoundError:
                return None
            return self.nbytes
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | self._direct)
        except FileNotFoundError:
            return None
        try:
            if os.readv(descriptor, [target[: self.nbytes]]) != self.nbytes:
                raise StoreError("a short read")
        finally:
            os.close(descriptor)
        return self.nbytes

    def view(self, key: bytes) -> int | None:
        """Read it into memory of the thread: the tier has no other way."""
        return self.get_into(key, self._target())

    def view_touch(self, key: bytes) -> bytes | None:
        target = self._target()
        found = self.get_into(key, target)
        return None if found is None else target[:found:PAGE_BYTES].tobytes()

    def _target(self) -> memoryview:
        target: memoryview | None = getattr(self._local, "target", None)
        if target is None:
            target = self._local.target = memoryview(mmap.mmap(-1, self.nbytes))
        return target


def _probe(folder: Path) -> bool:
    """Return whether a page can be written with O_DIRECT there."""
    if not _O_DIRECT:
        return False
    path = folder / ".probe"
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | _O_DIRECT
            descriptor = os.open(path, flags, 0o644)
            try:
                os.write(descriptor, page)
            finally:
                os.close(descriptor)
        return True
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
