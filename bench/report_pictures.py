# SPDX-License-Identifier: Apache-2.0
"""Pictures of the report: SVG on white, the same bytes for the same records."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Spread
from bench.report_text import LIMITS, OURS, label, number

__all__ = ["BYTES_MAX", "Curve", "across", "bars", "color", "curves", "grid", "save"]

BYTES_MAX = 150_000
"""No picture is larger."""

Curve = tuple[str, Sequence[tuple[float, Spread]]]
"""Name of a line, and its points."""

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "cyclone_kv",  # else ids are random
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
_OURS_COLOR = "#0b62a4"
_COLORS = ("#e08214", "#7b5ea7", "#4d9a5b", "#c2496b", "#8c6d31", "#3aa6a6", "#555555")
_LIMIT_COLOR = "#b8b8b8"
_MACHINE = "(the machine)"  # in the name of a line that is a limit
_KNOWN = ("lmdb", "rocksdb", "files", "vllm_fs", "lmcache_disk")


def color(store: str, others: Sequence[str] = ()) -> str:
    """Return the color of a store: the same one in all pictures."""
    if store == OURS:
        return _OURS_COLOR
    if store in LIMITS:
        return _LIMIT_COLOR
    order = [*_KNOWN, *(name for name in others if name not in _KNOWN)]
    place = order.index(store) if store in order else len(order)
    return _COLORS[place % len(_COLORS)]


def save(figure: Figure, path: Path) -> None:
    """Write a figure; ValueError when it is too large for a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    # matplotlib ends lines with blanks, which a repository does not want.
    text = re.sub(r"[ \t]+$", "", path.read_text(), flags=re.MULTILINE)
    path.write_text(text)
    if len(text) > BYTES_MAX:
        raise ValueError(f"{path} has {len(text)} bytes; at most {BYTES_MAX}")


def grid(
    panels: Sequence[Callable[[Axes], None]],
    path: Path,
    *,
    columns: int = 2,
    height: float = 2.7,
    width: float = 9.0,
) -> None:
    """Draw panels beside and below each other."""
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False)
        for place, panel in enumerate(panels):
            panel(axes[place // columns][place % columns])
        for place in range(len(panels), lines * columns):
            axes[place // columns][place % columns].set_axis_off()
        save(figure, path)


def bars(
    title: str,
    unit: str,
    groups: Mapping[str, Mapping[str, Spread]],
    *,
    log: bool = False,
) -> Callable[[Axes], None]:
    """Return a panel: a group of bars for each name, a bar for each store, spread."""
    stores = list(dict.fromkeys(store for group in groups.values() for store in group))

    def draw(axes: Axes) -> None:
        width = 0.84 / max(len(stores), 1)
        for place, store in enumerate(stores):
            at = [n for n, group in enumerate(groups.values()) if store in group]
            found = [list(groups.values())[n][store] for n in at]
            medians = [spread.median for spread in found]
            axes.bar(
                [n - 0.42 + (place + 0.5) * width for n in at],
                medians,
                width * 0.92,
                label=label(store),
                color=color(store, stores),
                hatch="///" if store in LIMITS else None,
                edgecolor="white",
                linewidth=0.4,
                yerr=_errors(found),
                error_kw={"elinewidth": 0.8, "ecolor": "#222222"},
            )
        spreads = [spread for group in groups.values() for spread in group.values()]
        most = max((spread.high for spread in spreads), default=1.0)
        least = min((spread.low for spread in spreads if spread.low > 0), default=0.1)
        if log:
            axes.set_yscale("log")
            axes.set_ylim(bottom=10.0 ** math.floor(math.log10(least)))
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        # Room for the names above the bars.
        axes.set_ylim(top=(most * 12 if log else most * 1.35) or 1.0)
        axes.set_xticks(range(len(groups)), list(groups))
        axes.grid(visible=False, axis="x")
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.legend(ncols=2 if len(stores) > 3 else 1)

    return draw


def _errors(found: Sequence[Spread]) -> list[list[float]]:
    return [
        [spread.median - spread.low for spread in found],
        [spread.high - spread.median for spread in found],
    ]


def across(
    title: str, unit: str, costs: Sequence[tuple[str, str, Spread]]
) -> Callable[[Axes], None]:
    """Return a panel of horizontal bars on a logarithmic axis: name, store, spread."""

    def draw(axes: Axes) -> None:
        names = [name for name, _, _ in costs]
        found = [spread for _, _, spread in costs]
        axes.barh(
            range(len(costs)),
            [spread.median for spread in found],
            color=[color(store) for _, store, _ in costs],
            xerr=_errors(found),
            error_kw={"elinewidth": 0.8, "ecolor": "#222222"},
        )
        for place, spread in enumerate(found):
            axes.annotate(
                number(spread.median),
                (spread.high, place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
        axes.set_xscale("log")
        axes.set_yticks(range(len(costs)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_title(title)
        axes.set_xlabel(unit)

    return draw


def curves(
    title: str,
    unit: str,
    lines: Sequence[Curve],
    *,
    x: str,
    x_log: int = 0,
    y_log: bool = False,
    zero: bool = True,
    by_store: bool = False,
    mark: str = "o",
) -> Callable[[Axes], None]:
    """Return a panel of lines with the range of the rounds around them.

    ``x_log`` is the base of a logarithmic axis; ``by_store``: lines are named as stores
    and have their colors.
    """
    names = [name for name, _ in lines]

    def draw(axes: Axes) -> None:
        for place, (name, points) in enumerate(lines):
            at = [value for value, _ in points]
            found = [spread for _, spread in points]
            chosen = color(name, names) if by_store else _line_color(place)
            axes.plot(
                at,
                [spread.median for spread in found],
                color=chosen,
                marker=mark,
                markersize=3,
                linewidth=1.4,
                linestyle="--" if name in LIMITS or _MACHINE in name else "-",
                label=label(name) if by_store else name,
            )
            if any(spread.high > spread.low for spread in found):
                axes.fill_between(
                    at,
                    [spread.low for spread in found],
                    [spread.high for spread in found],
                    color=chosen,
                    alpha=0.15,
                    linewidth=0,
                )
        if x_log:
            axes.set_xscale("log", base=x_log)
            if x_log == 2:
                ticks = sorted({value for _, points in lines for value, _ in points})
                axes.set_xticks(ticks, [number(value) for value in ticks])
                axes.xaxis.set_minor_locator(ticker.NullLocator())
        if y_log:
            axes.set_yscale("log")
        elif zero:
            axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(unit)
        _legend(axes, len(lines))

    return draw


def _legend(axes: Axes, count: int) -> None:
    """Name the lines: beside them where there are many."""
    if count > 2:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        axes.legend()


def _line_color(place: int) -> str:
    return (_OURS_COLOR, *_COLORS)[place % (1 + len(_COLORS))]
