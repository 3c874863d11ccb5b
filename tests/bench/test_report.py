# SPDX-License-Identifier: Apache-2.0
"""The report, from records that nobody measured."""

from __future__ import annotations

import json
import re

import pytest

for needed in ("click", "lmdb", "matplotlib", "numpy", "rich"):
    pytest.importorskip(needed)

from click.testing import CliRunner  # noqa: E402

from bench import report, report_text  # noqa: E402
from bench.__main__ import main  # noqa: E402
from bench.records import Run, Sample, Verdict, Writer  # noqa: E402
from bench.report_pictures import BYTES_MAX  # noqa: E402
from bench.report_sections import README_PICTURE, SECTIONS  # noqa: E402

MIB = 1 << 20


def sample(bench, phase, store, value, number=0, **changes):
    fields = {"unit": "GB/s", "better": "higher", "block_bytes": 2 * MIB}
    fields |= changes
    return Sample(
        bench=bench, phase=phase, store=store, value=value, round=number, **fields
    )


def verdict(row, *, reached, value=1.5):
    return Verdict(
        bench="kv_bench",
        row=row,
        reached=reached,
        value=None if reached is None else value,
        target=2.0,
        text=f"words about {row}",
        command="python -m bench something",
    )


def kv_samples():
    for number in range(3):
        for store, value in (("cyclone_kv", 3), ("lmdb", 2), ("files", 4.5)):
            more = value + number / 8
            for block in (65536, 2 * MIB):
                yield sample(
                    *("kv_bench", "cold_ordered", store, more, number),
                    block_bytes=block,
                )
            yield sample(
                "kv_bench", "put", store, more * (store != "files") + 0.1, number
            )
        yield sample("kv_bench", "cold_ordered", "device", 3.3, number)


def churn_records():
    for store, slow in (("cyclone_kv", 1), ("lmdb", 4)):
        for number in range(3):
            yield {
                "tier": store,
                "scan": False,
                "threads": 4,
                "block_bytes": 2 * MIB,
                "round": number,
                "hit_us": {"0.5": 300.0 * slow, "0.99": 4000.0 * slow},
                "served_by_second": [2.0, 2.1 / slow, 2.2, 0.3],
            }


def write_everything(path, *, time="2026-01-02T00:00:00+00:00"):
    machine = {"time": time, "cpu": "TestChip", "cpus": 3, "kernel": "9.9", "form": "x"}
    with Writer(path, machine) as writer:
        for item in kv_samples():
            writer.sample(item)
        params = {"pattern": "zipf", "threads": 4, "capacity_bytes": 64 * MIB}
        for store, value in (("cyclone_kv", 2.0), ("lmdb", 1.0)):
            writer.sample(sample("kv_churn", "served", store, value, params=params))
        for record in churn_records():
            writer.other("churn_run", record)
        for policy, value in (("lru", 0.5), ("cyclone_kv", 0.6)):
            for capacity in (64, 128, 256):
                writer.sample(
                    sample(
                        *("policy", "hit_ratio", policy, value + capacity / 1000),
                        unit="ratio",
                        block_bytes=None,
                        params={"stream": "zipf", "capacity": capacity},
                    )
                )
        for entries in (1000, 10_000, 100_000):
            for phase, value in (("view", 0.4), ("open_first", entries * 0.1)):
                writer.sample(
                    sample(
                        *("scaling", f"entries.{phase}", "cyclone_kv", value),
                        unit="us",
                        better="lower",
                        params={"entries": entries},
                    )
                )
        for threads in (1, 2, 4):
            writer.sample(
                sample(
                    *("scaling", "threads.copy", "cyclone_kv", 7.0),
                    params={"threads": threads},
                )
            )
        call = {"unit": "us", "better": "lower", "params": {"entries": 5000}}
        writer.sample(sample("calls", "view", "cyclone_kv", 0.41, **call))
        writer.sample(sample("calls", "view.p99", "cyclone_kv", 0.97, **call))
        writer.other("system_calls", {"call": "view", "text": "pread64 3"})
        writer.sample(sample("a_bench_of_tomorrow", "speed", "cyclone_kv", 12.25))
        writer.verdict(verdict("a row that was reached", reached=True))
        writer.verdict(verdict("a row that was missed", reached=False))
        writer.verdict(verdict("a row of the other command", reached=None))
    return path


def make(folder, *results):
    folder.mkdir(exist_ok=True)
    written = report.write(
        report.gather(results), folder / "page.md", folder / "pictures"
    )
    return (folder / "page.md").read_text(), written


