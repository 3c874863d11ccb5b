# SPDX-License-Identifier: Apache-2.0
"""A tier four times as large as memory: random reads by eight threads.

A child process in a memory cgroup stores blocks of 4 MiB until the tier is full, reads
each once, and then reads random ones for some seconds in three ways: copies by
``get_into``, views of which one byte in 4096 is read, and direct reads of the same
extents of the same file, the limit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench import cgroup, generators
from bench.churn_blocks import BlockMaker, equal
from bench.churn_loop import percentile
from bench.machine import huge_memory, settle
from bench.records import Run, Sample, Spread, Verdict
from bench.suites import Context, Suite
from cyclone_kv import Cache, CacheConfig

__all__ = ["BENCH", "SUITE", "Job", "measure"]

BENCH = "larger_than_memory"
_MIB = 1 << 20
_PAGE = 4096
_WAYS = ("device", "get_into", "view")
_STALL_SECONDS = 0.5
_SHARE = 0.7
_TIMES = 4  # the tier is as often as large as memory
_CHECK_EVERY = 64
_CHILD_SECONDS_MAX = 3600


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the child does."""

    folder: str = ""
    capacity_bytes: int
    memory_bytes: int
    seconds: float
    rounds: int
    block_bytes: int = 4 * _MIB
    threads: int = 8
    cgroup: str | None = None


_TINY = Job(
    capacity_bytes=64 * _MIB,
    memory_bytes=256 * _MIB,
    seconds=0.2,
    rounds=1,
    block_bytes=_MIB,
)
_SHORT = Job(capacity_bytes=2048 * _MIB, memory_bytes=512 * _MIB, seconds=4.0, rounds=3)
_FULL = Job(
    capacity_bytes=16384 * _MIB, memory_bytes=4096 * _MIB, seconds=30.0, rounds=5
)

_Read = Callable[[int, memoryview], None]


class _Tier:
    """The full tier, and the three ways to read block number i of it."""

    def __init__(self, job: Job) -> None:
        self._path = Path(job.folder) / "kv.cyc"
        self._config = CacheConfig.for_kv_tier(
            capacity=job.capacity_bytes, admission="always"
        )
        self._cache = Cache.open(self._path, self._config)
        self._maker = BlockMaker(job.block_bytes)
        self.block_bytes = job.block_bytes
        block = self.buffer()
        self._keys: list[bytes] = []
        for index in range(job.capacity_bytes // job.block_bytes):
            self._maker.fill(index, block)
            key = generators.key(index)
            if not self._cache.put(key, block):
                raise RuntimeError(f"a put was refused: {self._cache.stats().process}")
            self._keys.append(key)
        # As for blocks of yesterday: what is not on the medium is not read directly.
        self._cache.sync()
        # Stripes that end with less than a block free have evicted one or two.
        self.indices = [i for i, key in enumerate(self._keys) if key in self._cache]
        self._places = {}
        for index in self.indices:
            with self._place(index) as place:
                self._places[index] = place.offset
        self._direct = os.open(self._path, os.O_RDONLY | os.O_DIRECT)

    def _place(self, index: int) -> Any:
        place = self._cache.locate(self._keys[index])
        if place is None:
            raise RuntimeError(f"block {index} is gone")
        return place

    def buffer(self) -> memoryview:
        """Return memory for a block, on a page."""
        # Direct reads into small pages would be a slower limit.
        return huge_memory(self.block_bytes)

    def device(self, index: int, target: memoryview) -> None:
        """Read by direct I/O."""
        done = 0
        while done < self.block_bytes:
            place = self._places[index] + done
            done += os.preadv(self._direct, [target[done:]], place)

    def get_into(self, index: int, target: memoryview) -> None:
        """Copy."""
        if self._cache.get_into(self._keys[index], target) != self.block_bytes:
            raise RuntimeError(f"block {index} is gone")

    def view(self, index: int, target: memoryview) -> None:
        """Take a view and read a byte of each page; nothing comes into the target."""
        view = self._cache.get(self._keys[index])
        if view is None:
            raise RuntimeError(f"block {index} is gone")
        np.frombuffer(view, dtype=np.uint8)[::_PAGE].sum()

    def check(self, index: int, found: memoryview, expected: memoryview) -> None:
        """Compare a copy with what was stored."""
        self._maker.fill(index, expected)
        if not equal(found, expected):
            raise RuntimeError(f"block {index} came back with other bytes")

    def close(self) -> None:
        """Close."""
        os.close(self._direct)
        self._cache.close()


def _random_reads(
    tier: _Tier, way: str, job: Job, seed: int, rest: Sequence[int] | None = None
) -> dict[str, Any]:
    """Read in threads: random blocks until the time is over, or each of ``rest``."""
    read: _Read = getattr(tier, way)
    times: list[list[int]] = [[] for _ in range(job.threads)]
    excluded = [0] * job.threads
    failures: list[BaseException] = []
    barrier = threading.Barrier(job.threads + 1)

    def follow(number: int) -> None:
        choose = random.Random(seed * 1000 + number)
        target, scratch = tier.buffer(), tier.buffer()
        mine = None if rest is None else iter(rest[number :: job.threads])
        clock = time.perf_counter_ns
        barrier.wait()
        deadline = clock() + int(job.seconds * 1e9)
        try:
            while True:
                if mine is None:
                    index = choose.choice(tier.indices)
                else:
                    index = next(mine, -1)
                    if index < 0:
                        return
                begin = clock()
                read(index, target)
                end = clock()
                times[number].append(end - begin)
                if way != "view" and len(times[number]) % _CHECK_EVERY == 0:
                    tier.check(index, target, scratch)
                    excluded[number] += clock() - end
                if mine is None and end > deadline:
                    return
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=follow, args=(number,)) for number in range(job.threads)
    ]
    for thread in threads:
        thread.start()
    barrier.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - begin
    if failures:
        raise failures[0]
    rate = sum(
        len(row) * job.block_bytes / (wall - passed / 1e9) / 1e9
        for row, passed in zip(times, excluded, strict=True)
    )
    ordered = sorted(ns for row in times for ns in row)
    return {
        "way": way,
        "gb_per_second": rate,
        "reads": len(ordered),
        "p50_us": (percentile(ordered, 0.5) or 0) / 1e3,
        "p99_us": (percentile(ordered, 0.99) or 0) / 1e3,
        "longest_us": (percentile(ordered, 1.0) or 0) / 1e3,
    }


