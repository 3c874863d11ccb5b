# SPDX-License-Identifier: Apache-2.0
"""Keys, values and request streams that are the same on every machine.

Spec v1 (blocks) and churn v1 (streams): xorshift64* everywhere; ``vectors`` has results
to compare with, from other implementations.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "SCAN_BASE",
    "XorShift",
    "Zipf",
    "churn_stream",
    "key",
    "metadata",
    "permutation",
    "value",
    "values",
    "zipf_order",
]

_Words = NDArray[np.uint64]

_MASK = 2**64 - 1
_MULTIPLIER = 0x2545F4914F6CD1DB
_ZERO_SEED = 0x9E3779B97F4A7C15
_PERMUTATION_SEED = 0x243F6A8885A308D3
_ZIPF_SEED = 42
_SCAN_SEED = 1000003
_SCAN_SHARE = 0.1
_LANES = 4096  # states that advance together; wide enough to hide numpy's overhead

SCAN_BASE = 2**40
"""Indices from here on are keys that a scan asks for once."""


class XorShift:
    """xorshift64*: a stream of 64-bit numbers."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK or _ZERO_SEED

    def next(self) -> int:
        """Return the next number."""
        state = self._state
        state ^= state >> 12
        state ^= state << 25 & _MASK
        state ^= state >> 27
        self._state = state
        return state * _MULTIPLIER & _MASK

    def uniform(self) -> float:
        """Return the next number as a float in [0, 1)."""
        return float(self.next() >> 11) * 2.0**-53


def key(index: int) -> bytes:
    """Return the key of block ``index``: 32 bytes."""
    return hashlib.sha256(b"prefix-%d" % index).digest()


def metadata(index: int) -> bytes:
    """Return the user header of block ``index``: 64 bytes."""
    return key(index) * 2


def _step(states: _Words) -> None:
    states ^= states >> np.uint64(12)
    states ^= states << np.uint64(25)
    states ^= states >> np.uint64(27)


def _apply(columns: _Words, states: _Words) -> _Words:
    """Multiply each state, a vector of 64 bits, by a matrix over GF(2)."""
    result = np.zeros_like(states)
    for bit in range(64):
        result ^= columns[bit] * (states >> np.uint64(bit) & np.uint64(1))
    return result


@functools.cache
def _jump(log2_steps: int) -> _Words:
    """Return the matrix of 2**log2_steps steps, by columns."""
    if log2_steps > 0:
        half = _jump(log2_steps - 1)
        return _apply(half, half)
    columns = np.uint64(1) << np.arange(64, dtype=np.uint64)
    _step(columns)
    return columns


def values(indices: Sequence[int], nbytes: int) -> NDArray[np.uint8]:
    """Return the payloads of some blocks, one a row; ``nbytes`` a multiple of 8.

    The stream of a block is cut into lanes that start at equal distances, and all lanes
    advance at once.  A step is linear over GF(2), so a jump is a product of matrices.
    """
    words = nbytes // 8
    if nbytes % 8 or words == 0:
        raise ValueError(f"nbytes is {nbytes}; it must be a positive multiple of 8")
    lanes = 1
    while lanes * len(indices) < _LANES and words % (lanes * 2) == 0:
        lanes *= 2
    steps = words // lanes
    states = np.array(
        [index & _MASK or _ZERO_SEED for index in indices], dtype=np.uint64
    )[:, np.newaxis]
    if steps & (steps - 1) == 0:
        for level in range(lanes.bit_length() - 1):
            jumped = _apply(_jump((steps << level).bit_length() - 1), states)
            states = np.concatenate([states, jumped], axis=1)
    else:
        lanes, steps = 1, words
    output = np.empty((steps, len(indices), lanes), dtype=np.uint64)
    for step in range(steps):
        _step(states)
        np.multiply(states, np.uint64(_MULTIPLIER), out=output[step])
    ordered = np.ascontiguousarray(output.transpose(1, 2, 0), dtype="<u8")
    return ordered.reshape(len(indices), words).view(np.uint8)


def value(index: int, nbytes: int) -> bytes:
    """Return the payload of block ``index``; shorter are prefixes of longer ones."""
    return values([index], nbytes).tobytes()


class Zipf:
    """Ranks 0 .. n-1, rank 0 the most frequent (theta 0.99)."""

    def __init__(self, n: int, theta: float = 0.99) -> None:
        zeta = 0.0
        for i in range(1, n + 1):
            zeta += float(i) ** -theta
        self._n = n
        self._theta = theta
        self._zeta = zeta
        self._alpha = 1.0 / (1.0 - theta)
        zeta2 = 1.0 + 2.0**-theta
        self._eta = 0.0  # not needed for ranks 0 and 1
        if n > 2:
            self._eta = (1.0 - (2.0 / n) ** (1.0 - theta)) / (1.0 - zeta2 / zeta)

    def rank(self, random: XorShift) -> int:
        """Return the next rank of the stream ``random``."""
        u = random.uniform()
        z = u * self._zeta
        if z < 1.0:
            return 0
        if z < 1.0 + 0.5**self._theta:
            return 1
        rank = int(self._n * (self._eta * u - self._eta + 1.0) ** self._alpha)
        return min(self._n - 1, rank)


def permutation(n: int) -> list[int]:
    """Return which key index each rank has (Fisher-Yates, fixed seed)."""
    random = XorShift(_PERMUTATION_SEED)
    result = list(range(n))
    for i in range(n - 1, 0, -1):
        j = random.next() % (i + 1)
        result[i], result[j] = result[j], result[i]
    return result


def churn_stream(universe: int, thread: int, *, scan: bool = False) -> Iterator[int]:
    """Yield the key indices that one thread asks for, without end.

    With ``scan`` one request in ten is for a key that is never asked for again.
    """
    ranks = Zipf(universe)
    order = permutation(universe)
    random = XorShift(_ZIPF_SEED + thread)
    choice = XorShift(_SCAN_SEED + thread)
    scanned = SCAN_BASE + (thread << 32)
    while True:
        if scan and choice.uniform() < _SCAN_SHARE:
            yield scanned
            scanned += 1
        else:
            yield order[ranks.rank(random)]


def zipf_order(count: int, thread: int, draws: int) -> list[int]:
    """Return the first ``draws`` blocks of ``count`` that a reading thread asks for."""
    ranks, random = Zipf(count), XorShift(_ZIPF_SEED + thread)
    return [ranks.rank(random) for _ in range(draws)]
