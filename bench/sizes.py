# SPDX-License-Identifier: Apache-2.0
"""Sizes for people."""

from __future__ import annotations

__all__ = ["GIB", "KIB", "MIB", "human_size"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def human_size(nbytes: int) -> str:
    """Return 65536 as "64 KiB"."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"
