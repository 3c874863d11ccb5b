# SPDX-License-Identifier: Apache-2.0
"""The numbers to reach that kv_bench measures, and how far a run came.

Each is a ratio of samples of the same round, the median of the rounds; where a limit
was measured that lies below a target, the limit is the target. ``value`` and ``target``
of a verdict are in the same terms, for most the ratio to the target, which is 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bench.phases import BENCH
from bench.records import Run, Spread, Verdict
from bench.sizes import KIB, MIB, human_size
from bench.stores import OURS

__all__ = ["COMMAND", "verdicts"]

COMMAND = "python -m bench --full --suite kv_bench"
"""What measures these rows to the letter."""

_COLD_BLOCKS = (64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB)
_PUT_BLOCKS = (512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB)
_BATCH_BLOCK = 2 * MIB

_COLD_LMDB = 1.5
_COLD_DEVICE = 0.9
_BATCH_DEVICE = 0.95
_WARM_LMDB = 1.0
_WARM_MEMCPY = 0.9
_PUT_SYNCED_FILES = 1.1
_PUT_FILES = 1.0
_OPEN_MS = 50.0
_ENTRY_BYTES = 160.0


def verdicts(run: Run) -> Iterator[Verdict]:
    """Yield a verdict for each row, also for those that the run did not measure."""
    command = "" if run.machine.get("form") == "full" else COMMAND
    for nbytes in _COLD_BLOCKS:
        yield _cold(run, nbytes, command)
    yield _against(
        run,
        f"cold batch of 64 x {human_size(_BATCH_BLOCK)}, one call",
        "cold_batch",
        _BATCH_BLOCK,
        {"device": _BATCH_DEVICE},
        command,
    )
    for nbytes in _COLD_BLOCKS:
        yield _against(
            run,
            f"warm copy, one thread, {human_size(nbytes)}",
            "warm_copy",
            nbytes,
            {"lmdb": _WARM_LMDB, "memcpy": _WARM_MEMCPY},
            command,
            threads=1,
        )
    for phase, text, least in (
        ("put_synced", "put with syncfs", _PUT_SYNCED_FILES),
        ("put", "put without syncfs", _PUT_FILES),
    ):
        for nbytes in _PUT_BLOCKS:
            row = f"{text}, {human_size(nbytes)}"
            yield _against(run, row, phase, nbytes, {"files": least}, command)
    for way in ("clean", "killed"):
        found = run.spread(bench=BENCH, phase="open", way=way)
        yield _at_most(
            f"open of 500 000 entries, nobody alive, {way}",
            found if _entries_are_enough(run) else None,
            _OPEN_MS,
            "ms",
            command,
        )
    found = run.spread(bench=BENCH, phase="memory_per_entry")
    memory = _at_most(
        "memory per live entry at 64 KiB", found, _ENTRY_BYTES, "bytes", command
    )
    fixed = run.median(bench=BENCH, phase="memory_per_volume")
    if fixed is not None:
        text = f"{memory.text}; and {fixed / MIB:.1f} MiB for a volume of any size"
        memory = dataclasses.replace(memory, text=text)
    yield memory


def _entries_are_enough(run: Run) -> bool:
    samples = run.select(bench=BENCH, phase="open")
    return bool(samples) and all(s.params["entries"] >= 500_000 for s in samples)


def _missing(row: str) -> Verdict:
    return Verdict(
        bench=BENCH,
        row=row,
        reached=None,
        value=None,
        target=None,
        text="not part of this run",
        command=COMMAND,
    )


def _at_most(
    row: str, found: Spread | None, most: float, unit: str, command: str
) -> Verdict:
    if found is None:
        return _missing(row)
    return Verdict(
        bench=BENCH,
        row=row,
        reached=found.median <= most,
        value=found.median,
        target=most,
        text=f"{found.text(1)} {unit}, at most {most:g} {unit}",
        command=command,
    )


def _cold(run: Run, nbytes: int, command: str) -> Verdict:
    """Ours against the lower of 1.5 x LMDB and 0.9 x device, round by round."""
    row = f"cold verified read, stored order, {human_size(nbytes)}"
    what = {"bench": BENCH, "phase": "cold_ordered", "block_bytes": nbytes}
    ours = run.by_round(store=OURS, **what)
    lmdb = run.by_round(store="lmdb", **what)
    device = run.by_round(store="device", **what)
    ratios = []
    for number in ours.keys() & lmdb.keys():
        target = _COLD_LMDB * lmdb[number].value
        if number in device:
            target = min(target, _COLD_DEVICE * device[number].value)
        ratios.append(ours[number].value / target)
    found = Spread.of(ratios)
    if found is None:
        return _missing(row)
    shown = [_shown(run, name, what) for name in (OURS, "lmdb", "device")]
    random = run.median(
        bench=BENCH, phase="cold_random", block_bytes=nbytes, store=OURS
    )
    apart = f"; random order {random:.2f} GB/s" if random is not None else ""
    return Verdict(
        bench=BENCH,
        row=row,
        reached=found.median >= 1.0,
        value=found.median,
        target=1.0,
        text=(
            f"{found.text()} of min({_COLD_LMDB} x lmdb, {_COLD_DEVICE} x device); "
            f"{', '.join(text for text in shown if text)}{apart}"
        ),
        command=command,
    )


def _shown(run: Run, store: str, what: dict[str, object]) -> str:
    found = run.spread(store=store, **what)
    return "" if found is None else f"{store} {found.text()} GB/s"


def _against(
    run: Run,
    row: str,
    phase: str,
    nbytes: int,
    least: dict[str, float],
    command: str,
    **params: object,
) -> Verdict:
    """Ours at least so many times each of some stores or limits."""
    what = {"bench": BENCH, "phase": phase, "block_bytes": nbytes, **params}
    parts, texts = [], []
    for other, factor in least.items():
        found = run.ratio(OURS, other, **what)
        if found is None:
            # What a machine cannot measure (no O_DIRECT, a rival that is missing) is
            # not reached by default.
            return _missing(row)
        parts.append(found.median / factor)
        texts.append(f"{found.text()} x {other}, at least {factor:g}")
    shown = _shown(run, OURS, what)
    return Verdict(
        bench=BENCH,
        row=row,
        reached=min(parts) >= 1.0,
        value=min(parts),
        target=1.0,
        text=f"{'; '.join(texts)}; {shown}",
        command=command,
    )
