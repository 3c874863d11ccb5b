# SPDX-License-Identifier: Apache-2.0
"""Many entries: how long an open takes, what they cost in memory, a view among them.

Ours alone: no rival keeps an index that a first open has to build. The blocks are a
page each, so that half a million fit a small disk; the entries do not know that. Opens
happen in a new process each, with nobody else alive, after the table was read into
memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import generators
from bench.machine import settle
from bench.records import Sample, Writer
from bench.stores import OURS
from cyclone_kv import Cache, CacheConfig

__all__ = ["Entries", "measure_entries"]

_ROOT = Path(__file__).resolve().parent.parent
_BLOCK_BYTES = 4096
_GRANULE_BYTES = 65536
_BATCH = 512
_VIEWS = 20000
_HEADER_BYTES = 4096
_TABLE_BYTES_AT = 104  # docs/format.md
_PIN_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """How much of it."""

    count: int
    rounds: int
    granule_capacity: int
    """Of the volume whose memory for an entry is counted; nothing is stored in it."""


def measure_entries(plan: Entries, bench: str, folder: Path, writer: Writer) -> None:
    """Write the samples; everything is removed again."""
    scratch = folder / "entries"
    scratch.mkdir(parents=True)

    def record(phase: str, value: float, unit: str, number: int, **params: Any) -> None:
        sample = Sample(
            bench=bench,
            phase=phase,
            store=OURS,
            value=value,
            unit=unit,
            better="lower",
            block_bytes=None,
            round=number,
            params=params,
        )
        writer.sample(sample)

    try:
        path = scratch / "kv.cyc"
        settle(scratch, plan.count * _BLOCK_BYTES)
        _fill(path, plan.count)
        entries = {"entries": plan.count}
        for number in range(plan.rounds):
            for way in ("clean", "killed"):
                _child(path, plan.count, way)
                found = _child(path, plan.count, "time")
                if found["entries"] != plan.count:
                    raise RuntimeError(f"{found['entries']} of {plan.count} came back")
                record("open", found["open_ms"], "ms", number, way=way, **entries)
                if way == "clean":
                    record("view_p50", found["view_us"], "us", number, **entries)
                    floor = found["memoryview_us"]
                    record("memoryview_p50", floor, "us", number, **entries)
        path.unlink()
        per_entry, fixed = _memory_per_entry(
            scratch / "granule.cyc", plan.granule_capacity
        )
        record("memory_per_entry", per_entry, "bytes", 0, granule=_GRANULE_BYTES)
        record("memory_per_volume", fixed, "bytes", 0, granule=_GRANULE_BYTES)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _config(count: int) -> CacheConfig:
    capacity = max(64 << 20, count * _BLOCK_BYTES * 9 // 8)
    capacity = -(-capacity // (1 << 20)) << 20
    return CacheConfig.for_kv_tier(capacity=capacity, expected_object_size=_BLOCK_BYTES)


def _fill(path: Path, count: int) -> None:
    value = generators.value(0, _BLOCK_BYTES)
    with Cache.open(path, _config(count)) as cache:
        for first in range(0, count, _BATCH):
            last = min(first + _BATCH, count)
            items = [(generators.key(index), value) for index in range(first, last)]
            if not all(cache.put_many(items)):
                raise RuntimeError(f"a put was refused: {cache.stats()}")
        cache.sync()


def _memory(path: Path, capacity: int) -> tuple[int, int]:
    """Return bytes of metadata that should be in memory, and entries.

    For a volume of the default geometry, one entry for each 64 KiB: the table, the
    whole shared region, and the pins of one process. The checkpoints are left out:
    they are written every few minutes and read at a first open only.
    """
    with Cache.open(path, CacheConfig.for_kv_tier(capacity=capacity)) as cache:
        info = cache.info()
        entries = sum(one.entries_max for one in info.paths)
        with open(path, "rb") as file:
            header = file.read(_HEADER_BYTES)
        (table,) = struct.unpack_from("<Q", header, _TABLE_BYTES_AT)
        shared = info.shm_bytes
    path.unlink()
    return table + shared + entries * _PIN_BYTES, entries


def _memory_per_entry(path: Path, capacity: int) -> tuple[float, float]:
    """Return bytes for each entry, and what a volume costs without any.

    The line through two volumes, one a quarter as large as the other.
    """
    (small, few), (large, many) = (
        _memory(path, capacity // 4),
        _memory(path, capacity),
    )
    slope = (large - small) / (many - few)
    return slope, large - slope * many


def _child(path: Path, count: int, what: str) -> Any:
    """Open in a process of its own; leave as ``what`` says, or "time" it."""
    result = subprocess.run(
        [sys.executable, "-m", "bench.entries", str(path), str(count), what],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    wanted = -signal.SIGKILL if what == "killed" else 0
    if result.returncode != wanted:
        raise RuntimeError(f"a process ended with {result.returncode}, not {wanted}")
    return json.loads(result.stdout) if what == "time" else None


def _read_all(path: Path, count: int) -> None:
    """Bring the head of the file, which holds the tables, into memory."""
    with Cache.open(path, _config(count)) as cache:
        offset = min(one.data_offset for one in cache.info().paths)
    with open(path, "rb", buffering=0) as file:
        while file.tell() < offset and file.read(1 << 20):
            pass


def _time(path: Path, count: int) -> dict[str, float]:
    config = _config(count)
    begin = time.perf_counter()
    cache = Cache.open(path, config)
    opened = time.perf_counter() - begin
    keys = [generators.key(index % count) for index in range(0, 7919 * _VIEWS, 7919)]
    get, clock = cache.get, time.perf_counter_ns
    for key in keys:
        get(key)
    times = []
    for key in keys:
        start = clock()
        get(key)
        times.append(clock() - start)
    block, floor = b"x" * _BLOCK_BYTES, []
    for _ in keys:
        start = clock()
        memoryview(block)
        floor.append(clock() - start)
    found = {
        "open_ms": opened * 1e3,
        "entries": len(cache),
        "view_us": float(np.median(times)) / 1e3,
        "memoryview_us": float(np.median(floor)) / 1e3,
    }
    cache.close()
    return found


def _main() -> None:
    path, count, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if what == "time":
        print(json.dumps(_time(path, count)))
        return
    _read_all(path, count)
    cache = Cache.open(path, _config(count))
    if what == "killed":
        # In the middle of its life: with a pinned block, and one stored just now.
        view = cache.get(generators.key(0))
        cache.put(generators.key(0), bytes(view or b""), overwrite=True)
        os.kill(os.getpid(), signal.SIGKILL)
    cache.close()


if __name__ == "__main__":
    _main()
