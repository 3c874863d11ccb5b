# SPDX-License-Identifier: Apache-2.0
"""The published policy replay, computed again and compared value by value."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.policy import workloads
from bench.policy.native import Kind, Options, replay
from bench.policy.workloads import Workload
from cyclone_kv import parse_size

__all__ = ["Comparison", "Row", "columns", "compare", "rows"]

_FILE = Path(__file__).with_name("published.json")
_STRIPES = 16
_BLOCK_OVERHEAD = 64
_STRIPE_BLOCK_OVERHEAD = 264
_TOLERANCE = 0.0005  # three digits

_BY_STRIPE: dict[str, Options] = {
    "FIFO/stripe": Options(kind=Kind.CLOCK, counter_max=0, stripes=16, by_key=True),
    "flush": Options(kind=Kind.FLUSH, stripes=_STRIPES, by_key=True),
    **{
        f"retain/{chunks}": Options(
            kind=Kind.RETENTION, stripes=_STRIPES, by_key=True, chunks=chunks
        )
        for chunks in (16, 32, 64, 256)
    },
}
_WHOLE: dict[str, Options] = {
    "LRU": Options(kind=Kind.LRU),
    "FIFO": Options(kind=Kind.CLOCK, counter_max=0),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a stream at a size."""

    scan: bool
    block: int
    capacity: int
    expected: dict[str, float]

    @property
    def name(self) -> str:
        """What the line is called."""
        kind = "scan" if self.scan else "zipf"
        return f"{kind} {_human(self.block)} {_human(self.capacity)}"

    @functools.cached_property
    def workload(self) -> Workload:
        """The stream; the gets that count are 400 000."""
        return workloads.churn(self.block, self.capacity, scan=self.scan, by_key=True)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One value of the table."""

    row: str
    column: str
    found: float
    expected: float

    @property
    def agrees(self) -> bool:
        """Whether both are the same to three digits."""
        return abs(self.found - self.expected) <= _TOLERANCE


def _human(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


@functools.cache
def _file() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_FILE.read_text())
    return loaded


def columns() -> list[str]:
    """Return the policies of the table."""
    return list(_file()["columns"])


def rows() -> list[Row]:
    """Return the lines of the table with what was published."""
    return [
        Row(
            scan=row["scan"],
            block=parse_size(row["block"]),
            capacity=parse_size(row["capacity"]),
            expected=dict(zip(columns(), row["values"], strict=True)),
        )
        for row in _file()["rows"]
    ]


def compare(row: Row) -> Iterator[Comparison]:
    """Replay one line; yields each of its values."""
    slots = row.capacity // (row.block + _BLOCK_OVERHEAD)
    stripe_slots = row.capacity // _STRIPES // (row.block + _STRIPE_BLOCK_OVERHEAD)
    for column, expected in row.expected.items():
        options, capacity = (
            (_WHOLE[column], slots)
            if column in _WHOLE
            else (_BY_STRIPE[column], stripe_slots * _STRIPES)
        )
        outcome = replay(
            row.workload.stream,
            options,
            capacity,
            from_request=row.workload.from_request,
        )
        yield Comparison(row.name, column, outcome.hit_ratio, expected)
