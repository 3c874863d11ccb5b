# SPDX-License-Identifier: Apache-2.0
"""The record of a run: what is written is what is read, medians, ratios by round."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("numpy")

from bench import records
from bench.records import Run, Sample, Spread, Verdict, Writer


def sample(store, value, number=0, **more):
    about = {"phase": "put", "unit": "GB/s", "better": "higher", "block_bytes": 65536}
    return Sample(
        bench="kv_bench", store=store, value=value, round=number, **(about | more)
    )


VERDICT = Verdict(
    bench="kv_bench", row="a row", reached=True, value=1.2, target=1.0, text="1.2 of 1"
)


def test_what_is_written_is_what_is_read(tmp_path):
    path = tmp_path / "folder" / "run.jsonl"
    with Writer(path, {"cpu": "one", "load_begin": [1.0]}) as writer:
        writer.sample(sample("a", 1.5, params={"threads": 4}))
        writer.other("device", {"depth": 4})
        writer.verdict(VERDICT)
        writer.finish(load_end=[2.0], foreign_load=True)
    run = records.load(path)
    assert run.machine == {
        "cpu": "one",
        "load_begin": [1.0],
        "load_end": [2.0],
        "foreign_load": True,
    }
    assert run.samples == [sample("a", 1.5, params={"threads": 4})]
    assert run.verdicts == [VERDICT]
    assert run.others == [{"kind": "device", "depth": 4}]
    first = json.loads(path.read_text().splitlines()[0])
    assert first["kind"] == "machine"
    assert [item.name for item in path.parent.iterdir()] == ["run.jsonl"]


def test_a_run_that_is_broken_off_leaves_what_it_had(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = Writer(path, {"cpu": "one"})
    writer.sample(sample("a", 1.0))
    assert records.load(path).samples == [sample("a", 1.0)]
    writer.close()


@pytest.mark.parametrize(
    "text",
    ["", '{"kind": "sample"}', '{"kind": "machine"}\n{"kind": "sample"}', "no json"],
)
def test_what_is_no_run_is_refused(tmp_path, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"run\.jsonl"):
        records.load(path)


def test_a_spread_has_median_ends_and_quartiles():
    assert Spread.of([]) is None
    assert Spread.of([3.0, 1.0, 2.0, 10.0, 4.0]) == Spread(3.0, 1.0, 10.0, 2.0, 4.0, 5)
    only = Spread.of([2.0])
    assert only == Spread(2.0, 2.0, 2.0, 2.0, 2.0, 1)
    assert only.text() == "2.00 (one round)"
    assert Spread.of([1.0, 2.0]).text(1) == "1.5 (1.0-2.0)"


def test_ratios_pair_the_rounds_whatever_their_order():
    run = Run({})
    for number, (ours, other) in enumerate([(2.0, 1.0), (3.0, 1.0), (8.0, 2.0)]):
        run.samples.append(sample("ours", ours, number))
        run.samples.insert(0, sample("other", other, number))
    run.samples.append(sample("ours", 100.0, 3))  # has no partner
    found = run.ratio("ours", "other", phase="put")
    assert (found.median, found.low, found.high, found.count) == (3.0, 2.0, 4.0, 3)
    assert run.ratio("ours", "nobody", phase="put") is None


def test_a_ratio_of_latencies_is_above_one_where_ours_is_shorter():
    latency = {"phase": "get", "unit": "us", "better": "lower"}
    run = Run({}, [sample("ours", 2.0, **latency), sample("other", 8.0, **latency)])
    assert run.ratio("ours", "other", phase="get").median == 4.0


def test_a_ratio_of_different_units_is_refused():
    run = Run({}, [sample("ours", 2.0), sample("other", 8.0, unit="MB/s")])
    with pytest.raises(ValueError, match="different things"):
        run.ratio("ours", "other")


def test_selecting_goes_by_parameters_too():
    one, four = {"params": {"threads": 1}}, {"params": {"threads": 4}}
    run = Run({}, [sample("a", 1.0, **one), sample("a", 2.0, **four)])
    assert run.median(store="a", threads=4) == 2.0
    assert run.median(store="a", threads=8) is None
    assert run.names("store") == ["a"]
    with pytest.raises(ValueError, match="two samples in round 0"):
        run.median(store="a")


def test_new_paths_differ(tmp_path):
    first = records.new_path("kv", tmp_path)
    first.touch()
    second = records.new_path("kv", tmp_path)
    assert first != second
    assert second.parent == tmp_path


@pytest.mark.parametrize(
    ("reached", "word"), [(True, "reached"), (False, "MISSED"), (None, "not measured")]
)
def test_the_line_of_a_verdict_says_all(reached, word):
    about = {"bench": "b", "row": "a row", "value": None, "target": None}
    line = Verdict(reached=reached, text="far", command="run it", **about).line()
    assert line.startswith(word)
    assert "a row: far" in line
    assert "[run it]" in line
