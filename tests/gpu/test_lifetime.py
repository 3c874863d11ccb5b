# SPDX-License-Identifier: Apache-2.0
"""Pins under DMA, closing, forking, exiting: what must not go before what."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from cyclone_kv import Cache, CacheConfig, ClosedError, CudaError, ForkedError, cuda
from cyclone_kv.cuda import runtime

from .conftest import OpenCache, key_of, payload_of
from .fake import LAZY, MANUAL, DeviceBytes, DlpackLike, Fake

SIZE = 500_000
SMALL = CacheConfig(capacity="16MiB")


def fill(cache: Cache, count: int, first: int = 0) -> list[bytes]:
    keys = [key_of(i) for i in range(first, first + count)]
    for i, key in enumerate(keys, first):
        cache.put(key, payload_of(i, SIZE))
    return keys


def targets_of(fake: Fake, count: int) -> list[DeviceBytes]:
    return [fake.allocate(SIZE) for _ in range(count)]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for another thread; a test that fails fails by the timeout of pytest."""
    while not condition():
        time.sleep(0.002)


def begun(work: Callable[[], None]) -> tuple[threading.Thread, threading.Event]:
    """Start work in a thread; return that, and what is set when it is done."""
    done = threading.Event()

    def run() -> None:
        work()
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, done


# ---- N2 under DMA -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["evict", "overwrite", "remove", "clear"])
def test_blocks_under_dma_stay_as_they_are(open_cache: OpenCache, fake: Fake, how: str):
    """The object of the upload dies, the block is given up, and then the DMA reads."""
    cache = open_cache(SMALL)
    keys = fill(cache, 4)
    cache.register_cuda()
    fake.mode(MANUAL)
    targets = targets_of(fake, 4)
    upload = cache.upload_async(keys, [t.pair for t in targets])
    assert upload.registered_bytes == 4 * SIZE
    del upload
    gc.collect()
    assert cache.stats().process.pinned_entries == 4
    if how == "overwrite":
        for key in keys:
            assert cache.put(key, b"\xdd" * SIZE, overwrite=True)
    elif how == "remove":
        assert all(cache.remove(key) for key in keys)
    elif how == "clear":
        cache.clear()
    for lap in range(4):  # each about a volume full
        fill(cache, 33, 1000 * (lap + 1))
    if how == "evict":
        assert cache.stats().volume.evictions > 60
    assert fake.pending == len(fake.copies())
    fake.advance()
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(4)]
    cache.upload_async([key_of(9999)], [targets[0].pair])  # the next one looks
    assert cache.stats().process.pinned_entries == 0


def test_looking_gives_pins_back(open_cache: OpenCache, fake: Fake):
    cache = open_cache(SMALL)
    keys = fill(cache, 2)
    cache.register_cuda()
    fake.mode(MANUAL)
    targets = targets_of(fake, 2)
    upload = cache.upload_async(keys, [t.pair for t in targets])
    assert not upload.done()
    assert cache.stats().process.pinned_entries == 2
    fake.advance()
    assert upload.done()
    assert cache.stats().process.pinned_entries == 0
    assert upload.wait() is upload
    assert upload.done()


def test_a_slot_of_the_ring_is_not_reused_before_its_copies_are_done(
    open_cache: OpenCache, fake: Fake
):
    cuda.set_ring(2, 512 << 10)
    cache = open_cache(SMALL)
    keys = fill(cache, 8)
    fake.mode(MANUAL)
    targets = targets_of(fake, 8)
    finished = threading.Event()

    def work() -> None:
        cache.upload(keys, [t.pair for t in targets])
        finished.set()

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: len(fake.calls("cuEventRecord")) == 2)
    # Two lots are under way; the third has to wait for a slot.
    time.sleep(0.05)
    assert len(fake.copies()) == 2
    for _ in range(8):
        fake.advance(2)  # a copy and its event
    fake.advance()
    thread.join(60)
    assert finished.is_set()
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(8)]


# ---- close --------------------------------------------------------------------------


