# SPDX-License-Identifier: Apache-2.0
"""LMCache's own loaders, memory objects and storage manager around our plugins."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import select
import threading
import time
from types import SimpleNamespace

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

MODULE = "cyclone_kv.connectors.lmcache"
SHAPE, DTYPE = (2, 2, 16, 64), torch.float32  # [K and V, layers, tokens, hidden]
CHUNK = 2 * 2 * 16 * 64 * 4
MODEL = "org/tiny"
_allocator = AdHocMemoryAllocator()


def digest(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def object_key(number, *, model=MODEL, rank=(0, 1), group=0, salt=""):
    kv_rank = ObjectKey.ComputeKVRank(rank[1], rank[0], rank[1], rank[0])
    return ObjectKey(digest(number), model, kv_rank, group, salt)


def memory(shape=SHAPE, dtype=DTYPE):
    return _allocator.allocate(torch.Size(shape), dtype)


def pattern(key, nbytes=CHUNK):
    """Bytes of which every word depends on the key and on its place."""
    seed = np.frombuffer(hashlib.sha256(repr(key).encode()).digest()[:8], np.uint64)[0]
    words = np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ seed).tobytes()


def fill(obj, key):
    np.frombuffer(obj.byte_array, np.uint8)[:] = np.frombuffer(
        pattern(key, obj.get_size()), np.uint8
    )


def filled(key, shape=SHAPE, dtype=DTYPE):
    obj = memory(shape, dtype)
    fill(obj, key)
    return obj


def parameters(path, **options):
    return {"path": str(path), "capacity": "64MiB", "weights": "test-1"} | options


class L2:
    """An adapter made by LMCache's loader, driven as its two controllers do."""

    def __init__(self, path, *, desc=None, serde=None, **options):
        config = PluginL2AdapterConfig.from_dict(
            {
                "module_path": MODULE,
                "class_name": "CycloneL2Adapter",
                "adapter_params": parameters(path, **options),
            }
        )
        config.serde_config = serde
        self.adapter = create_l2_adapter(config, desc)
        self.adapter.set_backend_identity("plugin")
        self.stored, self.gone, self.accessed = [], [], []
        self.adapter.register_listener(
            SimpleNamespace(
                on_l2_keys_stored=lambda keys, sizes: self.stored.extend(keys),
                on_l2_keys_deleted=self.gone.extend,
                on_l2_keys_accessed=self.accessed.extend,
            )
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.adapter.close()

    def store(self, keys, *, shape=SHAPE, dtype=DTYPE, objects=None):
        objects = objects or [filled(key, shape, dtype) for key in keys]
        task = self.adapter.submit_store_task(list(keys), objects)
        fd = self.adapter.get_store_event_fd()
        done = {}

        def pop():
            done.update(self.adapter.pop_completed_store_tasks())
            return done or None

        wait(fd, pop)
        assert list(done) == [task]
        return done[task]

    def lookup(self, keys, *, shape=SHAPE, dtype=DTYPE):
        groups = {key.object_group_id for key in keys}
        layout = MemoryLayoutDesc([torch.Size(shape)], [dtype])
        task = self.adapter.submit_lookup_and_lock_task(
            list(keys), dict.fromkeys(groups, layout)
        )
        found = wait(
            self.adapter.get_lookup_and_lock_event_fd(),
            lambda: self.adapter.query_lookup_and_lock_result(task),
        )
        assert self.adapter.query_lookup_and_lock_result(task) is None, "answered twice"
        self.adapter.submit_unlock(list(keys))
        return found.get_indices_list()

    def load(self, keys, *, shape=SHAPE, dtype=DTYPE):
        """Load objects; the right bytes are asserted of each that counts as loaded."""
        objects = [memory(shape, dtype) for _ in keys]
        task = self.adapter.submit_load_task(list(keys), objects)
        found = wait(
            self.adapter.get_load_event_fd(),
            lambda: self.adapter.query_load_result(task),
        )
        assert self.adapter.query_load_result(task) is None, "answered twice"
        for place in found.get_indices_list():
            obj = objects[place]
            assert bytes(obj.byte_array) == pattern(keys[place], obj.get_size()), (
                "foreign bytes"
            )
        return found.get_indices_list()


def wait(fd, ask, timeout=20.0):
    """Wait for a signal on `fd`, then for an answer; it may be there already."""
    deadline = time.monotonic() + timeout
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (answer := ask()) is None:
        left = deadline - time.monotonic()
        assert left > 0, "no result came"
        if poll.poll(left * 1000):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
    return answer


# ---- inside the engine --------------------------------------------------------------


def chunk_keys(numbers, *, model=MODEL, rank=(0, 1), dtype=DTYPE, tags=None):
    configs = {f"lmcache.tag.{k}": v for k, v in (tags or {}).items()}
    return [
        CacheEngineKey(
            model, rank[1], rank[0], 0x1234_5678_0000_0000 + n, dtype, configs
        )
        for n in numbers
    ]


def metadata(*, model=MODEL, rank=(0, 1), role="worker", dtype=DTYPE, **other):
    return LMCacheMetadata(
        model_name=model,
        world_size=rank[1],
        local_world_size=rank[1],
        worker_id=rank[0],
        local_worker_id=rank[0],
        kv_dtype=dtype,
        kv_shape=(SHAPE[1], 2, SHAPE[2], 2, SHAPE[3] // 2),
        chunk_size=SHAPE[2],
        role=role,
        **other,
    )


def engine_config(path, *, algorithm="sha256_cbor", settings=None, **options):
    extra = {
        "storage_plugin.cyclone.module_path": MODULE,
        "storage_plugin.cyclone.class_name": "CycloneBackend",
    } | {
        f"storage_plugin.cyclone.{k}": v for k, v in parameters(path, **options).items()
    }
    return LMCacheEngineConfig.from_dict(
        {
            "chunk_size": SHAPE[2],
            "local_cpu": False,
            "max_local_cpu_size": 0.05,
            "pre_caching_hash_algorithm": algorithm,
            "storage_plugins": ["cyclone"],
            "extra_config": extra,
        }
        | (settings or {})
    )


class InEngine:
    """LMCache's storage manager with our plugin in it."""

    def __init__(self, path, *, rank=(0, 1), algorithm="sha256_cbor", **options):
        settings = options.pop("settings", None)
        facts = options.pop("metadata", None) or metadata(rank=rank)
        config = engine_config(path, algorithm=algorithm, settings=settings, **options)
        self.manager = StorageManager(config, facts, EventManager())
        self.backend = self.manager.storage_backends["cyclone"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert self.manager.memcheck()
        self.manager.close()

    def put(self, keys, *, shape=SHAPE):
        objects = []
        for key in keys:
            obj = self.manager.allocate(torch.Size(shape), DTYPE)
            assert obj is not None, "no memory left: a reference leaked"
            fill(obj, key)
            objects.append(obj)
        self.manager.batched_put(keys, objects)
        self.settle(keys)

    def settle(self, keys, timeout=20.0):
        deadline = time.monotonic() + timeout
        while any(self.backend.exists_in_put_tasks(key) for key in keys):
            assert time.monotonic() < deadline, "a put never ended"
            time.sleep(0.002)

    def get(self, keys):
        """Get chunks; right bytes are asserted. Return the numbers of those found."""
        objects = self.manager.batched_get(keys, location="cyclone")
        return self.check(keys, objects)

    def check(self, keys, objects):
        found = []
        for place, (key, obj) in enumerate(zip(keys, objects, strict=False)):
            if obj is None:
                continue
            assert obj.meta.ref_count == 1
            assert bytes(obj.byte_array) == pattern(key, obj.get_size())
            obj.ref_count_down()
            found.append(place)
        return found


class Loop:
    """An event loop on a thread."""

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)


def damage(path, keys):
    """Flip a byte of the stored blocks with these keys, in a closed volume."""
    from cyclone_kv import Cache

    with Cache.open(path) as cache:
        places = [e.offset for e in cache.ls() if keys is None or e.key in keys]
    assert places
    with open(path, "r+b") as file:
        for offset in places:
            file.seek(offset + 100)
            byte = file.read(1)
            file.seek(offset + 100)
            file.write(bytes([byte[0] ^ 0x40]))
