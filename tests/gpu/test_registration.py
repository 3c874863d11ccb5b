# SPDX-License-Identifier: Apache-2.0
"""What is registered, what is not, and why: the G cases of failure."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cyclone_kv import Cache, CacheConfig, ConfigError, _core
from cyclone_kv.cuda import budget, driver, registration, runtime

from .conftest import OpenCache, key_of, payload_of
from .fake import Fake

SIZE = 200_000
MEBIBYTE = 1 << 20


def open_set(folder: Path, count: int = 3) -> Cache:
    """A volume of several files: a chunk of 16 MiB in each."""
    paths = [(folder / f"{i}.cyc", 16 * MEBIBYTE) for i in range(count)]
    return Cache.open(list(paths), CacheConfig())


def fill(cache: Cache, count: int) -> list[bytes]:
    keys = [key_of(i) for i in range(count)]
    for i, key in enumerate(keys):
        assert cache.put(key, payload_of(i, SIZE))
    return keys


def check_upload(cache: Cache, fake: Fake, keys: list[bytes]) -> tuple[int, int]:
    """Upload and compare; return bytes by DMA from the mapping, and by the ring."""
    targets = [fake.allocate(SIZE) for _ in keys]
    result = cache.upload(keys, [t.pair for t in targets])
    assert result.lengths == [SIZE] * len(keys)
    assert [t.read() for t in targets] == [
        payload_of(i, SIZE) for i in range(len(keys))
    ]
    return result.registered_bytes, result.staged_bytes


# ---- what works ---------------------------------------------------------------------


def test_the_whole_mapping_is_registered_read_only_in_chunks(
    fake: Fake, volume_path: Path
):
    with open_set(volume_path.parent) as cache:
        keys = fill(cache, 24)
        found = cache.register_cuda()
        assert found
        assert found.complete
        assert found.finished
        assert found.reason == ""
        assert found.covered_bytes == found.volume_bytes == fake.registered_bytes
        calls = fake.calls("cuMemHostRegister")
        assert [call.result for call in calls] == [0, 0, 0]
        assert {call.c for call in calls} == {0x01 | 0x08}  # portable, read-only
        hold = cache._hold()
        assert sorted((c.a, c.b) for c in calls) == sorted(
            hold.chunk(i) for i in range(3)
        )
        hold.release()
        assert check_upload(cache, fake, keys) == (24 * SIZE, 0)
        assert {copy.kind for copy in fake.copies()} == {"registered"}
    undone = [call.a for call in fake.calls("cuMemHostUnregister")]
    assert undone == [call.a for call in reversed(calls)]
    assert fake.violation == ""


def test_nothing_is_rounded_up(open_cache: OpenCache, fake: Fake):
    cache = open_cache()
    found = cache.register_cuda()
    data = sum(path.data_bytes for path in cache.info().paths)
    assert found.covered_bytes == data == fake.registered_bytes


def test_unregistering_can_be_asked_for(cache: Cache, fake: Fake):
    keys = fill(cache, 3)
    cache.unregister_cuda()
    assert cache.cuda_registration is None
    cache.register_cuda()
    assert check_upload(cache, fake, keys) == (3 * SIZE, 0)
    cache.unregister_cuda()
    assert fake.registered_bytes == 0
    assert cache.cuda_registration is None
    assert check_upload(cache, fake, keys) == (0, 3 * SIZE)
    assert cache.register_cuda().complete
    assert check_upload(cache, fake, keys) == (3 * SIZE, 0)


# ---- G1: refusals of kernel and driver ----------------------------------------------


@pytest.mark.parametrize("code", [1, 2, 304, 801])
def test_a_refused_pin_is_a_reason_and_nothing_else(
    cache: Cache, fake: Fake, code: int
):
    keys = fill(cache, 3)
    fake.fail("cuMemHostRegister", 1, code, every=True)
    found = cache.register_cuda()
    assert not found
    assert found.covered_bytes == 0
    assert f"({code})" in found.reason
    assert "cuMemHostRegister" in found.reason
    assert cache.get(keys[1]) == payload_of(1, SIZE)
    assert check_upload(cache, fake, keys) == (0, 3 * SIZE)
    fake.succeed()
    assert cache.register_cuda()  # asked again, tried again


@pytest.mark.parametrize("registers", [True, False])
def test_the_attributes_are_asked_before(cache: Cache, fake: Fake, registers: bool):
    fake.lib.fake_support(registers, False)
    found = cache.register_cuda()
    assert not found
    assert ("reading only" in found.reason) == registers
    assert fake.calls("cuMemHostRegister") == []
    assert check_upload(cache, fake, fill(cache, 2)) == (0, 2 * SIZE)


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("cuInit", 100, "does not start"),
        ("cuInit", 803, "(803)"),
        ("cuDeviceGetCount", 999, "does not start"),
        ("cuDeviceGetAttribute", 999, "cuDeviceGetAttribute"),
        ("cuDevicePrimaryCtxRetain", 2, "cuDevicePrimaryCtxRetain"),
        ("cuCtxPushCurrent", 201, "cuCtxPushCurrent"),
    ],
)
def test_a_driver_that_does_not_start_is_a_reason(
    cache: Cache, fake: Fake, call: str, code: int, text: str
):
    fake.fail(call, 1, code, every=True)
    found = cache.register_cuda()
    assert not found
    assert text in found.reason
    assert cache.cuda_registration == found


def test_no_device_and_no_library_are_reasons(
    open_cache: OpenCache, fake: Fake, monkeypatch: pytest.MonkeyPatch
):
    fake.reset(0)
    assert "NO_DEVICE" in open_cache().register_cuda().reason
    monkeypatch.setenv(driver.TEST_VARIABLE, "/nowhere/libcuda.so.1")
    found = open_cache().register_cuda()
    assert "/nowhere/libcuda.so.1 cannot be loaded" in found.reason
    assert found.device is None
    monkeypatch.setenv(driver.TEST_VARIABLE, "libc.so.6")
    assert "no CUDA driver" in open_cache().register_cuda().reason


def test_without_cffi_there_is_a_reason_with_the_remedy(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
):
    runtime._runtime = None
    driver._declared.cache_clear()
    monkeypatch.setitem(sys.modules, "cffi", None)
    assert "pip install 'cyclone-kv[cuda]'" in cache.register_cuda().reason


# ---- G2: caps, and errors that stay -------------------------------------------------


def test_a_failed_call_leaves_the_thread_as_it_was(cache: Cache, fake: Fake):
    out = fake.ffi.new("uintptr_t *")
    cache.register_cuda()
    cache.unregister_cuda()
    assert fake.lib.cuCtxPushCurrent_v2(0xC000) == 0
    for name in ("cuMemHostRegister", "cuEventCreate", "cuMemHostAlloc"):
        fake.fail(name, 1, 1, every=True)
        cache.register_cuda()
        assert fake.lib.fake_depth() == 1
    fake.succeed()
    assert fake.lib.cuCtxPopCurrent_v2(out) == 0
    assert out[0] == 0xC000


def test_what_was_registered_before_a_refusal_is_used(fake: Fake, volume_path: Path):
    with open_set(volume_path.parent) as cache:
        keys = fill(cache, 24)
        fake.fail("cuMemHostRegister", 2, 1)
        found = cache.register_cuda()
        assert found
        assert not found.complete
        assert 0 < found.covered_bytes < found.volume_bytes
        assert len(fake.calls("cuMemHostRegister")) == 2  # and no further try
        direct, staged = check_upload(cache, fake, keys)
        assert direct > 0
        assert staged > 0
    assert fake.registered_bytes == 0


def test_a_chunk_that_somebody_else_registered_is_left_to_them(
    fake: Fake, volume_path: Path
):
    with open_set(volume_path.parent) as cache:
        cache.register_cuda()
        cache.unregister_cuda()
        hold = cache._hold()
        address, nbytes = hold.chunk(1)
        hold.release()
        assert fake.lib.cuCtxPushCurrent_v2(0xC000) == 0
        assert fake.lib.cuMemHostRegister_v2(address, nbytes, 8) == 0
        found = cache.register_cuda()
        assert "ALREADY_REGISTERED" in found.reason
        assert found.covered_bytes == found.volume_bytes - nbytes
        cache.unregister_cuda()
        assert fake.registered_bytes == nbytes
        assert fake.lib.cuMemHostUnregister(address) == 0
        fake.lib.cuCtxPopCurrent_v2(fake.ffi.new("uintptr_t *"))


# ---- G3: in the background ----------------------------------------------------------


def test_a_registration_in_the_background_stops_nobody(
    fake: Fake, volume_path: Path, monkeypatch: pytest.MonkeyPatch
):
    may_go, at_work = threading.Semaphore(0), threading.Semaphore(0)
    original = driver.Driver.register

    def slow(self: driver.Driver, address: int, nbytes: int) -> None:
        at_work.release()
        may_go.acquire()
        original(self, address, nbytes)

    monkeypatch.setattr(driver.Driver, "register", slow)
    with open_set(volume_path.parent) as cache:
        keys = fill(cache, 24)
        found = cache.register_cuda(background=True)
        assert not found.finished
        assert found.covered_bytes == 0
        assert cache.get(keys[3]) == payload_of(3, SIZE)
        assert check_upload(cache, fake, keys) == (0, 24 * SIZE)
        at_work.acquire()
        may_go.release()
        at_work.acquire()  # the second begins: the first is in use
        found = cache.cuda_registration
        assert found is not None
        assert not found.finished
        assert 0 < found.covered_bytes < found.volume_bytes
        direct, staged = check_upload(cache, fake, keys)
        assert direct > 0
        assert staged > 0
        # close() waits for the chunk at work and takes no further one
        closing = threading.Thread(target=cache.close)
        closing.start()
        may_go.release()
        closing.join(60)
        assert not closing.is_alive()
    assert len(fake.calls("cuMemHostRegister")) == 2
    assert fake.registered_bytes == 0
    assert fake.violation == ""


def test_who_waits_gets_what_the_background_did(fake: Fake, volume_path: Path):
    with open_set(volume_path.parent) as cache:
        cache.register_cuda(background=True)
        found = cache.register_cuda()
        assert found.finished
        assert found.complete
        assert len(fake.calls("cuMemHostRegister")) == 3


# ---- G4, G6, G7: how much -----------------------------------------------------------


def test_a_cap_of_the_driver_keeps_what_fits(fake: Fake, volume_path: Path):
    with open_set(volume_path.parent) as cache:
        keys = fill(cache, 24)
        fake.lib.fake_caps(0, 40 * MEBIBYTE)
        found = cache.register_cuda()
        assert 0 < found.covered_bytes <= 40 * MEBIBYTE
        assert "OUT_OF_MEMORY" in found.reason
        refused = [c for c in fake.calls("cuMemHostRegister") if c.result]
        assert len(refused) == 1
        direct, staged = check_upload(cache, fake, keys)
        assert direct > 0
        assert staged > 0


def limit_memory(monkeypatch: pytest.MonkeyPatch, found: budget.Limits) -> None:
    monkeypatch.setattr(budget, "limits", lambda: found)


def test_a_volume_larger_than_half_of_the_memory_is_not_pinned_unasked(
    cache: Cache, fake: Fake, monkeypatch: pytest.MonkeyPatch
):
    limit_memory(monkeypatch, budget.Limits(100 * MEBIBYTE, "the memory", None))
    keys = fill(cache, 2)
    found = cache.register_cuda()
    assert not found
    assert fake.calls("cuMemHostRegister") == []
    for text in ("64.0 MiB", "50.0 MiB", "100.0 MiB", "the memory", "budget="):
        assert text in found.reason
    assert check_upload(cache, fake, keys) == (0, 2 * SIZE)
    assert cache.register_cuda(budget="64MiB").complete


def test_a_budget_is_kept_to(
    fake: Fake, volume_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with open_set(volume_path.parent) as cache:
        chunk = cache.info().paths[0].data_bytes
        found = cache.register_cuda(budget=2 * chunk + 4096)
        assert found.covered_bytes == 2 * chunk
        assert found.budget_bytes == 2 * chunk + 4096
        assert "chunks of up to 1 GiB" in found.reason
        cache.unregister_cuda()
        limit_memory(monkeypatch, budget.Limits(1 << 40, "the memory", chunk))
        found = cache.register_cuda(budget="1GiB")
        assert found.covered_bytes == chunk
        assert "RLIMIT_MEMLOCK" in found.reason
        cache.unregister_cuda()
        for too_little in (0, 1, 4096, chunk - 1):
            found = cache.register_cuda(budget=too_little)
            assert not found
            assert found.budget_bytes == too_little
            assert "fit the budget" in found.reason
        assert fake.registered_bytes == 0
        with pytest.raises(ConfigError, match="not a size"):
            cache.register_cuda(budget="much")


def cgroup(folder: Path, line: str, limits: dict[str, str]) -> budget.Limits:
    proc, mount = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(line)
    for name, text in limits.items():
        path = mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return budget.limits(proc, mount)


def test_the_limit_of_the_control_group_counts(tmp_path: Path):
    found = cgroup(
        tmp_path,
        "0::/pod/engine\n",
        {"pod/memory.max": "67108864\n", "pod/engine/memory.max": "max\n"},
    )
    assert found.memory_bytes == 64 * MEBIBYTE
    assert "/pod" in found.memory_source
    assert found.automatic_bytes <= 32 * MEBIBYTE


def test_the_limit_of_an_older_control_group_counts(tmp_path: Path):
    found = cgroup(
        tmp_path,
        "4:cpu,cpuacct:/x\n3:memory:/docker/abc\n0::/\n",
        # In a container the group's own folder is the root of the mount.
        {"memory/memory.limit_in_bytes": "134217728\n"},
    )
    assert found.memory_bytes == 128 * MEBIBYTE


def test_without_control_groups_the_machine_counts(tmp_path: Path):
    (tmp_path / "self").mkdir()
    found = budget.limits(tmp_path, tmp_path)
    assert "machine" in found.memory_source
    assert found.memory_bytes > 64 * MEBIBYTE


@pytest.mark.parametrize(("capabilities", "binds"), [("0", True), ("4000", False)])
def test_the_limit_of_locked_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: str, binds: bool
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(f"CapEff:\t{capabilities}\n")
    found = budget.limits(tmp_path, tmp_path)
    assert (found.locked_bytes == 65536) == binds
    assert ("RLIMIT_MEMLOCK is 64.0 KiB" in str(found)) == binds
    if binds:
        assert found.automatic_bytes == found.ceiling_bytes == 65536


def test_a_device_that_cannot_deliver_is_a_reason(
    cache: Cache, fake: Fake, monkeypatch: pytest.MonkeyPatch
):
    class Broken:
        """A hold whose pages cannot be read."""

        chunks = 1

        def chunk(self, index: int) -> tuple[int, int]:
            return 1 << 20, 1 << 20

        def populate(self, *_: int) -> None:
            from cyclone_kv import VolumeError

            raise VolumeError(5, "pages of chunk 0 cannot be brought into memory")

    cache.register_cuda()
    hold: Any = Broken()
    table = registration.ChunkTable(runtime.current(), hold, 1 << 20)
    table.start(0, None, background=False)
    assert "cannot be brought into memory" in table.snapshot(1).reason


# ---- G8: contexts -------------------------------------------------------------------


def test_no_context_is_made_on_a_device_that_nobody_asked_for(
    open_cache: OpenCache, fake: Fake
):
    fake.reset(3)
    cache = open_cache()
    assert cache.register_cuda(device=1).device == 1
    assert [fake.retains(i) for i in range(3)] == [0, 1, 0]
    keys = fill(cache, 2)
    assert check_upload(cache, fake, keys) == (2 * SIZE, 0)  # from device 0: portable
    cache.close()
    assert [fake.retains(i) for i in range(3)] == [1, 0, 0]  # that of the allocation


def test_which_device_none_means(open_cache: OpenCache, fake: Fake):
    fake.reset(3)
    cache = open_cache()
    with pytest.raises(ConfigError, match=r"device is None.*3 devices"):
        cache.register_cuda()
    assert [fake.retains(i) for i in range(3)] == [0, 0, 0]
    fake.allocate(1, 2)  # somebody uses device 2
    assert cache.register_cuda().device == 2
    cache.unregister_cuda()
    assert fake.lib.cuCtxPushCurrent_v2(0xC002) == 0
    fake.allocate(1, 1)
    assert cache.register_cuda().device == 2  # the current one
    fake.lib.cuCtxPopCurrent_v2(fake.ffi.new("uintptr_t *"))


def test_a_device_out_of_range_is_a_mistake(cache: Cache, fake: Fake):
    for device in (-1, 1, 5):
        with pytest.raises(ConfigError, match=rf"device is {device}; .*sees 1 devices"):
            cache.register_cuda(device)
    for wrong in ("0", True, 0.0):
        with pytest.raises(TypeError, match="device is"):
            cache.register_cuda(wrong)  # type: ignore[arg-type]


SCRIPT = """
import sys
from cyclone_kv import Cache, CacheConfig
def loaded():
    return "libfake_cuda" in open("/proc/self/maps").read()
