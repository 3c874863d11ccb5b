# SPDX-License-Identifier: Apache-2.0
"""Restart, damage, create races, slots: the processes of test_cases.py."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from crash.blobs import blob, fault_of, key_of, right
from crash.cases_points import STOP_SECONDS, again_while_stopped
from crash.nursery import Child, fork, stopped

from cyclone_kv import Cache, CacheConfig, CycloneError, MismatchError

MIB = 1 << 20


def store(path: str, who: str, count: int, length: int, capacity: int, end: str) -> int:
    """Stores blocks and ends: by close, os._exit, SIGKILL, or at a test point."""
    cache = Cache.open(path, CacheConfig(capacity=capacity))
    stored = 0
    for number in range(count):
        key = key_of(who, number)
        stored += cache.put(key, blob(key, length), header=b"header")
    if end == "close":
        cache.close()
    elif end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "exit":
        os._exit(0)
    return stored


def found(path: str, who: str, count: int, length: int, **options: Any) -> int:
    """How many of them are there; all must be right."""
    with Cache.open(path, **options) as cache:
        return found_in(cache, who, count, length)


def found_in(cache: Cache, who: str, count: int, length: int) -> int:
    hits = 0
    for number in range(count):
        key = key_of(who, number)
        view = cache.get(key)
        if view is not None:
            assert right(view, key, length), fault_of(view, key, length)
            hits += 1
    return hits


def allocated(folder: str) -> int:
    return sum(file.stat().st_blocks * 512 for file in Path(folder).iterdir())


def one_block(path: list[str], space: str, key: str, data: str, how: str) -> None:
    """For the model test: stores a block and ends without closing."""
    cache = Cache.open(path if len(path) > 1 else path[0], namespace=space)
    assert cache.put(bytes.fromhex(key), bytes.fromhex(data), overwrite=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def store_one_and_end(**arguments: Any) -> int:
    return fork(lambda: one_block(**arguments)).wait()


# ---- A: restart --------------------------------------------------------------------


def restart(path: str, end: str) -> None:
    fork(store, path, "a1", 200, MIB, 256 * MIB, end).wait()

    def again() -> tuple[int, int]:
        before = _written()
        cache = Cache.open(path)
        written = _written() - before
        hits = found_in(cache, "a1", 200, MIB)
        stats = cache.stats().volume
        assert stats.entries == len(cache) == hits  # A10
        assert stats.capacity_bytes == 256 * MIB
        assert stats.resident_bytes > 0
        return hits, written

    hits, written = fork(again).result()
    assert hits == 200
    assert written < 64 * MIB, "open wrote payload"


def _written() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        name, value = line.split(":")
        if name == "wchar":
            return int(value)
    raise AssertionError("no wchar in /proc/self/io")


def usage_after_kill(folder: str) -> None:
    path = f"{folder}/kv.cyc"
    fork(store, path, "a2", 57, MIB, 64 * MIB, "kill").wait()

    def again() -> None:
        with Cache.open(path) as cache:
            assert (
                abs(cache.stats().volume.resident_bytes - 57 * (MIB + 4096)) < 2 * MIB
            )
            limit = 64 * MIB + cache.info().overhead_bytes + cache.info().shm_bytes
            for number in range(64):
                cache.put(key_of("a2 more", number), blob(key_of(number), MIB))
                assert allocated(folder) <= limit + 64 * 1024

    fork(again).result()


def killed_again_and_again(folder: str, rounds: int, capacity: int) -> None:
    """A3, F8: no file per life, whatever the place."""
    path = f"{folder}/kv.cyc"
    seen = []
    for number in range(rounds):
        fork(store, path, f"a3 {number}", 8, MIB, capacity, "kill").wait()
        names = sorted(file.name for file in Path(folder).iterdir())
        seen.append((names, allocated(folder)))
    for names, used in seen:
        assert names == ["kv.cyc", "kv.cyc-shm"]
        assert abs(used - seen[0][1]) <= 64 * 1024  # extents of the file system
    assert fork(found, path, f"a3 {rounds - 1}", 8, MIB).result() == 8


def without_auxiliary_files(folder: str) -> None:
    path = f"{folder}/kv.cyc"
    fork(store, path, "a8", 100, MIB // 4, 64 * MIB, "kill").wait()
    for file in Path(folder).iterdir():
        if file.name != "kv.cyc":
            file.unlink()
    assert fork(found, path, "a8", 100, MIB // 4).result() == 100


def elsewhere(folder: str, through: str) -> None:
    """A9: by another name of the folder, host, working directory and process."""
    real = Path(folder, "real")
    real.mkdir()
    path = f"{real}/kv.cyc"
    fork(store, path, "a9", 20, 100_000, 16 * MIB, "close").wait()
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from crash.cases_restart import found\n"
        "assert found(sys.argv[2], 'a9', 20, 100_000) == 20\n"
    )
    tests = str(Path(__file__).resolve().parents[1])
    other = Path(folder, "other")
    command = [sys.executable, "-P", "-c", script, tests, f"{other}/kv.cyc"]
    if through == "symlink":
        other.symlink_to(real)
    elif through == "relative":
        command[-1] = "real/kv.cyc"
    else:
        other.mkdir()
        setup = 'hostname elsewhere; mount --bind "$0" "$1"; shift; exec "$@"'
        command = ["unshare", "-m", "-u", "sh", "-ec", setup, real, other, *command]
    # Beside a process that has the volume open under its first name, and alone.
    keeper = fork(_keep_open, path)
    try:
        for _ in range(2):
            result = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=False
            )
            assert result.returncode == 0, result.stderr
            keeper.kill()
    finally:
        keeper.kill()


def _keep_open(path: str) -> None:
    with Cache.open(path):
        time.sleep(60)


def damaged_payloads(path: str, how: str) -> None:
    """A11, B4: each damaged block is a miss and counts once; the others are right."""
    length = 100_001

    def make() -> list[tuple[int, int]]:
        with Cache.open(path, CacheConfig(capacity=64 * MIB)) as cache:
            for number in range(100):
                key = key_of("b4", number)
                assert cache.put(key, blob(key, length))
            at = {entry.key: entry.offset for entry in cache.ls()}
        return [(n, at[key_of("b4", n)]) for n in range(100)]

    places = fork(make).result()
    hurt = places[-8:] if how != "bit" else places[::10]
    with open(path, "r+b") as file:
        for turn, (_number, offset) in enumerate(hurt):
            if how == "bit":
                at = (
                    offset
                    + (0, length // 2, length - 1, length - length % 4096)[turn % 4]
                )
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 0x10]))
            else:
                file.seek(offset)
                foreign = blob(key_of("b4", 0), 4096 * 24)
                file.write(bytes(4096 * 24) if how == "zeros" else foreign)

    def look() -> None:
        with Cache.open(path) as cache:
            report = cache.verify()
            assert report.damaged_payloads == len(hurt), report
            assert found_in(cache, "b4", 100, length) == 100 - len(hurt)
            assert cache.stats().volume.corrupt == len(hurt)
            targets = [bytearray(length) for _ in hurt]
            names = [key_of("b4", number) for number, _ in hurt]
            assert not any(cache.get_many_into(names, targets))
            assert cache.stats().volume.corrupt == len(hurt), "counted once each"
            assert cache.verify().ok

    fork(look).result()


def _is_nowhere(path: str, size: int) -> None:
    assert fork(found, path, "a12", 1, size).result() == 0


def half_a_copy(path: str) -> None:
    """A12: stopped with half of the payload written, while another stores."""
    size = 5 * MIB
    victim = fork(store, path, "a12", 1, size, 64 * MIB, "", point="put.piece:stop:3")
    assert stopped(victim)
    fork(store, path, "a12 b", 3, MIB, 64 * MIB, "close").result()
    again_while_stopped(lambda: _is_nowhere(path, size))
    victim.kill()
    assert fork(found, path, "a12", 1, size).result() == 0
    assert fork(found, path, "a12 b", 3, MIB).result() == 3


def many_entries(path: str, count: int) -> dict[str, float]:
    """A13, C4: opens soon, reads little."""

    def make() -> None:
        config = CacheConfig(
            capacity=count * 4608, expected_object_size=4096, stripes=4
        )
        data = bytes(100)
        with Cache.open(path, config) as cache:
            for first in range(0, count, 5000):
                numbers = range(first, min(first + 5000, count))
                items = [(n.to_bytes(8, "little") * 4, data) for n in numbers]
                assert all(cache.put_many(items))
            os.kill(os.getpid(), signal.SIGKILL)

    fork(make).wait(90)

    def again() -> dict[str, float]:
        began = time.monotonic()
        cache = Cache.open(path)
        opened = time.monotonic() - began
        view = cache.get((count // 2).to_bytes(8, "little") * 4)
        assert view is not None
        assert bytes(view) == bytes(100)
        assert len(cache) == count
        keys = b"".join(n.to_bytes(8, "little") * 4 for n in range(0, count, 10))
        assert all(cache.contains_many(keys))
        return {"open": opened}

    return dict(fork(again).result())


def damaged_metadata(folder: str, seed: int, places: int) -> dict[str, int]:
    """A14: 4 KiB of noise anywhere before the data: usable, or one documented error."""
    path = f"{folder}/kv.cyc"
    fork(store, path, "a14", 50, 40_000, 16 * MIB, "close").wait()

    def end_of_metadata() -> int:
        with Cache.open(path) as cache:
            return cache.info().paths[0].data_offset

    end = fork(end_of_metadata).result()
    original = Path(folder, "original")
    shutil.copyfile(path, original)
    dice = random.Random(seed)
    pages = sorted(dice.sample(range(4, end // 4096), min(places, end // 4096) - 4))
    outcomes = {"usable": 0, "refused": 0}
    for page in [0, 1, 2, 3, *pages]:
        shutil.copyfile(original, path)
        with open(path, "r+b") as file:
            file.seek(page * 4096)
            file.write(dice.randbytes(4096))
        outcomes[fork(_open_damaged, path).result()] += 1
    return outcomes


def _open_damaged(path: str) -> str:
    outcome = "usable"
    try:
        cache = Cache.open(path)
    except CycloneError:
        outcome = "refused"
        cache = Cache.open(path, CacheConfig(capacity=16 * MIB, on_mismatch="recreate"))
    found_in(cache, "a14", 50, 40_000)
    key = key_of("a14 new")
    assert cache.put(key, blob(key, 9000))
    cache.close()
    with Cache.open(path) as cache:
        view = cache.get(key)
        assert view is not None
        assert right(view, key, 9000)
        report = cache.verify()
        assert report.ok, report.first_fault
    return outcome


# ---- F: several processes ----------------------------------------------------------


def creators(folder: str, rounds: int, processes: int, *, kill: bool) -> None:
    dice = random.Random(rounds)
    for number in range(rounds):
        path = f"{folder}/{number}.cyc"
        reading, writing = os.pipe()
        crew = [fork(_create, path, me, reading, writing) for me in range(processes)]
        os.close(reading)
        os.close(writing)  # the barrier: all read the end of the pipe
        dead = 0
        if kill:
            time.sleep(dice.random() * 0.005)
            crew[0].signal(signal.SIGKILL)
            crew[0].wait()
            dead = 1
        ids = {child.result(30) for child in crew[dead:]}
        assert len(ids) == 1, "several volumes"
        names = sorted(file.name for file in Path(folder).iterdir())
        assert all(name.endswith((".cyc", ".cyc-shm")) for name in names), names
        Path(path).unlink()


def _create(path: str, me: int, barrier: int, opener: int) -> str:
    os.close(opener)
    os.read(barrier, 1)
    with Cache.open(path, CacheConfig(capacity=16 * MIB)) as cache:
        key = key_of("f2", me)
        assert cache.put(key, blob(key, 5000))
        view = cache.get(key)
        assert view is not None
        assert right(view, key, 5000)
        del view
        return cache.info().set_id.hex()


def killed_readers(path: str, rounds: int) -> None:
    """F5, C9: a surviving process needs no restart, and slots are used again."""
    keys = [key_of("f5", n) for n in range(4)]
    reading, writing = os.pipe()

    def survive() -> None:
        os.close(writing)
        cache = Cache.open(path, CacheConfig(capacity=16 * MIB))
        for key in keys:
            assert cache.put(key, blob(key, 90_000))
        while os.read(reading, 1):
            assert cache.stats().volume.processes <= 2
        for number in range(80):
            key = key_of("f5 lap", number)
            assert cache.put(key, blob(key, 900_000)), "pins of the dead hold pages"
        deadline = time.monotonic() + 5
        while cache.stats().volume.pinned_entries and time.monotonic() < deadline:
            time.sleep(0.05)
        assert cache.stats().volume.pinned_entries == 0
        assert cache.stats().volume.processes == 1
        report = cache.verify()
        assert report.ok, report.first_fault

    def look_and_die() -> None:
        cache = Cache.open(path, CacheConfig(capacity=16 * MIB))
        view = cache.get(keys[os.getpid() % 4])
        assert view is None or len(view) == 90_000
        os.kill(os.getpid(), signal.SIGKILL)

    survivor = fork(survive)
    for _ in range(rounds):
        assert fork(look_and_die).wait() == -signal.SIGKILL
        os.write(writing, b".")
    os.close(writing)
    survivor.result()


def lock_holder_killed(path: str, rounds: int) -> None:
    """F10: the dead are succeeded; how the others fare is counted, not waited for."""
    for number in range(rounds):
        keeper_ready, ready = os.pipe()
        point = f"{('put.locked', 'put.reserved', 'stripe.unlock')[number % 3]}:stop:3"

        def keep(ready: int = ready) -> None:
            cache = Cache.open(path, CacheConfig(capacity=16 * MIB))
            os.write(ready, b".")
            time.sleep(0.05)
            began = time.monotonic()
            key = key_of("f10", os.getpid())
            while not cache.put(key, blob(key, 5000)):
                assert time.monotonic() - began < 10, "a dead owner was not succeeded"
            report = cache.verify()
            assert report.ok, report.first_fault

        keeper = fork(keep)
        os.read(keeper_ready, 1)
        victim = fork(store, path, f"f10 {number}", 9, 9000, 16 * MIB, "", point=point)
        assert stopped(victim)
        victim.kill()
        keeper.result()
        os.close(keeper_ready)
        os.close(ready)


def eight_share(path: str) -> None:
    """F7, C3: one volume, every process sees everything."""
    reading, writing = os.pipe()
    crew: list[Child] = []

    def work(me: int) -> int:
        os.close(writing)
        cache = Cache.open(path, CacheConfig(capacity=64 * MIB))
        for number in range(100):
            key = key_of("f7", me, number)
            assert cache.put(key, blob(key, 20_000))
        gates[me].set_done()
        os.read(reading, 1)
        return sum(found_in_pairs(cache, other) for other in range(8))

    gates = [_Gate() for _ in range(8)]
    crew = [fork(work, me) for me in range(8)]
    for gate in gates:
        gate.wait()
    os.close(writing)
    assert [child.result() for child in crew] == [800] * 8

    def ninth() -> None:
        try:
            Cache.open(path, CacheConfig(capacity=128 * MIB))
        except MismatchError as error:
            text = str(error)
        else:
            raise AssertionError("another capacity was accepted")
        assert str(64 * MIB) in text
        assert str(128 * MIB) in text

    fork(ninth).result()
    os.close(reading)


class _Gate:
    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def set_done(self) -> None:
        os.write(self.writing, b".")

    def wait(self) -> None:
        os.close(self.writing)
        assert os.read(self.reading, 1) == b"."
        os.close(self.reading)


def found_in_pairs(cache: Cache, who: int) -> int:
    hits = 0
    for number in range(100):
        key = key_of("f7", who, number)
        view = cache.get(key)
        if view is not None:
            assert right(view, key, 20_000)
            hits += 1
    return hits


def two_capacities(path: str, seconds: float) -> None:
    """F1: the geometry is fixed at creation, whatever is running."""
    go = os.pipe()

    def run() -> None:
        os.close(go[1])
        cache = Cache.open(path, CacheConfig(capacity=16 * MIB))
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            number += 1
            key = key_of("f1", os.getpid(), number)
            assert cache.put(key, blob(key, 300_000))
            view = cache.get(key)  # None after a lap of the other process
            assert view is None or right(view, key, 300_000)
            del view
        os.read(go[0], 1)  # in use until the intruder has ended

    def intrude() -> None:
        os.close(go[1])
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                Cache.open(path, CacheConfig(capacity=32 * MIB, on_mismatch="recreate"))
            except MismatchError:
                continue
            raise AssertionError("a volume in use was recreated")

    first = fork(run)
    while not Path(path).exists() or fork(found, path, "", 0, 1).wait() != 0:
        time.sleep(0.01)
    second, intruder = fork(run), fork(intrude)
    intruder.result()
    os.close(go[1])
    for child in (first, second):
        child.result()

    def verify() -> None:
        with Cache.open(path) as cache:
            report = cache.verify()
            assert report.ok, report.first_fault

    fork(verify).result()


def opened_twice(folder: str) -> None:
    """F4: by other spellings, and with a descriptor of the program's own."""
    path = f"{folder}/kv.cyc"
    os.mkdir(f"{folder}/sub")
    os.symlink(folder, f"{folder}/link")
    key = key_of("f4")

    def run() -> None:
        first = Cache.open(path, CacheConfig(capacity=16 * MIB))
        assert first.put(key, blob(key, 500_000))
        view = first.get(key)
        assert view is not None
        os.chdir(folder)
        for name in ("kv.cyc", f"{folder}/sub/../kv.cyc", f"{folder}/link/kv.cyc"):
            with Cache.open(name) as other:
                assert other.contains(key)
        with open(path, "rb") as plain:  # POSIX locks would end with it
            plain.read(10)
        ready.set_done()
        os.read(go[0], 1)
        assert right(view, key, 500_000), "N2: a held view has changed"

    ready, go = _Gate(), os.pipe()
    holder = fork(run)
    ready.wait()
    stored = fork(store, path, "f4 laps", 48, 900_000, 16 * MIB, "close").result()
    assert stored == 48
    os.write(go[1], b".")
    holder.result()


