# SPDX-License-Identifier: Apache-2.0
"""Thousands of rounds leave no references, descriptors or mappings behind.

CKV_LEAK_ROUNDS says how often every call is made; under a debug build of Python
(scripts/pydebug.py) the count of all references is looked at as well.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cyclone_kv import Cache, CacheConfig

from .conftest import CAPACITY, key_of

ROUNDS = 10_000
EVERY_CALL = int(os.environ.get("CKV_LEAK_ROUNDS", "400"))
OPENS = 200
# Of mappings, in so many rounds: an allocator takes or gives back some (that of a
# sanitizer more), a leak takes one in each.
NOISE = 1 / 4


def growth_of(work: Callable[[], object], rounds: int) -> int:
    """Bytes that Python memory grew by, after a warm-up."""
    for _ in range(rounds // 10):
        work()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(rounds):
            work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def calls(cache: Cache) -> Iterator[Callable[[], object]]:
    key, absent = bytearray(key_of(1)), key_of(2)
    cache.put(key_of(1), b"x" * 1000, header=b"h")
    rows = np.frombuffer(key_of(1) * 10, dtype="u1").reshape(10, 32)
    targets = [[bytearray(600), bytearray(600)] for _ in range(10)]
    items = [[key, [b"x", bytes(999)], b"h"]] * 50

    def refused(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            with pytest.raises((TypeError, ValueError, BufferError)):
                call()

        return run

    def read() -> None:
        with cache.read(key) as entry:
            assert entry.header == b"h"
            assert entry.view[:1] == b"x"

    def reserve() -> None:
        with cache.reserve(key, 1000, header=b"h") as slot:
            slot.view[0] = 1

    def abort() -> None:
        slot = cache.reserve(key, 100)
        held = slot.view[1:]
        slot.abort()
        held[0] = 1

    def stopped() -> None:
        with pytest.raises(ZeroDivisionError):
            cache.verify(progress=lambda done, total: 1 // 0)

    def locate() -> None:
        with cache.locate(key) as place:
            assert place.nbytes == 1000

    yield lambda: cache.get(key)
    yield lambda: cache.get(absent)
    yield read
    yield reserve
    yield abort
    yield locate
    yield lambda: cache.put(key, [b"x", bytearray(999)], header=b"h")
    yield lambda: cache.put_many(items, chain=True, parent=key)
    yield lambda: cache.get_into(key, targets[0])
    yield lambda: cache.get_many_into([key] * 10, targets)
    yield lambda: cache.contains_many(rows)
    yield lambda: cache.contains_many([key] * 50)
    yield lambda: cache.longest_prefix((key, absent), touch=True)
    yield lambda: cache.contains(key)
    yield lambda: key in cache
    yield lambda: len(cache)
    yield lambda: repr(cache)
    yield lambda: (cache.closed, cache.config, cache.mode, cache.paths)
    yield lambda: cache.namespace_tag
    yield lambda: cache.prefetch([key, absent])
    yield lambda: cache.touch([key, absent])
    yield lambda: cache.remove(absent)
    yield lambda: cache.put(absent, b"y") and cache.remove(absent)
    yield lambda: cache.clear() and cache.put(key_of(1), b"x" * 1000, header=b"h")
    yield lambda: cache.sync()
    yield lambda: cache.recover()
    yield lambda: cache.verify(repair=True)
    yield stopped
    yield lambda: cache.stats()
    yield lambda: cache.info()
    yield lambda: cache.events(limit=20)
    yield lambda: list(cache.ls())
    yield lambda: cache.verify(progress=lambda done, total: None)
    yield refused(lambda: cache.put(key, "text"))
    yield refused(lambda: cache.put(b"", b""))
    yield refused(lambda: cache.put_many([(key, b"1"), (key, [b"2", 3])]))
    yield refused(lambda: cache.get_many_into([key, key], [bytearray(1), b"1"]))
    yield refused(lambda: cache.get_many_into([key], []))
    yield refused(lambda: cache.contains_many([key, 7]))
    yield refused(lambda: cache.contains_many(rows[:, :5]))
    yield refused(lambda: cache.put(key, b"", wrong=1))


def test_no_call_leaks_memory_or_references(cache: Cache) -> None:
    for number, call in enumerate(calls(cache)):
        # Twice: tables of the interpreter grow once, a leak grows always.
        growth = min(growth_of(call, 300) for _ in range(2))
        assert growth < 3000, f"call {number} grew by {growth} bytes"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def references() -> int:
    """All references of a debug build; none are counted by others."""
    gc.collect()
    count: Callable[[], int] = getattr(sys, "gettotalrefcount", lambda: 0)
    return count()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self")
def test_every_call_leaves_everything_as_it_was(cache: Cache) -> None:
    """Descriptors, mappings, memory and, where they can be counted, references."""
    pin = cache.get(key_of(1))
    for number, call in enumerate(calls(cache)):
        for _ in range(min(EVERY_CALL, 100)):
            call()
        before = (open_files(), mappings(), resident_bytes(), references())
        for _ in range(EVERY_CALL):
            call()
        after = (open_files(), mappings(), resident_bytes(), references())
        assert after[0] == before[0], f"call {number}: descriptors"
        assert after[1] <= before[1] + EVERY_CALL * NOISE, f"call {number}: mappings"
        if not os.environ.get("CKV_SANITIZE"):  # which keeps freed memory for a while
            limit = before[2] + (2 << 20) + 64 * EVERY_CALL
            assert after[2] <= limit, f"call {number}: RSS"
        # Interned names, caches of types; what leaks does so in each round.
        grown = after[3] - before[3]
        assert grown < EVERY_CALL // 4 + 50, f"call {number}: {grown} references"
    assert pin is None


def test_the_calls_above_are_all_there_are() -> None:
    names = {name for name in dir(Cache) if not name.startswith("_")}
    source = Path(__file__).read_text()
    called = set(re.findall(r"\bcache\.(\w+)", source))
    device = {"put_from_device", "upload", "upload_async", "cuda_registration"}
    device |= {"register_cuda", "unregister_cuda"}  # tests/gpu
    assert names - called - device == {"close", "open"}  # below, together


def test_ten_thousand_views_leave_nothing(cache: Cache) -> None:
    key = key_of(1)
    cache.put(key, b"x" * 1000)

    def work() -> None:
        view = cache.get(key)
        assert view is not None
        array = np.frombuffer(view, dtype="u1")[5:]
        assert array[0] == ord("x")

    assert growth_of(work, ROUNDS) < 3000
    assert sys.getrefcount(key) <= 3
    assert cache.stats().volume.pinned_entries == 0


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_opening_again_and_again_leaks_no_descriptor(volume_path: Path) -> None:
    """Descriptors that leak on paths of errors end in EMFILE after days."""
    config = CacheConfig(capacity=CAPACITY)
    bad = volume_path.parent / "bad.cyc"
    bad.write_bytes(b"no volume" * 10_000)

    def round_() -> None:
        with Cache.open(volume_path, config) as cache:
            assert cache.get(key_of(1)) is None
            assert cache.get_into(key_of(1), bytearray(1)) is None
            with pytest.raises(ValueError, match=r"."):
                cache.put(b"", b"")
        with pytest.raises(OSError, match=r"."):
            Cache.open(bad, config)

    for _ in range(5):
        round_()
    gc.collect()
    files, maps = open_files(), mappings()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, files + 40), hard))
    try:
        for _ in range(OPENS):
            round_()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_files() == files
    assert mappings() <= maps + OPENS * NOISE


def test_opens_that_fail_leak_descriptors(volume_path: Path) -> None:
    """Each reason to refuse leaves by a door of its own."""
    folder = volume_path.parent
    config = CacheConfig(capacity=CAPACITY)
    (folder / "text").write_bytes(b"no volume" * 10_000)
    (folder / "link").symlink_to(folder / "text")
    (folder / "truncated").write_bytes(b"")
    os.mkfifo(folder / "fifo")
    with Cache.open(volume_path, config) as cache:
        cache.put(key_of(1), b"x")
    content = volume_path.read_bytes()
    (folder / "truncated").write_bytes(content[: len(content) // 2])
    refused: list[Callable[[], object]] = [
        lambda: Cache.open(volume_path, CacheConfig(capacity=2 * CAPACITY)),
        lambda: Cache.open(volume_path, CacheConfig(capacity=CAPACITY, stripes=3)),
        lambda: Cache.open(volume_path, namespace=bytes(65_536)),
        lambda: Cache.open(folder / "absent.cyc"),
        lambda: Cache.open(folder / "absent.cyc", mode="r"),
        lambda: Cache.open(folder / "absent" / "kv.cyc", config),
        lambda: Cache.open(folder / "text", config),
        lambda: Cache.open(folder / "text", mode="r"),
        lambda: Cache.open(folder / "link", config),
        lambda: Cache.open(folder / "fifo", config),
        lambda: Cache.open(folder, config),
        lambda: Cache.open(folder / "truncated", config),
        lambda: Cache.open([volume_path, folder / "text"], config),
        lambda: Cache.open([volume_path, folder / "second.cyc"]),
        lambda: Cache.open(folder / "new.cyc", CacheConfig(capacity=2**43 - 4096)),
    ]
    names = sorted(each.name for each in folder.iterdir())

    def round_() -> None:
        for number, call in enumerate(refused):
            try:
                call()
            except (OSError, ValueError):
                continue
            raise AssertionError(f"open {number} was not refused")

    round_()
    gc.collect()
    files, maps = open_files(), mappings()
    for _ in range(OPENS // 2):
        round_()
        gc.collect()
        assert open_files() == files
    assert mappings() <= maps + OPENS // 2 * NOISE
    assert sorted(each.name for each in folder.iterdir()) == names
    with Cache.open(volume_path) as cache:
        assert cache.get(key_of(1)) == b"x"


def test_descriptors_are_not_inherited(cache: Cache) -> None:
    cache.put(key_of(1), b"x")
    view = cache.get(key_of(1))
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if ".cyc" in target:
            assert not os.get_inheritable(int(name)), target
    assert view == b"x"