cache = Cache.open(sys.argv[1], CacheConfig(capacity="16MiB"))
cache.put(b"k", b"payload")
bytes(cache.get(b"k"))
cache.stats()
assert cache.cuda_registration is None
cache.unregister_cuda()
assert not loaded() and "cffi" not in sys.modules
assert not any(name.startswith("cyclone_kv.cuda") for name in sys.modules)
assert cache.register_cuda(), cache.cuda_registration
assert loaded()
assert not any(name.startswith(("cupy", "torch")) for name in sys.modules)
cache.close()
print("ok")
"""


def test_the_driver_is_loaded_by_the_first_call_that_needs_it(
    fake: Fake, volume_path: Path
):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(volume_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr


# ---- G10: more than once ------------------------------------------------------------


def test_registering_twice_is_once(open_cache: OpenCache, fake: Fake):
    first, second = open_cache(), open_cache()
    keys = fill(first, 3)
    assert first.register_cuda().handles == 1
    assert first.register_cuda().handles == 1
    assert second.register_cuda().handles == 2
    assert len(fake.calls("cuMemHostRegister")) == 1
    first.close()
    assert fake.registered_bytes == 64 * MEBIBYTE
    assert check_upload(second, fake, keys) == (3 * SIZE, 0)
    found = second.cuda_registration
    assert found is not None
    assert found.handles == 1
    second.close()
    assert fake.registered_bytes == 0


def test_a_handle_that_did_not_ask_uses_what_is_there(
    open_cache: OpenCache, fake: Fake
):
    first, second = open_cache(), open_cache()
    keys = fill(first, 3)
    assert check_upload(second, fake, keys) == (0, 3 * SIZE)
    first.register_cuda()
    assert check_upload(second, fake, keys) == (3 * SIZE, 0)
    second.unregister_cuda()
    assert check_upload(second, fake, keys) == (3 * SIZE, 0)
    first.unregister_cuda()
    assert check_upload(second, fake, keys) == (0, 3 * SIZE)


def test_threads_that_register_at_once_register_once(open_cache: OpenCache, fake: Fake):
    caches = [open_cache() for _ in range(4)]
    start = threading.Barrier(8)
    found: list[registration.Registration] = []

    def work(cache: Cache) -> None:
        start.wait()
        found.append(cache.register_cuda())

    threads = [threading.Thread(target=work, args=(c,)) for c in caches * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.complete for each in found] == [True] * 8
    assert len(fake.calls("cuMemHostRegister")) == 1
    assert fake.violation == ""


def test_the_stub_of_a_hold_says_what_it_is(cache: Cache):
    hold = cache._hold()
    assert isinstance(hold, _core.Hold)
    assert hold.chunks == 1
    other = cache._hold()
    assert hold.volume == other.volume
    hold.release()
    other.release()
