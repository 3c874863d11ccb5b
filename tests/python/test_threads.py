# SPDX-License-Identifier: Apache-2.0
"""Many threads, close() in the middle of everything, fork, and the end of a process."""

from __future__ import annotations

import array
import gc
import io
import mmap
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


def run_script(
    text: str, *arguments: str, dev: bool = True
) -> subprocess.CompletedProcess[str]:
    # -P: the tree is not looked at before an instrumented build of it.
    flags = ["-P", "-X", "dev"] if dev else ["-P"]
    return subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(text), *arguments],
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
        elif number == 3:
            place = cache.locate(keys[4])
            if place is not None:
                with place:
                    found = os.pread(place.fd, place.nbytes, place.offset)
                assert found == pattern(4)
            cache.prefetch(keys[:9])
            cache.touch(keys[:9])
        elif number == 4:
            assert cache.verify(progress=lambda done, total: None).damaged_payloads == 0
            assert len(cache) <= 64
        elif number == 5:
            for info in cache.ls():
                assert info.nbytes >= 1600
            cache.info()
        elif number == 6:
            cache.sync()
            cache.recover()
        elif number == 7 and random_.randrange(4) == 0:
            cache.clear()


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


class Walk(threading.Thread):
    """A verify whose progress callback is held back until `leave` is set."""

    def __init__(self, cache: Cache, last: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.cache = cache
        self.last = last
        self.inside = threading.Event()
        self.leave = threading.Event()
        self.error: BaseException | None = None
        self.start()
        assert self.inside.wait(10)

    def progress(self, done: int, total: int) -> None:
        self.inside.set()
        assert self.leave.wait(20)
        if self.last is not None:
            self.last()

    def run(self) -> None:
        try:
            self.cache.verify(progress=self.progress)
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.leave.set()
        self.join(20)
        assert not self.is_alive()


def test_close_is_refused_in_every_callback_of_two_verifies(cache: Cache) -> None:
    """Each walk waits for itself if it may close, and never ends."""
    first = Walk(cache)
    second = Walk(cache, cache.close)
    first.finish()
    second.finish()
    assert first.error is None
    assert isinstance(second.error, RuntimeError)
    assert not cache.closed


def test_verifies_that_overlapped_do_not_forbid_close_later(cache: Cache) -> None:
    first = Walk(cache)
    second = Walk(cache)
    first.finish()
    second.finish()
    errors: list[BaseException] = []

    def close() -> None:
        try:
            cache.close()
        except RuntimeError as error:
            errors.append(error)

    for _ in range(4):  # new threads are often given the identifiers of old ones
        closer = threading.Thread(target=close)
        closer.start()
        closer.join()
    assert errors == []
    assert cache.closed


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self/task")
def test_a_close_that_was_interrupted_ends_with_the_object(volume_path: Path) -> None:
    """Ctrl-C while close waits: the volume must not stay open for ever."""
    before = threads_of_this_process()
    cache = Cache.open(volume_path, CacheConfig(capacity=CAPACITY))
    walk = Walk(cache)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    timer.join()
    assert cache.closed
    walk.finish()
    assert isinstance(walk.error, ClosedError)
    del walk, cache
    gc.collect()
    deadline = time.monotonic() + 5  # a joined thread may be listed for a moment
    while threads_of_this_process() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads_of_this_process() <= before


def test_buffers_cannot_be_resized_during_a_call(cache: Cache) -> None:
    """Whoever shrinks a bytearray that the engine is reading gets a BufferError."""
    data = bytearray(4 << 20)
    pieces = [data]
    stop = threading.Event()
    refused = [0]

    def resize() -> None:
        while not stop.is_set():
            try:
                data.extend(b"x" * 4096)
                del data[-4096:]
            except BufferError:
                refused[0] += 1

    def exchange() -> None:
        while not stop.is_set():
            pieces.clear()
            pieces.append(data)

    threads = [threading.Thread(target=work) for work in (resize, exchange)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            cache.put(key_of(1), data, overwrite=True)
            cache.put(key_of(2), pieces, overwrite=True)
            cache.put_many([(key_of(3), pieces, data[:10])], overwrite=True)
            cache.get_into(key_of(1), data)
            cache.get_many_into([key_of(2)], [pieces])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    print(f"{refused[0]} attempts were refused")
    data.append(1)  # nothing holds it any more


def test_memory_cannot_be_taken_away_during_a_call(
    cache: Cache, tmp_path: Path
) -> None:
    """Each kind of owner is asked, by another thread, to give its memory back."""
    size = 4 << 20
    path = tmp_path / "source"
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), size)
    values = array.array("B", bytes(size))
    stream = io.BytesIO(bytes(size))
    base = bytearray(size)
    owners: list[tuple[object, Callable[[], object]]] = [
        (mapped, lambda: mapped.resize(size * 2)),
        (values, lambda: values.pop()),
        (stream.getbuffer(), lambda: stream.truncate(0)),
        (base, lambda: base.clear()),
    ]
    # What was taken away before a call began is missing there, and that is fair.
    allowed = (ValueError, BufferError, TypeError)
    for source, take in owners:
        began, ended = threading.Event(), threading.Event()
        refused: list[BaseException] = []

        def disturb(
            take: Callable[[], object] = take,
            began: threading.Event = began,
            ended: threading.Event = ended,
            refused: list[BaseException] = refused,
        ) -> None:
            began.wait(20)
            while not ended.is_set():
                try:
                    take()
                except BufferError as error:
                    refused.append(error)
                else:
                    return

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            with memoryview(source) as held:
                began.set()
                for number in range(8):
                    assert cache.put(key_of(number), held, overwrite=True)
                    assert cache.put(key_of(9), [held[:9], held[9:]], overwrite=True)
                    assert cache.get_into(key_of(number), held) == size
            # From now on it may come in between any two calls, and in none.
            for number in range(8):
                try:
                    cache.put(key_of(number), source, overwrite=True)
                except allowed:
                    break
        finally:
            ended.set()
            thread.join()
    report = cache.verify()
    assert report.ok, report.first_fault


