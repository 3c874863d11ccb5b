# SPDX-License-Identifier: Apache-2.0
"""What the calls cost that move no bytes, and the system calls they make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.calls import volume
from bench.calls.system_calls import count
from bench.records import Run, Sample, Spread, Verdict
from bench.suites import Context, Suite

__all__ = ["SUITE"]

BENCH = "calls"

_ROOT = Path(__file__).resolve().parents[2]
_COMMAND = "python -m bench --suite calls"
_SILENT = ("view", "contains", "longest_prefix")
_ROUNDS = 5
_OTHERS = {"nothing": "loop", "memoryview": "memoryview", "dict_lookup": "dict"}
_OTHERS |= {"dict_lookup_many": "dict"}
_VIEW_US, _VIEW_TIMES, _KEY_US = 0.6, 5.0, 0.25


def _short(context: Context) -> None:
    _run(context, rounds=60)


def _full(context: Context) -> None:
    _run(context, rounds=400)


def _run(context: Context, rounds: int) -> None:
    entries = 2000 if context.tiny else volume.ENTRIES
    parent = context.folder if context.tiny else None
    with volume.make(parent, entries) as path:
        context.console.print(f"calls: {entries} blocks in {path.parent}")
        for sample in _benchmarks(path, entries, 2 if context.tiny else rounds):
            context.writer.sample(sample)
        counts = count(path, entries)
    for name, found in counts.items():
        context.writer.other("system_calls", _as_record(name, found))
        if found.each is not None:
            sample = _sample(name, found.each, 0, entries, unit="system calls")
            context.writer.sample(sample)
    _print(context)


def _as_record(name: str, found: Any) -> dict[str, Any]:
    return {
        "bench": BENCH,
        "call": name,
        "each": found.each,
        "names": dict(found.names),
        "beside": found.beside,
        "text": found.text,
    }


def _sample(
    phase: str,
    value: float,
    number: int,
    entries: int,
    *,
    unit: str = "us",
    store: str = "cyclone_kv",
) -> Sample:
    return Sample(
        bench=BENCH,
        phase=f"{phase}.system_calls" if unit == "system calls" else phase,
        store=store,
        value=value,
        unit=unit,
        better="lower",
        block_bytes=volume.BLOCK_BYTES,
        round=number,
        params={"entries": entries},
    )


def _benchmarks(path: Path, entries: int, rounds: int) -> list[Sample]:
    """Run the measurements of ``test_calls.py`` in a process of their own."""
    with tempfile.TemporaryDirectory(prefix="calls-") as folder:
        output = Path(folder) / "benchmarks.json"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("bench/calls", f"--volume={path}", f"--entries={entries}"),
            *(f"--rounds={rounds}", f"--benchmark-json={output}"),
            *("--benchmark-disable-gc", "--benchmark-enable", "-p", "no:xdist"),
        ]
        # Else it takes itself for one of the workers that a test may run in.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTEST_XDIST")
        }
        done = subprocess.run(
            command,
            cwd=_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"pytest failed:\n{done.stdout[-2000:]}{done.stderr}")
        report = json.loads(output.read_text())
    return [sample for found in report["benchmarks"] for sample in samples_of(found)]


def samples_of(found: dict[str, Any]) -> list[Sample]:
    """Return the samples in one benchmark of pytest-benchmark's report.

    The rounds are put into five groups by time, each with its median: one sample each,
    so that the spread is that of the machine and not that of the keys.
    """
    phase = found["name"].removeprefix("test_")
    extra = found["extra_info"]
    entries = extra["entries"]
    data = [seconds * 1e6 / extra["divide_by"] for seconds in found["stats"]["data"]]
    store = _OTHERS.get(phase, "cyclone_kv")
    groups = min(_ROUNDS, len(data))
    samples = []
    for number in range(groups):
        begin, end = (len(data) * (number + step) // groups for step in (0, 1))
        spread = Spread.of(data[begin:end])
        if spread is not None:
            samples.append(_sample(phase, spread.median, number, entries, store=store))
    for name in ("p50", "p99"):
        value = extra.get(f"clocked_{name}_us")
        if value is not None:
            samples.append(_sample(f"{phase}.{name}", value, 0, entries, store=store))
    return samples


def _print(context: Context) -> None:
    from rich.table import Table

    run = context.writer.run
    table = Table(title="calls that move no bytes; us a call or a key")
    for column in ("call", "median (least-most)", "p50", "p99", "system calls a call"):
        table.add_column(column)
    made = {
        record["call"]: record["text"]
        for record in run.others
        if record["kind"] == "system_calls"
    }
    for phase in run.names("phase", bench=BENCH):
        if "." in phase:
            continue
        spread = run.spread(bench=BENCH, phase=phase)
        unit = run.select(bench=BENCH, phase=phase)[0].unit
        clocked = [
            "" if value is None else f"{value:.2f}"
            for value in (
                run.median(bench=BENCH, phase=f"{phase}.p50"),
                run.median(bench=BENCH, phase=f"{phase}.p99"),
            )
        ]
        shown = "" if spread is None else spread.text(3)
        name = phase.removesuffix("_rows")
        shown += f" {unit}" if unit != "us" else ""
        table.add_row(phase, shown, *clocked, made.get(name, ""))
    context.console.print(table)


def _below(
    row: str, value: float | None, target: float, text: str, unit: str
) -> Verdict:
    if value is not None:
        text = f"{value:.3g} {unit}; {text}"
    return Verdict(
        bench=BENCH,
        row=row,
        reached=None if value is None else value <= target,
        value=value,
        target=target,
        text=text,
        command=_COMMAND,
    )


def _verdicts(run: Run) -> Iterable[Verdict]:
    def median(phase: str) -> float | None:
        """Of the volume of the definition; a small one says nothing."""
        return run.median(bench=BENCH, phase=phase, entries=volume.ENTRIES)

    least = median("memoryview.p50")
    target = max(_VIEW_US, _VIEW_TIMES * (least or 0))
    text = f"0.6 us at most, or 5 x memoryview(b) ({least or 0:.3g} us); clock included"
    yield _below(
        "warm view, p50, 500 000 entries", median("view.p50"), target, text, "us"
    )
    for call in ("contains_many", "longest_prefix"):
        for kind, words in (("", "a list"), ("_rows", "one buffer")):
            row = f"{call}, 10 000 keys in {words}"
            value = median(f"{call}{kind}")
            yield _below(row, value, _KEY_US, "0.25 us a key at most", "us a key")
    made = [median(f"{call}.system_calls") for call in _SILENT]
    known = [value for value in made if value is not None]
    value = max(known) if len(known) == len(made) else None
    row = "system calls of a warm view, contains, longest_prefix"
    yield _below(row, value, 0, "none", "a call")


SUITE = Suite(
    name=BENCH,
    help="Calls that move no bytes, at 500 000 entries, with their system calls.",
    short=_short,
    full=_full,
    verdicts=_verdicts,
)
