# SPDX-License-Identifier: Apache-2.0
"""The same streams through the real engine, beside the model of the engine.

Adaptive admission and prefix eviction follow some of the keys, which the engine
chooses by a secret of the volume; the ghost of the former forgets one key in a
hundred. The model is replayed with several choices of both. Where they matter, in short
streams that change a decision or do not, so is the engine, and its median is to be one
that the model could have given.
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

_POLICIES: dict[str, dict[str, str]] = {
    "always": {"admission": "always"},
    "adaptive": {"admission": "adaptive"},
    "prefix": {"eviction": "prefix"},
}
"""What the engine is asked for; in the short form all but the last, which is slow."""
_SALTS = 8
_ENGINES = 5
"""Replays through the engine where it samples keys and the stream is short."""
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
    """Replay; without ``every`` no prefix eviction, and on churn adaptive alone."""
    table = Table(
        title="hit ratio through the engine, and by its model", title_justify="left"
    )
    for name in ("stream", "blocks", "policy", "engine", "model", "difference"):
        table.add_column(name, justify="left" if name == "stream" else "right")
    for load in _loads(context):
        for policy in _policies(load, every=every):
            outcomes = [
                replay_engine(
                    load.stream,
                    load.capacity,
                    from_request=load.from_request,
                    **_POLICIES[policy],
                )
                for _ in range(_engines(load, policy))
            ]
            found = [outcome.hit_ratio for outcome in outcomes]
            models = _models(load, policy, outcomes[0])
            for store, values in ((OURS, found), (MODEL, models)):
                for number, value in enumerate(values):
                    one = sample(
                        *(TRACE, "hit_ratio", store, load, value), policy=policy
                    )
                    context.writer.sample(dataclasses.replace(one, round=number))
            ours = Spread.of(found)
            assert ours is not None
            spread = Spread.of(models)
            assert spread is not None
            table.add_row(
                *(stream_name(load), str(load.capacity), policy),
                *(ours.text(4), spread.text(4)),
                f"{ours.median - spread.median:+.4f}",
            )
    context.console.print(table)


def _policies(load: Workload, *, every: bool) -> list[str]:
    if every:
        return list(_POLICIES)
    return ["adaptive"] if load.name in CHURN else ["always", "adaptive"]


def _engines(load: Workload, policy: str) -> int:
    return 1 if policy == "always" or load.name in CHURN else _ENGINES


def _models(load: Workload, policy: str, found: EngineOutcome) -> list[float]:
    """Return the hit ratios of the model, one for each choice of keys to follow."""
    salts = range(_SALTS)
    options = {
        "always": lambda: [policies.engine_clock(found.stripes)],
        "adaptive": lambda: [policies.engine_adaptive(found.stripes, n) for n in salts],
        "prefix": lambda: [policies.engine_prefix(found.stripes, n) for n in salts],
    }[policy]()
    return [
        replay(
            load.stream, one, found.capacity, from_request=load.from_request
        ).hit_ratio
        for one in options
    ]


def _at_tier(run: Run, stream: str) -> Verdict:
    what: dict[str, Any] = {"bench": TRACE, "phase": "hit_ratio", "stream": stream}
    what |= {"capacity": CHURN_CAPACITY, "store": OURS}
    ours = run.median(policy="adaptive", **what)
    plain = run.median(policy="always", **what)
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


def _agreement(run: Run, policy: str) -> Verdict:
    what: dict[str, Any] = {"bench": TRACE, "phase": "hit_ratio", "policy": policy}
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
        row=f"engine and its model agree, {policy}",
        reached=worst <= AGREEMENT if outside else None,
        value=worst if outside else None,
        target=AGREEMENT,
        text=text,
        command="" if outside else f"{_COMMAND} --full",
    )


def _verdicts(run: Run) -> Iterator[Verdict]:
    for stream in CHURN:
        yield _at_tier(run, stream)
    for policy in _POLICIES:
        yield _agreement(run, policy)


SUITE = Suite(
    name=TRACE,
    help="The same streams through the engine, beside its model.",
    short=_short,
    full=_full,
    verdicts=_verdicts,
)
