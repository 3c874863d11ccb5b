# SPDX-License-Identifier: Apache-2.0
"""The list of suites: what ``python -m bench`` runs, each a module with a ``SUITE``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console

from bench.records import Run, Verdict, Writer

__all__ = ["MODULES", "Context", "Suite", "suites"]

MODULES: tuple[str, ...] = (
    "bench.kv_bench",
    "bench.churn",
    "bench.writers",
    "bench.larger_than_memory",
    "bench.policy.suite",
    "bench.policy.engine_suite",
    "bench.calls",
    "bench.scaling",
    "bench.gpu_upload",
)
"""Modules with a ``SUITE``, in the order in which they run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What a suite is given: where it may work, and where its results go."""

    folder: Path
    """On the device to be measured; a suite makes a folder of its own in it and
    removes it."""
    writer: Writer
    console: Console
    tiny: bool = False
    """As small as it goes: shows that it runs, measures nothing (for the tests)."""
    traces: tuple[Path, ...] = ()
    """Traces in the Mooncake format to replay; without any, a made-up one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Suite:
    """One bench.

    ``short`` and ``full`` write samples; ``verdicts`` reads a run, made by either and
    perhaps without any sample of this suite (then every verdict has ``reached`` None),
    and returns a verdict for each row that this suite owns.
    """

    name: str
    help: str
    short: Callable[[Context], None]
    full: Callable[[Context], None]
    verdicts: Callable[[Run], Iterable[Verdict]]


def suites() -> list[Suite]:
    """Import and return all of them."""
    found = []
    for name in MODULES:
        suite = importlib.import_module(name).SUITE
        if not isinstance(suite, Suite):
            raise TypeError(f"{name}.SUITE is {suite!r}")
        found.append(suite)
    return found