@pytest.mark.parametrize("registered", [True, False])
def test_closing_the_last_handle_waits_for_copies(
    open_cache: OpenCache, fake: Fake, registered: bool
):
    cache = open_cache(SMALL)
    keys = fill(cache, 4)
    if registered:
        cache.register_cuda()
    fake.mode(MANUAL)
    targets = targets_of(fake, 4)
    upload = cache.upload_async(keys, [t.pair for t in targets])
    thread, done = begun(cache.close)
    assert not done.wait(0.1)
    assert fake.calls("cuMemHostUnregister", "cuMemFreeHost") == []
    fake.advance()
    thread.join(60)
    assert done.is_set()
    assert upload.done()
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(4)]
    names = [call.name for call in fake.calls()]
    if registered:
        assert names.index("cuMemHostUnregister") > names.index("cuCtxSynchronize")
        assert names.index("cuDevicePrimaryCtxRelease") > names.index(
            "cuMemHostUnregister"
        )


def test_unregistering_waits_for_copies_and_stages_what_comes_later(
    open_cache: OpenCache, fake: Fake
):
    cache = open_cache(SMALL)
    keys = fill(cache, 4)
    cache.register_cuda()
    fake.mode(MANUAL)
    targets = targets_of(fake, 4)
    upload = cache.upload_async(keys, [t.pair for t in targets])
    thread, done = begun(cache.unregister_cuda)
    assert not done.wait(0.1)
    assert fake.calls("cuMemHostUnregister") == []
    assert cache.stats().process.pinned_entries == 4
    fake.advance()
    thread.join(60)
    assert done.is_set()
    assert upload.done()
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(4)]
    assert cache.upload(keys[:1], [targets[0].pair]).staged_bytes == SIZE


def test_closing_one_of_two_handles_keeps_pins(open_cache: OpenCache, fake: Fake):
    first, second = open_cache(SMALL), open_cache(SMALL)
    keys = fill(first, 4)
    first.register_cuda()
    second.register_cuda()
    fake.mode(MANUAL)
    targets = targets_of(fake, 4)
    first.upload_async(keys, [t.pair for t in targets])
    first.close()
    assert second.stats().process.pinned_entries == 4
    for lap in range(3):
        fill(second, 33, 1000 * (lap + 1))
    fake.advance()
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(4)]


def test_closed_caches_refuse(open_cache: OpenCache, fake: Fake):
    cache = open_cache(SMALL)
    fill(cache, 1)
    cache.register_cuda()
    cache.close()
    cache.close()
    target = fake.allocate(SIZE)
    calls = fake.lib.fake_calls()
    for call in (
        lambda: cache.upload([key_of(0)], [target.pair]),
        lambda: cache.put_from_device([(b"k", target.pair)]),
        lambda: cache.register_cuda(),
        lambda: cache.unregister_cuda(),
    ):
        with pytest.raises(ClosedError):
            call()
    never = open_cache(SMALL)
    never.close()
    with pytest.raises(ClosedError):
        never.register_cuda()
    assert fake.lib.fake_calls() == calls


def test_close_waits_for_a_call_of_another_thread(
    open_cache: OpenCache, fake: Fake, monkeypatch: pytest.MonkeyPatch
):
    cache = open_cache(SMALL)
    keys = fill(cache, 2)
    inside, may_go = threading.Event(), threading.Event()
    original = Cache._copy_many

    def slow(self: Cache, *args: object) -> object:
        inside.set()
        may_go.wait()
        return original(self, *args)

    monkeypatch.setattr(Cache, "_copy_many", slow, raising=False)
    targets = targets_of(fake, 2)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            cache.upload(keys, [t.pair for t in targets])
        except BaseException as error:
            failed.append(error)

    uploading = threading.Thread(target=work)
    uploading.start()
    inside.wait()
    closing = threading.Thread(target=cache.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()
    may_go.set()
    uploading.join(60)
    closing.join(60)
    assert failed == []
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(2)]


