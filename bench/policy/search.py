# SPDX-License-Identifier: Apache-2.0
"""Variants of admission and eviction, judged on all streams at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.policy import policies
from bench.policy.native import Arm, Filter, Options, replay
from bench.policy.policies import WHOLE_CHAIN, duel
from bench.policy.workloads import Workload

__all__ = ["CANDIDATES", "Judge", "Verdict"]


def _second(ghost: float = 1.0, counter_max: int = 2, **fields: int) -> Arm:
    return Arm(
        filter=Filter.SECOND_TOUCH, ghost=ghost, counter_max=counter_max, **fields
    )


def _frequent(threshold: int) -> Arm:
    return Arm(filter=Filter.FREQUENCY, threshold=threshold)


_ALL = Arm()

CANDIDATES: dict[str, Options] = {
    "CLOCK": policies.engine_clock(counter_max=1),
    "GCLOCK3": policies.engine_clock(counter_max=3),
    "GCLOCK2, remembered at heat 1": duel(Arm(heat=1, ghost=2)),
    "second touch 1C": duel(_second()),
    "second touch 2C": duel(_second(2)),
    "second touch 1C, 1 % forgotten": dataclasses.replace(duel(_second()), forget=10),
    "second touch 1C, 1 % forgotten, chains filled": dataclasses.replace(
        duel(_second(known=WHOLE_CHAIN)), forget=10
    ),
    "two arms .5C": duel(_ALL, _second(0.5)),
    "two arms 1C (DUEL5)": duel(_ALL, _second()),
    "two arms 1C, small shadows": duel(_ALL, _second(), sample_min=0, switch_min=0),
    "two arms 1C, 2 %": duel(_ALL, _second(), enter=0.02, leave=0.02),
    "two arms 1C, back at 0 %": duel(_ALL, _second(), leave=0),
    "two arms 1.5C": duel(_ALL, _second(1.5)),
    "two arms 2C": duel(_ALL, _second(2)),
    "two arms 2C, back at 0 %": duel(_ALL, _second(2), leave=0),
    "two arms 2C, memory 2": duel(_ALL, _second(2), memory=2),
    "two arms 2C, memory 8": duel(_ALL, _second(2), memory=8),
    "two arms 2C, sampling 1/4": duel(_ALL, _second(2), sample_log2=2),
    "two arms 2C, sampling 1/16": duel(_ALL, _second(2), sample_log2=4),
    "two arms 3C": duel(_ALL, _second(3)),
    "two arms 3C, back at 0 %": duel(_ALL, _second(3), leave=0),
    "two arms 2C, max 1": duel(_ALL, _second(2, 1)),
    "two arms 2C, max 3": duel(_ALL, _second(2, 3)),
    "two arms, CLOCK and 2C max 3": duel(Arm(counter_max=1), _second(2, 3)),
    "two arms 2C, remembered at heat 1": duel(Arm(heat=1), _second(2)),
    "two arms 2C, known chains of 2": duel(_ALL, _second(2, known=2)),
    "two arms 2C, known chains of 8": duel(_ALL, _second(2, known=8)),
    "two arms 1C, chains filled": duel(_ALL, _second(known=WHOLE_CHAIN)),
    "two arms 1C, chains filled, back at 0 %": duel(
        _ALL, _second(known=WHOLE_CHAIN), leave=0
    ),
    "two arms, counted twice": duel(_ALL, _frequent(2)),
    "two arms, counted 3 times": duel(_ALL, _frequent(3)),
    "three arms 1C, 2C": duel(_ALL, _second(1), _second(2)),
    "three arms 2C, .5C": duel(_ALL, _second(2), _second(0.5)),
    "three arms 2C, .25C": duel(_ALL, _second(2), _second(0.25)),
    "three arms 2C, .5C, 3 %": duel(
        _ALL, _second(2), _second(0.5), enter=0.03, leave=0.03
    ),
    "three arms 2C, .5C, back at 0 %": duel(_ALL, _second(2), _second(0.5), leave=0),
    "three arms 2C, .5C, memory 2": duel(_ALL, _second(2), _second(0.5), memory=2),
    "three arms 2C, .5C, memory 8": duel(_ALL, _second(2), _second(0.5), memory=8),
    "three arms 3C, .5C": duel(_ALL, _second(3), _second(0.5)),
    "three arms 3C, .5C, back at 0 %": duel(_ALL, _second(3), _second(0.5), leave=0),
    "three arms 1C, .25C, back at 0 %": duel(_ALL, _second(1), _second(0.25), leave=0),
    "three arms 2C, .5C, sampling 1/16": duel(
        _ALL, _second(2), _second(0.5), sample_log2=4
    ),
    "three arms 2C, .5C, max 3": duel(_ALL, _second(2, 3), _second(0.5, 3)),
    "four arms 2C, 1C, .5C": duel(_ALL, _second(2), _second(1), _second(0.5)),
    "four arms 2C, .5C, counted 3 times": duel(
        _ALL, _second(2), _second(0.5), _frequent(3)
    ),
    "prefix": policies.prefix(),
    "prefix, as described": policies.prefix(stripes=1, flags=0),
    "prefix, ghost 1C": dataclasses.replace(policies.prefix(), ghosts=1),
    "prefix, no refusal": policies.prefix(
        flags=policies.PREFIX_FLAGS | policies.NO_REFUSAL
    ),
    "prefix, pieces of 16": dataclasses.replace(policies.prefix(), piece=16),
    **{
        name: policies.OTHERS[name] for name in ("S3-FIFO", "SIEVE", "W-TinyLFU", "ARC")
    },
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a candidate fares; differences are in points (hundredths of a hit ratio)."""

    ratios: dict[str, float]
    """By stream, the mean over the salts."""
    over_clock: float
    """Mean over the streams."""
    by_group: dict[str, float]
    worst_lru: tuple[float, str]
    """Of single runs on traces, against LRU, and where."""
    worst_clock: tuple[float, str]
    """The same against the plain clock."""
    worst_anywhere: tuple[float, str]
    """Against the plain clock, on any stream."""
    writes_per_miss: float


