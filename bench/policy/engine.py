# SPDX-License-Identifier: Apache-2.0
"""A stream replayed through the real engine, with payloads of a few KiB."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.policy.native import Stream
from cyclone_kv import Cache, CacheConfig

__all__ = ["EngineOutcome", "replay_engine"]

_PAGE = 4096
_CAPACITY_MIN = 16 << 20
_STRIPED_FROM = 256 << 20


@dataclasses.dataclass(frozen=True)
class EngineOutcome:
    """What a replay through the engine counted."""

    accesses: int
    hits: int
    offers: int
    writes: int
    capacity: int
    """Blocks that the volume has room for."""
    stripes: int

    @property
    def hit_ratio(self) -> float:
        """Hits of all accesses."""
        return self.hits / self.accesses if self.accesses else 0.0


def _keys(universe: int) -> list[bytes]:
    return [
        hashlib.blake2b(block.to_bytes(8, "little"), digest_size=32).digest()
        for block in range(universe)
    ]


def _config(blocks: int, payload: int, **options: Any) -> CacheConfig:
    capacity = blocks * payload
    return CacheConfig(
        capacity=capacity,
        expected_object_size=payload,
        sync_interval=None,
        write_behind=False,
        **options,
    )


def _payload_bytes(blocks: int) -> int:
    payload = _PAGE
    while blocks * payload < _CAPACITY_MIN:
        payload *= 2
    return payload


def replay_engine(
    stream: Stream,
    capacity: int,
    *,
    folder: Path | None = None,
    from_request: int = 0,
    **options: Any,
) -> EngineOutcome:
    """Replay requests through a new volume for ``capacity`` blocks.

    A request asks for its longest prefix, reads it tail first, and offers the rest as a
    chain.  ``options`` are those of ``CacheConfig``.  The volume is made in ``folder``
    (default: ``/dev/shm`` where there is one) and removed.
    """
    payload = _payload_bytes(capacity)
    config = _config(capacity, payload, **options)
    keys = _keys(stream.universe)
    if folder is None and Path("/dev/shm").is_dir():
        folder = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="replay-", dir=folder) as scratch,
        Cache.open(str(Path(scratch, "kv.cyc")), config) as cache,
    ):
        replayer = _Replayer(cache, keys, b"\x5a" * payload)
        replayer.run(stream, from_request)
        stripes = config.stripes or (1 if capacity * payload < _STRIPED_FROM else 4)
        return EngineOutcome(
            accesses=replayer.accesses,
            hits=replayer.hits,
            offers=replayer.offers,
            writes=replayer.writes,
            capacity=capacity // stripes * stripes,
            stripes=stripes,
        )


class _Replayer:
    """Counts while it asks and stores."""

    def __init__(self, cache: Cache, keys: list[bytes], payload: bytes) -> None:
        self._cache = cache
        self._keys = keys
        self._payload = payload
        self._buffer = memoryview(bytearray(len(payload)))
        self.accesses = self.hits = self.offers = self.writes = 0

    def run(self, stream: Stream, from_request: int) -> None:
        """Replay all requests; those before ``from_request`` are not counted."""
        blocks = stream.blocks.tolist()
        ends = (
            range(1, len(blocks) + 1) if stream.ends is None else stream.ends.tolist()
        )
        begin = 0
        for number, end in enumerate(ends):
            if number == from_request:
                self.accesses = self.hits = self.offers = self.writes = 0
            self._request([self._keys[block] for block in blocks[begin:end]])
            begin = end

    def _request(self, keys: Sequence[bytes]) -> None:
        found = self._cache.longest_prefix(keys)
        for key in reversed(keys[:found]):
            if self._cache.get_into(key, self._buffer) is None:
                raise RuntimeError("a block of the longest prefix is not there")
        missing = [(key, self._payload) for key in keys[found:]]
        self.accesses += len(keys)
        self.hits += found
        if not missing:
            return
        offers = sum(not here for here in self._cache.contains_many(keys[found:]))
        parent = keys[found - 1] if found else None
        before = self._cache.stats().volume.puts_stored
        self._cache.put_many(missing, chain=True, parent=parent)
        self.offers += offers
        self.writes += self._cache.stats().volume.puts_stored - before
