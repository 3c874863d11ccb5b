# SPDX-License-Identifier: Apache-2.0
"""kv_churn: streams, payloads, LRU, clocks, verdicts, and a run of seconds."""

from __future__ import annotations

import dataclasses
import io
import itertools
import threading

import pytest

click = pytest.importorskip("click")
for needed in ("lmdb", "numpy", "rich"):
    pytest.importorskip(needed)

from rich.console import Console  # noqa: E402

from bench import churn, churn_blocks, churn_verdicts, generators  # noqa: E402
from bench.churn_blocks import BlockMaker, equal  # noqa: E402
from bench.churn_loop import Phase, Worker, percentile, run_phase  # noqa: E402
from bench.churn_tiers import TIERS, Block, DirectTier, Lru, available  # noqa: E402
from bench.churn_worker import Job  # noqa: E402
from bench.records import Run, Sample, Writer  # noqa: E402

# ---- the definition ---------------------------------------------------------------

HEADS = {  # published for churn v1, 2 MiB under 16 GiB; and computed, 4 and 2 GiB
    (24576, 0, False): "7700 13615 15692 4926 10997 23573 23573 22519 10549 16656",
    (24576, 1, False): "12554 13478 22844 7190 16279 8277 5305 23573 14761 12242",
    (
        24576,
        1,
        True,
    ): "12554 13478 22844 7190 16279 8277 5305 23573 14761 1103806595072",
    (98304, 0, False): "84739 50997 59484 56966 80018 89418 89418 12401 67495 65617",
    (6144, 0, False): "4012 5042 794 57 1260 2725 2725 2176 4990 3615",
    (3072, 1, False): "3027 2681 9 2320 2927 463 789 1670 938 235",
}


@pytest.mark.parametrize(("universe", "thread", "scan"), HEADS)
def test_streams_begin_as_published(universe, thread, scan):
    stream = generators.churn_stream(universe, thread, scan=scan)
    found = list(itertools.islice(stream, 10))
    assert " ".join(map(str, found)) == HEADS[universe, thread, scan]


def test_the_universe_is_three_times_the_tier():
    job = Job(
        tier="lmdb",
        folder="",
        capacity_bytes=16 << 30,
        block_bytes=2 << 20,
        scan=False,
        threads=4,
        seconds=1.0,
    )
    assert job.universe == 24576


def test_percentile_is_the_element_at_floor_of_q_times_n_minus_1():
    assert percentile(range(100), 0.5) == 49
    assert percentile(range(101), 0.5) == 50
    assert percentile(range(100), 0.99) == 98
    assert percentile(range(1000), 0.999) == 998
    assert percentile([7], 0.99) == 7
    assert percentile([], 0.5) is None


# ---- payloads ---------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [64, 4096, 4160, 262144])
@pytest.mark.parametrize("index", [0, 1, 7, 2**40 + 3])
def test_payloads_made_in_c_are_those_of_the_definition(nbytes, index):
    maker, target = BlockMaker(nbytes), memoryview(bytearray(nbytes))
    maker.fill(index, target)
    assert target == generators.value(index, nbytes)


def test_without_a_compiler_numpy_makes_them(monkeypatch):
    monkeypatch.setattr(churn_blocks, "_library", lambda: None)
    maker, target = BlockMaker(4096), memoryview(bytearray(4096))
    maker.fill(5, target)
    assert target == generators.value(5, 4096)
    assert churn_blocks.made_by() == "numpy"


def test_equal_sees_one_bit():
    left, right = memoryview(bytearray(4096)), memoryview(bytearray(4096))
    assert equal(left, right)
    right[4095] = 1
    assert not equal(left, right)
    assert not equal(left, right[:8])


def test_a_block_is_its_header_and_a_payload_on_a_page():
    block = Block(8192, 64)
    block.header[:] = b"h" * 64
    block.payload[:] = b"p" * 8192
    assert block.whole == b"h" * 64 + b"p" * 8192
    assert churn_blocks.address_of(block.payload) % 4096 == 0
    assert len(Block(8192, 0).header) == 0


# ---- LRU --------------------------------------------------------------------------


def test_lru_gives_up_what_was_unused_longest():
    lru = Lru(2)
    assert lru.add(b"a") == []
    assert lru.add(b"b") == []
    assert lru.used(b"a")
    assert lru.add(b"c") == [b"b"]
    assert not lru.used(b"b")
    assert list(lru) == [b"a", b"c"]


def test_lru_takes_a_key_that_it_has_as_a_use():
    lru = Lru(2)
    for key in (b"a", b"b", b"a"):
        assert lru.add(key) == []
    assert lru.add(b"c") == [b"b"]
    assert len(lru) == 2