def test_threads_that_wait_while_the_last_cache_is_closed(
    fake: Fake, volume_path: Path
):
    """Whoever asks late for copies that have landed meets no event that is gone."""
    fake.mode(LAZY)
    targets = targets_of(fake, 4)
    places = [t.pair for t in targets]
    failed: list[BaseException] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(cache: Cache, keys: list[bytes]) -> None:
        try:
            for _ in range(50):
                cache.upload(keys, places)
        except ClosedError:
            pass
        except BaseException as error:
            failed.append(error)

    try:
        for turn in range(24):
            cache = Cache.open(volume_path, SMALL)
            keys = fill(cache, 4)
            if turn % 2:
                cache.register_cuda(background=turn % 4 == 1)
            threads = [
                threading.Thread(target=work, args=(cache, keys)) for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            time.sleep(turn % 6 * 0.002)
            cache.close()
            for thread in threads:
                thread.join(60)
            assert failed == []
            assert fake.violation == ""
            assert fake.registered_bytes == fake.pinned_bytes == 0
            assert fake.lib.fake_live_events() == 0
    finally:
        sys.setswitchinterval(interval)


def test_a_forgotten_cache_is_cleaned_up_by_the_next_call(
    fake: Fake, volume_path: Path
):
    cache = Cache.open(volume_path, SMALL)
    keys = fill(cache, 1)
    cache.register_cuda()
    fake.mode(LAZY)
    target = fake.allocate(SIZE)
    cache.upload_async(keys, [target.pair])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del cache
        gc.collect()
    # Finalizers run anywhere, and unregistering may wait: not there.
    assert fake.registered_bytes == 16 << 20
    with Cache.open(volume_path) as again:
        again.upload([key_of(5)], [target.pair])
        assert fake.registered_bytes == 0
    assert target.read() == payload_of(0, SIZE)
    assert fake.violation == ""
    assert fake.pinned_bytes == 0


def test_a_view_outlives_the_registration(open_cache: OpenCache, fake: Fake):
    cache = open_cache(SMALL)
    keys = fill(cache, 1)
    cache.register_cuda()
    view = cache.get(keys[0])
    cache.close()
    assert fake.registered_bytes == 0
    assert view == payload_of(0, SIZE)


def test_page_tables_of_registered_chunks_are_left_alone(
    open_cache: OpenCache, fake: Fake
):
    cache = open_cache(CacheConfig(capacity="16MiB", page_table_budget="4KiB"))
    keys = fill(cache, 20)
    cache.register_cuda()
    for key in keys:
        assert bytes(cache.get(key) or b"")
    assert cache.stats().process.window_drops == 0
    cache.unregister_cuda()


# ---- what cannot be undone ----------------------------------------------------------


def test_what_the_driver_does_not_give_back_stays_mapped(
    fake: Fake, volume_path: Path, caplog: pytest.LogCaptureFixture
):
    cache = Cache.open(volume_path, SMALL)
    cache.register_cuda()
    fake.fail("cuMemHostUnregister", 1, 999, every=True)
    cache.close()
    assert fake.registered_bytes == 16 << 20
    assert fake.lib.fake_unmapped() == 0
    assert "stays mapped" in caplog.text


@pytest.mark.parametrize("code", [4, 709, 713])
def test_what_ended_with_the_driver_is_let_go(
    fake: Fake, volume_path: Path, code: int, caplog: pytest.LogCaptureFixture
):
    cache = Cache.open(volume_path, SMALL)
    cache.register_cuda()
    fake.fail("cuMemHostUnregister", 1, code, every=True)
    cache.close()
    assert "mapped" not in caplog.text


def test_pins_of_copies_in_doubt_are_kept(
    fake: Fake, volume_path: Path, caplog: pytest.LogCaptureFixture
):
    """Neither event, stream nor context can be waited for: the DMA may still run."""
    cache = Cache.open(volume_path, SMALL)
    other = Cache.open(volume_path, SMALL)
    keys = fill(cache, 2)
    cache.register_cuda()
    fake.mode(MANUAL)
    targets = targets_of(fake, 2)
    fake.fail("*", 1, 700, every=True)
    with pytest.raises(CudaError):
        cache.upload(keys, [t.pair for t in targets])
    fake.succeed()
    upload = cache.upload_async(keys, [t.pair for t in targets])
    fake.fail("*", 1, 700, every=True)
    with pytest.raises(CudaError, match="cuCtxPushCurrent"):
        upload.wait()
    assert not upload._flights[0].landed
    cache.close()
    other.close()
    assert fake.lib.fake_unmapped() == 0
    assert runtime._runtime is not None
    assert runtime._runtime.kept
    fake.succeed()
    fake.advance()
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(2)]


# ---- fork ---------------------------------------------------------------------------


