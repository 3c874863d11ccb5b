# SPDX-License-Identifier: Apache-2.0
"""The same streams through the real engine, beside the model of the engine.

Adaptive admission follows an eighth of the keys, which the engine chooses by a secret
of the volume, and its ghost forgets one key in a hundred. The model is replayed with
several choices of both; where they matter, in short streams that change a decision or
do not, so is the engine, and its median is to be one that the model could have given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from bench.policy import policies
from bench.policy.engine import EngineOutcome, replay_engine
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
from bench.records import Run, Spread, Verdict
from bench.stores import OURS
from bench.suites import Context, Suite

__all__ = ["AGREEMENT", "MODEL", "SUITE"]

AGREEMENT = 0.003
"""Model and engine may differ by so much."""
MODEL = "model of the engine"

_ADMISSIONS = ("always", "adaptive")
_SALTS = 8
_ENGINES = 5
"""Replays through the engine of a short stream with adaptive admission."""
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
            outcomes = [
                replay_engine(
                    load.stream,
                    load.capacity,
                    from_request=load.from_request,
                    admission=admission,
                )
                for _ in range(_engines(load, admission))
            ]
            found = [outcome.hit_ratio for outcome in outcomes]
            models = _models(load, admission, outcomes[0])
            for store, values in ((OURS, found), (MODEL, models)):
                for number, value in enumerate(values):
                    one = sample(
                        *(TRACE, "hit_ratio", store, load, value), admission=admission
                    )
                    context.writer.sample(dataclasses.replace(one, round=number))
            ours = Spread.of(found)
            assert ours is not None
            spread = Spread.of(models)
            assert spread is not None
            table.add_row(
                *(stream_name(load), str(load.capacity), admission),
                *(ours.text(4), spread.text(4)),
                f"{ours.median - spread.median:+.4f}",
            )
    context.console.print(table)


def _engines(load: Workload, admission: str) -> int:
    return 1 if admission == "always" or load.name in CHURN else _ENGINES


def _models(load: Workload, admission: str, found: EngineOutcome) -> list[float]:
    """Return the hit ratios of the model, one for each choice of keys to follow."""
    options = (
        [policies.engine_adaptive(found.stripes, salt) for salt in range(_SALTS)]
        if admission == "adaptive"
        else [policies.engine_clock(found.stripes)]
    )
    return [
        replay(
            load.stream, one, found.capacity, from_request=load.from_request
        ).hit_ratio
        for one in options
    ]


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
    outside = []
    replays = run.select(store=OURS, **what)
    for stream, capacity in sorted(
        {(one.params["stream"], one.params["capacity"]) for one in replays}
    ):
        at = {"stream": stream, "capacity": capacity}
        ours = run.median(store=OURS, **what, **at)
        model = run.spread(store=MODEL, **what, **at)
        if ours is not None and model is not None:
            beyond = min(ours - model.low, 0.0) + max(ours - model.high, 0.0)
            outside.append((abs(beyond), beyond, ours - model.median, at))
    text = ""
    if outside:
        worst, signed, _, at = max(outside, key=lambda item: item[0])
        middle = max((item[2] for item in outside), key=abs)
        text = (
            f"{len(outside)} streams, at worst {signed:+.4f} beyond what the model "
            f"gives, on {at['stream']} at {at['capacity']} blocks; at worst "
            f"{middle:+.4f} from its median"
        )
    return Verdict(
        bench=TRACE,
        row=f"engine and its model agree, admission {admission}",
        reached=worst <= AGREEMENT if outside else None,
        value=worst if outside else None,
        target=AGREEMENT,
        text=text,
        command="" if outside else _COMMAND,
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