def test_lru_needs_room():
    with pytest.raises(ValueError, match="room"):
        Lru(0)


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_evicts_and_keeps_the_rest_over_a_reopening(name, disk_folder):
    reason = available(name)
    if reason is not None:
        pytest.skip(reason)
    nbytes = 262144
    tier = TIERS[name](disk_folder, 64 << 20, nbytes, 64)
    maker, block = BlockMaker(nbytes), Block(nbytes, 64)
    target = Block(nbytes, 0).payload
    keys = [generators.key(index) for index in range(300)]
    tier.open()
    stored = 0
    for index, key in enumerate(keys):
        maker.fill(index, block.payload)
        stored += tier.insert(key, block)
    there = [i for i, key in enumerate(keys) if tier.get_into(key, target)]
    assert 200 <= len(there) <= 256
    assert tier.get_into(keys[there[-1]], target)
    assert target == generators.value(there[-1], nbytes)
    tier.close()
    tier.open()
    again = [i for i, key in enumerate(keys) if tier.get_into(key, target)]
    tier.close()
    if name != "device":  # has no memory of its own
        assert again == there
    assert stored >= len(there)


def test_the_device_does_not_give_away_a_place_in_use(tmp_path):
    tier = DirectTier(tmp_path, 4096, 4096, 0)
    assert tier._take(b"a") == 0
    assert tier._take(b"b") is None


# ---- what the clocks see -----------------------------------------------------------


class Fake:
    """A tier in memory; may refuse, or lie."""

    def __init__(self, *, refuse=False, lie=False):
        self.blocks = {}
        self.refuse, self.lie = refuse, lie
        self.lock = threading.Lock()

    def get_into(self, key, target):
        found = self.blocks.get(key)
        if found is None:
            return False
        target[:] = found
        if self.lie:
            target[9] ^= 1
        return True

    def insert(self, key, block):
        if self.refuse:
            return False
        with self.lock:
            self.blocks[key] = bytes(block.payload)
        return True


def workers(tier, *streams):
    maker = BlockMaker(4096)
    return [Worker(tier, maker, iter(stream), header_bytes=64) for stream in streams]


def test_a_miss_is_an_insert_and_a_hit_is_not():
    first, second = itertools.cycle([1, 2, 1, 1]), itertools.repeat(3)
    some = workers(Fake(), first, second)
    results = run_phase(some, Phase(seconds=60.0, inserts=3))
    assert sum(len(result.insert_ns) for result in results) == 3
    for result in results:
        assert result.gets == len(result.hit_ns) + len(result.insert_ns)
        assert len(result.hit_ends_ns) == len(result.hit_ns)


def test_refused_inserts_are_counted_apart():
    results = run_phase(workers(Fake(refuse=True), range(10**6)), Phase(seconds=0.05))
    (result,) = results
    assert result.refused == result.gets > 0
    assert not result.insert_ns
    assert not result.hit_ns


def test_one_hit_in_64_is_checked_and_a_lie_ends_the_run():
    (worker,) = workers(Fake(), itertools.repeat(4))
    (result,) = run_phase([worker], Phase(seconds=0.05))
    assert result.checked == len(result.hit_ns) // 64 > 0
    with pytest.raises(RuntimeError, match="other bytes"):
        run_phase(workers(Fake(lie=True), itertools.repeat(4)), Phase(seconds=60.0))


def test_making_and_checking_blocks_is_not_active_time(monkeypatch):
    class Slow(BlockMaker):
        def fill(self, index, target):
            threading.Event().wait(0.02)
            super().fill(index, target)

    worker = Worker(Fake(), Slow(4096), itertools.count(), header_bytes=0)
    (result,) = run_phase([worker], Phase(seconds=0.2))
    assert result.gets > 1
    assert result.active_ns < result.gets * 20_000_000


def test_drawing_ahead_changes_nothing():
    ahead = Worker(Fake(), BlockMaker(4096), itertools.count(), header_bytes=0)
    ahead.draw(5)
    ahead.draw(5)
    phase = Phase(seconds=60.0, inserts=100)
    run_phase([ahead], phase)
    assert set(ahead._tier.blocks) == {generators.key(i) for i in range(100)}


# ---- verdicts ---------------------------------------------------------------------

FULL = {
    "pattern": "zipf",
    "threads": 4,
    "capacity_bytes": 16 << 30,
    "memory_bytes": 4 << 30,
    "header_bytes": 64,
    "scale": "full",
}


def sample(phase, store, value, number=0, block_bytes=2 << 20, **changes):
    better = "higher" if phase in ("served", "hit_ratio") else "lower"
    return Sample(
        bench="kv_churn",
        phase=phase,
        store=store,
        value=value,
        unit="x",
        better=better,
        block_bytes=block_bytes,
        round=number,
        params=FULL | changes,
    )


def by_row(*samples):
    run = Run({}, samples)
    return {verdict.row: verdict for verdict in churn_verdicts.verdicts(run)}


def test_nothing_measured_is_no_verdict():
    found = by_row()
    assert len(found) == 9
    assert all(verdict.reached is None for verdict in found.values())
    assert all("--full" in verdict.command for verdict in found.values())


