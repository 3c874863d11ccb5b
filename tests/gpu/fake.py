# SPDX-License-Identifier: Apache-2.0
"""The fake driver (fake_driver.c) in the hands of a test, and stand-ins for arrays."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from pathlib import Path
from typing import Any

import cffi
from support.compile import BUILD, ROOT, compile_objects, link, sanitizer_flags

from cyclone_kv.cuda.targets import DLDevice, DLTensor

EAGER, LAZY, MANUAL = 0, 1, 2

_DECLARATIONS = """
void fake_reset(int);
void fake_mode(int);
void fake_advance(size_t);
void fake_support(bool, bool);
void fake_caps(size_t, size_t);
void fake_fail(const char *, long, int, bool);
size_t fake_calls(void);
size_t fake_records(void);
const char *fake_record(
    size_t, uint64_t *, uint64_t *, uint64_t *, int *, const char **);
const char *fake_violation(void);
size_t fake_registered_bytes(void);
size_t fake_pinned_bytes(void);
size_t fake_pending(void);
size_t fake_unmapped(void);
size_t fake_live_events(void);
int fake_retains(int);
int fake_depth(void);
uintptr_t fake_allocate(int, size_t);
uintptr_t fake_stream(int);
int cuCtxPushCurrent_v2(uintptr_t);
int cuCtxPopCurrent_v2(uintptr_t *);
int cuMemHostRegister_v2(uintptr_t, size_t, unsigned int);
int cuMemHostUnregister(uintptr_t);
"""


def build() -> Path:
    """Compile the fake; never twice."""
    sanitize = os.environ.get("CKV_SANITIZE", "")
    flags = sanitizer_flags(sanitize)
    source = ROOT / "tests" / "gpu" / "fake_driver.c"
    objects = compile_objects([source], ["-O1", *flags])
    target = BUILD / "gpu" / f"libfake_cuda-{objects[0].stem}.so"
    return target if target.exists() else link(objects, target, flags, shared=True)


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    a: int
    b: int
    c: int
    result: int
    kind: str


class Fake:
    """Switches and records of the fake."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ffi = cffi.FFI()
        self.ffi.cdef(_DECLARATIONS)
        self.lib: Any = self.ffi.dlopen(str(path))

    def reset(self, devices: int = 1) -> None:
        self.lib.fake_reset(devices)

    def mode(self, mode: int) -> None:
        self.lib.fake_mode(mode)

    def advance(self, count: int = 1 << 40) -> None:
        self.lib.fake_advance(count)

    def fail(
        self, name: str, nth: int = 1, code: int = 1, *, every: bool = False
    ) -> None:
        self.lib.fake_fail(name.encode(), nth, code, every)

    def succeed(self) -> None:
        self.fail("", 0, 0)

    def calls(self, *names: str) -> list[Call]:
        """Return the calls of these names, or all, in order."""
        found = []
        numbers = self.ffi.new("uint64_t[3]")
        result, kind = self.ffi.new("int *"), self.ffi.new("const char **")
        for i in range(self.lib.fake_records()):
            name = self.ffi.string(
                self.lib.fake_record(i, numbers, numbers + 1, numbers + 2, result, kind)
            ).decode()
            if not names or name in names:
                text = self.ffi.string(kind[0]).decode()
                found.append(Call(name, *list(numbers), result[0], text))
        return found

    def copies(self) -> list[Call]:
        """Return copies to the device: a is the target, b the source, c the length."""
        return self.calls("cuMemcpyHtoDAsync")

    @property
    def violation(self) -> str:
        return self.ffi.string(self.lib.fake_violation()).decode()

    @property
    def registered_bytes(self) -> int:
        return self.lib.fake_registered_bytes()

    @property
    def pinned_bytes(self) -> int:
        return self.lib.fake_pinned_bytes()

    @property
    def pending(self) -> int:
        return self.lib.fake_pending()

    def retains(self, device: int) -> int:
        return self.lib.fake_retains(device)

    def allocate(self, nbytes: int, device: int = 0) -> DeviceBytes:
        return DeviceBytes(self.lib.fake_allocate(device, nbytes), nbytes, device)

    def stream(self, device: int = 0) -> int:
        return self.lib.fake_stream(device)


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Memory of the fake's device; its bytes can be looked at."""

    pointer: int
    nbytes: int
    device: int

    def read(self, nbytes: int | None = None) -> bytes:
        return ctypes.string_at(self.pointer, self.nbytes if nbytes is None else nbytes)

    def fill(self, byte: int) -> None:
        ctypes.memset(self.pointer, byte, self.nbytes)

    def write(self, data: bytes) -> None:
        assert len(data) <= self.nbytes
        ctypes.memmove(self.pointer, data, len(data))

    @property
    def pair(self) -> tuple[int, int]:
        return self.pointer, self.nbytes


class CupyLike:
    """Has what cupy.ndarray has: __cuda_array_interface__ of version 3."""

    def __init__(
        self,
        memory: DeviceBytes,
        *,
        typestr: str = "|u1",
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        read_only: bool = False,
        stream: int | None = 1,
    ) -> None:
        size = int(typestr[2:])
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes // size,) if shape is None else shape,
            "typestr": typestr,
            "data": (memory.pointer, read_only),
            "strides": strides,
            "stream": stream,
            "version": 3,
        }


class TorchLike:
    """Has what a torch.Tensor has; its module says torch."""

    def __init__(
        self,
        memory: DeviceBytes,
        *,
        item_bytes: int = 2,
        contiguous: bool = True,
        cuda: bool = True,
    ) -> None:
        self.memory = memory
        self.item_bytes = item_bytes
        self.contiguous = contiguous
        self.is_cuda = cuda
        self.device = f"cuda:{memory.device}" if cuda else "cpu"
        self.shape = (memory.nbytes // item_bytes,)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise TypeError("bfloat16 has no typestr")  # as torch does

    def data_ptr(self) -> int:
        return self.memory.pointer

    def numel(self) -> int:
        return self.memory.nbytes // self.item_bytes

    def element_size(self) -> int:
        return self.item_bytes

    def is_contiguous(self) -> bool:
        return self.contiguous


TorchLike.__module__ = "torch"


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class DlpackLike:
    """Has __dlpack__ and __dlpack_device__ alone; counts exports that are alive."""

    def __init__(
        self,
        memory: DeviceBytes,
        *,
        kind: int = 2,
        bits: int = 16,
        strides: tuple[int, ...] | None = None,
        byte_offset: int = 0,
    ) -> None:
        self.memory = memory
        self.kind = kind
        self.bits = bits
        self.strides = strides
        self.byte_offset = byte_offset
        self.streams: list[int | None] = []
        self.alive = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.memory.device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.streams.append(stream)
        count = (self.memory.nbytes - self.byte_offset) // (self.bits // 8)
        managed = _Managed()
        managed.tensor.data = self.memory.pointer
        managed.tensor.device = DLDevice(self.kind, self.memory.device)
        managed.tensor.ndim = 1
        managed.tensor.bits = self.bits
        managed.tensor.lanes = 1
        managed.tensor.shape = (ctypes.c_int64 * 1)(count)
        if self.strides is not None:
            managed.tensor.strides = (ctypes.c_int64 * 1)(*self.strides)
        managed.tensor.byte_offset = self.byte_offset
        self.alive += 1

        def ended(capsule: int) -> None:
            keep.clear()
            self.alive -= 1

        destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ended)
        keep: list[Any] = [managed]
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        capsule = new(ctypes.addressof(managed), b"dltensor", destructor)
        self._destructors = [*getattr(self, "_destructors", []), destructor]
        return capsule
