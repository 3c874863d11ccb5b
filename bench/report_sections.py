# SPDX-License-Identifier: Apache-2.0
"""The sections of the report: what each bench has to say, as tables and pictures."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bench.records import Run, Spread
from bench.report_pictures import Curve, across, bars, color, curves, grid
from bench.report_text import (
    LIMITS,
    Row,
    Rows,
    cell,
    comparison,
    label,
    number,
    rows,
    table,
    where,
)
from bench.scaling import growth
from bench.sizes import human_size

__all__ = ["README_PICTURE", "SECTIONS", "Page", "Section"]

README_PICTURE = "cold-read"
"""The one for the README: cold copies in stored order, beside the rivals."""

Panel = Callable[[Axes], None]


class Page:
    """Where pictures go, and how the page links to them."""

    def __init__(self, folder: Path, link: str) -> None:
        self._folder = folder
        self._link = link

    def picture(
        self, name: str, words: str, panels: Sequence[Panel], **layout: Any
    ) -> list[str]:
        """Draw panels into one picture; return the lines that show it."""
        if not panels:
            return []
        grid(panels, self._folder / f"{name}.svg", **layout)
        return [f"![{words}]({self._link}/{name}.svg)", ""]

    def plain(self, run: Run, bench: str) -> list[str]:
        """Return one table with everything."""
        found = rows(run, bench)
        return comparison(found, found)


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """How the records of one bench are shown."""

    bench: str
    command: str
    lines: Callable[[Run, str, Page], list[str]]


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


# ---- beside rivals ------------------------------------------------------------------


def _by_size(found: Rows, chosen: Iterable[Row]) -> dict[str, dict[str, Spread]]:
    """Return groups of bars: a block size each."""
    groups: dict[str, dict[str, Spread]] = {}
    for row in sorted(chosen, key=lambda row: row.block_bytes or 0):
        group = groups.setdefault(human_size(row.block_bytes or 0), {})
        for store in found.stores(row):
            spread = found.spread(row, store)
            if spread is not None:
                group.setdefault(store, spread)
    return groups


def _panels(
    found: Rows, phases: Sequence[str], *, log: bool = False
) -> list[tuple[str, Panel]]:
    """Return a panel for each phase and set of parameters."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        if row.phase in phases:
            kinds.setdefault((row.phase, row.params), []).append(row)
    ordered = sorted(kinds.items(), key=lambda item: phases.index(item[0][0]))
    made = []
    for (phase, _), chosen in ordered:
        words = dataclasses.replace(chosen[0], block_bytes=None).words()
        panel = bars(words, chosen[0].unit, _by_size(found, chosen), log=log)
        made.append((phase, panel))
    return made


_KV_PICTURES = (
    ("put", "Puts beside the rivals", ("put", "put_synced"), False),
    (
        "cold",
        "Cold copies beside the rivals and the device",
        ("cold_first", "cold_ordered", "cold_random", "cold_batch"),
        False,
    ),
    ("warm", "Warm copies beside the rivals and memory", ("warm_copy",), False),
    ("view", "Warm views beside the rivals", ("view_p50", "warm_view"), True),
    (
        "processes",
        "Several processes beside the rivals",
        ("processes_copy", "processes_view"),
        True,
    ),
)


def _kv_bench(run: Run, bench: str, page: Page) -> list[str]:
    found = rows(run, bench)
    lines: list[str] = []
    first = [panel for phase, panel in _panels(found, ("cold_ordered",))][:1]
    words = "Cold reads in stored order, gigabytes a second beside the rivals"
    lines += page.picture(README_PICTURE, words, first, height=3.2)
    for name, words, phases, log in _KV_PICTURES:
        panels = [panel for _, panel in _panels(found, phases, log=log)]
        lines += page.picture(f"kv-{name}", words, panels)
    for block in sorted({row.block_bytes or 0 for row in found}):
        chosen = [row for row in found if (row.block_bytes or 0) == block]
        title = f"All rounds, {human_size(block)}" if block else "Of no block size"
        lines += _folded(title, comparison(found, chosen))
    return lines


