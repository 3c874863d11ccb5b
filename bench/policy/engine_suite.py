# SPDX-License-Identifier: Apache-2.0
"""The same streams through the real engine, beside the model of the engine.

Adaptive admission follows an eighth of the keys, which the engine chooses by a secret
of the volume. The model is replayed with several choices; where they matter, in short
streams that change a decision or do not, the engine is one more of them.
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
            models = _models(load, admission, found)
            for store, values in ((OURS, [found.hit_ratio]), (MODEL, models)):
                for number, value in enumerate(values):
                    one = sample(
                        *(TRACE, "hit_ratio", store, load, value), admission=admission
                    )
                    context.writer.sample(dataclasses.replace(one, round=number))
            spread = Spread.of(models)
            assert spread is not None
            table.add_row(
                *(stream_name(load), str(load.capacity), admission),
                *(f"{found.hit_ratio:.4f}", spread.text(4)),
                f"{found.hit_ratio - spread.median:+.4f}",
            )
    context.console.print(table)


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
    for one in run.select(store=OURS, **what):
        at = {name: one.params[name] for name in ("stream", "capacity")}
        model = run.spread(store=MODEL, **what, **at)
        if model is not None:
            least, most = one.value - model.low, one.value - model.high
            beyond = min(least, 0.0) + max(most, 0.0)
            outside.append((abs(beyond), beyond, one.value - model.median, at))
    text = ""
    if outside:
        worst, signed, _, at = max(outside, key=lambda item: item[0])
        middle = max((item[2] for item in outside), key=abs)
        text = (
            f"{len(outside)} replays, at worst {signed:+.4f} beyond what the model "
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
