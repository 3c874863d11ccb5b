# SPDX-License-Identifier: Apache-2.0
"""Processes killed and stopped at random instants, against an oracle of their own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from crash import cases_storm
from crash.nursery import Nursery


@pytest.mark.parametrize(
    ("evicts", "stops"),
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["kept", "evicted", "kept-stopped", "evicted-stopped"],
)
def test_n1_n2_n3_storm_of_kills_loses_changes_or_tears_something(
    nursery: Nursery,
    volume_path: Path,
    rng: random.Random,
    effort: float,
    evicts,
    stops,
):
    counts = nursery.call(
        cases_storm.storm,
        timeout=60 + 10 * effort,
        path=volume_path,
        seconds=5 * effort,
        processes=5,
        evicts=evicts,
        stops=stops,
        seed=rng.getrandbits(32),
    )
    assert counts["puts"] > 0
    assert counts["hits"] > 0
    assert counts["kills"] > 0
