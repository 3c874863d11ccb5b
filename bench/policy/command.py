# SPDX-License-Identifier: Apache-2.0
"""``python -m bench policy`` and ``python -m bench trace``."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from bench import records
from bench.machine import describe
from bench.policy import policies, published, workloads
from bench.policy.engine import replay_engine
from bench.policy.engine_suite import AGREEMENT, MODEL
from bench.policy.native import Options, Outcome, replay
from bench.policy.report import markdown
from bench.policy.samples import TRACE, of_outcome, sample
from bench.policy.search import CANDIDATES, Judge
from bench.policy.workloads import Workload
from bench.recording import console_for
from bench.records import Sample
from bench.stores import OURS
from cyclone_kv import CacheConfig

__all__ = ["policy", "trace"]

_EXIT_DIFFERS = 3
_DIVISORS = (32, 16, 8, 4, 2)


class _Output:
    """A console, and a record beside it (``bench.records``)."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: set[tuple[Any, ...]] = set()
        self.console = console_for()
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._known = {_place(one) for one in records.load(path).samples}
            return
        about = describe(path.absolute().parent) | {"command": sys.argv[1:]}
        path.write_text(json.dumps({"kind": "machine", **about}) + "\n")

    def record(self, **fields: Any) -> None:
        """Append a line to the file, if there is one."""
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(json.dumps(fields) + "\n")

    def sample(self, one: Sample) -> None:
        """Append a sample, unless an earlier command has appended it."""
        if _place(one) not in self._known:
            self._known.add(_place(one))
            self.record(kind="sample", **dataclasses.asdict(one))


def _place(one: Sample) -> tuple[Any, ...]:
    params = json.dumps(dict(one.params), sort_keys=True)
    return one.bench, one.phase, one.store, one.block_bytes, params, one.round


def _run(workload: Workload, options: Options) -> Outcome:
    return replay(
        workload.stream,
        options,
        workload.capacity,
        from_request=workload.from_request,
    )


_output_option = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append all results to this record.",
)
_trace_option = click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines in the Mooncake format; may be repeated.  [default: made up]",
)


# ---- policy ------------------------------------------------------------------------


@click.group(invoke_without_command=True)
@click.pass_context
def policy(context: click.Context) -> None:
    """Replay eviction policies.  Without a command: published."""
    if context.invoked_subcommand is None:
        context.invoke(show_published)


@policy.command("published")
@click.option("--short", is_flag=True, help="The rows of 2 MiB blocks in 2 GiB only.")
@_output_option
def show_published(*, short: bool = False, output: Path | None = None) -> None:
    """Compute the published table again, then what a ring in place can do.

    Ends with 3 if a value differs in its third digit.
    """
    out = _Output(output)
    rows = [row for row in published.rows() if not short or row.capacity == 2 << 30]
    differing = _print_published(out, rows)
    _print_ours(out, rows)
    if differing:
        sys.exit(_EXIT_DIFFERS)


def _print_published(out: _Output, rows: Iterable[published.Row]) -> int:
    table = Table(title="published replay: found, published, agrees or differs")
    table.add_column("stream")
    for column in published.columns():
        table.add_column(column, justify="right")
    checked = differing = 0
    for row in rows:
        cells = []
        for value in published.compare(row):
            checked += 1
            differing += not value.agrees
            mark = "agrees" if value.agrees else "[bold red]DIFFERS[/]"
            cells.append(f"{value.found:.4f}\n{value.expected:.4f}\n{mark}")
            out.record(kind="published", **dataclasses.asdict(value))
        table.add_row(row.name, *cells, end_section=True)
    out.console.print(table)
    out.console.print(f"{checked - differing} of {checked} values agree to 3 digits")
    return differing


def _print_ours(out: _Output, rows: Iterable[published.Row]) -> None:
    names = {**policies.OURS, "LRU": policies.OTHERS["LRU"]}
    names["MIN"] = policies.OTHERS["MIN"]
    loads = [dataclasses.replace(row.workload, name=row.name) for row in rows]
    _print_matrix(out, "hit ratio; in brackets writes per miss", loads, names)


