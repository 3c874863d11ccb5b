# SPDX-License-Identifier: Apache-2.0
"""One volume for all measurements of calls; its options of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.calls import volume
from cyclone_kv import Cache


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the size of the volume, and the volume of somebody else."""
    parser.addoption("--entries", type=int, default=volume.ENTRIES)
    parser.addoption("--volume", type=Path, help="an existing one, with that many blocks")
    parser.addoption("--rounds", type=int, default=100)


@pytest.fixture(scope="session")
def entries(request: pytest.FixtureRequest) -> int:
    """Blocks in the volume."""
    return int(request.config.getoption("--entries"))


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """Rounds of each measurement."""
    return int(request.config.getoption("--rounds"))


@pytest.fixture(scope="session")
def volume_path(request: pytest.FixtureRequest, entries: int) -> Iterator[Path]:
    """The volume: that of the option, or a new one."""
    given = request.config.getoption("--volume")
    if given is not None:
        yield given
    else:
        with volume.make(None, entries) as path:
            yield path


@pytest.fixture(scope="session")
def cache(volume_path: Path) -> Iterator[Cache]:
    """The volume, open, with every block verified."""
    with volume.open_cache(volume_path) as opened:
        target = bytearray(volume.BLOCK_BYTES)
        for entry in opened.ls():
            if not entry.verified:
                opened.get_into(entry.key, target)
        yield opened
