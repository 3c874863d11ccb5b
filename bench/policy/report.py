# SPDX-License-Identifier: Apache-2.0
"""Markdown tables from the JSON lines that the policy commands append."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["markdown"]

_Record = dict[str, Any]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(heads), " | ".join(["---"] + ["---:"] * (len(heads) - 1))]
    lines += [" | ".join(row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _matrix(
    records: Sequence[_Record],
    row: str,
    column: Callable[[_Record], str],
    cell: Callable[[_Record], str],
) -> str:
    columns = list(dict.fromkeys(column(record) for record in records))
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        cells.setdefault(record[row], {})[column(record)] = cell(record)
    rows = (
        [name, *(found.get(title, "") for title in columns)]
        for name, found in cells.items()
    )
    return _table([row, *columns], rows)


def _published(records: Sequence[_Record]) -> str:
    def cell(record: _Record) -> str:
        same = abs(record["found"] - record["expected"]) <= 0.0005
        return f"{record['found']:.4f}" + (
            "" if same else f" (published {record['expected']:.4f})"
        )

    return _matrix(records, "row", lambda record: record["column"], cell)


def _policy(records: Sequence[_Record]) -> str:
    return _matrix(
        records,
        "stream",
        lambda record: record["policy"],
        lambda record: f"{record['hit_ratio']:.3f} ({record['writes_per_miss']:.2f})",
    )


def _order(records: Sequence[_Record]) -> str:
    def column(record: _Record) -> str:
        end = "head first" if record["head_first"] else "tail first"
        return f"{record['policy']}, {end}"

    return _matrix(
        records,
        "trace",
        column,
        lambda record: f"{record['hit_ratio']:.4f} ({record['held_ratio']:.4f})",
    )


def _trace(records: Sequence[_Record]) -> str:
    heads = ["trace", "blocks", "stripes", *records[0]["models"]]
    rows = (
        [
            record["trace"],
            str(record["capacity"]),
            str(record["stripes"]),
            *(f"{ratio:.4f}" for ratio in record["models"].values()),
            f"{record['model']:.4f}",
            f"{record['hit_ratio']:.4f}",
            f"{record['hit_ratio'] - record['model']:+.4f}",
        ]
        for record in records
    )
    return _table([*heads, "model of the engine", "engine", "difference"], rows)


def _approach(records: Sequence[_Record]) -> str:
    window = records[0]["window"]
    heads = ["gets after the warm-up", *(record["column"] for record in records)]
    columns = [record["ratios"] for record in records]
    rows = (
        [f"to {number * window}", *(f"{ratio:.4f}" for ratio in ratios)]
        for number, ratios in enumerate(zip(*columns, strict=True), 1)
    )
    return _table(heads, rows)


def _search(records: Sequence[_Record]) -> str:
    groups = list(records[0]["by_group"])
    heads = ["candidate", "mean", *groups]
    heads += ["worst to LRU", "worst to clock", "worst anywhere", "writes per miss"]
    rows = (
        [
            record["candidate"],
            f"{record['over_clock']:+.2f}",
            *(f"{record['by_group'][group]:+.2f}" for group in groups),
            *(
                f"{record[name][0]:+.2f} {record[name][1]}"
                for name in ("worst_lru", "worst_clock", "worst_anywhere")
            ),
            f"{record['writes_per_miss']:.2f}",
        ]
        for record in records
    )
    return _table(heads, rows)


_KINDS = {
    "published": _published,
    "policy": _policy,
    "order": _order,
    "trace": _trace,
    "search": _search,
    "approach": _approach,
}


def markdown(path: Path) -> str:
    """Return all results in a file as tables, one for each kind of result."""
    found: dict[str, list[_Record]] = {}
    with open(path) as file:
        for line in file:
            record = json.loads(line)
            found.setdefault(record["kind"], []).append(record)
    return "\n\n".join(
        make(found[kind]) for kind, make in _KINDS.items() if kind in found
    )
