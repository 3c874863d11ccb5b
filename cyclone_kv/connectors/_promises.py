# SPDX-License-Identifier: Apache-2.0
"""What a lookup must not promise although the volume lists it.

P1  A block that could not be loaded is a miss for a while, or until it was stored anew:
    a request that was promised it and did not get it must not be promised it again at
    once.
P2  While loads are slower than computing the same tokens, nothing is promised.

`HitWatch` warns once when much was stored and nothing was ever found.  Threads may use
one object together where the class says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from cyclone_kv.connectors._common import human_bytes

__all__ = ["FailedBlocks", "HitWatch", "SlowLoads"]

_FAILED_SECONDS = 60.0
_FAILED_MAX = 1 << 16
_SLOW_SECONDS = 10.0
_SPEED_WEIGHT = 0.3  # of the newest load in the moving average
_SPEED_BYTES_MIN = 1 << 20  # smaller loads say nothing about speed
_USELESS_BYTES = 1 << 30  # stored without a single hit: something does not fit together

_Name = TypeVar("_Name", bound=Hashable)


class FailedBlocks(Generic[_Name]):
    """Blocks that could not be loaded lately (P1).  Any thread may use it."""

    def __init__(self) -> None:
        self._until: dict[_Name, float] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, name: _Name) -> bool:
        if not self._until:
            return False
        with self._lock:
            until = self._until.get(name)
            if until is None:
                return False
            if time.monotonic() < until:
                return True
            del self._until[name]
            return False

    def add(self, names: Iterable[_Name]) -> None:
        """Remember blocks that were not loaded."""
        until = time.monotonic() + _FAILED_SECONDS
        with self._lock:
            for name in names:
                self._until[name] = until
            while len(self._until) > _FAILED_MAX:
                del self._until[next(iter(self._until))]

    def discard(self, names: Iterable[_Name]) -> None:
        """Forget blocks that were stored anew."""
        if not self._until:
            return
        with self._lock:
            for name in names:
                self._until.pop(name, None)


class SlowLoads:
    """Whether loads are slower than computing the same tokens (P2).

    Any thread may use it; what two threads learn at once may count as one.  Without a
    speed to compare with, loads are never slow.
    """

    def __init__(self, tokens_per_second: float | None, logger: logging.Logger) -> None:
        self._tokens_per_second = tokens_per_second
        self._logger = logger
        self._speed: float | None = None
        self._until = 0.0

    def __bool__(self) -> bool:
        if not self._until:
            return False
        if time.monotonic() < self._until:
            return True
        self._until = 0.0  # the next load is measured again
        self._speed = None
        return False

    def learn(self, *, nbytes: int, seconds: float, bytes_per_token: float) -> None:
        """Take a load into account; `seconds` with the time that it waited."""
        if self._tokens_per_second is None or nbytes < _SPEED_BYTES_MIN:
            return
        speed = nbytes / max(seconds, 1e-9)
        old = speed if self._speed is None else self._speed
        self._speed = average = old + _SPEED_WEIGHT * (speed - old)
        needed = self._tokens_per_second * bytes_per_token
        if average < needed:
            if not self._until:
                self._logger.warning(
                    "cyclone_kv: loads run at %s/s and recomputing needs %s/s: lookups "
                    "are misses for %d s",
                    human_bytes(int(average)),
                    human_bytes(int(needed)),
                    int(_SLOW_SECONDS),
                )
            self._until = time.monotonic() + _SLOW_SECONDS


class HitWatch:
    """Warns once when 1 GiB was stored without a single hit.  Any thread may use it."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._stored_bytes = self._lookups = self._hits = 0
        self._warned = False

    def looked_up(self, lookups: int, hits: int) -> None:
        """Count lookups."""
        if not self._hits:  # one hit ends the watch
            with self._lock:
                self._lookups += lookups
                self._hits += hits

    def stored(self, nbytes: int) -> None:
        """Count what was stored; warn when it seems to be of no use."""
        if self._warned or self._hits:
            return
        with self._lock:
            self._stored_bytes += nbytes
            useless = self._stored_bytes > _USELESS_BYTES and self._lookups > 0
            if not useless or self._hits or self._warned:
                return
            self._warned = True
        self._logger.warning(
            "cyclone_kv: %s were stored and none of %d lookups found anything. "
            "That is normal while all prompts are new; otherwise compare the "
            "identity in the start-up lines, and the hash algorithm and "
            "PYTHONHASHSEED, of the engines that should share blocks",
            human_bytes(self._stored_bytes),
            self._lookups,
        )