def in_child(work: Callable[[], None]) -> int:
    """Run something in a forked child; return its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            work()
            status = 0
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_calls_no_driver(open_cache: OpenCache, fake: Fake):
    cache = open_cache(SMALL)
    keys = fill(cache, 2)
    cache.register_cuda()
    fake.mode(MANUAL)
    targets = targets_of(fake, 2)
    upload = cache.upload_async(keys, [t.pair for t in targets])
    calls = fake.lib.fake_calls()

    def child() -> None:
        for call in (
            lambda: cache.upload(keys, [t.pair for t in targets]),
            lambda: cache.put_from_device([(b"k", targets[0].pair)]),
            lambda: cache.register_cuda(),
            lambda: cache.unregister_cuda(),
        ):
            with pytest.raises(ForkedError):
                call()
        for ask in (upload.done, upload.wait):
            with pytest.raises(ForkedError, match="before fork"):
                ask()
        assert cache.cuda_registration is None
        cache.close()
        old = runtime._inherited[-1]
        old._at_exit()
        gc.collect()
        assert fake.lib.fake_calls() == calls
        assert fake.violation == ""

    assert in_child(child) == 0
    fake.advance()
    upload.wait()
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(2)]
    assert cache.stats().process.pinned_entries == 0


def test_a_child_that_opens_anew_is_told_why_not(
    open_cache: OpenCache, fake: Fake, volume_path: Path
):
    cache = open_cache(SMALL)
    cache.register_cuda()

    def child() -> None:
        with Cache.open(volume_path) as again:
            found = again.register_cuda()
            assert not found
            assert "NOT_INITIALIZED" in found.reason

    assert in_child(child) == 0
    assert fake.registered_bytes == 16 << 20


def test_a_fork_during_uploads(open_cache: OpenCache, fake: Fake):
    """Whatever locks the child inherits as held, it needs none of them."""
    cuda.set_ring(2, 512 << 10)
    cache = open_cache(SMALL)
    keys = fill(cache, 12)
    cache.register_cuda()
    fake.mode(LAZY)
    stop = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        targets = targets_of(fake, 12)
        try:
            while not stop.is_set():
                cache.upload(keys, [t.pair for t in targets])
                assert targets[3].read() == payload_of(3, SIZE)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()

    def child() -> None:
        with contextlib.suppress(ForkedError):
            cache.upload(keys, [])
        cache.close()

    for _ in range(5):
        assert in_child(child) == 0
    stop.set()
    for thread in threads:
        thread.join(60)
    assert failed == []


# ---- exit ---------------------------------------------------------------------------

EXIT_SCRIPT = """
import atexit, sys
sys.path[:0] = sys.argv[2:4]
from gpu.fake import Fake, LAZY, MANUAL
fake = Fake(sys.argv[4])
fake.reset()
def report():
    names = [call.name for call in fake.calls()]
    keep = ("cuMemcpyHtoDAsync", "cuEventSynchronize", "cuMemHostUnregister",
            "cuMemFreeHost", "cuDevicePrimaryCtxRelease")
    order = list(dict.fromkeys(name for name in names if name in keep))
    print(order, repr(fake.violation), fake.registered_bytes, fake.pinned_bytes,
          fake.lib.fake_unmapped(), fake.retains(0))
atexit.register(report)  # before ours: so it runs after ours
from cyclone_kv import Cache, CacheConfig
cache = Cache.open(sys.argv[1], CacheConfig(capacity="16MiB"))
for i in range(4):
    cache.put(b"key%d" % i, bytes(100000))
pool = fake.allocate(400000)
places = [(pool.pointer + i * 100000, 100000) for i in range(4)]
cache.upload([b"key0"], places[:1])
cache.register_cuda(background="background" in sys.argv)
fake.mode(LAZY)
cache.upload_async([b"key0", b"key1"], places[:2])
"""


@pytest.mark.parametrize("how", ["plain", "background", "raise", "system exit"])
def test_at_exit_everything_is_undone_in_order(fake: Fake, volume_path: Path, how: str):
    ends = {"raise": "raise KeyError('on purpose')", "system exit": "sys.exit(3)"}
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore::ResourceWarning",
            "-c",
            EXIT_SCRIPT + ends.get(how, ""),
            str(volume_path),
            str(tests),
            str(tests.parent),
            str(fake.path),
            how,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == (
        "['cuMemcpyHtoDAsync', 'cuEventSynchronize', 'cuMemHostUnregister', "
        "'cuMemFreeHost', 'cuDevicePrimaryCtxRelease'] '' 0 0 0 1\n"
    ), done.stderr
    assert ("on purpose" in done.stderr) == (how == "raise")


def test_a_pinned_dlpack_array_may_die_first(open_cache: OpenCache, fake: Fake):
    cache = open_cache(SMALL)
    keys = fill(cache, 1)
    fake.mode(MANUAL)
    memory = fake.allocate(SIZE)
    upload = cache.upload_async(keys, [DlpackLike(memory)])
    gc.collect()
    fake.advance()
    upload.wait()
    assert memory.read() == payload_of(0, SIZE)
