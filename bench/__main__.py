# SPDX-License-Identifier: Apache-2.0
"""``python -m bench``: one command, one table."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench import vectors
from bench.machine import CacheDropper, describe, device_limit, settle
from bench.markdown import markdown_table
from bench.phases import Dataset, Sample, run_round
from bench.stores import CycloneStore, FileStore, LmdbStore, Store
from bench.table import Results, human_size
from cyclone_kv import parse_size

_EXIT_VECTORS = 2
_STORES = (CycloneStore, LmdbStore, FileStore)


class _Output:
    """Appends records to a file, one JSON object a line; drops them without one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, record: dict[str, Any]) -> None:
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(json.dumps(record) + "\n")


def _check_vectors(console: Console, output: _Output, *, every: bool) -> None:
    results = vectors.check()
    wrong = [vector for vector in results if not vector.matches]
    for vector in results if every else wrong:
        mark = "ok" if vector.matches else "DIFFERS"
        console.print(f"{mark:8}{vector.name}: {vector.found}", soft_wrap=True)
        if not vector.matches:
            console.print(f"{'must be':8}{vector.expected}", soft_wrap=True)
    output.write(
        {"kind": "vectors", "checked": len(results), "wrong": [v.name for v in wrong]}
    )
    if wrong:
        console.print(f"{len(wrong)} vectors differ: nothing is measured")
        sys.exit(_EXIT_VECTORS)
    console.print(f"{len(results)} reference vectors match")


@click.group(invoke_without_command=True)
@click.option("--quick", is_flag=True, help="A short first-table: 64 MiB, 3 rounds.")
@click.pass_context
def main(context: click.Context, *, quick: bool) -> None:
    """Measure the engine beside LMDB and a file per block.

    Without a command: first-table.
    """
    if context.invoked_subcommand is None:
        context.invoke(first_table, **({"dataset": "64MiB"} if quick else {}))


@main.command("vectors")
def show_vectors() -> None:
    """Recompute every reference vector and print it."""
    _check_vectors(Console(highlight=False), _Output(None), every=True)


@main.command("markdown")
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--short", is_flag=True, help="Medians in one table.")
def show_markdown(results: Path, *, short: bool) -> None:
    """Print the last run of RESULTS (see --output) as Markdown."""
    click.echo(markdown_table(results, short=short))


@main.command("first-table")
@click.option(
    "--block",
    "blocks",
    multiple=True,
    default=("64KiB", "2MiB", "32MiB"),
    show_default=True,
    help="Block size; may be repeated.",
)
@click.option(
    "--dataset",
    default="512MiB",
    show_default=True,
    help="Bytes of each store at each block size.",
)
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Fewer than 3 is a smoke test, no measurement.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the stores live, on the device to measure.  [default: build/bench]",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append all records here, as JSON lines.",
)
@click.option("--lmdb-writemap", is_flag=True, help="Open LMDB with writemap=True.")
def first_table(
    *,
    blocks: Sequence[str] = ("64KiB", "2MiB", "32MiB"),
    dataset: str = "512MiB",
    rounds: int = 3,
    folder: Path | None = None,
    output: Path | None = None,
    lmdb_writemap: bool = False,
) -> None:
    """Print cold, warm and put at three block sizes, with spread."""
    # Wide enough that no cell is folded when the output is not a terminal.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    records = _Output(output)
    sizes = [parse_size(text, "block") for text in blocks]
    total = parse_size(dataset, "dataset")
    parent = folder if folder is not None else Path("build/bench")
    parent.mkdir(parents=True, exist_ok=True)
    dropper = CacheDropper()
    about = describe(parent) | {
        "kind": "run",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "dataset": total,
        "rounds": rounds,
        "cache_drop": dropper.how,
        "lmdb_writemap": lmdb_writemap,
    }
    records.write(about)
    _print_about(console, about)
    _check_vectors(console, records, every=False)

    needed = 4 * max(total, *sizes)
    if about["free_bytes"] < needed + (1 << 30):
        raise click.ClickException(
            f"{parent} has {about['free_bytes'] >> 20} MiB free; "
            f"the run needs {needed >> 20} MiB and leaves 1 GiB alone"
        )
    scratch = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    try:
        settle(scratch, needed)
        for nbytes in sizes:
            data = Dataset(nbytes, total)
            stores: list[Store] = [
                kind(scratch, data.count, nbytes) for kind in _STORES
            ]
            for store in stores:
                if isinstance(store, LmdbStore):
                    store.writemap = lmdb_writemap
            names = [store.name for store in stores]
            results = Results(nbytes, data.count)
            for number in range(rounds):
                load = os.getloadavg()[0]
                samples = run_round(number, stores, data, scratch, dropper)
                limit = device_limit(scratch, data.total, nbytes)
                if limit["gb_per_second"] is not None:
                    samples.append(Sample("device", "limit", limit["gb_per_second"]))
                results.add(samples)
                for sample in samples:
                    records.write(
                        {
                            "kind": "sample",
                            "block": nbytes,
                            "count": data.count,
                            "round": number,
                            "phase": sample.phase,
                            "store": sample.store,
                            "value": sample.value,
                            "load_before": load,
                        }
                    )
                records.write(
                    {"kind": "device", "block": nbytes, "round": number, **limit}
                )
            console.print()
            console.print(results.table(names))
            console.print(f"device limit by {limit['tool']}, O_DIRECT, {_piece(limit)}")
            for record in results.summary(names):
                records.write(record)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _piece(limit: dict[str, Any]) -> str:
    return f"pieces of {human_size(limit['piece'])}, best depth {limit['depth']}"


def _print_about(console: Console, about: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {text}" for name, text in about["versions"].items())
    load = " ".join(f"{value:.2f}" for value in about["load_average"])
    console.print(
        f"{about['cpus']} x {about['cpu']}, {about['memory_bytes'] / 2**30:.1f} GiB, "
        f"Linux {about['kernel']}\n"
        f"{about['file_system']} on {about['device']}, readahead "
        f"{about['readahead_kb']} KiB, scheduler {about['scheduler']}\n"
        f"commit {about['commit']}; {versions}\n"
        f"load {load}; cache dropped by: {about['cache_drop']}",
        soft_wrap=True,
    )
    if about["load_average"][0] > 0.5 * about["cpus"]:
        console.print("The machine is busy: trust the ratios more than the numbers.")


if __name__ == "__main__":
    main()
