# SPDX-License-Identifier: Apache-2.0
"""Several runs as one: a suite that was measured in pieces.

M1  What is compared in a round (a bench, a phase, a block size, its parameters) comes
    with all its stores from one run, the newest that has it: nothing is ever compared
    across runs.
M2  Runs of a bench are put together when they are of the same commit and machine;
    otherwise the newest counts alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from bench.records import Run, Sample

__all__ = ["latest_first", "merged", "parts_of"]

_IDENTITY = (
    *("kind", "bench", "call", "scan", "threads", "header_bytes", "block_bytes"),
    *("capacity_bytes", "processes", "round", "text"),
)


def latest_first(runs: Iterable[Run]) -> list[Run]:
    """Return the runs, the newest first."""
    return sorted(runs, key=lambda run: str(run.machine.get("time", "")), reverse=True)


def _row(sample: Sample) -> tuple[Any, ...]:
    params = json.dumps(dict(sample.params), sort_keys=True)
    return sample.bench, sample.phase, sample.block_bytes, params, sample.round


def _other(record: Mapping[str, Any]) -> str:
    return json.dumps([record.get(name) for name in _IDENTITY])


def _origin(run: Run) -> tuple[Any, ...]:
    return tuple(run.machine.get(name) for name in ("commit", "cpu", "kernel"))


def parts_of(runs: Iterable[Run], bench: str) -> list[Run]:
    """Return the runs that a bench is put together from, the newest first (M2)."""
    found = [run for run in latest_first(runs) if run.select(bench=bench)]
    return [run for run in found if _origin(run) == _origin(found[0])]


def merged(runs: Iterable[Run], bench: str | None = None) -> Run:
    """Return one run of several, of one bench or of all."""
    ordered = latest_first(runs)
    if not ordered:
        return Run({})
    names = {sample.bench for run in ordered for sample in run.samples}
    parts = {name: parts_of(ordered, name) for name in names if bench in (None, name)}
    used = [run for run in ordered if any(run in part for part in parts.values())]
    first = used[0] if used else ordered[0]
    result = Run(first.machine)
    rows: set[tuple[Any, ...]] = set()
    others: set[str] = set()
    for run in used:
        chosen = [
            sample
            for sample in run.samples
            if run in parts.get(sample.bench, ()) and _row(sample) not in rows
        ]
        rows |= {_row(sample) for sample in chosen}
        result.samples += chosen
        kept = [record for record in run.others if _other(record) not in others]
        others |= {_other(record) for record in kept}
        result.others += kept
    return result
