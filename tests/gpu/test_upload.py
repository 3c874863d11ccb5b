# SPDX-License-Identifier: Apache-2.0
"""Uploads and puts: which way blocks take, what arrives, what is refused."""

from __future__ import annotations

import gc
import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest

from cyclone_kv import Cache, CacheConfig, ConfigError, CudaError, cuda
from cyclone_kv.cuda import transfer
from cyclone_kv.cuda.driver import Driver

from .conftest import OpenCache, key_of, payload_of
from .fake import LAZY, MANUAL, CupyLike, DlpackLike, Fake, TorchLike

SIZE = 100_000
REGISTER = "cuMemHostRegister"


def store(cache: Cache, count: int, nbytes: int = SIZE) -> list[bytes]:
    keys = [key_of(i) for i in range(count)]
    for i, key in enumerate(keys):
        assert cache.put(key, payload_of(i, nbytes))
    return keys


def mapping_of(cache: Cache) -> tuple[int, int]:
    """Where the data area is mapped."""
    hold = cache._hold()
    try:
        return hold.chunk(0)
    finally:
        hold.release()


# ---- which way ----------------------------------------------------------------------


def test_registered_blocks_are_copied_out_of_the_mapping(cache: Cache, fake: Fake):
    keys = store(cache, 4)
    assert cache.register_cuda().complete
    targets = [fake.allocate(SIZE) for _ in keys]
    result = cache.upload(keys, [t.pair for t in targets])
    assert result.registered_bytes == 4 * SIZE
    assert result.staged_bytes == result.pageable_bytes == 0
    begin, nbytes = mapping_of(cache)
    for copy in fake.copies():
        assert copy.kind == "registered"
        assert begin <= copy.b < begin + nbytes
    assert fake.pinned_bytes == 0  # no ring was made: nothing was staged
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(4)]


def test_a_framework_finds_a_registered_view_pinned(cache: Cache, fake: Fake):
    """G9: what is asked for ``is_pinned``, and a copy of the framework's own."""
    keys = store(cache, 1)
    found = cache.register_cuda()
    assert found.covered_bytes == sum(each.b for each in fake.calls(REGISTER))
    view = cache.get(keys[0])
    assert view is not None
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    driver = Driver(str(fake.path))
    target = fake.allocate(SIZE)
    fake.mode(MANUAL)  # whoever waited would wait for ever
    assert driver.is_host(address)
    driver.push(0xC000)
    driver.copy_to_device(target.pointer, address, SIZE, fake.stream())
    driver.pop()
    assert [(c.kind, c.b) for c in fake.copies()] == [("registered", address)]
    fake.advance()
    assert target.read() == payload_of(0, SIZE)
    cache.unregister_cuda()
    with pytest.raises(CudaError):
        driver.is_host(address)  # pageable again


@pytest.mark.parametrize("kind", ["cupy", "torch", "dlpack"])
def test_arrays_are_filled_without_a_copy_in_between(
    cache: Cache, fake: Fake, kind: str
):
    keys = store(cache, 3)
    cache.register_cuda()
    memory = [fake.allocate(SIZE) for _ in keys]
    make = {"cupy": CupyLike, "torch": TorchLike, "dlpack": DlpackLike}[kind]
    arrays = [make(each) for each in memory]
    result = cache.upload(keys, arrays)
    assert result.lengths == [SIZE] * 3
    begin, nbytes = mapping_of(cache)
    sources = [(c.kind, begin <= c.b < begin + nbytes, c.a) for c in fake.copies()]
    assert sources == [("registered", True, each.pointer) for each in memory]
    assert [m.read() for m in memory] == [payload_of(i, SIZE) for i in range(3)]


def test_unregistered_blocks_go_through_the_pinned_ring(cache: Cache, fake: Fake):
    keys = store(cache, 4)
    targets = [fake.allocate(SIZE) for _ in keys]
    result = cache.upload(keys, [t.pair for t in targets])
    assert (result.registered_bytes, result.staged_bytes) == (0, 4 * SIZE)
    assert {copy.kind for copy in fake.copies()} == {"pinned"}
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(4)]


def test_without_pinned_memory_uploads_are_pageable_and_said_so(
    cache: Cache, fake: Fake, caplog: pytest.LogCaptureFixture
):
    keys = store(cache, 4)
    fake.fail("cuMemHostAlloc", 1, 2, every=True)
    targets = [fake.allocate(SIZE) for _ in keys]
    result = cache.upload(keys, [t.pair for t in targets])
    assert result.pageable_bytes == 4 * SIZE
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(4)]
    cache.upload(keys, [t.pair for t in targets])
    assert len(fake.calls("cuMemHostAlloc")) == 1  # asked once
    assert "pageable" in caplog.text


