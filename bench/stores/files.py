# SPDX-License-Identifier: Apache-2.0
"""A file per block, in 256 folders, as engines with a file backend do it."""
# ruff: noqa: D102  (what the methods do is said once, in Store)

from __future__ import annotations

import mmap
import os
from typing import ClassVar

from bench.stores.interface import PAGE_BYTES, Pooled, StoreError

__all__ = ["FileStore"]


class FileStore(Pooled):
    """A block is written under a temporary name and renamed, and read by one call."""

    name: ClassVar[str] = "files"
    label: ClassVar[str] = "file per block"

    def open(self) -> None:
        for number in range(256):
            (self.folder / f"{number:02x}").mkdir(parents=True, exist_ok=True)

    def open_reader(self) -> None:
        """Nothing to do."""

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.folder}/{name[:2]}/{name}"

    def put(self, key: bytes, value: memoryview) -> None:
        path = self._path(key)
        with open(path + ".part", "wb", buffering=0) as file:
            if file.write(value) != len(value):
                raise StoreError("a short write")
        os.rename(path + ".part", path)

    def contains(self, key: bytes) -> bool:
        return os.path.exists(self._path(key))

    def remove(self, key: bytes) -> None:
        try:
            os.unlink(self._path(key))
        except FileNotFoundError:
            return

    def get_into(self, key: bytes, target: memoryview) -> int | None:
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                return file.readinto(target)
        except FileNotFoundError:
            return None

    def view(self, key: bytes) -> int | None:
        try:
            with (
                open(self._path(key), "rb", buffering=0) as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
            ):
                return len(mapping)
        except FileNotFoundError:
            return None

    def view_touch(self, key: bytes) -> bytes | None:
        try:
            with (
                open(self._path(key), "rb", buffering=0) as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
            ):
                return mapping[::PAGE_BYTES]
        except FileNotFoundError:
            return None