def run(job: Job) -> Iterator[dict[str, Any]]:
    """Do what the child does; yield a result for each phase of each round."""
    tier = _Tier(job)
    first = _random_reads(tier, "get_into", job, 0, tier.indices)
    yield first | {"way": "first lap", "round": 0}
    for number in range(job.rounds):
        turn = number % len(_WAYS)
        for way in (*_WAYS[turn:], *_WAYS[:turn]):
            yield _random_reads(tier, way, job, number) | {"round": number}
    tier.close()


def measure(job: Job, context: Context) -> None:
    """Start the child, write its samples."""
    scratch = Path(tempfile.mkdtemp(prefix="larger-", dir=context.folder))
    try:
        settle(scratch, job.memory_bytes)
        with cgroup.memory_cgroup("cyclone-kv-larger", job.memory_bytes) as group:
            path = str(group.path) if isinstance(group, cgroup.MemoryCgroup) else None
            job = dataclasses.replace(job, folder=str(scratch), cgroup=path)
            if isinstance(group, cgroup.Refusal):
                context.console.print(
                    f"NO MEMORY LIMIT: the tier may lie in memory: {group.reason}"
                )
            text = json.dumps(dataclasses.asdict(job))
            child = subprocess.run(
                [sys.executable, "-m", "bench.larger_than_memory", text],
                cwd=Path(__file__).resolve().parents[1],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
                timeout=_CHILD_SECONDS_MAX,
            )
            peak = None
            if isinstance(group, cgroup.MemoryCgroup):
                peak = group.peak_bytes()
        if child.returncode != 0:
            raise RuntimeError(f"the reading process ended with {child.returncode}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    results = [json.loads(line) for line in child.stdout.splitlines()]
    for result in results:
        _record(context, job, result)
    context.writer.other(
        "larger_than_memory_run",
        dataclasses.asdict(job) | {"peak_memory_bytes": peak, "results": results},
    )
    context.console.print(_table(results, job))


def _record(context: Context, job: Job, result: dict[str, Any]) -> None:
    for phase, name, unit in (
        ("read", "gb_per_second", "GB/s"),
        ("p50", "p50_us", "us"),
        ("p99", "p99_us", "us"),
        ("longest", "longest_us", "us"),
    ):
        context.writer.sample(
            Sample(
                bench=BENCH,
                phase=phase,
                store=result["way"],
                value=result[name],
                unit=unit,
                better="higher" if phase == "read" else "lower",
                block_bytes=job.block_bytes,
                round=result["round"],
                params={
                    "threads": job.threads,
                    "capacity_bytes": job.capacity_bytes,
                    "memory_bytes": job.memory_bytes if job.cgroup else None,
                },
            )
        )


def _table(results: Sequence[dict[str, Any]], job: Job) -> Table:
    memory = f"{job.memory_bytes >> 20} MiB" if job.cgroup else "no limit"
    table = Table(
        title=f"random reads of {job.block_bytes >> 20} MiB by {job.threads} threads, "
        f"tier of {job.capacity_bytes >> 20} MiB under {memory}: median (least-most)",
        title_justify="left",
    )
    for label in ("", "GB/s", "p50 ms", "p99 ms", "longest ms"):
        table.add_column(label, justify="right" if label else "left")
    for way in ("first lap", *_WAYS):
        rows = [result for result in results if result["way"] == way]
        cells = []
        for name, divisor in (
            ("gb_per_second", 1.0),
            ("p50_us", 1e3),
            ("p99_us", 1e3),
            ("longest_us", 1e3),
        ):
            spread = Spread.of(row[name] / divisor for row in rows)
            cells.append(spread.text() if spread else "-")
        table.add_row(way, *cells)
    return table


def _short(context: Context) -> None:
    measure(_TINY if context.tiny else _SHORT, context)


def _full(context: Context) -> None:
    room = shutil.disk_usage(context.folder).free - (1 << 30)
    job = _FULL
    if room < job.capacity_bytes * 5 // 4:
        context.console.print("larger_than_memory: no room for 16 GiB, 4 GiB runs")
        job = dataclasses.replace(
            job, capacity_bytes=4096 * _MIB, memory_bytes=1024 * _MIB
        )
    measure(job, context)


def _verdicts(run: Run) -> Iterator[Verdict]:
    """Yield speed and stalls, by copies and by views."""
    limited = [
        sample
        for sample in run.select(bench=BENCH, phase="read", store="device")
        if (sample.params["memory_bytes"] or 1 << 62) * _TIMES
        <= sample.params["capacity_bytes"]
    ]
    command = f"python -m bench --suite {BENCH} --full"
    for way in ("get_into", "view"):
        row = f"mapping larger than memory, 8 threads, random 4 MiB, {way}"
        ratio = run.ratio(way, "device", bench=BENCH, phase="read")
        if ratio is None or not limited:
            text = "" if ratio is None else "measured with too much memory"
            for what, target in (("speed", _SHARE), ("stalls", _STALL_SECONDS)):
                yield Verdict(
                    bench=BENCH,
                    row=f"{row}, {what}",
                    reached=None,
                    value=None,
                    target=target,
                    text=text,
                    command=command,
                )
            continue
        speed = run.spread(bench=BENCH, phase="read", store=way)
        device = run.spread(bench=BENCH, phase="read", store="device")
        assert speed is not None
        assert device is not None
        yield Verdict(
            bench=BENCH,
            row=f"{row}, speed",
            reached=ratio.median >= _SHARE,
            value=ratio.median,
            target=_SHARE,
            text=f"{ratio.text()} x a direct loop of {_SHARE:g}; {speed.text()} "
            f"against {device.text()} GB/s",
        )
        longest = [
            sample.value / 1e6
            for sample in run.select(bench=BENCH, phase="longest", store=way)
        ]
        yield Verdict(
            bench=BENCH,
            row=f"{row}, stalls",
            reached=max(longest) <= _STALL_SECONDS,
            value=max(longest),
            target=_STALL_SECONDS,
            text=f"longest read {max(longest) * 1e3:.0f} ms of "
            f"{_STALL_SECONDS * 1e3:.0f} allowed",
        )


SUITE = Suite(
    name=BENCH,
    help="Random reads of a tier four times as large as memory.",
    short=_short,
    full=_full,
    verdicts=_verdicts,
)


def main() -> None:
    """Be the child."""
    job = Job(**json.loads(sys.argv[1]))
    if job.cgroup is not None:
        cgroup.join(Path(job.cgroup))
    for result in run(job):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