def test_a_block_larger_than_a_slot_takes_several(cache: Cache, fake: Fake):
    cuda.set_ring(4, 64 << 10)
    nbytes = 200_001
    keys = store(cache, 3, nbytes)
    targets = [fake.allocate(nbytes) for _ in keys]
    result = cache.upload(keys, [t.pair for t in targets])
    assert result.staged_bytes == 3 * nbytes
    assert [t.read() for t in targets] == [payload_of(i, nbytes) for i in range(3)]


def test_a_block_larger_than_the_ring_is_pageable(cache: Cache, fake: Fake):
    cuda.set_ring(2, 64 << 10)
    keys = [*store(cache, 1, 200_000), key_of(9)]
    assert cache.put(key_of(9), payload_of(9, 1000))
    targets = [fake.allocate(200_000), fake.allocate(1000)]
    result = cache.upload(keys, [t.pair for t in targets])
    assert (result.pageable_bytes, result.staged_bytes) == (200_000, 1000)
    assert targets[0].read() == payload_of(0, 200_000)
    assert targets[1].read() == payload_of(9, 1000)


def test_a_reader_without_pins_is_staged(open_cache: OpenCache, fake: Fake):
    keys = store(open_cache(), 2)
    reader = open_cache(mode="r")
    registration = reader.register_cuda()
    assert not registration
    assert 'mode="r"' in registration.reason
    targets = [fake.allocate(SIZE) for _ in keys]
    result = reader.upload(keys, [t.pair for t in targets])
    assert result.staged_bytes == 2 * SIZE
    assert targets[1].read() == payload_of(1, SIZE)


def test_neighbours_are_one_copy(cache: Cache, fake: Fake):
    nbytes = 64 << 10
    keys = store(cache, 8, nbytes)
    cache.register_cuda()
    pool = fake.allocate(8 * nbytes)
    places = [(pool.pointer + i * nbytes, nbytes) for i in range(8)]
    cache.upload(keys, places)
    assert len(fake.copies()) < 8
    assert pool.read() == b"".join(payload_of(i, nbytes) for i in range(8))


def test_no_copy_goes_across_the_end_of_a_chunk():
    copies = [(0, 100, 50), (50, 150, 50), (100, 200, 50)]
    assert transfer._joined(copies, [150]) == [(0, 100, 50), (50, 150, 100)]
    assert transfer._joined(copies, [200, 500]) == [(0, 100, 100), (100, 200, 50)]
    assert transfer._joined(copies, []) == [(0, 100, 150)]


def test_reads_and_copies_overlap_and_no_slot_is_reused_early(
    open_cache: OpenCache, fake: Fake
):
    """The latest possible copy still finds in its slot what was read for it."""
    cuda.set_ring(2, 128 << 10)
    cache = open_cache()
    keys = store(cache, 24)
    fake.mode(LAZY)
    targets = [fake.allocate(SIZE) for _ in keys]
    result = cache.upload_async(keys, [t.pair for t in targets])
    names = [call.name for call in fake.calls("cuEventRecord", "cuEventSynchronize")]
    assert (
        names[:2] == ["cuEventRecord"] * 2
    )  # the second lot did not wait for the first
    result.wait()
    assert [t.read() for t in targets] == [payload_of(i, SIZE) for i in range(24)]


# ---- what arrives -------------------------------------------------------------------


@pytest.mark.parametrize("registered", [True, False])
def test_a_miss_leaves_its_destination_alone(
    cache: Cache, fake: Fake, registered: bool
):
    keys = store(cache, 3)
    if registered:
        cache.register_cuda()
    wanted = [keys[0], key_of(77), keys[2]]
    targets = [fake.allocate(SIZE) for _ in wanted]
    for target in targets:
        target.fill(0xEE)
    result = cache.upload(wanted, [t.pair for t in targets])
    assert result.found == [True, False, True]
    assert result.lengths == [SIZE, None, SIZE]
    assert targets[1].read() == b"\xee" * SIZE
    assert targets[2].read() == payload_of(2, SIZE)