def _print_matrix(
    out: _Output, title: str, loads: Sequence[Workload], names: Mapping[str, Options]
) -> None:
    table = Table(title=title)
    table.add_column("stream")
    for name in names:
        table.add_column(name, justify="right")
    for load in loads:
        cells = []
        for name, options in names.items():
            outcome = _run(load, options)
            cells.append(f"{outcome.hit_ratio:.4f} ({outcome.writes_per_miss:.2f})")
            out.record(
                kind="policy",
                stream=load.name,
                policy=name,
                capacity=load.capacity,
                hit_ratio=outcome.hit_ratio,
                writes_per_miss=outcome.writes_per_miss,
                passed_per_write=outcome.passed / max(outcome.writes, 1),
                switches=outcome.switches,
            )
            for one in of_outcome(name, load, outcome):
                out.sample(one)
        table.add_row(load.name, *cells)
    out.console.print(table)


def _groups(
    traces: Sequence[Path], gets: int, *, made_up: bool = False
) -> dict[str, list[Workload]]:
    groups: dict[str, list[Workload]] = {"churn": []}
    for capacity in (16 << 30, 2 << 30):
        for scan in (False, True):
            load = workloads.churn(2 << 20, capacity, scan=scan, gets=gets, by_key=True)
            name = f"{load.name} {capacity >> 30} GiB"
            groups["churn"].append(dataclasses.replace(load, name=name))
    if traces:
        groups["traces"] = [
            workloads.trace(path, divisor) for path in traces for divisor in _DIVISORS
        ]
    if made_up or not traces:
        made = [workloads.trace(None, divisor) for divisor in _DIVISORS]
        groups["made up"] = made
    groups["drifting"] = workloads.drifting()
    return groups


@policy.command("compare")
@click.option(
    "--gets", default=400_000, show_default=True, help="Of the churn streams."
)
@_trace_option
@_output_option
def show_all(*, gets: int, traces: Sequence[Path], output: Path | None) -> None:
    """Print every policy on churn, traces and drifting streams."""
    out = _Output(output)
    loads = [load for group in _groups(traces, gets).values() for load in group]
    _print_matrix(out, "in place: hit ratio (writes per miss)", loads, policies.OURS)
    _print_matrix(out, "others: hit ratio (writes per miss)", loads, policies.OTHERS)


@policy.command("search")
@click.option(
    "--gets", default=400_000, show_default=True, help="Of the churn streams."
)
@click.option("--salts", default=3, show_default=True, help="Samples of the shadows.")
@click.option("--only", default="", help="Candidates with this in their name.")
@_trace_option
@_output_option
def show_search(
    *, gets: int, salts: int, only: str, traces: Sequence[Path], output: Path | None
) -> None:
    """Judge variants of admission and eviction on all streams at once."""
    out = _Output(output)
    groups = _groups(traces, gets, made_up=True)
    judge = Judge(groups, salts)
    counted = ["traces" if traces else "made up"]
    table = Table(
        title="points of hit ratio over the plain clock; "
        f"worst single runs of the group {counted[0]!r}"
    )
    table.add_column("candidate")
    titles = ("mean", *groups, "worst to LRU", "worst to clock", "worst anywhere")
    for title in (*titles, "writes per miss"):
        table.add_column(title, justify="right")
    for name, options in CANDIDATES.items():
        if only not in name:
            continue
        verdict = judge.judge(options, counted)
        worst = (verdict.worst_lru, verdict.worst_clock, verdict.worst_anywhere)
        table.add_row(
            name,
            f"{verdict.over_clock:+.2f}",
            *(f"{points:+.2f}" for points in verdict.by_group.values()),
            *(f"{points:+.2f} {where}" for points, where in worst),
            f"{verdict.writes_per_miss:.2f}",
        )
        out.record(kind="search", candidate=name, **dataclasses.asdict(verdict))
    out.console.print(table)


