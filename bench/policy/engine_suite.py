# SPDX-License-Identifier: Apache-2.0
"""The same streams through the real engine, beside the model of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from bench.policy import policies
from bench.policy.engine import replay_engine
from bench.policy.native import replay
from bench.policy.samples import TRACE, sample, stream_name
from bench.policy.suite import (
    CHURN,
    CHURN_CAPACITY,
    GETS,
    TARGETS,
    churn_loads,
    trace_loads,
)
from bench.policy.workloads import Workload
from bench.records import Run, Verdict
from bench.stores import OURS
from bench.suites import Context, Suite

__all__ = ["AGREEMENT", "MODEL", "SUITE"]

AGREEMENT = 0.003
"""Model and engine may differ by so much."""
MODEL = "model of the engine"

_ADMISSIONS = ("always", "adaptive")
_COMMAND = "python -m bench --suite trace"


def _loads(context: Context) -> list[Workload]:
    if context.tiny:
        return churn_loads(5000, 64 << 20) + trace_loads(context.traces, (8,))
    return churn_loads(GETS) + trace_loads(context.traces)


def _short(context: Context) -> None:
    _run(context, every=context.tiny)


def _full(context: Context) -> None:
    _run(context, every=True)


def _run(context: Context, *, every: bool) -> None:
    """Replay; without ``every`` the churn streams with adaptive admission alone."""
    table = Table(
        title="hit ratio through the engine, and by its model", title_justify="left"
    )
    for name in ("stream", "blocks", "admission", "engine", "model", "difference"):
        table.add_column(name, justify="left" if name == "stream" else "right")
    for load in _loads(context):
        for admission in (
            _ADMISSIONS if every or load.name not in CHURN else ("adaptive",)
        ):
            found = replay_engine(
                load.stream,
                load.capacity,
                from_request=load.from_request,
                admission=admission,
            )
            options = (
                policies.duel(stripes=found.stripes)
                if admission == "adaptive"
                else policies.engine_clock(found.stripes)
            )
            model = replay(
                load.stream, options, found.capacity, from_request=load.from_request
            )
            for store, value in ((OURS, found.hit_ratio), (MODEL, model.hit_ratio)):
                context.writer.sample(
                    sample(
                        *(TRACE, "hit_ratio", store, load, value), admission=admission
                    )
                )
            difference = found.hit_ratio - model.hit_ratio
            table.add_row(
                *(stream_name(load), str(load.capacity), admission),
                *(f"{found.hit_ratio:.4f}", f"{model.hit_ratio:.4f}"),
                f"{difference:+.4f}",
            )
    context.console.print(table)


def _at_tier(run: Run, stream: str) -> Verdict:
    what: dict[str, Any] = {"bench": TRACE, "phase": "hit_ratio", "stream": stream}
    what |= {"capacity": CHURN_CAPACITY, "store": OURS}
    ours = run.median(admission="adaptive", **what)
    plain = run.median(admission="always", **what)
    target = TARGETS[stream]
    text = ""
    if ours is not None:
        text = f"{ours:.3f} of {target:g} after {GETS:,} gets".replace(",", " ")
        text += "" if plain is None else f'; admission="always" {plain:.3f}'
    return Verdict(
        bench=TRACE,
        row=f"hit ratio {stream}, engine with adaptive admission",
        reached=None if ours is None else ours >= target,
        value=ours,
        target=target,
        text=text,
        command="" if ours is not None else _COMMAND,
    )


def _agreement(run: Run, admission: str) -> Verdict:
    what: dict[str, Any] = {"bench": TRACE, "phase": "hit_ratio"}
    what["admission"] = admission
    differences = []
    for one in run.select(store=OURS, **what):
        at = {name: one.params[name] for name in ("stream", "capacity")}
        model = run.median(store=MODEL, **what, **at)
        if model is not None:
            differences.append((abs(one.value - model), one.value - model, at))
    text = ""
    if differences:
        worst, signed, at = max(differences, key=lambda item: item[0])
        text = (
            f"{len(differences)} replays, worst {signed:+.4f} on {at['stream']} at "
            f"{at['capacity']} blocks, allowed {AGREEMENT:g}"
        )
    return Verdict(
        bench=TRACE,
        row=f"engine and its model agree, admission {admission}",
        reached=worst <= AGREEMENT if differences else None,
        value=worst if differences else None,
        target=AGREEMENT,
        text=text,
        command="" if differences else _COMMAND,
    )


def _verdicts(run: Run) -> Iterator[Verdict]:
    for stream in CHURN:
        yield _at_tier(run, stream)
    for admission in _ADMISSIONS:
        yield _agreement(run, admission)


SUITE = Suite(
    name=TRACE,
    help="The same streams through the engine, beside its model.",
    short=_short,
    full=_full,
    verdicts=_verdicts,
)