@pytest.mark.parametrize("registered", [True, False])
def test_a_damaged_block_never_reaches_the_device(
    open_cache: OpenCache, fake: Fake, volume_path: Path, registered: bool
):
    cache = open_cache()
    keys = store(cache, 2)
    place = cache.locate(keys[0])
    assert place is not None
    with place, open(volume_path, "r+b", buffering=0) as file:
        file.seek(place.offset + 5000)
        file.write(b"damage")
    cache.close()
    cache = open_cache()  # nobody has verified anything yet
    if registered:
        cache.register_cuda()
    targets = [fake.allocate(SIZE) for _ in keys]
    for target in targets:
        target.fill(0xEE)
    before = cache.stats().volume.corrupt
    result = cache.upload(keys, [t.pair for t in targets])
    assert cache.stats().volume.corrupt == before + 1
    assert result.lengths == [None, SIZE]
    assert targets[0].read() == b"\xee" * SIZE
    assert targets[1].read() == payload_of(1, SIZE)


@pytest.mark.parametrize("registered", [True, False])
def test_lengths_alignments_and_duplicates(
    cache: Cache, fake: Fake, registered: bool, rng: random.Random
):
    sizes = [0, 1, 4095, 4096, 4097, 65536, 3 * SIZE]
    for i, nbytes in enumerate(sizes):
        assert cache.put(key_of(i), payload_of(i, nbytes))
    if registered:
        cache.register_cuda()
    order = [rng.randrange(len(sizes)) for _ in range(30)]
    pool = fake.allocate(sum(sizes[i] + 64 for i in order) + 64)
    pool.fill(0xEE)
    offset, places, offsets = rng.randrange(1, 60), [], []
    for i in order:
        places.append((pool.pointer + offset, sizes[i]))
        offsets.append(offset)
        offset += sizes[i] + rng.randrange(1, 60)
    result = cache.upload([key_of(i) for i in order], places)
    assert result.lengths == [sizes[i] for i in order]
    content = pool.read()
    wanted = bytearray(b"\xee" * pool.nbytes)
    for i, at in zip(order, offsets, strict=True):
        wanted[at : at + sizes[i]] = payload_of(i, sizes[i])
    assert content == bytes(wanted)


def test_empty_destinations_take_empty_blocks_alone(cache: Cache, fake: Fake):
    assert cache.put(b"empty", b"")
    assert cache.put(b"full", b"x")
    result = cache.upload([b"empty", b"absent"], [(0, 0), (0, 0)])
    assert result.lengths == [0, None]
    assert result.done()
    with pytest.raises(ConfigError, match=r"destinations\[0\] has 0 bytes"):
        cache.upload([b"full"], [(0, 0)])
    assert cache.upload([], []).wait().lengths == []


def test_a_larger_destination_keeps_its_rest(cache: Cache, fake: Fake):
    keys = store(cache, 1)
    target = fake.allocate(SIZE + 100)
    target.fill(0xEE)
    assert cache.upload(keys, [target.pair]).lengths == [SIZE]
    assert target.read() == payload_of(0, SIZE) + b"\xee" * 100


def test_keys_may_be_one_buffer(cache: Cache, fake: Fake):
    keys = store(cache, 3)
    targets = [fake.allocate(SIZE) for _ in keys]
    result = cache.upload(b"".join(keys), [t.pair for t in targets])
    assert result.found == [True] * 3
    with pytest.raises(ConfigError, match="multiple of 32"):
        cache.upload(b"x" * 33, [targets[0].pair])


def test_a_block_that_grew_meanwhile_is_read_again(
    cache: Cache, fake: Fake, monkeypatch: pytest.MonkeyPatch
):
    keys = store(cache, 1, 1000)
    target = fake.allocate(5000)
    original = Cache._pin_many
    grown = []

    def pin_then_grow(self: Cache, *args: object) -> object:
        found = original(self, *args)
        if not grown:
            grown.append(True)
            assert cache.put(keys[0], payload_of(5, 5000), overwrite=True)
        return found

    monkeypatch.setattr(Cache, "_pin_many", pin_then_grow, raising=False)
    assert cache.upload(keys, [target.pair]).lengths == [5000]
    assert target.read() == payload_of(5, 5000)


def test_a_block_that_shrank_meanwhile_brings_no_byte_of_another(
    cache: Cache, fake: Fake, monkeypatch: pytest.MonkeyPatch
):
    keys = store(cache, 2, 5000)
    target = fake.allocate(5000)
    cache.upload([keys[1]], [target.pair])  # leaves its bytes in the ring
    target.fill(0xEE)
    original = Cache._pin_many

    def pin_then_shrink(self: Cache, *args: object) -> object:
        found = original(self, *args)
        assert cache.put(keys[0], payload_of(5, 1000), overwrite=True)
        return found

    monkeypatch.setattr(Cache, "_pin_many", pin_then_shrink, raising=False)
    assert cache.upload([keys[0]], [target.pair]).lengths == [1000]
    assert target.read() == payload_of(5, 1000) + b"\xee" * 4000