# ---- churn --------------------------------------------------------------------------


def _churn_groups(found: Rows, phase: str) -> dict[str, dict[str, Spread]]:
    groups: dict[str, dict[str, Spread]] = {}
    for row in found:
        if row.phase == phase and len(found.stores(row)) > 1:
            name = f"{where(row, 'pattern')}, T={where(row, 'threads')}"
            group = groups.setdefault(name, {})
            for store in found.stores(row):
                spread = found.spread(row, store)
                if spread is not None:
                    group.setdefault(store, spread)
    return groups


def _churn(run: Run, bench: str, page: Page) -> list[str]:
    found = rows(run, bench)
    panels = []
    for phase, unit, log in (
        ("served", "GB/s", False),
        ("hit_ratio", "hit ratio", False),
        ("hit_p50", "us", True),
        ("hit_p99", "us", True),
    ):
        groups = _churn_groups(found, phase)
        if groups:
            panels.append(bars(label(phase), unit, groups, log=log))
    lines = page.picture("churn", "Churn beside the rivals", panels)
    runs = [record for record in run.others if record["kind"] == "churn_run"]
    words = "Share of the hits that took no longer"
    lines += page.picture("churn-latency", words, _latency_panels(runs))
    words = "Gigabytes of hits in each second"
    lines += page.picture("churn-time", words, _time_panels(runs))
    lines += _folded("All rounds", comparison(found, found))
    return lines


