# SPDX-License-Identifier: Apache-2.0
"""Statistics as Prometheus sees them."""

from __future__ import annotations

import pytest

from cyclone_kv import Cache, _core
from cyclone_kv.metrics import exposition, register

from .conftest import key_of

prometheus_client = pytest.importorskip("prometheus_client")


def test_every_statistic_becomes_a_metric(cache: Cache) -> None:
    cache.put(key_of(1), b"12345")
    registry = prometheus_client.CollectorRegistry()
    register(cache, registry=registry, volume="v")
    labels = {"volume": "v"}
    for kind, name, _, _ in _core.STATISTICS:
        suffix = "_total" if kind == "counter" else ""
        value = registry.get_sample_value(f"cyclone_kv_{name}{suffix}", labels)
        assert value is not None, name
    assert registry.get_sample_value("cyclone_kv_puts_stored_total", labels) == 1
    stored = "cyclone_kv_process_payload_bytes_written_total"
    assert registry.get_sample_value(stored, labels) == 5


def test_the_text_names_the_volume(cache: Cache) -> None:
    text = exposition(cache).decode()
    assert f'cyclone_kv_entries{{volume="{cache.paths[0]}"}} 0.0' in text
    assert "# HELP cyclone_kv_evictions_total Blocks overwritten to make room." in text


def test_a_closed_cache_gives_no_samples(cache: Cache) -> None:
    registry = prometheus_client.CollectorRegistry()
    register(cache, registry=registry)
    cache.close()
    assert list(registry.collect()) == []
