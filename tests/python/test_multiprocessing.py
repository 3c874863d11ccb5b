# SPDX-License-Identifier: Apache-2.0
"""fork, forkserver and spawn, as multiprocessing does them, with open caches."""

from __future__ import annotations

import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cyclone_kv import Cache, CacheConfig, ForkedError

from .conftest import CAPACITY, key_of

METHODS = ["fork", "forkserver", "spawn"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning"),
    # The helpers of multiprocessing are started under an uninstrumented interpreter.
    pytest.mark.parametrize("method", METHODS),
]


def store_own(path: str, number: int) -> tuple[bytes | None, bool]:
    """What a child does: a handle of its own, on the same volume."""
    with Cache.open(path, CacheConfig(capacity=CAPACITY)) as cache:
        view = cache.get(key_of(1))
        return None if view is None else bytes(view), cache.put(key_of(number), b"own")


def run_own(path: str, end: Connection) -> None:
    end.send(store_own(path, 2))
    end.close()


def test_a_child_opens_the_volume_itself(volume_path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    with Cache.open(volume_path, CacheConfig(capacity=CAPACITY)) as cache:
        assert cache.put(key_of(1), b"of the parent")
        view = cache.get(key_of(1))
        ours, theirs = context.Pipe()
        child = context.Process(target=run_own, args=(str(volume_path), theirs))
        child.start()
        theirs.close()
        assert ours.recv() == (b"of the parent", True)
        child.join(60)
        assert child.exitcode == 0
        assert cache.get(key_of(2)) == b"own"
        assert view == b"of the parent"
        assert cache.put(key_of(3), b"after")
        ours.close()


def test_workers_share_a_volume(volume_path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    with (
        Cache.open(volume_path, CacheConfig(capacity=CAPACITY)) as cache,
        ProcessPoolExecutor(2, mp_context=context) as pool,
    ):
        assert cache.put(key_of(1), b"x")
        jobs = [pool.submit(store_own, str(volume_path), n) for n in range(10, 18)]
        assert [job.result(60) for job in jobs] == [(b"x", True)] * 8
        assert all(cache.contains_many([key_of(n) for n in range(10, 18)]))


def use(given: object, end: Connection) -> None:
    """Tries what came along."""
    try:
        given.get(key_of(1))  # type: ignore[attr-defined]
    except Exception as error:
        end.send(type(error).__name__)
    else:
        end.send("it works")
    end.close()


def test_a_cache_that_is_sent_along_is_refused(volume_path: Path, method: str) -> None:
    """By fork it arrives and refuses to work; otherwise it cannot be sent."""
    context = multiprocessing.get_context(method)
    with Cache.open(volume_path, CacheConfig(capacity=CAPACITY)) as cache:
        assert cache.put(key_of(1), b"x")
        ours, theirs = context.Pipe()
        child = context.Process(target=use, args=(cache, theirs))
        if method == "fork":
            child.start()
            theirs.close()
            assert ours.recv() == ForkedError.__name__
            child.join(60)
            assert child.exitcode == 0
        else:
            with pytest.raises(TypeError, match="open the volume in each process"):
                child.start()
            theirs.close()
        ours.close()
        assert cache.get(key_of(1)) == b"x"


def leave_open(path: str) -> None:
    """Ends without closing anything, as workers do."""
    cache = Cache.open(path, CacheConfig(capacity=CAPACITY))
    assert cache.put(key_of(os.getpid()), b"x")
    globals()["kept"] = (cache, cache.get(key_of(1)))


def test_a_child_that_ends_without_close_leaves_nothing(
    volume_path: Path, method: str
) -> None:
    context = multiprocessing.get_context(method)
    with Cache.open(volume_path, CacheConfig(capacity=CAPACITY)) as cache:
        assert cache.put(key_of(1), b"x")
        for _ in range(2):
            child = context.Process(target=leave_open, args=(str(volume_path),))
            child.start()
            child.join(60)
            assert child.exitcode == 0
            assert cache.contains(key_of(child.pid or 0))
        # The next that opens sweeps what dead processes left.
        assert store_own(str(volume_path), 3)[1]
        gc.collect()
        report = cache.verify()
        assert report.ok, report.first_fault
