# SPDX-License-Identifier: Apache-2.0
"""The table of the README, from the record of a run of kv_bench."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.phases import BENCH
from bench.records import Run, Spread
from bench.sizes import human_size
from bench.stores import OURS
from bench.table import rows_of

__all__ = ["machine_line", "markdown_table"]

_LABELS = {
    "put": "put",
    "put_synced": "put, then sync",
    "cold_ordered": "cold read, stored order",
    "cold_random": "cold read, random order",
    "cold_batch": "cold read, batches of 64",
    "warm_copy": "warm copy",
    "view_p50": "warm view, p50",
}
_RIVALS = {"lmdb": "LMDB", "files": "files"}


def _rows(run: Run, nbytes: int) -> list[tuple[str, dict[str, Any]]]:
    """Return label and selection of the rows: of several threads, the first."""
    found: dict[str, dict[str, Any]] = {}
    for phase, params, _ in rows_of(run, nbytes):
        if phase.name in _LABELS and phase.name not in found:
            found[phase.name] = {
                "bench": BENCH,
                "phase": phase.name,
                "block_bytes": nbytes,
                **params,
            }
    return [(_LABELS[name], found[name]) for name in _LABELS if name in found]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _text(spread: Spread | None, digits: int = 2) -> str:
    return "-" if spread is None else spread.text(digits)


def _ratio(spread: Spread | None, *, bold: bool) -> str:
    if spread is None:
        return "-"
    if bold and spread.median < 1:
        return f"**{spread.median:.2f}**"
    return f"{spread.median:.2f}" if spread.median < 10 else f"{spread.median:.1f}"


def _short_cells(run: Run, what: dict[str, Any]) -> list[str]:
    ours = run.spread(store=OURS, **what)
    if ours is None:
        return ["-"] * (1 + len(_RIVALS))
    unit = " µs" if what["phase"] == "view_p50" else ""
    ratios = [run.ratio(OURS, rival, **what) for rival in _RIVALS]
    return [f"{ours.median:.2f}{unit}", *(_ratio(one, bold=True) for one in ratios)]


def _full_cells(run: Run, what: dict[str, Any]) -> list[str]:
    stores = [run.spread(store=name, **what) for name in (OURS, *_RIVALS)]
    ratios = [run.ratio(OURS, rival, **what) for rival in _RIVALS]
    return [*map(_text, stores), *map(_text, ratios)]


def machine_line(run: Run) -> str:
    """Return where a run happened, in one sentence."""
    machine = run.machine
    load = ", ".join(f"{value:.1f}" for value in machine["load_begin"])
    rounds = {sample.round for sample in run.select(bench=BENCH, phase="put")}
    dirty = " with changes" if machine["dirty"] else ""
    foreign = ", with foreign load" if machine.get("foreign_load") else ""
    return (
        f"{machine['cpus']} x {machine['cpu']}, {machine['memory_bytes'] / 2**30:.0f} "
        f"GiB, Linux {machine['kernel']}, {machine['file_system']}, readahead "
        f"{machine['queue']['read_ahead_kb']} KiB, LMDB "
        f"{machine['versions'].get('lmdb', '-')}, {len(rounds)} rounds, load before "
        f"{load}{foreign}, commit {machine['commit']}{dirty}."
    )


def markdown_table(run: Run, *, short: bool, blocks: Sequence[int] = ()) -> str:
    """Return a run as Markdown, with where it ran.

    ``short``: one table of medians and median ratios.  Otherwise a table for each block
    size, with the spread of all stores.  ``blocks`` are the sizes, by default all.
    """
    sizes = sorted(run.names("block_bytes", bench=BENCH, phase="put"))
    sizes = [nbytes for nbytes in sizes if not blocks or nbytes in blocks]
    lines: list[str] = []
    if short:
        head = ["GB/s"]
        for nbytes in sizes:
            head += [human_size(nbytes), *(f"/ {name}" for name in _RIVALS.values())]
        cells: dict[str, list[str]] = {}
        for nbytes in sizes:
            for label, what in _rows(run, nbytes):
                cells.setdefault(label, []).extend(_short_cells(run, what))
        lines += _table(head, [[label, *row] for label, row in cells.items()])
    for nbytes in [] if short else sizes:
        head = [human_size(nbytes), OURS, *_RIVALS.values()]
        head += [f"/ {name}" for name in _RIVALS.values()]
        body = [[label, *_full_cells(run, what)] for label, what in _rows(run, nbytes)]
        lines += [*_table(head, body), ""]
    return "\n".join([*lines, "", machine_line(run)]) + "\n"
