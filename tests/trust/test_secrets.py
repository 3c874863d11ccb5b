# SPDX-License-Identifier: Apache-2.0
"""Nothing of a process's memory reaches a file: tests/trust/canary.c says how."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import compile as c

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def canary() -> Path:
    """Build the engine with every variable that nobody sets made to stand out."""
    flags = ["-O1", "-ftrivial-auto-var-init=pattern"]
    objects = c.compile_objects([*c.core_sources(), HERE / "canary.c"], flags)
    return c.link(objects, c.BUILD / "trust" / "canary", [])


@pytest.fixture
def folder(volume_path: Path) -> Iterator[Path]:
    path = volume_path.parent / "canary"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def test_memory_of_a_process_reaches_a_file(canary: Path, folder: Path) -> None:
    # The runtime of a sanitizer has an allocator of its own, which knows no M_PERTURB.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run(
        [str(canary), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert done.stdout.endswith("\n0 findings\n")
    assert done.stdout.count("bytes searched") > 40
