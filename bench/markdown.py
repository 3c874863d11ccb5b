# SPDX-License-Identifier: Apache-2.0
"""The table of the README, from the JSON lines of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["markdown_table"]

_PHASES = {
    "put": "put",
    "put_synced": "put, then sync",
    "cold_ordered": "cold read, stored order",
    "cold_random": "cold read, random order",
    "cold_batch": "cold read, batches of 64",
    "warm_copy": "warm copy",
    "warm_view": "warm view, p50",
}


def _spread(value: list[float], digits: int = 2) -> str:
    median, least, most = value
    return f"{median:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def _full(row: dict[str, Any]) -> list[str]:
    stores, ratios = row["stores"], row["ratios"]
    cells = [_spread(stores[name]) for name in ("cyclone_kv", "lmdb", "files")]
    return [*cells, _spread(ratios["lmdb"]), _spread(ratios["files"], 1)]


def _short(row: dict[str, Any]) -> list[str]:
    ratio = row["ratios"]["lmdb"][0]
    shown = f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**"
    unit = " µs" if row["unit"] == "us" else ""
    ours = row["stores"]["cyclone_kv"][0]
    return [f"{ours:.2f}{unit}", shown, f"{row['ratios']['files'][0]:.1f}"]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _block_name(block: int) -> str:
    return f"{block >> 20} MiB" if block >= 1 << 20 else f"{block >> 10} KiB"


def markdown_table(path: Path, *, short: bool) -> str:
    """Return the last run of ``path`` as Markdown, with where it ran.

    ``short``: one table of medians and median ratios.  Otherwise a table for each block
    size, with the spread of all stores.
    """
    records = [json.loads(line) for line in path.read_text().splitlines()]
    begin = max(i for i, record in enumerate(records) if record["kind"] == "run")
    run = records[begin]
    rows = [record for record in records[begin:] if record["kind"] == "summary"]
    blocks = sorted({row["block"] for row in rows})
    found = {(row["phase"], row["block"]): row for row in rows}
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    lines = []
    if short:
        head = ["GB/s"]
        for block in blocks:
            head += [_block_name(block), "/ LMDB", "/ files"]
        body = [
            [
                _PHASES.get(phase, phase),
                *(cell for block in blocks for cell in _short(found[phase, block])),
            ]
            for phase in phases
        ]
        lines += _table(head, body)
    for block in [] if short else blocks:
        head = [_block_name(block), "cyclone_kv", "LMDB", "files", "/ LMDB", "/ files"]
        body = [
            [_PHASES.get(phase, phase), *_full(found[phase, block])] for phase in phases
        ]
        lines += [*_table(head, body), ""]
    load = ", ".join(f"{value:.1f}" for value in run["load_average"])
    lines += [
        "",
        f"{run['cpus']} x {run['cpu']}, {run['memory_bytes'] / 2**30:.0f} GiB, Linux "
        f"{run['kernel']}, {run['file_system']}, readahead {run['readahead_kb']} KiB, "
        f"lmdb {run['versions']['lmdb']}, {run['rounds']} rounds over "
        f"{run['dataset'] >> 20} MiB, load before {load}, commit {run['commit']}.",
    ]
    return "\n".join(lines) + "\n"
