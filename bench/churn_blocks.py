# SPDX-License-Identifier: Apache-2.0
"""Payloads made in C, without the GIL: a payload between two calls must cost little.

The C file is compiled at its first use; where there is no compiler, numpy makes the
same bytes some ten times slower, and ``made_by`` says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from bench import generators

__all__ = ["BlockMaker", "equal", "made_by"]

_SOURCE = Path(__file__).with_name("churn_blocks.c")
_LANES = 8
_ZERO_SEED = 0x9E3779B97F4A7C15

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@functools.cache
def _library() -> ctypes.CDLL | None:
    text = _SOURCE.read_bytes()
    name = f"churn_blocks-{hashlib.sha256(text).hexdigest()[:16]}.so"
    folder = Path(__file__).resolve().parents[1] / "build"
    target = folder / name
    if not target.exists():
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        try:
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / name
                options = ["-O3", "-std=c17", "-shared", "-fPIC"]
                subprocess.run(
                    [compiler, *options, str(_SOURCE), "-o", str(made)],
                    check=True,
                    capture_output=True,
                )
                os.replace(made, target)
        except (OSError, subprocess.CalledProcessError):
            return None
    library = ctypes.CDLL(str(target))
    library.churn_jump.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
    library.churn_jump.restype = None
    library.churn_fill.argtypes = [ctypes.c_uint64] + [ctypes.c_void_p] * 2
    library.churn_fill.argtypes += [ctypes.c_size_t]
    library.churn_fill.restype = None
    return library


def made_by() -> str:
    """Return what makes the payloads: "C" or "numpy"."""
    return "numpy" if _library() is None else "C"


def address_of(buffer: memoryview) -> int:
    """Return where a writable buffer lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def equal(left: memoryview, right: memoryview) -> bool:
    """Return whether two writable buffers hold the same bytes; the GIL is released."""
    return len(left) == len(right) and not _libc.memcmp(
        address_of(left), address_of(right), len(left)
    )


class BlockMaker:
    """Makes payloads of one size; may be used by many threads at once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        library = _library() if sys.byteorder == "little" else None
        if nbytes % (8 * _LANES):
            library = None
        self._library = library
        self._matrix = (ctypes.c_uint64 * 64)()
        if library is not None:
            library.churn_jump(nbytes // 8 // _LANES, self._matrix)

    def fill(self, index: int, target: memoryview) -> None:
        """Write the payload of block ``index`` into ``target``, writable, 8-aligned."""
        if len(target) != self.nbytes:
            raise ValueError(f"the target has {len(target)} bytes, not {self.nbytes}")
        if self._library is None:
            target[:] = generators.values([index], self.nbytes)[0].data
            return
        self._library.churn_fill(
            index or _ZERO_SEED, self._matrix, address_of(target), self.nbytes // 8
        )
