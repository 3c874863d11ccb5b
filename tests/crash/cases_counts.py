# SPDX-License-Identifier: Apache-2.0
"""Sizes, counts, memory, a write that hangs: the processes of test_cases_counts.py."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import resource
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from crash.blobs import blob, key_of, right
from crash.cases_restart import allocated, found, store
from crash.nursery import fork

from cyclone_kv import Cache, CacheConfig, NoSpaceError

MIB = 1 << 20
PAGE = 4096
SIZES = (1, 511, 512, 513, 4095, 4096, 4097, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1)


# ---- B -----------------------------------------------------------------------------


def odd_sizes(folder: str) -> dict[str, int]:
    """B12: any size from any address, warm, and cold into any address."""
    path = f"{folder}/kv.cyc"
    config = CacheConfig(capacity=128 * MIB)
    blocks = {
        key_of("b12", size, offset): (size, offset)
        for size, offset in itertools.product(SIZES, (0, 1, 64))
    }
    blocks[key_of("b12 large")] = (32 * MIB - 1, 1)
    page = mmap.mmap(-1, 32 * MIB + PAGE)  # begins on a page
    with Cache.open(path, config) as cache:
        for key, (size, offset) in blocks.items():
            page[offset : offset + size] = blob(key, size)
            with memoryview(page)[offset : offset + size] as source:
                assert cache.put(key, source)
        for key, (size, offset) in blocks.items():
            view = cache.get(key)
            assert view is not None
            assert right(view, key, size)
            del view
            with memoryview(page)[offset + 7 : offset + 7 + size] as target:
                assert cache.get_into(key, target) == size
                assert right(target, key, size)
        cache.sync()

    def cold() -> int:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with Cache.open(path) as cache:
            memory = bytearray(64 * MIB)
            targets, at = [], 1
            for size, _ in blocks.values():
                targets.append(memoryview(memory)[at : at + size])
                at += size + 3
            assert all(cache.get_many_into(list(blocks), targets))
            for (key, (size, _)), target in zip(blocks.items(), targets, strict=True):
                assert right(target, key, size), (size, "cold")
            return cache.stats().volume.direct_bytes

    return {"direct_bytes": fork(cold).result()}


def hung_write(path: str) -> None:
    """B13: a thread whose write never returns keeps nobody else from anything."""
    size, count = 300_000, 20
    names = [key_of("b13", number) for number in range(count)]
    hung = key_of("b13 hung", 0)
    ready, go = os.pipe(), os.pipe()

    def run() -> None:
        cache = Cache.open(path, CacheConfig(capacity=64 * MIB, sync_interval=None))
        for key in names:
            assert cache.put(key, blob(key, size))
        hangs = os.pipe()
        os.environ["CKV_SHIM"] = f"hang=1:{hangs[1]}"
        thread = threading.Thread(
            target=cache.put, args=(hung, blob(hung, size)), daemon=True
        )
        thread.start()
        assert os.read(hangs[0], 1) == b"."
        for number, key in enumerate(names):
            view = cache.get(key)
            assert view is not None
            assert right(view, key, size)
            del view
            other = key_of("b13 other", number)
            assert cache.put(other, blob(other, size)), "refused beside a hung write"
        assert cache.longest_prefix(names) == count
        targets = [bytearray(size) for _ in names]
        assert all(cache.get_many_into(names, targets))
        assert not cache.contains(hung)
        os.write(ready[1], b".")
        os.read(go[0], 1)
        assert thread.is_alive(), "the write that should hang has returned"
        os._exit(0)

    runner = fork(run)
    os.close(ready[1])
    if os.read(ready[0], 1) != b".":
        runner.result()  # raises why
    # Beside the process with the hung thread, and after its death.
    for _ in range(2):
        assert fork(found, path, "b13", count, size).result() == count
        assert fork(found, path, "b13 other", count, size).result() == count
        assert fork(found, path, "b13 hung", 1, size).result() == 0
        stored = fork(store, path, "b13 late", 3, size, 64 * MIB, "close").result()
        assert stored == 3
        os.write(go[1], b".")
        assert runner.wait() == 0


# ---- C, D: capacity ----------------------------------------------------------------


def files_that_grow(folder: str, seed: int, rounds: int) -> None:
    """C1, N6: whatever the options, puts make no file larger."""
    dice = random.Random(seed)
    for number in range(rounds):
        home = Path(folder, str(number))
        home.mkdir(mode=0o700)
        config = CacheConfig(
            capacity=32 * MIB,
            stripes=dice.choice((0, 1, 4)),
            expected_object_size=dice.choice((0, PAGE, MIB)),
            event_capacity=dice.choice((0, 64)),
            admission=dice.choice(("always", "second-touch", "adaptive")),
            eviction=dice.choice(("clock", "prefix")),
            write_behind=dice.choice((True, False)),
            verify=dice.choice(("once", "always", "never")),
            sigbus_guard=dice.choice((True, False)),
            allow_sparse=dice.choice((True, False)),
        )
        names = [f"{home}/one.cyc", f"{home}/two.cyc"]
        path = names if dice.randrange(2) else names[0]
        with Cache.open(path, config) as cache:
            info = cache.info()
            limit = 32 * MIB + info.overhead_bytes + info.shm_bytes
            before = sorted((file.name, file.stat().st_size) for file in home.iterdir())
            length = dice.choice((500, 60_000, 700_000))
            most = 3 * 32 * MIB // max(length, 8 * PAGE)
            for turn in range(most):
                key = key_of("c1", turn % (most // 2))
                cache.put(key, blob(key, length), overwrite=bool(turn % 3))
            after = sorted((file.name, file.stat().st_size) for file in home.iterdir())
            assert after == before, config
            assert allocated(str(home)) <= limit + 64 * 1024, config
            assert cache.stats().volume.evictions > 0 or length == 500, config
            cache.sync()
        for file in home.iterdir():
            file.unlink()


def too_small_at_first(folder: str) -> None:
    """D3: in words and numbers, nothing left; with room it works at once."""
    path = f"{folder}/kv.cyc"
    config = CacheConfig(capacity=60 * MIB)
    try:
        Cache.open(path, config)
    except NoSpaceError as error:
        text = str(error)
    else:
        raise AssertionError("a volume larger than its disk was created")
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    numbers = [int(word) for word in text.replace(",", " ").split() if word.isdigit()]
    assert path in text
    assert any(number >= 60 * MIB for number in numbers), f"not what is needed: {text}"
    assert free in numbers, f"not what is free ({free}): {text}"
    assert not list(Path(folder).iterdir()), "something was left behind"
    command = ["mount", "-o", "remount,size=70m", folder]
    subprocess.run(command, check=True)
    with Cache.open(path, config) as cache:
        key = key_of("d3")
        assert cache.put(key, blob(key, MIB))


def filled_by_others(folder: str) -> None:
    """C6: what the disk has left is nothing that a put needs."""
    path = f"{folder}/kv.cyc"
    cache = Cache.open(path, CacheConfig(capacity=48 * MIB))
    with open(f"{folder}/other", "wb", buffering=0) as other, suppress(OSError):
        while other.write(bytes(PAGE)):
            pass
    assert os.statvfs(folder).f_bavail == 0
    for number in range(130):
        key = key_of("c6", number)
        assert cache.put(key, blob(key, MIB)), "a full disk ends the storing"
        assert cache.contains(key)
    assert cache.stats().volume.evictions > 0
    cache.sync()
    cache.close()
    with Cache.open(path) as again:
        report = again.verify()
        assert report.ok, report.first_fault


# ---- H: lengths --------------------------------------------------------------------


def other_lengths(path: str) -> None:
    """H2: a block of another length is no hit for who expects this one."""
    with Cache.open(path, CacheConfig(capacity=16 * MIB)) as cache:
        key = key_of("h2")
        for length in (10_000, 20_000, 5000, 5001):
            assert cache.put(key, blob(key, length, length))  # no overwrite asked for
            view = cache.get(key)
            assert view is not None
            assert right(view, key, length, length), "of another length, and kept"
            del view
        before = cache.stats().volume.short_buffers
        short = bytearray(b"\xa5" * 5000)
        assert cache.get_into(key, short) is None
        assert cache.get_many_into([key], [short]) == [False]
        assert cache.stats().volume.short_buffers == before + 2
        long = bytearray(b"\xa5" * 6000)
        assert cache.get_into(key, long) == 5001
        assert right(long[:5001], key, 5001, 5001)
        assert long[5001:] == b"\xa5" * 999, "behind the block"


# ---- I: statistics, cliffs, memory -------------------------------------------------


def known_counts(path: str) -> None:
    """I1: of 1000 lookups 600 hit, and every number says so, in every process."""
    config = CacheConfig(capacity=64 * MIB)
    lengths = [1000 * (number + 1) for number in range(6)]
    present = [key_of("i1", number) for number in range(6)]
    absent = [key_of("i1 absent", number) for number in range(4)]
    ready, go = os.pipe(), os.pipe()

    def beside() -> dict[str, int]:
        os.close(go[1])
        with Cache.open(path, config) as cache:
            for key, length in zip(present, lengths, strict=True):
                assert cache.put(key, blob(key, length))
            before = dict(cache.stats().process)
            os.write(ready[1], b".")
            os.read(go[0], 1)
            after = dict(cache.stats().process)
            for name in ("lookups", "hits", "misses", "payload_bytes_read"):
                assert after[name] == before[name], f"{name} of another process"
            return dict(cache.stats().volume)

    other = fork(beside)
    assert os.read(ready[0], 1) == b"."
    with Cache.open(path, config) as cache:
        before, own = dict(cache.stats().volume), dict(cache.stats().process)
        last = before
        handed_out = 0
        for number in range(100):
            for key in (*present, *absent):
                if number % 2:
                    cache.contains(key)
                    continue
                view = cache.get(key)
                handed_out += 0 if view is None else len(view)
                del view
            now = dict(cache.stats().volume)
            for name in ("lookups", "hits", "misses", "puts_stored"):
                assert now[name] >= last[name], f"{name} went down"
            last = now
        view = cache.get(present[5])
        stats = cache.stats()
        assert stats.volume.pinned_bytes == 2 * PAGE
        assert stats.volume.resident_bytes == sum(
            PAGE * (1 + (length - 1) // PAGE) for length in lengths
        )
        del view
        for counters, first in ((stats.volume, before), (stats.process, own)):
            assert counters.lookups - first["lookups"] == 1001
            assert counters.hits - first["hits"] == 601
            assert counters.misses - first["misses"] == 400
            read = counters.payload_bytes_read - first["payload_bytes_read"]
            assert read == handed_out + 6000
        os.close(go[1])
        seen = other.result()
        mine = dict(cache.stats().volume)
        for name in ("lookups", "hits", "misses", "entries", "payload_bytes_read"):
            assert seen[name] == mine[name], name


def faults_of_a_cold_view(path: str) -> int:
    """I2: the most page faults with I/O that touching a cold block of 32 MiB took."""
    size, count = 32 * MIB, 3
    names = [key_of("i2", number) for number in range(count)]

    def make() -> None:
        with Cache.open(path, CacheConfig(capacity=256 * MIB)) as cache:
            for key in names:
                assert cache.put(key, blob(key, size))
            cache.sync()

    def touch() -> int:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        most = 0
        with Cache.open(path) as cache:
            for key in names:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
                view = cache.get(key)
                assert view is not None
                assert sum(view[::PAGE]) >= 0
                after = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
                most = max(most, after - before)
                assert right(view, key, size)
                del view
        return most

    fork(make).result()
    return int(fork(touch).result())


def own_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def keys_that_are_gone(path: str, laps: int) -> int:
    """I9: nothing grows with keys that are no more; returns bytes an entry."""
    config = CacheConfig(
        capacity=32 * MIB, expected_object_size=PAGE, admission="adaptive"
    )
    with Cache.open(path, config) as cache:
        info = cache.info()
        entries = cache.stats().volume.entries_max
        sizes = [Path(name).stat().st_size for name in (path, f"{path}-shm")]
        data, number, warm = bytes(100), 0, 0
        for lap in range(laps):
            for _ in range(entries // 64):
                items = [(key_of("i9", number + at), data) for at in range(64)]
                cache.put_many(items)
                for key, _ in items:  # admitted the second time
                    cache.put(key, data)
                cache.contains_many([key for key, _ in items])
                cache.remove(items[0][0])
                number += 64
            if lap == 1:
                warm = own_memory()
        assert cache.stats().volume.evictions > entries
        if not os.environ.get("CKV_SANITIZE"):  # which keeps freed memory for a while
            assert own_memory() - warm < MIB, "memory grows with keys that are gone"
        assert sizes == [Path(name).stat().st_size for name in (path, f"{path}-shm")]
        return int((info.shm_bytes + info.paths[0].data_offset) // entries)
