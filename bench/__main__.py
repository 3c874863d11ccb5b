# SPDX-License-Identifier: Apache-2.0
"""``python -m bench``: one command for all suites, their records and verdicts."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from bench import merge, records
from bench.churn import command as churn
from bench.markdown import markdown_table
from bench.policy.command import policy, trace
from bench.recording import check_vectors, console_for, recording
from bench.records import Run, Verdict
from bench.report_command import report
from bench.suites import Suite, suites
from cyclone_kv import parse_size

_FOLDER = Path("build/bench")


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
    console = console_for()
    if form != "full":
        console.print(f"{form.upper()} FORM: small data, few rounds; --full for more")
    with recording(console, "all", form, folder, output, traces) as running:
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
    check_vectors(console_for())


@main.command("suites")
def show_suites() -> None:
    """List the suites."""
    for suite in suites():
        click.echo(f"{suite.name:20}{suite.help}")


def _load(results: Sequence[Path], *, bench: str | None = None) -> Run:
    """Return the run of some files, by default the newest that has such samples."""
    if results:
        return merge.merged([records.load(path) for path in results])
    paths = sorted(
        records.RESULTS.glob("*.jsonl"), key=lambda path: path.stat().st_mtime
    )
    for path in reversed(paths):
        run = records.load(path)
        if run.select(bench=bench):
            return run
    raise click.ClickException(f"there is no such run in {records.RESULTS}")


_RESULTS_ARGUMENT = click.argument(
    "results", nargs=-1, type=click.Path(exists=True, path_type=Path)
)


@main.command("markdown")
@_RESULTS_ARGUMENT
@click.option("--short", is_flag=True, help="Medians in one table.")
@click.option("--block", "blocks", multiple=True, help="Only this; may be repeated.")
def show_markdown(
    results: Sequence[Path], *, short: bool, blocks: Sequence[str]
) -> None:
    """Print a run of kv_bench as Markdown: RESULTS together, or the newest."""
    run = _load(results, bench="kv_bench")
    sizes = [parse_size(text, "block") for text in blocks]
    click.echo(markdown_table(run, short=short, blocks=sizes))


@main.command("verdicts")
@_RESULTS_ARGUMENT
def show_verdicts(results: Sequence[Path]) -> None:
    """Print how far a run came, row by row: RESULTS together, or the newest."""
    run = _load(results)
    found = [verdict for suite in suites() for verdict in suite.verdicts(run)]
    _print_verdicts(console_for(), found)


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
    with recording(console_for(), "kv", "chosen", folder, output) as context:
        kv_bench.run(
            context, plan, blocks=sizes, names=names, lmdb_writemap=lmdb_writemap
        )
        if entries:
            kv_bench.run_entries(context)
        for verdict in kv_bench.SUITE.verdicts(context.writer.run):
            context.writer.verdict(verdict)
            if verdict.reached is not None:
                context.console.print(verdict.line(), soft_wrap=True, markup=False)


main.add_command(churn)
main.add_command(policy)
main.add_command(report)
main.add_command(trace)


if __name__ == "__main__":
    main()
