# SPDX-License-Identifier: Apache-2.0
"""The tools of the other tests do what they say."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.points import PointsPython

SCRIPT = """
import sys
from cyclone_kv import Cache, CacheConfig, _core

with Cache.open(sys.argv[1], CacheConfig(capacity="64MiB")) as cache:
    stored = cache.put(b"k" * 32, b"x" * 10_000)
    print(_core.__file__, stored, cache.get(b"k" * 32) is not None)
"""


def test_a_script_runs_with_the_instrumented_engine(
    points_python: PointsPython, volume_path: Path
) -> None:
    result = points_python(SCRIPT, volume_path)
    assert result.returncode == 0, result.stderr
    file, *answers = result.stdout.split()
    assert file.startswith(str(points_python.overlay))
    assert answers == ["True", "True"]


def test_a_point_kills_when_it_is_reached_so_often(
    points_python: PointsPython, volume_path: Path
) -> None:
    result = points_python(SCRIPT, volume_path, point="put.published:kill:2")
    assert result.returncode == 0, "one put reaches it once"
    volume_path.unlink()
    result = points_python(SCRIPT, volume_path, point="put.published:kill:1")
    assert result.returncode == -signal.SIGKILL
    assert result.stdout == ""


def test_a_stopped_process_goes_on_when_told(
    points_python: PointsPython, volume_path: Path
) -> None:
    process = points_python.start(SCRIPT, volume_path, point="put.published:stop:1")
    try:
        # WUNTRACED: returns when the child stops as well as when it ends.
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert stdout.split()[1:] == ["True", "True"]
