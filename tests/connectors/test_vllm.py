# SPDX-License-Identifier: Apache-2.0
"""The tier inside vLLM's own tiering manager; scheduler and GPU are played.

`make test-connectors` runs this file, and vllm_engine/ with real engines.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-connectors")

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadPolicy,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm_harness import (
    BLOCK,
    CHUNK,
    Engine,
    chain,
    damage,
    offloading_config,
    prompt,
    tier_options,
)

from cyclone_kv import Cache, CacheConfig, ConfigError, MismatchError
from cyclone_kv.connectors import _promises as promises
from cyclone_kv.connectors.vllm import CycloneTier
from cyclone_kv.connectors.vllm import identity as identities
from cyclone_kv.connectors.vllm import tier as tier_module

SMALL = CacheConfig.for_kv_tier("16MiB")


def open_engine(path, *, events=False, rows=64, groups=1, **options):
    tier = tier_options(path, **options)
    if events:
        tier["enable_kv_events"] = True
    config = offloading_config(tier, events=events, rows=rows, groups=groups)
    return Engine(config)


def counters(engine):
    return engine.tier._measures._counts


# ---- the interface ------------------------------------------------------------------


def test_every_method_has_the_signature_that_vllm_calls():
    for name, base in inspect.getmembers(SecondaryTierManager, inspect.isfunction):
        if name.startswith("_") or name not in vars(CycloneTier):
            continue
        mine = inspect.signature(inspect.unwrap(getattr(CycloneTier, name)))
        assert list(mine.parameters) == list(inspect.signature(base).parameters), name
    assert not CycloneTier.__abstractmethods__


def test_it_is_loaded_by_name_as_storage():
    entry = {"type": "CycloneTier", "module_path": "cyclone_kv.connectors.vllm"}
    assert SecondaryTierFactory.get_tier_class(entry) is CycloneTier
    assert CycloneTier.medium.value == "STORAGE"
    source = getattr(CycloneTier, "cache_hit_source", None)  # from 0.32 on
    assert source is None or source.name == "DISK"


def test_it_asks_for_nothing_special(volume_path):
    with open_engine(volume_path) as engine:
        context = ReqContext(req_id="r")
        answer = engine.tier.on_new_request(context)
        assert answer.policy is OffloadPolicy.CHUNK_LEVEL
        engine.tier.on_request_finished(context)


# ---- store, restart, load -----------------------------------------------------------


def test_stored_chunks_come_back_after_a_restart(volume_path):
    keys = chain(prompt(1, 8))
    with open_engine(volume_path) as engine:
        engine.store(keys, calls=2)
        assert engine.load(keys) == 8
    with open_engine(volume_path) as engine:
        assert engine.load(keys) == 8
        assert engine.load(chain(prompt(2, 8))) == 0
        assert counters(engine)["loaded_chunks"] == 8


def test_the_engines_hash_is_the_key_as_it_is(volume_path):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path) as engine:
        engine.store(keys)
    with Cache.open(volume_path) as cache:
        stored = {(entry.key, entry.digested) for entry in cache.ls()}
    assert stored == {(key[:-4], False) for key in keys}


def test_i7_every_whole_block_is_matched_and_no_more(volume_path):
    with open_engine(volume_path) as engine:
        for blocks, tail in ((1, 0), (5, 1), (7, 31)):
            tokens = prompt(blocks, blocks, tail)
            engine.store(chain(tokens))
            engine.forget_primary()
            assert engine.load(chain(tokens)) == len(tokens) // BLOCK == blocks


def test_b10_what_is_stored_is_what_the_row_held(volume_path):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path) as engine:
        engine.store(keys)
        engine.row(0)[:] = 0xEE
        engine.row(1)[:] = 0xEE
        engine.forget_primary()
        assert engine.load(keys) == 4


def test_two_engines_share_a_volume(volume_path):
    keys, more = chain(prompt(1, 6)), chain(prompt(2, 6))
    with open_engine(volume_path) as first, open_engine(volume_path) as second:
        first.store(keys)
        assert second.load(keys) == 6
        second.store(more)
        assert first.load(more) == 6


def test_a_chunk_that_is_stored_already_is_stored(volume_path):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path) as engine:
        engine.store(keys)
        engine.forget_primary()
        engine.store(keys)
        assert counters(engine)["stored_chunks"] == 8
        assert engine.tier.get_stats() is not None
        process = engine.tier._groups[0].cache.stats().process
        assert process.puts_stored == 5  # with the self-check's block
        assert process.puts_present == 4


# ---- damage, loss -------------------------------------------------------------------


def test_b6_a_partly_failed_load_keeps_exactly_the_good_chunks(volume_path):
    keys = chain(prompt(1, 9))
    with open_engine(volume_path) as engine:
        engine.store(keys)
    bad = keys[2::3]
    damage(volume_path, bad)
    with open_engine(volume_path) as engine:
        assert engine.load(keys) == 2
        for key in keys:
            there = engine.manager.primary_tier.lookup(key, ReqContext(req_id="x"))
            expected = LookupResult.MISS if key in bad else LookupResult.HIT
            assert there is expected
            again = engine.tier.lookup(key, ReqContext(req_id="x"))
            assert again is expected
        assert counters(engine)["load_failed_chunks"] == 3
        engine.store(bad)
        engine.forget_primary()
        assert engine.load(keys) == 9


def test_a_chunk_that_cannot_be_loaded_is_not_promised_again(volume_path, monkeypatch):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path) as engine:
        engine.store(keys)
        engine.forget_primary()
        # The table still lists it, and no load brings it.
        monkeypatch.setattr(
            engine.tier, "_read", lambda batch: [False] * len(batch.keys)
        )
        assert engine.lookup(keys) == 0
        assert engine.tier._groups[0].cache.contains(keys[0][:-4])
        monkeypatch.undo()
        assert engine.lookup(keys) == 0
        engine.store(keys)
        engine.forget_primary()
        assert engine.load(keys) == 4


def test_a_failed_chunk_is_tried_again_later(volume_path, monkeypatch):
    keys = chain(prompt(1, 2))
    with open_engine(volume_path) as engine:
        engine.store(keys)
        engine.forget_primary()
        monkeypatch.setattr(promises, "_FAILED_SECONDS", 0.05)
        monkeypatch.setattr(
            engine.tier, "_read", lambda batch: [False] * len(batch.keys)
        )
        assert engine.lookup(keys) == 0
        monkeypatch.undo()
        time.sleep(0.06)
        assert engine.load(keys) == 2


def test_failed_keys_are_bounded(volume_path, monkeypatch):
    with open_engine(volume_path, rows=64) as engine:
        monkeypatch.setattr(promises, "_FAILED_MAX", 5)
        monkeypatch.setattr(
            engine.tier, "_read", lambda batch: [False] * len(batch.keys)
        )
        keys = chain(prompt(1, 12))
        engine.store(keys)
        engine.forget_primary()
        assert engine.lookup(keys) == 0
        assert len(engine.tier._failed) <= 5


def test_c10_evicted_between_lookup_and_load(volume_path):
    """Another handle removes while prompts are looked up and loaded."""
    keys = chain(prompt(1, 16))
    rng = random.Random(7)
    with open_engine(volume_path) as engine:
        stop = threading.Event()
        namespace = engine.tier._groups[0].namespace

        def remove():
            with Cache.open(volume_path, namespace=namespace) as other:
                while not stop.is_set():
                    other.remove(rng.choice(keys)[:-4])

        engine.store(keys)
        thief = threading.Thread(target=remove)
        thief.start()
        try:
            hits = []
            for _ in range(150):
                engine.forget_primary()
                hits.append(engine.load(keys))
                if hits[-1] < 16:
                    engine.store(keys)
        finally:
            stop.set()
            thief.join()
        assert min(hits) < 16
        assert engine.tier._faults.count == 0


def test_b8_sessions_that_come_back_never_get_bytes_of_others(volume_path):
    """Two engines, half as many chunks again as fit; `load` looks at every word."""
    sessions = [chain(prompt(number, 32)) for number in range(12)]
    rng = random.Random(3)
    capacity = 8 * 32 * CHUNK
    with (
        open_engine(volume_path, capacity=capacity) as first,
        open_engine(volume_path, capacity=capacity) as second,
    ):
        loaded = 0
        for _ in range(60):
            engine, keys = rng.choice((first, second)), rng.choice(sessions)
            hits = engine.load(keys)
            loaded += hits
            if hits < len(keys):
                engine.store(keys[hits:])
            engine.forget_primary()
        assert loaded > 60 * 8
        assert first.tier._faults.count == second.tier._faults.count == 0


def test_c9_lookups_pin_nothing(volume_path):
    keys = chain(prompt(1, 8))
    with open_engine(volume_path, capacity="16MiB") as engine:
        engine.store(keys)
        context = ReqContext(req_id="x")
        for _ in range(10_000 // 8):
            for key in keys:
                assert engine.tier.lookup(key, context) is LookupResult.HIT
        stats = engine.tier._groups[0].cache.stats().volume
        assert stats.pinned_entries == 0
        lap = (16 << 20) // CHUNK
        for number in range(lap // 32 + 1):
            engine.store(chain(prompt(10 + number, 32)))
        stats = engine.tier._groups[0].cache.stats()
        assert stats.volume.pinned_entries == 0
        assert stats.process.puts_no_run == 0


def test_c7_a_prefix_that_is_read_again_stays_whole(volume_path):
    """20 prefixes of 32 chunks, stored in 4 pieces; room for 10."""
    capacity = 10 * 32 * CHUNK
    with open_engine(volume_path, capacity=capacity) as engine:
        prefixes = [chain(prompt(number, 32)) for number in range(20)]
        for number, keys in enumerate(prefixes):
            engine.store(keys, calls=4)
            if number % 2 == 0:
                engine.forget_primary()
                assert engine.load(prefixes[0]) == 32
        engine.forget_primary()
        assert engine.lookup(prefixes[0]) == 32


def test_chunks_reach_the_volume_as_one_chain(volume_path, monkeypatch):
    calls = []
    with open_engine(volume_path) as engine:
        write = engine.tier._write

        def note(batch):
            calls.append((list(batch.hashes), batch.chained, batch.parent))
            return write(batch)

        monkeypatch.setattr(engine.tier, "_write", note)
        keys = chain(prompt(1, 12))
        engine.store(keys, calls=3)
    if not hasattr(ReqContext, "get_offload_key_position"):
        pytest.skip("this vLLM does not tell where a chunk lies in its prefix")
    hashes = [key[:-4] for key in keys]
    assert [call[0] for call in calls] == [hashes[:4], hashes[4:8], hashes[8:]]
    assert [call[1] for call in calls] == [True] * 3
    assert [call[2] for call in calls] == [None, hashes[3], hashes[7]]


def test_touch_makes_chunks_outlive_a_lap(volume_path):
    with open_engine(volume_path, capacity="16MiB") as engine:
        old, hot = chain(prompt(1, 8)), chain(prompt(2, 8))
        engine.store(old)
        engine.store(hot)
        engine.tier.touch(hot, ReqContext(req_id="x"))
        for number in range(256 // 32):
            engine.store(chain(prompt(10 + number, 32)))
        engine.forget_primary()
        assert engine.lookup(old) == 0
        assert engine.load(hot) == 8


# ---- the scheduler's thread ---------------------------------------------------------


def slow(method, gate):
    def wait(batch):
        assert gate.wait(10)
        return method(batch)

    return wait


def test_f11_a_slow_volume_holds_nobody_up_and_stores_are_dropped(
    volume_path, monkeypatch
):
    with open_engine(volume_path, rows=128, store_queue=8 * CHUNK) as engine:
        gate = threading.Event()
        monkeypatch.setattr(engine.tier, "_write", slow(engine.tier._write, gate))
        slowest = 0.0
        for number in range(20):
            keys = chain(prompt(number, 4))
            request = engine.begin(keys)
            out = engine.manager.prepare_store(keys, request.context)
            assert out is not None
            started = time.monotonic()
            engine.manager.complete_store(set(keys), request.context)
            slowest = max(slowest, time.monotonic() - started)
            engine.finish(request)
            engine.step()
        engine.step()
        # Two jobs of four chunks fit into the queue.
        assert counters(engine)["dropped_chunks"] == 18 * 4
        assert len(engine.tier._jobs) == 2
        assert slowest < 1  # it waits for nothing, the gate is shut for all of it
        gate.set()
        engine.settle()
        assert counters(engine)["stored_chunks"] == 8
        assert engine.tier._queued_bytes == 0


def test_one_store_larger_than_the_queue_is_taken_when_nothing_waits(volume_path):
    with open_engine(volume_path, store_queue=CHUNK) as engine:
        engine.store(chain(prompt(1, 8)))
        assert counters(engine)["stored_chunks"] == 8


def test_dropped_stores_free_the_rows_of_the_primary_tier(volume_path, monkeypatch):
    with open_engine(volume_path, rows=16, store_queue=CHUNK) as engine:
        gate = threading.Event()
        monkeypatch.setattr(engine.tier, "_write", slow(engine.tier._write, gate))
        for number in range(8):
            keys = chain(prompt(number, 4))
            request = engine.begin(keys)
            assert engine.manager.prepare_store(keys, request.context) is not None
            engine.manager.complete_store(set(keys), request.context)
            engine.finish(request)
            engine.step()
        gate.set()
        engine.settle()


def test_loads_pass_waiting_stores(volume_path, monkeypatch):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path) as engine:
        engine.store(keys)
        engine.forget_primary()
        gate = threading.Event()
        monkeypatch.setattr(engine.tier, "_write", slow(engine.tier._write, gate))
        other = chain(prompt(2, 4))
        request = engine.begin(other)
        assert engine.manager.prepare_store(other, request.context) is not None
        engine.manager.complete_store(set(other), request.context)
        engine.finish(request)
        assert engine.load(keys) == 4
        gate.set()


@pytest.mark.parametrize("kind", ["_read", "_write"])
def test_drain_waits_for_a_copy_and_reports_it(volume_path, monkeypatch, kind):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path) as engine:
        engine.store(keys)
        engine.forget_primary()
        gate, entered = threading.Event(), threading.Event()
        method = getattr(engine.tier, kind)

        def wait(batch):
            entered.set()
            return slow(method, gate)(batch)

        monkeypatch.setattr(engine.tier, kind, wait)
        wanted = keys if kind == "_read" else chain(prompt(2, 4))
        request = engine.begin(wanted)
        if kind == "_read":
            engine.manager.lookup(wanted[0], request.context)
            engine.step()
        else:
            engine.manager.prepare_store(wanted, request.context)
            engine.manager.complete_store(set(wanted), request.context)
        assert entered.wait(10)
        drained = threading.Thread(target=engine.tier.drain_jobs)
        drained.start()
        drained.join(0.1)
        assert drained.is_alive()
        gate.set()
        drained.join(10)
        assert not drained.is_alive()
        (result,) = engine.tier.get_finished_jobs()
        assert result.success
        engine.manager._jobs.clear()


def test_b9_rows_belong_to_their_job_until_it_is_reported(volume_path, monkeypatch):
    """A second load that ends first touches no row of the first."""
    first, second = chain(prompt(1, 3)), chain(prompt(2, 3))
    with open_engine(volume_path, load_threads=2) as engine:
        engine.store(first)
        engine.store(second)
        engine.forget_primary()
        gate, rows = threading.Event(), {}
        read = engine.tier._read

        def note(batch):
            rows[batch.keys[0]] = batch.rows
            if batch.keys[0] == first[0]:
                assert gate.wait(10)
            return read(batch)

        monkeypatch.setattr(engine.tier, "_read", note)
        request = engine.begin(first)
        for key in first:
            engine.manager.lookup(key, request.context)
        engine.step()
        assert engine.load(second) == 3
        gate.set()
        engine.settle()
        assert not set(rows[first[0]]) & set(rows[second[0]])
        assert engine.load(first) == 3


class Failing:
    """Every method of a cache raises."""

    paths = ("nowhere",)

    def __getattr__(self, name):
        raise OSError(f"{name} failed")


def test_no_fault_of_the_volume_reaches_the_scheduler(volume_path):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path, events=True) as engine:
        engine.store(keys)
        engine.forget_primary()
        good = engine.tier._groups
        broken = dataclasses.replace(good[0], cache=Failing())
        engine.tier._groups = {0: broken}
        context = ReqContext(req_id="x")
        assert engine.tier.lookup(keys[0], context) is LookupResult.MISS
        engine.tier.touch(keys, context)
        engine.store(chain(prompt(2, 4)))
        job = SimpleNamespace(
            job_id=10_000,
            keys=keys,
            chunk_ids=np.arange(4),
            req_context=ReqContext(req_id="y"),
        )
        engine.tier.submit_load(job)
        engine.tier.drain_jobs()
        (result,) = engine.tier.get_finished_jobs()
        assert (result.success, result.successful_keys) == (False, None)
        engine.tier._to_announce += keys
        engine.tier._announced._caches = {}
        assert list(engine.tier.take_events()) == []
        engine.tier._measures._cache = Failing()
        assert engine.tier.get_stats() is None
        assert engine.tier._faults.count >= 5
        engine.tier._groups = good


def test_a_job_of_an_unknown_group_fails_and_nothing_else(volume_path):
    with open_engine(volume_path) as engine:
        key = make_offload_key(b"k" * 32, 7)
        assert engine.tier.lookup(key, ReqContext(req_id="x")) is LookupResult.MISS
        job = SimpleNamespace(
            job_id=5,
            keys=[key],
            chunk_ids=np.arange(1),
            req_context=ReqContext(req_id="x"),
        )
        engine.tier.submit_store(job)
        (result,) = engine.tier.get_finished_jobs()
        assert not result.success


def test_after_shutdown_it_answers_harmlessly(volume_path):
    keys = chain(prompt(1, 4))
    engine = open_engine(volume_path)
    engine.store(keys)
    tier = engine.tier
    engine.close()
    tier.shutdown()
    assert tier.lookup(keys[0], ReqContext(req_id="x")) is LookupResult.MISS


def test_i8_loads_slower_than_recomputing_become_misses(volume_path, monkeypatch):
    keys = chain(prompt(1, 32))
    # A chunk has 32 tokens: a thousand million tokens a second need 2 TB/s.
    with open_engine(volume_path, recompute_tokens_per_second=1e9) as engine:
        engine.store(keys)
        engine.forget_primary()
        assert engine.load(keys) == 32
        engine.forget_primary()
        assert engine.lookup(keys) == 0
        assert counters(engine)["slow_lookups"] > 0
        monkeypatch.setattr(engine.tier._slow, "_until", time.monotonic())
        assert engine.load(keys) == 32
    with open_engine(volume_path, recompute_tokens_per_second=1) as engine:
        assert engine.load(keys) == 32
        engine.forget_primary()
        assert engine.load(keys) == 32


def test_i7_a_volume_that_never_hits_is_mentioned_once(volume_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        tier_module.logger, "warning", lambda text, *args: said.append(text % args)
    )
    monkeypatch.setattr(promises, "_USELESS_BYTES", 6 * CHUNK)
    with open_engine(volume_path) as engine:
        said.clear()
        for number in range(4):
            keys = chain(prompt(number, 4))
            assert engine.lookup(keys) == 0
            engine.store(keys)
        assert len(said) == 1
        assert "none of" in said[0]


# ---- identity -----------------------------------------------------------------------


def namespaces(config, **options):
    options = {
        "chunk_bytes": CHUNK,
        "model": None,
        "weights": "w",
        "vllm_config": None,
        "warn": lambda text: None,
    } | options
    return {
        group: identity.namespace()
        for group, identity in identities.group_identities(config, **options).items()
    }


def changed(config, **facts):
    """`config` with facts changed, of it or of its parts."""
    for part in ("model", "cache", "parallel"):
        mine = {
            field.name: facts.pop(field.name)
            for field in dataclasses.fields(getattr(config, part))
            if field.name in facts
        }
        replaced = dataclasses.replace(getattr(config, part), **mine)
        config = dataclasses.replace(config, **{part: replaced})
    return dataclasses.replace(config, **facts)


CHANGES = {
    "model": {"name": "other-model"},
    "dtype": {"dtype": "bfloat16"},
    "hash tokens": {"tokens_per_hash": 16},
    "chunk tokens": {"blocks_per_chunk": 2},
    "bytes": {"worker_kv_bytes_per_block": CHUNK * 2},
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2},
    "cp": {"pcp_size": 2},
    "dcp": {"dcp_size": 2},
    "world": {"world_size": 16},
    "rank": {"rank": 1},
    "layout": {"kv_cache_layout": "HND"},
    "canonical": {"canonical_layout": True},
    "replicated": {"replicated_layout": True},
}


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_h2_f9_any_changed_fact_finds_nothing_and_back_finds_all(volume_path, change):
    config = offloading_config(tier_options(volume_path))
    keys = chain(prompt(1, 4))
    before = namespaces(config)[0]
    after = namespaces(changed(config, **CHANGES[change]))[0]
    assert before != after == namespaces(changed(config, **CHANGES[change]))[0]
    with Cache.open(volume_path, SMALL, namespace=before) as cache:
        assert cache.put(keys[0][:-4], b"x")
    with Cache.open(volume_path, namespace=after) as cache:
        assert not cache.contains(keys[0][:-4])
    with Cache.open(volume_path, namespace=before) as cache:
        assert cache.contains(keys[0][:-4])


def test_h2_weights_model_name_and_bytes_are_part_of_it():
    config = offloading_config({})
    seen = {
        namespaces(config)[0],
        namespaces(config, weights="other")[0],
        namespaces(config, model="a name")[0],
        namespaces(config, chunk_bytes=2 * CHUNK)[0],
    }
    assert len(seen) == 4


def test_data_parallel_replicas_share():
    config = offloading_config({})
    other = changed(config, data_parallel_index=3, data_parallel_size=8)
    assert namespaces(config) == namespaces(other)


def fake_vllm_config(**changes):
    facts = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    facts |= {"hidden_size": 64, "transformers_version": "5"} | changes.pop("facts", {})
    text = SimpleNamespace(to_json_string=lambda use_diff: json.dumps(facts))
    model = SimpleNamespace(
        hf_config=text,
        hf_text_config=text,
        dtype="torch.float32",
        quantization=None,
        max_model_len=2048,
    )
    config = SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(download_dir=None),
        cache_config=SimpleNamespace(
            calculate_kv_scales=False, prefix_caching_hash_algo="sha256_cbor"
        ),
        attention_config=SimpleNamespace(backend=None),
        speculative_config=None,
    )
    for name, value in changes.items():
        part, _, attribute = name.partition("__")
        setattr(getattr(config, part), attribute, value)
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}},
        {"facts": {"hidden_size": 128}},
        {"model_config__quantization": "fp8"},
        {"model_config__dtype": "torch.float16"},
        {"cache_config__calculate_kv_scales": True},
        {"attention_config__backend": "FLASHINFER"},
    ],
    ids=str,
)
def test_h2_what_only_the_engines_configuration_knows_is_part_of_it(changes):
    config = offloading_config({})
    before = namespaces(config, vllm_config=fake_vllm_config())
    assert before != namespaces(config, vllm_config=fake_vllm_config(**changes))


def test_where_a_model_lies_and_who_loads_it_is_no_part_of_it():
    config = offloading_config({})
    places = [
        {"transformers_version": version, "text_config": {"_name_or_path": folder}}
        for version, folder in (("5", "/models/a"), ("6", "/data/a"))
    ]
    first, second = (
        namespaces(config, vllm_config=fake_vllm_config(facts=facts))
        for facts in places
    )
    assert first == second
    moved = changed(config, name="/data/tiny-model")
    assert namespaces(config) == namespaces(moved)


def test_embeddings_that_depend_on_the_longest_prompt_count_it():
    config = offloading_config({})
    rope = {"facts": {"rope_parameters": {"rope_type": "longrope"}}}
    short = fake_vllm_config(**rope)
    long = fake_vllm_config(**rope, model_config__max_model_len=8192)
    assert namespaces(config, vllm_config=short) != namespaces(config, vllm_config=long)


def test_the_engines_configuration_is_found_where_the_tier_is_built():
    class VllmConfig:
        pass

    def scheduler(vllm_config):
        return build()

    def build():
        return identities.engine_config()

    config = VllmConfig()
    assert scheduler(config) is config
    assert identities.engine_config() is None


def test_weights_that_cannot_be_told_apart_are_refused(volume_path, tmp_path):
    options = tier_options(volume_path)
    del options["weights"]
    with pytest.raises(ValueError, match='"weights": "<digest or revision'):
        Engine(offloading_config(options))
    config = offloading_config(options)
    (tmp_path / "model.safetensors").write_bytes(b"not many weights")
    with Engine(changed(config, name=str(tmp_path))) as engine:
        engine.store(chain(prompt(1, 2)))


def test_h1_random_hash_seeds_are_refused_with_the_remedy():
    seeded = fake_vllm_config(cache_config__prefix_caching_hash_algo="xxhash")
    assert identities.random_hash_seed(seeded, {}) == "xxhash"
    assert identities.random_hash_seed(seeded, {"PYTHONHASHSEED": "0"}) is None
    assert identities.random_hash_seed(fake_vllm_config(), {}) is None
    assert identities.random_hash_seed(None, {}) is None


def test_h1_a_random_seed_ends_the_start(volume_path, monkeypatch):
    seeded = fake_vllm_config(cache_config__prefix_caching_hash_algo="xxhash")
    monkeypatch.setattr(tier_module, "engine_config", lambda: seeded)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="Set PYTHONHASHSEED"):
        open_engine(volume_path)


GOLDEN_KEY = "8c66063d524a74dee844b69862ba0f3b69f13c9b23cadc9c097d16ca0b9b028f"
GOLDEN_NAMESPACE = (
    "cyclone_kv/1/vllm/826f9e04187047ea11ba90262c98b65aa5b9d99418da4ae7400925cf7ab62347"
)
GOLDEN = """
import sys
sys.path.insert(0, {tests!r})
import vllm
vllm.__version__ = "0.32.0"
import vllm_harness as harness
from cyclone_kv.connectors.vllm.identity import group_identities
config = harness.offloading_config({{}})
identity = group_identities(config, chunk_bytes=harness.CHUNK, vllm_config=None,
                            model=None, weights="w", warn=lambda text: None)[0]
