# SPDX-License-Identifier: Apache-2.0
"""Statistics for Prometheus.

Needs the extra ``cyclone-kv[prometheus]``; ``prometheus_client`` is imported when a
function is called. Names come from the engine's own list: ``cyclone_kv_<name>`` for the
volume, ``cyclone_kv_process_<name>`` for the counters of this process, with ``_total``
after counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cyclone_kv import _core
from cyclone_kv.errors import ClosedError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from cyclone_kv.cache import Cache

__all__ = ["CacheCollector", "exposition", "register"]


class CacheCollector:
    """A ``prometheus_client`` collector that reads a cache when it is scraped.

    A closed cache gives no samples. ``volume`` is the value of the label ``volume``; by
    default the first path of the cache.
    """

    def __init__(self, cache: Cache, *, volume: str | None = None) -> None:
        self._cache = cache
        self._volume = cache.paths[0] if volume is None else volume

    def collect(self) -> Iterator[Metric]:
        """Yield one metric for each statistic."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        try:
            stats = self._cache.stats()
        except ClosedError:
            return
        for kind, name, _, sentence in _core.STATISTICS:
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            metric = family(f"cyclone_kv_{name}", sentence, labels=["volume"])
            metric.add_metric([self._volume], stats.volume[name])
            yield metric
            if kind == "counter":
                own = CounterMetricFamily(
                    f"cyclone_kv_process_{name}",
                    f"{sentence} By this process.",
                    labels=["volume"],
                )
                own.add_metric([self._volume], stats.process[name])
                yield own


def register(
    cache: Cache,
    *,
    registry: CollectorRegistry | None = None,
    volume: str | None = None,
) -> CacheCollector:
    """Add a cache to a registry (the global one by default); return the collector."""
    from prometheus_client import REGISTRY

    collector = CacheCollector(cache, volume=volume)
    (REGISTRY if registry is None else registry).register(collector)
    return collector


def exposition(cache: Cache, *, volume: str | None = None) -> bytes:
    """Return the statistics in the text format of Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    register(cache, registry=registry, volume=volume)
    return generate_latest(registry)