# ---- C: eviction, clear ------------------------------------------------------------


def cleared_for_all(path: str) -> None:
    """C17: every process sees the clear at once; a held view stays."""
    count = 40
    fork(store, path, "c17", count, 50_000, 16 * MIB, "close").wait()
    ready, go = _Gate(), os.pipe()

    def hold() -> None:
        os.close(go[1])
        with Cache.open(path) as cache:
            views = [cache.get(key_of("c17", n)) for n in range(5)]
            ready.set_done()
            os.read(go[0], 1)
            assert not any(cache.contains(key_of("c17", n)) for n in range(count))
            for number, view in enumerate(views):
                assert view is not None
                assert right(view, key_of("c17", number), 50_000), "N2: has changed"
            del views, view

    def clear() -> None:
        with Cache.open(path) as cache:
            assert cache.clear() == count

    holder = fork(hold)
    ready.wait()
    fork(clear).result()
    assert fork(found, path, "c17", count, 50_000).result() == 0
    assert fork(_found_reading, path, count).result() == 0
    os.close(go[1])
    holder.result()
    assert fork(found, path, "c17", count, 50_000).result() == 0, "back after reopening"


def _found_reading(path: str, count: int) -> int:
    return found(path, "c17", count, 50_000, mode="r")


def reader_before_namespace(path: str) -> None:
    """C17: a reader that came before the first block of its namespace."""
    config = CacheConfig(capacity=16 * MIB)
    key, other_key = key_of("late"), key_of("late other")
    with (
        Cache.open(path, config, namespace="a") as first,
        Cache.open(path, mode="r", namespace="b") as reader,
        Cache.open(path, namespace="b") as writer,
    ):
        assert writer.put(key, b"v" * 100)
        assert reader.contains(key)
        assert first.put(other_key, b"w")
        first.clear()
        assert reader.contains(key), "another namespace was cleared"
        assert len(reader) == len(writer) == 1
        writer.clear()
        assert not reader.contains(key), "a cleared block is present for a reader"
        assert reader.get(key) is None, "a cleared block is served to a reader"


