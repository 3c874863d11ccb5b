# SPDX-License-Identifier: Apache-2.0
"""A run from its first line to its last: vectors, machine, record, foreign load."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import records, vectors
from bench.foreign import ForeignLoad
from bench.machine import CacheDropper, describe
from bench.records import Writer
from bench.suites import Context

__all__ = ["check_vectors", "console_for", "recording"]

_EXIT_VECTORS = 2
_WIDTH = 260  # no cell is folded when the output is not a terminal


def console_for() -> Console:
    """Return the console of a command."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)


def check_vectors(console: Console, writer: Writer | None = None) -> None:
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
def recording(
    console: Console,
    name: str,
    form: str,
    folder: Path,
    output: Path | None,
    traces: Sequence[Path] = (),
) -> Iterator[Context]:
    """Start a run: record, machine, vectors; complete the record at the end.

    ``name`` is that of the file where there is no ``output``.
    """
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
        check_vectors(console, writer)
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
