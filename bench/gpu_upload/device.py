# SPDX-License-Identifier: Apache-2.0
"""A CUDA device for the bench: memory, a stream, bytes back, and where it sits."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import cffi

from cyclone_kv.cuda.driver import Driver
from cyclone_kv.errors import CudaError

__all__ = ["Gpu", "node_pages"]

_DECLARATIONS = """
int cuDeviceGetName(char *, int, int);
int cuDeviceGetPCIBusId(char *, int, int);
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemFree_v2(unsigned long long);
int cuMemsetD8_v2(unsigned long long, unsigned char, size_t);
int cuMemcpyDtoH_v2(void *, unsigned long long, size_t);
int cuStreamCreate(uintptr_t *, unsigned int);
int cuStreamDestroy_v2(uintptr_t);
"""
_NON_BLOCKING = 1


class Gpu:
    """Device 0, current in this thread while the ``with`` block runs."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.number = self.driver.device(0)
        self._ffi = cffi.FFI()
        self._ffi.cdef(_DECLARATIONS)
        self._library: Any = self._ffi.dlopen(self.driver.name)
        self._memory: list[int] = []
        self._pinned: list[int] = []
        self.stream = 0

    def __enter__(self) -> Gpu:
        self.driver.push(self.driver.retain_primary(self.number))
        stream = self._ffi.new("uintptr_t *")
        self._call("cuStreamCreate", stream, _NON_BLOCKING)
        self.stream = int(stream[0])
        return self

    def __exit__(self, *error: object) -> None:
        self.driver.synchronize()
        while self._memory:
            self._call("cuMemFree_v2", self._memory.pop())
        while self._pinned:
            self.driver.free_host(self._pinned.pop())
        self._call("cuStreamDestroy_v2", self.stream)
        self.driver.pop()
        self.driver.release_primary(self.number)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = self.driver.describe(code)
            raise CudaError(f"{name} failed: {text}", call=name, code=code)

    def allocate(self, nbytes: int) -> int:
        """Return device memory, until the end of the block."""
        pointer = self._ffi.new("unsigned long long *")
        self._call("cuMemAlloc_v2", pointer, nbytes)
        self._memory.append(int(pointer[0]))
        return self._memory[-1]

    def pinned(self, nbytes: int) -> tuple[int, memoryview]:
        """Return pinned memory, until the end of the block."""
        address = self.driver.allocate_host(nbytes)
        self._pinned.append(address)
        view = self.driver.host_view(address, nbytes)
        view[:: mmap.PAGESIZE] = bytes(-(-nbytes // mmap.PAGESIZE))
        return address, view

    def fill(self, pointer: int, byte: int, nbytes: int) -> None:
        """Set device memory."""
        self._call("cuMemsetD8_v2", pointer, byte, nbytes)
        self.driver.synchronize()

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Return bytes of device memory."""
        self.driver.synchronize()
        out = self._ffi.new("char[]", nbytes)
        self._call("cuMemcpyDtoH_v2", out, pointer, nbytes)
        return bytes(self._ffi.buffer(out))

    def about(self) -> dict[str, Any]:
        """Return name, version of CUDA, library and NUMA node."""
        name, place = self._ffi.new("char[]", 100), self._ffi.new("char[]", 32)
        self._call("cuDeviceGetName", name, 100, self.number)
        self._call("cuDeviceGetPCIBusId", place, 32, self.number)
        bus = self._ffi.string(place).decode().lower()
        node = Path(f"/sys/bus/pci/devices/{bus}/numa_node")
        version = self.driver.version()
        return {
            "device": self._ffi.string(name).decode(),
            "bus": bus,
            "numa_node": int(node.read_text()) if node.exists() else None,
            "cuda": f"{version // 1000}.{version % 1000 // 10}",
            "library": self.driver.name,
        }


def node_pages(path: Path, maps: Path = Path("/proc/self/numa_maps")) -> dict[str, int]:
    """Return the pages of a mapped file by NUMA node, as this process sees them."""
    found: dict[str, int] = {}
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        if f"file={path}" in line.split():
            for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
                found[node] = found.get(node, 0) + int(pages)
    return found
