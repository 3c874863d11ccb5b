# SPDX-License-Identifier: Apache-2.0
"""The experiments run, on little data; what they print is not judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("lmdb")
pytest.importorskip("rich")

from bench.experiments.__main__ import main


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("batch", ["1", "3"])
@pytest.mark.parametrize("order", ["stored", "random"])
def test_read_paths(disk_folder: Path, batch: str, order: str) -> None:
    # Warm: a test drops no page cache.  Without O_DIRECT and io_uring everywhere.
    ways = ("pread:1:1MiB", "whole:2:256KiB", "populate:1:64KiB", "fault-raw:2:64KiB")
    output = run(
        "read-paths",
        "--warm",
        f"--folder={disk_folder}",
        "--dataset=8MiB",
        "--block=1MiB",
        "--rounds=2",
        f"--batch={batch}",
        f"--order={order}",
        *(f"--way={way}" for way in ways),
    )
    for way in ways:
        assert way in output
    assert list(disk_folder.iterdir()) == []


def test_write_paths(disk_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.experiments import write_paths

    # Not every kernel and file system has RWF_DONTCACHE.
    monkeypatch.setattr(write_paths, "_WAYS", ("plain",))
    output = run(
        "write-paths", f"--folder={disk_folder}", "--dataset=8MiB", "--rounds=1"
    )
    assert "plain" in output
    assert list(disk_folder.iterdir()) == []
