# SPDX-License-Identifier: Apache-2.0
"""kv_churn v1: a bounded tier, several times smaller than what is asked of it.

Each run is a process of its own in a memory cgroup of its own (``churn_worker``), with
an empty tier at its start. In a round every contender runs once; who comes first
rotates.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.table import Table

from bench import cgroup, churn_verdicts, generators
from bench.churn_blocks import BlockMaker
from bench.churn_tiers import TIERS, available
from bench.churn_worker import Job
from bench.recording import console_for, recording
from bench.records import Run, Sample, Writer
from bench.sizes import human_size
from bench.suites import Context, Suite
from cyclone_kv import parse_size

__all__ = ["BENCH", "DEFAULT", "FULL", "SHORT", "SUITE", "Scale", "command", "measure"]

BENCH = "kv_churn"
Better = Literal["higher", "lower"]
_GIB = 1 << 30
_MIB = 1 << 20
_ROOM = 2  # times the capacity on the disk: LMDB's map, RocksDB's garbage
_RUN_SECONDS_MAX = 4 * 3600


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large, how long, and what of it."""

    name: str
    capacity_bytes: int
    memory_bytes: int
    seconds: float
    rounds: int
    threads: tuple[int, ...]
    tiers: tuple[str, ...]
    block_bytes: int = 2 * _MIB
    header_bytes: int = 64
    patterns: tuple[str, ...] = ("zipf", "zipf+scan")
    reopen_gets: int = 10_000
    first_round: int = 0
    """Rounds that are measured in several runs are numbered on."""
    small_blocks: bool = True
    """Also write amplification at 64 KiB, of the engine alone."""
    small_block_rounds: int = sys.maxsize
    """At most so many of the rounds have them."""


_OURS = ("cyclone_kv",)
_CORE = (*_OURS, "lmdb", "device")  # what the numbers to reach are about
_EVERY = tuple(TIERS)

SHORT = Scale(
    name="short",
    capacity_bytes=768 * _MIB,
    memory_bytes=192 * _MIB,
    seconds=5.0,
    rounds=3,
    threads=(4,),
    tiers=_CORE,
    reopen_gets=200,
    small_block_rounds=1,
)
DEFAULT = Scale(
    name="default",
    capacity_bytes=4 * _GIB,
    memory_bytes=_GIB,
    seconds=60.0,
    rounds=3,
    threads=(4, 1),
    tiers=_EVERY,
)
FULL = dataclasses.replace(
    DEFAULT,
    name="full",
    capacity_bytes=16 * _GIB,
    memory_bytes=4 * _GIB,
    seconds=120.0,
)
_TINY = dataclasses.replace(
    SHORT,
    name="tiny",
    capacity_bytes=64 * _MIB,
    block_bytes=256 << 10,
    memory_bytes=192 * _MIB,
    seconds=0.3,
    rounds=1,
    threads=(2,),
    reopen_gets=50,
)


def _one(job: Job, memory_bytes: int) -> dict[str, Any]:
    """Run a job in a cgroup, or without one and say so; return its result."""
    folder = Path(job.folder)
    folder.mkdir(parents=True)
    try:
        with cgroup.memory_cgroup("cyclone-kv-churn", memory_bytes) as group:
            if isinstance(group, cgroup.MemoryCgroup):
                job = dataclasses.replace(job, cgroup=str(group.path))
                about: dict[str, Any] = {
                    "cgroup": group.version,
                    "memory_bytes": group.limit_bytes,
                }
            else:
                about = {"cgroup": None, "no_cgroup": group.reason}
            text = json.dumps(dataclasses.asdict(job))
            done = subprocess.run(
                [sys.executable, "-m", "bench.churn_worker", text],
                cwd=Path(__file__).resolve().parents[1],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
                timeout=_RUN_SECONDS_MAX,
            )
        if done.returncode != 0:
            raise click.ClickException(
                f"churn of {job.tier} ended with {done.returncode}"
            )
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result | about
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_METRICS: tuple[tuple[str, str, tuple[str, ...], Better], ...] = (
    # phase, unit, where it is in the result, what is better
    ("served", "GB/s", ("served_gb_per_second",), "higher"),
    ("hit_ratio", "ratio", ("hit_ratio",), "higher"),
    ("gets", "ops/s", ("gets_per_second",), "higher"),
    ("hit_p50", "us", ("hit_us", "0.5"), "lower"),
    ("hit_p99", "us", ("hit_us", "0.99"), "lower"),
    ("hit_p999", "us", ("hit_us", "0.999"), "lower"),
    ("insert_p50", "us", ("insert_us", "0.5"), "lower"),
    ("insert_p99", "us", ("insert_us", "0.99"), "lower"),
    ("write_amplification", "ratio", ("write_amplification",), "lower"),
    ("footprint", "bytes", ("footprint_bytes",), "lower"),
    ("peak_memory", "bytes", ("peak_memory_bytes",), "lower"),
    ("reopen", "s", ("reopen_seconds",), "lower"),
    ("reopen_ratio", "ratio", ("reopen_ratio",), "higher"),
)


