# SPDX-License-Identifier: Apache-2.0
"""The command, from end to end, on blocks too few to measure anything."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

for needed in ("click", "lmdb", "numpy", "rich", "rocksdict"):
    pytest.importorskip(needed)

from click.testing import CliRunner  # noqa: E402

from bench import (  # noqa: E402
    foreign,
    kv_bench,
    machine,
    phases,
    records,
    suites,
    vectors,
)
from bench.__main__ import main  # noqa: E402
from bench.foreign import ForeignLoad  # noqa: E402
from bench.sizes import human_size  # noqa: E402
from bench.stores import available  # noqa: E402


@pytest.fixture
def gentle(monkeypatch, tmp_path):
    """Leave the page cache of the machine alone, and take no second for fio."""
    monkeypatch.setattr(machine, "_DROP_CACHES", tmp_path / "no-such-file")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine, "_PREADV_BYTES_MIN", 1)


def run(*arguments):
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


@pytest.fixture
def no_syncfs(monkeypatch):
    """It waits for what anybody wrote, sixty times; the run of some stores has it."""
    monkeypatch.setattr(machine, "syncfs", lambda folder: None)
    monkeypatch.setattr(phases, "syncfs", lambda folder: None)


@pytest.mark.usefixtures("gentle", "no_syncfs")
def test_a_tiny_run_has_every_phase_of_every_store_and_every_verdict(disk_folder):
    output = disk_folder / "results.jsonl"
    result = run(
        *("--tiny", "--suite", "kv_bench", "--folder", str(disk_folder)),
        *("--output", str(output)),
    )
    assert result.exit_code == 0, result.output
    assert "TINY FORM" in result.output
    assert "key 2: c5603a48" in result.output
    found = records.load(output)
    assert found.machine["form"] == "tiny"
    assert {"kernel", "mount_options", "queue", "commit", "dirty", "versions"} <= set(
        found.machine
    )
    assert {"load_begin", "load_end", "foreign_load"} <= set(found.machine)
    names = {kind.name for kind in available()[0]}
    every = {
        *("put", "put_synced", "cold_first", "cold_ordered", "cold_random"),
        *("cold_batch", "warm_copy", "warm_view", "view_p50"),
    }
    for block_bytes in (1 << 16, 1 << 20):
        for phase in every:
            what = {"bench": "kv_bench", "phase": phase, "block_bytes": block_bytes}
            assert names <= set(found.names("store", **what)), phase
    for block_bytes in (1 << 16, 1 << 20):
        what = {"phase": "warm_copy", "threads": 2, "block_bytes": block_bytes}
        assert found.ratio("cyclone_kv", "memcpy", **what) is not None
    assert {s.phase for s in found.samples if s.block_bytes is None} == {
        *("open", "view_p50", "memoryview_p50"),
        *("memory_per_entry", "memory_per_volume"),
    }
    assert all(sample.value > 0 for sample in found.samples)
    assert len(found.verdicts) == len(list(kv_bench.SUITE.verdicts(found)))
    for verdict in found.verdicts:
        assert verdict.row in result.output
    assert [path.name for path in disk_folder.iterdir()] == ["results.jsonl"]
    again = run("verdicts", str(output))
    assert again.exit_code == 0
    assert found.verdicts[0].text in again.output
    for options in ([], ["--short"]):
        shown = run("markdown", str(output), *options)
        assert shown.exit_code == 0
        assert "| put " in shown.output
        assert "64 KiB" in shown.output
    shown = run("markdown", str(output), "--short", "--block", "1MiB")
    assert "64 KiB" not in shown.output


@pytest.mark.usefixtures("gentle")
def test_some_stores_and_sizes_can_be_chosen(disk_folder):
    output = disk_folder / "results.jsonl"
    result = run(
        *("kv", "--block", "64KiB", "--dataset", "256KiB", "--rounds", "2"),
        *("--store", "files", "--seconds", "0.001"),
        *("--folder", str(disk_folder), "--output", str(output)),
    )
    assert result.exit_code == 0, result.output
    found = records.load(output)
    assert set(found.names("store")) - {"device", "memcpy"} == {"cyclone_kv", "files"}
    assert found.ratio("cyclone_kv", "files", phase="put").count == 2
    assert "64 KiB blocks" in result.output


def test_nothing_is_measured_when_a_vector_differs(monkeypatch, disk_folder):
    wrong = vectors.Vector("key 0", "aa", "bb")
    monkeypatch.setattr(vectors, "check", lambda: [wrong])
    output = disk_folder / "results.jsonl"
    result = run("--tiny", "--folder", str(disk_folder), "--output", str(output))
    assert result.exit_code == 2
    assert "nothing is measured" in result.output
    assert records.load(output).samples == []


def test_vectors_are_printed():
    result = run("vectors")
    assert result.exit_code == 0
    assert "key 2: c5603a48" in result.output


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    monkeypatch, disk_folder
):
    usage = machine.shutil.disk_usage(disk_folder)._replace(free=1 << 20)
    monkeypatch.setattr(kv_bench.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="has 1 MiB free"):
        run(
            *("--tiny", "--suite", "kv_bench", "--folder", str(disk_folder)),
            *("--output", str(disk_folder / "r.jsonl")),
        )
    assert [path.name for path in disk_folder.iterdir()] == ["r.jsonl"]


def test_suites_are_listed_and_a_wrong_name_is_refused():
    listed = run("suites")
    for suite in suites.suites():
        assert suite.name in listed.output
    assert run("--suite", "no-such").exit_code == 2


_BUSY = "import time\nend = time.time() + 1\nwhile time.time() < end: pass"


def test_the_work_of_others_is_seen():
    """Others: a process that another one started and left behind."""
    orphan = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {_BUSY!r}])"
    )
    load = ForeignLoad()
    subprocess.run([sys.executable, "-c", orphan], check=True)
    time.sleep(0.8)
    report = load.report()
    assert report["foreign_cpu_share"] * report["seconds"] > 0.2
    assert report["foreign_load"]


def test_ours_are_this_process_where_it_came_from_and_what_came_from_it():
    here = os.getpid()
    parents = {1: 0, 20: 1, here: 20, 30: here, 31: 30, 21: 20, 40: 1, 41: 40}
    assert foreign._family(parents) == {1, 20, here, 30, 31}


def test_a_process_that_ended_is_charged_once(monkeypatch):
    looks = iter(
        [
            {40: (100, 1), 41: (500, 40), 50: (7, 49)},
            {40: (700, 1)},  # with all of 41, which ended
        ]
    )
    monkeypatch.setattr(foreign, "_ticks", lambda: next(looks))
    load = ForeignLoad()
    report = load.report()
    ticks = report["foreign_cpu_share"] * report["seconds"] * foreign._TICKS
    assert round(ticks) == 100


def test_a_family_that_ended_is_charged_for_its_end_alone(monkeypatch):
    looks = iter(
        [
            {40: (100, 1), 41: (500, 40), 42: (6000, 41)},
            {40: (6700, 1)},  # 41 was charged for 42, and 40 for both
        ]
    )
    monkeypatch.setattr(foreign, "_ticks", lambda: next(looks))
    load = ForeignLoad()
    report = load.report()
    ticks = report["foreign_cpu_share"] * report["seconds"] * foreign._TICKS
    assert round(ticks) == 100


def test_sizes_are_for_people():
    assert [human_size(n) for n in (65536, 2 << 20, 1 << 30, 1000)] == [
        *("64 KiB", "2 MiB", "1 GiB", "1000 B"),
    ]
