# SPDX-License-Identifier: Apache-2.0
"""The simulator in C, compiled at its first use, and its structures."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Arm",
    "Filter",
    "Kind",
    "Options",
    "Outcome",
    "Stream",
    "churn_indices",
    "replay",
    "warm_up",
]

_SOURCES = Path(__file__).parent / "simulator"
_BUILD = Path(__file__).resolve().parents[2] / "build" / "policy"
_FLAGS = ("-std=c17", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared")
_ARMS_MAX = 4


class Kind(enum.IntEnum):
    """The models; in the order of ``enum kind`` in policy.h."""

    LRU = 0
    CLOCK = 1
    FLUSH = 2
    RETENTION = 3
    DUEL = 4
    SIEVE = 5
    S3FIFO = 6
    WTINYLFU = 7
    ARC = 8
    GITTINS = 9
    MINIMUM = 10


class Filter(enum.IntEnum):
    """What an arm admits to a full tier."""

    NONE = 0
    SECOND_TOUCH = 1
    FREQUENCY = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """A rule of admission with a maximum of the counter."""

    filter: Filter = Filter.NONE
    counter_max: int = 2
    ghost: float = 1.0
    """Keys that the ghost remembers, in capacities."""
    threshold: int = 2
    """Uses that FREQUENCY asks for."""
    known: int = 0
    """Leading blocks of a request that are held or remembered from which on the rest is
    admitted, whatever the filter says; 0: no such rule."""
    heat: int = 0
    """At insertion, of what the ghost remembers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """One policy.  Names and meanings are those of ``struct options`` in policy.h."""

    kind: Kind
    stripes: int = 1
    by_key: bool = False
    head_first: bool = False
    counter_max: int = 2
    search_max: int = 256
    chunks: int = 64
    lead: float = 1 / 64
    small: float = 0.1
    arms: tuple[Arm, ...] = ()
    sample_log2: int = 3
    salt: int = 0
    enter: float = 0.05
    leave: float = 0.05
    memory: float = 4.0
    sample_min: int = 0
    switch_min: float = 0.0
    forget: int = 0
    flags: int = 0
    aim: int = 8
    ghosts: int = 2
    piece: int = 0


