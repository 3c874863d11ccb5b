# SPDX-License-Identifier: Apache-2.0
"""Uses that type checkers accept, and uses that they must refuse.

Never run: `make lint` gives it to mypy --strict.  A wrong use carries the error that
mypy has to find; an ignore without an error is an error itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import numpy as np

from cyclone_kv import Cache, CacheConfig, Entry, EntryInfo, Place, Slot, VerifyReport
from cyclone_kv.cuda import Registration, Upload


def accepted(path: Path) -> None:
    config = CacheConfig.for_kv_tier(capacity="64GiB", stripes=8)
    config = CacheConfig(capacity=1 << 30, verify="always", sync_interval=None)
    key = b"k" * 32
    block = np.zeros((2, 16), dtype=np.float16)

    with Cache.open(path, config, namespace="model") as cache:
        assert_type(cache, Cache)
        assert_type(cache.put(key, b"payload", header=b"float16"), bool)
        assert_type(cache.put(key, [block, memoryview(b"x")], overwrite=True), bool)
        assert_type(
            cache.put_many([(key, block), (key, [b"a"], b"h")], chain=True), list[bool]
        )
        assert_type(cache.get(key), memoryview | None)
        assert_type(cache.get_into(key, bytearray(10)), int | None)
        assert_type(cache.get_many_into([key], [[bytearray(4), block]]), list[bool])
        assert_type(cache.contains(key), bool)
        assert_type(cache.contains_many(np.zeros((4, 32), dtype=np.uint8)), list[bool])
        assert_type(cache.longest_prefix([key], touch=True), int)
        assert_type(cache.prefetch([key]), int)
        assert_type(cache.touch([key]), int)
        assert_type(cache.remove(key), bool)
        assert_type(cache.clear(), int)
        assert_type(key in cache, bool)
        assert_type(len(cache), int)
        assert_type(cache.verify(progress=lambda done, total: None), VerifyReport)
        for info in cache.ls():
            assert_type(info, EntryInfo)

    with Cache.open([("a.cyc", "1TiB"), "b.cyc"], mode="r", create=False) as several:
        entry = several.read(key)
        assert_type(entry, Entry | None)
        if entry is not None:
            with entry:
                assert_type(entry.view, memoryview)
                assert_type(entry.header, bytes)
        place = several.locate(key)
        assert_type(place, Place | None)
        with several.reserve(key, 100) as slot:
            assert_type(slot, Slot)
            slot.view[:4] = b"1234"


def devices(cache: Cache, key: bytes, tensor: object) -> None:
    assert_type(cache.register_cuda(), Registration)
    assert_type(cache.register_cuda(1, "64GiB", background=True), Registration)
    assert_type(cache.cuda_registration, Registration | None)
    upload = cache.upload_async([key], [tensor], 0)
    assert_type(upload, Upload)
    assert_type(upload.lengths, list[int | None])
    assert_type(upload.wait().done(), bool)
    assert_type(cache.upload(np.zeros((1, 32), np.uint8), [(4096, 10)]), Upload)
    assert_type(cache.put_from_device([(key, tensor), (key, tensor, b"")]), list[bool])


def refused(cache: Cache, key: bytes) -> None:
    CacheConfig("64GiB")  # type: ignore[call-arg]
    CacheConfig(capacity="64GiB", size=1)  # type: ignore[call-arg]
    CacheConfig(capacity="64GiB", verify="sometimes")  # type: ignore[arg-type]
    CacheConfig(capacity="64GiB").capacity = 1  # type: ignore[misc]
    cache.put("text", b"")  # type: ignore[arg-type]
    cache.put(key, b"", True)  # type: ignore[call-arg, arg-type]
    cache.put(key, 1)  # type: ignore[arg-type]
    _ = cache.get(key).nbytes  # type: ignore[union-attr]
    cache.longest_prefix([key], True)  # type: ignore[call-arg]
    cache.register_cuda("cuda:0")  # type: ignore[arg-type]
    cache.register_cuda(0, None, True)  # type: ignore[call-arg]
    cache.upload([key], 4096)  # type: ignore[arg-type]
    Cache.open("kv.cyc", mode="w")  # type: ignore[arg-type]
