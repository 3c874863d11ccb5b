# SPDX-License-Identifier: Apache-2.0
"""What all tests share: seeds, hypothesis profiles, places for volumes, test points.

Every random choice hangs on one number, printed first and taken again with --seed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))  # for `from support import ...`

from support.points import PointsPython, build_overlay  # noqa: E402

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=_SLOW
)
settings.register_profile(
    "ci",
    settings.get_profile("default"),
    derandomize=False,
    max_examples=200,
)
settings.register_profile("quick", settings.get_profile("default"), max_examples=20)
settings.load_profile(
    os.environ.get("CKV_HYPOTHESIS") or ("ci" if os.environ.get("CI") else "default")
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="repeat a run: the seed that it printed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "stops: keeps a process stopped, for CKV_CRASH_STOP_SECONDS"
    )
    seed = config.getoption("--seed")
    if seed is None:
        seed = random.SystemRandom().randrange(2**32)
    config.stash[_SEED] = seed
    config.option.seed = seed  # what pytest-xdist hands to its workers
    # A shell ignores it for what it starts in the background, and so would Python.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Before hypothesis looks at its own option.
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(seed)


_SEED = pytest.StashKey[int]()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[_SEED]} (repeat with --seed={config.stash[_SEED]})"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of this test alone, from the seed of the run."""
    seed = f"{request.config.stash[_SEED]} {request.node.nodeid}"
    request.node.add_report_section("setup", "rng", f"seed {seed!r}")
    return random.Random(seed)


# ---- places for volumes -----------------------------------------------------------


def _scratch(parent: Path, prefix: str) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def file_system_of(path: Path) -> str:
    """The type that /proc/mounts has for the longest mount point above `path`."""
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, found = line.split()[:3]
        prefix = point.rstrip("/") + "/"
        if f"{path.resolve()}/".startswith(prefix) and len(prefix) >= len(best):
            best, kind = prefix, found
    return kind


@pytest.fixture
def disk_folder() -> Iterator[Path]:
    """An empty folder on a real file system: CKV_TEST_DISK, else build/volumes."""
    parent = os.environ.get("CKV_TEST_DISK")
    yield from _scratch(Path(parent or HERE.parent / "build" / "volumes"), "disk-")


@pytest.fixture
def tmpfs_folder() -> Iterator[Path]:
    """An empty folder on tmpfs."""
    parent = Path(os.environ.get("CKV_TEST_TMPFS", "/dev/shm"))
    if not parent.is_dir() or file_system_of(parent) != "tmpfs":
        pytest.skip(f"{parent} is no tmpfs; set CKV_TEST_TMPFS")
    yield from _scratch(parent, "ckv-test-")


@pytest.fixture(params=["disk", "tmpfs"])
def volume_folder(request: pytest.FixtureRequest) -> Path:
    """Runs the test twice: on a real file system and on tmpfs."""
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    return folder


@pytest.fixture
def volume_path(tmp_path: Path) -> Iterator[Path]:
    """The path of a volume that does not exist yet: on tmpfs where it has the room."""
    shm = Path("/dev/shm")
    if shm.is_dir() and shutil.disk_usage(shm).free > 1 << 30:
        for folder in _scratch(shm, "ckv-test-"):
            yield folder / "kv.cyc"
    else:
        yield tmp_path / "kv.cyc"


# ---- test points --------------------------------------------------------------------


@pytest.fixture(scope="session")
def _points_overlay() -> Path:
    return build_overlay(os.environ.get("CKV_SANITIZE", ""))


@pytest.fixture
def points_python(_points_overlay: Path, tmp_path: Path) -> PointsPython:
    """Runs a script with the instrumented engine: points_python(script, point=...)."""
    return PointsPython(_points_overlay, tmp_path, os.environ.get("CKV_SANITIZE", ""))
