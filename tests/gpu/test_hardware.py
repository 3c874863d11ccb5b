# SPDX-License-Identifier: Apache-2.0
"""What only a device can show.  Run by bench/gpu_run.sh: CKV_GPU=1 pytest tests/gpu.

Without CKV_GPU nothing is collected here, so that nothing is skipped in silence; with
it a missing driver is a failure. The tests of cupy and torch need them installed.
CKV_GPU=fake runs them on the fake driver, to find mistakes in the tests themselves;
those of cupy and torch are then skipped with that reason.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyclone_kv import Cache, CacheConfig
from cyclone_kv.cuda import runtime
from cyclone_kv.cuda.driver import TEST_VARIABLE

from .conftest import key_of, payload_of

SIZE = 2 << 20
COUNT = 32
FAKE = os.environ.get("CKV_GPU") == "fake"
real_only = pytest.mark.skipif(FAKE, reason="cupy and torch need a real device")

from bench.gpu_upload.device import Gpu  # noqa: E402


@pytest.fixture(autouse=True)
def real_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not FAKE:
        monkeypatch.delenv(TEST_VARIABLE, raising=False)
    old, runtime._runtime = runtime._runtime, None
    if old is not None:
        atexit.unregister(old._at_exit)
    yield
    if runtime._runtime is not None:
        atexit.unregister(runtime._runtime._at_exit)
        runtime._runtime = None


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with Gpu() as gpu:
        yield gpu


def fill(cache: Cache) -> list[bytes]:
    keys = [key_of(i) for i in range(COUNT)]
    for i, key in enumerate(keys):
        assert cache.put(key, payload_of(i, SIZE))
    return keys


def check(cache: Cache, gpu: Gpu, keys: list[bytes]) -> dict[str, int]:
    """Upload all and read every byte back; return bytes by way."""
    pool = gpu.allocate(COUNT * SIZE)
    gpu.fill(pool, 0xEE, COUNT * SIZE)
    places = [(pool + i * SIZE, SIZE) for i in range(COUNT)]
    result = cache.upload(keys, places, gpu.stream)
    assert result.lengths == [SIZE] * COUNT
    for i, (pointer, nbytes) in enumerate(places):
        assert gpu.read(pointer, nbytes) == payload_of(i, SIZE)
    return {
        "registered": result.registered_bytes,
        "staged": result.staged_bytes,
        "pageable": result.pageable_bytes,
    }


def places() -> list[Path]:
    found = [Path("build/volumes").resolve()]
    if Path("/dev/shm").is_dir():
        found.append(Path("/dev/shm"))
    return found


@pytest.mark.parametrize("folder", places(), ids=str)
def test_registration_on_each_file_system(folder: Path, gpu: Gpu, record_property):
    """Whatever this kernel and driver say, the bytes are right; it is printed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"ckv-gpu-{os.getpid()}.cyc"
    try:
        with Cache.open(path, CacheConfig(capacity="256MiB")) as cache:
            keys = fill(cache)
            found = cache.register_cuda(0)
            ways = check(cache, gpu, keys)
            system = cache.info().paths[0].file_system
            print(f"\n{folder} ({system}): {found} {ways}")
            if found.complete:
                assert ways["registered"] == COUNT * SIZE
            else:
                assert found.reason
            cache.unregister_cuda()
            assert check(cache, gpu, keys)["registered"] == 0
    finally:
        for name in (path, Path(f"{path}-shm")):
            name.unlink(missing_ok=True)


def test_staged_and_pageable(gpu: Gpu, volume_path: Path):
    with Cache.open(volume_path, CacheConfig(capacity="256MiB")) as cache:
        keys = fill(cache)
        assert check(cache, gpu, keys)["staged"] == COUNT * SIZE


def test_blocks_come_back_from_the_device(gpu: Gpu, volume_path: Path):
    with Cache.open(volume_path, CacheConfig(capacity="256MiB")) as cache:
        keys = fill(cache)
        pool = gpu.allocate(COUNT * SIZE)
        spans = [(pool + i * SIZE, SIZE) for i in range(COUNT)]
        cache.upload(keys, spans, gpu.stream)
        cache.clear()
        items = list(zip(keys, spans, strict=True))
        assert cache.put_from_device(items, gpu.stream) == [True] * COUNT
        for i, key in enumerate(keys):
            assert bytes(cache.get(key) or b"") == payload_of(i, SIZE)