def test_served_is_compared_round_by_round():
    row = "churn zipf, T=4, served against LMDB"
    pairs = [(4.0, 2.0), (9.0, 3.0), (1.0, 1.0)]
    samples = [
        sample("served", store, value, number)
        for number, pair in enumerate(pairs)
        for store, value in zip(("cyclone_kv", "lmdb"), pair, strict=True)
    ]
    verdict = by_row(*samples)[row]
    assert (verdict.reached, verdict.value) == (True, 2.0)
    samples[0] = sample("served", "cyclone_kv", 3.9, 0)
    assert by_row(*samples)[row].reached is False


@pytest.mark.parametrize(
    ("ours", "device", "reached"),
    [(15.0, 1.0, True), (16.0, 1.0, False), (16.0, 6.0, True), (16.0, 5.0, False)],
)
def test_a_tail_is_held_against_lmdb_or_the_device(ours, device, reached):
    samples = [
        sample("served", "cyclone_kv", 1.0),
        sample("hit_p99", "cyclone_kv", ours),
        sample("hit_p99", "lmdb", 100.0),
        sample("hit_p99", "device", device),
    ]
    assert by_row(*samples)["churn zipf, T=4, hit p99"].reached is reached


def test_hit_ratios_count_at_full_size_only():
    row = "churn zipf, T=4, hit ratio of the engine"
    small = {"capacity_bytes": 4 << 30, "scale": "default"}
    samples = [
        sample("served", "cyclone_kv", 1.0),
        sample("hit_ratio", "cyclone_kv", 0.871),
        sample("served", "cyclone_kv", 1.0, **small),
        sample("hit_ratio", "cyclone_kv", 0.5, **small),
        sample("hit_ratio", "lmdb", 0.48, **small),
    ]
    assert by_row(*samples)[row].reached is True
    verdict = by_row(*samples[2:])[row]
    assert verdict.reached is None
    assert "+0.020" in verdict.text


def test_write_amplification_has_a_row_for_each_size():
    samples = []
    for block_bytes, header_bytes, value in (
        (2 << 20, 64, 1.009),
        (64 << 10, 64, 1.06),
        (64 << 10, 0, 1.003),
    ):
        for phase, number in (("served", 1.0), ("write_amplification", value)):
            samples.append(
                sample(
                    phase,
                    "cyclone_kv",
                    number,
                    block_bytes=block_bytes,
                    header_bytes=header_bytes,
                )
            )
    found = [v for row, v in by_row(*samples).items() if "amplification" in row]
    assert [verdict.reached for verdict in found] == [True, False, True]


def test_nothing_is_measured_with_other_payloads(monkeypatch, tmp_path):
    monkeypatch.setattr(BlockMaker, "fill", lambda self, index, target: None)
    with (
        Writer(tmp_path / "results.jsonl", {}) as writer,
        pytest.raises(click.ClickException, match="not that of the definition"),
    ):
        churn.measure(churn._TINY, tmp_path, writer, Console(file=io.StringIO()))


# ---- a run ------------------------------------------------------------------------


def test_a_run_of_seconds_measures_every_tier_and_leaves_nothing(disk_folder):
    every = dataclasses.replace(
        churn._TINY,
        seconds=0.1,
        tiers=tuple(TIERS),
        patterns=("zipf",),
        small_blocks=False,
    )
    ours = dataclasses.replace(
        every, tiers=("cyclone_kv",), patterns=("zipf+scan",), small_blocks=True
    )
    output = io.StringIO()
    results = disk_folder / "results.jsonl"
    with Writer(results, {}) as writer:
        for scale in (every, ours):
            churn.measure(scale, disk_folder, writer, Console(file=output, width=200))
        run = writer.run
    left_out = {r["store"] for r in run.others if r["kind"] == "churn_left_out"}
    text = output.getvalue()
    for tier in TIERS:
        assert (tier in left_out) == (f"{tier} is left out" in text)
        found = run.select(
            phase="served", store=tier, pattern="zipf", block_bytes=262144
        )
        assert len(found) == (tier not in left_out)
    assert len(run.select(phase="served", pattern="zipf+scan")) == 1
    assert len(run.select(phase="write_amplification", block_bytes=65536)) in (0, 2)
    assert len(run.select(phase="served", block_bytes=65536)) == 2
    runs = [record for record in run.others if record["kind"] == "churn_run"]
    for record in runs:
        assert record["warm_up_complete"]
        assert record["gets"] == (
            record["hits"] + record["inserts"] + record["refused"]
        )
        assert 0.3 < record["reopen_ratio"] <= 1.0 or record["tier"] == "device"
    if runs[0]["cgroup"] is None:
        assert "NO MEMORY LIMIT" in text
    else:
        assert all(record["peak_memory_bytes"] > 1 << 20 for record in runs)
    assert [path.name for path in disk_folder.iterdir()] == ["results.jsonl"]