def lookup_then_load(path: str, rounds: int) -> dict[str, int]:
    """C10, B7, C16: evicted or removed between lookup and load is None, never wrong."""
    cache = Cache.open(path, CacheConfig(capacity=16 * MIB))
    keys = [key_of("c10", n) for n in range(32)]
    stop = threading.Event()
    refused = [0]

    def churn(me: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            key = key_of("churn", me, number)
            if not cache.put(key, blob(key, 200_000)):
                refused[0] += 1
            if number % 5 == 0:
                cache.remove(keys[number % 32])

    threads = [threading.Thread(target=churn, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    counts = {"hits": 0, "misses": 0}
    try:
        for turn in range(rounds):
            key = keys[turn % 32]
            cache.put(key, blob(key, 30_000))
            ahead = cache.longest_prefix(keys)
            for other in keys[:ahead]:
                view = cache.get(other)
                counts["hits" if view is not None else "misses"] += 1
                if view is not None:
                    assert right(view, other, 30_000), fault_of(view, other, 30_000)
                    del view
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert cache.stats().volume.pinned_entries == 0
    assert not cache.stats().volume.puts_no_run
    report = cache.verify()
    assert report.ok, report.first_fault
    cache.close()
    return counts


def half_written(path: str, seconds: float) -> None:
    """B2: readers of the block that is just being stored."""
    length, capacity = 3 * MIB, 64 * MIB
    import mmap

    newest = mmap.mmap(-1, 8)

    def write() -> None:
        with Cache.open(path, CacheConfig(capacity=capacity)) as cache:
            end = time.monotonic() + seconds
            number = 0
            while time.monotonic() < end:
                number += 1
                newest[:8] = number.to_bytes(8, "little")
                key = key_of("b2", number)
                assert cache.put(key, blob(key, length))

    def read() -> int:
        hits = 0
        with Cache.open(path, CacheConfig(capacity=capacity)) as cache:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                key = key_of("b2", int.from_bytes(newest[:8], "little"))
                view = cache.get(key)
                if view is not None:
                    assert right(view, key, length), fault_of(view, key, length)
                    hits += 1
                    del view
        return hits

    crew = [fork(write), *(fork(read) for _ in range(3))]
    for child in crew:
        child.result()


def sessions(path: str, seconds: float) -> None:
    """B8: long sessions at 1.5 x capacity; no word of another's."""

    def run(me: int) -> None:
        cache = Cache.open(path, CacheConfig(capacity=16 * MIB))
        dice = random.Random(me)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            session = dice.randrange(6)
            for number in range(16):
                key = key_of("b8", session, number)
                view = cache.get(key)
                if view is None:
                    cache.put(key, blob(key, 250_000))
                    continue
                assert right(view, key, 250_000), fault_of(view, key, 250_000)
                del view
            small = key_of("b8 small", me, dice.randrange(99))
            cache.put(small, blob(small, dice.randrange(9000), 1), overwrite=True)

    for child in [fork(run, me) for me in range(3)]:
        child.result()


# ---- E: ends of a process ----------------------------------------------------------

ENDINGS = {
    "main returns": ("", 0),
    "sys.exit": ("sys.exit(7)", 7),
    "os._exit": ("os._exit(9)", 9),
    "unhandled": ("raise KeyboardInterrupt", -signal.SIGINT),
}


def ends_without_close(path: str, ending: str) -> None:
    """E7: a daemon thread puts in a loop while the interpreter goes down."""
    last, status = ENDINGS[ending]
    script = (
        "import os, sys, threading, time\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from crash.blobs import blob, key_of\n"
        "from cyclone_kv import Cache, CacheConfig\n"
        "cache = Cache.open(sys.argv[2], CacheConfig(capacity=64 << 20))\n"
        "def loop():\n"
        "    for n in range(10**6):\n"
        "        key = key_of('e7', n)\n"
        "        if cache.put(key, blob(key, 5000)):\n"
        "            os.write(1, b'.')\n"
        "        time.sleep(0.001)\n"
        "threading.Thread(target=loop, daemon=True).start()\n"
        "time.sleep(0.3)\n"
        f"{last}\n"
    )
    tests = str(Path(__file__).resolve().parents[1])
    result = subprocess.run(
        [sys.executable, "-P", "-c", script, tests, path],
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == status, result
    assert b"Fatal" not in result.stderr, result.stderr
    stored = len(result.stdout)
    assert stored > 0
    assert fork(found, path, "e7", stored, 5000).result() == stored


# ---- N5, events --------------------------------------------------------------------


def waiting_open(folder: str) -> dict[str, float]:
    """N5: while one thread waits for a stopped creator, others get on with theirs."""
    path, other = f"{folder}/kv.cyc", f"{folder}/other.cyc"
    point = "format.marked:stop:1"
    creator = fork(store, path, "n5", 1, 100, 16 * MIB, "", point=point)
    assert stopped(creator)

    def run() -> dict[str, float]:
        config = CacheConfig(capacity=16 * MIB)
        caches = [Cache.open(f"{other}{n}", config) for n in range(2)]
        assert caches[0].put(b"k" * 32, b"v" * 5000)
        view = caches[0].get(b"k" * 32)
        caches[0].close()

        def wait() -> None:
            try:
                Cache.open(path, config.replace(open_timeout=6))
            except CycloneError:
                return

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.2)
        took: dict[str, float] = {}
        began = time.monotonic()
        del view
        took["last view of a closed cache"] = time.monotonic() - began
        began = time.monotonic()
        caches[1].close()
        took["close of another volume"] = time.monotonic() - began
        began = time.monotonic()
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        took["fork"] = time.monotonic() - began
        waiting.join()
        return took

    took = fork(run).result()
    creator.kill()
    return dict(took)


def event_of_a_stopped_writer(path: str, point: str) -> None:
    """The fold of all events is what is present, in whatever order it happened."""
    config = CacheConfig(capacity=16 * MIB)
    key = key_of("event", 0)
    writer = fork(store, path, "event", 1, 5000, 16 * MIB, "", point=f"{point}:stop:1")
    assert stopped(writer)

    def remove() -> None:
        with Cache.open(path, config) as cache:
            again_while_stopped(lambda: cache.remove(key))
            writer.signal(signal.SIGCONT)
            deadline = time.monotonic() + 10
            while Path(f"/proc/{writer.pid}/stat").read_text().split()[2] != "Z":
                assert time.monotonic() < deadline
                time.sleep(0.01)
            present = _fold(cache)
            assert present == {entry.key for entry in cache.ls()}

    fork(remove).result(60 + STOP_SECONDS)
    writer.wait()


def _fold(cache: Cache) -> set[bytes]:
    present: set[bytes] = set()
    events = cache.events()
    if events.lost:
        return {entry.key for entry in cache.ls()}  # told to begin anew
    for event in events.items:
        if event.kind == "stored":
            present.add(event.key)
        elif event.kind == "removed":
            present.discard(event.key)
        else:
            present.clear()
    return present


def event_of_a_killed_remover(path: str, point: str) -> None:
    """A removal that took effect is announced, or events are reported as lost."""
    ready, go = _Gate(), os.pipe()

    def keep() -> None:
        os.close(go[1])
        with Cache.open(path, CacheConfig(capacity=16 * MIB)) as cache:
            key = key_of("event", 0)
            assert cache.put(key, b"v" * 5000)
            ready.set_done()
            os.read(go[0], 1)
            assert cache.verify().ok  # sweeps what the dead left
            assert _fold(cache) == {entry.key for entry in cache.ls()}

    def remove() -> None:
        Cache.open(path).remove(key_of("event", 0))

    keeper = fork(keep)
    ready.wait()
    assert fork(remove, point=f"{point}:kill:1").wait() == -signal.SIGKILL
    os.close(go[1])
    keeper.result()


def event_of_a_killed_writer(path: str, point: str) -> None:
    """A block that can be found was announced, or events are reported as lost."""
    ready, go = _Gate(), os.pipe()
    config = CacheConfig(capacity=16 * MIB)

    def keep() -> None:
        os.close(go[1])
        with Cache.open(path, config) as cache:
            assert cache.put(key_of("event", 1), b"v" * 5000)
            ready.set_done()
            os.read(go[0], 1)
            assert cache.verify().ok  # sweeps what the dead left
            assert _fold(cache) == {entry.key for entry in cache.ls()}

    keeper = fork(keep)
    ready.wait()
    writer = fork(store, path, "event", 1, 5000, 16 * MIB, "", point=f"{point}:kill:1")
    assert writer.wait() == -signal.SIGKILL
    os.close(go[1])
    keeper.result()


def event_of_a_late_process(path: str, what: str, end: str) -> None:
    """What was overtaken by others is not the last word, whoever dies over it.

    It is stopped between its change and its event; others change the block, and the
    event is recorded after theirs.  Then it goes on, or dies at the step `end`.
    """
    ready, go, again = _Gate(), os.pipe(), _Gate()
    key, config = key_of("event", 0), CacheConfig(capacity=16 * MIB)

    def keep() -> None:
        with Cache.open(path, config) as cache:
            assert what == "store" or cache.put(key, b"v" * 5000)
            ready.set_done()
            os.read(go[0], 1)
            if what == "store":
                assert cache.remove(key)
            else:
                assert cache.put(key, b"w" * 6000)
            again.set_done()
            os.read(go[0], 1)
            assert cache.verify().ok  # sweeps what the dead left
            present = {entry.key for entry in cache.ls()}
            # A removal that goes on takes the newer block as well.
            assert present == ({key} if what == "remove" and end else set())
            assert _fold(cache) == present

    def change() -> None:
        with Cache.open(path, config) as cache:
            if what == "store":
                cache.put(key, b"v" * 5000)
            else:
                cache.remove(key)

    keeper = fork(keep)
    ready.wait()
    point = {"store": "put.newest", "remove": "kill.condemned"}[what] + ":stop"
    late = fork(change, point=point + (f",{end}:kill" if end else ""))
    assert stopped(late)
    os.write(go[1], b".")
    again.wait()
    late.signal(signal.SIGCONT)
    assert late.wait() == (-signal.SIGKILL if end else 0)
    os.write(go[1], b".")
    keeper.result()


def unfinished_removal(path: str, action: str) -> bool:
    """N3: two removals meet, and then all die; whether the first block is back, whole.

    The first has taken the block away and dies, or is stopped, before it strikes the
    record.  The second removes a newer block of the key, and syncs.
    """
    key, length = key_of("unfinished", 0), 50_000
    config = CacheConfig(capacity=16 * MIB)
    ready, go = _Gate(), os.pipe()

    def keep() -> None:
        cache = Cache.open(path, config)
        assert cache.put(key, blob(key, length, 1))
        ready.set_done()
        os.read(go[0], 1)
        assert not cache.contains(key)
        assert cache.put(key, blob(key, length, 2))
        assert cache.remove(key)
        cache.sync()
        os.kill(os.getpid(), signal.SIGKILL)

    def remove() -> None:
        Cache.open(path, config).remove(key)

    keeper = fork(keep)
    ready.wait()
    remover = fork(remove, point=f"kill.condemned:{action}:1")
    if action == "kill":
        assert remover.wait() == -signal.SIGKILL
    else:
        assert stopped(remover)
    os.write(go[1], b".")
    assert keeper.wait() == -signal.SIGKILL
    remover.kill()

    def look() -> bool:
        with Cache.open(path) as cache:
            view = cache.get(key)
            assert view is None or right(view, key, length, 1), "not the older block"
            back = view is not None
            del view
            assert cache.put(key, blob(key, length, 3), overwrite=True)
            assert cache.remove(key)
            return back

    back = bool(fork(look).result())
    assert fork(found, path, "unfinished", 1, length).result() == 0
    return back


# ---- C: capacity -------------------------------------------------------------------


def much_more_than_fits(folder: str) -> None:
    """C1, N6: no put makes a file grow, and eviction is on."""
    path = f"{folder}/kv.cyc"
    config = CacheConfig.for_kv_tier("64MiB", admission="always")
    with Cache.open(path, config) as cache:
        info = cache.info()
        limit = 64 * MIB + info.overhead_bytes + info.shm_bytes + 64 * 1024
        for number in range(500):
            key = key_of("c1", number)
            assert cache.put(key, blob(key, MIB))
            if number % 50 == 0:
                assert allocated(folder) <= limit
        assert cache.stats().volume.evictions > 400


def stored_and_removed(path: str, rounds: int) -> None:
    """C2: usage comes back to where it was, and nothing is refused."""
    with Cache.open(path, CacheConfig(capacity=64 * MIB)) as cache:
        key = key_of("c2")
        for number in range(rounds):
            assert cache.put(key, blob(key, MIB))
            if number % 3 == 0:
                length = 4096 * (number % 7)
                assert cache.put(key, blob(key, length), overwrite=True)
            if number % 5 == 0:
                cache.clear()
            else:
                assert cache.remove(key)
            stats = cache.stats().volume
            assert (stats.resident_bytes, stats.entries) == (0, 0)
        for number in range(32):
            key = key_of("c2", number)
            assert cache.put(key, blob(key, MIB))
        for number in range(32):
            key = key_of("c2", number)
            view = cache.get(key)
            assert view is not None
            assert right(view, key, MIB)
            del view


def looked_up_and_not_loaded(path: str) -> None:
    """C9: a lookup pins nothing, and a view dropped by an exception is dropped."""
    with Cache.open(path, CacheConfig(capacity=16 * MIB)) as cache:
        names = [key_of("c9", number) for number in range(20)]
        for key in names:
            assert cache.put(key, blob(key, 100_000))
        for _ in range(10_000):
            assert cache.longest_prefix(names) == 20
        for key in names:
            try:
                view = cache.get(key)
                raise KeyError(view is not None)
            except KeyError:
                del view
        assert cache.stats().volume.pinned_entries == 0
        for number in range(40):
            key = key_of("c9 lap", number)
            assert cache.put(key, blob(key, 900_000))