def _by_pattern(
    runs: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """Return the runs by title and store; of titles with one store none."""
    kinds: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for record in runs:
        pattern = "zipf+scan" if record.get("scan") else "zipf"
        size = human_size(record["block_bytes"])
        title = f"{pattern}, T={record['threads']}, {size}"
        if record.get("header_bytes") == 0:
            title += ", no header"
        kinds.setdefault(title, {}).setdefault(record["tier"], []).append(record)
    return {title: stores for title, stores in kinds.items() if len(stores) > 1}


def _latency_panels(runs: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return the quantiles of hits; the median of the rounds at each."""
    panels = []
    for title, stores in _by_pattern(runs).items():
        lines: list[Curve] = []
        for store, found in stores.items():
            names = sorted({float(q) for record in found for q in record["hit_us"]})
            points = []
            for q in names:
                values = [record["hit_us"].get(f"{q:g}") for record in found]
                spread = Spread.of(value for value in values if value is not None)
                if spread is not None:
                    points.append((q, spread))
            lines.append((store, points))
        panels.append(_quantiles(title, lines))
    return panels


def _quantiles(title: str, lines: Sequence[Curve]) -> Panel:
    """Return a panel with latency on x and the share of hits above it on y."""

    def draw(axes: Axes) -> None:
        names = [name for name, _ in lines]
        for name, points in lines:
            axes.plot(
                [spread.median for _, spread in points],
                [1 - q for q, _ in points],
                color=color(name, names),
                marker="o",
                markersize=3,
                linewidth=1.4,
                linestyle="--" if name in LIMITS else "-",
                label=label(name),
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = [0.5, 0.1, 0.01, 0.001]
        axes.set_yticks(ticks, ["50 %", "10 %", "1 %", "0.1 %"])
        axes.set_title(title)
        axes.set_xlabel("hit latency, us")
        axes.set_ylabel("hits that took longer")
        axes.legend()

    return draw


def _time_panels(runs: Sequence[Mapping[str, Any]]) -> list[Panel]:
    panels = []
    for title, stores in _by_pattern(runs).items():
        lines: list[Curve] = []
        for store, found in stores.items():
            series = [record.get("served_by_second") or [] for record in found]
            # The last second is not a whole one.
            length = min(len(values) for values in series) - 1
            points = [
                (float(second), spread)
                for second in range(length)
                if (spread := Spread.of(values[second] for values in series))
            ]
            if points:
                lines.append((store, points))
        if lines:
            panels.append(
                curves(title, "GB/s", lines, x="second", by_store=True, mark="")
            )
    return panels


# ---- policies -----------------------------------------------------------------------

_CAPACITY_NAMES = ("capacity", "capacity_blocks", "capacity_bytes", "capacity_share")
_LINES_MAX = 8
_POINTS_MIN = 2


def _over_capacity(run: Run, bench: str, page: Page) -> list[str]:
    """Show hit ratios over capacity, a panel for each stream, and the table."""
    found = rows(run, bench)
    kinds: dict[str, dict[str, list[tuple[float, Spread]]]] = {}
    for row in found:
        params = json.loads(row.params)
        capacity = next((n for n in _CAPACITY_NAMES if n in params), None)
        if row.phase != "hit_ratio" or capacity is None:
            continue
        at = float(params.pop(capacity))
        title = ", ".join(f"{value}" for value in params.values()) or bench
        for store in found.stores(row):
            spread = found.spread(row, store)
            if spread is not None:
                lines = kinds.setdefault(title, {}).setdefault(store, [])
                lines.append((at, spread))
    panels = [
        curves(
            title,
            "hit ratio",
            [
                (store, sorted(points, key=lambda point: point[0]))
                for store, points in list(lines.items())[:_LINES_MAX]
            ],
            x="capacity",
            x_log=2,
            zero=False,
            by_store=True,
        )
        for title, lines in kinds.items()
        if any(len(points) > 1 for points in lines.values())
    ]
    words = "Hit ratio over capacity"
    return [
        *page.picture(f"{bench.replace('_', '-')}-capacity", words, panels),
        *_folded("All values", comparison(found, found)),
    ]


def _comparison(run: Run, bench: str, page: Page) -> list[str]:
    return page.plain(run, bench)


# ---- scaling ------------------------------------------------------------------------


def _curve(found: Rows, chosen: Iterable[Row], axis: str, scale: float) -> Curve:
    """Return the line of rows that differ in ``axis`` alone."""
    points = []
    name = ""
    for row in chosen:
        at = where(row, axis) if axis != "block_bytes" else row.block_bytes
        store = found.stores(row)[0]
        spread = found.spread(row, store)
        if at and spread is not None:
            points.append((float(at), _scaled(spread, scale)))
            name = label(row.phase.split(".", 1)[1])
            if store in LIMITS:
                name = f"{name} (the machine)"
    return name, sorted(points, key=lambda point: point[0])


def _scaled(spread: Spread, scale: float) -> Spread:
    values = dataclasses.asdict(spread)
    count = values.pop("count")
    return Spread(
        **{name: value * scale for name, value in values.items()}, count=count
    )


def _axis_panels(found: Rows, axis: str, prefix: str, x: str) -> list[Panel]:
    """Return a panel for each unit: lines over threads, processes, batch or block."""
    by_unit: dict[str, list[Curve]] = {}
    for phase in dict.fromkeys(row.phase for row in found):
        if not phase.startswith(prefix + "."):
            continue
        blocks = [row.block_bytes for row in found if row.phase == phase]
        groups = [None] if axis == "block_bytes" else list(dict.fromkeys(blocks))
        for block in groups:
            chosen = [
                row
                for row in found
                if row.phase == phase and block in (None, row.block_bytes)
            ]
            name, points = _curve(found, chosen, axis, 1.0)
            if len(groups) > 1 and block:
                name += f", {human_size(block)}"
            if points:
                by_unit.setdefault(chosen[0].unit, []).append((name, points))
    panels = []
    for unit, lines in by_unit.items():
        if unit == "turns/s":
            continue
        rate = unit.endswith("/s") and unit != "GB/s"
        scale = 1e-6 if rate else 1.0
        shown = [
            (name, [(at, _scaled(spread, scale)) for at, spread in points])
            for name, points in lines
        ]
        words = f"M {unit}" if rate else unit
        panels.append(curves(f"{words} over {x}", words, shown, x=x, x_log=2))
    return panels


def _speedup_panel(found: Rows, axis: str) -> list[Panel]:
    """Return how often the rate of one worker each rate is, beside the machine's."""
    lines: list[Curve] = []
    kinds = dict.fromkeys((row.phase, row.block_bytes) for row in found)
    for phase, block in kinds:
        if not phase.startswith(f"{axis}."):
            continue
        chosen = [
            row for row in found if (row.phase, row.block_bytes) == (phase, block)
        ]
        name, points = _curve(found, chosen, axis, 1.0)
        first = dict(points).get(1.0)
        if first is None or len(points) < _POINTS_MIN:
            continue
        several = sum(kind == phase for kind, _ in kinds) > 1
        name += f", {human_size(block or 0)}" if several else ""
        scaled = [(at, _scaled(spread, 1 / first.median)) for at, spread in points]
        lines.append((name, scaled))
    words = f"rate over {axis}, times that of one"
    return [curves(words, "x", lines, x=axis, x_log=2)] if lines else []


def _entries_panels(found: Rows) -> list[Panel]:
    """Return costs over entries: the calls, then the opens and what has no key."""
    few: list[Curve] = []
    more: list[Curve] = []
    for phase in dict.fromkeys(row.phase for row in found):
        chosen = [row for row in found if row.phase == phase and row.unit == "us"]
        if not phase.startswith("entries.") or not chosen:
            continue
        line = _curve(found, chosen, "entries", 1.0)
        small = statistics.median(spread.median for _, spread in line[1]) < 1
        (few if small else more).append(line)
    return [
        curves(title, "us", lines, x="entries", x_log=10, y_log=True)
        for title, lines in (
            ("lookups over entries, us a key", few),
            ("other calls and opens over entries, us", more),
        )
        if lines
    ]


def _growth_table(found: Rows) -> list[str]:
    """Return the fitted slopes of costs over entries."""
    body = []
    for phase in dict.fromkeys(row.phase for row in found):
        chosen = [row for row in found if row.phase == phase and row.unit == "us"]
        if not phase.startswith("entries.") or not chosen:
            continue
        name, points = _curve(found, chosen, "entries", 1.0)
        grown = growth.fit({int(at): spread.median for at, spread in points})
        if grown is None:
            continue
        (least, first), (most, last) = points[0], points[-1]
        ends = [f"{cell(first)} at {number(least)}", f"{cell(last)} at {number(most)}"]
        slopes = [f"{grown.slope:.2f}", f"{grown.last_slope:.2f}", grown.order]
        body.append([name, *ends, *slopes])
    head = ["us", "fewest entries", "most", "power, all", "power, last two", "grows"]
    return table(head, body) if body else []


def _loads_table(found: Rows, prefix: str, axis: str) -> list[str]:
    """Return medians, a column for each number of workers or blocks."""
    kinds: dict[tuple[str, int | None, str], dict[int, str]] = {}
    for row in found:
        at = where(row, axis)
        if row.phase.startswith(prefix + ".") and at is not None:
            key = (row.phase, row.block_bytes, row.unit)
            spread = found.spread(row, found.stores(row)[0])
            kinds.setdefault(key, {})[at] = cell(spread)
    columns = sorted({at for cells in kinds.values() for at in cells})
    body = [
        [
            f"{label(phase.split('.', 1)[1])}, {human_size(block or 0)}",
            unit,
            *(cells.get(at, "-") for at in columns),
        ]
        for (phase, block, unit), cells in kinds.items()
    ]
    return table([axis, "unit", *map(str, columns)], body) if body else []


def _blocks_table(found: Rows) -> list[str]:
    kinds: dict[int, dict[str, str]] = {}
    units: dict[str, str] = {}
    for row in found:
        if row.phase.startswith("block."):
            name = label(row.phase.split(".", 1)[1])
            units[name] = row.unit
            spread = found.spread(row, found.stores(row)[0])
            kinds.setdefault(row.block_bytes or 0, {})[name] = cell(spread)
    body = [
        [human_size(block) if block else "a mix", *(row.get(n, "-") for n in units)]
        for block, row in sorted(kinds.items())
    ]
    head = ["block", *(f"{name}, {unit}" for name, unit in units.items())]
    return table(head, body) if body else []


def _scaling(run: Run, bench: str, page: Page) -> list[str]:
    found = rows(run, bench)
    panels = [
        *_speedup_panel(found, "threads"),
        *_axis_panels(found, "threads", "threads", "threads"),
    ]
    lines = page.picture("scaling-threads", "Threads", panels)
    panels = [
        *_speedup_panel(found, "processes"),
        *_axis_panels(found, "processes", "processes", "processes"),
    ]
    lines += page.picture("scaling-processes", "Processes", panels)
    panels = _axis_panels(found, "batch", "batch", "blocks of a call")
    lines += page.picture("scaling-batches", "Blocks of a batch", panels)
    panels = _axis_panels(found, "block_bytes", "block", "bytes of a block")
    lines += page.picture("scaling-blocks", "Bytes of a block", panels)
    panels = _entries_panels(found)
    lines += page.picture("scaling-entries", "Entries", panels, height=3.6)
    left_out = [
        f"- {record['text']}"
        for record in run.others
        if record["kind"] == "left_out" and record.get("bench") == bench
    ]
    if left_out:
        lines += ["Left out:", "", *left_out, ""]
    lines += [*_growth_table(found), ""]
    for prefix in ("threads", "processes", "batch"):
        lines += _folded(f"All rounds, {prefix}", _loads_table(found, prefix, prefix))
    lines += _folded("All rounds, block sizes", _blocks_table(found))
    return lines


# ---- calls --------------------------------------------------------------------------


def _calls(run: Run, bench: str, page: Page) -> list[str]:
    found = rows(run, bench)
    made = {
        record["call"]: record["text"]
        for record in run.others
        if record["kind"] == "system_calls"
    }
    plain = [row for row in found if "." not in row.phase]
    body = []
    for row in plain:
        store = found.stores(row)[0]
        cells = [cell(found.spread(row, store))]
        for part in ("p50", "p99"):
            clocked = dataclasses.replace(row, phase=f"{row.phase}.{part}")
            known = clocked in set(found)
            cells.append(cell(found.spread(clocked, store)) if known else "")
        name = row.phase.removesuffix("_rows")
        body.append([label(row.phase), *cells, made.get(name, "")])
    costs = [
        (label(row.phase), found.stores(row)[0], spread)
        for row in plain
        if (spread := found.spread(row, found.stores(row)[0])) is not None
    ]
    counts = {where(row, "entries") for row in plain}
    words = ", ".join(number(count) for count in sorted(counts - {None}))
    title = f"calls that move no bytes, {words} entries"
    panel = across(title, "us a call or a key; grey: not ours", costs)
    head = ["us", "loop, median (range)", "clocked p50", "p99", "system calls a call"]
    return [
        *page.picture("calls", title, [panel], height=0.24 * len(costs) + 1),
        *table(head, body),
        "",
    ]


SECTIONS = (
    Section("kv_bench", "python -m bench --suite kv_bench", _kv_bench),
    Section("kv_churn", "python -m bench --suite kv_churn", _churn),
    Section("writers", "python -m bench --suite writers", _comparison),
    Section(
        "larger_than_memory", "python -m bench --suite larger_than_memory", _comparison
    ),
    Section("policy", "python -m bench --suite policy", _over_capacity),
    Section("trace", "python -m bench --suite trace", _over_capacity),
    Section("calls", "python -m bench --suite calls", _calls),
    Section("scaling", "python -m bench --suite scaling", _scaling),
)
"""In the order of the page; the template has a place for each."""
