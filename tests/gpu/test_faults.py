# SPDX-License-Identifier: Apache-2.0
"""Every call of the driver fails once; and everything at once by many threads."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
from pathlib import Path

import pytest

from cyclone_kv import Cache, CacheConfig, ConfigError, CudaError, cuda
from cyclone_kv.cuda import runtime
from cyclone_kv.cuda.driver import Driver
from cyclone_kv.cuda.ring import Ring

from .conftest import forget_runtime, key_of, payload_of
from .fake import EAGER, LAZY, Fake

SIZE = 60_000
BLOCKS = 6


def scenario(fake: Fake, folder: Path) -> list[str]:
    """Use everything once; return the calls that failed.  Bytes are compared."""
    failed: list[str] = []
    cuda.set_ring(2, 128 << 10)
    paths = [(folder / f"{i}.cyc", 16 << 20) for i in range(2)]
    cache = Cache.open(list(paths), CacheConfig())
    keys = [key_of(i) for i in range(BLOCKS)]
    for i, key in enumerate(keys):
        assert cache.put(key, payload_of(i, SIZE))
    targets = [fake.allocate(SIZE) for _ in keys]
    source = fake.allocate(SIZE)
    source.write(payload_of(99, SIZE))
    places = [t.pair for t in targets]

    def upload() -> None:
        for target in targets:
            target.fill(0xEE)
        result = cache.upload(keys, places)
        for i, target in enumerate(targets):
            wanted = payload_of(i, SIZE) if result.found[i] else b"\xee" * SIZE
            assert target.read() == wanted
        assert result.found == [True] * BLOCKS

    def one_of_two() -> None:
        # The first of two chunks: an upload then takes both ways at once.
        cache.register_cuda(budget=20 << 20)

    def store() -> None:
        cache.put_from_device([(key_of(90 + i), source.pair) for i in range(4)])
        for i in range(4):
            assert cache.get(key_of(90 + i)) in {None, payload_of(99, SIZE)}

    steps = (upload, one_of_two, upload, store, cache.unregister_cuda, upload)
    try:
        for step in steps:
            try:
                step()
            except CudaError as error:
                failed.append(error.call)
    finally:
        cache.close()
    return failed


def clean(fake: Fake) -> None:
    gc.collect()
    assert fake.violation == ""
    assert fake.lib.fake_unmapped() == 0
    assert fake.lib.fake_depth() == 0


@pytest.mark.parametrize("mode", [EAGER, LAZY])
def test_every_call_may_fail_once(
    fake: Fake,
    volume_path: Path,
    mode: int,
    caplog: pytest.LogCaptureFixture,
    rng: random.Random,
):
    """The n-th call fails: no wrong byte, no rule broken, everything given back."""
    caplog.set_level(logging.CRITICAL)
    folder = volume_path.parent
    fake.mode(mode)
    assert scenario(fake, folder) == []
    clean(fake)
    assert fake.registered_bytes == fake.pinned_bytes == 0
    count = fake.lib.fake_calls()
    assert count > 100
    step = 1 if os.environ.get("CKV_LONG") else 5
    kinds = set()
    for nth in range(1 + rng.randrange(step), count + 1, step):
        forget_runtime()
        fake.reset()
        fake.mode(mode)
        fake.fail("*", nth, 1 if nth % 2 else 700)
        try:
            kinds |= set(scenario(fake, folder))
        except ConfigError:  # the code says that a pointer or a stream is wrong
            kinds.add("refused")
        clean(fake)
        bad = [c.name for c in fake.calls() if c.result not in {0, 600}]
        given_back = {"cuMemHostUnregister", "cuCtxPushCurrent", "cuMemFreeHost"}
        if not given_back & set(bad):
            assert (fake.registered_bytes, fake.pinned_bytes) == (0, 0), (nth, bad)
    assert len(kinds) > 2


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
def test_a_device_may_be_lost_at_any_time(
    fake: Fake, volume_path: Path, share: float, caplog: pytest.LogCaptureFixture
):
    """From the n-th call on everything fails, as after an error that stays."""
    caplog.set_level(logging.CRITICAL)
    scenario(fake, volume_path.parent)
    count = fake.lib.fake_calls()
    forget_runtime()
    fake.reset()
    fake.mode(LAZY)
    fake.fail("*", int(count * share), 700, every=True)
    scenario(fake, volume_path.parent)
    clean(fake)
    assert runtime._runtime is not None
    if fake.registered_bytes:
        assert runtime._runtime.kept  # and what may be read from is still mapped


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord"])
def test_after_an_error_nothing_is_given_back_before_the_copies_are_done(
    fake: Fake, volume_path: Path, call: str, registered: bool
):
    with Cache.open(volume_path, CacheConfig(capacity="16MiB")) as cache:
        keys = [key_of(i) for i in range(BLOCKS)]
        for i, key in enumerate(keys):
            assert cache.put(key, payload_of(i, SIZE))
        places = [fake.allocate(SIZE).pair for _ in keys]
        if registered:
            cache.register_cuda()
        fake.mode(LAZY)
        fake.fail(call, 3 if call == "cuMemcpyHtoDAsync" else 1, 1)
        with pytest.raises(CudaError):
            cache.upload(keys, places)
        assert len(fake.copies()) >= 2
        # The pins and slots are free again: so no copy may still need them.
        assert cache.stats().process.pinned_entries == 0
        assert fake.pending == 0
    assert fake.violation == ""


def test_a_failed_copy_gives_pins_and_slots_back(fake: Fake, volume_path: Path):
    with Cache.open(volume_path, CacheConfig(capacity="16MiB")) as cache:
        keys = [key_of(i) for i in range(BLOCKS)]
        for i, key in enumerate(keys):
            assert cache.put(key, payload_of(i, SIZE))
        places = [fake.allocate(SIZE).pair for _ in keys]
        cuda.set_ring(2, 64 << 10)
        for _ in range(2):
            for nth in (1, 3, BLOCKS):
                fake.fail("cuMemcpyHtoDAsync", nth, 1)
                with pytest.raises(CudaError) as caught:
                    cache.upload(keys, places)
                assert caught.value.call == "cuMemcpyHtoDAsync"
                assert caught.value.code == 1
                assert "INVALID_VALUE" in str(caught.value)
                fake.succeed()
                assert cache.stats().process.pinned_entries == 0
                # As many slots as before: twice the ring's worth goes through.
                assert all(cache.upload(keys, places).found)
            cache.register_cuda()
    assert fake.violation == ""


@pytest.mark.parametrize("direction", ["to", "from"])
def test_slots_in_doubt_are_lost_and_nobody_waits_for_them(
    fake: Fake,
    volume_path: Path,
    direction: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Copies that cannot be waited for keep their slots; who wants those is told."""
    caplog.set_level(logging.CRITICAL)
    cuda.set_ring(2, 128 << 10)
    cache = Cache.open(volume_path, CacheConfig(capacity="16MiB"))
    assert cache.put(key_of(0), payload_of(0, SIZE))
    place = fake.allocate(SIZE).pair

    def move() -> object:
        if direction == "to":
            return cache.upload([key_of(0)], [place])
        return cache.put_from_device([(key_of(1), place)])

    def in_doubt(*_: object) -> None:
        raise CudaError("nobody knows", call="cuCtxSynchronize", code=700)

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "synchronize", in_doubt)
        patch.setattr(Driver, "synchronize_stream", in_doubt)
        fake.fail("cuEventRecord", 1, 700, every=True)
        for _ in range(2):
            with pytest.raises(CudaError, match="cuEventRecord"):
                move()
        fake.succeed()
        failed: list[BaseException] = []

        def again() -> None:
            try:
                move()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=again, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        assert [type(error) for error in failed] == [CudaError]
        assert "2 of 2 pinned buffers are lost" in str(failed[0])
    cache.close()
    assert fake.pinned_bytes == 2 * (128 << 10)  # a device may still use it
    assert fake.violation == ""


