# SPDX-License-Identifier: Apache-2.0
"""What every connector does at its start, and how it survives its own faults.

A user's mistake (an unknown option, a volume that is too small, a disk that does not
answer) raises at start, in words.  After the start nothing may escape into the engine's
scheduler: a fault of the cache is a miss or a refused store, counted by `Faults`.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from types import FrameType
from typing import TYPE_CHECKING, Any

from cyclone_kv.config import CacheConfig
from cyclone_kv.errors import ConfigError, VolumeError

if TYPE_CHECKING:
    from cyclone_kv.cache import Cache

__all__ = [
    "CACHE_OPTIONS",
    "Faults",
    "human_bytes",
    "local_of_callers",
    "refuse_unknown",
    "self_check",
    "split_options",
    "startup_line",
]

CACHE_OPTIONS = tuple(field.name for field in fields(CacheConfig))
"""Options that every connector passes on to `CacheConfig`."""

_CHECK_BYTES_MAX = 1 << 20
_CHECK_ATTEMPTS = 3
_FRAMES_MAX = 64


def refuse_unknown(
    options: Collection[str], known: Collection[str], *, owner: str
) -> None:
    """Raise TypeError for the first option that `owner` does not have."""
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(str(name), sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {sorted(known)}"
            raise TypeError(f"{name!r} is not an option of {owner}; {hint}")


def split_options(
    options: Mapping[str, Any], own: Collection[str], *, owner: str
) -> tuple[dict[str, Any], CacheConfig]:
    """Part the options of a connector into its own and those of the cache.

    Unknown names are TypeErrors with a suggestion.  The cache gets the preset for KV
    blocks; without a capacity it opens an existing volume as it is.
    """
    refuse_unknown(options, {*own, *CACHE_OPTIONS}, owner=owner)
    mine = {name: value for name, value in options.items() if name in own}
    theirs = {name: value for name, value in options.items() if name not in own}
    return mine, CacheConfig.for_kv_tier(theirs.pop("capacity", None), **theirs)


def self_check(cache: Cache, nbytes: int) -> None:
    """Store, read and remove a block of random content; raise when that fails.

    `nbytes` is the size of the blocks that will be stored; at most 1 MiB of it is
    written.  One that can never fit is a ConfigError here and not a silent refusal of
    every later store.
    """
    limit = cache.info().payload_max_bytes
    if nbytes > limit:
        raise ConfigError(
            f"a block has {human_bytes(nbytes)}, and {cache.paths[0]} takes blocks of "
            f"at most {human_bytes(limit)}: give a larger capacity, fewer stripes, or "
            "smaller blocks"
        )
    key, data = os.urandom(32), os.urandom(min(nbytes, _CHECK_BYTES_MAX))
    # A policy may want to see a key twice before it takes it.
    if not any(cache.put(key, data) for _ in range(_CHECK_ATTEMPTS)):
        refusals = {
            name: count
            for name, count in cache.stats().process.items()
            if name.startswith("puts_") and name != "puts_stored" and count
        }
        raise VolumeError(
            f"the self-check could not store a block in {cache.paths[0]}: {refusals}"
        )
    target = bytearray(len(data))
    found = cache.get_into(key, target)
    cache.remove(key)
    if found != len(data) or target != data:
        raise VolumeError(
            f"the self-check read back something else than it stored in "
            f"{cache.paths[0]}: check the device"
        )


def startup_line(cache: Cache, namespace: str | None, facts: str) -> str:
    """Say in one line where the blocks are, how much room there is, and whose.

    `namespace` is None where identities are known only later; `facts` says so.
    """
    volume = cache.stats().volume
    paths = ", ".join(
        f"{path.path} ({path.file_system}, {human_bytes(path.free_bytes)} free beside "
        "it)"
        for path in cache.info().paths
    )
    line = (
        f"cyclone_kv: {paths}, mode {cache.mode}, "
        f"capacity {human_bytes(volume.capacity_bytes)}, "
        f"{human_bytes(volume.capacity_bytes - volume.resident_bytes)} of it unused, "
    )
    if namespace is None:
        return f"{line}{volume.entries} blocks of all identities; {facts}"
    return f"{line}{len(cache)} blocks of this identity; identity {namespace} ({facts})"


def local_of_callers(name: str, fits: Callable[[Any], bool]) -> Any | None:
    """Return the nearest local variable `name` of a caller that `fits`, or None.

    Engines build a connector deep inside their own start, and do not always hand it
    what its identity needs.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        if frame is None:
            break
        found = frame.f_locals.get(name)
        if found is not None and fits(found):
            return found
        frame = frame.f_back
    return None


def human_bytes(count: int) -> str:
    """Write a number of bytes for people.

    >>> human_bytes(5898240)
    '5.6 MiB'
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Faults:
    """Counts what went wrong, and logs the first fault of each kind with its traceback.

    Any thread may use it.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._count = 0

    @property
    def count(self) -> int:
        """Faults so far."""
        return self._count

    def note(self, where: str, error: BaseException) -> None:
        """Count a fault; `where` says in a few words what did not work."""
        kind = f"{where}: {type(error).__name__}"
        with self._lock:
            self._count += 1
            first = kind not in self._seen
            self._seen.add(kind)
        if first:
            self._logger.warning(
                "cyclone_kv: %s failed, which counts as a miss or a refused store "
                "(later faults of this kind are only counted): %s",
                where,
                error,
                exc_info=error,
            )
