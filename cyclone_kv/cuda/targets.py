# SPDX-License-Identifier: Apache-2.0
"""Device memory as callers have it: pointers, arrays, tensors, and streams.

Nothing of cupy or torch is imported. What an object is shows in what it can do, in this
order: torch's ``data_ptr``, ``__cuda_array_interface__``, DLPack. Two-tuples are
(pointer, bytes).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cyclone_kv.errors import ConfigError, CudaError

if TYPE_CHECKING:
    from cyclone_kv.cuda.driver import Driver
    from cyclone_kv.cuda.runtime import Device

__all__ = ["Place", "check_stream", "find_device", "no_overlap", "resolve", "stream_of"]

_INVALID_VALUE = 1
_INVALID_HANDLE = 400
_DLPACK_CUDA = 2
_DLPACK_CUDA_MANAGED = 13


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A piece of device memory."""

    pointer: int
    nbytes: int
    item_bytes: int
    """Of an element: a block has to fill whole ones."""
    keep: object
    """Keeps the memory from going."""
    stream: int | None
    """Where its owner works on it at the moment, if it said so."""
    known: bool
    """The owner says that this is device memory."""


def stream_of(stream: Any) -> int:
    """Return the handle of a stream: None, an int, or one of torch, cupy and others."""
    if stream is None:
        return 0
    if isinstance(stream, int) and not isinstance(stream, bool):
        handle = stream
    elif hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        handle = (protocol() if callable(protocol) else protocol)[1]
    elif hasattr(stream, "cuda_stream"):  # torch
        handle = stream.cuda_stream
    elif hasattr(stream, "ptr"):  # cupy
        handle = stream.ptr
    else:
        raise TypeError(
            f"stream is {stream!r}; give a CUstream as int, a torch.cuda.Stream, a "
            f"cupy.cuda.Stream, or None for the default stream"
        )
    handle = int(handle)
    if not 0 <= handle < 1 << 64:
        raise ConfigError(f"stream is {handle}, which is no handle of a stream")
    return handle


def check_stream(device: Device, stream: int) -> None:
    """Refuse a stream that is none, or one of another device.

    Requires: the device is current. The driver may not survive an arbitrary number.
    """
    if stream <= 2:  # the default streams, which every context has
        return
    try:
        context = device.driver.stream_context(stream)
    except CudaError as error:
        if error.code not in {_INVALID_VALUE, _INVALID_HANDLE}:
            raise
        raise ConfigError(
            f"stream is {stream:#x}, which is no stream of device {device.ordinal}: "
            f"{error}"
        ) from error
    if context != device.context:
        raise ConfigError(
            f"stream {stream:#x} is not one of the primary context of device "
            f"{device.ordinal}, where the memory lies; use a stream of that device"
        )


def resolve(
    objects: Sequence[Any], stream: int, *, writable: bool, name: str
) -> list[Place]:
    """Return where each object lies.  The message of an error names the object.

    ``stream`` is where the copies will run; owners that know streams are told.
    """
    return [
        _resolve(each, stream, f"{name}[{index}]", writable=writable)
        for index, each in enumerate(objects)
    ]


def _resolve(each: Any, stream: int, name: str, *, writable: bool) -> Place:
    if type(each) is tuple:
        return _from_pair(each, name)
    if type(each).__module__.partition(".")[0] == "torch" and hasattr(each, "data_ptr"):
        return _from_torch(each, name)
    interface = None
    with contextlib.suppress(AttributeError, TypeError):
        interface = each.__cuda_array_interface__
    if interface is not None:
        return _from_interface(each, interface, name, writable=writable)
    if hasattr(each, "__dlpack_device__"):
        return _from_dlpack(each, stream, name)
    hint = "; give (pointer, nbytes)" if isinstance(each, int) else ""
    raise TypeError(
        f"{name} is of type {type(each).__name__}, which is no device memory: it has "
        f"neither __cuda_array_interface__ nor __dlpack__{hint}"
    )


def _from_pair(pair: Any, name: str) -> Place:
    if (
        len(pair) != 2
        or not all(isinstance(part, int) for part in pair)
        or not 0 <= pair[0] < 1 << 64
        or not 0 <= pair[1] < 1 << 63
        or (pair[0] == 0 and pair[1] != 0)
    ):
        raise ConfigError(f"{name} is {pair!r}; a pair is (device pointer, bytes)")
    return Place(pair[0], pair[1], 1, None, None, known=False)


def _from_torch(tensor: Any, name: str) -> Place:
    if not tensor.is_cuda:
        raise ConfigError(
            f"{name} is a tensor on {tensor.device}; it must be on a CUDA device "
            f"(for memory of the host there is get_many_into)"
        )
    if not tensor.is_contiguous():
        raise ConfigError(_not_contiguous(name, tuple(tensor.shape)))
    size = tensor.element_size()
    return Place(tensor.data_ptr(), tensor.numel() * size, size, tensor, None, True)