@dataclasses.dataclass(frozen=True)
class Stream:
    """Requests: ``blocks`` below ``universe``; ``ends`` None: one block each."""

    blocks: NDArray[np.uint32]
    ends: NDArray[np.uint64] | None
    universe: int
    stripes: NDArray[np.uint8] | None = None
    """Of each block, for the policies that place by key."""

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self.blocks) if self.ends is None else len(self.ends)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a replay counted."""

    accesses: int
    hits: int
    offers: int
    writes: int
    passed: int
    switches: int
    walk_max: int
    stranded: int
    """Accesses to blocks that were held, but behind a gap of their chain."""

    @property
    def hit_ratio(self) -> float:
        """Hits of all accesses."""
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def writes_per_miss(self) -> float:
        """Blocks written for each access that missed."""
        misses = self.accesses - self.hits
        return self.writes / misses if misses else 0.0


class _Arm(ctypes.Structure):
    _fields_ = [
        ("filter", ctypes.c_uint32),
        ("counter_max", ctypes.c_uint32),
        ("ghost", ctypes.c_double),
        ("threshold", ctypes.c_uint32),
        *((name, ctypes.c_uint32) for name in ("known", "heat", "pad")),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("kind", "capacity", "stripes")),
        *((name, ctypes.c_uint32) for name in ("placement", "order", "counter_max")),
        *((name, ctypes.c_uint32) for name in ("search_max", "chunks")),
        *((name, ctypes.c_double) for name in ("lead", "small")),
        *((name, ctypes.c_uint32) for name in ("arm_count", "sample_log2")),
        *((name, ctypes.c_uint32) for name in ("salt", "sample_min")),
        *(
            (name, ctypes.c_double)
            for name in ("enter", "leave", "switch_min", "memory")
        ),
        ("arms", _Arm * _ARMS_MAX),
        *((name, ctypes.c_uint32) for name in ("forget", "pad")),
        *((name, ctypes.c_uint32) for name in ("flags", "aim", "ghosts", "piece")),
    ]


class _Stream(ctypes.Structure):
    _fields_ = [
        ("block_count", ctypes.c_uint64),
        ("request_count", ctypes.c_uint64),
        ("blocks", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("stripes", ctypes.c_void_p),
        ("universe", ctypes.c_uint32),
    ]


class _Result(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("accesses", "hits", "offers", "writes", "passed", "switches"),
            *("warm_up_requests", "walk_max", "stranded"),
        )
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        raise RuntimeError(f"no C compiler {compiler!r}: install gcc or set CC")
    sources = sorted(_SOURCES.glob("*.[ch]"))
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True)
    digest = hashlib.sha256(version.stdout + repr(_FLAGS).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    target = _BUILD / f"policy-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILD) as scratch:
            made = Path(scratch, "policy.so")
            names = [str(source) for source in sources if source.suffix == ".c"]
            command = [compiler, *_FLAGS, *names, "-o", str(made), "-lm"]
            subprocess.run(command, check=True)
            os.replace(made, target)
    library = ctypes.CDLL(str(target))
    library.policy_warm_up.restype = ctypes.c_uint64
    library.policy_warm_up.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64),
    )
    library.policy_replay.argtypes = (
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p),
    )
    library.churn_fill.argtypes = (
        *(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_int),
        *(ctypes.c_uint64, ctypes.c_void_p),
    )
    return library


def _address(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def _fit(ends: NDArray[np.uint64], blocks: int) -> bool:
    return int(ends[-1]) == blocks and not bool((ends[1:] < ends[:-1]).any())


def _native_stream(stream: Stream) -> _Stream:
    expected: tuple[tuple[NDArray[Any] | None, Any], ...] = (
        (stream.blocks, np.uint32),
        (stream.ends, np.uint64),
        (stream.stripes, np.uint8),
    )
    for array, kind in expected:
        if array is not None and (
            array.dtype != kind or not array.flags["C_CONTIGUOUS"]
        ):
            raise TypeError(f"an array of {array.dtype}, not a contiguous {kind}")
    if len(stream.blocks) and int(stream.blocks.max()) >= stream.universe:
        raise ValueError(f"a block is not below the universe of {stream.universe}")
    if stream.stripes is not None and len(stream.stripes) < stream.universe:
        raise ValueError("there are fewer stripes than blocks in the universe")
    ends = stream.ends
    if ends is not None and len(ends) and not _fit(ends, len(stream.blocks)):
        raise ValueError("the ends of the requests do not fit the blocks")
    return _Stream(
        block_count=len(stream.blocks),
        request_count=stream.requests,
        blocks=_address(stream.blocks),
        ends=_address(stream.ends),
        stripes=_address(stream.stripes),
        universe=stream.universe,
    )


def replay(
    stream: Stream, options: Options, capacity: int, *, from_request: int = 0
) -> Outcome:
    """Replay a stream through a model of ``capacity`` blocks, empty at first.

    What comes before request ``from_request`` warms the model up and is not counted.
    """
    if len(options.arms) > _ARMS_MAX:
        raise ValueError(f"{len(options.arms)} arms; at most {_ARMS_MAX}")
    arms = (_Arm * _ARMS_MAX)(
        *(
            _Arm(
                *(arm.filter, arm.counter_max, arm.ghost),
                *(arm.threshold, arm.known, arm.heat, 0),
            )
            for arm in options.arms
        )
    )
    native = _Options(
        kind=options.kind,
        capacity=capacity,
        stripes=options.stripes,
        placement=options.by_key,
        order=options.head_first,
        counter_max=options.counter_max,
        search_max=options.search_max,
        chunks=options.chunks,
        lead=options.lead,
        small=options.small,
        arm_count=len(options.arms),
        sample_log2=options.sample_log2,
        salt=options.salt,
        enter=options.enter,
        leave=options.leave,
        memory=options.memory,
        sample_min=options.sample_min,
        switch_min=options.switch_min,
        arms=arms,
        forget=options.forget,
        flags=options.flags,
        aim=options.aim,
        ghosts=options.ghosts,
        piece=options.piece,
    )
    result = _Result()
    status = _library().policy_replay(
        *(ctypes.byref(_native_stream(stream)), ctypes.byref(native)),
        *(from_request, ctypes.byref(result)),
    )
    if status != 0:
        raise ValueError(f"the simulator refuses {options} at {capacity} blocks")
    return Outcome(
        *(result.accesses, result.hits, result.offers, result.writes),
        *(result.passed, result.switches, result.walk_max, result.stranded),
    )


def warm_up(stream: Stream, capacity: int, misses: int) -> int:
    """Return after how many requests an LRU of ``capacity`` blocks missed so often."""
    native = _native_stream(stream)
    return int(_library().policy_warm_up(ctypes.byref(native), capacity, misses))


def churn_indices(
    universe: int, thread: int, count: int, *, scan: bool = False
) -> NDArray[np.uint64]:
    """Return the first indices of ``bench.generators.churn_stream``."""
    indices = np.empty(count, dtype=np.uint64)
    status = _library().churn_fill(universe, thread, scan, count, _address(indices))
    if status != 0:
        raise ValueError(f"no churn stream over {universe} keys")
    return indices