class Judge:
    """Compares candidates with LRU and the plain clock, on groups of streams."""

    def __init__(self, groups: Mapping[str, Sequence[Workload]], salts: int) -> None:
        self._salts = salts
        self._groups = {
            name: [load.name for load in loads] for name, loads in groups.items()
        }
        self._loads = [load for loads in groups.values() for load in loads]
        self.names = [load.name for load in self._loads]
        self.lru = self._ratios(policies.OTHERS["LRU"])
        self.clock = self._ratios(policies.engine_clock())
        self.bound = self._ratios(policies.OTHERS["MIN"])

    def _ratios(self, options: Options) -> NDArray[np.float64]:
        return np.array([self._run(load, options)[0] for load in self._loads])

    def _run(self, load: Workload, options: Options) -> tuple[float, float]:
        outcome = replay(
            load.stream, options, load.capacity, from_request=load.from_request
        )
        return outcome.hit_ratio, outcome.writes_per_miss

    def judge(self, options: Options, traces: Sequence[str]) -> Verdict:
        """Replay a candidate; ``traces`` are the groups that single runs count on."""
        salted = [dataclasses.replace(options, salt=s) for s in range(self._salts)]
        runs = np.array([[self._run(load, o) for load in self._loads] for o in salted])
        ratios = runs[:, :, 0]
        over_lru = (ratios - self.lru) * 100
        over_clock = (ratios - self.clock) * 100
        mean = over_clock.mean(axis=0)
        at = {name: self.names.index(name) for name in self.names}
        chosen = [at[name] for group in traces for name in self._groups[group]]
        return Verdict(
            ratios=dict(zip(self.names, ratios.mean(axis=0).tolist(), strict=True)),
            over_clock=float(mean.mean()),
            by_group={
                group: float(np.mean([mean[at[name]] for name in names]))
                for group, names in self._groups.items()
            },
            worst_lru=self._worst(over_lru, chosen),
            worst_clock=self._worst(over_clock, chosen),
            worst_anywhere=self._worst(over_clock, list(at.values())),
            writes_per_miss=float(runs[:, :, 1].mean()),
        )

    def _worst(
        self, points: NDArray[np.float64], chosen: Sequence[int]
    ) -> tuple[float, str]:
        least = points.min(axis=0)
        where = min(chosen, key=lambda index: least[index])
        return float(least[where]), self.names[where]