print(harness.chain(harness.prompt(1, 3))[2][:-4].hex(), identity.namespace())
"""


@pytest.mark.parametrize("seed", [None, "0", "random"])
def test_h1_keys_and_namespaces_are_the_golden_ones_in_every_process(seed):
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": str(here.parents[1])}
    environment.pop("PYTHONHASHSEED", None)
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GOLDEN.format(tests=str(here))],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    key, namespace = done.stdout.split()[-2:]
    assert namespace == GOLDEN_NAMESPACE
    if seed is None:
        assert key == GOLDEN_KEY


def test_h8_another_salt_finds_nothing(volume_path):
    tokens = prompt(1, 4)
    with open_engine(volume_path) as engine:
        engine.store(chain(tokens, salt="s1"))
    with open_engine(volume_path) as engine:
        assert engine.load(chain(tokens, salt="s2")) == 0
        assert engine.load(chain(tokens)) == 0
        assert engine.load(chain(tokens, salt="s1")) == 4


def test_h8_the_salt_of_a_request_is_in_the_hashes_that_vllm_makes():
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256_cbor)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256_cbor)

    def hashes(salt):
        request = Request(
            request_id="r",
            prompt_token_ids=prompt(1, 3),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=hasher,
        )
        return [bytes(block) for block in request.block_hashes]

    assert hashes(None) == [key[:-4] for key in chain(prompt(1, 3))]
    assert not set(hashes("s1")) & set(hashes("s2"))
    assert not set(hashes("s1")) & set(hashes(None))


def test_h9_groups_of_one_model_are_kept_apart_and_each_counts(volume_path):
    tokens = prompt(1, 4)
    both = [chain(tokens, group=0), chain(tokens, group=1)]
    with open_engine(volume_path, groups=2) as engine:
        assert engine.tier._groups[0].namespace != engine.tier._groups[1].namespace
        engine.store(both[0])
        assert engine.lookup(both[1]) == 0
        engine.store(both[1])
        engine.forget_primary()
        assert [engine.load(keys) for keys in both] == [4, 4]
        engine.forget_primary()
        engine.tier._groups[1].cache.remove(both[1][2][:-4])
        assert [engine.load(keys) for keys in both] == [4, 2]


def test_keys_that_are_no_32_bytes_work_too(volume_path):
    keys = [make_offload_key(bytes([n]) * 16, 0) for n in range(1, 5)]
    with open_engine(volume_path, events=True) as engine:
        engine.store(keys)
        engine.forget_primary()
        assert engine.load(keys) == 4


# ---- start --------------------------------------------------------------------------


def test_h10_unknown_options_are_refused(volume_path):
    with pytest.raises(TypeError, match=r"'load_thread' is not .*'load_threads'"):
        open_engine(volume_path, load_thread=3)
    with pytest.raises(ConfigError, match="path is missing"):
        Engine(offloading_config({"capacity": "64MiB"}))


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("path", "file:///x", ConfigError),
        ("path", "s3://bucket/x", ConfigError),
        ("path", "", ConfigError),
        ("path", 5, TypeError),
        ("locality", "local", ConfigError),
        ("announce_again_seconds", -1, ConfigError),
        ("announce_again_seconds", "soon", TypeError),
        ("load_threads", 0, ConfigError),
        ("store_threads", "2", TypeError),
        ("store_queue", "lots", ConfigError),
        ("enable_kv_events", "yes", TypeError),
        ("recompute_tokens_per_second", 0, ConfigError),
        ("recompute_tokens_per_second", "fast", TypeError),
        ("weights", "", ConfigError),
        ("model", 3, ConfigError),
        ("capacity", "many", ConfigError),
        ("verify", "sometimes", ConfigError),
    ],
)
def test_h10_values_that_make_no_sense_are_refused(volume_path, option, value, error):
    with pytest.raises(error, match=option):
        Engine(offloading_config(tier_options(volume_path) | {option: value}))


def test_h10_a_path_may_begin_with_a_tilde(volume_path, monkeypatch):
    monkeypatch.setenv("HOME", str(volume_path.parent))
    with open_engine("~/kv.cyc") as engine:
        engine.store(chain(prompt(1, 2)))
    assert volume_path.exists()


def test_several_paths_make_one_volume(volume_path):
    paths = [f"{volume_path}{n}" for n in range(2)]
    options = tier_options(volume_path) | {"path": paths}
    keys = chain(prompt(1, 8))
    with Engine(offloading_config(options)) as engine:
        engine.store(keys)
    with Engine(offloading_config(options)) as engine:
        assert engine.load(keys) == 8


def test_a_block_that_can_never_fit_is_refused_at_start(volume_path):
    options = tier_options(volume_path, capacity="16MiB")
    with pytest.raises(ConfigError, match="takes blocks of at most"):
        Engine(offloading_config(options, chunk=17 << 20, rows=1))


def test_another_capacity_is_refused_and_none_takes_what_is_there(volume_path):
    open_engine(volume_path).close()
    with pytest.raises(MismatchError):
        open_engine(volume_path, capacity="32MiB")
    options = tier_options(volume_path)
    del options["capacity"]
    with Engine(offloading_config(options)):
        pass


def test_a_start_that_fails_leaves_no_threads_and_no_handles(volume_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no threads today")

    opened = []

    class Noted(Cache):
        @classmethod
        def open(cls, *args, **kwargs):
            opened.append(Cache.open(*args, **kwargs))
            return opened[-1]

    before = threading.active_count()
    monkeypatch.setattr(tier_module, "CopyThreads", fail)
    monkeypatch.setattr(tier_module, "Cache", Noted)
    with pytest.raises(RuntimeError, match="no threads today"):
        open_engine(volume_path, groups=2)
    assert [cache.closed for cache in opened] == [True, True]
    assert threading.active_count() == before
    monkeypatch.undo()
    open_engine(volume_path).close()


def test_f12_ranks_on_other_hosts_are_not_waited_for(volume_path):
    config = offloading_config(tier_options(volume_path))
    # The row is as wide as the KV of all workers, wherever they run.
    config = changed(config, world_size=4, tp_size=4)
    config = dataclasses.replace(config, worker_kv_bytes_per_block=CHUNK // 4)
    with Engine(config) as engine:
        engine.store(chain(prompt(1, 4)))
        engine.forget_primary()
        assert engine.load(chain(prompt(1, 4))) == 4


def test_the_start_is_one_line_with_all_that_matters(volume_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        tier_module.logger, "info", lambda text, *args: said.append(text % args)
    )
    with open_engine(volume_path) as engine:
        namespace = engine.tier._groups[0].namespace
    (line,) = said
    for part in (str(volume_path), "capacity 64.0 MiB", "free", "mode rw", namespace):
        assert part in line
    for part in ("tiny-model", "test-1", "float32", "32 tokens", "64.0 KiB"):
        assert part in line


# ---- metrics, events ----------------------------------------------------------------


def test_every_metric_is_declared_and_has_its_labels(volume_path):
    declared = CycloneTier.build_metric_definitions({})
    with open_engine(volume_path, events=True) as engine:
        engine.store(chain(prompt(1, 4)))
        for name in tier_names():
            engine.tier._measures.add(name)
        engine.tier._measures._next = 0
        stats = engine.tier.get_stats()
        assert engine.tier.get_stats() is None
    data = stats.data["data"]
    assert {"vllm:kv_offload_cyclone_stored_chunks"} <= data.keys() <= declared.keys()
    for name, values in data.items():
        for labels in values:
            assert len(labels) == len(declared[name].labelnames)
    assert isinstance(stats.reduce(), dict)


def tier_names():
    """Every counter that the tier's source names."""
    text = Path(tier_module.__file__).read_text()
    return re.findall(r'_measures\.add\("(\w+)"', text)


