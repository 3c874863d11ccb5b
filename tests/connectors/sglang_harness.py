# SPDX-License-Identifier: Apache-2.0
"""SGLang's own loader, host pools and cache controller around our storage, on a CPU.

A real `MHATokenToKVPoolHost` in the layout page_first, filled by us in the place of a
GPU; pages go through `HiCacheController`'s own zero-copy functions.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
import torch

# SGLang imports torchvision, whose wheel wants CUDA beside a torch for CPUs: two
# operators that its import looks up are declared, and never called.
_shim = torch.library.Library("torchvision", "DEF")
_shim.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_shim.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402

LAYERS, HEADS, WIDTH, PAGE, TOKENS = 2, 2, 32, 16, 16 * 40
PAGE_BYTES = 2 * LAYERS * HEADS * WIDTH * PAGE * 2  # K and V, bfloat16


def host_pool(*, layout="page_first", dtype=torch.bfloat16, heads=HEADS, page=PAGE):
    """A host pool beside a device pool of one page."""
    device = [torch.zeros(page, heads, WIDTH, dtype=dtype) for _ in range(2 * LAYERS)]
    k, v = tuple(device[:LAYERS]), tuple(device[LAYERS:])
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k,
            v=v,
            k_data_ptrs=_pointers(k),
            v_data_ptrs=_pointers(v),
            layout=KVBufferLayout.NHD,
        ),
        page_size=page,
        head_num=heads,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=page,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=TOKENS,
    )


def mla_pool():
    rows = tuple(torch.zeros(PAGE, 1, 48, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=_pointers(rows),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        kv_cache_dim=48,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        PAGE,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        host_token_capacity=TOKENS,
    )


def _pointers(buffers):
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)


def storage_config(path, *, tp=(0, 1), pp=(0, 1), cp=(0, 1), mla=False, **options):
    config = {
        "tp_rank": tp[0], "tp_size": tp[1],
        "pp_rank": pp[0], "pp_size": pp[1],
        "attn_cp_rank": cp[0], "attn_cp_size": cp[1],
        "is_mla_model": mla,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "org/tiny",
    }  # fmt: skip
    own = {name: options.pop(name) for name in tuple(options) if name in _CONFIG_FIELDS}
    extra = {
        "backend_name": "cyclone",
        "module_path": "cyclone_kv.connectors.sglang",
        "class_name": "CycloneHiCache",
        "interface_v1": 1,
        "path": str(path),
        "capacity": "64MiB",
        "weights": "test-1",
    } | options
    extra = {name: value for name, value in extra.items() if value is not None}
    return HiCacheStorageConfig(**(config | own), extra_config=extra)


_CONFIG_FIELDS = set(HiCacheStorageConfig.__dataclass_fields__) - {"extra_config"}


class Engine:
    """The storage as the dynamic loader makes it, and the controller's own calls."""

    def __init__(self, path, *, pool=None, **options):
        config = storage_config(path, **options)
        self.pool = pool or host_pool()
        self.backend = StorageBackendFactory.create_backend(
            "dynamic", config, self.pool
        )
        self.storage = getattr(self.backend, "_backend", self.backend)
        try:
            self.backend.register_mem_pool_host(self.pool)
            self.backend.on_host_pools_registered()
        except BaseException:
            self.storage.close()
            raise
        self.controller = SimpleNamespace(
            storage_backend=self.backend, page_size=self.pool.page_size
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.storage.close()

    def indices(self, first, count):
        start = first * self.pool.page_size
        return torch.arange(start, start + count * self.pool.page_size)

    def fill(self, keys, first=0):
        for place, key in enumerate(keys):
            for number, region in enumerate(self.page(first + place)):
                region[:] = pattern(key, number, len(region))

    def page(self, place):
        """The regions of a page, as writable arrays."""
        from cyclone_kv.connectors.sglang.hicache import _memory

        pointers, sizes = self.pool.get_page_buffer_meta(self.indices(place, 1))
        return [
            np.frombuffer(_memory(pointer, size), np.uint8)
            for pointer, size in zip(pointers, sizes, strict=True)
        ]

    def store(self, keys, *, first=0, prefix=None):
        """Fill pages and back them up, as the backup thread does."""
        self.fill(keys, first)
        return HiCacheController._page_set_zero_copy(
            self.controller, keys, self.indices(first, len(keys)), extra(prefix)
        )

    def load(self, keys, *, first=0, prefix=None):
        """Load pages over noise, as the prefetch thread does; return the leading ones.

        The right bytes are asserted of each.
        """
        for place in range(len(keys)):
            for region in self.page(first + place):
                region[:] = 0xA5
        operation = SimpleNamespace(request_id="r")
        count = HiCacheController._page_get_zero_copy(
            self.controller,
            operation,
            keys,
            self.indices(first, len(keys)),
            extra(prefix),
        )
        for place, key in enumerate(keys[:count]):
            for number, region in enumerate(self.page(first + place)):
                wanted = pattern(key, number, len(region))
                assert np.array_equal(region, wanted), "foreign bytes"
        return count


def extra(prefix):
    return HiCacheStorageExtraInfo(prefix_keys=prefix)


def page_keys(tokens, *, seed=None, page=PAGE):
    """SGLang's page hashes: each over the one before and the tokens of the page."""
    keys, before = [], bytes.fromhex(seed) if seed else b""
    for start in range(0, len(tokens) - page + 1, page):
        piece = np.array(tokens[start : start + page], np.uint32).tobytes()
        before = hashlib.sha256(before + piece).digest()
        keys.append(before.hex())
    return keys


def prompt(number, pages, tail=0):
    return [number * 100_000 + i for i in range(pages * PAGE + tail)]


def pattern(key, region, nbytes):
    """Bytes of which every word depends on the key, the region and its place."""
    seed = np.frombuffer(hashlib.sha256(f"{key}/{region}".encode()).digest()[:8], "u8")
    words = np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ seed[0]).view(np.uint8)


def damage(path, keys):
    """Flip a byte of the stored pages with these keys, in a closed volume."""
    from cyclone_kv import Cache

    wanted = {bytes.fromhex(key) for key in keys}
    with Cache.open(path) as cache:
        places = [entry.offset for entry in cache.ls() if entry.key in wanted]
    assert len(places) == len(wanted)
    with open(path, "r+b") as file:
        for offset in places:
            file.seek(offset + 100)
            byte = file.read(1)
            file.seek(offset + 100)
            file.write(bytes([byte[0] ^ 0x40]))