def _from_interface(each: Any, interface: Any, name: str, *, writable: bool) -> Place:
    try:
        pointer, read_only = interface["data"]
        shape = tuple(operator.index(extent) for extent in interface["shape"])
        strides = interface.get("strides")
        if strides is not None:
            strides = tuple(operator.index(stride) for stride in strides)
        pointer = operator.index(pointer or 0)
        typestr = interface["typestr"]
        if min(shape, default=0) < 0 or not 0 <= pointer < 1 << 64:
            raise ValueError(f"data is {pointer:#x}, shape is {shape}")
        if strides is not None and len(strides) != len(shape):
            raise ValueError(f"strides are {strides}, shape is {shape}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} has a malformed __cuda_array_interface__: {error!r}"
        ) from error
    if read_only and writable:
        raise ConfigError(f"{name} is read-only; give an array that may be written to")
    size = _item_bytes(typestr, name)
    nbytes = size * math.prod(shape)
    if strides is not None and nbytes and not _is_contiguous(shape, strides, size):
        raise ConfigError(_not_contiguous(name, shape))
    if interface.get("mask") is not None:
        raise ConfigError(f"{name} has a mask, which means nothing for bytes")
    return Place(pointer, nbytes, size, each, interface.get("stream"), known=False)


def _item_bytes(typestr: Any, name: str) -> int:
    digits = typestr[2:] if isinstance(typestr, str) else ""
    if not digits.isdecimal() or int(digits) == 0:
        raise ConfigError(f"{name} has elements of type {typestr!r}, of unknown size")
    return int(digits)


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != size:
            return False
        size *= extent
    return True


def _not_contiguous(name: str, shape: Sequence[int]) -> str:
    return (
        f"{name}, of shape {shape}, is not contiguous in C order; give contiguous "
        f"memory (or the parts of it that are)"
    )


# ---- DLPack -------------------------------------------------------------------------


class DLDevice(ctypes.Structure):
    """DLPack's."""

    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class DLTensor(ctypes.Structure):
    """DLPack's, at the beginning of what a capsule points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _capsule_pointer(capsule: Any) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    get.argtypes = (ctypes.py_object, ctypes.c_char_p)
    return int(get(capsule, b"dltensor"))


def _from_dlpack(each: Any, stream: int, name: str) -> Place:
    kind, number = each.__dlpack_device__()
    if int(kind) not in {_DLPACK_CUDA, _DLPACK_CUDA_MANAGED}:
        raise ConfigError(
            f"{name} lies on DLPack device ({int(kind)}, {number}); it must be CUDA "
            f"memory, (2, n)"
        )
    try:
        # 0 is ambiguous there: 1 is the default stream.
        capsule = each.__dlpack__(stream=stream or 1)
    except BufferError as error:
        raise ConfigError(f"{name} cannot be exported by DLPack: {error}") from error
    # The capsule is not consumed: its end gives the memory back, so it is kept.
    tensor = DLTensor.from_address(_capsule_pointer(capsule))
    if tensor.bits == 0 or tensor.bits * tensor.lanes % 8 != 0:
        raise ConfigError(
            f"{name} has elements of {tensor.bits} bits; bytes are needed"
        )
    size = tensor.bits * tensor.lanes // 8
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    nbytes = size * math.prod(shape)
    if tensor.strides and nbytes:
        strides = [tensor.strides[i] * size for i in range(tensor.ndim)]
        if not _is_contiguous(shape, strides, size):
            raise ConfigError(_not_contiguous(name, tuple(shape)))
    pointer = (tensor.data or 0) + tensor.byte_offset
    return Place(pointer, nbytes, size, (each, capsule), None, known=False)


# ---- what they have in common -------------------------------------------------------


def find_device(driver: Driver, places: Sequence[Place], name: str) -> int | None:
    """Return the ordinal of the device where all places lie; None if all are empty."""
    found = None
    for index, place in enumerate(places):
        if place.nbytes == 0:
            continue
        try:
            ordinal = driver.device_of(place.pointer)
            is_host = not place.known and driver.is_host(place.pointer)
        except CudaError as error:
            if error.code != _INVALID_VALUE:
                raise
            raise ConfigError(
                f"{name}[{index}] is {place.pointer:#x}, which is no device memory: "
                f"{error}"
            ) from error
        if is_host:
            raise ConfigError(
                f"{name}[{index}] is {place.pointer:#x}, which is memory of the host; "
                f"for that there is get_many_into"
            )
        if found is None:
            found = ordinal
        elif found != ordinal:
            raise ConfigError(
                f"{name}[{index}] is on device {ordinal}, others are on {found}; "
                f"make one call for each device"
            )
    return found


def no_overlap(places: Sequence[Place], name: str) -> None:
    """Refuse places that share bytes: which copy comes last would be chance."""
    order = sorted(
        (place.pointer, place.nbytes, index)
        for index, place in enumerate(places)
        if place.nbytes
    )
    for before, after in itertools.pairwise(order):
        if before[0] + before[1] > after[0]:
            raise ConfigError(
                f"{name}[{before[2]}] and {name}[{after[2]}] overlap: {before[0]:#x} + "
                f"{before[1]} bytes and {after[0]:#x}"
            )
