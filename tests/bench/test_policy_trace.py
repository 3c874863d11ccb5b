# SPDX-License-Identifier: Apache-2.0
"""Traces: read, made up, and replayed through the engine and its model."""

from __future__ import annotations

import json

import pytest

for needed in ("click", "numpy", "rich"):
    pytest.importorskip(needed)

from click.testing import CliRunner  # noqa: E402

from bench import records  # noqa: E402
from bench.policy import policies, published, workloads  # noqa: E402
from bench.policy.__main__ import main  # noqa: E402
from bench.policy.engine import replay_engine  # noqa: E402
from bench.policy.native import replay  # noqa: E402


def run(*arguments):
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


@pytest.fixture(scope="module")
def small_trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "made-up.jsonl"
    result = run("policy", "generate", str(path), "--conversations", "300")
    assert result.exit_code == 0, result.output
    return path


def test_a_trace_is_read_as_requests(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = ['{"hash_ids": [7, 8]}', '{"hash_ids": []}', '{"hash_ids": [7, 9, 10]}']
    path.write_text("\n".join(lines) + "\n")
    stream = workloads.read_trace(path)
    assert stream.blocks.tolist() == [0, 1, 0, 2, 3]
    assert stream.ends.tolist() == [2, 5]
    assert stream.universe == 4


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '{"hash_ids": 3}', '{"hash_ids": [-1]}', '{"hash_ids": ["a"]}'],
)
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text('{"hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        workloads.read_trace(path)


def test_an_empty_trace_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="no block"):
        workloads.read_trace(path)


def test_the_made_up_trace_is_conversations_in_the_format(small_trace):
    records = [json.loads(line) for line in small_trace.read_text().splitlines()]
    times = [record["timestamp"] for record in records]
    assert times == sorted(times)
    parents = {}
    for record in records:
        blocks = record["hash_ids"]
        assert (len(blocks) - 1) * 512 < record["input_length"] <= len(blocks) * 512
        for parent, block in zip([None, *blocks], blocks, strict=False):
            assert parents.setdefault(block, parent) == parent  # a block has one parent
    total = sum(len(record["hash_ids"]) for record in records)
    assert 0.3 < 1 - len(parents) / total < 0.95  # blocks come back


@pytest.mark.parametrize(("divisor", "stripes"), [(16, 0), (4, 4)])
def test_engine_and_model_agree(small_trace, divisor, stripes):
    load = workloads.trace(small_trace, divisor)
    found = replay_engine(load.stream, load.capacity, stripes=stripes)
    model = replay(load.stream, policies.engine_clock(found.stripes), found.capacity)
    assert found.stripes == (stripes or 1)
    assert found.accesses == model.accesses
    assert found.hit_ratio == pytest.approx(model.hit_ratio, abs=0.003)
    assert found.writes == pytest.approx(model.writes, rel=0.01)


def test_requests_before_the_given_one_are_not_counted(small_trace):
    load = workloads.trace(small_trace, 8)
    half = load.stream.requests // 2
    found = replay_engine(load.stream, load.capacity, from_request=half)
    model = replay(
        load.stream, policies.engine_clock(1), load.capacity, from_request=half
    )
    assert found.accesses == model.accesses < len(load.stream.blocks)
    assert found.hit_ratio == pytest.approx(model.hit_ratio, abs=0.003)


def test_trace_command_prints_both_and_records_them(small_trace, tmp_path):
    output = tmp_path / "out.jsonl"
    result = run(
        *("trace", "--trace", str(small_trace), "--divisor", "8"),
        *("--output", str(output)),
    )
    assert result.exit_code == 0, result.output
    assert "engine and model agree" in result.output
    found = records.load(output)
    (record,) = found.others
    engine, model = (
        found.median(bench="trace", phase="hit_ratio", store=store)
        for store in ("cyclone_kv", "model of the engine")
    )
    assert (engine, model) == (record["hit_ratio"], record["model"])
    assert record["models"]["MIN"] > record["models"]["LRU"]
    assert record["hit_ratio"] == pytest.approx(record["model"], abs=0.003)
    lines = run("policy", "markdown", str(output)).output.splitlines()
    assert lines[0].startswith("| trace | blocks | stripes | LRU |")
    assert f"{record['hit_ratio']:.4f}" in lines[2]


def test_markdown_has_a_table_for_each_kind(small_trace, tmp_path):
    output = tmp_path / "out.jsonl"
    for command in (
        ("published", "--short"),
        ("order", "--trace", str(small_trace)),
        ("search", "--only", "CLOCK3", "--gets", "1000"),
    ):
        result = run("policy", *command, "--output", str(output))
        assert result.exit_code == 0, result.output
    text = run("policy", "markdown", str(output)).output
    heads = [part.split(" |", 2)[0] for part in text.split("\n\n")]
    assert heads == ["| row", "| stream", "| trace", "| candidate"]


def test_trace_command_fails_when_they_differ(small_trace, monkeypatch):
    monkeypatch.setattr(policies, "engine_clock", lambda *_: policies.OTHERS["LRU"])
    result = run("trace", "--trace", str(small_trace), "--divisor", "8")
    assert result.exit_code == 3
    assert "DIFFER" in result.output


def test_an_engine_without_the_option_says_so(small_trace):
    result = CliRunner().invoke(
        main, ["trace", "--trace", str(small_trace), "--admission", "no-such-thing"]
    )
    assert result.exit_code != 0


def test_policy_command_fails_when_a_value_differs(monkeypatch):
    result = run("policy", "published", "--short")
    assert result.exit_code == 0, result.output
    assert "16 of 16 values agree" in result.output
    monkeypatch.setattr(published, "_TOLERANCE", -1)
    result = run("policy", "published", "--short")
    assert result.exit_code == 3
    assert "DIFFERS" in result.output


def test_search_prints_a_line_for_each_candidate():
    result = run("policy", "search", "--only", "CLOCK3", "--gets", "1000")
    assert result.exit_code == 0, result.output
    assert "GCLOCK3" in result.output
