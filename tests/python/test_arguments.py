# SPDX-License-Identifier: Apache-2.0
"""Whatever a method is given, it answers or raises: never a crash or a SystemError."""

from __future__ import annotations

import array
import ctypes
import gc
import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyclone_kv import Cache, CacheConfig, _core, arrays, parse_size

from .conftest import key_of

KEYS = [key_of(number) for number in range(4)] + [b"short", b"x" * 100]
METHODS = sorted(
    name
    for name, value in inspect.getmembers(Cache, callable)
    if name not in {"open", "close", "_open"} and not name.startswith("__")
)
NAMES = [
    *("chain", "data", "header", "key", "keys", "limit", "nbytes", "overwrite"),
    *("parent", "progress", "repair", "since", "target", "targets", "touch", "wrong"),
]


class Hostile:
    """Every protocol that the binding may call; some answers close the cache."""

    def __init__(self, action: int) -> None:
        self.action = action
        self.cache: Cache | None = None

    def act(self) -> int:
        if self.action == 0 and self.cache is not None:
            self.cache.close()
        if self.action == 1:
            raise ZeroDivisionError
        return self.action

    def __index__(self) -> int:
        return self.act() * 1000 - 2000

    def __bool__(self) -> bool:
        return self.act() > 3

    def __len__(self) -> int:
        return self.act()

    def __getitem__(self, index: int) -> object:
        if index >= self.act():
            raise IndexError
        return (KEYS[0], bytearray(10))

    def __iter__(self) -> Iterator[object]:
        for _ in range(self.act()):
            yield (KEYS[1], [bytearray(10)])

    def __call__(self, *arguments: object) -> object:
        return self.act()


def buffers() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from(KEYS),
        st.binary(max_size=70),
        st.integers(0, 20_000).map(bytearray),
        st.integers(0, 300).map(lambda n: memoryview(bytearray(n))),
        st.sampled_from([b"z" * 65_535, b"z" * 65_536]),
        st.builds(lambda n: memoryview(bytearray(64))[::n], st.sampled_from([2, -1])),
        st.builds(
            lambda n, m: np.zeros((n, m), "u1"), st.integers(0, 3), st.integers(0, 33)
        ),
        st.just(np.asfortranarray(np.zeros((3, 32), "u1"))),
        st.just(np.zeros((2, 2, 32), "u1")),
        st.just(np.zeros(3, dtype="O")),
        st.just(np.array(5)),
        st.builds(
            lambda kind, n: array.array(kind, range(n)),
            st.sampled_from("bHlQd"),
            st.integers(0, 70),
        ),
        st.just((ctypes.c_char * 32)()),
    )


def scalars() -> st.SearchStrategy[Any]:
    edges = [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400]
    return st.one_of(
        st.sampled_from([*edges, *(-edge for edge in edges)]),
        st.none(),
        st.booleans(),
        st.floats(),
        st.text(max_size=5),
        st.builds(Hostile, st.integers(0, 5)),
        st.builds(object),
    )


JUNK = st.recursive(
    buffers() | scalars(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(st.tuples(st.sampled_from(KEYS), inner), max_size=4),
        st.lists(inner, max_size=3).map(iter),
        st.dictionaries(st.sampled_from([b"k", "k", 1]), inner, max_size=2),
    ),
    max_leaves=12,
)
CALLS = st.tuples(
    st.sampled_from(METHODS),
    st.lists(JUNK, max_size=3),
    st.booleans(),
    st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=2),
)


def arm(value: object, cache: Cache) -> None:
    if isinstance(value, Hostile):
        value.cache = cache
    elif isinstance(value, (list, tuple)):
        for item in value:
            arm(item, cache)


def check(call: Callable[..., object], *arguments: Any, **named: Any) -> object:
    try:
        return call(*arguments, **named)
    except SystemError:  # the binding broke a rule of the interpreter
        raise
    except Exception:
        return None


def use(result: object) -> None:
    """Looks at what came back, as its user would."""
    if isinstance(result, memoryview):
        assert len(bytes(result)) == result.nbytes
    elif hasattr(result, "commit"):
        check(lambda: bytes(result.view))
        check(result.commit if hasattr(result, "view") else result.abort)
    elif inspect.isgenerator(result):
        check(list, result)
    repr(result)


@settings(suppress_health_check=list(HealthCheck))
@given(calls=st.lists(CALLS, max_size=20))
def test_junk_arguments_only_raise(calls: list[Any]) -> None:
    shm = Path("/dev/shm")
    with (
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder,
        Cache.open(f"{folder}/kv.cyc", CacheConfig(capacity="16MiB")) as cache,
    ):
        warnings.simplefilter("ignore")
        cache.put(KEYS[0], bytes(100))
        results: list[object] = []
        result = None
        for name, arguments, with_key, named in calls:
            arm([arguments, list(named.values())], cache)
            key = [KEYS[0]] if with_key else []
            result = check(getattr(cache, name), *key, *arguments[len(key) :], **named)
            use(result)
            results.append(result)
        del result, results[:]
        gc.collect()
        cache.close()
        with Cache.open(f"{folder}/kv.cyc") as again:
            report = again.verify()
            assert report.ok, report.first_fault
            assert again.stats().volume.pinned_entries == 0


@given(
    arguments=st.lists(JUNK, max_size=3),
    named=st.dictionaries(
        st.sampled_from(sorted(CacheConfig().to_dict())), JUNK, max_size=2
    ),
)
def test_junk_for_functions_only_raises(
    arguments: list[Any], named: dict[str, Any]
) -> None:
    for function in (_core.crc32c, parse_size, arrays.as_numpy, _core.Cache):
        check(function, *arguments)
    check(CacheConfig, **named)
    check(_core.Cache()._open, *arguments)
    check(Cache.open, *arguments)