_ORDERS = {
    "GCLOCK2": policies.engine_clock(),
    "GCLOCK2, 16 stripes by key": dataclasses.replace(
        policies.engine_clock(16), by_key=True
    ),
    "DUEL5": policies.duel(),
}


@policy.command("order")
@_trace_option
@_output_option
def show_order(*, traces: Sequence[Path], output: Path | None) -> None:
    """Show what storing and touching chains tail first is worth."""
    out = _Output(output)
    table = Table(title="usable prefix; in brackets all blocks held, usable or not")
    table.add_column("trace")
    for name in _ORDERS:
        table.add_column(f"{name}: head first", justify="right")
        table.add_column("tail first", justify="right")
        table.add_column("gain", justify="right")
    for load in [workloads.trace(p, d) for p in traces or (None,) for d in _DIVISORS]:
        cells = []
        for name, options in _ORDERS.items():
            ratios = []
            for head_first in (True, False):
                changed = dataclasses.replace(options, head_first=head_first)
                outcome = _run(load, changed)
                held = (outcome.hits + outcome.stranded) / outcome.accesses
                ratios.append(outcome.hit_ratio)
                cells.append(f"{outcome.hit_ratio:.4f} ({held:.4f})")
                out.record(
                    kind="order",
                    trace=load.name,
                    policy=name,
                    head_first=head_first,
                    hit_ratio=outcome.hit_ratio,
                    held_ratio=held,
                )
            cells.append(f"{ratios[1] - ratios[0]:+.4f}")
        table.add_row(load.name, *cells)
    out.console.print(table)


_APPROACHING = ("GCLOCK2", "second touch", "DUEL5", "three arms", "prefix")


@policy.command("approach")
@click.option("--window", default=100_000, show_default=True, help="Gets of a line.")
@click.option("--windows", default=8, show_default=True, type=click.IntRange(min=1))
@_output_option
def show_approach(*, window: int, windows: int, output: Path | None) -> None:
    """Show how long policies take to learn, after the warm-up of the churn bench."""
    out = _Output(output)
    table = Table(title=f"hit ratio in each {window} gets after the warm-up, 16 GiB")
    table.add_column("gets")
    loads = [
        workloads.churn(2 << 20, 16 << 30, scan=scan, gets=window * windows)
        for scan in (False, True)
    ]
    ratios: list[list[float]] = []
    for load in loads:
        for name in _APPROACHING:
            table.add_column(f"{load.name}, {name}", justify="right")
            ratios.append(_by_window(load, policies.OURS[name], window, windows))
    for number in range(windows):
        cells = [f"{column[number]:.4f}" for column in ratios]
        table.add_row(f"to {(number + 1) * window}", *cells)
    for title, column in zip(table.columns[1:], ratios, strict=True):
        out.record(
            kind="approach", column=str(title.header), window=window, ratios=column
        )
    out.console.print(table)


def _by_window(
    load: Workload, options: Options, window: int, windows: int
) -> list[float]:
    hits = [0]
    for number in range(1, windows + 1):
        end = load.from_request + number * window
        stream = dataclasses.replace(load.stream, blocks=load.stream.blocks[:end])
        hits.append(_run(dataclasses.replace(load, stream=stream), options).hits)
    return [(b - a) / window for a, b in itertools.pairwise(hits)]


@policy.command("markdown")
@click.argument("results", type=click.Path(exists=True, path_type=Path))
def show_markdown(*, results: Path) -> None:
    """Print what --output collected, also of trace, as Markdown."""
    click.echo(markdown(results))


@policy.command("generate")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--conversations", default=1500, show_default=True)
@click.option("--seed", default=1, show_default=True)
def generate(*, path: Path, conversations: int, seed: int) -> None:
    """Write the made-up trace to PATH, in the Mooncake format."""
    records = workloads.generated_trace(conversations, seed=seed)
    with open(path, "w") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    click.echo(f"{len(records)} requests of {conversations} conversations")


# ---- trace -------------------------------------------------------------------------

