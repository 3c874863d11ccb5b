# SPDX-License-Identifier: Apache-2.0
"""The record of a run: JSON lines, one run one file, and how it is read again.

The first line says where and how it ran (kind "machine"); then come lines of kind
"sample", one measured value each, and of kind "verdict". A file is written as the run
goes on, so that a run that was broken off leaves what it had, and once more when it
ends, since only then it is known whether somebody else kept the machine busy.

R1  One sample for each (bench, phase, store, block, params, round): a second one is an
    error of the reader, not an average.
R2  A ratio is of two samples of the same round, since the machine's mood changes
    between rounds more than within one. Above 1 it is in favour of the first, also for
    a latency.
R3  A verdict that was not measured has ``reached`` None; nothing else means that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

__all__ = [
    "RESULTS",
    "Run",
    "Sample",
    "Spread",
    "Verdict",
    "Writer",
    "load",
    "new_path",
]

RESULTS = Path("build/bench/results")
"""Where runs are written unless the command says otherwise."""

Better = Literal["higher", "lower"]

_ANY: Any = object()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured value."""

    bench: str
    """The suite: "kv_bench", "kv_churn", ..."""
    phase: str
    store: str
    """Name of the store, or of the limit ("device", "memcpy")."""
    value: float
    unit: str
    """"GB/s" (decimal, payload only), "us", "ops/s", "ratio", "bytes", ..."""
    better: Better
    block_bytes: int | None = None
    round: int = 0
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else distinguishes it, such as {"threads": 4}."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a run says about one number to reach."""

    bench: str
    row: str
    """The row, in words: "cold verified read, stored order, 64 KiB"."""
    reached: bool | None
    """None: not measured by this run."""
    value: float | None
    """Median of what was reached, in the terms of ``target``."""
    target: float | None
    text: str
    """One line for a reader: how far, with spread, and the limit beside it."""
    command: str = ""
    """How to measure it, where this run did not or not to the letter."""

    def line(self) -> str:
        """Return the line that is printed."""
        mark = {True: "reached", False: "MISSED", None: "not measured"}[self.reached]
        end = f"  [{self.command}]" if self.command else ""
        return f"{mark:13}{self.row}: {self.text}{end}"


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """How some values lie."""

    median: float
    low: float
    high: float
    lower_quartile: float
    upper_quartile: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the spread, None of nothing."""
        ordered = sorted(values)
        if not ordered:
            return None
        if len(ordered) == 1:
            only = ordered[0]
            return cls(only, only, only, only, only, 1)
        first, median, third = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(median, ordered[0], ordered[-1], first, third, len(ordered))

    def text(self, digits: int = 2) -> str:
        """Return "median (least-most)"."""
        if self.count == 1:
            return f"{self.median:.{digits}f} (one round)"
        return (
            f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"
        )


class Run:
    """A run that was read, or is being written."""

    def __init__(
        self,
        machine: Mapping[str, Any],
        samples: Iterable[Sample] = (),
        verdicts: Iterable[Verdict] = (),
        others: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self.machine = dict(machine)
        self.samples = list(samples)
        self.verdicts = list(verdicts)
        self.others = list(others)
        """Lines of other kinds, as they are."""

    def select(
        self,
        *,
        bench: str | None = None,
        phase: str | None = None,
        store: str | None = None,
        block_bytes: int | None = _ANY,
        **params: Any,
    ) -> list[Sample]:
        """Return the samples that have all that is given, in the order of the rounds.

        Parameters that are not given may have any value.
        """
        found = [
            sample
            for sample in self.samples
            if (bench is None or sample.bench == bench)
            and (phase is None or sample.phase == phase)
            and (store is None or sample.store == store)
            and (block_bytes is _ANY or sample.block_bytes == block_bytes)
            and all(
                name in sample.params and sample.params[name] == value
                for name, value in params.items()
            )
        ]
        return sorted(found, key=lambda sample: sample.round)

    def by_round(self, **what: Any) -> dict[int, Sample]:
        """Return the samples that ``select`` finds, by round (R1)."""
        found: dict[int, Sample] = {}
        for sample in self.select(**what):
            if sample.round in found:
                raise ValueError(f"two samples in round {sample.round} for {what}")
            found[sample.round] = sample
        return found

    def spread(self, **what: Any) -> Spread | None:
        """Return the spread over the rounds, None when nothing was measured."""
        return Spread.of(sample.value for sample in self.by_round(**what).values())

    def median(self, **what: Any) -> float | None:
        """Return the median over the rounds, None when nothing was measured."""
        found = self.spread(**what)
        return None if found is None else found.median

    def ratio(self, ours: str, other: str, **what: Any) -> Spread | None:
        """Return ``ours`` against ``other``, paired by round (R2); both are stores.

        ``what`` selects as in ``select``, but without the store. Rounds that only one
        of them has are left out; None when there is no pair.
        """
        left = self.by_round(store=ours, **what)
        right = self.by_round(store=other, **what)
        return Spread.of(
            _ratio(left[number], right[number]) for number in left if number in right
        )

    def names(self, field: str, **what: Any) -> list[Any]:
        """Return the distinct values of a field of ``Sample``, in order."""
        order = {id(sample): place for place, sample in enumerate(self.samples)}
        found = sorted(self.select(**what), key=lambda sample: order[id(sample)])
        return list(dict.fromkeys(getattr(sample, field) for sample in found))


def _ratio(ours: Sample, other: Sample) -> float:
    if ours.unit != other.unit or ours.better != other.better:
        raise ValueError(f"{ours.store} and {other.store} measured different things")
    if ours.better == "higher":
        return ours.value / other.value
    return other.value / ours.value


def load(path: Path | str) -> Run:
    """Read a run; ``ValueError`` with the line when it is none."""
    machine: dict[str, Any] | None = None
    run = Run({})
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            kind = record.pop("kind")
            if kind == "machine" and number == 1:
                machine = record
            elif kind == "sample":
                run.samples.append(Sample(**record))
            elif kind == "verdict":
                run.verdicts.append(Verdict(**record))
            else:
                run.others.append(record | {"kind": kind})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}:{number}: {error!r}") from error
    if machine is None:
        raise ValueError(f"{path}: the first line is not of kind machine")
    run.machine = machine
    return run


def new_path(name: str, folder: Path = RESULTS) -> Path:
    """Return a path for a run that starts now, named after it and the time."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path, number = folder / f"{name}-{stamp}.jsonl", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{stamp}-{number}.jsonl"
    return path


