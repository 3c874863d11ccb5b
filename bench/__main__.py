# SPDX-License-Identifier: Apache-2.0
"""``python -m bench``: one command for all suites, their records and verdicts."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench import records, vectors
from bench.churn import command as churn
from bench.foreign import ForeignLoad
from bench.machine import CacheDropper, describe
from bench.markdown import markdown_table
from bench.policy.command import policy, trace
from bench.records import Run, Verdict, Writer
from bench.report_command import report
from bench.suites import Context, Suite, suites
from cyclone_kv import parse_size

_EXIT_VECTORS = 2
_FOLDER = Path("build/bench")
_WIDTH = 260  # no cell is folded when the output is not a terminal


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)


def _check_vectors(console: Console, writer: Writer | None = None) -> None:
    """Print every vector; end the process when one differs."""
    results = vectors.check()
    wrong = [vector for vector in results if not vector.matches]
    for vector in results:
        mark = "ok" if vector.matches else "DIFFERS"
        console.print(f"{mark:8}{vector.name}: {vector.found}", soft_wrap=True)
        if not vector.matches:
            console.print(f"{'must be':8}{vector.expected}", soft_wrap=True)
    if writer is not None:
        names = [vector.name for vector in wrong]
        writer.other("vectors", {"checked": len(results), "wrong": names})
    if wrong:
        console.print(f"{len(wrong)} vectors differ: nothing is measured")
        sys.exit(_EXIT_VECTORS)
    console.print(f"{len(results)} reference vectors match")


@contextlib.contextmanager
def _recording(
    console: Console,
    name: str,
    form: str,
    folder: Path,
    output: Path | None,
    traces: Sequence[Path] = (),
) -> Iterator[Context]:
    """Start a run: record, machine, vectors; complete the record at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    foreign = ForeignLoad()
    machine = describe(folder) | {
        "form": form,
        "command": sys.argv[1:],
        "cache_drop": CacheDropper().how,
    }
    path = output if output is not None else records.new_path(name)
    with Writer(path, machine) as writer:
        _print_machine(console, machine)
        _check_vectors(console, writer)
        context = Context(
            folder=folder,
            writer=writer,
            console=console,
            tiny=form == "tiny",
            traces=tuple(traces),
        )
        try:
            yield context
        finally:
            known = {"load_end": list(os.getloadavg()), **foreign.report()}
            writer.finish(**known)
            if known["foreign_load"]:
                console.print(
                    f"FOREIGN LOAD: others used {known['foreign_cpu_share']:.2f} of a "
                    f"processor, the host took {known['steal_share']:.2f}; this run is "
                    "marked, trust its ratios more than its numbers"
                )
            console.print(f"recorded in {path}")


def _print_machine(console: Console, about: dict[str, Any]) -> None:
    versions = ", ".join(
        f"{name} {text}" for name, text in about["versions"].items() if text
    )
    load = " ".join(f"{value:.2f}" for value in about["load_begin"])
    dirty = " with changes" if about["dirty"] else ""
    queue = about["queue"]
    console.print(
        f"{about['cpus']} x {about['cpu']}, {about['memory_bytes'] / 2**30:.1f} GiB, "
        f"{about['system']} {about['kernel']}\n"
        f"{about['file_system']} ({about['mount_options']}) on {about['device']}, "
        f"readahead {queue['read_ahead_kb']} KiB, scheduler {queue['scheduler']}\n"
        f"commit {about['commit']}{dirty}; {versions}\n"
        f"load {load}; cache dropped by: {about['cache_drop']}",
        soft_wrap=True,
    )
    for name, why in about["not_importable"].items():
        console.print(f"{name} is left out: {why}", soft_wrap=True)


def _print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    console.print()
    for verdict in verdicts:
        console.print(verdict.line(), soft_wrap=True, markup=False)
    counts = {
        "reached": sum(verdict.reached is True for verdict in verdicts),
        "missed": sum(verdict.reached is False for verdict in verdicts),
        "not measured": sum(verdict.reached is None for verdict in verdicts),
    }
    console.print(", ".join(f"{number} {word}" for word, number in counts.items()))


def _chosen(names: Sequence[str]) -> list[Suite]:
    found = suites()
    known = [suite.name for suite in found]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name} is none of {', '.join(known)}")
    return [suite for suite in found if not names or suite.name in names]


_FOLDER_OPTION = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=_FOLDER,
    show_default=True,
    help="Where the stores live, on the device to measure.",
)
_OUTPUT_OPTION = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"The record, one file a run.  [default: a new one in {records.RESULTS}]",
)