def test_registering_twice_and_from_threads(gpu: Gpu, volume_path: Path):
    config = CacheConfig(capacity="256MiB")
    with Cache.open(volume_path, config) as one, Cache.open(volume_path) as two:
        threads = [
            threading.Thread(target=cache.register_cuda, args=(0,))
            for cache in (one, two, one)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.register_cuda(0) == two.register_cuda(0)
        keys = fill(one)
        one.close()
        check(two, gpu, keys)


SCRIPT = """
import sys, torch
from cyclone_kv import Cache, CacheConfig
assert "libcuda" not in open("/proc/self/maps").read() or torch.version.cuda
with Cache.open(sys.argv[1], CacheConfig(capacity="256MiB")) as cache:
    from cyclone_kv.cuda.driver import Driver
    original = Driver.register
    Driver.register = lambda self, address, nbytes: original(self, address, 0)
    found = cache.register_cuda(0)
    assert not found and found.reason, found
    print(found.reason)
    torch.empty(1, device="cuda"); torch.cuda.synchronize()
print("ok")
"""


@real_only
def test_a_forced_failure_leaves_nothing_for_torch(volume_path: Path):
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(volume_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("ok\n"), done.stderr


@real_only
def test_torch_tensors(volume_path: Path):
    torch: Any = pytest.importorskip("torch")
    with Cache.open(volume_path, CacheConfig(capacity="256MiB")) as cache:
        keys = fill(cache)
        found = cache.register_cuda(0)
        for kind in (torch.uint8, torch.float16, torch.bfloat16):
            size = SIZE // kind.itemsize
            tensors = [torch.zeros(size, dtype=kind, device="cuda") for _ in keys]
            stream = torch.cuda.Stream()
            torch.cuda.synchronize()
            result = cache.upload_async(keys, tensors, stream)
            with torch.cuda.stream(stream):
                copies = [t.view(torch.uint8).clone() for t in tensors]
            stream.synchronize()
            result.wait()
            for i, copy in enumerate(copies):
                assert copy.cpu().numpy().tobytes() == payload_of(i, SIZE)
        items = list(zip((key_of(100 + i) for i in range(COUNT)), copies, strict=True))
        assert cache.put_from_device(items, torch.cuda.current_stream()) == (
            [True] * COUNT
        )
        assert cache.get(key_of(103)) == payload_of(3, SIZE)
        if found.complete:
            # A view is pinned memory to torch too: an asynchronous copy at full speed.
            from cyclone_kv.arrays import as_torch

            view = as_torch(cache.get(keys[0]), copy=False)
            print(f"\ntorch calls a view pinned: {view.is_pinned()}")
            target = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(view, non_blocking=True)
            took = time.perf_counter() - begin
            torch.cuda.synchronize()
            print(f"a copy of it returned after {took * 1e6:.0f} us")
            assert target.cpu().numpy().tobytes() == payload_of(0, SIZE)
            del view


@real_only
def test_cupy_arrays_and_dlpack(volume_path: Path):
    cupy: Any = pytest.importorskip("cupy")

    class Dlpack:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

    with Cache.open(volume_path, CacheConfig(capacity="256MiB")) as cache:
        keys = fill(cache)
        cache.register_cuda(0)
        stream = cupy.cuda.Stream(non_blocking=True)
        arrays = [cupy.zeros(SIZE // 2, dtype=cupy.float16) for _ in keys]
        for wrap in (lambda array: array, Dlpack):
            for array in arrays:
                array.fill(0)
            cache.upload(keys, [wrap(array) for array in arrays], stream)
            for i, array in enumerate(arrays):
                assert array.tobytes() == payload_of(i, SIZE)
        with pytest.raises(ValueError, match="contiguous"):
            cache.upload(keys[:1], [cupy.zeros((SIZE, 2), dtype=cupy.uint8)[:, 0]])


def test_a_context_is_made_on_the_device_that_was_asked_for_alone(volume_path: Path):
    script = (
        "import sys\n"
        "from cyclone_kv import Cache, CacheConfig\n"
        "with Cache.open(sys.argv[1], CacheConfig(capacity='64MiB')) as cache:\n"
        "    cache.put(b'k', b'v'); bytes(cache.get(b'k'))\n"
        "    assert 'libcuda' not in open('/proc/self/maps').read()\n"
        "    cache.register_cuda(0)\n"
        "    from cyclone_kv.cuda.driver import Driver\n"
        "    driver = Driver()\n"
        "    print([driver.primary_active(driver.device(i))"
        " for i in range(driver.count)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(volume_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    active = done.stdout.strip().strip("[]").split(", ")
    assert active == ["True"] + ["False"] * (len(active) - 1)


def test_evicting_under_uploads(gpu: Gpu, volume_path: Path):
    """Blocks are overwritten all the time, and what is found is right."""
    with Cache.open(volume_path, CacheConfig(capacity="64MiB")) as cache:
        cache.register_cuda(0)
        stop = threading.Event()

        def put() -> None:
            i = 0
            while not stop.is_set():
                cache.put(key_of(i % 64), payload_of(i % 64, SIZE))
                i += 1

        thread = threading.Thread(target=put)
        thread.start()
        try:
            pool = gpu.allocate(8 * SIZE)
            hits = 0
            for turn in range(60):
                chosen = [(turn * 8 + i) % 64 for i in range(8)]
                spans = [(pool + i * SIZE, SIZE) for i in range(8)]
                result = cache.upload([key_of(i) for i in chosen], spans, gpu.stream)
                for i, (pointer, nbytes), found in zip(
                    chosen, spans, result.found, strict=True
                ):
                    if found:
                        hits += 1
                        assert gpu.read(pointer, nbytes) == payload_of(i, SIZE)
            assert hits
        finally:
            stop.set()
            thread.join()
