# SPDX-License-Identifier: Apache-2.0
"""Nurseries for the crash tests, and the switch between their short and long form."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.nursery import Nursery

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
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def effort() -> float:
    """Multiplies rounds and seconds: 1 in CI; CKV_CRASH_EFFORT=50 for the long form."""
    return float(os.environ.get("CKV_CRASH_EFFORT", "1"))
