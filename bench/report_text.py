# SPDX-License-Identifier: Apache-2.0
"""Tables and words of the report: Markdown from records, nothing from memory.

A *row* of a comparison is one phase at one block size with the same parameters; its
columns are the stores. Ratios are ours against the other, round by round, above 1 in
our favour. Limits (a device, a copy in memory) are shown and not counted as rivals.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.records import Run, Sample, Spread, Verdict
from bench.sizes import human_size

__all__ = [
    "LABELS",
    "LIMITS",
    "OURS",
    "Row",
    "comparison",
    "label",
    "losses",
    "machine",
    "number",
    "rows",
    "table",
    "verdict_table",
    "where",
]

OURS = "cyclone_kv"
LIMITS = frozenset(
    {
        *("device", "memcpy", "page cache", "limit", "loop", "memoryview", "dict"),
        *("MIN", "model of the engine"),
    }
)
"""Stores of the records that are no rivals."""

LABELS = {
    "batch": "blocks a call",
    OURS: OURS,
    "lmdb": "LMDB",
    "rocksdb": "RocksDB",
    "vllm_fs": "vLLM fs",
    "lmcache_disk": "LMCache disk",
    "put_synced": "put, then sync",
    "cold_first": "cold copy, first touch",
    "cold_ordered": "cold copy, stored order",
    "cold_random": "cold copy, random order",
    "cold_batch": "cold copy, in batches",
    "warm_view": "warm view, looked at",
    "view_p50": "warm view, p50",
    "processes_copy": "warm copy, processes",
    "processes_view": "warm view, processes",
    "hit_p50": "hit, p50",
    "hit_p99": "hit, p99",
    "hit_p999": "hit, p99.9",
    "insert_p50": "insert, p50",
    "insert_p99": "insert, p99",
}
_SIZES = frozenset({"capacity_bytes", "memory_bytes", "header_bytes"})
_SPREAD_COUNT_MIN = 2


def label(name: str) -> str:
    """Return a name of the records for a reader."""
    return LABELS.get(name, name.replace("_", " ").replace(".", ", "))


def number(value: float) -> str:
    """Return three digits, with k, M, G for what is large; whole thousands in full."""
    if value >= 1000 and value == int(value) and int(value) % 1000 == 0:
        return f"{int(value):,}".replace(",", " ")
    size = abs(value)
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if size >= limit:
            return f"{value / {' G': 1e9, ' M': 1e6, ' k': 1e3}[unit]:.3g}{unit}"
    if size >= 1000:
        return f"{value:.0f}"
    text = f"{value:.3g}"
    return f"{value:.7f}".rstrip("0") if "e" in text else text


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; all columns but the first are numbers."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)]]
    lines += [[cell.replace("|", "\\|") for cell in row] for row in body]
    return ["| " + " | ".join(row) + " |" for row in lines]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What is compared: everything of a sample but store, round and value."""

    bench: str
    phase: str
    block_bytes: int | None
    params: str
    """As JSON, sorted: it can be a key."""
    unit: str
    better: str

    @classmethod
    def of(cls, sample: Sample) -> Row:
        """Return the row of a sample."""
        return cls(
            sample.bench,
            sample.phase,
            sample.block_bytes,
            json.dumps(dict(sample.params), sort_keys=True),
            sample.unit,
            sample.better,
        )

    def words(self, *, phase: bool = True) -> str:
        """Return the row for a reader."""
        parts = [label(self.phase)] if phase else []
        if self.block_bytes:
            parts.append(human_size(self.block_bytes))
        for name, value in json.loads(self.params).items():
            if value is None or (name == "header_bytes" and not value):
                continue
            if name in _SIZES:
                parts.append(f"{name.removesuffix('_bytes')} {human_size(value)}")
            elif isinstance(value, str):
                parts.append(value)
            else:
                one = value == 1 and name in ("threads", "processes")
                parts.append(
                    f"{number(value)} {_singular(name) if one else label(name)}"
                )
        return ", ".join(parts)