# ---- streams ------------------------------------------------------------------------


def test_copies_run_on_the_stream_that_was_given(cache: Cache, fake: Fake):
    keys = store(cache, 2)
    cache.register_cuda()
    stream = fake.stream()

    class Torch:
        cuda_stream = stream

    class Cupy:
        ptr = stream

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream

    for given in (stream, Torch(), Cupy(), Protocol()):
        before = len(fake.calls("cuEventRecord"))
        target = fake.allocate(SIZE)
        cache.upload(keys[:1], [target.pair], stream=given)
        assert fake.calls("cuEventRecord")[before].b == stream
        assert target.read() == payload_of(0, SIZE)


def test_the_work_of_the_owner_comes_first(cache: Cache, fake: Fake):
    keys = store(cache, 2)
    mine, theirs = fake.stream(), fake.stream()
    arrays = [CupyLike(fake.allocate(SIZE), stream=theirs) for _ in keys]
    cache.upload(keys, arrays, stream=mine)
    waits = fake.calls("cuStreamWaitEvent")
    assert [wait.a for wait in waits] == [mine]
    dlpack = DlpackLike(fake.allocate(SIZE))
    cache.upload(keys[:1], [dlpack], stream=mine)
    cache.upload(keys[:1], [dlpack])
    assert dlpack.streams == [mine, 1]


def test_a_dlpack_export_lives_until_the_copy_is_done(cache: Cache, fake: Fake):
    keys = store(cache, 1)
    fake.mode(MANUAL)
    array = DlpackLike(fake.allocate(SIZE))
    result = cache.upload_async(keys, [array])
    gc.collect()
    assert array.alive == 1
    fake.advance()
    result.wait()
    del result
    gc.collect()
    assert array.alive == 0


# ---- mistakes -----------------------------------------------------------------------


def test_mistakes_are_named_before_anything_is_copied(cache: Cache, fake: Fake):
    keys = store(cache, 2)
    cache.register_cuda()
    good = fake.allocate(SIZE)
    host = bytearray(10)

    def refused(destination: object, text: str, kind: type = ConfigError) -> None:
        with pytest.raises(kind, match=text):
            cache.upload(keys, [good.pair, destination])

    refused(fake.allocate(10).pair, r"destinations\[1\] has 10 bytes.*100000")
    refused((4096, 5), r"0x1000, which is no device memory")
    refused((0, 5), "pair is")
    refused((-1, 5), "pair is")
    refused((good.pointer, 5, 5), "pair is")
    refused(host, "no device memory", TypeError)
    refused(good.pointer, r"give \(pointer, nbytes\)", TypeError)
    refused(CupyLike(fake.allocate(SIZE), read_only=True), "read-only")
    refused(
        CupyLike(fake.allocate(2 * SIZE), shape=(SIZE,), strides=(2,)), "contiguous"
    )
    refused(CupyLike(fake.allocate(SIZE + 2), typestr="|V3"), "whole elements")
    for part, wrong in (
        ("data", None),
        ("data", (good.pointer,)),
        ("data", (-1, False)),
        ("shape", (-SIZE,)),
        ("shape", ("all",)),
        ("strides", (1, 1)),
        ("strides", ("none",)),
    ):
        array = CupyLike(fake.allocate(SIZE))
        array.__cuda_array_interface__[part] = wrong
        refused(array, r"destinations\[1\] has a malformed __cuda_array_interface__")
    del array.__cuda_array_interface__["typestr"]
    refused(array, "malformed")
    refused(TorchLike(fake.allocate(SIZE), contiguous=False), "contiguous")
    refused(TorchLike(fake.allocate(SIZE), cuda=False), "on cpu")
    refused(DlpackLike(fake.allocate(SIZE), kind=1), "CUDA")
    refused(DlpackLike(fake.allocate(SIZE), strides=(2,)), "contiguous")
    refused(DlpackLike(fake.allocate(SIZE + 7), bits=24), "whole elements")
    refused(good.pair, "overlap")
    refused((good.pointer + SIZE - 1, 1), "overlap")
    begin, _ = mapping_of(cache)
    refused((begin, SIZE), "memory of the host")
    with pytest.raises(ConfigError, match="2 keys and 1 destinations"):
        cache.upload(keys, [good.pair])
    assert fake.copies() == []
    assert cache.stats().process.pinned_entries == 0


