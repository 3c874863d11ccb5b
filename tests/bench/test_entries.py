# SPDX-License-Identifier: Apache-2.0
"""The memory of an entry, and what belongs to it."""

from __future__ import annotations

import pytest

for needed in ("lmdb", "numpy"):
    pytest.importorskip(needed)

from bench import entries  # noqa: E402
from bench.kv_verdicts import verdicts  # noqa: E402
from bench.records import Run, Sample  # noqa: E402
from cyclone_kv import Cache, CacheConfig  # noqa: E402

MIB = 1 << 20


def test_it_is_the_table_the_region_and_the_pins_of_a_process(disk_folder):
    path, capacity = disk_folder / "kv.cyc", 128 * MIB
    found, count = entries._memory(path, capacity)
    assert list(disk_folder.glob("kv.cyc")) == []
    assert count == capacity // 65536
    config = CacheConfig.for_kv_tier(capacity=capacity)
    with Cache.open(disk_folder / "again.cyc", config) as cache:
        info = cache.info()
        # A record of 80 bytes and a pin of 8, whole pages; without the checkpoints.
        assert 0 <= found - info.shm_bytes - 88 * count < 4096
        assert found - info.shm_bytes < info.overhead_bytes


def test_what_a_volume_costs_anyway_is_said_apart():
    def sample(phase, value):
        return Sample(
            bench="kv_bench",
            phase=phase,
            store="cyclone_kv",
            value=value,
            unit="bytes",
            better="lower",
        )

    run = Run({}, [sample("memory_per_entry", 158.0)])
    run.samples.append(sample("memory_per_volume", 3.0 * MIB))
    (found,) = (v for v in verdicts(run) if v.row.startswith("memory"))
    assert found.reached
    assert found.value == 158.0
    assert found.text.endswith("and 3.0 MiB for a volume of any size")
