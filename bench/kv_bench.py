# SPDX-License-Identifier: Apache-2.0
"""kv_bench v1: puts, cold reads and warm reads of blocks, beside rivals and limits.

The definition: keys and values of ``generators`` (spec v1), min(4096, 4 GiB / block)
blocks of each size, a volume of 8 GiB, warm phases of 2 s and then 10 s on 1, 4 and 8
threads that ask for blocks by Zipf, a byte of each 4096 read of a view, 4 reading
processes, gigabytes decimal and of values only. ``short`` has fewer and shorter of
everything.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.dataset import Dataset
from bench.entries import Entries, measure_entries
from bench.foreign import ForeignLoad
from bench.kv_verdicts import verdicts
from bench.machine import CacheDropper, DeviceLimit, settle
from bench.phases import BENCH, Bench, Plan, run_round
from bench.sizes import GIB, KIB, MIB
from bench.stores import OURS, Store, available
from bench.suites import Context, Suite
from bench.table import print_tables

__all__ = ["BLOCKS", "FULL", "SHORT", "SUITE", "TINY", "run", "run_entries"]

BLOCKS = (64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB)

FULL = Plan(
    rounds=3,
    bytes_max=4 * GIB,
    blocks_max=4096,
    warm_up_seconds=2.0,
    warm_seconds=10.0,
    copy_threads=(1, 4, 8),
    view_threads=(1, 4, 8),
    processes=4,
    process_blocks=BLOCKS,
    first_touch=True,
    capacity=8 * GIB,
    fio_seconds=5.0,
)

SHORT = Plan(
    rounds=3,
    bytes_max=128 * MIB,
    blocks_max=1024,
    warm_up_seconds=0.05,
    warm_seconds=0.2,
    copy_threads=(1, 4),
    view_threads=(1,),
    processes=4,
    process_blocks=(2 * MIB,),
    first_touch=False,
    capacity=None,
    fio_seconds=0.5,
)

TINY = Plan(
    rounds=1,
    bytes_max=1 * MIB,
    blocks_max=64,
    warm_up_seconds=0.001,
    warm_seconds=0.01,
    copy_threads=(1, 2),
    view_threads=(1,),
    processes=2,
    process_blocks=(64 * KIB,),
    first_touch=True,
    capacity=None,
    fio_seconds=0.1,
)

_ENTRIES = Entries(count=500_000, rounds=3, granule_capacity=4 * GIB)
_ENTRIES_TINY = Entries(count=300, rounds=1, granule_capacity=64 * MIB)
_SHORT_RIVALS = ("lmdb", "files")  # what the numbers to reach are about
_LEAVE_BYTES = 1 * GIB
_VOLUME_MIN = 64 * MIB


def _needed(plan: Plan, blocks: Sequence[int], stores: int) -> int:
    """Return the bytes of disk that a run needs at most."""
    total = max(nbytes * plan.count(nbytes) for nbytes in blocks)
    ours = plan.capacity or max(_VOLUME_MIN, total * 3 // 2)
    # One more for a rival that writes to a log first; the files of ``settle`` and of
    # the device limit.
    return ours + stores * total + total * 3 // 2 + total


def run(
    context: Context,
    plan: Plan,
    *,
    blocks: Sequence[int] = BLOCKS,
    names: Sequence[str] | None = None,
    lmdb_writemap: bool = False,
) -> None:
    """Run all rounds at all block sizes, and print a table for each."""
    console, writer = context.console, context.writer
    kinds, missing = available() if names is None else available(names)
    for name, why in missing.items():
        console.print(f"{name}: {why}", soft_wrap=True)
    parent = context.folder
    needed = _needed(plan, blocks, len(kinds))
    free = shutil.disk_usage(parent).free
    if free < needed + _LEAVE_BYTES:
        raise OSError(
            f"{parent} has {free >> 20} MiB free; kv_bench needs up to {needed >> 20} "
            f"MiB and leaves {_LEAVE_BYTES >> 20} MiB alone"
        )
    scratch = Path(tempfile.mkdtemp(prefix="kv-", dir=parent))
    bench = Bench(scratch, CacheDropper(), writer, plan)
    try:
        settle(scratch, 4 * max(nbytes * plan.count(nbytes) for nbytes in blocks))
        for nbytes in blocks:
            data = Dataset(nbytes, plan.count(nbytes))
            stores = [kind(scratch, data.count, nbytes) for kind in kinds]
            for store in stores:
                _set_up(store, plan, writemap=lmdb_writemap)
            _measure(bench, stores, data)
            console.print()
            print_tables(console, writer.run, nbytes)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _set_up(store: Store, plan: Plan, *, writemap: bool) -> None:
    if store.name == "cyclone_kv":
        vars(store)["capacity"] = plan.capacity
    if store.name == "lmdb":
        vars(store)["writemap"] = writemap


def _measure(bench: Bench, stores: Sequence[Store], data: Dataset) -> None:
    device = DeviceLimit(
        bench.folder, data.total, data.nbytes, fio_seconds=bench.plan.fio_seconds
    )
    try:
        for number in range(bench.plan.rounds):
            foreign, load = ForeignLoad(), os.getloadavg()[0]
            run_round(bench, number, stores, data, device)
            bench.writer.other(
                "round",
                {
                    "bench": BENCH,
                    "block_bytes": data.nbytes,
                    "round": number,
                    "load_before": load,
                    **foreign.report(),
                },
            )
        about = {"bench": BENCH, "block_bytes": data.nbytes, **device.about()}
        bench.writer.other("device", about)
    finally:
        device.close()


def run_entries(context: Context) -> None:
    """Measure opens and the memory of an entry."""
    plan = _ENTRIES_TINY if context.tiny else _ENTRIES
    measure_entries(plan, BENCH, context.folder, context.writer)


def _short(context: Context) -> None:
    if context.tiny:
        run(context, TINY, blocks=(64 * KIB, 1 * MIB))
        run_entries(context)
    else:
        context.console.print(
            f"the short form has only {' and '.join(_SHORT_RIVALS)} beside ours"
        )
        run(context, SHORT, names=(OURS, *_SHORT_RIVALS))
        run_entries(context)


def _full(context: Context) -> None:
    if context.tiny:
        _short(context)
        return
    run(context, FULL)
    run_entries(context)


SUITE = Suite(
    name=BENCH,
    help="Puts, cold and warm reads beside rivals and limits; opens; memory.",
    short=_short,
    full=_full,
    verdicts=verdicts,
)
