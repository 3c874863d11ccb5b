# SPDX-License-Identifier: Apache-2.0
"""Several writer processes on one volume, against one, and against the machine.

Every process stores blocks of its own until a share of the bytes is done; payloads are
in its memory before the clock starts, and the volume has been written once over. The
clock runs from the first start to the last end; "synced" adds a ``syncfs``.

Three limits run in the same way, in as many processes: direct writes to the device,
writes into the page cache of a flat file, and copies in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.churn_blocks import BlockMaker
from bench.machine import huge_memory, settle, syncfs
from bench.records import Run, Sample, Verdict
from bench.suites import Context, Suite
from cyclone_kv import Cache, CacheConfig

__all__ = ["BENCH", "SUITE", "measure"]

BENCH = "writers"
_MIB = 1 << 20
_PAYLOADS = 16  # in the memory of each process
_WAIT_SECONDS = 300.0
_COMMAND = "python -m bench --suite writers --full"
_OURS = "cyclone_kv"


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much."""

    capacity_bytes: int
    total_bytes: int
    block_bytes: int
    rounds: int
    processes: tuple[int, ...]


_TINY = Size(64 * _MIB, 64 * _MIB, _MIB, 1, (1, 2))
_SHORT = Size(1024 * _MIB, 2048 * _MIB, 2 * _MIB, 3, (1, 2, 4))
_FULL = Size(4096 * _MIB, 12288 * _MIB, 2 * _MIB, 5, (1, 2, 4, 8))


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """What one process does."""

    what: str
    folder: Path
    number: int
    blocks: int
    block_bytes: int
    salt: int


def _payloads(task: _Task) -> list[memoryview]:
    maker = BlockMaker(task.block_bytes)
    found = []
    for index in range(_PAYLOADS):
        buffer = huge_memory(task.block_bytes)
        maker.fill(task.number * _PAYLOADS + index + 1, buffer)
        found.append(buffer)
    return found


def _key(task: _Task, count: int) -> bytes:
    name = f"{task.salt}-{task.number}-{count}"
    return hashlib.sha256(name.encode()).digest()


def _put(task: _Task, start: Callable[[], float]) -> tuple[float, dict[str, int]]:
    payloads = _payloads(task)
    keys = [_key(task, count) for count in range(task.blocks)]
    refused = 0
    with Cache.open(task.folder / "kv.cyc") as cache:
        begin = start()
        for count, key in enumerate(keys):
            if not cache.put(key, payloads[count % _PAYLOADS]):
                refused += 1
        end = time.monotonic()
        counters = cache.stats().process
        reasons = {
            name: value
            for name, value in counters.items()
            if name.startswith("puts_") and name != "puts_stored" and value
        }
    del begin
    return end, reasons | {"refused": refused}


def _write(task: _Task, start: Callable[[], float]) -> tuple[float, dict[str, int]]:
    flags = os.O_WRONLY | (os.O_DIRECT if task.what == "device" else 0)
    payloads = _payloads(task)
    descriptor = os.open(task.folder / "flat", flags)
    blocks = os.fstat(descriptor).st_size // task.block_bytes
    first = task.number * task.blocks
    start()
    for count in range(task.blocks):
        place = (first + count) % blocks * task.block_bytes
        os.pwritev(descriptor, [payloads[count % _PAYLOADS]], place)
    end = time.monotonic()
    os.close(descriptor)
    return end, {}


def _copy(task: _Task, start: Callable[[], float]) -> tuple[float, dict[str, int]]:
    payloads = [np.frombuffer(payload, dtype=np.uint8) for payload in _payloads(task)]
    targets = np.zeros((_PAYLOADS, task.block_bytes), dtype=np.uint8)
    start()
    for count in range(task.blocks):
        # The block goes somewhere else each time: it must not stay in the cache.
        np.copyto(targets[(count * 7) % _PAYLOADS], payloads[count % _PAYLOADS])
    return time.monotonic(), {}