class Rows:
    """The samples of a bench, by row and store, in order of appearance."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._found: dict[Row, dict[str, dict[int, float]]] = {}
        for sample in samples:
            stores = self._found.setdefault(Row.of(sample), {})
            values = stores.setdefault(sample.store, {})
            if sample.round in values:
                raise ValueError(
                    f"two samples of {sample.store} in one round: {sample}"
                )
            values[sample.round] = sample.value

    def __iter__(self) -> Iterator[Row]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def stores(self, row: Row | None = None) -> list[str]:
        """Return the stores of a row, or of all; ours first, limits last."""
        chosen = self._found.values() if row is None else [self._found[row]]
        found = dict.fromkeys(store for stores in chosen for store in stores)
        return sorted(found, key=lambda store: (store in LIMITS, store != OURS))

    def spread(self, row: Row, store: str) -> Spread | None:
        """Return the spread over the rounds."""
        return Spread.of(self._found[row].get(store, {}).values())

    def ratio(self, row: Row, other: str) -> Spread | None:
        """Return ours against the other, paired by round."""
        ours = self._found[row].get(OURS, {})
        theirs = self._found[row].get(other, {})
        pairs = [(ours[n], theirs[n]) for n in sorted(ours) if n in theirs]
        if row.better == "lower":
            pairs = [(right, left) for left, right in pairs]
        return Spread.of(left / right for left, right in pairs if right)


def rows(run: Run, bench: str) -> Rows:
    """Return the rows of a bench."""
    return Rows(run.select(bench=bench))


def cell(spread: Spread | None) -> str:
    """Return median and range."""
    if spread is None:
        return "-"
    if spread.count < _SPREAD_COUNT_MIN:
        return number(spread.median)
    low, high = number(spread.low), number(spread.high)
    return f"{number(spread.median)} ({low} to {high})"


def comparison(found: Rows, chosen: Iterable[Row]) -> list[str]:
    """Return a table of rows: each store, then ours against each rival."""
    chosen = list(chosen)
    names = {name for row in chosen for name in found.stores(row)}
    stores = [store for store in found.stores() if store in names]
    rivals = [store for store in stores if store != OURS and store not in LIMITS]
    if OURS not in stores:
        rivals = []
    head = ["", "unit", *map(label, stores), *(f"/ {label(name)}" for name in rivals)]
    body = []
    for row in chosen:
        ratios = [found.ratio(row, name) for name in rivals]
        body.append(
            [
                row.words(),
                row.unit,
                *(cell(found.spread(row, store)) for store in stores),
                *(_bold(ratio) for ratio in ratios),
            ]
        )
    return table(head, body)


def _bold(ratio: Spread | None) -> str:
    if ratio is None:
        return "-"
    text = number(ratio.median)
    return f"**{text}**" if ratio.median < 1 else text


def losses(run: Run, bench: str) -> list[tuple[Row, str, Spread]]:
    """Return where ours is behind a rival: row, rival, ratio; the worst first."""
    found = rows(run, bench)
    behind = []
    for row in found:
        for store in found.stores(row):
            if store == OURS or store in LIMITS:
                continue
            ratio = found.ratio(row, store)
            if ratio is not None and ratio.median < 1:
                behind.append((row, store, ratio))
    return sorted(behind, key=lambda item: item[2].median)


def loss_table(behind: Sequence[tuple[Row, str, Spread]], run: Run) -> list[str]:
    """Return the table of losses."""
    head = ["behind", "ours", "theirs", "ratio", "within the spread"]
    body = []
    for row, store, ratio in behind:
        found = rows(run, row.bench)
        within = "yes" if ratio.high >= 1 and ratio.count > 1 else "no"
        unit = f" {row.unit}"
        body.append(
            [
                f"{label(store)}: {row.words()}",
                cell(found.spread(row, OURS)) + unit,
                cell(found.spread(row, store)) + unit,
                cell(ratio),
                within if ratio.count > 1 else "one round",
            ]
        )
    return table(head, body)


def verdict_table(verdicts: Iterable[Verdict]) -> list[str]:
    """Return a table of verdicts."""
    body = []
    for verdict in verdicts:
        text = verdict.text
        if verdict.command and verdict.reached is None:
            text = f"{text}{'; ' if text else ''}`{verdict.command}`"
        target = "" if verdict.target is None else number(verdict.target)
        value = "" if verdict.value is None else number(verdict.value)
        body.append([verdict.row, value, target, text])
    head = ["what", "found", "target", "in words"]
    lines = table(head, body)
    lines[1] = "| --- | ---: | ---: | --- |"
    return lines


def machine(about: Mapping[str, Any]) -> str:
    """Return one line about where and how a run was made."""
    versions = ", ".join(
        f"{label(name)} {text}"
        for name, text in about.get("versions", {}).items()
        if text
    )
    queue = about.get("queue") or {}
    readahead = queue.get("read_ahead_kb") or about.get("readahead_kb")
    load = about.get("load_begin") or about.get("load_average") or []
    memory = about.get("memory_bytes")
    parts = [
        f"{about.get('form')} form" if about.get("form") else "",
        f"{about['cpus']} x {about['cpu']}" if "cpu" in about else "",
        f"{memory / 2**30:.0f} GiB" if memory else "",
        f"Linux {about['kernel']}" if "kernel" in about else "",
        str(about.get("file_system", "")),
        f"readahead {readahead} KiB" if readahead else "",
        versions,
        f"load before {load[0]:.1f}" if load else "",
        _foreign(about),
        "**broken off before its end**" if _broken(about) else "",
        _commit(about),
        _command(about.get("command") or []),
    ]
    return ", ".join(part for part in parts if part)


def _singular(name: str) -> str:
    return {"threads": "thread", "processes": "process"}[name]


def _commit(about: Mapping[str, Any]) -> str:
    if not about.get("commit"):
        return ""
    return f"commit {about['commit']}{' with changes' if about.get('dirty') else ''}"


def _command(arguments: Sequence[str]) -> str:
    """Return the command of a run; where its files were matters to nobody."""
    shown = ["python -m bench"]
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--output", "--folder"):
            next(rest, None)
        elif not argument.startswith(("--output=", "--folder=")):
            shown.append(Path(argument).name if "/" in argument else argument)
    return f"`{' '.join(shown)}`" if arguments else ""


def _broken(about: Mapping[str, Any]) -> bool:
    """Whether the end of the run was never written (``Writer.finish``)."""
    return "load_begin" in about and "load_end" not in about


def _foreign(about: Mapping[str, Any]) -> str:
    if not about.get("foreign_load"):
        return ""
    share = about.get("foreign_cpu_share")
    used = "" if share is None else f" ({share:.2f} of a processor)"
    return f"**others worked on the machine{used}: trust ratios more than numbers**"


def where(row: Row, name: str) -> Any:
    """Return a parameter of a row, None when it has none."""
    return json.loads(row.params).get(name)
