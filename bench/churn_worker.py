# SPDX-License-Identifier: Apache-2.0
"""One run of churn in a process of its own: ``python -m bench.churn_worker JSON``.

The process enters the memory cgroup before it does anything else, so that all that the
run allocates, page cache and the tier's files included, is charged there. The last line
of its output is the result, as JSON.

    open, empty -> warm up until 2 x capacity was inserted -> syncfs -> the measured
    phase -> syncfs -> close -> open again -> the first gets of thread 0, no inserts
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import block_device, cgroup, generators
from bench.churn_blocks import BlockMaker, made_by
from bench.churn_loop import Phase, ThreadResult, Worker, percentile, run_phase
from bench.churn_tiers import TIERS, Block, Tier
from bench.machine import syncfs

__all__ = ["Job", "run"]

_IDLE_SECONDS = 0.5
_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9999, 1.0)
_DRAWN_PER_SECOND = 3000  # of one thread; more are drawn when they run out


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run."""

    tier: str
    folder: str
    capacity_bytes: int
    block_bytes: int
    scan: bool
    threads: int
    seconds: float
    header_bytes: int = 64
    reopen_gets: int = 10_000
    warm_up_laps: float = 2.0
    warm_up_seconds: float = 1800.0
    """Give up after this: the result says so."""
    cgroup: str | None = None

    @property
    def universe(self) -> int:
        """How many different blocks the zipf stream asks for."""
        return 3 * self.capacity_bytes // self.block_bytes


def _latencies(times: Sequence[int]) -> dict[str, float]:
    """Return microseconds by quantile."""
    ordered = sorted(times)
    found = {}
    for q in _QUANTILES:
        value = percentile(ordered, q)
        if value is not None:
            found[f"{q:g}"] = value / 1e3
    return found