_WORK = {_OURS: _put, "device": _write, "page cache": _write, "memcpy": _copy}


def _process(task: _Task, barrier: Barrier, results: Any) -> None:
    begin = 0.0

    def start() -> float:
        nonlocal begin
        barrier.wait(_WAIT_SECONDS)
        begin = time.monotonic()
        return begin

    try:
        end, counts = _WORK[task.what](task, start)
        results.put((begin, end, counts, None))
    except BaseException as error:
        barrier.abort()
        results.put((0.0, 0.0, {}, repr(error)))


def _together(
    what: str, folder: Path, size: Size, processes: int, salt: int
) -> dict[str, Any]:
    """Run one kind of work in some processes; return its rates in GB/s and counts."""
    # Not forked: an open cache and its threads do not go along.
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(processes), spawn.Queue()
    blocks = size.total_bytes // size.block_bytes // processes
    children = [
        spawn.Process(
            target=_process,
            args=(
                _Task(what, folder, number, blocks, size.block_bytes, salt),
                barrier,
                results,
            ),
        )
        for number in range(processes)
    ]
    syncfs(folder)
    for child in children:
        child.start()
    found = [results.get(timeout=_WAIT_SECONDS) for _ in children]
    began, ended = min(row[0] for row in found), max(row[1] for row in found)
    syncfs(folder)
    synced = time.monotonic()
    for child in children:
        child.join(_WAIT_SECONDS)
    errors = [row[3] for row in found if row[3] is not None]
    errors += [f"exit code {c.exitcode}" for c in children if c.exitcode != 0]
    counts: dict[str, int] = {}
    for row in found:
        for name, value in row[2].items():
            counts[name] = counts.get(name, 0) + value
    written = blocks * processes * size.block_bytes
    return {
        "put": written / (ended - began) / 1e9 if not errors else None,
        "put_synced": written / (synced - began) / 1e9 if not errors else None,
        "counts": counts,
        "errors": errors,
    }


def measure(size: Size, context: Context) -> None:
    """Run all rounds."""
    parent, writer = context.folder, context.writer
    scratch = Path(tempfile.mkdtemp(prefix="writers-", dir=parent))
    try:
        settle(scratch, 2 * size.capacity_bytes)
        config = CacheConfig.for_kv_tier(
            capacity=size.capacity_bytes, admission="always"
        )
        with Cache.open(scratch / "kv.cyc", config):
            pass
        _fill_flat(scratch / "flat", size)
        lap = dataclasses.replace(size, total_bytes=size.capacity_bytes)
        first = _together(_OURS, scratch, lap, 1, salt=-1)
        if first["errors"]:
            raise RuntimeError(f"the first lap failed: {first['errors']}")
        whats = [(_OURS, number) for number in size.processes] + [
            (what, max(size.processes)) for what in _WORK if what != _OURS
        ]
        for number in range(size.rounds):
            turn = number % len(whats)
            for what, processes in [*whats[turn:], *whats[:turn]]:
                salt = number * len(whats) + processes
                result = _together(what, scratch, size, processes, salt)
                _record(writer, size, number, what, processes, result)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    context.console.print(_table(writer.run, size))


