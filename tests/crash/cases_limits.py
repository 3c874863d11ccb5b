# SPDX-License-Identifier: Apache-2.0
"""Small disks, limits of a process, memory groups: processes of test_limits.py."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from crash.blobs import blob, key_of, right
from crash.cases_restart import found_in
from crash.disks import fill, remount
from crash.nursery import fork

from cyclone_kv import Cache, CacheConfig, CycloneError, NoSpaceError

MIB = 1 << 20
PAGE = 4096
NOBODY = 65_534
COUNT, LENGTH = 24, 90_000


def _keys(who: str) -> list[bytes]:
    return [key_of(who, number) for number in range(COUNT)]


def _fill_cache(cache: Cache, who: str) -> None:
    for key in _keys(who):
        assert cache.put(key, blob(key, LENGTH))


def _create(path: str, who: str) -> None:
    def run() -> None:
        with Cache.open(path, CacheConfig(capacity=16 * MIB)) as cache:
            _fill_cache(cache, who)

    fork(run).result()


def _all_there(path: str, who: str) -> None:
    """A process without any limit finds everything."""

    def run() -> None:
        with Cache.open(path) as cache:
            assert found_in(cache, who, COUNT, LENGTH) == COUNT
            report = cache.verify()
            assert report.ok, report.first_fault

    fork(run).result()


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


# ---- disks -------------------------------------------------------------------------


def every_free_size(folder: str, step_bytes: int) -> dict[str, int]:
    """D1, N6: whatever is free, `open` has all of it or leaves nothing."""
    path, filler = f"{folder}/kv.cyc", f"{folder}/filler"
    outcomes = {"opened": 0, "refused": 0}

    def attempt() -> str:
        try:
            cache = Cache.open(path, CacheConfig(capacity=16 * MIB))
        except NoSpaceError as error:
            refusal = (error.errno, str(error))
        else:
            refusal = None
        if refusal is not None:
            assert refusal[0] == errno.ENOSPC
            assert "bytes" in refusal[1]
            left = [file.name for file in Path(folder).iterdir()]
            assert left == ["filler"], left
            return "refused"
        with cache:
            fill(f"{folder}/rest")
            for number in range(40):  # twice round
                key = key_of("size", number)
                assert cache.put(key, blob(key, 700_000)), "a full disk refused a put"
            cache.sync()
        Path(folder, "rest").unlink()
        with Cache.open(path) as cache:
            assert len(cache) > 0
            report = cache.verify()
            assert report.ok, report.first_fault
        return "opened"

    for left in range(15 * MIB, 21 * MIB, step_bytes):
        fill(filler, left)
        outcomes[fork(attempt).result()] += 1
        for file in Path(folder).iterdir():
            file.unlink()
    return outcomes


def quota(folder: str) -> None:
    """A user who may have 8 MiB asks for 16 and is told so, in words; 4 files fit."""
    home = Path(folder, "home")
    home.mkdir(mode=0o755)
    os.chown(home, NOBODY, NOBODY)
    Path(folder).chmod(0o755)

    def run() -> None:
        _become_nobody()
        try:
            Cache.open(f"{home}/kv.cyc", CacheConfig(capacity=16 * MIB))
        except NoSpaceError as error:
            refusal = (error.errno, str(error))
        else:
            raise AssertionError("a volume larger than the quota was created")
        assert refusal[0] in (errno.EDQUOT, errno.ENOSPC)
        assert "bytes" in refusal[1]
        assert not list(home.iterdir()), "something was left behind"

    fork(run).result()


def read_only(folder: str, end: str) -> None:
    """Mode "r" reads everything, "rw" is refused in words, nothing is written."""
    path = f"{folder}/kv.cyc"

    def make() -> None:
        cache = Cache.open(path, CacheConfig(capacity=16 * MIB))
        _fill_cache(cache, "ro")
        if end == "close":
            cache.close()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    fork(make).wait()
    remount(folder, "ro")

    def write() -> tuple[int | None, str]:
        try:
            Cache.open(path)
        except OSError as error:
            return error.errno, str(error)
        raise AssertionError("opened for writing on a read-only file system")

    def read() -> None:
        with Cache.open(path, mode="r") as cache, Cache.open(path, mode="r") as other:
            assert found_in(cache, "ro", COUNT, LENGTH) == COUNT
            assert other.contains_many(_keys("ro")) == [True] * COUNT
            buffers = [bytearray(LENGTH) for _ in range(COUNT)]
            assert all(cache.get_many_into(_keys("ro"), buffers))

    code, text = fork(write).result()
    assert code == errno.EROFS
    assert path in text
    assert 'mode "r"' in text
    for _ in range(2):
        fork(read).result()
    remount(folder, "rw")
    _all_there(path, "ro")


def turned_read_only(folder: str, device: str) -> None:
    """The kernel remounts a file system after an error of its own."""
    path = f"{folder}/kv.cyc"

    def run() -> dict[str, object]:
        cache = Cache.open(path, CacheConfig(capacity=16 * MIB, sync_interval=None))
        _fill_cache(cache, "turned")
        cache.sync()
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")
        stored = [cache.put(key_of("later", n), bytes(9000)) for n in range(8)]
        for key in _keys("turned"):
            view = cache.get(key)
            assert view is None or right(view, key, LENGTH)
            del view
        synced = True
        try:
            cache.sync()
        except CycloneError:
            synced = False
        cache.remove(key_of("turned", 0))
        with contextlib.suppress(CycloneError):
            cache.clear()
        cache.close()
        return {"stored": sum(stored), "synced": synced}

    outcome = fork(run).result()
    assert not outcome["stored"] or outcome["synced"], outcome


# ---- limits of a process -----------------------------------------------------------


def _tour(path: str, config: CacheConfig | None) -> None:
    """A bit of everything; each step may be refused in words."""
    try:
        cache = Cache.open(path, config)
    except MemoryError:
        return
    except (CycloneError, OSError) as error:
        text = str(error)
        cache = None
    if cache is None:
        assert len(text) > 20, text
        return
    steps: list[Callable[[], object]] = [
        lambda: cache.put(key_of("tour"), blob(key_of("tour"), 300_000)),
        lambda: cache.get(key_of("limit", 3)),
        lambda: cache.read(key_of("limit", 4)),
        lambda: cache.get_many_into(
            _keys("limit")[:8], [bytearray(LENGTH) for _ in range(8)]
        ),
        lambda: _located(cache, key_of("limit", 5)),
        lambda: cache.prefetch(_keys("limit")),
        cache.verify,
        cache.sync,
        cache.stats,
        lambda: list(cache.ls()),
    ]
    for step in steps:
        with contextlib.suppress(CycloneError, MemoryError, OSError):
            step()
    cache.close()


def _located(cache: Cache, key: bytes) -> None:
    place = cache.locate(key)
    if place is not None:
        with place:
            assert os.pread(place.fd, 8, place.offset) == blob(key, 8)


def _attempts(path: str, limit: int, values: list[int], create: bool) -> dict[str, int]:
    """Tours under each value of a limit; how many could open the volume."""
    outcomes = {"opened": 0, "refused": 0}

    def attempt(value: int) -> str:
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
        config = CacheConfig(capacity=16 * MIB) if create else None
        try:
            Cache.open(path, config).close()
            opened = "opened"
        except (CycloneError, MemoryError, OSError):
            opened = "refused"
        _tour(path, config)
        return opened

    for value in values:
        child = fork(attempt, value)
        answer = child.reply()
        status = child.wait()
        child.close()  # or the next one begins with fewer descriptors
        # The interpreter itself may be unable to answer; a signal is ours.
        assert status >= 0, f"limit {value}: ended by signal {-status}"
        if answer is not None and "result" in answer:
            outcomes[answer["result"]] += 1
        else:
            failure = "" if answer is None else answer["failure"]
            assert answer is None or "MemoryError" in failure, failure
            outcomes["refused"] += 1
        if create:
            for name in (path, f"{path}-shm"):
                Path(name).unlink(missing_ok=True)
    return outcomes


def address_space(path: str) -> dict[str, int]:
    """RLIMIT_AS from what the process has already to enough."""
    _create(path, "limit")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    steps = [*range(0, 4 * MIB, MIB // 4), *range(4 * MIB, 100 * MIB, 8 * MIB)]
    values = [size + step for step in steps]
    outcomes = _attempts(path, resource.RLIMIT_AS, values, create=False)
    _all_there(path, "limit")
    return outcomes


def _lowest_free_descriptor() -> int:
    file = os.dup(0)
    os.close(file)
    return file


def descriptors(path: str, *, create: bool) -> dict[str, int]:
    """RLIMIT_NOFILE from no further descriptor to enough."""
    if not create:
        _create(path, "limit")
    lowest = _lowest_free_descriptor() + 1  # the pipe of the child comes on top
    limits = list(range(lowest, lowest + 20))
    outcomes = _attempts(path, resource.RLIMIT_NOFILE, limits, create)
    if not create:
        _all_there(path, "limit")
    return outcomes


def too_few_descriptors_in_words(path: str) -> None:
    def run() -> None:
        own = _lowest_free_descriptor()
        texts = set()
        for more in range(12):
            resource.setrlimit(resource.RLIMIT_NOFILE, (own + more, own + 500))
            try:
                Cache.open(path, CacheConfig(capacity=16 * MIB)).close()
            except OSError as error:
                if error.errno == errno.EMFILE:
                    texts.add(str(error))
        assert texts
        for text in texts:
            assert "ulimit -n" in text, text

    fork(run).result()


def file_size(folder: str, default_signal: bool) -> dict[str, int]:
    """RLIMIT_FSIZE: in words, and never by SIGXFSZ, which Python ignores by default."""
    path = f"{folder}/kv.cyc"
    outcomes = {"opened": 0, "refused": 0}

    def attempt(limit: int) -> str:
        if default_signal:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            cache = Cache.open(path, CacheConfig(capacity=16 * MIB))
        except NoSpaceError as error:
            refusal = (error.errno, str(error))
            cache = None
        if cache is None:
            assert refusal[0] == errno.EFBIG
            assert "ulimit -f" in refusal[1], refusal
            return "refused"
        with cache:
            _fill_cache(cache, "fsize")
            # Lowered while it is open: puts are refused, the rest goes on.
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 * MIB, resource.RLIM_INFINITY))
            for number in range(4):
                assert not cache.put(key_of("later", number), bytes(200_000))
            with contextlib.suppress(CycloneError):
                cache.sync()
        return "opened"

    for limit in (0, 4096, 20_000, 100_000, MIB, 8 * MIB, 15 * MIB, 64 * MIB):
        outcomes[fork(attempt, limit).result()] += 1
        left = [file.name for file in Path(folder).iterdir()]
        assert not left or limit == 64 * MIB, left
    _all_there(path, "fsize")

    def again() -> str:
        """A volume that exists, and a limit below its end."""
        if default_signal:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, resource.RLIM_INFINITY))
        with Cache.open(path, mode="r") as cache:
            assert found_in(cache, "fsize", COUNT, LENGTH) == COUNT
        try:
            Cache.open(path)
        except NoSpaceError as error:
            return str(error)
        raise AssertionError("opened although it cannot be written")

    assert "ulimit -f" in fork(again).result()
    _all_there(path, "fsize")
    return outcomes


def own_signal_handler(path: str) -> None:
    """Who has a handler for SIGXFSZ keeps it; exec gets the default back."""

    def run() -> None:
        seen: list[int] = []
        signal.signal(signal.SIGXFSZ, lambda number, _: seen.append(number))
        with Cache.open(path, CacheConfig(capacity=16 * MIB)) as cache:
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
            assert not cache.put(key_of("signal"), bytes(2 * MIB))
        assert signal.SIGXFSZ in seen

    fork(run).result()

    def inherited() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        with Cache.open(path):
            pass
        status = Path("/proc/self/status").read_text()
        ignored = int(status.split("SigIgn:")[1].split()[0], 16)
        return ignored >> (signal.SIGXFSZ - 1) & 1

    assert fork(inherited).result() == 0


def locked_memory(folder: str) -> None:
    """RLIMIT_MEMLOCK of 0 and of a page: it works, without locked pages."""
    path = f"{folder}/kv.cyc"
    os.chown(folder, NOBODY, NOBODY)
    for limit in (0, PAGE, 64 * 1024):

        def run(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
            _become_nobody()
            with Cache.open(path, CacheConfig(capacity=16 * MIB)) as cache:
                _fill_cache(cache, "memlock")
                assert found_in(cache, "memlock", COUNT, LENGTH) == COUNT

        fork(run).result()


def no_threads(folder: str) -> None:
    """RLIMIT_NPROC: an error in words, and nothing is left."""
    path = f"{folder}/kv.cyc"
    os.chown(folder, NOBODY, NOBODY)

    def run() -> tuple[int | None, str]:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        _become_nobody()
        try:
            Cache.open(path, CacheConfig(capacity=16 * MIB))
        except OSError as error:
            return error.errno, str(error)
        raise AssertionError("opened without its thread")

    code, text = fork(run).result()
    assert code == errno.EAGAIN, text
    assert "ulimit -u" in text
    assert not list(Path(folder).iterdir())


def no_thread_keys(path: str) -> None:
    """Other libraries have taken every key of the C library for thread memory."""
    _create(path, "keys")

    def run() -> None:
        library = ctypes.CDLL(None)
        key = ctypes.c_uint()
        taken = 0
        while library.pthread_key_create(ctypes.byref(key), None) == 0:
            taken += 1
        assert taken > 0
        with Cache.open(path) as cache:
            assert found_in(cache, "keys", COUNT, LENGTH) == COUNT
            report = cache.verify()
            assert report.ok, report.first_fault

    fork(run).result()


# ---- memory ------------------------------------------------------------------------


def small_memory_group(path: str, tasks: str, capacity: int, rounds: int) -> int:
    """Everything of a volume in a group that holds a fraction of it."""

    def run() -> int:
        Path(tasks).write_text(str(os.getpid()))
        length = 2 * MIB
        wrong = 0
        config = CacheConfig.for_kv_tier(capacity, admission="always")
        with Cache.open(path, config) as cache:
            total = capacity // length
            for number in range(total * rounds):
                key = key_of("memory", number)
                assert cache.put(key, blob(key, length)), f"{number} was refused"
            keys = [key_of("memory", n) for n in range(total * rounds - total, number)]
            held = [view for view in map(cache.get, keys[:40]) if view is not None]
            for key in keys:
                view = cache.get(key)
                wrong += view is not None and not right(view, key, length)
                del view
            buffers = [bytearray(length) for _ in range(4)]
            for first in range(0, len(keys) - 4, 4):
                batch = keys[first : first + 4]
                for key, buffer, answer in zip(
                    batch, buffers, cache.get_many_into(batch, buffers), strict=True
                ):
                    wrong += answer and not right(buffer, key, length)
            assert len(held) > 20
            del held
            report = cache.verify()
            assert report.ok, report.first_fault
        return wrong

    return int(fork(run).result(300))