class Writer:
    """Writes a run, line by line; a context manager.

    ``machine`` comes from ``bench.machine.describe``. Give what is known at the end
    (load, foreign work) to ``finish``; without it the first line stays as it was.
    """

    def __init__(self, path: Path, machine: Mapping[str, Any]) -> None:
        self.path = path
        self.run = Run(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w")  # noqa: SIM115  (closed by close)
        self._lines: list[dict[str, Any]] = []
        self._write({"kind": "machine", **machine})

    def sample(self, sample: Sample) -> None:
        """Add a sample."""
        self.run.samples.append(sample)
        self._write({"kind": "sample", **dataclasses.asdict(sample)})

    def verdict(self, verdict: Verdict) -> None:
        """Add a verdict."""
        self.run.verdicts.append(verdict)
        self._write({"kind": "verdict", **dataclasses.asdict(verdict)})

    def other(self, kind: str, record: Mapping[str, Any]) -> None:
        """Add a line of another kind, such as what a limit tried."""
        self.run.others.append({**record, "kind": kind})
        self._write({"kind": kind, **record})

    def finish(self, **known: Any) -> None:
        """Add what is known now to the first line."""
        self.run.machine |= known
        self._lines[0] |= known
        beside = self.path.with_name(self.path.name + ".part")
        with open(beside, "w") as file:
            for record in self._lines:
                file.write(json.dumps(record) + "\n")
        os.replace(beside, self.path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._lines.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