@click.group(invoke_without_command=True)
@click.option("--full", is_flag=True, help="To the letter of the definition: hours.")
@click.option("--tiny", is_flag=True, hidden=True)
@click.option("--suite", "names", multiple=True, help="Only this; may be repeated.")
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="To replay, JSON lines in the Mooncake format.  [default: made up]",
)
@_FOLDER_OPTION
@_OUTPUT_OPTION
@click.pass_context
def main(
    context: click.Context,
    *,
    full: bool,
    tiny: bool,
    names: Sequence[str],
    traces: Sequence[Path],
    folder: Path,
    output: Path | None,
) -> None:
    """Measure the engine beside its rivals, and say how far it came.

    Without a command: the short form of all suites. It is honest, with the page cache
    dropped and at least three rounds, but small: the numbers of --full are the ones to
    quote.
    """
    if context.invoked_subcommand is not None:
        return
    chosen = _chosen(names)
    form = "tiny" if tiny else "full" if full else "short"
    console = _console()
    if form != "full":
        console.print(f"{form.upper()} FORM: small data, few rounds; --full for more")
    with _recording(console, "all", form, folder, output, traces) as running:
        for suite in chosen:
            console.rule(f"{suite.name}: {suite.help}", align="left")
            begin = time.monotonic()
            (suite.full if full else suite.short)(running)
            console.print(f"{suite.name} took {time.monotonic() - begin:.0f} s")
        verdicts = [v for suite in chosen for v in suite.verdicts(running.writer.run)]
        for verdict in verdicts:
            running.writer.verdict(verdict)
    _print_verdicts(console, verdicts)


@main.command("vectors")
def show_vectors() -> None:
    """Recompute every reference vector and print it."""
    _check_vectors(_console())


@main.command("suites")
def show_suites() -> None:
    """List the suites."""
    for suite in suites():
        click.echo(f"{suite.name:20}{suite.help}")


def _load(results: Path | None, *, bench: str | None = None) -> Run:
    """Return the run of a file, by default the newest that has such samples."""
    if results is not None:
        return records.load(results)
    paths = sorted(
        records.RESULTS.glob("*.jsonl"), key=lambda path: path.stat().st_mtime
    )
    for path in reversed(paths):
        run = records.load(path)
        if run.select(bench=bench):
            return run
    raise click.ClickException(f"there is no such run in {records.RESULTS}")


_RESULTS_ARGUMENT = click.argument(
    "results", required=False, type=click.Path(exists=True, path_type=Path)
)


@main.command("markdown")
@_RESULTS_ARGUMENT
@click.option("--short", is_flag=True, help="Medians in one table.")
def show_markdown(results: Path | None, *, short: bool) -> None:
    """Print a run of kv_bench as Markdown: RESULTS, or the newest."""
    click.echo(markdown_table(_load(results, bench="kv_bench"), short=short))


@main.command("verdicts")
@_RESULTS_ARGUMENT
def show_verdicts(results: Path | None) -> None:
    """Print how far a run came, row by row: RESULTS, or the newest."""
    run = _load(results)
    found = [verdict for suite in suites() for verdict in suite.verdicts(run)]
    _print_verdicts(_console(), found)


@main.command("kv")
@click.option("--block", "blocks", multiple=True, help="Block size; may be repeated.")
@click.option("--dataset", default="512MiB", show_default=True, help="Of each size.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--store", "stores", multiple=True, help="May be repeated.  [default: all]"
)
@click.option("--seconds", default=0.3, show_default=True, help="Of each warm phase.")
@click.option(
    "--entries", is_flag=True, help="Also opens and memory of 500 000 entries."
)
@click.option("--lmdb-writemap", is_flag=True, help="Open LMDB with writemap=True.")
@_FOLDER_OPTION
@_OUTPUT_OPTION
def kv(
    *,
    blocks: Sequence[str],
    dataset: str,
    rounds: int,
    stores: Sequence[str],
    seconds: float,
    entries: bool,
    lmdb_writemap: bool,
    folder: Path,
    output: Path | None,
) -> None:
    """Run kv_bench with sizes of your own."""
    import dataclasses

    from bench import kv_bench
    from bench.stores import OURS

    sizes = [parse_size(text, "block") for text in blocks] or list(kv_bench.BLOCKS)
    plan = dataclasses.replace(
        kv_bench.SHORT,
        rounds=rounds,
        bytes_max=parse_size(dataset, "dataset"),
        blocks_max=sys.maxsize,
        warm_up_seconds=seconds / 3,
        warm_seconds=seconds,
    )
    names = list(dict.fromkeys([OURS, *stores])) if stores else None
    with _recording(_console(), "kv", "chosen", folder, output) as context:
        kv_bench.run(
            context, plan, blocks=sizes, names=names, lmdb_writemap=lmdb_writemap
        )
        if entries:
            kv_bench.run_entries(context)


main.add_command(churn)
main.add_command(policy)
main.add_command(report)
main.add_command(trace)


if __name__ == "__main__":
    main()