def _samples(
    job: Job, scale: Scale, number: int, result: dict[str, Any]
) -> Iterator[Sample]:
    params = {
        "pattern": _pattern(job),
        "threads": job.threads,
        "capacity_bytes": job.capacity_bytes,
        "memory_bytes": result.get("memory_bytes"),
        "header_bytes": job.header_bytes,
        "scale": scale.name,
    }
    for phase, unit, path, better in _METRICS:
        value: Any = result
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            yield Sample(
                bench=BENCH,
                phase=phase,
                store=job.tier,
                value=float(value),
                unit=unit,
                better=better,
                block_bytes=job.block_bytes,
                round=number,
                params=params,
            )


def _pattern(job: Job) -> str:
    return "zipf+scan" if job.scan else "zipf"


def _jobs(scale: Scale, tiers: Sequence[str], folder: Path) -> Iterator[list[Job]]:
    """Yield the runs of a round, those that are compared with each other together."""
    common: dict[str, Any] = {
        "folder": str(folder),
        "capacity_bytes": scale.capacity_bytes,
        "seconds": scale.seconds,
        "reopen_gets": scale.reopen_gets,
    }
    for pattern in scale.patterns:
        for threads in scale.threads:
            yield [
                Job(
                    tier=tier,
                    block_bytes=scale.block_bytes,
                    header_bytes=scale.header_bytes,
                    scan=pattern == "zipf+scan",
                    threads=threads,
                    **common,
                )
                for tier in tiers
            ]
    if scale.small_blocks:
        for header_bytes in (64, 0):
            yield [
                Job(
                    tier="cyclone_kv",
                    block_bytes=min(scale.block_bytes, 64 << 10),
                    header_bytes=header_bytes,
                    scan=False,
                    threads=max(scale.threads),
                    **common,
                )
            ]


def measure(scale: Scale, parent: Path, writer: Writer, console: Console) -> None:
    """Run all rounds; write samples, and each result in full (kind "churn_run")."""
    tiers = []
    for tier in scale.tiers:
        reason = available(tier)
        if reason is None:
            tiers.append(tier)
        else:
            console.print(f"{tier} is left out: {reason}")
            writer.other("churn_left_out", {"store": tier, "reason": reason})
    free = shutil.disk_usage(parent).free
    if free < _ROOM * scale.capacity_bytes + _GIB:
        raise click.ClickException(
            f"{parent} has {free >> 20} MiB free; churn of {scale.name} size needs "
            f"{_ROOM * scale.capacity_bytes >> 20} MiB and leaves 1 GiB alone"
        )
    console.print(
        f"kv_churn, {scale.name}: a tier of {human_size(scale.capacity_bytes)} under "
        f"{human_size(scale.memory_bytes)}, {scale.seconds:g} s a run, "
        f"{scale.rounds} rounds"
    )
    _check_maker(scale.block_bytes)
    scratch = Path(tempfile.mkdtemp(prefix="churn-", dir=parent))
    said = False
    try:
        for number in range(scale.first_round, scale.first_round + scale.rounds):
            small = number - scale.first_round < scale.small_block_rounds
            now = dataclasses.replace(scale, small_blocks=scale.small_blocks and small)
            for jobs in _jobs(now, tiers, scratch / "run"):
                turn = number % len(jobs)
                for job in [*jobs[turn:], *jobs[:turn]]:
                    load = os.getloadavg()[0]
                    result = _one(job, scale.memory_bytes)
                    if result["cgroup"] is None and not said:
                        console.print(
                            "NO MEMORY LIMIT: the runs are not in a memory cgroup, "
                            f"their numbers are those of memory: {result['no_cgroup']}"
                        )
                        said = True
                    if not result["warm_up_complete"]:
                        console.print(
                            f"{job.tier}: the warm-up was broken off after "
                            f"{result['warm_up_inserts']} inserts"
                        )
                    for sample in _samples(job, scale, number, result):
                        writer.sample(sample)
                    writer.other(
                        "churn_run",
                        dataclasses.asdict(job)
                        | {"round": number, "scale": scale.name, "load_before": load}
                        | result,
                    )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for table in tables(writer.run):
        console.print(table)


def _check_maker(nbytes: int) -> None:
    """Refuse to measure with payloads that are not those of the definition."""
    target = memoryview(bytearray(nbytes))
    for index in (0, 1, generators.SCAN_BASE):
        BlockMaker(nbytes).fill(index, target)
        if target != generators.value(index, nbytes):
            raise click.ClickException(f"payload {index} is not that of the definition")


_COLUMNS = (
    ("served", "served GB/s", 1.0, 2),
    ("hit_ratio", "hit ratio", 1.0, 3),
    ("hit_p50", "hit p50 us", 1.0, 0),
    ("hit_p99", "hit p99 ms", 1e3, 2),
    ("hit_p999", "p99.9 ms", 1e3, 2),
    ("insert_p50", "insert p50 ms", 1e3, 2),
    ("insert_p99", "p99 ms", 1e3, 2),
    ("write_amplification", "write ampl.", 1.0, 3),
    ("peak_memory", "peak MiB", 2.0**20, 0),
    ("footprint", "files MiB", 2.0**20, 0),
    ("reopen_ratio", "reopen", 1.0, 3),
)


