# SPDX-License-Identifier: Apache-2.0
"""The simulation repeats itself, finds given faults, and none in the engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import build_simulation  # noqa: E402  (the path is set up above)
import mutants  # noqa: E402

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="byte locks of descriptions, memfd_create"
)

NEW_SEEDS = 60
# Enough for each mutant, see mutants.py: the search stops at the first finding.
MUTANT_SEEDS = 1500
# Seeds in which a fault of the engine was found, or in which many things happen.
KEPT_SEEDS = (22, 40052, 40472, 40770)


def simulate(folder: Path, engine: Path, *options: str) -> tuple[int, str]:
    """The exit status and all that is said."""
    result = subprocess.run(
        [build_simulation.build_program(), engine, folder, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return result.returncode, result.stdout


def test_a_seed_makes_the_same_choices_again(tmpfs_folder, rng):
    engine = build_simulation.build_engine()
    seed = str(rng.randrange(1, 2**40))
    options = ("--seed", seed, "--seeds", "6", "--hashes")
    _, first = simulate(tmpfs_folder, engine, *options)
    _, second = simulate(tmpfs_folder, engine, *options)
    hashes = re.findall(r"seed \d+: [0-9a-f]{16}", first)
    assert len(hashes) == len({line.split()[-1] for line in hashes}) == 6
    assert re.findall(r"seed \d+: [0-9a-f]{16}", second) == hashes


def test_new_seeds_find_nothing(tmpfs_folder, rng):
    seed = str(rng.randrange(1, 2**40))
    status, said = simulate(
        tmpfs_folder,
        build_simulation.build_engine(),
        *("--seed", seed, "--seeds", str(NEW_SEEDS)),
    )
    print(said)
    assert status == 0, said


@pytest.mark.parametrize("seed", KEPT_SEEDS)
def test_a_kept_seed_finds_nothing(tmpfs_folder, seed):
    status, said = simulate(
        tmpfs_folder, build_simulation.build_engine(), "--seed", str(seed)
    )
    assert status == 0, said


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_found(tmpfs_folder, mutant):
    if mutant.rare and os.environ.get("CKV_SIMULATION") != "long":
        pytest.skip("takes minutes; CKV_SIMULATION=long")
    engine = mutants.build(mutant)
    try:
        status, said = simulate(
            tmpfs_folder,
            engine,
            *("--seed", "1", "--seeds", str(MUTANT_SEEDS), "--first"),
        )
    finally:
        engine.unlink(missing_ok=True)
    print(said)
    assert status == 1, f"{mutant.breaks}\n{said}"
