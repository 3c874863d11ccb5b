# SPDX-License-Identifier: Apache-2.0
"""The command, from end to end, on blocks too few to measure anything."""

from __future__ import annotations

import json

import pytest

for needed in ("click", "lmdb", "numpy", "rich"):
    pytest.importorskip(needed)

from click.testing import CliRunner  # noqa: E402

from bench import machine, vectors  # noqa: E402
from bench.__main__ import main  # noqa: E402
from bench.machine import CacheDropper  # noqa: E402
from bench.phases import PHASES, Dataset, Phase, Sample, run_round  # noqa: E402
from bench.stores import CycloneStore, FileStore, LmdbStore  # noqa: E402
from bench.table import Results, human_size  # noqa: E402

STORES = (CycloneStore, LmdbStore, FileStore)


@pytest.fixture
def private_drop(monkeypatch, tmp_path):
    """Tests leave the page cache of the machine alone."""
    monkeypatch.setattr(machine, "_DROP_CACHES", tmp_path / "no-such-file")


@pytest.fixture
def no_fio(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)


def run(*arguments):
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


@pytest.mark.usefixtures("private_drop", "no_fio")
def test_first_table_prints_every_phase_and_records_every_sample(disk_folder):
    output = disk_folder / "results.jsonl"
    result = run(
        *("first-table", "--block", "64KiB", "--block", "1MiB", "--dataset", "4MiB"),
        *("--rounds", "2", "--folder", str(disk_folder), "--output", str(output)),
    )
    assert result.exit_code == 0, result.output
    for phase in PHASES:
        assert result.output.count(f"│ {phase.label} ") == 2
    records = [json.loads(line) for line in output.read_text().splitlines()]
    run_record = records[0]
    assert run_record["kind"] == "run"
    assert {"kernel", "file_system", "commit", "versions", "load_average"} <= set(
        run_record
    )
    seen = {
        (record["block"], record["round"], record["phase"], record["store"])
        for record in records
        if record["kind"] == "sample" and record["store"] != "limit"
    }
    assert seen == {
        (block, number, phase.name, kind.name)
        for block in (65536, 1048576)
        for number in (0, 1)
        for phase in PHASES
        for kind in STORES
    }
    assert [path.name for path in disk_folder.iterdir()] == ["results.jsonl"]


def test_nothing_is_measured_when_a_vector_differs(monkeypatch, tmp_path):
    wrong = vectors.Vector("key 0", "aa", "bb")
    monkeypatch.setattr(vectors, "check", lambda: [wrong])
    result = run("first-table", "--folder", str(tmp_path))
    assert result.exit_code == 2
    assert "nothing is measured" in result.output
    assert list(tmp_path.iterdir()) == []


def test_vectors_are_printed():
    result = run("vectors")
    assert result.exit_code == 0
    assert "key 2: c5603a48" in result.output


@pytest.mark.usefixtures("private_drop")
def test_a_store_that_returns_other_bytes_fails_the_round(monkeypatch, disk_folder):
    data = Dataset(4096, 64 * 4096)

    class Liar(FileStore):
        def get_into(self, key, target):
            length = super().get_into(key, target)
            target[17] ^= 1
            return length

    stores = [Liar(disk_folder, data.count, data.nbytes)]
    with pytest.raises(RuntimeError, match="other bytes"):
        run_round(0, stores, data, disk_folder, CacheDropper())
    assert list(disk_folder.iterdir()) == []


@pytest.mark.parametrize("kind", STORES, ids=lambda kind: kind.name)
def test_a_store_keeps_blocks_over_a_reopening(kind, disk_folder):
    store = kind(disk_folder, 2, 8192)
    store.open()
    store.put(b"k" * 32, memoryview(b"x" * 8192))
    store.sync()
    store.close()
    store.open()
    target = bytearray(8192)
    assert store.get_into(b"k" * 32, memoryview(target)) == 8192
    assert target == b"x" * 8192
    assert store.view(b"k" * 32) == 8192
    assert store.get_into(b"m" * 32, memoryview(target)) is None
    assert store.view(b"m" * 32) is None
    many = [bytearray(8192), bytearray(8192)]
    views = [memoryview(target) for target in many]
    assert store.get_many_into([b"k" * 32] * 2, views)
    assert many == [b"x" * 8192] * 2
    assert not store.get_many_into([b"k" * 32, b"m" * 32], views)
    store.close()
    store.destroy()


def test_ratios_pair_the_rounds_and_turn_latencies_round():
    results = Results(65536, 1)
    for ours, other in ((2.0, 1.0), (3.0, 1.0), (8.0, 2.0)):
        results.add([Sample("speed", "a", ours), Sample("speed", "b", other)])
        results.add([Sample("delay", "a", ours), Sample("delay", "b", other)])
    assert results.spread("speed", "a") == (3.0, 2.0, 8.0)
    assert results.ratio(Phase("speed", "", "GB/s", None), "a", "b") == (3.0, 2.0, 4.0)
    assert results.ratio(Phase("delay", "", "us", None), "a", "b") == (1 / 3, 0.25, 0.5)


def test_sizes_are_for_people():
    assert [human_size(n) for n in (65536, 2 << 20, 1 << 30, 1000)] == [
        *("64 KiB", "2 MiB", "1 GiB", "1000 B"),
    ]
