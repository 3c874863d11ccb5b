# SPDX-License-Identifier: Apache-2.0
"""Follow which of the announced blocks are gone, whoever evicted them.

A connector tells a router "this node holds block k".  Any process that has the volume
open may evict k, so the end of the announcement has to come from the volume's own
events.  The events say that something happened to a key; the table says what is true
now:

E1  A block is announced only if the table holds it at that moment.
E2  A key is reported as gone if and only if it was announced, an event says that a
    version of it was removed, and the table does not hold it now.  So neither an event
    that is older than the announcement nor a block stored again can mislead.
E3  When events were lost or a namespace was cleared, every announced key is looked up
    again, a piece at each call.

Not thread-safe: the scheduler's thread owns it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from cyclone_kv.cache import Cache

__all__ = ["AnnouncedBlocks", "event_key"]

_POLL_LIMIT = 4096
_RECHECK_KEYS = 4096
_Name = TypeVar("_Name")


def event_key(key: bytes) -> tuple[bytes, bool]:
    """Return how events name a key: its 32 bytes, and whether they are a digest."""
    return (key, False) if len(key) == 32 else (hashlib.sha256(key).digest(), True)


class AnnouncedBlocks(Generic[_Name]):
    """What this process announced of one volume, and what of it is gone.

    `caches` has the handle of each namespace that the connector uses, at least one;
    `add` takes further ones.  `_Name` is the engine's own name of a block, which comes
    back when the block is gone.
    """

    def __init__(self, caches: Iterable[Cache]) -> None:
        self._caches = {cache.namespace_tag: cache for cache in caches}
        self._announced: dict[bytes, dict[tuple[bytes, bool], tuple[bytes, _Name]]] = {
            tag: {} for tag in self._caches
        }
        self._recheck: list[tuple[bytes, tuple[bytes, bool]]] = []
        self.lost = 0
        """Events that were overwritten before they were read."""
        self._last = self._any().events(None).last

    def __len__(self) -> int:
        return sum(map(len, self._announced.values()))

    def add(self, cache: Cache) -> None:
        """Follow a further namespace; nothing happens if it is followed already."""
        self._caches.setdefault(cache.namespace_tag, cache)
        self._announced.setdefault(cache.namespace_tag, {})

    def announce(self, cache: Cache, blocks: dict[_Name, bytes]) -> list[_Name]:
        """Take over the blocks of `blocks` that are stored now; return their names."""
        announced = self._announced[cache.namespace_tag]
        found = cache.contains_many(list(blocks.values()))
        present = []
        for (name, key), there in zip(blocks.items(), found, strict=True):
            if there:
                announced[event_key(key)] = (key, name)
                present.append(name)
        return present

    def forget(self) -> None:
        """Drop everything: whoever was told has been told to forget it."""
        for announced in self._announced.values():
            announced.clear()
        self._recheck.clear()

    def gone(self) -> list[_Name]:
        """Read new events; return the names of announced blocks that are gone."""
        events = self._any().events(self._last, limit=_POLL_LIMIT)
        self._last = events.last
        suspects: dict[bytes, set[tuple[bytes, bool]]] = {}
        if events.lost:
            self.lost += events.lost
            self._recheck_all(self._caches)
        for event in events.items:
            announced = self._announced.get(event.namespace_tag)
            if announced is None:
                continue
            if event.kind == "cleared":
                self._recheck_all([event.namespace_tag])
            elif event.kind == "removed" and (event.key, event.digested) in announced:
                suspects.setdefault(event.namespace_tag, set()).add(
                    (event.key, event.digested)
                )
        for tag, key in self._recheck[-_RECHECK_KEYS:]:
            if key in self._announced[tag]:
                suspects.setdefault(tag, set()).add(key)
        del self._recheck[-_RECHECK_KEYS:]
        return [
            name for tag, keys in suspects.items() for name in self._drop(tag, keys)
        ]

    def _drop(self, tag: bytes, suspects: set[tuple[bytes, bool]]) -> list[_Name]:
        announced = self._announced[tag]
        keys = list(suspects)
        found = self._caches[tag].contains_many([announced[key][0] for key in keys])
        return [
            announced.pop(key)[1]
            for key, there in zip(keys, found, strict=True)
            if not there
        ]

    def _recheck_all(self, tags: Iterable[bytes]) -> None:
        chosen = set(tags)
        self._recheck = [item for item in self._recheck if item[0] not in chosen]
        self._recheck += [(tag, key) for tag in chosen for key in self._announced[tag]]

    def _any(self) -> Cache:
        return next(iter(self._caches.values()))