def _fill_flat(path: Path, size: Size) -> None:
    block = BlockMaker(size.block_bytes)
    buffer = huge_memory(size.block_bytes)
    block.fill(1, buffer)
    with open(path, "wb", buffering=0) as file:
        for _ in range(size.capacity_bytes // size.block_bytes):
            file.write(buffer)


def _record(
    writer: Any,
    size: Size,
    number: int,
    what: str,
    processes: int,
    result: dict[str, Any],
) -> None:
    for phase in ("put", "put_synced"):
        if result[phase] is not None:
            writer.sample(
                Sample(
                    bench=BENCH,
                    phase=phase,
                    store=what,
                    value=result[phase],
                    unit="GB/s",
                    better="higher",
                    block_bytes=size.block_bytes,
                    round=number,
                    params={
                        "processes": processes,
                        "capacity_bytes": size.capacity_bytes,
                    },
                )
            )
    writer.other(
        "writers_run",
        {"round": number, "store": what, "processes": processes, **result},
    )


def _table(run: Run, size: Size) -> Table:
    table = Table(
        title=f"writer processes on one volume, {size.block_bytes >> 20} MiB blocks, "
        "GB/s: median (least-most)",
        title_justify="left",
    )
    for label in ("", "processes", "put", "put, then syncfs"):
        table.add_column(label)
    for store in _WORK:
        for processes in size.processes:
            cells = []
            for phase in ("put", "put_synced"):
                spread = run.spread(
                    bench=BENCH, phase=phase, store=store, processes=processes
                )
                cells.append(spread.text() if spread else "-")
            if cells != ["-", "-"]:
                table.add_row(store, str(processes), *cells)
    return table


def _short(context: Context) -> None:
    measure(_TINY if context.tiny else _SHORT, context)


def _full(context: Context) -> None:
    measure(_FULL, context)


def _problems(run: Run) -> list[str]:
    found = []
    for record in run.others:
        if record.get("kind") == "writers_run" and record["store"] == _OURS:
            found += record["errors"]
            if record["counts"].get("refused"):
                found.append(f"refused: {record['counts']}")
    return found


def _verdicts(run: Run) -> Iterator[Verdict]:
    """Yield the three parts of the row "4 writer processes"."""
    four = functools.partial(run.by_round, bench=BENCH, processes=4)
    ours, alone = (
        run.by_round(bench=BENCH, phase="put_synced", store=_OURS, processes=number)
        for number in (4, 1)
    )
    limits = {
        store: four(phase="put_synced", store=store)
        or run.by_round(bench=BENCH, phase="put_synced", store=store)
        for store in ("device", "memcpy", "page cache")
    }
    rounds = [n for n in ours if n in alone]
    yield _verdict(
        "4 writer processes against one, syncfs in both",
        [ours[n].value / alone[n].value for n in rounds],
        1.0,
        f"x one writer of 1.0; {_median(ours)} against {_median(alone)} GB/s",
    )
    rounds = [n for n in ours if all(n in limits[s] for s in ("device", "memcpy"))]
    least = {n: min(limits[s][n].value for s in ("device", "memcpy")) for n in rounds}
    yield _verdict(
        "4 writer processes against min(device, memory)",
        [ours[n].value / least[n] for n in rounds],
        0.9,
        f"x min(device, memory) of 0.9; {_median(ours)} GB/s, device "
        f"{_median(limits['device'])}, memcpy {_median(limits['memcpy'])}, page cache "
        f"and syncfs {_median(limits['page cache'])} GB/s",
    )
    problems = _problems(run)
    measured = bool(ours)
    yield Verdict(
        bench=BENCH,
        row="4 writer processes: no error, nothing refused",
        reached=not problems if measured else None,
        value=float(len(problems)) if measured else None,
        target=0.0,
        text="; ".join(problems) or ("none" if measured else ""),
        command="" if measured else _COMMAND,
    )


def _median(samples: dict[int, Sample]) -> str:
    values = sorted(sample.value for sample in samples.values())
    return f"{values[len(values) // 2]:.2f}" if values else "-"


def _verdict(row: str, ratios: list[float], target: float, text: str) -> Verdict:
    ratios = sorted(ratios)
    if not ratios:
        return Verdict(
            bench=BENCH,
            row=row,
            reached=None,
            value=None,
            target=target,
            text="",
            command=_COMMAND,
        )
    middle = ratios[(len(ratios) - 1) // 2]
    return Verdict(
        bench=BENCH,
        row=row,
        reached=middle >= target,
        value=middle,
        target=target,
        text=f"{middle:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) {text}",
    )


SUITE = Suite(
    name=BENCH,
    help="Writer processes on one volume, against one and against the machine.",
    short=_short,
    full=_full,
    verdicts=_verdicts,
)
