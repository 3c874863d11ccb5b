# SPDX-License-Identifier: Apache-2.0
"""An embedded storage engine for the KV caches of LLM inference.

>>> from cyclone_kv import Cache, CacheConfig
>>> with Cache.open("kv.cyc", CacheConfig.for_kv_tier(capacity="64MiB")) as cache:
...     cache.put(b"block 1", b"payload")
...     view = cache.get(b"block 1")
True
"""

from __future__ import annotations

from importlib import import_module as _import_module
from importlib import metadata as _metadata

try:
    _import_module("cyclone_kv._core")
except ModuleNotFoundError:
    raise ImportError(
        f"{__path__[0]} has no compiled extension; if this is a checkout that hides "
        f"the installed package, start Python in another folder, or build the "
        f"extension in the checkout: pip install --editable ."
    ) from None

from cyclone_kv.cache import Cache
from cyclone_kv.config import CacheConfig, parse_size
from cyclone_kv.errors import (
    ClosedError,
    ConfigError,
    CudaError,
    CudaUnavailableError,
    CycloneError,
    ForkedError,
    FormatError,
    MismatchError,
    MissingPathError,
    NoNamespaceError,
    NoSlotError,
    NoSpaceError,
    OpenTimeoutError,
    OutOfMemoryError,
    ReadOnlyError,
    UnsafePathError,
    UnsupportedError,
    ValueTooLargeError,
    VolumeAccessError,
    VolumeError,
    VolumeNotFoundError,
)
from cyclone_kv.handles import Entry, Place, Slot
from cyclone_kv.results import (
    Counters,
    EntryInfo,
    Event,
    Events,
    Info,
    PathInfo,
    Stats,
    VerifyReport,
)

__all__ = [
    "Cache",
    "CacheConfig",
    "ClosedError",
    "ConfigError",
    "Counters",
    "CudaError",
    "CudaUnavailableError",
    "CycloneError",
    "Entry",
    "EntryInfo",
    "Event",
    "Events",
    "ForkedError",
    "FormatError",
    "Info",
    "MismatchError",
    "MissingPathError",
    "NoNamespaceError",
    "NoSlotError",
    "NoSpaceError",
    "OpenTimeoutError",
    "OutOfMemoryError",
    "PathInfo",
    "Place",
    "ReadOnlyError",
    "Slot",
    "Stats",
    "UnsafePathError",
    "UnsupportedError",
    "ValueTooLargeError",
    "VerifyReport",
    "VolumeAccessError",
    "VolumeError",
    "VolumeNotFoundError",
    "parse_size",
]


def __getattr__(name: str) -> str:
    """Read ``__version__`` from the metadata of the installation when asked for."""
    if name == "__version__":
        return _metadata.version("cyclone-kv")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
