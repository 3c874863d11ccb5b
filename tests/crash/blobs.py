# SPDX-License-Identifier: Apache-2.0
"""Blocks that tell where they come from: each word is a function of key and place.

A foreign, shifted, torn or zeroed word shows at once, whoever reads it.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["blob", "fault_of", "key_of", "right"]

_STEP = np.uint64(0x9E3779B97F4A7C15)


def key_of(*parts: object) -> bytes:
    """A 32-byte key of anything printable."""
    return hashlib.sha256(repr(parts).encode()).digest()


def _words(key: bytes, version: int, count: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    seed = (seed + version * 0xD1B54A32D192ED03) % 2**64
    with np.errstate(over="ignore"):
        return np.arange(count, dtype=np.uint64) * _STEP + np.uint64(seed)


def blob(key: bytes, length: int, version: int = 0) -> bytes:
    """The payload of `key`: `length` bytes, different for each version."""
    return _words(key, version, (length + 7) // 8).tobytes()[:length]


def right(data: object, key: bytes, length: int, version: int = 0) -> bool:
    """Whether `data` is exactly that payload."""
    return bytes(memoryview(data)) == blob(key, length, version)  # type: ignore[arg-type]


def fault_of(data: object, key: bytes, length: int, version: int = 0) -> str:
    """What is wrong with `data`, in words, for the message of a failed test."""
    found = bytes(memoryview(data))  # type: ignore[arg-type]
    wanted = blob(key, length, version)
    if len(found) != len(wanted):
        return f"{len(found)} bytes instead of {len(wanted)}"
    if found == wanted:
        return "nothing"
    at = next(i for i in range(length) if found[i] != wanted[i])
    return f"differs from byte {at} of {length} on: {found[at : at + 16].hex()}"
