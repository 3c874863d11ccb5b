# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver, bound with cffi: one method for each call that is used.

Only the driver's own library is loaded, at the first ``Driver()``. No call of the CUDA
runtime is made, and the last error of the runtime, which frameworks report later, is a
matter of the runtime alone: a refused call of ours leaves nothing behind for them.

Calls release the GIL. They raise ``CudaError``, except where the docstring says more.
Handles and addresses are plain ints.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from cyclone_kv.errors import CudaError, CudaUnavailableError

__all__ = ["Driver", "library_name"]

LIBRARY = "libcuda.so.1"
TEST_VARIABLE = "CYCLONE_KV_TEST_CUDA_DRIVER"
"""Names another library.  For tests: nothing but a fake of the driver belongs there."""

_DECLARATIONS = """
int cuInit(unsigned int);
int cuDriverGetVersion(int *);
int cuGetErrorName(int, const char **);
int cuGetErrorString(int, const char **);
int cuDeviceGetCount(int *);
int cuDeviceGet(int *, int);
int cuDeviceGetAttribute(int *, int, int);
int cuDevicePrimaryCtxGetState(int, unsigned int *, int *);
int cuDevicePrimaryCtxRetain(uintptr_t *, int);
int cuDevicePrimaryCtxRelease_v2(int);
int cuCtxGetCurrent(uintptr_t *);
int cuCtxGetDevice(int *);
int cuCtxPushCurrent_v2(uintptr_t);
int cuCtxPopCurrent_v2(uintptr_t *);
int cuCtxSynchronize(void);
int cuMemHostRegister_v2(uintptr_t, size_t, unsigned int);
int cuMemHostUnregister(uintptr_t);
int cuMemHostAlloc(uintptr_t *, size_t, unsigned int);
int cuMemFreeHost(uintptr_t);
int cuMemcpyHtoDAsync_v2(unsigned long long, uintptr_t, size_t, uintptr_t);
int cuMemcpyDtoHAsync_v2(uintptr_t, unsigned long long, size_t, uintptr_t);
int cuPointerGetAttribute(void *, int, unsigned long long);
int cuEventCreate(uintptr_t *, unsigned int);
int cuEventRecord(uintptr_t, uintptr_t);
int cuEventQuery(uintptr_t);
int cuEventSynchronize(uintptr_t);
int cuEventDestroy_v2(uintptr_t);
int cuStreamWaitEvent(uintptr_t, uintptr_t, unsigned int);
int cuStreamGetCtx(uintptr_t, uintptr_t *);
int cuStreamSynchronize(uintptr_t);
"""

OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
DEINITIALIZED = 4
NOT_READY = 600
CONTEXT_IS_DESTROYED = 709
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713

_HOST_REGISTER_SUPPORTED = 99
_READ_ONLY_HOST_REGISTER_SUPPORTED = 113
_POINTER_MEMORY_TYPE = 2
_POINTER_DEVICE_ORDINAL = 9
_MEMORY_TYPE_HOST = 1
_REGISTER_PORTABLE = 0x01
_REGISTER_READ_ONLY = 0x08
_ALLOC_PORTABLE = 0x01
_EVENT_DISABLE_TIMING = 0x02


def library_name() -> str:
    """Return what is loaded."""
    return os.environ.get(TEST_VARIABLE) or LIBRARY


@functools.cache
def _declared() -> Any:
    ffi: Any = importlib.import_module("cffi").FFI()  # has no types
    ffi.cdef(_DECLARATIONS)
    return ffi


