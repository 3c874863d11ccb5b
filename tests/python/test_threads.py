# SPDX-License-Identifier: Apache-2.0
"""Many threads, close() in the middle of everything, fork, and the end of a process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cyclone_kv import Cache, CacheConfig, ClosedError, ForkedError

from .conftest import CAPACITY, OpenCache, key_of


def run_script(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(text), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def pattern(number: int) -> bytes:
    return number.to_bytes(8, "little") * (200 + number)


def use(cache: Cache, seed: int) -> None:
    """Uses a cache until it is closed; every answer must be right."""
    random_ = random.Random(seed)
    target = bytearray(8 * 300)
    keys = [key_of(number) for number in range(64)]
    while True:
        number = random_.randrange(64)
        cache.put(keys[number], pattern(number))
        view = cache.get(keys[number])
        assert view is None or view == pattern(number)
        size = cache.get_into(keys[number], target)
        assert size is None or target[:size] == pattern(number)
        entry = cache.read(keys[number])
        if entry is not None:
            with entry:
                assert entry.view == pattern(number)
        assert len(cache.contains_many(keys)) == 64
        assert cache.longest_prefix(keys) <= 64
        if number == 0:
            cache.put_many([(key, pattern(i)) for i, key in enumerate(keys[:8])])
            cache.get_many_into(keys[:2], [bytearray(2400), bytearray(2400)])
        elif number == 1:
            cache.remove(keys[2])
            cache.stats()
            cache.events(limit=10)
        elif number == 2:
            slot = cache.reserve(keys[3], len(pattern(3)))
            slot.view[:] = pattern(3)
            try:
                slot.commit()
            finally:
                slot.abort()


def use_until_closed(cache: Cache, seed: int, errors: list[BaseException]) -> None:
    try:
        use(cache, seed)
    except ClosedError:
        pass
    except BaseException as error:
        errors.append(error)


def test_close_during_everything(volume_path: Path) -> None:
    """Closing while others read must neither crash nor hang."""
    for round_ in range(20):
        cache = Cache.open(volume_path, CacheConfig(capacity=CAPACITY))
        errors: list[BaseException] = []

        threads = [
            threading.Thread(
                target=use_until_closed, args=(cache, round_ * 8 + n, errors)
            )
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        time.sleep(round_ * 0.005)
        started = time.monotonic()
        cache.close()
        assert time.monotonic() - started < 2
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert errors == []


def test_two_threads_may_close(open_cache: OpenCache) -> None:
    for _ in range(50):
        cache = open_cache()
        barrier = threading.Barrier(4)

        def close(cache: Cache = cache, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            cache.close()

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert cache.closed


def test_close_stops_a_running_verify(open_cache: OpenCache) -> None:
    cache = open_cache()
    for number in range(50):
        cache.put(key_of(number), b"x")
    entered = threading.Event()
    closing = threading.Event()
    result: list[BaseException] = []

    def progress(done: int, total: int) -> None:
        entered.set()
        closing.wait(10)

    def walk() -> None:
        try:
            cache.verify(progress=progress)
        except ClosedError as error:
            result.append(error)

    walker = threading.Thread(target=walk)
    walker.start()
    assert entered.wait(10)
    closer = threading.Thread(target=cache.close)
    closer.start()
    while not cache.closed:
        time.sleep(0.001)
    closing.set()
    closer.join(10)
    walker.join(10)
    assert not closer.is_alive()
    assert len(result) == 1


def test_other_threads_run_during_long_calls(cache: Cache) -> None:
    """A copy of many megabytes must not stop every other Python thread."""
    data = bytearray(8 << 20)
    cache.put(key_of(1), data)
    target = bytearray(8 << 20)
    stop = threading.Event()
    counts = [0]

    def count() -> None:
        while not stop.is_set():
            counts[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        for _ in range(20):
            assert cache.get_into(key_of(1), target) == len(target)
            cache.put(key_of(2), data, overwrite=True)
    finally:
        stop.set()
        counter.join()
    assert counts[0] > 1000


def in_child(check: Callable[[], None]) -> int:
    """Runs `check` in a forked child; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_handle_refuses_to_work_after_fork(cache: Cache, volume_path: Path) -> None:
    cache.put(key_of(1), b"data")
    view = cache.get(key_of(1))
    slot = cache.reserve(key_of(2), 4)

    def check() -> None:
        nonlocal view
        for call in (
            lambda: cache.get(key_of(1)),
            lambda: cache.put(key_of(3), b""),
            lambda: cache.stats(),
            lambda: slot.commit(),
        ):
            with pytest.raises(ForkedError):
                call()
        assert view == b"data"
        view = None
        cache.close()
        cache.close()
        with Cache.open(volume_path) as own:
            assert own.get(key_of(1)) == b"data"
            assert own.put(key_of(4), b"from the child")

    assert in_child(check) == 0
    # The parent noticed nothing.
    assert view == b"data"
    assert cache.stats().volume.pinned_entries == 1
    slot.view[:] = b"late"
    assert slot.commit()
    assert cache.get(key_of(4)) == b"from the child"


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_close_after_fork_does_not_wait_for_threads_of_the_parent(
    cache: Cache,
) -> None:
    cache.put(key_of(1), b"x")
    inside, leave = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        inside.set()
        leave.wait(20)

    walker = threading.Thread(target=lambda: cache.verify(progress=progress))
    walker.start()
    assert inside.wait(10)

    def check() -> None:
        signal.alarm(5)
        cache.close()

    try:
        assert in_child(check) == 0
    finally:
        leave.set()
        walker.join()


