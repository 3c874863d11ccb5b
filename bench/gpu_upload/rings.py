# SPDX-License-Identifier: Apache-2.0
"""How deep the pinned ring should be, and how large its slots: all of a few shapes.

Each shape uploads the same blocks, warm (in memory, batches with two under way) and
cold (nothing in memory, every block once). In a round all shapes take their turn. What
is printed in the end names the best shape and how far the default stays behind it; on
a fake driver it names none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bench.machine import CacheDropper
from bench.records import Run, Spread
from bench.sizes import human_size
from cyclone_kv import cuda
from cyclone_kv.cuda.ring import Shape

if TYPE_CHECKING:
    from bench.gpu_upload import _Bench

__all__ = ["PHASES", "best", "block_sizes", "panels", "shapes", "sweep", "table"]

PHASES = ("ring_warm", "ring_cold")
_READ_BYTES = 4 << 20


def shapes(slots: tuple[int, ...], slot_bytes: tuple[int, ...]) -> list[Shape]:
    """Return all shapes of these, and the default."""
    found = [Shape(*each) for each in itertools.product(slots, slot_bytes)]
    return found if Shape() in found else [*found, Shape()]


def sweep(bench: _Bench, chosen: list[Shape], rounds: int) -> None:
    """Measure each shape; the volume is stored already and nobody has it open."""
    dropper = CacheDropper()
    stored = [p for p in bench.folder.rglob("*") if p.is_file()]
    try:
        for number in range(rounds):
            turn = number % len(chosen)
            order = chosen[turn:] + chosen[:turn]
            # Cold uploads read past the page cache: they would leave nothing in it.
            _read(bench.path)
            for shape in order:
                _measure(bench, shape, number, cold=False)
            for shape in order:
                dropper.drop(bench.folder, stored)
                _measure(bench, shape, number, cold=True)
    finally:
        cuda.set_ring(Shape().slots, Shape().slot_bytes)


def _read(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(_READ_BYTES):
            pass


def _measure(bench: _Bench, shape: Shape, number: int, *, cold: bool) -> None:
    from bench.gpu_upload import ways

    batch = min(bench.largest, bench.data.count)
    cuda.set_ring(shape.slots, shape.slot_bytes)
    with ways.opened(bench.path, bench.capacity) as cache:
        way = ways.Staged(bench.gpu, bench.data, cache)
        # The ring is made by the first upload: not in the time of the others.
        first = way.start([0], bench.places(1, 0), 0)
        way.finish(first)
        if first.staged_bytes == 0:
            bench.note(f"no ring of {_name(shape)}: no pinned memory")
            return
        if cold:
            speed = bench.once_over(way, batch)
        else:
            if number == 0:
                bench.check(way)
            speed = bench.sustained(way, bench.batches(batch))
    bench.add(
        "ring_cold" if cold else "ring_warm",
        "staged",
        speed,
        number,
        batch=batch,
        slots=shape.slots,
        slot_bytes=shape.slot_bytes,
    )


def _name(shape: Shape) -> str:
    return f"{shape.slots} x {human_size(shape.slot_bytes)}"


def _found(run: Run, nbytes: int) -> Iterator[tuple[Shape, dict[str, Spread]]]:
    """Return the shapes that were measured with blocks of a size, by phase."""
    what: dict[str, Any] = {"store": "staged", "block_bytes": nbytes}
    samples = [s for phase in PHASES for s in run.select(phase=phase, **what)]
    for pair in sorted({(s.params["slots"], s.params["slot_bytes"]) for s in samples}):
        shape = Shape(*pair)
        yield (
            shape,
            {
                phase: spread
                for phase in PHASES
                if (
                    spread := run.spread(
                        phase=phase,
                        slots=shape.slots,
                        slot_bytes=shape.slot_bytes,
                        **what,
                    )
                )
            },
        )


def best(run: Run, nbytes: int, phase: str) -> tuple[Shape, float] | None:
    """Return the best shape, and the default's share of its speed."""
    medians = {
        shape: spreads[phase].median
        for shape, spreads in _found(run, nbytes)
        if phase in spreads
    }
    if Shape() not in medians:
        return None
    top = max(medians, key=lambda shape: medians[shape])
    return top, medians[Shape()] / medians[top]


def block_sizes(run: Run) -> list[int]:
    """Return the sizes of blocks with which shapes were compared."""
    return [size for size in run.names("block_bytes", phase=PHASES[1]) if size]


def table(run: Run, nbytes: int, mark: str) -> Table:
    """Return the table of all shapes for a size of blocks."""
    found = list(_found(run, nbytes))
    text = f"pinned ring by shape, staged uploads of {human_size(nbytes)} blocks, GB/s"
    made = Table(title=text + mark, title_justify="left")
    for heading in ("slots x size", "memory", "warm", "cold"):
        made.add_column(heading, justify="left" if heading[0] == "s" else "right")
    for shape, spreads in found:
        cells = [f"{spreads[p].median:.2f}" if p in spreads else "-" for p in PHASES]
        default = " (the default)" if shape == Shape() else ""
        made.add_row(_name(shape) + default, human_size(shape.nbytes), *cells)
    return made


def panels(
    run: Run, nbytes: int, mark: str, bars: Callable[..., Callable[[Any], None]]
) -> list[Callable[[Any], None]]:
    """Return a panel for warm and one for cold."""
    made = []
    for phase, word in zip(PHASES, ("warm", "cold"), strict=True):
        title = f"pinned ring, {human_size(nbytes)} blocks, {word}{mark}"
        groups: dict[str, dict[str, Spread]] = {}
        for shape, spreads in _found(run, nbytes):
            if phase in spreads:
                group = groups.setdefault(
                    f"slots of {human_size(shape.slot_bytes)}", {}
                )
                group[f"{shape.slots} slots"] = spreads[phase]
        if groups:
            made.append(bars(title, "GB/s", groups))
    return made
