# SPDX-License-Identifier: Apache-2.0
"""The suites of hit ratios: a small run, and their verdicts."""

from __future__ import annotations

import dataclasses

import pytest

for needed in ("click", "lmdb", "matplotlib", "numpy", "rich", "rocksdict"):
    pytest.importorskip(needed)

from click.testing import CliRunner  # noqa: E402

from bench import records  # noqa: E402
from bench.__main__ import main  # noqa: E402
from bench.policy import engine_suite, suite  # noqa: E402
from bench.policy.samples import POLICY, TRACE  # noqa: E402
from bench.records import Run, Sample  # noqa: E402


def ratio(bench, store, stream, value, capacity=suite.CHURN_CAPACITY, **params):
    return Sample(
        bench=bench,
        phase="hit_ratio",
        store=store,
        value=value,
        unit="ratio",
        better="higher",
        params={"stream": stream, "capacity": capacity, **params},
    )


def reached(one, *samples):
    return {v.row: v.reached for v in one.SUITE.verdicts(Run({}, samples))}


def test_a_tiny_run_has_every_policy_and_the_engine_beside_its_model(tmp_path):
    trace = tmp_path / "given.jsonl"
    generate = ["policy", "generate", str(trace), "--conversations", "100"]
    assert CliRunner().invoke(main, generate).exit_code == 0
    output = tmp_path / "results.jsonl"
    result = CliRunner().invoke(
        main,
        [
            *("--tiny", "--suite", "policy", "--suite", "trace"),
            *("--trace", str(trace), "--folder", str(tmp_path / "work")),
            *("--output", str(output)),
        ],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    found = records.load(output)
    for stream in ("zipf", "zipf+scan", "given"):
        what = {"phase": "hit_ratio", "stream": stream}
        stores = set(found.names("store", bench=POLICY, **what))
        assert {"cyclone_kv", "plain clock", "prefix", "LRU", "MIN"} <= stores
        for one in found.select(bench=POLICY, **what):
            best = found.median(
                bench=POLICY, store="MIN", capacity=one.params["capacity"], **what
            )
            assert best is not None
            assert one.value <= best
        for policy in ("always", "adaptive", "prefix"):
            names = found.names("store", bench=TRACE, policy=policy, **what)
            assert set(names) == {"cyclone_kv", engine_suite.MODEL}
        engine, model = (
            found.median(bench=TRACE, store=store, policy="always", **what)
            for store in ("cyclone_kv", engine_suite.MODEL)
        )
        assert engine == pytest.approx(model, abs=engine_suite.AGREEMENT)
    # Too few blocks to say anything about the numbers to reach.
    rows = [verdict for verdict in found.verdicts if "hit ratio zipf" in verdict.row]
    assert len(rows) == 4
    assert all(verdict.reached is None for verdict in rows)


@pytest.mark.parametrize("stream", ["zipf", "zipf+scan"])
def test_the_tier_of_the_definition_is_judged(stream):
    target = suite.TARGETS[stream]
    for value, expected in ((target, True), (target - 0.001, False)):
        row = f"hit ratio {stream}, model of adaptive admission"
        sample = ratio(POLICY, "cyclone_kv", stream, value)
        assert reached(suite, sample)[row] is expected
        row = f"hit ratio {stream}, engine with adaptive admission"
        sample = ratio(TRACE, "cyclone_kv", stream, value, policy="adaptive")
        assert reached(engine_suite, sample)[row] is expected


def test_admission_is_judged_where_it_is_worst():
    row = "adaptive admission (model) against LRU on traces, at worst"
    samples = [
        ratio(POLICY, store, stream, value, 100)
        for store, stream, value in (
            *(("cyclone_kv", "zipf", 0.1), ("LRU", "zipf", 0.9)),  # no trace
            *(("cyclone_kv", "a", 0.5), ("LRU", "a", 0.509)),
            *(("cyclone_kv", "b", 0.5), ("LRU", "b", 0.4)),
        )
    ]
    assert reached(suite, *samples)[row] is True
    samples += [ratio(POLICY, s, "a", v, 7) for s, v in (("cyclone_kv", 0), ("LRU", 1))]
    assert reached(suite, *samples)[row] is False


def test_prefix_eviction_is_judged_on_two_traces_and_nowhere_far_below():
    row = "eviction by prefix (model) against LRU: mean, and at worst"

    def of(*differences):
        samples = []
        for stream, difference in differences:
            samples.append(ratio(POLICY, "prefix", stream, 0.5 + difference))
            samples.append(ratio(POLICY, "LRU", stream, 0.5))
        return reached(suite, *samples)[row]

    assert of(("zipf", 0.03), ("a", 0.03), ("b", 0.01)) is True
    assert of(("zipf", 0.03), ("a", 0.03)) is None
    assert of(("zipf", 0.03), ("a", 0.03), ("b", -0.02)) is False
    assert of(("zipf", 0.01), ("a", 0.01), ("b", 0.01)) is False


def test_engine_and_model_must_agree():
    row = "engine and its model agree, adaptive"

    def of(difference):
        samples = [
            ratio(TRACE, store, "a", value, 9, policy="adaptive")
            for store, value in (
                ("cyclone_kv", 0.5 + difference),
                (engine_suite.MODEL, 0.5),
            )
        ]
        return reached(engine_suite, *samples)[row]

    assert of(-0.0029) is True
    assert of(0.0031) is False


def test_the_engine_may_be_anywhere_among_the_choices_of_the_model():
    def of(value):
        samples = [
            dataclasses.replace(
                ratio(TRACE, engine_suite.MODEL, "a", model, 9, policy="adaptive"),
                round=number,
            )
            for number, model in enumerate((0.4, 0.5, 0.6))
        ]
        ours = ratio(TRACE, "cyclone_kv", "a", value, 9, policy="adaptive")
        found = reached(engine_suite, ours, *samples)
        return found["engine and its model agree, adaptive"]

    assert [of(value) for value in (0.396, 0.398, 0.55, 0.602, 0.604)] == [
        *(False, True, True, True, False),
    ]


def test_nothing_measured_is_said_of_every_row():
    for one in (suite, engine_suite):
        assert set(reached(one).values()) == {None}