def test_streams_that_are_none_are_refused(open_cache: OpenCache, fake: Fake):
    fake.reset(2)
    cache = open_cache()
    keys = store(cache, 1)
    target = fake.allocate(SIZE)
    with pytest.raises(ConfigError, match="no stream of device 0"):
        cache.upload(keys, [target.pair], stream=0x9999)
    with pytest.raises(ConfigError, match="use a stream of that device"):
        cache.upload(keys, [target.pair], stream=fake.stream(1))
    with pytest.raises(ConfigError, match="no handle"):
        cache.upload(keys, [target.pair], stream=-1)
    for wrong in ("default", True, 1.5):
        with pytest.raises(TypeError, match="stream is"):
            cache.upload(keys, [target.pair], stream=wrong)
    with pytest.raises(ConfigError, match="device 1, others are on 0"):
        cache.upload(keys * 2, [target.pair, fake.allocate(SIZE, 1).pair])


def test_without_a_driver_uploads_say_so(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CYCLONE_KV_TEST_CUDA_DRIVER", "/nowhere/libcuda.so.1")
    with pytest.raises(CudaError, match="there is no CUDA driver"):
        cache.upload([b"k"], [(4096, 10)])


# ---- from the device ----------------------------------------------------------------


@pytest.mark.parametrize("ring", [True, False])
def test_blocks_are_stored_from_the_device(cache: Cache, fake: Fake, ring: bool):
    if not ring:
        fake.fail("cuMemHostAlloc", 1, 2, every=True)
    cuda.set_ring(2, 128 << 10)
    sources = [fake.allocate(SIZE + i) for i in range(9)]
    for i, source in enumerate(sources):
        source.write(payload_of(i, SIZE + i))
    fake.mode(LAZY)
    items = [(key_of(i), s.pair, b"header") for i, s in enumerate(sources)]
    assert cache.put_from_device(items, chain=True) == [True] * 9
    for i in range(9):
        entry = cache.read(key_of(i))
        assert entry is not None
        with entry:
            assert bytes(entry.view) == payload_of(i, SIZE + i)
            assert entry.header == b"header"


def test_stored_arrays_and_empty_blocks(cache: Cache, fake: Fake):
    memory = fake.allocate(SIZE)
    memory.write(payload_of(3, SIZE))
    items = [
        (b"cupy", CupyLike(memory, read_only=True)),
        (b"torch", TorchLike(memory)),
        (b"dlpack", DlpackLike(memory)),
        (b"empty", (0, 0)),
    ]
    assert cache.put_from_device(items) == [True] * 4
    assert cache.put_from_device([(b"empty too", (0, 0))]) == [True]
    for key in (b"cupy", b"torch", b"dlpack"):
        assert bytes(cache.get(key) or b"") == payload_of(3, SIZE)
    assert cache.get(b"empty") == b""
    assert cache.get(b"empty too") == b""
    with pytest.raises(ConfigError, match=r"items\[0\] has 1 parts"):
        cache.put_from_device([(b"k",)])  # type: ignore[list-item]


def test_two_stores_share_a_ring_of_two_slots(open_cache: OpenCache, fake: Fake):
    """Who holds a slot and waits for another must not stop another who does so."""
    import threading

    cuda.set_ring(2, 128 << 10)
    cache = open_cache()
    fake.mode(LAZY)
    failed: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for i in range(first, first + 40, 4):
                sources = [fake.allocate(SIZE) for _ in range(4)]
                for j, source in enumerate(sources):
                    source.write(payload_of(i + j, SIZE))
                items = [(key_of(i + j), s.pair) for j, s in enumerate(sources)]
                assert cache.put_from_device(items) == [True] * 4
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failed == []
    for n, i in itertools.product(range(3), range(40)):
        assert bytes(cache.get(key_of(1000 * n + i)) or b"") == payload_of(
            1000 * n + i, SIZE
        )


def test_the_engine_hands_out_nothing_of_another_volume(
    open_cache: OpenCache, fake: Fake, tmp_path: Path
):
    cache = open_cache()
    with Cache.open(tmp_path / "b.cyc", CacheConfig(capacity="16MiB")) as other:
        hold = other._hold()
        with pytest.raises(ValueError, match="another volume"):
            cache._pin_many([b"k"], hold)
        with pytest.raises(TypeError):
            cache._pin_many([b"k"], 5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="chunk 7"):
            hold.chunk(7)
        with pytest.raises(IndexError):
            hold.select(7, True)
        with pytest.raises(ValueError, match="whole pages"):
            hold.populate(0, 1, 4096)
        with pytest.raises(ValueError, match="whole pages"):
            hold.populate(0, 0, 1 << 40)
        hold.release()
        hold.release()
        with pytest.raises(ValueError, match="released"):
            hold.chunk(0)
    assert os.path.exists(tmp_path / "b.cyc")