SHUTDOWN = """
    import os, sys, threading, time
    from cyclone_kv import Cache, CacheConfig
    cache = Cache.open(sys.argv[1], CacheConfig(capacity="64MiB"))
    stored = open(sys.argv[2], "wb", buffering=0)
    def work():
        number = 0
        while True:
            number += 1
            key = number.to_bytes(32, "little")
            if cache.put(key, key * 100):
                stored.write(key)
            view = cache.get(key)
    threading.Thread(target=work, daemon=True).start()
    while os.path.getsize(sys.argv[2]) < 3200:
        time.sleep(0.001)
    END
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(7)", 7),
        ("os._exit(9)", 9),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import atexit; atexit.register(cache.close)", 0),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_a_process_ends_as_asked_with_a_thread_inside(
    volume_path: Path, tmp_path: Path, end: str, code: int
) -> None:
    """Leaving without close, with a daemon thread that stores."""
    stored = tmp_path / "stored"
    stored.write_bytes(b"")
    started = time.monotonic()
    result = run_script(SHUTDOWN.replace("END", end), str(volume_path), str(stored))
    assert result.returncode == code, result.stderr
    assert time.monotonic() - started < 20
    assert "Fatal" not in result.stderr
    assert "Exception ignored" not in result.stderr.replace("KeyboardInterrupt", "")
    keys = stored.read_bytes()
    keys = keys[: len(keys) // 32 * 32]
    with Cache.open(volume_path) as cache:
        assert cache.contains_many(keys) == [True] * (len(keys) // 32)
        report = cache.verify()
        assert report.ok, report.first_fault


def test_the_module_can_be_imported_in_a_subinterpreter(volume_path: Path) -> None:
    result = run_script(
        """
        import _xxsubinterpreters as interpreters, sys
        for _ in range(2):
            one = interpreters.create()
            interpreters.run_string(one, f'''if True:
                import sys
                sys.path[:] = {sys.path!r}
                from cyclone_kv import Cache, CacheConfig
                config = CacheConfig(capacity="64MiB")
                with Cache.open({sys.argv[1]!r}, config) as cache:
                    cache.put(b"k", b"v")
                    assert cache.get(b"k") == b"v"
            ''')
            interpreters.destroy(one)
        print("fine")
        """,
        str(volume_path),
    )
    if "No module named '_xxsubinterpreters'" in result.stderr:
        pytest.skip("this Python has no module for subinterpreters with that name")
    assert result.stdout == "fine\n", result.stderr
