# SPDX-License-Identifier: Apache-2.0
"""The soak can fail: a fault that was planted in a worker ends in a bad verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.compile import ROOT

PROGRAM = [sys.executable, str(ROOT / "scripts" / "soak.py"), "--processes", "3"]


def soak(plant: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        env={**os.environ, "CKV_SOAK_PLANT": plant},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("plant", "counter"), [("flip", "wrong"), ("forget", "lost"), ("crash", "other")]
)
def test_a_planted_fault_fails_the_soak(plant: str, counter: str, tmp_path: Path):
    record = tmp_path / "record.json"
    result = soak(
        *(plant, "--seconds", "120", "--episode", "120", "--until-fault"),
        *("--folder", str(tmp_path / "soak"), "--json", str(record)),
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAILED" in result.stdout
    found = json.loads(record.read_text())
    assert found["counts"][counter] > 0
    assert found["verdict"] != "passed"
    assert not list((tmp_path / "soak").glob("run-*")), "volumes were left"


def test_an_interrupt_ends_the_soak_with_its_verdict(tmp_path: Path):
    process = subprocess.Popen(
        [*PROGRAM, "--minutes", "10", "--folder", str(tmp_path / "soak")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "seed" in process.stdout.readline()
    # Whatever it does then: an episode looks up once a second.
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    lines = rest.splitlines()
    assert "interrupted" in lines
    assert lines[-1] == "passed" or "nothing was done" in lines[-1], rest
    assert not list((tmp_path / "soak").glob("run-*")), "volumes were left"
