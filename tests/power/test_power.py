# SPDX-License-Identifier: Apache-2.0
"""Power cuts at any place of recorded streams of writes (N1, N3; cases A4, A6, A10).

`scripts/power_cuts.py` is the long form.  disk.py says what a cut may leave.
"""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import build_core
import pytest
from power.cuts import WORKLOADS, Wrong, campaign
from power.mutants import MUTANTS
from support.compile import BUILD

CUTS = int(os.environ.get("CKV_POWER_CUTS", "20"))
KEPT = BUILD / "power"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a4_n1_n3_a_power_cut_loses_or_brings_back_what_it_must_not(
    core: SimpleNamespace, rng: random.Random, workload: str
):
    counts = campaign(core, workload, str(rng.getrandbits(32)), CUTS, keep=KEPT)
    assert counts.cuts >= CUTS


def _caught(core: SimpleNamespace, name: str, **options: Any) -> str:
    """What is said of an engine that breaks a promise."""
    for seed in range(12):
        try:
            campaign(core, name, f"mutant {seed}", 60, **options)
        except Wrong as wrong:
            return str(wrong)
    raise AssertionError("it passed")


def test_the_judge_notices_a_sync_that_does_nothing(core: SimpleNamespace):
    assert "was synced" in _caught(core, "puts", lie=True)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_judge_notices_an_engine_in_which(name: str):
    mutant = MUTANTS[name]
    built = mutant.build(name)
    module = build_core.load_from(built)
    broken = SimpleNamespace(lib=module.lib, ffi=module.ffi)
    assert _caught(broken, mutant.workload, built=built)
