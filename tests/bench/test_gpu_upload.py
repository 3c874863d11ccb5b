# SPDX-License-Identifier: Apache-2.0
"""The suite of uploads: on the fake driver from end to end, and without any."""

from __future__ import annotations

import dataclasses

import pytest

for needed in ("cffi", "click", "lmdb", "numpy", "rich"):
    pytest.importorskip(needed)

from click.testing import CliRunner  # noqa: E402
from gpu.fake import Fake, build  # noqa: E402

from bench import gpu_upload, machine, records  # noqa: E402
from bench.__main__ import main  # noqa: E402
from bench.gpu_upload import rings  # noqa: E402
from bench.gpu_upload.device import Gpu, node_pages  # noqa: E402
from bench.records import Run, Sample  # noqa: E402
from cyclone_kv.cuda.driver import TEST_VARIABLE  # noqa: E402
from cyclone_kv.cuda.ring import Shape  # noqa: E402


@pytest.fixture(scope="module")
def library():
    """Built before a test hides the compiler from itself."""
    return build()


@pytest.fixture
def gentle(monkeypatch, tmp_path):
    """Leave the page cache of the machine alone, and take no second for fio."""
    monkeypatch.setattr(machine, "_DROP_CACHES", tmp_path / "no-such-file")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine, "_PREADV_BYTES_MIN", 1)


def run(folder):
    output = folder / "results.jsonl"
    result = CliRunner().invoke(
        main,
        [
            *("--tiny", "--suite", "gpu_upload", "--folder", str(folder)),
            *("--output", str(output)),
        ],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    return result.output, records.load(output)


@pytest.mark.usefixtures("gentle")
def test_every_way_runs_on_the_fake_and_no_number_counts(
    library, monkeypatch, disk_folder
):
    fake = Fake(library)
    fake.reset()
    tiny = dataclasses.replace(gpu_upload._TINY, blocks=(64 << 10, 128 << 10))
    monkeypatch.setattr(gpu_upload, "_TINY", tiny)
    monkeypatch.setenv(TEST_VARIABLE, str(fake.path))
    output, found = run(disk_folder)
    ways = set(found.names("store", bench="gpu_upload", phase="upload"))
    assert ways == {
        *("pinned", "registered", "staged", "pageable", "per_span", "lmdb", "files"),
    }
    assert set(found.names("store", phase="cold")) >= {"staged", "files"}
    assert found.select(phase="register")
    assert found.select(phase="latency_p99", store="registered")
    assert "the driver is a fake" in output
    check_shapes_of_the_ring(output, found)
    assert "partial at 64 KiB" in output  # a volume of one chunk has no half
    assert [verdict.reached for verdict in found.verdicts] == [None, None]
    picture = (disk_folder / "results.svg").read_text()
    assert "<svg" in picture
    numa = [each for each in found.others if each.get("kind") == "numa"]
    assert len(numa) == 2
    assert fake.violation == ""
    assert fake.registered_bytes == fake.pinned_bytes == 0
    kinds = {copy.kind for copy in fake.copies()}
    assert kinds == {"registered", "pinned", "pageable"}


def check_shapes_of_the_ring(output, found):
    """Each was run, warm and cold, and bytes compared; none is called the best."""
    wanted = {(2, 64 << 10), (2, 128 << 10), (3, 64 << 10), (3, 128 << 10)}
    wanted.add((Shape().slots, Shape().slot_bytes))
    for phase in ("ring_warm", "ring_cold"):
        samples = found.select(phase=phase)
        assert {(s.params["slots"], s.params["slot_bytes"]) for s in samples} == wanted
        assert all(s.value > 0 for s in samples)
    assert "pinned ring by shape" in output
    assert "4 x 32 MiB (the default)" in output
    assert "no measurements" in output
    assert "best is" not in output


def test_the_best_shape_is_named_with_the_share_of_the_default():
    def at(slots, slot_bytes, value):
        one = sample("ring_cold", "staged", value)
        params = {**one.params, "slots": slots, "slot_bytes": slot_bytes}
        return dataclasses.replace(one, params=params)

    run = Run({}, [at(4, 32 << 20, 6.0), at(8, 16 << 20, 8.0), at(2, 4 << 20, 1.0)])
    assert rings.best(run, 1 << 21, "ring_cold") == (Shape(8, 16 << 20), 0.75)
    assert rings.best(run, 1 << 21, "ring_warm") is None
    assert rings.best(run, 1 << 16, "ring_cold") is None
    assert rings.block_sizes(run) == [1 << 21]
    assert rings.block_sizes(Run({}, [])) == []


def test_damaged_bytes_on_the_device_end_the_bench(library, monkeypatch, disk_folder):
    fake = Fake(library)
    fake.reset()
    monkeypatch.setenv(TEST_VARIABLE, str(fake.path))
    original = Gpu.read

    def damaged(self, pointer, nbytes):
        return b"?" + original(self, pointer, nbytes)[1:]

    monkeypatch.setattr(Gpu, "read", damaged)
    with pytest.raises(RuntimeError, match="other bytes"):
        run(disk_folder)


def test_pages_are_counted_by_node(tmp_path):
    """As a machine of two nodes has them; one without says nothing."""
    volume = tmp_path / "kv.cyc"
    maps = tmp_path / "numa_maps"
    maps.write_text(
        f"7f0000000000 default file={volume} mapped=300 N0=100 N1=200\n"
        f"7f1000000000 default file={volume} mapped=50 N1=50 kernelpagesize_kB=4\n"
        f"7f2000000000 default file={volume}-shm mapped=9 N0=9\n"
        "7f3000000000 default anon=7 N0=7\n"
    )
    assert node_pages(volume, maps) == {"0": 100, "1": 250}
    assert node_pages(volume, tmp_path / "none") == {}


def test_without_a_device_it_says_so_in_a_line(monkeypatch, disk_folder):
    monkeypatch.setenv(TEST_VARIABLE, "/nowhere/libcuda.so.1")
    output, found = run(disk_folder)
    assert "gpu_upload was not run: there is no CUDA driver" in output
    assert found.samples == []
    assert [verdict.reached for verdict in found.verdicts] == [None, None]


def sample(phase: str, store: str, value: float) -> Sample:
    return Sample(
        bench="gpu_upload",
        phase=phase,
        store=store,
        value=value,
        unit="GB/s",
        better="higher",
        block_bytes=1 << 21,
        params={"batch": 16},
    )


def test_verdicts_follow_the_numbers():
    samples = [
        sample("upload", "pinned", 50.0),
        sample("upload", "registered", 49.6),
        sample("cold", "device", 3.0),
        sample("cold", "staged", 2.9),
    ]
    found = list(gpu_upload.SUITE.verdicts(Run({}, samples)))
    assert [verdict.reached for verdict in found] == [True, True]
    slow = [dataclasses.replace(s, value=s.value * 0.9) for s in samples[1::2]]
    found = list(gpu_upload.SUITE.verdicts(Run({}, [*samples[::2], *slow])))
    assert [verdict.reached for verdict in found] == [False, False]
    fake = [{"kind": "gpu", "bench": "gpu_upload", "fake": True}]
    found = list(gpu_upload.SUITE.verdicts(Run({}, samples, others=fake)))
    assert [verdict.reached for verdict in found] == [None, None]
