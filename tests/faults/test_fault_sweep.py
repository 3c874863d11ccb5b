# SPDX-License-Identifier: Apache-2.0
"""Each call of the engine fails, in each scenario: a part of the sweep (sweep.c).

All of it:  python scripts/fault_sweep.py
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from support import fault_sweep

CASES = 40  # of each scenario; which ones is chosen by the seed of the run
SANITIZE = os.environ.get("CKV_SANITIZE", "")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the faults are those of Linux, and so is ld --wrap"
)


@pytest.fixture(scope="session")
def program() -> Path:
    return fault_sweep.build(SANITIZE)


SCENARIOS = {  # by what is done; a name that is missing here fails the last test
    "create": ["create", "create two files", "recreate"],
    "open": [
        "open",
        "open two files",
        "open in a new process",
        "open with prefixes",
        "open with admission",
        "open with shm_directory",
        "open with the guard",
        "open a degraded set",
    ],
    "join": [
        "open beside another",
        "open again",
        "open for reading",
        "open for reading beside another",
        "fork",
    ],
    "put": [
        "put of all sizes",
        "put",
        "put in pieces",
        "put to two files",
        "put of a present block",
        "overwrite",
        "put with write-behind",
        "put_many",
        "put_many of a chain",
        "reserve",
    ],
    "evict": ["evict", "evict by prefix", "remove", "clear", "clear two files"],
    "get": [
        "get, first time",
        "get in a new process",
        "get, again",
        "get with the guard",
        "get with few page tables",
        "locate",
        "look",
    ],
    "copy": [
        "get_into, first time",
        "get_into, again",
        "get_into, cold",
        "get_many_into, first time",
        "get_many_into, again",
        "get_many_into, cold",
        "get as a reader",
        "get as a reader, two lives",
    ],
    "care": [
        "sync",
        "sync two files",
        "verify",
        "verify with prefixes",
        "repair",
        "read what is damaged",
        "recover",
        "sweep the dead",
        "maintenance",
        "close",
        "close two files",
    ],
}


@pytest.mark.parametrize("group", SCENARIOS)
def test_a_call_that_fails_breaks_no_promise_and_leaks_nothing(
    program: Path, tmpfs_folder: Path, rng: random.Random, group: str
):
    seed = rng.getrandbits(32)
    cases = 0
    findings = []
    for scenario in SCENARIOS[group]:
        outcome = fault_sweep.run(
            program, tmpfs_folder / "sweep", scenario, cases=CASES, seed=seed
        )
        findings += outcome.findings
        cases += outcome.cases
    assert not findings, f"sweep seed {seed}:\n" + "\n".join(findings)
    assert cases > 10 * len(SCENARIOS[group])


def test_every_scenario_is_run(program: Path):
    named = [name for names in SCENARIOS.values() for name in names]
    assert sorted(named) == sorted(fault_sweep.scenarios(program))


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        ("descriptor", "descriptors"),
        ("allocation", "allocations are left"),
        ("mapping", "bytes are left mapped"),
        ("pin", "is left pinned"),
        ("block", "was acknowledged and is gone"),
        ("bytes", "has wrong bytes"),
        ("signal", "ended with"),
    ],
)
def test_the_sweep_sees_what_is_broken_on_purpose(
    program: Path, tmpfs_folder: Path, plant: str, words: str
):
    outcome = fault_sweep.run(
        program, tmpfs_folder / "sweep", "put", cases=5, plant=plant
    )
    assert any(words in finding for finding in outcome.findings), outcome.findings
