# SPDX-License-Identifier: Apache-2.0
"""How cost grows: over threads, processes, batches, entries, bytes of a block.

Of this engine alone; what others do at one size is in the suites that compare.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path

from bench.records import Run, Spread, Verdict
from bench.scaling import entries, growth, loads
from bench.suites import Context, Suite

__all__ = ["SUITE", "costs"]

_KIB, _MIB = 1 << 10, 1 << 20
_COMMAND = "python -m bench --suite scaling"
_FULL = f"{_COMMAND} --full"
_ENTRIES_MIN = 100_000  # with fewer, everything fits into caches: no verdict
_OPEN_NS = 50.0
_SHM = Path("/dev/shm")


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    plan: loads.Plan
    entries: tuple[int, ...]
    rounds: int
    """Of the measurements over entries."""


_SHORT = _Size(
    loads.Plan(
        dataset=256 * _MIB,
        rounds=3,
        seconds=0.15,
        workers=(1, 2, 4, 8),
        batches=(1, 4, 16, 64, 128),
        block_sizes=(64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 32 * _MIB),
        batch_block=2 * _MIB,
    ),
    entries=(1000, 10_000, 100_000, 1_000_000),
    rounds=3,
)
_FULL_SIZE = _Size(
    loads.Plan(
        dataset=1024 * _MIB,
        rounds=5,
        seconds=1.0,
        workers=(1, 2, 3, 4, 5, 6, 7, 8),
        batches=(1, 2, 4, 8, 16, 32, 64, 128),
        block_sizes=tuple(64 * _KIB << step for step in range(10)),
        batch_block=2 * _MIB,
    ),
    entries=(1000, 10_000, 100_000, 1_000_000, 10_000_000),
    rounds=5,
)
_TINY = _Size(
    loads.Plan(
        dataset=4 * _MIB,
        rounds=1,
        seconds=0.005,
        workers=(1, 2),
        batches=(1, 8),
        block_sizes=(64 * _KIB,),
        batch_block=256 * _KIB,
    ),
    entries=(1000, 4000),
    rounds=1,
)


def _run(context: Context, size: _Size) -> None:
    def note(text: str) -> None:
        context.console.print(text, soft_wrap=True)
        context.writer.other("left_out", {"bench": loads.BENCH, "text": text})

    add = context.writer.sample
    folder = context.folder
    for part in (loads.threads, loads.processes, loads.batches, loads.blocks):
        context.console.print(f"scaling: {part.__name__}")
        part(folder, size.plan, add)
    context.console.print("scaling: entries")
    # Of the calls, not of a device: in memory where there is such a file system.
    in_memory = _SHM.is_dir() and shutil.disk_usage(_SHM).free > 1 << 30
    parent = _SHM if in_memory else folder
    entries.measure(parent, size.entries, size.rounds, add, note)
    _print(context)


def _short(context: Context) -> None:
    _run(context, _TINY if context.tiny else _SHORT)


def _full(context: Context) -> None:
    _run(context, _TINY if context.tiny else _FULL_SIZE)


def costs(run: Run, call: str) -> dict[int, float]:
    """Return the median cost of a call by number of entries."""
    counts = {
        sample.params["entries"]
        for sample in run.select(bench=loads.BENCH, phase=f"entries.{call}")
    }
    found = {
        count: run.median(bench=loads.BENCH, phase=f"entries.{call}", entries=count)
        for count in sorted(counts)
    }
    return {count: cost for count, cost in found.items() if cost is not None}


def _print(context: Context) -> None:
    run = context.writer.run
    for phase in run.names("phase", bench=loads.BENCH):
        found = run.select(bench=loads.BENCH, phase=phase)
        axis = phase.split(".")[0]
        for block in dict.fromkeys(sample.block_bytes for sample in found):
            cells: dict[str, list[float]] = {}
            for sample in found:
                if sample.block_bytes == block:
                    at = next(iter(sample.params.values()), "")
                    cells.setdefault(f"{at}", []).append(sample.value)
            shown = "  ".join(
                f"{at}: {spread.median:.4g}"
                for at, values in cells.items()
                if (spread := Spread.of(values)) is not None
            )
            where = f" {block} B" if axis != "entries" and block else ""
            context.console.print(
                f"{phase}{where}, {found[0].unit}:  {shown}", soft_wrap=True
            )


def _flat(run: Run, call: str) -> Verdict:
    row = f"cost of {call.replace('_', ' ')}, over entries"
    found = costs(run, call)
    grown = growth.fit(found)
    if grown is None or max(found) < _ENTRIES_MIN:
        return Verdict(
            bench=loads.BENCH,
            row=row,
            reached=None,
            value=None,
            target=growth.FLAT,
            text=f"grows with entries to the power of {growth.FLAT} at most",
            command=_COMMAND,
        )
    counts = sorted(found)
    return Verdict(
        bench=loads.BENCH,
        row=row,
        reached=grown.last_slope <= growth.FLAT,
        value=grown.last_slope,
        target=growth.FLAT,
        text=f"{grown.order}: {found[counts[0]]:.3g} us at {counts[0]:,} entries, "
        f"{found[counts[-1]]:.3g} us at {counts[-1]:,}; power {grown.last_slope:.2f} "
        f"over the two largest, {grown.slope:.2f} over all",
        command=_FULL,
    )


def _below(row: str, value: float | None, target: float, text: str) -> Verdict:
    return Verdict(
        bench=loads.BENCH,
        row=row,
        reached=None if value is None else value <= target,
        value=value,
        target=target,
        text=text,
        command=_COMMAND,
    )


def _verdicts(run: Run) -> Iterable[Verdict]:
    for call in (*entries.CALLS, "clear", "open_second"):
        yield _flat(run, call)
    found = costs(run, "open_first")
    opened = growth.fit(found) if max(found, default=0) >= _ENTRIES_MIN else None
    each = None if opened is None else opened.each * 1e3
    row = "first open when nobody lives, for each entry"
    text = "25 to 50 ns an entry"
    if each is not None:
        text = f"{each:.0f} ns an entry between the two largest volumes"
    yield _below(row, each, _OPEN_NS, text)


SUITE = Suite(
    name=loads.BENCH,
    help="How cost grows over threads, processes, batches, entries, block sizes.",
    short=_short,
    full=_full,
    verdicts=_verdicts,
)
