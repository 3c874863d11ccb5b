# SPDX-License-Identifier: Apache-2.0
"""What the methods of a cache return: plain, immutable values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from cyclone_kv import _core

__all__ = [
    "Counters",
    "EntryInfo",
    "Event",
    "Events",
    "Info",
    "PathInfo",
    "Stats",
    "VerifyReport",
]


class Counters(Mapping[str, int]):
    """One set of statistics: attributes and a read-only mapping with the same names.

    ``_core.STATISTICS`` lists each name with its kind ("counter" or "gauge"), its unit
    and a sentence.
    """

    __slots__ = ("_values",)
    _values: dict[str, int]

    def __init__(self, values: Mapping[str, int]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> int:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"there is no statistic {name!r}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("statistics are read-only")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("statistics are read-only")

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.items() if value)
        return f"Counters({values})"

    def __reduce__(self) -> tuple[type[Counters], tuple[dict[str, int]]]:
        return Counters, (dict(self._values),)


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a cache at one moment."""

    volume: Counters
    """Of all processes, for the life of the shared region."""

    process: Counters
    """What this process did since it opened the volume; gauges as in ``volume``."""


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``Cache.verify`` found."""

    entries_checked: int
    bytes_checked: int
    damaged_payloads: int
    """Blocks whose checksum differs."""
    unreadable: int
    """Blocks that the device did not deliver."""
    structure_faults: int
    """Broken invariants of table, index and page map."""
    repaired: int
    first_fault: str
    """What was wrong first, in words; empty when nothing was."""

    @property
    def ok(self) -> bool:
        """True when nothing was wrong."""
        return not (self.damaged_payloads or self.unreadable or self.structure_faults)


class Event(NamedTuple):
    """One change of what is stored."""

    number: int
    """Starts at 1 and grows by one."""
    kind: Literal["stored", "removed", "cleared"]
    """Whether the block is there, if it is the last event of the key so far."""
    key: bytes
    """32 bytes: the key as given, or its SHA-256 when ``digested``."""
    digested: bool
    namespace_tag: bytes
    """Which namespace; 16 zeros for the default one."""


class Events(NamedTuple):
    """A piece of the stream of events."""

    items: tuple[Event, ...]
    lost: int
    """Events after ``since`` that are gone, or may be."""
    last: int
    """What to pass as ``since`` next."""


class EntryInfo(NamedTuple):
    """One stored block, as ``Cache.ls`` lists it."""

    key: bytes
    """32 bytes: the key as given, or its SHA-256 when ``digested``."""
    namespace_tag: bytes
    digested: bool
    verified: bool
    """Its checksum was checked since the shared region was built."""
    heat: int
    """0 to 2: passes of the eviction cursor that it will survive."""
    path_index: int
    header_nbytes: int
    offset: int
    """Of the payload in the volume file."""
    nbytes: int
    sequence: int
    """Grows with every stored block of the volume."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PathInfo:
    """One file of the volume."""

    path: str
    file_system: str
    file_bytes: int
    data_bytes: int
    data_offset: int
    stripes: int
    entries_max: int
    free_bytes: int
    """Of the file system."""
    failed: bool
    """Out of use after an error; see ``Cache.recover``."""
    detached: bool
    """The file was removed or replaced while open."""
    present: bool
    """False for a member that is missing from a degraded set."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """What the volume is like."""

    set_id: bytes
    format_version: int
    payload_max_bytes: int
    """The largest block that can be stored."""
    overhead_bytes: int
    """Headers, checkpoints and tables of all files."""
    shm_bytes: int
    shm_path: str | None
    crc32c_kernel: str
    """Which implementation of the checksum runs."""
    paths: tuple[PathInfo, ...]


def make_stats(raw: tuple[dict[str, int], dict[str, int]]) -> Stats:
    """Wrap what ``_core`` returns."""
    return Stats(Counters(raw[0]), Counters(raw[1]))


_KINDS: dict[int, Literal["stored", "removed", "cleared"]] = {
    1: "stored",
    2: "removed",
    3: "cleared",
}


def make_events(raw: tuple[list[_core._RawEvent], int, int]) -> Events:
    """Wrap what ``_core`` returns."""
    rows, lost, last = raw
    items = tuple(
        Event(number, _KINDS[kind], key, digested, tag)
        for number, kind, key, digested, tag in rows
        if kind in _KINDS
    )
    return Events(items, lost, last)


def make_info(raw: _core._RawInfo) -> Info:
    """Wrap what ``_core`` returns."""
    return Info(
        set_id=raw["set_id"],
        format_version=raw["format_version"],
        payload_max_bytes=raw["payload_max_bytes"],
        overhead_bytes=raw["overhead_bytes"],
        shm_bytes=raw["shm_bytes"],
        shm_path=raw["shm_path"],
        crc32c_kernel=raw["crc32c_kernel"],
        paths=tuple(PathInfo(**path) for path in raw["paths"]),
    )
