# SPDX-License-Identifier: Apache-2.0
"""Nurseries for the crash tests, and the switch between their short and long form."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.nursery import Nursery, engine_path
from support.compile import sanitizer_environment

HERE = Path(__file__).resolve().parent

# What stops and what died is asked of /proc.
collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Runs functions in processes of their own, with the engine as it is installed."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def point_nursery(_points_overlay: Path) -> Iterator[Nursery]:
    """The same with the instrumented engine (tests/support/points.py)."""
    nursery = Nursery([_points_overlay])
    engine = nursery.call(engine_path)
    assert Path(engine).is_relative_to(_points_overlay), f"{engine} has no points"
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def effort() -> float:
    """Multiplies rounds and seconds: 1 in CI; CKV_CRASH_EFFORT=50 for the long form."""
    return float(os.environ.get("CKV_CRASH_EFFORT", "1"))


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("shim") / "shim.so"
    compiler = os.environ.get("CC", "gcc")
    command = [compiler, "-shared", "-fPIC", "-O1", "-D_GNU_SOURCE", "-o", str(target)]
    subprocess.run([*command, str(HERE / "shim.c"), "-ldl"], check=True)
    return target


@pytest.fixture
def shimmed(shim: Path) -> Iterator:
    """A nursery whose calls of the C library fail as planned (shim.c)."""
    started: list[Nursery] = []

    def start(plan: str) -> Nursery:
        preload = sanitizer_environment(os.environ.get("CKV_SANITIZE", ""))
        libraries = filter(None, [preload.get("LD_PRELOAD", ""), str(shim)])
        environment = {"LD_PRELOAD": ":".join(libraries), "CKV_SHIM": plan}
        started.append(Nursery(environment=environment))
        return started[-1]

    yield start
    for nursery in started:
        nursery.close()
