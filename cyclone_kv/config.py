# SPDX-License-Identifier: Apache-2.0
"""The options of a cache, and human sizes."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from cyclone_kv.errors import ConfigError

__all__ = ["CacheConfig", "parse_size"]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_SIZE_MAX = 2**63 - 1
_UINT32_MAX = 2**32 - 1
_DIGITS_MAX = 4000  # of int(); Python refuses more
_IO_THREADS_MAX = 256  # here and below: the limits of the engine
_EVENTS_MIN, _EVENTS_MAX = 64, 2**24
_PAGE = 4096

_VERIFY = {"once": 0, "always": 1, "never": 2}
_ON_MISMATCH = {"raise": 0, "recreate": 1}
_ADMISSION = {"always": 0, "second-touch": 1, "adaptive": 2}
_EVICTION = {"clock": 0, "prefix": 1}

_Choice = TypeVar("_Choice", bound=str)


def parse_size(value: int | str, name: str = "size") -> int:
    """Return ``value`` in bytes.

    An ``int`` is a number of bytes. A string is a number with a unit: ``KiB``, ``MiB``,
    ``GiB`` and ``TiB`` are powers of 1024, ``KB``, ``MB``, ``GB`` and ``TB`` powers of
    1000; a number alone is bytes.  ``name`` appears in the message of an error.

    >>> parse_size("64GiB")
    68719476736
    >>> parse_size("1.5 MB")
    1500000
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(
            f"{name} is {value!r}; give a number of bytes as int, or a string "
            f'such as "64GiB"'
        )
    size = value if isinstance(value, int) else _parse_text(value, name)
    if not 0 <= size <= _SIZE_MAX:
        shown = _shown(value)
        raise ConfigError(f"{name} is {shown}; it must be between 0 and 2**63 - 1")
    return size


