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
from bench.records import Run, Sample  # noqa: E402
from cyclone_kv.cuda.driver import TEST_VARIABLE  # noqa: E402


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
    assert "partial at 64 KiB" in output  # a volume of one chunk has no half
    assert [verdict.reached for verdict in found.verdicts] == [None, None]
    assert (disk_folder / "results.svg").exists()
    assert fake.violation == ""
    assert fake.registered_bytes == fake.pinned_bytes == 0
    kinds = {copy.kind for copy in fake.copies()}
    assert kinds == {"registered", "pinned", "pageable"}


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