def tables(run: Run) -> Iterator[Table]:
    """Yield a table for each block size, pattern and number of threads."""
    seen = []
    for sample in run.select(bench=BENCH, phase="served"):
        params = sample.params
        what = {
            "block_bytes": sample.block_bytes,
            **{name: params[name] for name in params if name != "memory_bytes"},
        }
        if what not in seen:
            seen.append(what)
    for what in seen:
        table = Table(
            title=f"{what['pattern']}, {what['threads']} threads, "
            f"{human_size(what['block_bytes'] or 0)} blocks, tier of "
            f"{human_size(what['capacity_bytes'])}, {what['scale']}: "
            "median (least-most)",
            title_justify="left",
        )
        table.add_column("")
        for _, label, _, _ in _COLUMNS:
            table.add_column(label, justify="right")
        for store in run.names("store", bench=BENCH, phase="served", **what):
            cells = []
            for phase, _, divisor, digits in _COLUMNS:
                samples = run.by_round(bench=BENCH, phase=phase, store=store, **what)
                values = sorted(sample.value / divisor for sample in samples.values())
                cells.append(_cell(values, digits))
            table.add_row(store, *cells)
        yield table


def _cell(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    middle = values[(len(values) - 1) // 2]
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({values[0]:.{digits}f}-{values[-1]:.{digits}f})"


def _short(context: Context) -> None:
    scale = _TINY if context.tiny else SHORT
    measure(scale, context.folder, context.writer, context.console)


def _full(context: Context) -> None:
    scale = FULL
    if shutil.disk_usage(context.folder).free < _ROOM * FULL.capacity_bytes + _GIB:
        context.console.print(
            "kv_churn: no room for 16 GiB under 4, 4 GiB under 1 runs"
        )
        scale = DEFAULT
    measure(scale, context.folder, context.writer, context.console)


SUITE = Suite(
    name=BENCH,
    help="A bounded tier under zipf and zipf+scan, in a memory cgroup.",
    short=_short,
    full=_full,
    verdicts=churn_verdicts.verdicts,
)

_SCALES = {scale.name: scale for scale in (SHORT, DEFAULT, FULL)}


@click.command("churn")
@click.option("--short", "scale", flag_value="short", help="768 MiB under 192, 5 s.")
@click.option("--full", "scale", flag_value="full", help="16 GiB under 4 GiB, 120 s.")
@click.option("--capacity", help="Of the tier, such as 2GiB.")
@click.option("--memory", help="Of the cgroup, such as 512MiB.")
@click.option("--block", help="Payload of a block, such as 512KiB.")
@click.option("--seconds", type=float, help="Of the measured phase.")
@click.option("--rounds", type=click.IntRange(min=1))
@click.option("--first-round", type=click.IntRange(min=0), help="Number of the first.")
@click.option("--threads", type=int, multiple=True)
@click.option("--pattern", type=click.Choice(["zipf", "zipf+scan"]), multiple=True)
@click.option("--store", type=click.Choice(list(TIERS)), multiple=True)
@click.option("--header-bytes", type=click.IntRange(0, 64), help="Of the user header.")
@click.option("--reopen-gets", type=click.IntRange(min=0))
@click.option("--small-blocks/--no-small-blocks", default=None)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/bench"),
    show_default=True,
    help="On the device to measure.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The record.  [default: a new one in build/bench/results]",
)
def command(
    *,
    scale: str | None,
    capacity: str | None,
    memory: str | None,
    block: str | None,
    seconds: float | None,
    rounds: int | None,
    first_round: int | None,
    threads: tuple[int, ...],
    pattern: tuple[str, ...],
    store: tuple[str, ...],
    header_bytes: int | None,
    reopen_gets: int | None,
    small_blocks: bool | None,
    folder: Path,
    output: Path | None,
) -> None:
    """kv_churn v1; without --short and --full: 4 GiB under 1 GiB."""
    given = {
        "capacity_bytes": capacity and parse_size(capacity, "capacity"),
        "memory_bytes": memory and parse_size(memory, "memory"),
        "block_bytes": block and parse_size(block, "block"),
        "seconds": seconds,
        "rounds": rounds,
        "first_round": first_round,
        "threads": threads or None,
        "patterns": pattern or None,
        "tiers": store or None,
        "header_bytes": header_bytes,
        "reopen_gets": reopen_gets,
        "small_blocks": small_blocks,
    }
    changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    chosen = _SCALES[scale or "default"]
    sizes = {"capacity_bytes", "memory_bytes", "block_bytes", "seconds"}
    if sizes & set(changes):
        changes["name"] = "custom"
    chosen = dataclasses.replace(chosen, **changes)
    with recording(console_for(), BENCH, chosen.name, folder, output) as context:
        measure(chosen, folder, context.writer, context.console)
        for verdict in SUITE.verdicts(context.writer.run):
            context.writer.verdict(verdict)
            context.console.print(verdict.line(), soft_wrap=True, markup=False)


if __name__ == "__main__":
    command()