def _shown(value: object) -> str:
    """Return the repr of a value for a message, also where Python refuses to."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:60]}... ({len(text)} characters)"


def _parse_text(text: str, name: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS or len(text) > _DIGITS_MAX:
        hint = "write for example 64GiB (powers of 1024) or 64GB (powers of 1000)"
        raise ConfigError(f"{name} is {_shown(text)}, which is not a size; {hint}")
    number, unit = match[1], _UNITS[match[2].upper()]
    if "." not in number:
        return int(number) * unit
    whole, fraction = number.split(".")
    return int(whole) * unit + int(fraction) * unit // int(10 ** len(fraction))


def _choice(value: object, name: str, choices: Mapping[str, int]) -> int:
    if not isinstance(value, str) or value not in choices:
        allowed = " or ".join(f'"{choice}"' for choice in choices)
        raise ConfigError(f"{name} is {_shown(value)}; it must be {allowed}")
    return choices[value]


def _whole(value: object, name: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an int")
    if not low <= value <= high:
        shown = _shown(value)
        raise ConfigError(f"{name} is {shown}; it must be between {low} and {high}")
    return value


def _milliseconds(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number of seconds")
    if not 0.001 <= value <= 4_000_000:
        shown = _shown(value)
        raise ConfigError(f"{name} is {shown}; it must be 0.001 to 4 000 000 seconds")
    return int(value * 1000)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What a cache should be like.  Unknown names are ``TypeError``.

    Sizes are bytes as ``int``, or strings such as ``"64GiB"``; they are kept as
    ``int``.  Times are seconds.  Geometry (capacity, stripes, expected_object_size)
    matters when a volume is created; an existing volume keeps its own, and a capacity
    that differs from it is a ``MismatchError``.

    >>> CacheConfig(capacity="1GiB").capacity
    1073741824
    """

    capacity: int | str | None = None
    """Room for payloads, of all paths together, each taking an equal share (give pairs
    of path and capacity to ``Cache.open`` for unequal ones).  All of it is allocated at
    creation.  ``None`` takes an existing volume as it is and creates none."""

    expected_object_size: int | str = 0
    """Typical payload: decides how many blocks can be named.  0 takes 64 KiB."""

    stripes: int = 0
    """Areas with a lock of their own, per path.  0 chooses by capacity."""

    verify: Literal["once", "always", "never"] = "once"
    """When payload checksums are checked: at the first read of each block by anybody,
    at each read, or never for blocks stored since the volume was last unused (older
    ones are checked once, since a crash may have torn them)."""

    on_mismatch: Literal["raise", "recreate"] = "raise"
    """What to do with an existing volume of another geometry or format."""

    admission: Literal["always", "second-touch", "adaptive"] = "always"
    """Which blocks a full volume takes in: all; those whose key was refused or evicted
    not long ago; or whichever of the two would have missed less lately.  A refused
    ``put`` returns ``False``.  The first handle of a process decides for all its
    handles."""

    eviction: Literal["clock", "prefix"] = "clock"
    """Which block a full volume overwrites: the next one that is cold; or one that
    promises little among those that no stored block of the same prefix needs, which
    costs 32 bytes of memory a block and refuses blocks by itself, whatever
    ``admission`` says.  The first process that opens the volume decides for all, until
    all have closed it."""

    write_behind: bool = True
    """Start write-back of each block when it is stored."""

    sync_interval: float | None = 30.0
    """Seconds between background syncs; ``None`` never syncs by itself."""

    open_timeout: float = 10.0
    """Seconds to wait for another process that is creating the volume."""

    io_threads: int = 0
    """Threads of the batch calls, of each volume and process.  0 takes 4."""

    page_table_budget: int | str = 0
    """Memory for the page tables of views.  0 takes 64 MiB."""

    event_capacity: int = 0
    """Events kept for ``Cache.events``; a power of two.  0 takes 16 384."""

    file_mode: int = 0o600
    """Permission bits of created files."""

    shm_dir: str | os.PathLike[str] | None = None
    """Directory of the shared region, best on tmpfs; ``None`` is beside the volume."""

    degraded: bool = False
    """Open although members of the set of paths are missing."""

    allow_shared_directory: bool = False
    """Accept directories that others can write to, and files of other users."""

    allow_network_fs: bool = False
    """Accept NFS, FUSE and the like, where a peer can pull the file away."""

    allow_sparse: bool = False
    """Accept a file system that cannot reserve space: a full disk then fails puts."""

    sigbus_guard: bool = False
    """Turn pages of views that the device cannot deliver into counted zeros, instead of
    a SIGBUS."""

    def __post_init__(self) -> None:
        """Check every value; raise ConfigError or TypeError."""
        for name in ("capacity", "expected_object_size", "page_table_budget"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_size(value, name))
        if self.capacity == 0:
            raise ConfigError(
                'capacity is 0; give the bytes that the cache may hold, such as "64GiB"'
                ", or leave it out to open an existing volume as it is"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise TypeError(f"{field.name} is {value!r}; it must be True or False")
        self._engine_options()

    @classmethod
    def for_kv_tier(cls, capacity: int | str, **overrides: Any) -> CacheConfig:
        """Return the preset for KV blocks of LLM inference.

        Blocks of 64 KiB to 32 MiB are written behind, synced twice a minute, and
        checked at their first read.  A full cache refuses blocks (``put`` returns
        ``False``) when that has lately made for fewer misses.  ``overrides`` are fields
        of this class.

        >>> CacheConfig.for_kv_tier("64GiB", sync_interval=60).write_behind
        True
        """
        preset: dict[str, Any] = {
            "capacity": capacity,
            "expected_object_size": 0,
            "verify": "once",
            "admission": "adaptive",
            "write_behind": True,
            "sync_interval": 30.0,
        }
        return cls.from_dict(preset | overrides)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheConfig:
        """Make a configuration from names and values, as ``to_dict`` returns them."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {known}"
                raise TypeError(f"{name!r} is not an option of CacheConfig; {hint}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return all options; sizes are int, paths str, so that JSON can hold them."""
        values = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        if self.shm_dir is not None:
            values["shm_dir"] = os.fspath(self.shm_dir)
        return values

    def replace(self, **changes: Any) -> CacheConfig:
        """Return a copy with some options changed."""
        return self.from_dict(self.to_dict() | changes)

    def _engine_options(self) -> dict[str, int | bytes]:
        """Return the options as the engine names them, without paths and mode."""
        options: dict[str, int | bytes] = {
            "expected_object_bytes": _object_size(self.expected_object_size),
            "stripe_count": _whole(self.stripes, "stripes", 0, _UINT32_MAX),
            "verify": _choice(self.verify, "verify", _VERIFY),
            "on_mismatch": _choice(self.on_mismatch, "on_mismatch", _ON_MISMATCH),
            "admission": _choice(self.admission, "admission", _ADMISSION),
            "eviction": _choice(self.eviction, "eviction", _EVICTION),
            "write_behind": self.write_behind,
            "sync_interval_ms": _UINT32_MAX
            if self.sync_interval is None
            else _milliseconds(self.sync_interval, "sync_interval"),
            "open_timeout_ms": _milliseconds(self.open_timeout, "open_timeout"),
            "io_threads": _whole(self.io_threads, "io_threads", 0, _IO_THREADS_MAX),
            "page_table_budget_bytes": parse_size(self.page_table_budget),
            "event_capacity": _event_capacity(self.event_capacity),
            "file_mode": _file_mode(self.file_mode),
            "degraded": self.degraded,
            "allow_shared_directory": self.allow_shared_directory,
            "allow_network_fs": self.allow_network_fs,
            "allow_sparse": self.allow_sparse,
            "sigbus_guard": self.sigbus_guard,
        }
        if self.shm_dir is not None:
            options["shm_directory"] = encode_path(self.shm_dir, "shm_dir")
        return options


def _object_size(value: int | str) -> int:
    size = parse_size(value, "expected_object_size")
    if 0 < size < _PAGE:
        raise ConfigError(
            f"expected_object_size is {size}; every block takes whole pages, so give "
            f"{_PAGE} at least, or 0 for the default"
        )
    return size


def _event_capacity(value: int) -> int:
    _whole(value, "event_capacity", 0, _EVENTS_MAX)
    if value & (value - 1) or 0 < value < _EVENTS_MIN:
        near = max(_EVENTS_MIN, 1 << value.bit_length())
        raise ConfigError(
            f"event_capacity is {value}; it must be a power of two from {_EVENTS_MIN} "
            f"to {_EVENTS_MAX}, such as {min(near, _EVENTS_MAX)}, or 0 for the default"
        )
    return value


def _file_mode(value: int) -> int:
    if isinstance(value, int) and not 0o400 <= value <= 0o777:
        shown = oct(value) if value.bit_length() <= 32 else _shown(value)
        raise ConfigError(f"file_mode is {shown}; it must be between 0o400 and 0o777")
    return _whole(value, "file_mode", 0o400, 0o777)


def encode_path(value: object, name: str = "path") -> bytes:
    """Return a path as the engine takes it, with ``~`` expanded.

    ``str`` and ``os.PathLike[str]`` are accepted.  ``bytes`` are not: they are more
    often a key in the wrong place than a path (use ``os.fsdecode``).
    """
    if not isinstance(value, (str, os.PathLike)):
        hint = " (use os.fsdecode)" if isinstance(value, bytes) else ""
        raise TypeError(f"{name} is {value!r}; it must be str or os.PathLike{hint}")
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(f"{name} is {path!r}; it must be a str path (use os.fsdecode)")
    if not path:
        raise ConfigError(f"{name} is empty; name a file, such as /nvme/kv.cyc")
    if "\0" in path:
        raise ConfigError(f"{name} is {path!r}; a path cannot contain NUL")
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", path)
    if scheme is not None:
        raise ConfigError(
            f"{name} is {path!r}, which looks like a URL; give a plain path, such as "
            f"{'/' + path[scheme.end() :].lstrip('/')!r}"
        )
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ConfigError(
            f"{name} is {path!r}, and there is no such user; write ./{path} for a file "
            f"with that name"
        )
    return os.fsencode(expanded)
