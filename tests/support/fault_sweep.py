# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the sweep over failing calls (tests/faults/sweep.c).

A scenario is run by one process after the other: a case that ends its process by a
signal, or hangs, is a finding, and the next process goes on behind it.
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from support import compile as c

__all__ = ["Outcome", "build", "run", "scenarios"]

HERE = c.ROOT / "tests" / "faults"
# What the linker leads to inject.c.
WRAPPED = (
    "malloc",
    "calloc",
    "aligned_alloc",
    "strdup",
    "free",
    "pthread_create",
    "pthread_key_create",
    "pthread_setspecific",
    "pthread_atfork",
)
DEATHS_MAX = 10
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


@dataclass
class Outcome:
    """What one scenario came to."""

    scenario: str
    transient: int = 0
    persistent: int = 0
    absorbed: int = 0
    idle: int = 0
    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """Return how often a call failed."""
        return self.transient + self.persistent


def build(sanitize: str = "") -> Path:
    """Compile the program together with the core."""
    flags = [*c.sanitizer_flags(sanitize), "-O1"]
    sources = [*c.core_sources(), *sorted(HERE.glob("*.c"))]
    name = "-".join(["sweep", *filter(None, sanitize.split(","))])
    wraps = [f"-Wl,--wrap={function}" for function in WRAPPED]
    link_flags = [*c.sanitizer_flags(sanitize), *wraps]
    return c.link(
        c.compile_objects(sources, flags), c.BUILD / "faults" / name, link_flags
    )


def _lines(program: Path, option: str) -> list[str]:
    result = subprocess.run(
        [str(program), option],
        capture_output=True,
        text=True,
        check=True,
        env=_environment(),
    )
    return result.stdout.splitlines()


def scenarios(program: Path) -> list[str]:
    """Return the names of all scenarios."""
    return _lines(program, "--list")


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    return {**environment, **OPTIONS}


def run(
    program: Path,
    folder: Path,
    scenario: str,
    *,
    cases: int = 0,
    seed: int = 0,
    plant: str = "",
) -> Outcome:
    """Run a scenario in an empty folder; 0 cases are all of them."""
    outcome = Outcome(scenario)
    first = 0
    for _ in range(DEATHS_MAX):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        command = [str(program), str(folder), scenario, "--from", str(first)]
        command += ["--cases", str(cases), "--seed", str(seed)]
        command += ["--plant", plant] if plant else []
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, env=_environment()
        )
        finished = _read(outcome, result.stdout)
        if finished:
            break
        doing = (folder / "doing").read_bytes().split(b"\0")[0].decode()
        outcome.findings.append(
            f"{doing or scenario} | ended with {result.returncode}: "
            f"{result.stderr[-2000:]}"
        )
        number = doing.partition(" |")[0]
        if not number.isdecimal():
            break
        first = int(number) + 1
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _read(outcome: Outcome, text: str) -> bool:
    """Add what a process has printed; False if it did not come to its end."""
    finished = False
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "FAULT":
            outcome.findings.append(rest)
        elif kind == "RESULT":
            counts = json.loads(rest)
            outcome.transient += counts["transient"]
            outcome.persistent += counts["persistent"]
            outcome.absorbed += counts["absorbed"]
            outcome.idle += counts["idle"]
            outcome.calls.update(counts["calls"])
            finished = True
    return finished