_MODELS = ("LRU", "GCLOCK2", "DUEL5", "prefix", "MIN")


@click.command()
@_trace_option
@click.option(
    "--divisor",
    "divisors",
    multiple=True,
    type=click.IntRange(min=1),
    default=_DIVISORS,
    show_default=True,
    help="Capacities: the distinct blocks of the trace over this.",
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the volume is made.  [default: /dev/shm]",
)
@click.option("--stripes", default=0, help="Of the engine.  [default: by capacity]")
@click.option("--admission", default="always", show_default=True, help="Of the engine.")
@click.option("--eviction", default="clock", show_default=True, help="Of the engine.")
@_output_option
def trace(
    *,
    traces: Sequence[Path],
    divisors: Sequence[int],
    folder: Path | None,
    stripes: int,
    admission: str,
    eviction: str,
    output: Path | None,
) -> None:
    """Replay traces through the models and through the engine.

    Ends with 3 if the engine and its model differ by more than 0.003.
    """
    out = _Output(output)
    asked = {"admission": admission, "eviction": eviction}
    options = _engine_options(asked)
    table = Table(title=f"hit ratio; engine with {admission} admission, {eviction}")
    titles = (*_MODELS, "model of the engine", "engine", "difference")
    table.add_column("trace")
    table.add_column("blocks", justify="right")
    for title in titles:
        table.add_column(title, justify="right")
    worst = 0.0
    for path in traces or (None,):
        for divisor in divisors:
            load = workloads.trace(path, divisor)
            started = time.perf_counter()
            found = replay_engine(
                load.stream, load.capacity, folder=folder, stripes=stripes, **options
            )
            seconds = time.perf_counter() - started
            model = replay(
                load.stream, _engine_model(asked, found.stripes), found.capacity
            )
            difference = found.hit_ratio - model.hit_ratio
            worst = max(worst, abs(difference))
            named = policies.OURS | policies.OTHERS
            ratios = {name: _run(load, named[name]).hit_ratio for name in _MODELS}
            cells = [f"{ratio:.4f}" for ratio in ratios.values()]
            cells += [f"{model.hit_ratio:.4f}", f"{found.hit_ratio:.4f}"]
            table.add_row(load.name, str(load.capacity), *cells, f"{difference:+.4f}")
            out.record(
                kind="trace",
                trace=load.name,
                models=ratios,
                model=model.hit_ratio,
                seconds=seconds,
                **asked,
                **dataclasses.asdict(found),
                hit_ratio=found.hit_ratio,
            )
            for store, value in ((OURS, found.hit_ratio), (MODEL, model.hit_ratio)):
                one = sample(
                    *(TRACE, "hit_ratio", store, load, value), **dict[str, Any](asked)
                )
                out.sample(one)
    out.console.print(table)
    agrees = worst <= AGREEMENT
    verdict = "agree" if agrees else "DIFFER"
    out.console.print(
        f"engine and model {verdict}: at most {worst:.4f} apart, allowed {AGREEMENT}"
    )
    if not agrees:
        sys.exit(_EXIT_DIFFERS)


def _engine_options(asked: Mapping[str, str]) -> dict[str, Any]:
    """Return what ``CacheConfig`` takes: an engine may not have an option yet."""
    fields = inspect.signature(CacheConfig).parameters
    plain = {"admission": "always", "eviction": "clock"}
    options: dict[str, Any] = {}
    for name, value in asked.items():
        if name in fields:
            options[name] = value
        elif value != plain[name]:
            raise click.UsageError(f"this engine has no option {name}")
    return options


def _engine_model(asked: Mapping[str, str], stripes: int) -> Options:
    if asked["eviction"] == "prefix":
        return policies.engine_prefix(stripes)
    models = {
        "always": policies.engine_clock(stripes),
        "second-touch": policies.second_touch(stripes),
        "adaptive": policies.engine_adaptive(stripes),
    }
    if asked["admission"] not in models:
        raise click.UsageError(f"no model of admission {asked['admission']!r}")
    return models[asked["admission"]]
