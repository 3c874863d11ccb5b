# SPDX-License-Identifier: Apache-2.0
"""Hit ratios as samples of a record, and how ours is called among policies."""

from __future__ import annotations

import re
from typing import Any

from bench.policy.native import Outcome
from bench.policy.workloads import Workload
from bench.records import Sample
from bench.stores import OURS

__all__ = ["NAMES", "POLICY", "TRACE", "of_outcome", "sample", "stream_name"]

POLICY = "policy"
"""The bench of models of policies."""
TRACE = "trace"
"""The bench of streams through the engine."""

NAMES = {"DUEL5": OURS, "GCLOCK2": "plain clock"}
"""What the preset and ``admission="always"`` are called in records."""


def stream_name(load: Workload) -> str:
    """Return the name of the stream alone, without the capacity."""
    return re.sub(r"/\d+$", "", load.name)


def sample(
    bench: str,
    phase: str,
    store: str,
    load: Workload,
    value: float,
    *,
    capacity: int | None = None,
    **params: Any,
) -> Sample:
    """Return a sample of a stream at a capacity in blocks."""
    return Sample(
        bench=bench,
        phase=phase,
        store=NAMES.get(store, store),
        value=value,
        unit="ratio",
        better="lower" if phase == "writes_per_miss" else "higher",
        params={
            "stream": stream_name(load),
            "capacity": load.capacity if capacity is None else capacity,
            **params,
        },
    )


def of_outcome(policy: str, load: Workload, outcome: Outcome) -> list[Sample]:
    """Return the samples of a replay through a model."""
    return [
        sample(POLICY, "hit_ratio", policy, load, outcome.hit_ratio),
        sample(POLICY, "writes_per_miss", policy, load, outcome.writes_per_miss),
    ]