def test_counters_are_handed_out_once(volume_path):
    with open_engine(volume_path) as engine:
        engine.store(chain(prompt(1, 4)))
        engine.tier._measures._next = 0
        name = "vllm:kv_offload_cyclone_stored_chunks"
        assert engine.tier.get_stats().data["data"][name] == {(str(volume_path),): 4}
        engine.tier._measures._next = 0
        assert name not in engine.tier.get_stats().data["data"]


def storage(engine):
    """(removed, keys) of the STORAGE events so far, which are then forgotten."""
    events, engine.events = engine.events, []
    found = [event for event in events if event.medium.value == "STORAGE"]
    for event in found:
        assert event.ownership is None
        assert event.locality.value == "LOCAL"
        assert event.removal_expected is not event.removed
    return [(event.removed, sorted(event.keys)) for event in found]


def test_stored_chunks_are_announced_once(volume_path):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path, events=True) as engine:
        engine.store(keys)
        assert storage(engine) == [(False, sorted(keys))]
        engine.step()
        assert storage(engine) == []


def test_without_the_option_or_the_engines_there_are_no_events(volume_path):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path) as engine:
        engine.store(keys)
        assert storage(engine) == []
    options = tier_options(volume_path, enable_kv_events=True)
    with Engine(offloading_config(options, events=False)) as engine:
        engine.store(keys)
        assert storage(engine) == []
        assert not engine.tier.has_pending_work()


