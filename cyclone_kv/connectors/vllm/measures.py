# SPDX-License-Identifier: Apache-2.0
"""The tier's metrics, handed to vLLM's own Prometheus endpoint.

The tier lives in the scheduler's process, which has no endpoint; vLLM carries what
`get_stats` returns to the one that has.  Names are declared before the engine starts,
from `metric_definitions`; an undeclared name would end the engine (an assertion there),
so both use the one table here.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
)

if TYPE_CHECKING:
    from cyclone_kv.cache import Cache

__all__ = ["Measures", "metric_definitions"]

_PREFIX = "vllm:kv_offload_cyclone_"
_LABELS = ("volume",)
_INTERVAL_SECONDS = 1.0

_COUNTERS = {
    "lookups": "Chunks looked up in the volume.",
    "hits": "Lookups that found the chunk.",
    "loaded_chunks": "Chunks copied into the primary tier, checksum verified.",
    "load_failed_chunks": "Chunks that were gone or damaged when they were loaded.",
    "stored_chunks": "Chunks that are in the volume after a store.",
    "refused_chunks": "Chunks that the volume did not take.",
    "dropped_chunks": "Chunks not stored because the queue of stores was full.",
    "slow_lookups": "Lookups answered as misses because loads were slower than "
    "recomputing.",
    "announced_chunks": "Chunks reported as stored in KV events.",
    "gone_chunks": "Announced chunks that were evicted, by any process.",
    "events_lost": "Events of the volume that were overwritten before they were read.",
    "faults": "Exceptions that were turned into misses or refused stores.",
}
_FROM_PROCESS = {
    "corrupt": "Blocks whose checksum failed, found by this engine.",
    "read_errors": "Blocks that the device did not deliver to this engine.",
    "evictions": "Blocks that this engine's stores evicted.",
    "puts_busy": "Stores refused because stripes stayed locked.",
    "puts_no_run": "Stores refused because pins left no room.",
    "puts_not_admitted": "Stores refused by the admission policy.",
    "puts_in_flight": "Stores refused because another process was storing the chunk.",
    "puts_failed_path": "Stores refused because a device has failed.",
    "puts_io_failed": "Stores that ended in a write error.",
}
_GAUGES = {
    "capacity_bytes": "Data area of the volume.",
    "resident_bytes": "Pages held by blocks, of all who use the volume.",
    "entries": "Blocks in the volume, of all who use it.",
    "pinned_entries": "Blocks pinned by any process.",
}


def metric_definitions() -> dict[str, Any]:
    """Return every metric of the tier, as vLLM wants them declared."""
    definitions: dict[str, Any] = {
        _PREFIX + name: OffloadingCounterMetadata(
            documentation=text, labelnames=_LABELS
        )
        for name, text in (_COUNTERS | _FROM_PROCESS).items()
    }
    for name, text in _GAUGES.items():
        definitions[_PREFIX + name] = OffloadingGaugeMetadata(
            documentation=text, labelnames=_LABELS
        )
    return definitions


class Measures:
    """Counts of the scheduler's thread, and what was already handed out of the rest."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._labels = (cache.paths[0],)
        self._counts: Counter[str] = Counter()
        self._handed_out: dict[str, int] = {}
        self._next = 0.0

    def add(self, name: str, count: int = 1) -> None:
        """Raise a counter of the tier."""
        self._counts[name] += count

    def take(self, *, faults: int) -> OffloadingConnectorStats | None:
        """Return what happened since the last call, at most once a second.

        `faults` is their number since the start.
        """
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + _INTERVAL_SECONDS
        stats = self._cache.stats()
        result = OffloadingConnectorStats()
        totals = {name: stats.process[name] for name in _FROM_PROCESS}
        for name, value in (totals | {"faults": faults}).items():
            self._counts[name] += value - self._handed_out.get(name, 0)
            self._handed_out[name] = value
        for name, count in self._counts.items():
            if count:
                result.increase_counter(_PREFIX + name, count, self._labels)
        self._counts.clear()
        for name in _GAUGES:
            result.set_gauge(_PREFIX + name, stats.volume[name], self._labels)
        return result
