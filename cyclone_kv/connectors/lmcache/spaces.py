# SPDX-License-Identifier: Apache-2.0
"""The namespaces of one volume, opened as kinds of objects turn up.

LMCache tells a plugin at its start neither which models it will serve nor what their
objects look like; every call names it.  So the volume is opened and checked at the
start, and a namespace at the first object of its kind.

Any thread may use it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from cyclone_kv.cache import Cache
from cyclone_kv.config import CacheConfig
from cyclone_kv.connectors._common import Faults, human_bytes, self_check, startup_line
from cyclone_kv.connectors._identity import Identity

__all__ = ["Space", "Spaces"]

_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Space:
    """A handle to the blocks of one identity."""

    cache: Cache
    identity: Identity


class Spaces:
    """Opens the volume, and later a handle for each identity.

    `object_bytes` is the largest object that is known at the start, for the self-check.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        config: CacheConfig,
        *,
        logger: logging.Logger,
        faults: Faults,
        object_bytes: int | None = None,
    ) -> None:
        self._path, self._config = path, config
        self._logger, self._faults = logger, faults
        self._lock = threading.Lock()
        self._closed = False
        self._spaces: dict[tuple[Hashable, ...], Space | None] = {}
        self.root = Cache.open(path, config)
        """A handle to the volume, for what concerns all namespaces."""
        try:
            self_check(self.root, object_bytes or _SAMPLE_BYTES)
        except BaseException:
            self.root.close()
            raise
        self._logger.info(
            "%s",
            startup_line(self.root, None, "each identity is named at its first object"),
        )

    def get(
        self, name: tuple[Hashable, ...], make: Callable[[], Identity]
    ) -> Space | None:
        """Return the space called `name`; make its identity when it is new.

        The name begins with that of the model.  None when it failed: objects of this
        kind are then misses and refused stores until the end of the process, which was
        logged once for the model.
        """
        try:
            return self._spaces[name]
        except KeyError:
            pass
        with self._lock:
            if name in self._spaces or self._closed:
                return self._spaces.get(name)
            space = None
            try:
                space = self._open(make())
            except Exception as error:
                self._faults.note(f"opening a namespace for {name[0]}", error)
            self._spaces[name] = space
            return space

    def known(self) -> list[tuple[Any, Space]]:
        """Return the name and the space of each kind that turned up so far."""
        with self._lock:
            return [(name, s) for name, s in self._spaces.items() if s is not None]

    def close(self) -> None:
        """Close every handle.  Idempotent."""
        with self._lock:
            self._closed = True
            for space in self._spaces.values():
                if space is not None:
                    space.cache.close()
        self.root.close()

    def _open(self, identity: Identity) -> Space:
        namespace = identity.namespace()
        for space in self._spaces.values():  # two names of one identity
            if space is not None and space.identity == identity:
                return space
        cache = Cache.open(
            self._path,
            self._config,
            namespace=namespace,
        )
        self._logger.info(
            "cyclone_kv: identity %s: model %s, weights %s, %s, %d tokens a block, "
            "shard %d of %d, group %d; %d blocks and %s free for new ones in %s",
            namespace,
            identity.model,
            identity.weights[:24],
            identity.kv_dtype,
            identity.block_tokens,
            identity.tp_rank,
            identity.tp_size,
            identity.group,
            len(cache),
            human_bytes(_unused(cache)),
            cache.paths[0],
        )
        return Space(cache, identity)


def _unused(cache: Cache) -> int:
    volume = cache.stats().volume
    return volume.capacity_bytes - volume.resident_bytes