def test_what_another_process_removed_is_reported(volume_path):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path, events=True) as engine:
        engine.store(keys)
        storage(engine)
        script = (
            "import sys; from cyclone_kv import Cache\n"
            "with Cache.open(sys.argv[1], namespace=sys.argv[2]) as cache:\n"
            "    assert cache.remove(bytes.fromhex(sys.argv[3]))\n"
        )
        namespace = engine.tier._groups[0].namespace
        arguments = [str(volume_path), namespace, keys[2][:-4].hex()]
        subprocess.run([sys.executable, "-c", script, *arguments], check=True)
        engine.step()
        assert storage(engine) == [(True, [keys[2]])]


def test_evicted_and_damaged_chunks_are_reported(volume_path):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path, events=True, capacity="16MiB") as engine:
        engine.store(keys)
        storage(engine)
        for number in range(16):
            engine.store(chain(prompt(10 + number, 32)))
        gone = [key for removed, some in storage(engine) if removed for key in some]
        assert set(keys) <= set(gone)
        assert len(gone) == len(set(gone))


def test_loaded_chunks_are_announced_when_their_request_is_scheduled(volume_path):
    """After a restart vLLM knows a chunk's tokens only once it was found in memory."""
    keys = chain(prompt(1, 4))
    with open_engine(volume_path) as engine:
        engine.store(keys)
    with open_engine(volume_path, events=True) as engine:
        request = engine.begin(keys)
        for key in keys:
            engine.manager.lookup(key, request.context)
        engine.settle()
        assert storage(engine) == []
        engine.step(new=[request.context.req_id])
        assert storage(engine) == [(False, sorted(keys))]
        engine.finish(request)
        assert not engine.tier._loaded
        assert not engine.tier._live


