# SPDX-License-Identifier: Apache-2.0
"""What kv_bench says about the numbers to reach, from samples made by hand."""

from __future__ import annotations

import pytest

for needed in ("lmdb", "numpy", "rich"):
    pytest.importorskip(needed)

from bench.kv_verdicts import verdicts  # noqa: E402
from bench.markdown import markdown_table  # noqa: E402
from bench.records import Run, Sample  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20


def samples(phase, nbytes, unit="GB/s", better="higher", params=None, **stores):
    """A sample of each store for each value, round by round."""
    return [
        Sample(
            bench="kv_bench",
            phase=phase,
            store=store,
            value=value,
            unit=unit,
            better=better,
            block_bytes=nbytes,
            round=number,
            params=params or {},
        )
        for store, values in stores.items()
        for number, value in enumerate(values)
    ]


def verdict(found, row):
    (one,) = [v for v in verdicts(Run({"form": "full"}, found)) if v.row == row]
    return one


COLD = "cold verified read, stored order, 64 KiB"


@pytest.mark.parametrize(
    ("ours", "reached", "value"),
    [
        ([1.5, 1.5, 1.5], True, 1.0),  # LMDB is the lower target
        ([1.49, 1.49, 9.0], False, 1.49 / 1.5),  # the median counts
    ],
)
def test_cold_reads_against_lmdb(ours, reached, value):
    found = samples(
        "cold_ordered", 64 * KIB, cyclone_kv=ours, lmdb=[1.0] * 3, device=[9.0] * 3
    )
    one = verdict(found, COLD)
    assert one.reached is reached
    assert one.value == pytest.approx(value)


def test_cold_reads_against_a_slow_device():
    found = samples(
        "cold_ordered", 64 * KIB, cyclone_kv=[0.95], lmdb=[1.0], device=[1.0]
    )
    one = verdict(found, COLD)
    assert one.reached is True
    assert one.value == pytest.approx(0.95 / 0.9)
    assert "device 1.00" in one.text


def test_the_target_is_that_of_each_round():
    found = samples(
        "cold_ordered",
        64 * KIB,
        cyclone_kv=[1.5, 3.0, 0.9],
        lmdb=[1.0, 1.9, 9.0],
        device=[9.0, 9.0, 1.0],
    )
    assert verdict(found, COLD).value == pytest.approx(1.0)


def test_a_batch_needs_the_device():
    row = "cold batch of 64 x 2 MiB, one call"
    both = {"cyclone_kv": [0.94] * 3, "device": [1.0] * 3}
    assert verdict(samples("cold_batch", 2 * MIB, **both), row).reached is False
    alone = samples("cold_batch", 2 * MIB, cyclone_kv=[9.0] * 3)
    one = verdict(alone, row)
    assert one.reached is None
    assert one.command


@pytest.mark.parametrize(
    ("lmdb", "memcpy", "reached"),
    [(10.0, 11.0, True), (10.1, 11.0, False), (10.0, 11.2, False)],
)
def test_a_warm_copy_has_two_targets(lmdb, memcpy, reached):
    one_thread = {"params": {"threads": 1}}
    found = [
        *samples(
            "warm_copy",
            MIB // 2,
            **one_thread,
            cyclone_kv=[10.0],
            lmdb=[lmdb],
            memcpy=[memcpy],
        ),
        *samples(
            "warm_copy",
            MIB // 2,
            params={"threads": 4},
            cyclone_kv=[0.1],
            lmdb=[1.0],
            memcpy=[1.0],
        ),
    ]
    assert verdict(found, "warm copy, one thread, 512 KiB").reached is reached


@pytest.mark.parametrize(
    ("row", "phase", "ours", "reached"),
    [
        ("put with syncfs, 8 MiB", "put_synced", 1.1, True),
        ("put with syncfs, 8 MiB", "put_synced", 1.09, False),
        ("put without syncfs, 8 MiB", "put", 1.0, True),
        ("put without syncfs, 8 MiB", "put", 0.99, False),
    ],
)
def test_puts_against_a_file_per_block(row, phase, ours, reached):
    found = samples(phase, 8 * MIB, cyclone_kv=[ours] * 3, files=[1.0] * 3)
    assert verdict(found, row).reached is reached


def entries(count, milliseconds, way):
    params = {"entries": count, "way": way}
    about = {"unit": "ms", "better": "lower", "params": params}
    return samples("open", None, cyclone_kv=milliseconds, **about)


def test_opens_clean_and_killed_apart():
    found = [
        *entries(500_000, [49.0, 50.0, 99.0], "clean"),
        *entries(500_000, [51.0] * 3, "killed"),
    ]
    row = "open of 500 000 entries, nobody alive, "
    assert verdict(found, row + "clean").reached is True
    assert verdict(found, row + "killed").reached is False


def test_an_open_of_fewer_entries_is_no_measurement():
    found = entries(300, [1.0], "clean")
    row = "open of 500 000 entries, nobody alive, clean"
    assert verdict(found, row).reached is None


@pytest.mark.parametrize(("value", "reached"), [(160.0, True), (160.5, False)])
def test_memory_of_an_entry(value, reached):
    about = {"unit": "bytes", "better": "lower", "params": {"granule": 65536}}
    found = samples("memory_per_entry", None, cyclone_kv=[value], **about)
    row = "memory per live entry at 64 KiB"
    assert verdict(found, row).reached is reached


def test_without_samples_nothing_is_reached_and_the_command_is_named():
    found = list(verdicts(Run({})))
    assert len(found) == 22
    assert {one.reached for one in found} == {None}
    assert all("--full" in one.command for one in found)


def test_only_a_full_run_needs_no_other_command():
    found = samples("put", 8 * MIB, cyclone_kv=[1.0], files=[1.0])
    row = "put without syncfs, 8 MiB"
    for form, wanted in (("full", False), ("short", True)):
        (one,) = [v for v in verdicts(Run({"form": form}, found)) if v.row == row]
        assert bool(one.command) is wanted


def test_the_markdown_of_a_run():
    machine = {
        "cpus": 2,
        "cpu": "EPYC",
        "memory_bytes": 24 << 30,
        "kernel": "6.18",
        "file_system": "ext4",
        "queue": {"read_ahead_kb": "128"},
        "versions": {"lmdb": "0.9"},
        "load_begin": [0.1, 0.2, 0.3],
        "commit": "abc",
        "dirty": False,
        "foreign_load": True,
    }
    stores = {"cyclone_kv": [1.0, 2.0, 3.0], "lmdb": [4.0] * 3, "files": [1.0] * 3}
    run = Run(
        machine,
        [
            *samples("put", 64 * KIB, **stores),
            *samples("view_p50", 64 * KIB, "us", "lower", **stores),
        ],
    )
    short = markdown_table(run, short=True).splitlines()
    assert short[0] == "| GB/s | 64 KiB | / LMDB | / files |"
    assert short[2] == "| put | 2.00 | **0.50** | 2.00 |"
    assert short[3] == "| warm view, p50 | 2.00 µs | 2.00 | **0.50** |"
    assert "with foreign load" in short[-1]
    assert "3 rounds" in short[-1]
    full = markdown_table(run, short=False).splitlines()
    assert "2.00 (1.00-3.00)" in full[2]
    assert "0.50 (0.25-0.75)" in full[2]