def test_an_exception_between_two_lots_leaves_nothing_under_way(
    fake: Fake, volume_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nobody has the result, so nobody could wait before freeing destinations."""
    cuda.set_ring(2, 64 << 10)
    original = Ring.take
    taken: list[int] = []

    def interrupted(self: Ring, count: int) -> object:
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(count)
        return original(self, count)

    with Cache.open(volume_path, CacheConfig(capacity="16MiB")) as cache:
        keys = [key_of(i) for i in range(BLOCKS)]
        for i, key in enumerate(keys):
            assert cache.put(key, payload_of(i, SIZE))
        places = [fake.allocate(SIZE).pair for _ in keys]
        fake.mode(LAZY)
        monkeypatch.setattr(Ring, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.upload_async(keys, places)
        assert len(fake.copies()) == 2
        assert fake.pending == 0


def test_many_threads_upload_while_blocks_are_evicted(
    fake: Fake, volume_path: Path, rng: random.Random
):
    """Whatever is found has its own bytes, also when the DMA is as late as can be."""
    cuda.set_ring(3, 256 << 10)
    seconds = 20.0 if os.environ.get("CKV_LONG") else 1.5
    config = CacheConfig(capacity="16MiB")
    caches = [Cache.open(volume_path, config) for _ in range(2)]
    fake.mode(LAZY)
    names = 400  # some 24 MB: more than fits
    stop = threading.Event()
    failed: list[BaseException] = []
    hits = [0, 0]
    seeds = [rng.getrandbits(64) for _ in range(6)]

    def guarded(work: object, *args: object) -> None:
        try:
            work(*args)  # type: ignore[operator]
        except BaseException as error:
            failed.append(error)
            stop.set()

    def upload(cache: Cache, seed: int) -> None:
        random_numbers = random.Random(seed)
        targets = [fake.allocate(SIZE) for _ in range(8)]
        places = [t.pair for t in targets]
        late = []
        while not stop.is_set():
            chosen = [random_numbers.randrange(names) for _ in targets]
            result = cache.upload_async([key_of(i) for i in chosen], places)
            if random_numbers.random() < 0.5:
                result.wait()
                for i, target, found in zip(chosen, targets, result.found, strict=True):
                    if found:
                        assert target.read() == payload_of(i, SIZE)
                hits[0] += sum(result.found)
                hits[1] += result.registered_bytes > 0
            else:
                # Nobody waits: the next upload overwrites the same destinations.
                late.append(result)
                late = late[-3:]

    def put(seed: int) -> None:
        random_numbers = random.Random(seed)
        while not stop.is_set():
            i = random_numbers.randrange(names)
            caches[0].put(
                key_of(i), payload_of(i, SIZE), overwrite=random_numbers.random() < 0.1
            )
            if random_numbers.random() < 0.02:
                caches[0].remove(key_of(random_numbers.randrange(names)))

    def change(seed: int) -> None:
        random_numbers = random.Random(seed)
        while not stop.is_set():
            caches[1].register_cuda(background=random_numbers.random() < 0.5)
            stop.wait(random_numbers.random() * 0.05)
            caches[1].unregister_cuda()

    work = [(upload, caches[i % 2], seeds[i]) for i in range(3)]
    work += [(put, seeds[3]), (put, seeds[4]), (change, seeds[5])]
    threads = [threading.Thread(target=guarded, args=each) for each in work]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for cache in caches:
        cache.close()
    if failed:
        raise failed[0]
    assert hits[0] > 0
    assert hits[1] > 0
    clean(fake)
    assert fake.registered_bytes == fake.pinned_bytes == 0
