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


def _cell(row: dict[str, Any]) -> str:
    median, least, most = row["stores"]["cyclone_kv"]
    ratio, low, high = row["ratios"]["lmdb"]
    files = row["ratios"]["files"][0]
    unit = "µs" if row["unit"] == "us" else row["unit"]
    lost = "**" if ratio < 1 else ""
    return (
        f"{median:.2f} {unit} ({least:.2f}-{most:.2f}); "
        f"{lost}{ratio:.2f}{lost} ({low:.2f}-{high:.2f}); {files:.1f}"
    )


def markdown_table(path: Path) -> str:
    """Return the last run of ``path`` as a Markdown table, with where it ran."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    begin = max(i for i, record in enumerate(records) if record["kind"] == "run")
    run = records[begin]
    rows = [record for record in records[begin:] if record["kind"] == "summary"]
    blocks = sorted({row["block"] for row in rows})
    cells = {(row["phase"], row["block"]): _cell(row) for row in rows}
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    names = [
        f"{block >> 20} MiB" if block >= 1 << 20 else f"{block >> 10} KiB"
        for block in blocks
    ]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(blocks) + 1) + "|"]
    for phase in phases:
        row = [cells.get((phase, block), "") for block in blocks]
        lines.append(f"| {_PHASES.get(phase, phase)} | " + " | ".join(row) + " |")
    load = ", ".join(f"{value:.1f}" for value in run["load_average"])
    lines += [
        "",
        f"{run['cpus']} x {run['cpu']}, {run['memory_bytes'] / 2**30:.0f} GiB, Linux "
        f"{run['kernel']}, {run['file_system']}, readahead {run['readahead_kb']} KiB, "
        f"lmdb {run['versions']['lmdb']}, {run['rounds']} rounds over "
        f"{run['dataset'] >> 20} MiB, load before {load}, commit {run['commit']}.",
    ]
    return "\n".join(lines) + "\n"