def test_chunks_in_use_are_announced_again_after_a_while(volume_path, monkeypatch):
    """A reset that spares the connector makes routers forget and tells nobody here."""
    keys = chain(prompt(1, 4))
    with open_engine(volume_path, events=True) as engine:
        engine.store(keys)
        storage(engine)
        engine.load(keys)
        assert storage(engine) == []  # found in memory, and announced just now
        seconds = engine.tier._options.announce_again_seconds
        later = time.monotonic() + seconds + 1
        monkeypatch.setattr(tier_module.time, "monotonic", lambda: later)
        request = engine.begin(keys)
        engine.tier._groups[0].cache.remove(keys[3][:-4])
        engine.step(new=[request.context.req_id])
        assert storage(engine) == [(False, sorted(keys[:3])), (True, [keys[3]])]
        engine.step(new=[request.context.req_id])
        assert storage(engine) == []
        engine.finish(request)
        assert engine.tier._announced_at.keys() == set(keys[:3])


def test_after_a_reset_nothing_old_is_announced_or_ended(volume_path):
    keys = chain(prompt(1, 4))
    with open_engine(volume_path, events=True) as engine:
        engine.store(keys)
        storage(engine)
        engine.forget_primary()
        assert len(engine.tier._announced) == 0
        engine.tier._groups[0].cache.remove(keys[3][:-4])
        engine.step()
        assert storage(engine) == []
        assert engine.load(keys) == 3
        assert storage(engine) == [(False, sorted(keys[:3]))]


def test_a_store_that_a_reset_waited_for_is_not_announced(volume_path, monkeypatch):
    """The reset made vLLM forget its tokens, so the event would name nothing."""
    keys = chain(prompt(1, 4))
    with open_engine(volume_path, events=True) as engine:
        gate = threading.Event()
        monkeypatch.setattr(engine.tier, "_write", slow(engine.tier._write, gate))
        request = engine.begin(keys)
        assert engine.manager.prepare_store(keys, request.context) is not None
        engine.manager.complete_store(set(keys), request.context)
        threading.Timer(0.1, gate.set).start()
        engine.forget_primary()
        engine.settle()
        assert storage(engine) == []
        assert counters(engine)["stored_chunks"] == 4
        assert engine.lookup(keys) == 4


def test_has_pending_work_ends_with_the_last_announcement(volume_path):
    with open_engine(volume_path, events=True) as engine:
        engine.tier._to_announce += chain(prompt(1, 1))
        assert engine.tier.has_pending_work()
        engine.step()
        assert not engine.tier.has_pending_work()
