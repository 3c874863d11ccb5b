# SPDX-License-Identifier: Apache-2.0
"""Every exception that cyclone_kv raises.

* CycloneError
  + ConfigError (ValueError)          an option or an argument makes no sense
  + ValueTooLargeError (ValueError)   this block can never fit
  + ClosedError (ValueError)          the cache was closed
    - ForkedError                     ... or was opened before ``fork()``
  + ReadOnlyError (PermissionError)   the cache was opened with ``mode="r"``
  + OutOfMemoryError (MemoryError)
  + CudaError (RuntimeError)          a call of the CUDA driver failed
    - CudaUnavailableError            there is no driver, or it does not start
  + VolumeError (OSError)             the volume as a whole cannot be used
    - VolumeNotFoundError (FileNotFoundError)
    - VolumeAccessError (PermissionError)
    - UnsafePathError (PermissionError)  a link, or others may write there
    - FormatError                     not a volume, or of a version we cannot read
    - MismatchError                   an existing volume has another geometry
    - MissingPathError                a member of the set of paths is missing
    - OpenTimeoutError (TimeoutError) another process kept the volume locked
    - NoSlotError                     64 processes have the volume open
    - NoNamespaceError                the volume already has 256 namespaces
    - NoSpaceError                    the file system is too full
    - UnsupportedError                the file system or platform cannot do this

A missing, evicted or damaged block is not an exception, it is a miss; a block that was
not stored is a ``False``.  ``BufferError`` (the builtin) is raised where memory cannot
be given back because a memoryview or an array of it is still in use.
"""

from __future__ import annotations

import errno as _errno

from cyclone_kv import _core

__all__ = [
    "ClosedError",
    "ConfigError",
    "CudaError",
    "CudaUnavailableError",
    "CycloneError",
    "ForkedError",
    "FormatError",
    "MismatchError",
    "MissingPathError",
    "NoNamespaceError",
    "NoSlotError",
    "NoSpaceError",
    "OpenTimeoutError",
    "OutOfMemoryError",
    "ReadOnlyError",
    "UnsafePathError",
    "UnsupportedError",
    "ValueTooLargeError",
    "VolumeAccessError",
    "VolumeError",
    "VolumeNotFoundError",
]


class CycloneError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(CycloneError, ValueError):
    """An option, an argument, or a combination of them, is invalid."""


class ValueTooLargeError(CycloneError, ValueError):
    """The block could never be stored in this volume, however empty it were."""


class ClosedError(CycloneError, ValueError):
    """The cache was closed."""


class ForkedError(ClosedError):
    """The cache was opened before ``fork()``; open it again in the child."""


class ReadOnlyError(CycloneError, PermissionError):
    """The cache was opened with ``mode="r"``."""


class OutOfMemoryError(CycloneError, MemoryError):
    """The engine could not allocate memory."""


class CudaError(CycloneError, RuntimeError):
    """A call of the CUDA driver failed; ``call`` names it, ``code`` is its CUresult."""

    def __init__(self, text: str, *, call: str = "", code: int = 0) -> None:
        super().__init__(text)
        self.call = call
        self.code = code


class CudaUnavailableError(CudaError):
    """There is no CUDA driver to be had; ``register_cuda`` says so without raising."""


class VolumeError(CycloneError, OSError):
    """The volume as a whole cannot be used; ``errno`` is set where a call failed."""


class VolumeNotFoundError(VolumeError, FileNotFoundError):
    """The volume, or the directory it should be created in, does not exist."""


class VolumeAccessError(VolumeError, PermissionError):
    """The operating system denied access to the volume."""


class UnsafePathError(VolumeError, PermissionError):
    """The path is a link or no regular file, or others may write to its directory."""


class FormatError(VolumeError):
    """The file is not a volume, or of a version that this package cannot read."""


class MismatchError(VolumeError):
    """The volume exists with another geometry than the one asked for."""


class MissingPathError(VolumeError):
    """A member of the set of paths is missing (see ``CacheConfig.degraded``)."""


class OpenTimeoutError(VolumeError, TimeoutError):
    """Another living process kept the volume locked for too long."""


class NoSlotError(VolumeError):
    """As many processes as a volume can have are using it already."""


class NoNamespaceError(VolumeError):
    """The volume has as many namespaces as it can have."""


class NoSpaceError(VolumeError):
    """The file system has too little room for the volume."""


class UnsupportedError(VolumeError):
    """The file system or the platform cannot do what was asked for."""


# Status of the engine (by its name without the prefix) to exception: the only table.
BY_STATUS: dict[str, type[CycloneError]] = {
    "INVALID": ConfigError,
    "OS": VolumeError,
    "NO_MEMORY": OutOfMemoryError,
    "FORMAT": FormatError,
    "MISMATCH": MismatchError,
    "UNSAFE_PATH": UnsafePathError,
    "TIMEOUT": OpenTimeoutError,
    "CLOSED": ClosedError,
    "FORKED": ForkedError,
    "TOO_LARGE": ValueTooLargeError,
    "NO_SLOT": NoSlotError,
    "NO_NAMESPACE": NoNamespaceError,
    "READ_ONLY": ReadOnlyError,
    "NO_SPACE": NoSpaceError,
    "UNSUPPORTED": UnsupportedError,
    "MISSING_PATH": MissingPathError,
}

# A failed system call, where its errno says more than "failed".
_BY_ERRNO: dict[int, type[VolumeError]] = {
    _errno.ENOENT: VolumeNotFoundError,
    _errno.ENOTDIR: VolumeNotFoundError,
    _errno.EACCES: VolumeAccessError,
    _errno.EPERM: VolumeAccessError,
    _errno.EROFS: VolumeAccessError,
    _errno.ENOSPC: NoSpaceError,
    _errno.EDQUOT: NoSpaceError,
}


def from_status(status: int, os_errno: int, text: str) -> CycloneError:
    """Make the exception for a negative status of the engine.

    Called by the extension.  ``os_errno`` is 0 when no system call was involved.
    """
    kind: type[CycloneError] = CycloneError
    for name, (value, _) in _core.STATUSES.items():
        if value == status:
            kind = BY_STATUS[name.removeprefix("CKV_E_")]
    if kind is VolumeError:
        kind = _BY_ERRNO.get(os_errno, VolumeError)
    if issubclass(kind, OSError) and os_errno != 0:
        return kind(os_errno, text)
    return kind(text)