class Driver:
    """The loaded and initialised driver.

    Raises ``CudaUnavailableError`` with the reason when there is none to be had.
    """

    def __init__(self, name: str | None = None) -> None:
        name = library_name() if name is None else name
        try:
            self._ffi = _declared()
        except ImportError as error:
            raise CudaUnavailableError(
                "cffi is not installed, by which the CUDA driver is called "
                "(pip install 'cyclone-kv[cuda]')"
            ) from error
        try:
            self._library: Any = self._ffi.dlopen(name)
        except OSError as error:
            raise CudaUnavailableError(
                f"there is no CUDA driver: {name} cannot be loaded ({error})"
            ) from error
        try:
            for line in _DECLARATIONS.strip().splitlines():
                getattr(self._library, line.split("(")[0].split()[1])
        except AttributeError as error:
            raise CudaUnavailableError(
                f"{name} is too old, or no CUDA driver: {error}"
            ) from error
        self.name = name
        try:
            self._check("cuInit", self._library.cuInit(0))
            self.count = self._int("cuDeviceGetCount")
        except CudaError as error:
            raise CudaUnavailableError(
                f"the CUDA driver does not start: {error}",
                call=error.call,
                code=error.code,
            ) from error

    # ---- how calls are made ----------------------------------------------------------

    def _check(self, call: str, code: int) -> None:
        if code != 0:
            raise CudaError(
                f"{call} failed: {self.describe(code)}", call=call, code=code
            )

    def describe(self, code: int) -> str:
        """Return name, number and text of an error."""
        texts = []
        for ask in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            pointer = self._ffi.new("const char **")
            known = ask(code, pointer) == 0 and pointer[0] != self._ffi.NULL
            texts.append(
                self._ffi.string(pointer[0]).decode(errors="replace") if known else "?"
            )
        return f"{texts[0]} ({code}), {texts[1]}"

    def _int(self, call: str, *arguments: Any) -> int:
        out = self._ffi.new("int *")
        self._check(call, getattr(self._library, call)(out, *arguments))
        return int(out[0])

    def _handle(self, call: str, *arguments: Any) -> int:
        out = self._ffi.new("uintptr_t *")
        self._check(call, getattr(self._library, call)(out, *arguments))
        return int(out[0])

    # ---- devices and contexts --------------------------------------------------------

    def version(self) -> int:
        """Return the version of CUDA that the driver supports, as 1000 a major."""
        return self._int("cuDriverGetVersion")

    def device(self, ordinal: int) -> int:
        """Return the device of an ordinal."""
        return self._int("cuDeviceGet", ordinal)

    def registers_host_memory(self, device: int) -> bool:
        """Tell whether the device can use registered memory at all."""
        return self._int("cuDeviceGetAttribute", _HOST_REGISTER_SUPPORTED, device) != 0

    def registers_read_only(self, device: int) -> bool:
        """Tell whether memory that is mapped for reading only can be registered."""
        return (
            self._int(
                "cuDeviceGetAttribute", _READ_ONLY_HOST_REGISTER_SUPPORTED, device
            )
            != 0
        )

    def primary_active(self, device: int) -> bool:
        """Tell whether the primary context of a device exists; makes none."""
        flags, active = self._ffi.new("unsigned int *"), self._ffi.new("int *")
        self._check(
            "cuDevicePrimaryCtxGetState",
            self._library.cuDevicePrimaryCtxGetState(device, flags, active),
        )
        return bool(active[0])

    def retain_primary(self, device: int) -> int:
        """Return the primary context; makes it when there is none."""
        return self._handle("cuDevicePrimaryCtxRetain", device)

    def release_primary(self, device: int) -> None:
        """Give one retain back."""
        self._check(
            "cuDevicePrimaryCtxRelease",
            self._library.cuDevicePrimaryCtxRelease_v2(device),
        )

    def current_device(self) -> int | None:
        """Return the device of the current context of this thread, or None."""
        if self._handle("cuCtxGetCurrent") == 0:
            return None
        return self._int("cuCtxGetDevice")

    def push(self, context: int) -> None:
        """Make a context current in this thread."""
        self._check("cuCtxPushCurrent", self._library.cuCtxPushCurrent_v2(context))

    def pop(self) -> None:
        """Make current what was so before the push."""
        self._handle("cuCtxPopCurrent_v2")

    def synchronize(self) -> None:
        """Wait for everything in the current context."""
        self._check("cuCtxSynchronize", self._library.cuCtxSynchronize())

    # ---- memory ----------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> None:
        """Pin mapped memory, for reading by all devices."""
        self._check(
            "cuMemHostRegister",
            self._library.cuMemHostRegister_v2(
                address, nbytes, _REGISTER_PORTABLE | _REGISTER_READ_ONLY
            ),
        )

    def unregister(self, address: int) -> None:
        """Undo ``register``."""
        self._check("cuMemHostUnregister", self._library.cuMemHostUnregister(address))

    def allocate_host(self, nbytes: int) -> int:
        """Return the address of pinned memory for all devices."""
        out = self._ffi.new("uintptr_t *")
        self._check(
            "cuMemHostAlloc",
            self._library.cuMemHostAlloc(out, nbytes, _ALLOC_PORTABLE),
        )
        return int(out[0])

    def free_host(self, address: int) -> None:
        """Undo ``allocate_host``."""
        self._check("cuMemFreeHost", self._library.cuMemFreeHost(address))

    def host_view(self, address: int, nbytes: int) -> memoryview:
        """Return memory that the driver gave us, as a writable buffer."""
        return memoryview(
            self._ffi.buffer(self._ffi.cast("char *", address), nbytes)
        ).cast("B")

    def address_of(self, buffer: bytearray) -> int:
        """Return the address of the bytes; they must not be resized meanwhile."""
        return int(self._ffi.cast("uintptr_t", self._ffi.from_buffer(buffer)))

    def device_of(self, pointer: int) -> int:
        """Return the ordinal of the device whose memory (or mapping) this is."""
        out = self._ffi.new("int *")
        self._check(
            "cuPointerGetAttribute",
            self._library.cuPointerGetAttribute(out, _POINTER_DEVICE_ORDINAL, pointer),
        )
        return int(out[0])

    def is_host(self, pointer: int) -> bool:
        """Tell whether a pointer known to the driver is host memory."""
        out = self._ffi.new("int *")
        self._check(
            "cuPointerGetAttribute",
            self._library.cuPointerGetAttribute(out, _POINTER_MEMORY_TYPE, pointer),
        )
        return int(out[0]) == _MEMORY_TYPE_HOST

    def copy_to_device(
        self, target: int, source: int, nbytes: int, stream: int
    ) -> None:
        """Enqueue a copy."""
        code = self._library.cuMemcpyHtoDAsync_v2(target, source, nbytes, stream)
        if code != 0:
            self._check("cuMemcpyHtoDAsync", code)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy."""
        code = self._library.cuMemcpyDtoHAsync_v2(target, source, nbytes, stream)
        if code != 0:
            self._check("cuMemcpyDtoHAsync", code)

    # ---- streams and events ----------------------------------------------------------

    def stream_context(self, stream: int) -> int:
        """Return the context of a stream."""
        out = self._ffi.new("uintptr_t *")
        self._check("cuStreamGetCtx", self._library.cuStreamGetCtx(stream, out))
        return int(out[0])

    def synchronize_stream(self, stream: int) -> None:
        """Wait for everything in a stream."""
        self._check("cuStreamSynchronize", self._library.cuStreamSynchronize(stream))

    def stream_wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""
        self._check(
            "cuStreamWaitEvent", self._library.cuStreamWaitEvent(stream, event, 0)
        )

    def create_event(self) -> int:
        """Return a new event of the current context."""
        return self._handle("cuEventCreate", _EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        """End an event."""
        self._check("cuEventDestroy", self._library.cuEventDestroy_v2(event))

    def record(self, event: int, stream: int) -> None:
        """Let an event stand for everything in a stream so far."""
        self._check("cuEventRecord", self._library.cuEventRecord(event, stream))

    def event_done(self, event: int) -> bool:
        """Tell whether what an event stands for is done; does not wait."""
        code = self._library.cuEventQuery(event)
        if code == NOT_READY:
            return False
        self._check("cuEventQuery", code)
        return True

    def wait_event(self, event: int) -> None:
        """Wait until it is."""
        self._check("cuEventSynchronize", self._library.cuEventSynchronize(event))
