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
    parser.addoption(
        "--volume", type=Path, help="an existing one, with that many blocks"
    )
    parser.addoption("--rounds", type=int, default=100)


@pytest.fixture(scope="session")
def entries(request: pytest.FixtureRequest) -> int:
    """Return how many blocks the volume has."""
    return int(request.config.getoption("--entries"))


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """Return the rounds of each measurement."""
    return int(request.config.getoption("--rounds"))


@pytest.fixture(scope="session")
def volume_path(request: pytest.FixtureRequest, entries: int) -> Iterator[Path]:
    """Yield the volume: that of the option, or a new one."""
    given = request.config.getoption("--volume")
    if given is not None:
        yield given
    else:
        with volume.make(None, entries) as path:
            yield path


@pytest.fixture(scope="session")
def verified(volume_path: Path) -> Iterator[Cache]:
    """Yield the volume, open, with every block verified, none viewed."""
    with volume.open_cache(volume_path) as opened:
        target = bytearray(volume.BLOCK_BYTES)
        for entry in opened.ls():
            if not entry.verified:
                opened.get_into(entry.key, target)
        yield opened


@pytest.fixture(scope="session")
def cache(verified: Cache) -> Cache:
    """Return the same, with every block viewed once: its pages are mapped here."""
    for entry in verified.ls():
        verified.get(entry.key)
    return verified
