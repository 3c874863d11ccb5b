# SPDX-License-Identifier: Apache-2.0
"""What a run says about the numbers that churn must reach.

V1  A verdict about speed or tails compares samples of one round, one scale: the largest
    that the run has.
V2  A hit ratio depends on how many blocks the tier holds, so its number is one of 16
    GiB and 2 MiB; at other scales the text shows ours beside LRU, and no verdict is
    given.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench.records import Run, Sample, Spread, Verdict

__all__ = ["verdicts"]

_BENCH = "kv_churn"
_OURS = "cyclone_kv"
_RIVAL = "lmdb"
_MIB = 1 << 20
_GIB = 1 << 30
_THREADS = 4
_SERVED = {"zipf": 2.0, "zipf+scan": 2.5}
_HIT_RATIO = {"zipf": 0.870, "zipf+scan": 0.785}
_TAIL_OF_RIVAL = 0.15
_TAIL_OF_DEVICE = 3.0
_AMPLIFICATION = {2 * _MIB: 1.01, 64 << 10: 1.03}
_COMMAND = "python -m bench --suite kv_churn --full"


def _largest(run: Run, block_bytes: int, **params: Any) -> dict[str, Any]:
    """Return what selects the samples of the largest tier that was measured."""
    what = {"bench": _BENCH, "block_bytes": block_bytes, **params}
    found = run.select(phase="served", store=_OURS, **what)
    if not found:
        return what
    best = max(found, key=lambda sample: sample.params["capacity_bytes"])
    names = ("capacity_bytes", "scale")
    return what | {name: best.params[name] for name in names}


def _where(what: dict[str, Any]) -> str:
    """Return the scale in words."""
    if "scale" not in what:
        return ""
    capacity = what["capacity_bytes"] / _GIB
    return f" ({what['scale']}: {capacity:g} GiB tier)"


def _missing(row: str, target: float | None) -> Verdict:
    return Verdict(
        bench=_BENCH,
        row=row,
        reached=None,
        value=None,
        target=target,
        text="",
        command=_COMMAND,
    )


def verdicts(run: Run) -> Iterator[Verdict]:
    """Yield a verdict for each row."""
    for pattern in _SERVED:
        what = _largest(
            run, 2 * _MIB, pattern=pattern, threads=_THREADS, header_bytes=64
        )
        yield _served(run, pattern, what)
        yield _tail(run, pattern, what)
        yield _hit_ratio(run, pattern, what)
    for block_bytes, header_bytes in ((2 * _MIB, 64), (64 << 10, 64), (64 << 10, 0)):
        what = _largest(
            run,
            block_bytes,
            pattern="zipf",
            threads=_THREADS,
            header_bytes=header_bytes,
        )
        yield _amplification(run, block_bytes, header_bytes, what)


def _served(run: Run, pattern: str, what: dict[str, Any]) -> Verdict:
    row = f"churn {pattern}, T={_THREADS}, served against LMDB"
    target = _SERVED[pattern]
    ratio = run.ratio(_OURS, _RIVAL, phase="served", **what)
    if ratio is None:
        return _missing(row, target)
    ours = run.spread(phase="served", store=_OURS, **what)
    files = run.ratio(_OURS, "files", phase="served", **what)
    beside = f", {files.text()} x files" if files else ""
    text = (
        f"{ratio.text()} x LMDB of {target:g}{beside}; "
        f"{ours.text() if ours else '-'} GB/s{_where(what)}"
    )
    return Verdict(
        bench=_BENCH,
        row=row,
        reached=ratio.median >= target,
        value=ratio.median,
        target=target,
        text=text,
        command="" if what.get("scale") == "full" else _COMMAND,
    )


def _tail(run: Run, pattern: str, what: dict[str, Any]) -> Verdict:
    row = f"churn {pattern}, T={_THREADS}, hit p99"
    tails = {
        store: run.by_round(phase="hit_p99", store=store, **what)
        for store in (_OURS, _RIVAL, "device")
    }
    ours, rival, device = (tails[name] for name in (_OURS, _RIVAL, "device"))
    rounds = [number for number in ours if number in rival]
    if not rounds:
        return _missing(row, None)
    shares = []
    for number in rounds:
        limit = _TAIL_OF_RIVAL * rival[number].value
        if number in device:
            limit = max(limit, _TAIL_OF_DEVICE * device[number].value)
        shares.append(ours[number].value / limit)
    share = Spread.of(shares)
    assert share is not None
    against = Spread.of(ours[n].value / rival[n].value for n in rounds)
    assert against is not None
    reads = [device[n].value / 1e3 for n in rounds if n in device]
    beside = (
        f"device read p99 under the same requests {statistics.median(reads):.1f} ms"
        if reads
        else "device not measured"
    )
    text = (
        f"{_ms(ours)} ms, {against.text()} x LMDB ({_ms(rival)} ms), "
        f"{share.text()} of what is allowed (0.15 x LMDB or 3 x device); "
        f"{beside}{_where(what)}"
    )
    return Verdict(
        bench=_BENCH,
        row=row,
        reached=share.median <= 1.0,
        value=share.median,
        target=1.0,
        text=text,
        command="" if what.get("scale") == "full" else _COMMAND,
    )


def _ms(samples: dict[int, Sample]) -> str:
    return f"{statistics.median(s.value for s in samples.values()) / 1e3:.1f}"


def _hit_ratio(run: Run, pattern: str, what: dict[str, Any]) -> Verdict:
    row = f"churn {pattern}, T={_THREADS}, hit ratio of the engine"
    target = _HIT_RATIO[pattern]
    ours = run.spread(phase="hit_ratio", store=_OURS, **what)
    if ours is None:
        return _missing(row, target)
    rival = run.spread(phase="hit_ratio", store=_RIVAL, **what)
    beside = ""
    if rival is not None:
        difference = ours.median - rival.median
        beside = f", LRU {rival.text(3)}, {difference:+.3f}"
    exact = what["capacity_bytes"] == 16 * _GIB
    text = f"{ours.text(3)} of {target:g}{beside}{_where(what)}"
    if not exact:
        text += "; the number to reach is one of 16 GiB"
    return Verdict(
        bench=_BENCH,
        row=row,
        reached=ours.median >= target if exact else None,
        value=ours.median,
        target=target,
        text=text,
        command="" if exact else _COMMAND,
    )


def _amplification(
    run: Run, block_bytes: int, header_bytes: int, what: dict[str, Any]
) -> Verdict:
    size = "2 MiB" if block_bytes == 2 * _MIB else "64 KiB"
    row = f"write amplification from the second lap on, {size}"
    if header_bytes == 0:
        row += ", no user header"
    target = _AMPLIFICATION[block_bytes]
    found = run.spread(phase="write_amplification", store=_OURS, **what)
    if found is None:
        return _missing(row, target)
    return Verdict(
        bench=_BENCH,
        row=row,
        reached=found.median <= target,
        value=found.median,
        target=target,
        text=f"{found.text(3)} of {target:g}, by the counters of the device"
        f"{_where(what)}",
    )
