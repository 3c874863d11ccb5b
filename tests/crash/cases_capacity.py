# SPDX-License-Identifier: Apache-2.0
"""Earlier laps, full tables, many files, prefixes: processes of test_cases.py."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from crash.blobs import blob, fault_of, key_of, right
from crash.cases_restart import found, found_in, store
from crash.cases_system import _refuse_system_calls
from crash.nursery import fork

from cyclone_kv import Cache, CacheConfig, ConfigError, CycloneError

MIB = 1 << 20
PAGE = 4096


# ---- A: restart --------------------------------------------------------------------


def pages_of_an_earlier_lap(folder: str, seed: int, rounds: int) -> dict[str, int]:
    """A4: lost writes leave pages, and whole records, of an earlier life.

    Each block is one that was stored under its key, whole, or a miss.
    """
    path = f"{folder}/kv.cyc"
    length, count = 60_001, 300

    def lap(who: str, version: int) -> None:
        with Cache.open(path, CacheConfig(capacity=16 * MIB)) as cache:
            for number in range(count):
                key = key_of(who, number)
                assert cache.put(key, blob(key, length))
                if number % 3 == 0:
                    again = key_of("a4 again", number)
                    data = blob(again, length, version)
                    assert cache.put(again, data, overwrite=True)

    fork(lap, "a4 one", 1).result()
    earlier = Path(path).read_bytes()
    fork(lap, "a4 two", 2).result()
    assert fork(found, path, "a4 one", count, length).result() == 0
    later = Path(path).read_bytes()
    counts = {"hits": 0, "misses": 0}

    def look() -> dict[str, int]:
        with Cache.open(path) as cache:
            for number, (who, versions) in itertools.product(
                range(count), (("a4 one", (0,)), ("a4 two", (0,)), ("a4 again", (1, 2)))
            ):
                key = key_of(who, number)
                view = cache.get(key)
                counts["misses" if view is None else "hits"] += 1
                assert view is None or any(
                    right(view, key, length, version) for version in versions
                ), fault_of(view, key, length, versions[-1])
                del view
            report = cache.verify()
            assert report.ok, report.first_fault
        return counts

    for turn in range(rounds):
        dice = random.Random(seed + turn)
        image = bytearray(later)
        pages = len(image) // PAGE
        for page in dice.sample(range(pages), pages * (1, 10, 50)[turn % 3] // 100):
            at = slice(page * PAGE, (page + 1) * PAGE)
            image[at] = earlier[at]
        Path(path).write_bytes(image)
        Path(f"{path}-shm").unlink(missing_ok=True)
        for name, number in fork(look).result().items():
            counts[name] += number
    return counts


def more_than_the_table_names(path: str, end: str) -> None:
    """A7: what is present before the end is present after it, and nothing else."""
    keys = [key_of("a7", number) for number in range(4 * 64)]

    def fill() -> list[bool]:
        config = CacheConfig(capacity=16 * MIB, expected_object_size=MIB // 4)
        cache = Cache.open(path, config)
        room = cache.stats().volume.entries_max
        assert room * 3 < len(keys), "the table is larger than this test thinks"
        for key in keys:
            assert cache.put(key, blob(key, 1024))
        stats = cache.stats().volume
        assert (stats.entries, stats.evictions) == (room, len(keys) - room)
        assert stats.entries_exhausted > 0, "evicted without being counted"
        present = cache.contains_many(keys)
        assert sum(present) == room
        if end == "close":
            cache.close()
        return present

    def again() -> list[bool]:
        with Cache.open(path) as cache:
            assert len(cache) == cache.stats().volume.entries
            for key in keys:
                view = cache.get(key)
                assert view is None or right(view, key, 1024)
                del view
            return cache.contains_many(keys)

    before = fork(fill).result()
    assert fork(again).result() == before


def numbers_after_a_restart(path: str) -> None:
    """A10: no statistic is zero or nonsense while blocks are there."""
    fork(store, path, "a10", 100, 50_000, 16 * MIB, "kill").wait()

    def again() -> None:
        with Cache.open(path) as cache:
            stats = cache.stats().volume
            hits = found_in(cache, "a10", 100, 50_000)
            assert stats.entries == len(cache) == hits == stats.rebuilt_entries > 0
            assert stats.capacity_bytes == 16 * MIB
            assert stats.resident_bytes == hits * 13 * PAGE
            assert stats.entries_max >= hits
            assert stats.processes == 1
            negative = {name: value for name, value in stats.items() if value < 0}
            assert set(negative) <= {"last_sync_age_seconds"}, negative

    fork(again).result()


# ---- B: loads ----------------------------------------------------------------------


def every_third_is_damaged(path: str) -> None:
    """B6: exactly the failed loads are reported as failed."""
    length, count = 70_000, 60
    keys = [key_of("b6", number) for number in range(count)]

    def make() -> dict[str, int]:
        with Cache.open(path, CacheConfig(capacity=16 * MIB)) as cache:
            for key in keys:
                assert cache.put(key, blob(key, length))
            return {entry.key.hex(): entry.offset for entry in cache.ls()}

    places = fork(make).result()
    with open(path, "r+b") as file:
        for key in keys[::3]:
            file.seek(places[key.hex()] + length // 2)
            file.write(b"damaged")

    def load() -> None:
        with Cache.open(path) as cache:
            targets = [bytearray(b"\xa5" * length) for _ in keys]
            answers = cache.get_many_into(keys, targets)
            assert answers == [number % 3 != 0 for number in range(count)]
            for key, target, answer in zip(keys, targets, answers, strict=True):
                assert not answer or right(target, key, length)
            for number, key in enumerate(keys):
                expected = None if number % 3 == 0 else length
                assert cache.get_into(key, bytearray(length)) == expected
            assert cache.contains_many(keys) == answers
            assert cache.stats().volume.corrupt == count // 3

    fork(load).result()


def acknowledged_and_listed(path: str, rounds: int, *, reading: bool) -> int:
    """C16: what was acknowledged is there.  B7: what is listed has its bytes."""
    config = CacheConfig(capacity=16 * MIB, expected_object_size=PAGE)
    with Cache.open(path, config) as cache:
        faults: list[str] = []

        def work(me: int) -> None:
            dice = random.Random(me)
            for number in range(rounds):
                key = key_of("b7", me, number)
                before = cache.stats().volume.page_bytes_written
                if not cache.put(key, blob(key, dice.choice((1, 9000, 70_000)))):
                    faults.append(f"{me}/{number} was refused")
                    continue
                present = cache.contains(key)
                written = cache.stats().volume.page_bytes_written - before
                # While this thread waited for the interpreter, others may have made
                # a lap, less the quarter in which holes are filled.  A reader of all
                # old blocks makes the new ones the coldest.
                if not present and written < 12 * MIB and not reading:
                    faults.append(f"{me}/{number} is gone after {written} bytes")

        crew = [threading.Thread(target=work, args=(me,)) for me in range(8)]
        for thread in crew:
            thread.start()
        seen = 0
        while reading and any(thread.is_alive() for thread in crew):
            seen += _read_what_is_listed(cache)
        for thread in crew:
            thread.join()
        assert not faults, faults[:5]
        assert cache.stats().volume.evictions > 0
        assert _read_what_is_listed(cache) == len(cache)
        return seen


def _read_what_is_listed(cache: Cache) -> int:
    seen = 0
    for entry in cache.ls():
        assert entry.nbytes > 0
        view = cache.get(entry.key)
        assert view is None or len(view) == entry.nbytes
        seen += view is not None
        del view
    return seen


# ---- C: capacity, eviction ---------------------------------------------------------


def many_small_blocks(folder: str, count: int, *, quiet: bool) -> None:
    """C4: two files however many blocks there are, and lookups that ask no kernel."""
    path = f"{folder}/kv.cyc"

    def name(number: int) -> bytes:
        return number.to_bytes(8, "little") * 4

    def files() -> list[tuple[str, int]]:
        return sorted(
            (file.name, file.stat().st_size) for file in Path(folder).iterdir()
        )

    def fill() -> None:
        config = CacheConfig(
            capacity=count * PAGE * 9 // 8,
            expected_object_size=PAGE,
            write_behind=False,
        )
        data = bytes(PAGE)
        cache = Cache.open(path, config)
        first_files = files()
        assert [each for each, _ in first_files] == ["kv.cyc", "kv.cyc-shm"]
        for first in range(0, count, 10_000):
            numbers = range(first, min(first + 10_000, count))
            assert all(cache.put_many([(name(n), data) for n in numbers]))
        assert files() == first_files, "files have come or grown"
        assert len(cache) == count
        assert cache.stats().volume.evictions == 0
        cache.close()
        assert files() == first_files, "files have come or grown"

    def look_up() -> None:
        cache = Cache.open(path)
        assert len(cache) == count
        keys = [name(number) for number in range(count)]
        joined = b"".join(keys)
        absent = [name(number) for number in range(count, count + 5000)]
        assert all(cache.contains_many(joined))
        if quiet:
            _refuse_system_calls()
        for number in (*range(5000), *range(count - 5000, count)):
            if not cache.contains(keys[number]):
                os._exit(3)
        for key in absent:
            if cache.contains(key):
                os._exit(4)
        os._exit(0)

    fork(fill).result(90)
    status = fork(look_up).wait(90)
    assert status != -signal.SIGSYS, "contains made a system call"
    assert status == 0, f"a lookup answered wrongly: {status}"


def heads_of_prefixes(path: str) -> None:
    """C7: what is left of a chain is its head, and a prefix in use is left whole."""
    count, chunks, length = 20, 32, 64 * 1024
    capacity = 10 * chunks * length

    def items(prefix: int) -> list[tuple[bytes, bytes]]:
        keys = [key_of("c7", prefix, chunk) for chunk in range(chunks)]
        return [(key, blob(key, length)) for key in keys]

    used = [key for key, _ in items(0)]
    config = CacheConfig.for_kv_tier(capacity, stripes=1, admission="always")
    with Cache.open(path, config) as cache:
        for prefix in range(count):
            blocks = items(prefix)
            for first in range(0, chunks, 8):  # as chunked prefill stores them
                parent = blocks[first - 1][0] if first else None
                batch = blocks[first : first + 8]
                assert all(cache.put_many(batch, chain=True, parent=parent))
            assert cache.longest_prefix([key for key, _ in blocks]) == chunks
            if prefix % 2:
                assert cache.longest_prefix(used, touch=True) == chunks
                for key in used:
                    view = cache.get(key)
                    assert view is not None, "a chunk of the used prefix is gone"
                    assert right(view, key, length)
                    del view
        assert cache.longest_prefix(used) == chunks
        cache.clear()

        for prefix in range(10):
            assert all(cache.put_many(items(prefix), chain=True))
        halves = 0
        for number in range(capacity // length):
            assert cache.put(key_of("c7 other", number), bytes(length))
            for prefix in range(10):
                keys = [key_of("c7", prefix, chunk) for chunk in range(chunks)]
                present = sum(cache.contains_many(keys))
                assert cache.longest_prefix(keys) == present, (prefix, number)
                halves += 0 < present < chunks
        assert halves > 100


# ---- D: files ----------------------------------------------------------------------


def without_holes(folder: str, other: str) -> None:
    """D1: all blocks of all files are there from the beginning."""
    config = CacheConfig(capacity=32 * MIB, shm_dir=f"{other}/shm")
    Path(other, "shm").mkdir()
    with (
        Cache.open(f"{folder}/kv.cyc", CacheConfig(capacity=16 * MIB)),
        Cache.open([f"{folder}/one.cyc", f"{other}/two.cyc"], config),
    ):
        files = [file for file in Path(folder).iterdir() if file.is_file()]
        files += [file for file in Path(other).rglob("*") if file.is_file()]
        assert len(files) == 5, files
        for file in files:
            status = file.stat()
            assert status.st_size > 0
            assert status.st_blocks * 512 >= status.st_size, f"{file} has holes"


def reader_of_another_user(folder: str, *, beside_writer: bool) -> None:
    """D12: reading needs the permission to read, and nothing else."""
    path = f"{folder}/kv.cyc"
    Path(folder).chmod(0o755)
    count, length = 20, 50_000
    ready, go = os.pipe(), os.pipe()

    def write() -> None:
        os.close(go[1])
        cache = Cache.open(path, CacheConfig(capacity=16 * MIB, file_mode=0o644))
        for number in range(count):
            key = key_of("d12", number)
            assert cache.put(key, blob(key, length))
        cache.sync()
        if not beside_writer:
            cache.close()
        os.write(ready[1], b".")
        os.read(go[0], 1)
        if beside_writer:
            cache.close()

    def read() -> None:
        os.setgroups([])
        os.setgid(65_534)
        os.setuid(65_534)
        assert not os.access(path, os.W_OK)
        with Cache.open(path, mode="r") as cache:
            assert len(cache) == count
            assert found_in(cache, "d12", count, length) == count
            keys = [key_of("d12", number) for number in range(count)]
            assert cache.longest_prefix(keys) == count
            assert cache.get_into(keys[0], bytearray(length)) == length
            calls: list[Callable[[], object]] = [
                lambda: cache.put(b"k", b"v"),
                lambda: cache.remove(keys[1]),
                cache.clear,
            ]
            for call in calls:
                try:
                    call()
                except CycloneError:
                    continue
                raise AssertionError("a reader has changed the volume")
        try:
            Cache.open(path)
        except PermissionError as error:
            text = str(error)
        else:
            raise AssertionError("opened for writing without permission")
        assert path in text

    writer = fork(write)
    assert os.read(ready[0], 1) == b"."
    before = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    fork(read).result()
    after = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    assert sorted(after) == sorted(before)
    assert after["kv.cyc"] == before["kv.cyc"], "a reader has written"
    os.close(go[1])
    writer.result()


# ---- E: errors ---------------------------------------------------------------------


def odd_arguments(folder: str) -> dict[str, int]:
    """E8: a documented exception or a volume, never a signal, and nothing is left."""
    home = Path(folder)
    (home / "a folder").mkdir()
    os.mkfifo(home / "fifo")
    (home / "other").write_bytes(b"somebody's notes " * 9999)
    limit = 64 * MIB  # what a quota would do to a creation
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    names: list[object] = [
        *("missing/kv.cyc", "a folder", "a folder/", "fifo", "other", "other/kv.cyc"),
        *("new.cyc", "./new.cyc", "a folder/../new.cyc", "n" * 255, "n" * 256, "."),
        *("..", "new.cyc-shm", "é" * 127, "n/" * 2500 + "kv"),
    ]
    paths = [f"{folder}/{name}" for name in names]
    paths += ["", "\0", f"{folder}/a\0b", "/dev/null", "/dev/full", "/proc/self/mem"]
    capacities: list[object] = [-1, 0, 1, 10, 4095, 4096, MIB, 16 * MIB]
    capacities += [2**31 - 1, 2**47, 2**63, 2**64, 1e6, "1G", "64MiB", None, b"1", True]
    stripes: list[object] = [0, 1, 3, 10**6, -1, 2**32, None]
    original = (home / "other").read_bytes()
    names_before = sorted(each.name for each in home.iterdir())
    outcomes = {"opened": 0, "refused": 0}
    for path, capacity, count in itertools.product(paths, capacities, stripes):
        options: dict[str, object] = {"capacity": capacity, "stripes": count}
        if count is None:
            del options["stripes"]
        try:
            Cache.open(path, CacheConfig.from_dict(options)).close()
        except (CycloneError, OSError, TypeError, ConfigError):
            outcomes["refused"] += 1
        else:
            outcomes["opened"] += 1
            for file in (Path(path), Path(f"{path}-shm")):
                file.unlink(missing_ok=True)
        left = sorted(each.name for each in home.iterdir())
        assert left == names_before, (path, options, left)
    assert (home / "other").read_bytes() == original
    assert not list((home / "a folder").iterdir())
    assert fork(store, f"{folder}/new.cyc", "e8", 9, 9000, 16 * MIB, "").result() == 9
    return outcomes
