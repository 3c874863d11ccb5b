# SPDX-License-Identifier: Apache-2.0
"""Remember from lookups which block stands before which in its prefix.

An engine looks up a whole prompt, its head first, before it stores any of it; the
stores that follow name blocks in pieces, and blocks of several prompts in one call.
What was learned from the lookup says how they hang together, so that a store can name
its chain and the tail of a prefix is evicted before its head.

R1  Memory is bounded: of the keys that were looked up, the newest are remembered.
R2  Forgetting is harmless: blocks without a known predecessor begin a chain.

Any thread may use it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chain", "Predecessors"]

_KEYS_MAX = 1 << 15


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive blocks of one prefix: places in a batch, and what stands before."""

    places: list[int]
    parent: bytes | None


class Predecessors:
    """What stands before a block, of the blocks that were looked up last."""

    def __init__(self, limit: int = _KEYS_MAX) -> None:
        self._limit = limit
        self._before: dict[bytes, bytes | None] = {}
        self._lock = threading.Lock()

    def learn(self, keys: Sequence[bytes], *, parent: bytes | None = None) -> None:
        """Take in the keys of a prefix, its head first; `parent` stands before them."""
        with self._lock:
            before = parent
            for key in keys:
                self._before.pop(key, None)  # to the end, where the newest are
                self._before[key] = before
                before = key
            while len(self._before) > self._limit:
                del self._before[next(iter(self._before))]

    def before(self, key: bytes) -> bytes | None:
        """Return the key before `key`, if it is known."""
        with self._lock:
            return self._before.get(key)

    def chains(self, keys: Sequence[bytes]) -> list[Chain]:
        """Part a batch into chains, in an order in which parents come first."""
        with self._lock:
            before = [self._before.get(key) for key in keys]
        ends: dict[bytes, Chain] = {}
        chains = []
        for place, (key, parent) in enumerate(zip(keys, before, strict=True)):
            chain = ends.pop(parent, None) if parent is not None else None
            if chain is None:
                chain = Chain([], parent)
                chains.append(chain)
            chain.places.append(place)
            ends[key] = chain
        return chains
