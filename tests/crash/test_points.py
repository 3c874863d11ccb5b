# SPDX-License-Identifier: Apache-2.0
"""SIGKILL and SIGSTOP at every named step of the engine.

The list of steps is read from the source: a new one that no scenario reaches fails its
test until it is reached, or its reason is written down in NOT_REACHED.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from crash import cases_points
from crash.nursery import Nursery

NAMES = cases_points.names()

# (scenario, point): why no process can be brought there by the public API.
NOT_REACHED: dict[str, str] = {}
NOT_ALONE: dict[str, str] = {}
NOT_BESIDE: dict[str, str] = {}


@pytest.mark.parametrize("point", NAMES)
def test_n3_a_process_killed_alone_loses_or_damages_something(
    point_nursery: Nursery, volume_path: Path, point: str
):
    got_there = point_nursery.call(
        cases_points.kill_alone, path=str(volume_path), point=point, count=1
    )
    print(point, got_there)
    assert got_there