def test_where_we_lose_is_said_first(tmp_path):
    text, _ = make(tmp_path, write_everything(tmp_path / "run.jsonl"))
    order = [
        "## Where we lose",
        "a row that was missed",
        "files: cold copy, stored order, 2 MiB",
        "\n## Targets\n",
        "a row that was reached",
        "a row of the other command",
        "## How it is measured",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    losing = text[: text.index("\n## Targets\n")]
    assert "Targets not reached: 1" in losing
    # Behind the files at two sizes and never behind LMDB, the device or a faster put.
    assert "Behind a rival in the same run: 2" in losing
    assert "LMDB" not in losing
    assert "device" not in losing
    assert "0.667" in losing  # 3 / 4.5, in each round about that


def test_a_longer_latency_is_a_loss_and_a_limit_is_no_rival():
    run = Run({})
    for store, value in (("cyclone_kv", 2.0), ("lmdb", 1.0), ("device", 0.1)):
        run.samples.append(
            sample("kv_bench", "view_p50", store, value, unit="us", better="lower")
        )
        run.samples.append(sample("kv_bench", "put", store, value))
    behind = report_text.losses(run, "kv_bench")
    assert [(row.phase, store, ratio.median) for row, store, ratio in behind] == [
        ("view_p50", "lmdb", 0.5)
    ]


def test_every_picture_is_small_linked_and_light(tmp_path):
    text, written = make(tmp_path, write_everything(tmp_path / "run.jsonl"))
    pictures = {path.name for path in written if path.suffix == ".svg"}
    assert set(re.findall(r"\]\(pictures/([\w-]+\.svg)\)", text)) == pictures
    assert f"{README_PICTURE}.svg" in pictures
    assert {"churn-latency.svg", "churn-time.svg", "policy-capacity.svg"} <= pictures
    for path in written:
        if path.suffix == ".svg":
            content = path.read_text()
            assert len(content) < BYTES_MAX
            assert "fill: #ffffff" in content  # readable on a dark page


def test_the_same_records_give_the_same_bytes(tmp_path):
    run = write_everything(tmp_path / "run.jsonl")
    _, first = make(tmp_path / "one", run)
    _, second = make(tmp_path / "two", run)
    assert [path.name for path in first] == [path.name for path in second]
    for left, right in zip(first, second, strict=True):
        assert left.read_bytes() == right.read_bytes()


def test_numbers_come_from_the_records(tmp_path):
    text, _ = make(tmp_path, write_everything(tmp_path / "run.jsonl"))
    for shown in ("12.2", "3 x TestChip", "pread64 3", "0.97", "O(1)", "O(n)"):
        assert shown in text, shown
    template = report._TEMPLATE.read_text()
    # Decimals and units are results, which the words about the method do not have.
    assert not re.search(r"\d\s?(GB/s|us|µs|ms|%|x )", template)


def test_a_section_without_records_names_its_command(tmp_path):
    path = tmp_path / "run.jsonl"
    with Writer(path, {"time": "1"}) as writer:
        writer.sample(sample("writers", "put", "cyclone_kv", 5.5))
    text, written = make(tmp_path, path)
    for section in SECTIONS:
        missing = f"Not in the records of this page: `{section.command}`" in text
        assert missing == (section.bench != "writers")
    assert "5.5" in text
    assert [path.name for path in written] == ["page.md"]


def test_a_run_that_was_broken_off_is_marked(tmp_path):
    path = tmp_path / "run.jsonl"
    with Writer(path, {"load_begin": [0.5, 0, 0]}) as writer:
        writer.sample(sample("writers", "put", "cyclone_kv", 5.5))
        assert "broken off" in make(tmp_path, path)[0]
        writer.finish(load_end=[0.6, 0, 0])
    assert "broken off" not in make(tmp_path, path)[0]


def test_the_command_of_a_run_is_shown_without_its_files():
    command = ["--suite", "trace", "--trace", "/a/b.jsonl", "--output", "/tmp/x"]
    shown = report_text.machine({"command": command})
    assert shown == "`python -m bench --suite trace --trace b.jsonl`"
    assert report_text.machine({"command": ["--folder=/x", "kv"]}) == (
        "`python -m bench kv`"
    )


def test_nothing_at_all_still_gives_a_page(tmp_path):
    text, _ = make(tmp_path)
    assert text.count("Not in the records") == len(SECTIONS)


def test_of_two_runs_the_newest_counts_and_old_pictures_go(tmp_path):
    old, new = tmp_path / "b.jsonl", tmp_path / "a.jsonl"
    write_everything(old, time="2026-01-01T00:00:00")
    with Writer(new, {"time": "2026-01-03T00:00:00", "cpus": 1, "cpu": "Newer"}) as run:
        run.sample(sample("kv_bench", "cold_ordered", "cyclone_kv", 77.5))
        run.verdict(verdict("a row that was missed", reached=None))
    text, _ = make(tmp_path, old)
    (tmp_path / "pictures" / "left-over.svg").write_text("<svg/>")
    text, _ = make(tmp_path, new, old)
    assert "77.5" in text
    assert "kv_bench: 1 x Newer" in text
    assert "Targets not reached: 1" in text  # not measured takes nothing back
    assert not (tmp_path / "pictures" / "left-over.svg").exists()


def test_two_samples_for_one_place_are_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    with Writer(path, {}) as writer:
        writer.sample(sample("kv_bench", "put", "cyclone_kv", 1.0))
        writer.sample(sample("kv_bench", "put", "cyclone_kv", 2.0))
    with pytest.raises(ValueError, match="two samples"):
        make(tmp_path, path)


def test_the_command_writes_the_page_and_says_what_is_broken(tmp_path):
    run = write_everything(tmp_path / "run.jsonl")
    options = ["--page", str(tmp_path / "p.md"), "--pictures", str(tmp_path / "p")]
    done = CliRunner().invoke(main, ["report", str(run), *options])
    assert done.exit_code == 0, done.output
    assert "p.md" in done.output
    assert (tmp_path / "p.md").read_text().startswith("# Benchmarks")
    run.write_text(json.dumps({"kind": "sample"}) + "\n")
    done = CliRunner().invoke(main, ["report", str(run), *options])
    assert done.exit_code == 1
    assert "run.jsonl:1" in done.output


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0.0, "0"), (0.4123, "0.412"), (3.0, "3"), (26.27, "26.3"), (999.4, "999")),
        *(
            (1234.0, "1234"),
            (24000, "24 000"),
            (2_433_001, "2.43 M"),
            (0.00001, "0.00001"),
        ),
    ],
)
def test_numbers_have_three_digits(value, shown):
    assert report_text.number(value) == shown
