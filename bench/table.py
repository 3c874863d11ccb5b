# SPDX-License-Identifier: Apache-2.0
"""What kv_bench measured at one block size, as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.phases import BENCH, PHASES, Phase
from bench.records import Run, Spread
from bench.sizes import human_size
from bench.stores import OURS

__all__ = ["print_tables", "rows_of"]

_LIMITS = ("device", "memcpy")


def rows_of(run: Run, nbytes: int) -> list[tuple[Phase, dict[str, Any], str]]:
    """Return (phase, parameters, label) of what was measured, in order."""
    rows = []
    for phase in PHASES:
        found = run.select(bench=BENCH, phase=phase.name, block_bytes=nbytes)
        params = list({tuple(sample.params.items()): None for sample in found})
        for some in params:
            words = "".join(f", {name} {value}" for name, value in some)
            rows.append((phase, dict(some), phase.label + words))
    return rows


def print_tables(console: Console, run: Run, nbytes: int) -> None:
    """Print medians with the spread, and the ratios of ours to the others."""
    stores = [
        name
        for name in run.names("store", bench=BENCH, block_bytes=nbytes)
        if name not in _LIMITS
    ]
    stores.sort(key=lambda name: name != OURS)
    others = [name for name in stores if name != OURS]
    counts = {
        len(run.by_round(bench=BENCH, phase="put", block_bytes=nbytes, store=name))
        for name in stores
    }
    rounds = max(counts, default=0)
    table = Table(
        title=f"{human_size(nbytes)} blocks: median (least-most) of {rounds} rounds; "
        "ratios of medians by round, above 1 in our favour",
        title_justify="left",
    )
    table.add_column("phase")
    table.add_column("unit")
    for name in stores:
        table.add_column(name, justify="right")
    for name in others:
        table.add_column(f"/ {name}", justify="right")
    table.add_column("limit", justify="right")
    for phase, params, label in rows_of(run, nbytes):
        what = {
            "bench": BENCH,
            "phase": phase.name,
            "block_bytes": nbytes,
            **params,
        }
        cells = [_cell(run.spread(store=name, **what), phase.unit) for name in stores]
        ratios = [_ratio(run.ratio(OURS, name, **what)) for name in others]
        limit = ""
        if phase.limit:
            found = run.spread(store=phase.limit, **what)
            limit = f"{phase.limit} {_cell(found, phase.unit)}" if found else ""
        table.add_row(label, phase.unit, *cells, *ratios, limit)
    console.print(table)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _ratio(spread: Spread | None) -> str:
    return "-" if spread is None else _number(spread.median)


def _cell(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return "-"
    if unit == "ops/s":
        median, low, high = (
            f"{value / 1e3:.1f}k" for value in (spread.median, spread.low, spread.high)
        )
    else:
        median, low, high = map(_number, (spread.median, spread.low, spread.high))
    return median if spread.count == 1 else f"{median} ({low}-{high})"
