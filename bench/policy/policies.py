# SPDX-License-Identifier: Apache-2.0
"""The policies by name."""

from __future__ import annotations

import dataclasses

from bench.policy.native import Arm, Filter, Kind, Options

__all__ = [
    "ENGINE_STRIPES",
    "OTHERS",
    "OURS",
    "PREFIX_FLAGS",
    "WHOLE_CHAIN",
    "duel",
    "engine_adaptive",
    "engine_clock",
    "engine_prefix",
    "prefix",
    "second_touch",
    "three_arms",
]

ENGINE_STRIPES = 4

WHOLE_CHAIN = 2**32 - 1
"""As ``Arm.known``: of a chain stored tail first, what leads to a known block."""

_SECOND_TOUCH = Arm(filter=Filter.SECOND_TOUCH)


def engine_clock(stripes: int = ENGINE_STRIPES, counter_max: int = 2) -> Options:
    """Return the clock of the engine with everything admitted."""
    return Options(kind=Kind.CLOCK, stripes=stripes, counter_max=counter_max)


def duel(
    *arms: Arm,
    stripes: int = ENGINE_STRIPES,
    enter: float = 0.05,
    leave: float = 0.05,
    memory: float = 4.0,
    sample_log2: int = 3,
    salt: int = 0,
    sample_min: int = 1024,
    switch_min: float = 16,
) -> Options:
    """Return admission by shadow rings; without arms all and second touch, 1 C."""
    return Options(
        kind=Kind.DUEL,
        stripes=stripes,
        arms=arms or (Arm(), _SECOND_TOUCH),
        enter=enter,
        leave=leave,
        memory=memory,
        sample_log2=sample_log2,
        salt=salt,
        sample_min=sample_min,
        switch_min=switch_min,
    )


def second_touch(stripes: int = ENGINE_STRIPES) -> Options:
    """Return a clock that, when full, takes only what its ghost of 1 C knows."""
    return duel(_SECOND_TOUCH, stripes=stripes)


def engine_adaptive(stripes: int = ENGINE_STRIPES, salt: int = 0) -> Options:
    """Return admission as the engine has it.

    It goes back to all as soon as that misses less, and admits of a chain what precedes
    a block that its ghost knows.
    """
    second = Arm(filter=Filter.SECOND_TOUCH, known=WHOLE_CHAIN)
    adaptive = duel(Arm(), second, stripes=stripes, leave=0, salt=salt)
    return dataclasses.replace(adaptive, forget=10)


def three_arms(stripes: int = ENGINE_STRIPES) -> Options:
    """Return a choice of all, and second touch with a ghost of 2 C or of a half.

    It goes back to all as soon as that misses less.
    """
    arms = (Arm(filter=Filter.SECOND_TOUCH, ghost=ghost) for ghost in (2.0, 0.5))
    return duel(Arm(), *arms, stripes=stripes, leave=0)


# Flags of gittins.c.
ANY_VICTIM, NO_CLOSURE, AGE_ONLY, NO_REFUSAL, HEAD_FIRST, LATE = 1, 2, 4, 8, 16, 32
NO_TURN, NO_DEPTH, NO_END, HIT_NO_END, TWICE, DEBOUNCE = 64, 128, 256, 512, 1024, 2048


BUCKETS = 262144


PREFIX_FLAGS = NO_TURN | DEBOUNCE | LATE


def prefix(
    *, stripes: int = ENGINE_STRIPES, flags: int = PREFIX_FLAGS, salt: int = 0
) -> Options:
    """Return prefix eviction as an engine can do it.

    Turns are not known, repeated sights ignored, nothing is refused in the first lap.
    """
    return Options(kind=Kind.GITTINS, stripes=stripes, flags=flags, salt=salt)


def engine_prefix(stripes: int = ENGINE_STRIPES, salt: int = 0) -> Options:
    """Return prefix eviction as the engine has it: its ghost is made of buckets."""
    return prefix(stripes=stripes, flags=PREFIX_FLAGS | BUCKETS, salt=salt)


OURS: dict[str, Options] = {
    "CLOCK": engine_clock(counter_max=1),
    "GCLOCK2": engine_clock(),
    "GCLOCK3": engine_clock(counter_max=3),
    "second touch": second_touch(),
    "DUEL5": duel(),
    "three arms": three_arms(),
    "prefix": prefix(),
}
"""What a ring in place can do, on stripes in lockstep, chains tail first."""

OTHERS: dict[str, Options] = {
    "LRU": Options(kind=Kind.LRU),
    "FIFO": Options(kind=Kind.CLOCK, counter_max=0),
    "retain/64": Options(kind=Kind.RETENTION, stripes=16, by_key=True, head_first=True),
    "S3-FIFO": Options(kind=Kind.S3FIFO),
    "SIEVE": Options(kind=Kind.SIEVE),
    "W-TinyLFU": Options(kind=Kind.WTINYLFU, small=0.01),
    "ARC": Options(kind=Kind.ARC),
    "MIN": Options(kind=Kind.MINIMUM),
}
"""What others do, and the bound."""
