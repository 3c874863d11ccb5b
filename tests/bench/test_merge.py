# SPDX-License-Identifier: Apache-2.0
"""Runs put together."""

from __future__ import annotations

from bench.merge import merged, parts_of
from bench.records import Run, Sample


def sample(store, value, block=1, bench="kv_bench", phase="put", number=0):
    return Sample(
        bench=bench,
        phase=phase,
        store=store,
        value=value,
        unit="GB/s",
        better="higher",
        block_bytes=block,
        round=number,
    )


def run(time, *samples, commit="a", others=()):
    return Run({"time": time, "commit": commit}, samples, others=others)


def values(found):
    return {(s.store, s.block_bytes, s.value) for s in found.samples}


def test_pieces_become_one_run_and_the_newest_row_counts_with_all_its_stores():
    old = run("1", sample("ours", 1.0), sample("lmdb", 2.0), sample("ours", 3.0, 2))
    new = run("2", sample("ours", 4.0))
    found = merged([old, new])
    # The old value of lmdb is of another run than the new one of ours.
    assert values(found) == {("ours", 1, 4.0), ("ours", 2, 3.0)}
    assert found.machine["time"] == "2"
    assert values(merged([new, old])) == values(found)


def test_rounds_of_several_runs_are_rounds_of_one():
    old, new = (
        run(str(n), sample("ours", n, number=n), sample("lmdb", 2, number=n))
        for n in (1, 2)
    )
    assert merged([old, new]).ratio("ours", "lmdb", phase="put").count == 2


def test_runs_of_another_commit_are_left_out_for_each_bench_apart():
    old = run("1", sample("ours", 1.0, 2), sample("ours", 9.0, bench="calls"))
    new = run("2", sample("ours", 4.0), commit="b")
    assert parts_of([old, new], "kv_bench") == [new]
    assert values(merged([old, new])) == {("ours", 1, 4.0), ("ours", 1, 9.0)}
    assert values(merged([old, new], "calls")) == {("ours", 1, 9.0)}


def test_other_lines_come_from_the_newest_that_has_them():
    line = {"kind": "churn_run", "scan": False, "value": 1}
    old = run("1", sample("a", 1.0), others=[line, {**line, "scan": True}])
    new = run("2", sample("a", 2.0), others=[{**line, "value": 2}] * 2)
    found = merged([old, new]).others
    assert [(r["scan"], r["value"]) for r in found] == [
        (False, 2),
        (False, 2),
        (True, 1),
    ]


def test_nothing_is_an_empty_run():
    assert merged([]).samples == []
