# SPDX-License-Identifier: Apache-2.0
"""The suites scaling and calls, on volumes too small to measure anything."""

from __future__ import annotations

import os

import pytest

for needed in ("click", "lmdb", "matplotlib", "numpy", "pytest_benchmark", "rich"):
    pytest.importorskip(needed)

from click.testing import CliRunner  # noqa: E402

from bench import calls, records, scaling  # noqa: E402
from bench.__main__ import main  # noqa: E402
from bench.calls import system_calls  # noqa: E402
from bench.scaling import entries, growth, loads, sparse, workers  # noqa: E402
from cyclone_kv import Cache, CacheConfig  # noqa: E402


def tiny(name, folder):
    output = folder / "run.jsonl"
    done = CliRunner().invoke(
        main,
        ["--tiny", "--suite", name, "--folder", str(folder), "--output", str(output)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    left = [path.name for path in folder.iterdir()]
    assert left == ["run.jsonl"]
    return records.load(output)


def test_scaling_records_every_axis(disk_folder):
    run = tiny("scaling", disk_folder)
    phases = set(run.names("phase", bench="scaling"))
    assert {f"entries.{name}" for name in (*entries.CALLS, *entries.OPENS)} <= phases
    assert {"threads.put", "processes.both.copy", "batch.copy_cold"} <= phases
    assert {"processes.loop", "processes.memcpy", "block.view"} <= phases
    assert all(sample.value > 0 for sample in run.samples)
    workers_of = {
        sample.params["processes"] for sample in run.select(phase="processes.put")
    }
    assert workers_of == {1, 2}
    mixed = run.select(phase="block.put", block_bytes=0)
    assert len(mixed) == 1
    # So few entries say nothing about growth.
    assert [v.reached for v in run.verdicts] == [None] * len(run.verdicts)
    assert len(run.verdicts) > len(entries.CALLS)


def test_calls_are_measured_and_their_system_calls_counted(disk_folder):
    run = tiny("calls", disk_folder)
    phases = set(run.names("phase", bench="calls"))
    assert {"view", "view.p50", "contains_many", "events", "open_handle"} <= phases
    assert {"memoryview", "dict_lookup", "nothing"} <= phases
    assert {s.store for s in run.select(phase="memoryview")} == {"memoryview"}
    counted = {r["call"]: r for r in run.others if r["kind"] == "system_calls"}
    assert set(counted) >= {"view", "contains", "longest_prefix", "get_into", "stats"}
    if counted["get_into"]["each"] is not None:
        # A copy reads, so that a count of none is no accident of the counting.
        assert counted["get_into"]["each"] >= 1
        assert counted["view"]["each"] == counted["longest_prefix"]["each"] == 0
    assert {v.reached for v in run.verdicts} == {None}  # the volume is too small


def test_without_strace_a_filter_tells_none_from_some(monkeypatch, disk_folder):
    monkeypatch.setattr(system_calls.shutil, "which", lambda name: None)
    with calls.volume.make(disk_folder, 200) as path:
        found = system_calls.count(path, 200)
    if found["view"].text.startswith("not counted"):
        pytest.skip("this kernel filters no system calls")
    assert (found["view"].each, found["contains"].each) == (0, 0)
    assert found["get_into"].each is None
    assert found["get_into"].text.startswith("some")


def test_the_log_of_strace_is_counted_by_thread():
    log = "\n".join(
        [
            "10 openat(AT_FDCWD, ...) = 3",
            '10 access("/ckv-calls/view", F_OK) = -1 ENOENT',
            "11 sync_file_range(3, 0, 1, 2) = 0",
            '10 access("/ckv-calls/end", F_OK) = -1 ENOENT',
            '10 faccessat2(AT_FDCWD, "/ckv-calls/copy", F_OK, 0) = -1 ENOENT',
            *["10 pread64(3, ...) = 4096"] * 200,
            "10 --- SIGALRM ---",
            '10 access("/ckv-calls/end", F_OK) = -1 ENOENT',
        ]
    )
    found = system_calls.parse(log)
    assert (found["view"].each, found["view"].beside) == (0, 0.01)
    assert found["view"].text == "none"
    assert found["copy"].names == {"pread64": 2}


def test_a_round_of_pytest_benchmark_becomes_five_samples():
    found = {
        "name": "test_contains",
        "extra_info": {"entries": 9, "divide_by": 1000, "clocked_p50_us": 0.25},
        "stats": {"data": [0.001] * 10 + [0.003] * 15},
    }
    samples = calls.samples_of(found)
    assert [s.value for s in samples] == pytest.approx([1, 1, 3, 3, 3, 0.25])
    assert {s.phase for s in samples} == {"contains", "contains.p50"}
    assert [s.round for s in samples] == [0, 1, 2, 3, 4, 0]


def test_growth_tells_constant_from_linear():
    counts = (10**3, 10**4, 10**5, 10**6)
    assert growth.fit(dict.fromkeys(counts, 0.4)).order == "O(1)"
    linear = growth.fit({n: 300 + n * 0.05 for n in counts})
    assert linear.order == "O(n)"
    assert linear.each == pytest.approx(0.05)
    assert growth.fit({n: n**0.5 for n in counts}).slope == pytest.approx(0.5)
    assert growth.fit({n: n**0.5 for n in counts}).order == "between"
    assert growth.fit({1000: 0.4}) is None


def fake_run(costs):
    run = records.Run({})
    for count, cost in costs.items():
        run.samples.append(
            entries._sample("view", cost, 0, count, "us"),
        )
    return run


@pytest.mark.parametrize(("power", "reached"), [(0.1, True), (0.9, False)])
def test_a_call_that_grows_with_entries_is_a_missed_target(power, reached):
    run = fake_run({n: n**power for n in (10**4, 10**5, 10**6)})
    found = {v.row: v.reached for v in scaling.SUITE.verdicts(run)}
    assert found["cost of view, over entries"] is reached


def test_a_sparse_volume_takes_no_room_and_reads_as_stored(tmpfs_folder):
    path = tmpfs_folder / "kv.cyc"
    try:
        cache = sparse.fill(path, 5000)
    except sparse.Unavailable as reason:
        pytest.skip(str(reason))
    with cache:
        assert os.stat(path).st_size > 5000 * sparse.BLOCK_BYTES
        assert os.stat(path).st_blocks * 512 < 5000 * sparse.BLOCK_BYTES / 4
    with Cache.open(path, CacheConfig(allow_sparse=True)) as cache:
        keys = list(sparse.keys(5000))
        assert cache.longest_prefix(keys) == 5000
        view = cache.get(keys[4999])
        assert view == bytes(sparse.BLOCK_BYTES)
        del view


def test_a_worker_that_fails_says_so(tmpfs_folder):
    config = CacheConfig(capacity="16MiB")
    path = tmpfs_folder / "kv.cyc"
    job = workers.Job("no such load", 1, 4096, 0.001, 1)
    with Cache.open(path, config) as cache:
        with pytest.raises(KeyError):
            workers.run_threads(cache, [job])
        with workers.Team(path, 1) as team, pytest.raises(KeyError):
            team.run([job])


def test_mixed_blocks_have_small_ones_between_large_ones():
    assert min(loads.MIX) == 64 << 10
    assert max(loads.MIX) >= 8 << 20
