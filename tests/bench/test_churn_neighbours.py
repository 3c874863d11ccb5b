# SPDX-License-Identifier: Apache-2.0
"""Writer processes, and a tier larger than memory: runs of seconds, and verdicts."""

from __future__ import annotations

import io

import pytest

for needed in ("click", "numpy", "rich"):
    pytest.importorskip(needed)

from rich.console import Console  # noqa: E402

from bench import larger_than_memory, writers  # noqa: E402
from bench.records import Run, Sample, Writer  # noqa: E402
from bench.suites import Context  # noqa: E402


def run_tiny(suite, folder):
    output = io.StringIO()
    with Writer(folder / "results.jsonl", {}) as writer:
        console = Console(file=output, width=200)
        suite.short(Context(folder=folder, writer=writer, console=console, tiny=True))
    assert [path.name for path in folder.iterdir()] == ["results.jsonl"]
    return writer.run, output.getvalue()


def sample(bench, phase, store, value, number=0, **params):
    return Sample(
        bench=bench,
        phase=phase,
        store=store,
        value=value,
        unit="x",
        better="lower" if phase == "longest" else "higher",
        block_bytes=4096,
        round=number,
        params=params,
    )


def test_writers_all_store_and_no_put_is_refused(disk_folder):
    run, text = run_tiny(writers.SUITE, disk_folder)
    for store, processes in (
        ("cyclone_kv", 1),
        ("cyclone_kv", 2),
        ("device", 2),
        ("page cache", 2),
        ("memcpy", 2),
    ):
        (found,) = run.select(phase="put_synced", store=store, processes=processes)
        assert found.value > 0
    assert not writers._problems(run)
    assert "writer processes on one volume" in text


def test_a_writer_that_fails_is_a_problem_and_no_sample(disk_folder):
    size = writers._TINY
    result = writers._together("cyclone_kv", disk_folder, size, 2, 0)  # no volume
    assert result["put"] is None
    assert len(result["errors"]) == 2


def test_verdicts_of_writers():
    def verdicts(four, refused=0):
        samples = [
            sample("writers", "put_synced", store, value, processes=processes)
            for store, processes, value in (
                ("cyclone_kv", 1, 1.0),
                ("cyclone_kv", 4, four),
                ("device", 4, 1.2),
                ("memcpy", 4, 9.0),
            )
        ]
        record = {
            "kind": "writers_run",
            "store": "cyclone_kv",
            "errors": [],
            "counts": {"refused": refused},
        }
        run = Run({}, samples, others=[record])
        return [verdict.reached for verdict in writers.SUITE.verdicts(run)]

    assert verdicts(1.1) == [True, True, True]
    assert verdicts(1.05) == [True, False, True]
    assert verdicts(0.99, refused=1) == [False, False, False]
    assert [v.reached for v in writers.SUITE.verdicts(Run({}))] == [None] * 3


def test_reads_of_a_tier_in_three_ways(disk_folder):
    run, text = run_tiny(larger_than_memory.SUITE, disk_folder)
    for way in ("first lap", "device", "get_into", "view"):
        (found,) = run.select(phase="read", store=way)
        assert found.value > 0
    (record,) = (r for r in run.others if r["kind"] == "larger_than_memory_run")
    if record["cgroup"] is None:
        assert "NO MEMORY LIMIT" in text
    else:
        assert record["peak_memory_bytes"] > 1 << 20


@pytest.mark.parametrize(
    ("memory", "ours", "longest", "expected"),
    [
        (1, 0.7, 400_000.0, True),
        (1, 0.69, 500_001.0, False),
        (2, 0.9, 1.0, None),
        (None, 0.9, 1.0, None),
    ],
)
def test_verdicts_of_a_tier_larger_than_memory(memory, ours, longest, expected):
    name = "larger_than_memory"
    sizes = {"memory_bytes": memory, "capacity_bytes": 4}
    samples = [sample(name, "read", "device", 1.0, **sizes)]
    for way in ("get_into", "view"):
        samples.append(sample(name, "read", way, ours, **sizes))
        samples.append(sample(name, "longest", way, longest, **sizes))
    found = list(larger_than_memory.SUITE.verdicts(Run({}, samples)))
    assert [verdict.reached for verdict in found] == [expected] * 4
