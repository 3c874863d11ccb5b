# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads and ratios, as one table for each block size."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from bench.phases import PHASES, Phase, Sample

__all__ = ["Results", "human_size"]


def human_size(nbytes: int) -> str:
    """Return 65536 as "64 KiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


class Results:
    """The samples of all rounds of one block size."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self.count = count
        self._values: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, samples: Iterable[Sample]) -> None:
        """Add a round."""
        for sample in samples:
            self._values[sample.phase, sample.store].append(sample.value)

    def spread(self, phase: str, store: str) -> tuple[float, float, float] | None:
        """Return (median, least, most), or None when nothing was measured."""
        values = self._values.get((phase, store))
        if not values:
            return None
        return statistics.median(values), min(values), max(values)

    def ratio(
        self, phase: Phase, ours: str, other: str
    ) -> tuple[float, float, float] | None:
        """Return (median, least, most) of ours / other, round by round.

        Above 1 ours is better; for a latency it is the inverse.
        """
        pairs = zip(
            self._values.get((phase.name, ours), []),
            self._values.get((phase.name, other), []),
            strict=True,
        )
        ratios = [b / a if phase.unit == "us" else a / b for a, b in pairs]
        if not ratios:
            return None
        return statistics.median(ratios), min(ratios), max(ratios)

    def table(self, stores: Sequence[str]) -> Table:
        """Return the table; the first of ``stores`` is compared with the others."""
        ours, *others = stores
        table = Table(
            title=f"{human_size(self.nbytes)} blocks, {self.count} of them: "
            f"median (least-most)",
            title_justify="left",
        )
        table.add_column("phase")
        table.add_column("unit")
        for name in stores:
            table.add_column(name, justify="right")
        for name in others:
            table.add_column(f"/ {name}", justify="right")
        table.add_column("limit", justify="right")
        for phase in PHASES:
            limit = self.spread(phase.limit, "limit") if phase.limit else None
            table.add_row(
                phase.label,
                phase.unit,
                *(_cell(self.spread(phase.name, name)) for name in stores),
                *(_cell(self.ratio(phase, ours, name)) for name in others),
                f"{phase.limit} {_cell(limit)}" if limit else "",
            )
        return table

    def summary(self, stores: Sequence[str]) -> list[dict[str, Any]]:
        """Return the same as records for the output file."""
        ours, *others = stores
        return [
            {
                "kind": "summary",
                "block": self.nbytes,
                "phase": phase.name,
                "unit": phase.unit,
                "stores": {name: self.spread(phase.name, name) for name in stores},
                "ratios": {name: self.ratio(phase, ours, name) for name in others},
            }
            for phase in PHASES
        ]


def _cell(spread: tuple[float, float, float] | None) -> str:
    if spread is None:
        return "-"
    median, least, most = spread
    return f"{median:.2f} ({least:.2f}-{most:.2f})"