def test_a_view_cannot_be_released_during_a_call(cache: Cache) -> None:
    data = bytes(range(256)) * 16384
    view = memoryview(data)
    ended = threading.Event()
    refused = [0]

    def release() -> None:
        while not ended.is_set():
            try:
                view.release()
            except BufferError:
                refused[0] += 1
            else:
                return

    stored = 0

    def store() -> None:
        nonlocal stored
        while True:
            stored += cache.put(key_of(1), view, overwrite=True)

    thread = threading.Thread(target=release)
    thread.start()
    try:
        with pytest.raises(ValueError, match="released"):
            store()
    finally:
        ended.set()
        thread.join()
    got = cache.get(key_of(1))
    assert (got == data) if stored else (got is None)


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
            number = number % 1000 + 1  # all of them fit
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


# Interpreters that share the GIL, as embedders make them; `run` raises what they raise.
INTERPRETERS = """
    import sys
    if sys.version_info >= (3, 13):
        import _interpreters as interpreters
        make = lambda: interpreters.create("legacy")
    else:
        import _xxsubinterpreters as interpreters
        make = lambda: interpreters.create(isolated=False)
    def run(interpreter, text):
        failure = interpreters.run_string(interpreter, text)
        if failure is not None:
            raise RuntimeError(failure)
"""


def run_in_interpreters(text: str, path: Path) -> subprocess.CompletedProcess[str]:
    body = textwrap.dedent(text)
    return run_script(
        textwrap.dedent(INTERPRETERS)
        + textwrap.dedent(
            f"""
            for _ in range(2):
                one = make()
                header = f"import sys; sys.path[:] = {{sys.path!r}}\\n"
                header += f"path = {{sys.argv[1]!r}}\\n"
                run(one, header + {body!r})
                interpreters.destroy(one)
            print("fine")
            """
        ),
        str(path),
    )


def test_the_module_can_be_imported_in_a_subinterpreter(volume_path: Path) -> None:
    result = run_in_interpreters(
        """
        from cyclone_kv import Cache, CacheConfig
        with Cache.open(path, CacheConfig(capacity="64MiB")) as cache:
            cache.put(b"k", b"v")
            assert cache.get(b"k") == b"v"
        """,
        volume_path,
    )
    assert result.stdout == "fine\n", result.stderr


def test_verify_calls_back_into_its_own_subinterpreter(volume_path: Path) -> None:
    """The error of a callback was lost in the main interpreter: a SystemError."""
    result = run_in_interpreters(
        """
        from cyclone_kv import Cache, CacheConfig
        with Cache.open(path, CacheConfig(capacity="64MiB")) as cache:
            cache.put(b"k", b"v")
            calls = []
            cache.verify(progress=lambda done, total: calls.append(sys))
            assert calls
            try:
                cache.verify(progress=lambda done, total: 1 / 0)
            except ZeroDivisionError:
                pass
            else:
                raise AssertionError("the error of the callback is lost")
        """,
        volume_path,
    )
    assert result.stdout == "fine\n", result.stderr


def test_an_interpreter_with_a_gil_of_its_own_is_refused_in_words(
    volume_path: Path,
) -> None:
    """Before Python 3.12 all interpreters share one, isolated ones too."""
    result = run_script(
        textwrap.dedent(INTERPRETERS)
        + textwrap.dedent(
            """
            if sys.version_info >= (3, 13):
                isolated = interpreters.create("isolated")
            else:
                isolated = interpreters.create(isolated=True)
            text = f"import sys; sys.path[:] = {sys.path!r}\\n"
            text += '''
            try:
                import cyclone_kv
                print("imported", flush=True)
            except ImportError as error:
                print(error, flush=True)
            '''.replace("\\n            ", "\\n")
            interpreters.run_string(isolated, text)
            interpreters.destroy(isolated)
            """
        ),
        str(volume_path),
    )
    if sys.version_info >= (3, 12):
        assert "does not support loading in subinterpreters" in result.stdout
    else:
        assert result.stdout == "imported\n", result.stderr
    assert result.returncode == 0, result.stderr