def _served_by_second(results: Sequence[ThreadResult], nbytes: int) -> list[float]:
    """Return GB of hits in each second of the phase."""
    ends = [end // 10**9 for result in results for end in result.hit_ends_ns]
    bins = [0.0] * (max(ends, default=-1) + 1)
    for second in ends:
        bins[second] += nbytes / 1e9
    return bins


def _footprint(folder: Path) -> int:
    """Return the bytes that all files take on the device."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def _process_written() -> int | None:
    """Return the bytes of pages that this process made dirty, by the kernel."""
    try:
        for line in Path("/proc/self/io").read_text().splitlines():
            name, value = line.split(": ")
            if name == "write_bytes":
                return int(value)
    except OSError:
        pass
    return None


def _summary(results: Sequence[ThreadResult], nbytes: int) -> dict[str, Any]:
    gets = sum(result.gets for result in results)
    hits = sum(len(result.hit_ns) for result in results)
    return {
        "gets": gets,
        "hits": hits,
        "hit_ratio": hits / gets if gets else 0.0,
        "inserts": sum(len(result.insert_ns) for result in results),
        "refused": sum(result.refused for result in results),
        "checked": sum(result.checked for result in results),
        "active_seconds": [result.active_ns / 1e9 for result in results],
        "gets_per_second": sum(r.gets / r.active_ns * 1e9 for r in results),
        "served_gb_per_second": sum(
            len(r.hit_ns) * nbytes / r.active_ns for r in results
        ),
        "hit_us": _latencies([ns for r in results for ns in r.hit_ns]),
        "insert_us": _latencies([ns for r in results for ns in r.insert_ns]),
        "served_by_second": _served_by_second(results, nbytes),
    }


def _reopen(tier: Tier, job: Job) -> dict[str, Any]:
    begin = time.perf_counter()
    tier.open()
    opened = time.perf_counter() - begin
    target = Block(job.block_bytes, 0).payload
    stream = generators.churn_stream(job.universe, 0, scan=False)
    hits = 0
    for index in itertools.islice(stream, job.reopen_gets):
        hits += tier.get_into(generators.key(index), target)
    tier.close()
    ratio = hits / job.reopen_gets if job.reopen_gets else None
    return {"reopen_seconds": opened, "reopen_ratio": ratio}


def _difference(before: Any, after: Any) -> dict[str, int]:
    return {name: after[name] - before.get(name, 0) for name in after}


def run(job: Job) -> dict[str, Any]:
    """Run it and return the result."""
    folder = Path(job.folder)
    group = None
    if job.cgroup is not None:
        path = Path(job.cgroup)
        group = cgroup.joined(path)
    device = block_device.find(folder)
    maker = BlockMaker(job.block_bytes)
    tier = TIERS[job.tier](
        folder, job.capacity_bytes, job.block_bytes, job.header_bytes
    )
    workers = [
        Worker(
            tier,
            maker,
            generators.churn_stream(job.universe, number, scan=job.scan),
            header_bytes=job.header_bytes,
        )
        for number in range(job.threads)
    ]
    tier.open()

    begin = time.perf_counter()
    wanted = int(job.warm_up_laps * job.capacity_bytes / job.block_bytes)
    warm_up = Phase(seconds=job.warm_up_seconds, inserts=wanted)
    run_phase(workers, warm_up)
    warm_up_seconds = time.perf_counter() - begin

    for worker in workers:
        worker.draw(int(job.seconds * _DRAWN_PER_SECOND))
    syncfs(folder)
    result: dict[str, Any] = {}
    if isinstance(device, block_device.Device):
        result["foreign_written_bytes_per_second"] = (
            device.idle_written_bytes_per_second(_IDLE_SECONDS)
        )
        before = device.read()
    else:
        result["device"] = device
    written, counters = _process_written(), tier.counters()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    begin = time.perf_counter()
    results = run_phase(workers, Phase(seconds=job.seconds))
    wall = time.perf_counter() - begin
    usage_after = resource.getrusage(resource.RUSAGE_SELF)
    counted = _difference(counters, tier.counters())
    dirty = group.dirty_bytes() if group is not None else None
    if isinstance(device, block_device.Device):
        in_phase = device.read().since(before)
        result |= {
            "device": device.name,
            "device_read_bytes": in_phase.read_bytes,
            "device_busy_share": in_phase.busy_share,
            "device_read_wait_ms": in_phase.read_wait_ms,
            "device_write_wait_ms": in_phase.write_wait_ms,
        }
    begin = time.perf_counter()
    syncfs(folder)
    sync_seconds = time.perf_counter() - begin
    result |= _summary(results, job.block_bytes)
    inserted = result["inserts"] * job.block_bytes
    written_after = _process_written()
    if isinstance(device, block_device.Device):
        result["device_written_bytes"] = device.read().since(before).written_bytes
        if inserted:
            result["write_amplification"] = result["device_written_bytes"] / inserted
    if written is not None and written_after is not None and inserted:
        result["dirtied_per_inserted"] = (written_after - written) / inserted
    result |= {
        "inserted_bytes": inserted,
        "warm_up_inserts": warm_up.inserted,
        "warm_up_complete": warm_up.inserted >= wanted,
        "warm_up_seconds": warm_up_seconds,
        "wall_seconds": wall,
        "sync_seconds": sync_seconds,
        "user_seconds": usage_after.ru_utime - usage.ru_utime,
        "system_seconds": usage_after.ru_stime - usage.ru_stime,
        "dirty_bytes_at_end": dirty,
        "footprint_bytes": _footprint(folder),
        "counters": counted,
        "blocks_made_by": made_by(),
    }
    tier.close()
    result |= _reopen(tier, job)
    result["resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    if group is not None:
        result["peak_memory_bytes"] = group.peak_bytes()
    return result


def main() -> None:
    """Run the job of the command line."""
    job = Job(**json.loads(sys.argv[1]))
    if job.cgroup is not None:
        cgroup.join(Path(job.cgroup))
    print(json.dumps(run(job)), flush=True)
    os._exit(0)  # a thread of a rival must not keep the group from being removed


if __name__ == "__main__":
    main()
