# SPDX-License-Identifier: Apache-2.0
"""Files and shared regions that somebody else wrote into: a fixed number of cases.

Each case runs in a process of its own, so that a signal or a hang is found and named.
CKV_SANITIZE=address,undefined builds the programs under sanitizers.  More cases:

    build/hostile/fuzz_volume FOLDER FIRST COUNT
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support import compile as c

HERE = Path(__file__).resolve().parent
SANITIZE = os.environ.get("CKV_SANITIZE", "")
SECONDS = 600  # for what takes a minute on an idle machine
FIRST = 100_000  # of the fixed cases, away from those in seeds.txt
OPTIONS = {
    # SIGBUS is the engine's; hostile sizes are refused as malloc refuses them.
    "ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
# Cases of each program, and in how many processes at a time: a tenth of a case is work,
# the rest are waits that the engine gives others.
PROGRAMS = {"fuzz_volume": (80, 20), "fuzz_region": (40, 20), "hostile_files": (80, 20)}
SEED_PROCESSES = 10


def build(name: str) -> Path:
    flags = [*c.sanitizer_flags(SANITIZE), "-O1"]
    objects = c.compile_objects([*c.core_sources(), HERE / f"{name}.c"], flags)
    target = "-".join([name, *filter(None, SANITIZE.split(","))])
    return c.link(objects, c.BUILD / "hostile" / target, c.sanitizer_flags(SANITIZE))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return an empty folder, on tmpfs where there is one."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shutil.disk_usage(shm).free < 1 << 30:
        yield tmp_path
        return
    path = shm / f"ckv-hostile-{os.getpid()}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def start(program: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    return subprocess.Popen(
        [str(program), str(folder), *arguments],
        env={**environment, **OPTIONS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(runs: list[subprocess.Popen[str]], given: Sequence[str] = ()) -> None:
    """Wait for all, each of which is first given its text, if any."""
    failed = []
    try:
        for run, text in zip(runs, given, strict=False):
            assert run.stdin is not None
            run.stdin.write(text)
            run.stdin.close()
            run.stdin = None
        for run in runs:
            output, _ = run.communicate(timeout=SECONDS)
            if run.returncode != 0:
                failed.append(output[-4000:] or f"ended with {run.returncode}")
    finally:
        for run in runs:
            run.kill()
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("name", PROGRAMS)
def test_fixed_cases(name: str, folder: Path):
    cases, processes = PROGRAMS[name]
    program = build(name)
    share = cases // processes
    finish(
        [
            start(program, folder / str(i), str(FIRST + i * share), str(share))
            for i in range(processes)
        ]
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_seeds(name: str, folder: Path):
    """Run the cases that found something once, and some of each kind."""
    numbers = [
        number
        for line in (HERE / "seeds.txt").read_text().splitlines()
        for number in line.split()[1:]
        if line.split()[0] == name
    ]
    program = build(name)
    shares = [numbers[i::SEED_PROCESSES] for i in range(SEED_PROCESSES)]
    runs = [
        (start(program, folder / f"seeds {i}", "-"), "\n".join(share) + "\n")
        for i, share in enumerate(shares)
        if share
    ]
    finish([run for run, _ in runs], [given for _, given in runs])
