# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiering manager around our tier, with a scheduler and a GPU played here.

`Engine` calls the manager as vLLM's scheduler does: look chunks up, end the step, look
again; "computing" a chunk writes a pattern into its row of the primary tier.
"""

from __future__ import annotations

import itertools
import time
import uuid

import numpy as np
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

BLOCK = 32
CHUNK = 64 << 10
_requests = itertools.count()


def offloading_config(tier, *, rows=64, chunk=CHUNK, groups=1, events=False, **extra):
    """What vLLM's connector hands to a spec; `tier` are the options of our tier."""
    entry = {"type": "CycloneTier", "module_path": "cyclone_kv.connectors.vllm"} | tier
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(
                tokens_per_block=BLOCK, layer_names=(f"layer.{g}",), group_id=g
            )
            for g in range(groups)
        ),
        worker_kv_bytes_per_block=chunk,
        enable_kv_cache_events=events,
        extra_config={
            "cpu_bytes_to_use": rows * chunk,
            "secondary_tiers": [entry],
            "self_describing_kv_events": events,
        }
        | extra,
        engine_id=f"test-{uuid.uuid4().hex[:12]}",
        model=OffloadingModelConfig(name="tiny-model", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=BLOCK, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


def tier_options(path, **options):
    return {"path": str(path), "capacity": "64MiB", "weights": "test-1"} | options


def chain(tokens, *, salt=None, group=0):
    """The keys of the whole blocks of `tokens`, hashed by vLLM's own functions."""
    kv_cache_utils.init_none_hash(sha256_cbor)
    parent, keys = None, []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        extra = (salt,) if salt and not start else None
        parent = kv_cache_utils.hash_block_tokens(
            sha256_cbor, parent, tokens[start : start + BLOCK], extra
        )
        keys.append(make_offload_key(parent, group))
    return keys


def prompt(number, blocks, tail=0):
    """Tokens of a prompt; prompts of different numbers share no block."""
    return [number * 100_000 + i for i in range(blocks * BLOCK + tail)]


class Request:
    """A request's keys, and its context with the positions that vLLM records."""

    def __init__(self, keys):
        self.keys = list(keys)
        self.context = ReqContext(req_id=f"request-{next(_requests)}")
        note = getattr(self.context, "set_offload_key_position", None)
        if note is not None:
            ends: dict[bytes, int] = {}
            for key in self.keys:
                ends[key[-4:]] = ends.get(key[-4:], 0) + BLOCK
                note(key, ends[key[-4:]])


class Engine:
    """One engine: manager, primary tier, and our tier."""

    def __init__(self, config):
        self.spec = TieringOffloadingSpec(config)
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.events = []

    def close(self):
        self.manager.shutdown()
        self.view = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def step(self, new=()):
        context = ScheduleEndContext(new_req_ids=list(new), preempted_req_ids=())
        self.manager.on_schedule_end(context)
        self.events += self.manager.take_events()

    def settle(self, timeout=20.0):
        """Step until no copy is in flight."""
        deadline = time.monotonic() + timeout
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, "jobs were never reported"
            time.sleep(0.001)
            self.step()

    def forget_primary(self):
        """Empty the primary tier; no worker has anything in flight here."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()  # from 0.33 on

    def begin(self, keys):
        request = Request(keys)
        self.manager.on_new_request(request.context)
        return request

    def finish(self, request):
        self.manager.on_request_finished(request.context)

    def store(self, keys, *, value=None, calls=1):
        """Compute chunks and store them, in `calls` pieces like chunked prefill."""
        request = self.begin(keys)
        size = -(-len(keys) // calls)
        for start in range(0, len(keys), size):
            piece = keys[start : start + size]
            out = self.manager.prepare_store(piece, request.context)
            assert out is not None, "the primary tier is full"
            rows = out.store_spec.chunk_ids
            for key, row in zip(out.keys_to_store, rows, strict=True):
                self.row(row)[:] = pattern(key if value is None else value)
            # vLLM's scheduler hands over a set.
            self.manager.complete_store(set(out.keys_to_store), request.context)
            self.settle()
        self.finish(request)

    def lookup(self, keys, timeout=20.0):
        """The leading chunks that are there, loaded into the primary tier."""
        request = self.begin(keys)
        deadline = time.monotonic() + timeout
        while True:
            hits, pending = 0, False
            for key in keys:
                result = self.manager.lookup(key, request.context)
                if result in (LookupResult.HIT_PENDING, LookupResult.RETRY):
                    pending = True
                if result is LookupResult.MISS:
                    break
                hits += 1
            if not pending:
                break
            assert time.monotonic() < deadline, "a lookup was never resolved"
            self.step()
            time.sleep(0.0005)
        self.step(new=[request.context.req_id])
        self.finish(request)
        return hits

    def load(self, keys):
        """Look up, then read what the GPU would get; right bytes are asserted."""
        hits = self.lookup(keys)
        request = self.begin(keys)
        if hits:
            spec = self.manager.prepare_load(keys[:hits], request.context)
            for key, row in zip(keys[:hits], spec.chunk_ids, strict=True):
                assert np.array_equal(self.row(row), pattern(key)), "foreign bytes"
            self.manager.complete_load(keys[:hits], request.context)
        self.finish(request)
        return hits

    def row(self, index):
        return np.asarray(self.view)[int(index)].view(np.uint8)


def pattern(key):
    """The bytes of a chunk: every word depends on the key and on its place."""
    seed = np.frombuffer(key[:8], dtype=np.uint64)[0]
    words = np.arange(CHUNK // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ seed).view(np.uint8)


def damage(path, keys):
    """Flip a byte of the stored bytes of `keys`, in the file of a closed volume."""
    from cyclone_kv import Cache

    places = {}
    with Cache.open(path) as cache:
        wanted = {key[:-4] for key in keys}
        for entry in cache.ls():
            if entry.key in wanted:
                places[entry.key] = entry.offset
    assert places.keys() == wanted
    with open(path, "r+b") as file:
        for offset in places.values():
            file.seek(offset + 100)
            byte = file.read(1)
            file.seek(offset + 100)
            file.write(bytes([byte[0] ^ 0x40]))
