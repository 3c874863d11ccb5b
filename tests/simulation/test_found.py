# SPDX-License-Identifier: Apache-2.0
"""Faults that the simulation found, each by itself."""

from __future__ import annotations

import signal

CREATE = """
import sys
from cyclone_kv import Cache, CacheConfig
paths = sys.argv[1:]
with Cache.open(paths, CacheConfig.for_kv_tier(capacity="64MiB")) as cache:
    assert cache.put(b"key", b"value")
"""


def test_f2_a_new_set_is_laid_out_once(points_python, disk_folder):
    """A death in the second time left files of two sets, which no open accepted."""
    paths = [str(disk_folder / name) for name in ("a.cyc", "b.cyc")]
    result = points_python(CREATE, *paths, point="open.format:kill:3")
    assert result.returncode == 0, result.stderr


def test_f2_a_creator_killed_in_its_first_write_is_succeeded(
    points_python, disk_folder
):
    """It left a few pages of zeros, which every open took for a foreign file."""
    path = str(disk_folder / "kv.cyc")
    killed = points_python(CREATE, path, point="format.noted:kill:1")
    assert killed.returncode == -signal.SIGKILL
    result = points_python(CREATE, path)
    assert result.returncode == 0, result.stderr


def test_a_reader_waits_for_a_creator(points_python, disk_folder):
    """It called the half-made volume damaged, and told people to move it away."""
    path = str(disk_folder / "kv.cyc")
    creator = points_python.start(CREATE, path, point="format.reserved:stop:1")
    try:
        read = """
import sys, time
from cyclone_kv import Cache, CacheConfig, CycloneError
config = CacheConfig(open_timeout=0.5)
deadline = time.monotonic() + 60
text = ""
while "locked past the timeout" not in text and time.monotonic() < deadline:
    try:
        Cache.open(sys.argv[1], config, mode="r").close()
    except CycloneError as error:
        text = str(error)
        assert "not a volume" not in text, text
    except FileNotFoundError:
        pass
assert "locked past the timeout" in text, text
"""
        result = points_python(read, path)
        assert result.returncode == 0, result.stderr
    finally:
        creator.kill()
        creator.communicate()
