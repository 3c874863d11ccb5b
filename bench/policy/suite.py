# SPDX-License-Identifier: Apache-2.0
"""Hit ratios over capacity, by models of policies: zipf, zipf+scan, traces."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from bench.policy import policies, workloads
from bench.policy.native import replay
from bench.policy.samples import NAMES, POLICY, of_outcome, stream_name
from bench.policy.workloads import Workload
from bench.records import Run, Verdict
from bench.stores import OURS
from bench.suites import Context, Suite

__all__ = [
    "CHURN",
    "CHURN_CAPACITY",
    "DIVISORS",
    "GETS",
    "SUITE",
    "TARGETS",
    "churn_loads",
    "trace_loads",
]

GETS = 2_000_000
"""Of the churn streams after the warm-up: learning is over by then."""
CHURN = {"zipf": False, "zipf+scan": True}
"""Names of the churn streams: whether one get in ten is of a scan."""
TARGETS = {"zipf": 0.870, "zipf+scan": 0.785}
DIVISORS = (32, 16, 8, 4, 2)
"""Capacities of a trace: its distinct blocks over these."""

_BLOCK_BYTES = 2 << 20
_TIER_BYTES = 16 << 30
CHURN_CAPACITY = _TIER_BYTES // (_BLOCK_BYTES + 64)
"""Blocks of the tier that the targets are about."""
_UNIVERSE = 3 * _TIER_BYTES // _BLOCK_BYTES
_MODELS = (
    *("DUEL5", "GCLOCK2", "prefix", "LRU", "FIFO", "ARC", "S3-FIFO", "MIN"),
    *("SIEVE", "W-TinyLFU", "second touch"),
)
_PREFIX_MEAN, _PREFIX_WORST = 0.020, -0.01
_ADMISSION_WORST = -0.01
_TRACES_MIN = 2
_COMMAND = "python -m bench --suite policy --trace CONVERSATION --trace SYNTHETIC"


def churn_loads(gets: int, tier_bytes: int = _TIER_BYTES) -> list[Workload]:
    """Return both churn streams at the capacity of the tier."""
    return [
        dataclasses.replace(
            workloads.churn(_BLOCK_BYTES, tier_bytes, scan=scan, gets=gets), name=name
        )
        for name, scan in CHURN.items()
    ]


def trace_loads(
    traces: Sequence[Path], divisors: Sequence[int] = DIVISORS
) -> list[Workload]:
    """Return the traces, or the made-up one, at all capacities."""
    return [workloads.trace(p, d) for p in traces or (None,) for d in divisors]


def _loads(context: Context) -> list[Workload]:
    if context.tiny:
        return churn_loads(5000, 64 << 20) + trace_loads(context.traces, (8, 4))
    churn = churn_loads(GETS)
    # The same streams at other capacities: what a larger disk is worth.
    smaller = [
        dataclasses.replace(load, capacity=_UNIVERSE // divisor)
        for load in churn
        for divisor in DIVISORS
    ]
    return churn + smaller + trace_loads(context.traces)


def _run(context: Context) -> None:
    table = Table(title="hit ratio, by models of the policies", title_justify="left")
    table.add_column("stream")
    table.add_column("blocks", justify="right")
    for name in _MODELS:
        table.add_column(NAMES.get(name, name), justify="right")
    every = policies.OURS | policies.OTHERS
    for load in _loads(context):
        cells = []
        for name in _MODELS:
            outcome = replay(
                load.stream, every[name], load.capacity, from_request=load.from_request
            )
            for sample in of_outcome(name, load, outcome):
                context.writer.sample(sample)
            cells.append(f"{outcome.hit_ratio:.3f}")
        table.add_row(stream_name(load), str(load.capacity), *cells)
    context.console.print(table)


def _ratios(run: Run, store: str) -> dict[tuple[str, int], float]:
    return {
        (sample.params["stream"], sample.params["capacity"]): sample.value
        for sample in run.select(bench=POLICY, phase="hit_ratio", store=store)
    }


def _at_tier(run: Run, stream: str) -> Verdict:
    row = f"hit ratio {stream}, model of adaptive admission"
    at = (stream, CHURN_CAPACITY)
    found = {name: _ratios(run, name).get(at) for name in (OURS, "LRU", "MIN")}
    ours = found[OURS]
    target = TARGETS[stream]
    text = ""
    if ours is not None:
        text = f"{ours:.3f} of {target:g} after {GETS:,} gets".replace(",", " ")
        text += "".join(
            f", {name} {found[name]:.3f}"
            for name in ("LRU", "MIN")
            if found[name] is not None
        )
    return Verdict(
        bench=POLICY,
        row=row,
        reached=None if ours is None else ours >= target,
        value=ours,
        target=target,
        text=text,
        command="" if ours is not None else "python -m bench --suite policy",
    )


def _over(run: Run, ours: str, other: str) -> dict[tuple[str, int], float]:
    """Return by how much ours is above another, by stream and capacity."""
    left, right = _ratios(run, ours), _ratios(run, other)
    return {at: left[at] - right[at] for at in left.keys() & right.keys()}


def _worst(run: Run, other: str) -> Verdict:
    """Compare the preset with another policy on the traces, at its worst."""
    row = f"adaptive admission (model) against {other} on traces, at worst"
    found = {
        at: difference
        for at, difference in _over(run, OURS, other).items()
        if at[0] not in CHURN
    }
    if not found:
        return Verdict(
            bench=POLICY,
            row=row,
            reached=None,
            value=None,
            target=_ADMISSION_WORST,
            text="",
            command=_COMMAND,
        )
    at, value = min(found.items(), key=lambda item: item[1])
    names = ", ".join(sorted({stream for stream, _ in found}))
    return Verdict(
        bench=POLICY,
        row=row,
        reached=value >= _ADMISSION_WORST,
        value=value,
        target=_ADMISSION_WORST,
        text=f"{value:+.3f} on {at[0]} at {at[1]} blocks (of {names})",
        command=_COMMAND,
    )


def _prefix(run: Run) -> Verdict:
    """Prefix eviction against an exact LRU: both churn streams at 16 GiB, traces."""
    row = "eviction by prefix (model) against LRU: mean, and at worst"
    found = {
        at: difference
        for at, difference in _over(run, "prefix", "LRU").items()
        if at[0] not in CHURN or at[1] == CHURN_CAPACITY
    }
    names = sorted({stream for stream, _ in found} - set(CHURN))
    if not found:
        return Verdict(
            bench=POLICY,
            row=row,
            reached=None,
            value=None,
            target=_PREFIX_MEAN,
            text="",
            command=_COMMAND,
        )
    mean = statistics.mean(found.values())
    at, worst = min(found.items(), key=lambda item: item[1])
    text = f"mean {mean:+.3f}, worst {worst:+.3f} on {at[0]} at {at[1]} blocks"
    reached: bool | None = mean >= _PREFIX_MEAN and worst >= _PREFIX_WORST
    # A trace of our own making proves nothing.
    if len(names) < _TRACES_MIN:
        reached = None
        text += f"; of traces only {', '.join(names) or 'none'}"
    return Verdict(
        bench=POLICY,
        row=row,
        reached=reached,
        value=mean,
        target=_PREFIX_MEAN,
        text=text,
        command=_COMMAND,
    )


def _verdicts(run: Run) -> Iterator[Verdict]:
    for stream in CHURN:
        yield _at_tier(run, stream)
    for other in ("LRU", "plain clock"):
        yield _worst(run, other)
    yield _prefix(run)


SUITE = Suite(
    name=POLICY,
    help="Hit ratios over capacity, by models of policies.",
    short=_run,
    full=_run,
    verdicts=_verdicts,
)
