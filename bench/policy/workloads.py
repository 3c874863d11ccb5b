# SPDX-License-Identifier: Apache-2.0
"""The streams that policies are judged on: churn, traces, and what drifts."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.policy.native import Stream, churn_indices, warm_up

__all__ = ["Workload", "churn", "drifting", "generated_trace", "read_trace", "trace"]

_THETA = 0.99


@dataclasses.dataclass(frozen=True)
class Workload:
    """A stream with the capacity to replay it at."""

    name: str
    stream: Stream
    capacity: int
    from_request: int = 0


def _dense(values: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    names, dense = np.unique(values, return_inverse=True)
    return np.ascontiguousarray(dense, dtype=np.uint32), names


def _key_stripe(index: int) -> int:
    digest = hashlib.sha256(b"prefix-%d" % index).digest()
    return int.from_bytes(digest[:4], "little") % 256


def churn(
    block: int,
    capacity_bytes: int,
    *,
    scan: bool,
    gets: int = 400_000,
    thread: int = 0,
    by_key: bool = False,
) -> Workload:
    """Return the churn stream of one thread over three times the capacity.

    The warm-up ends when an LRU has missed twice the capacity.  With ``by_key`` each
    block has its stripe (mod 256) from its key.
    """
    universe = 3 * capacity_bytes // block
    slots = capacity_bytes // (block + 64)
    length = gets + 8 * universe
    while True:
        indices = churn_indices(universe, thread, length, scan=scan)
        blocks, names = _dense(indices)
        stream = Stream(blocks, None, len(names))
        start = warm_up(stream, slots, 2 * capacity_bytes // block)
        if start + gets <= length:
            break
        length += length // 2
    if by_key:
        stripes = np.fromiter(map(_key_stripe, names.tolist()), np.uint8, len(names))
        stream = dataclasses.replace(stream, stripes=stripes)
    stream = dataclasses.replace(stream, blocks=stream.blocks[: start + gets])
    name = "scan" if scan else "zipf"
    return Workload(name, stream, slots, start)


# ---- traces ------------------------------------------------------------------------


def _from_requests(requests: Iterable[Sequence[int]]) -> Stream:
    kept = [request for request in requests if len(request)]
    ends = np.cumsum([len(request) for request in kept], dtype=np.uint64)
    flat = np.fromiter(
        (block for request in kept for block in request), np.uint64, int(ends[-1])
    )
    blocks, names = _dense(flat)
    return Stream(blocks, ends, len(names))


def read_trace(path: Path) -> Stream:
    """Read JSON lines in the Mooncake format: the blocks of a request in ``hash_ids``.

    ``ValueError`` names the line that is not like that.
    """
    requests = []
    with open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                blocks = json.loads(line)["hash_ids"]
                if not all(isinstance(block, int) and block >= 0 for block in blocks):
                    raise TypeError("hash_ids must be numbers from 0 on")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
            requests.append(blocks)
    if not any(requests):
        raise ValueError(f"{path} has no block in it")
    return _from_requests(requests)


def generated_trace(
    conversations: int = 1500, *, seed: int = 1
) -> list[dict[str, object]]:
    """Make up conversations of several turns, as records in the Mooncake format.

    Some share one of a few system prompts; each turn repeats what was said before and
    adds to it; turns of many conversations interleave, with pauses of very different
    lengths.  A block is 512 tokens.
    """
    random = np.random.default_rng(seed)
    block_tokens = 512
    next_block = 0
    prompts = []
    for length in (2, 6, 12, 24):
        prompts.append(list(range(next_block, next_block + length)))
        next_block += length
    records: list[tuple[float, int, int, list[int]]] = []
    for _ in range(conversations):
        at = random.uniform(0, 3_600_000)
        chain = list(prompts[random.choice(4, p=[0.4, 0.3, 0.2, 0.1])])
        going_on = 0.35 if random.random() < 0.5 else 0.8
        while True:
            added = 1 + int(random.lognormal(1.6, 1.0))
            chain.extend(range(next_block, next_block + added))
            next_block += added
            output = int(random.lognormal(5.5, 0.8))
            tokens = (len(chain) - 1) * block_tokens + int(random.integers(1, 513))
            records.append((at, tokens, output, list(chain)))
            if random.random() >= going_on or len(chain) > 240:
                break
            at += random.lognormal(10.8, 1.3)
    records.sort(key=lambda record: record[0])
    return [
        {
            "timestamp": int(at),
            "input_length": tokens,
            "output_length": output,
            "hash_ids": blocks,
        }
        for at, tokens, output, blocks in records
    ]


def _blocks_of(record: Mapping[str, object]) -> list[int]:
    blocks = record["hash_ids"]
    assert isinstance(blocks, list)
    return blocks


@functools.lru_cache(maxsize=8)
def _trace_stream(path: Path | None) -> Stream:
    if path is not None:
        return read_trace(path)
    return _from_requests(_blocks_of(record) for record in generated_trace())


def trace(path: Path | None, divisor: int, *, name: str = "") -> Workload:
    """Return a trace at 1/``divisor`` of its distinct blocks; None: a made-up one."""
    stream = _trace_stream(path)
    name = name or (path.stem if path is not None else "made-up")
    return Workload(f"{name}/{divisor}", stream, max(stream.universe // divisor, 1))


# ---- what drifts -------------------------------------------------------------------


def _zipf(random: np.random.Generator, n: int, count: int) -> NDArray[np.int64]:
    weights = np.cumsum(np.arange(1, n + 1, dtype=np.float64) ** -_THETA)
    ranks: NDArray[np.int64] = np.searchsorted(
        weights, random.random(count) * weights[-1]
    )
    return ranks


def _abrupt(random: np.random.Generator, c: int, count: int) -> NDArray[np.int64]:
    """Zipf; every 20 C accesses all keys change their ranks."""
    n, period = 3 * c, 20 * c
    parts = [
        random.permutation(n)[_zipf(random, n, min(period, count - at))]
        for at in range(0, count, period)
    ]
    return np.concatenate(parts)


def _fresh(random: np.random.Generator, c: int, count: int) -> NDArray[np.int64]:
    """Zipf; every 25 accesses a random rank gets a key that was never there."""
    n, period = 3 * c, 25
    ranks = _zipf(random, n, count)
    keys = np.arange(n)
    next_key = n
    for at in range(0, count, period):
        part = ranks[at : at + period]
        keys[random.integers(n)] = next_key
        next_key += 1
        ranks[at : at + period] = keys[part]
    return ranks


def _phases(random: np.random.Generator, c: int, count: int) -> NDArray[np.int64]:
    """Every 3 C accesses a new working set: 3/4 C keys, all as popular."""
    size, period = 3 * c // 4, 3 * c
    at = np.arange(count)
    return at // period * size + random.integers(size, size=count)


def _loop(factor: float, c: int, count: int) -> NDArray[np.int64]:
    return np.arange(count) % int(factor * c)


def _shift(random: np.random.Generator, c: int, count: int) -> NDArray[np.int64]:
    """Zipf whose ranks wander: every 200 accesses each key takes the next one's."""
    n = 3 * c
    order = random.permutation(n)
    at = (_zipf(random, n, count) + np.arange(count) // 200) % n
    keys: NDArray[np.int64] = order[at]
    return keys


def _scan_and_drift(
    random: np.random.Generator, c: int, count: int
) -> NDArray[np.int64]:
    """Drift as in fresh; of ten accesses two belong to scans of a quarter of C."""
    keys = _fresh(random, c, count)
    scanned = int(keys.max()) + 1
    length = c // 4
    at = 0
    while at + 5 * length <= count:  # a scan in each 5 lengths
        begin = at + int(random.integers(3 * length))
        every = np.arange(begin, begin + 2 * length, 2)
        keys[every] = scanned + np.arange(length)
        scanned += length
        at += 5 * length
    return keys


def _tenants(random: np.random.Generator, c: int, count: int) -> NDArray[np.int64]:
    """Eight tenants of 3/4 C keys each, one of them loud.

    It asks for 70 % of all, in a burst of C/2 to 4 C accesses; two of the eight never
    repeat a key.
    """
    tenants, n = 8, 3 * c // 4
    owner = np.empty(count, dtype=np.int64)
    at = 0
    while at < count:
        length = int(random.integers(c // 2, 4 * c))
        burst = slice(at, at + length)
        size = len(owner[burst])
        loud = random.random(size) < 0.7
        owner[burst] = np.where(
            loud, random.integers(tenants), random.integers(tenants, size=size)
        )
        at += length
    keys = owner * n + _zipf(random, n, count)
    once = owner < 2
    keys[once] = tenants * n + np.arange(int(once.sum()))
    return keys


_DRIFTING = {
    "drift-abrupt": _abrupt,
    "drift-fresh": _fresh,
    "phases": _phases,
    "loop-0.9": lambda random, c, count: _loop(0.9, c, count),
    "loop-1.25": lambda random, c, count: _loop(1.25, c, count),
    "rank-shift": _shift,
    "scan+drift": _scan_and_drift,
    "tenants": _tenants,
}


def drifting(
    capacity: int = 4096, accesses: int = 600_000, *, seed: int = 7
) -> list[Workload]:
    """Return the streams whose popularity changes, at ``capacity`` blocks.

    The first five capacities of accesses warm up.
    """
    result = []
    for name, make in _DRIFTING.items():
        values = make(np.random.default_rng(seed), capacity, accesses)
        blocks, names = _dense(values.astype(np.uint64))
        stream = Stream(blocks, None, len(names))
        result.append(Workload(name, stream, capacity, 5 * capacity))
    return result
