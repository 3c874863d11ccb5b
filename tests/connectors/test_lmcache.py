# SPDX-License-Identifier: Apache-2.0
"""Both LMCache plugins inside LMCache's own classes: L2 of the server, and in-engine.

`make test-connectors` runs this file, and vllm_engine/ with real engines and servers.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache", reason="needs LMCache: make test-connectors")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface
from lmcache_harness import (
    CHUNK,
    DTYPE,
    L2,
    SHAPE,
    InEngine,
    Loop,
    chunk_keys,
    damage,
    digest,
    filled,
    metadata,
    object_key,
)

from cyclone_kv import Cache, CacheConfig
from cyclone_kv.connectors import _promises as promises
from cyclone_kv.connectors.lmcache import CycloneBackend, CycloneL2Adapter
from cyclone_kv.connectors.lmcache import backend as backend_module
from cyclone_kv.connectors.lmcache import identity as identities
from cyclone_kv.connectors.lmcache import l2_adapter as l2_module
from cyclone_kv.connectors.lmcache.options import BackendOptions, L2Options

ROOT = Path(__file__).resolve().parents[2]
EIGHT = [object_key(i) for i in range(8)]
ALL = list(range(8))


def stored_keys(path):
    with Cache.open(path) as cache:
        return {entry.key for entry in cache.ls()}


# ---- the interfaces -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "base"),
    [
        (CycloneL2Adapter, L2AdapterInterface),
        (CycloneBackend, StoragePluginInterface),
    ],
)
def test_every_method_has_the_signature_that_lmcache_calls(mine, base):
    compared = 0
    for name, method in inspect.getmembers(base, inspect.isfunction):
        if name.startswith("_") or name not in vars(mine):
            continue
        own = inspect.unwrap(getattr(mine, name))
        assert list(inspect.signature(own).parameters) == list(
            inspect.signature(method).parameters
        ), name
        assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(method)
        compared += 1
    assert compared >= 10
    assert not mine.__abstractmethods__


# ---- L2: store, restart, load -------------------------------------------------------


def test_stored_objects_come_back_after_a_restart(volume_path):
    with L2(volume_path) as l2:
        assert l2.lookup(EIGHT) == []
        result = l2.store(EIGHT)
        assert (result.is_successful(), result.bytes_transferred()) == (True, 8 * CHUNK)
        assert l2.lookup(EIGHT) == l2.load(EIGHT) == ALL
    with L2(volume_path) as l2:
        assert l2.lookup(EIGHT) == l2.load(EIGHT) == ALL
        others = [object_key(i) for i in range(100, 104)]
        assert l2.lookup([*others, EIGHT[3]]) == [4]
        assert l2.load([*others, EIGHT[3]]) == [4]
        assert l2.adapter._faults.count == 0


def test_lmcaches_hash_is_the_key_as_it_is(volume_path):
    with L2(volume_path) as l2:
        l2.store(EIGHT)
    assert stored_keys(volume_path) == {digest(i) for i in range(8)}


def test_three_distinct_descriptors_are_signalled_after_the_result(volume_path):
    with L2(volume_path) as l2:
        adapter = l2.adapter
        fds = {
            adapter.get_store_event_fd(),
            adapter.get_lookup_and_lock_event_fd(),
            adapter.get_load_event_fd(),
        }
        assert len(fds) == 3
        assert adapter.pop_completed_store_tasks() == {}
        assert adapter.query_lookup_and_lock_result(99) is None
        assert adapter.query_load_result(99) is None


def test_empty_tasks_are_answered(volume_path):
    with L2(volume_path) as l2:
        assert (
            l2.adapter.query_lookup_and_lock_result(
                l2.adapter.submit_lookup_and_lock_task([], {})
            ).get_indices_list()
            == []
        )
        assert l2.load([]) == []


def test_b6_a_load_names_exactly_the_objects_that_arrived(volume_path):
    with L2(volume_path) as l2:
        l2.store(EIGHT)
    damage(volume_path, {digest(2), digest(5)})
    good = [0, 1, 3, 4, 6, 7]
    with L2(volume_path) as l2:
        assert l2.lookup(EIGHT) == ALL
        assert l2.load(EIGHT) == good
        assert l2.lookup(EIGHT) == l2.load(EIGHT) == good
        l2.store([EIGHT[2], EIGHT[5]])
        assert l2.lookup(EIGHT) == l2.load(EIGHT) == ALL


def test_a_failed_object_is_a_miss_for_a_while(volume_path, monkeypatch):
    with L2(volume_path) as l2:
        l2.store(EIGHT)
        space = l2.adapter._spaces.known()[0][1]
        broken = SimpleNamespace(
            get_many_into=lambda keys, t, exact: [False] * len(keys)
        )
        monkeypatch.setattr(promises, "_FAILED_SECONDS", 0.2)
        with monkeypatch.context() as patch:
            patch.setattr(
                l2.adapter,
                "_batches",
                lambda keys, layouts: [
                    l2_module._Batch(replace_cache(space, broken), [0], [b"x"])
                ],
            )
            assert l2.load(EIGHT[:1]) == []
        assert l2.lookup(EIGHT) == ALL[1:]
        time.sleep(0.25)
        assert l2.lookup(EIGHT) == ALL


def replace_cache(space, cache):
    return SimpleNamespace(cache=cache, identity=space.identity)


def test_another_length_is_a_miss_and_never_a_short_or_long_copy(volume_path):
    longer = (*SHAPE[:2], 2 * SHAPE[2], SHAPE[3])
    with L2(volume_path) as l2:
        l2.store(EIGHT)
        assert l2.lookup(EIGHT, shape=longer) == l2.load(EIGHT, shape=longer) == []
    with L2(volume_path) as l2:
        assert l2.load(EIGHT) == ALL
        # The same namespace, a block that was stored with another length.
        space = l2.adapter._spaces.known()[0][1]
        space.cache.put(digest(3), bytes(CHUNK // 2), overwrite=True)
        assert l2.lookup(EIGHT) == ALL
        assert l2.load(EIGHT) == [0, 1, 2, 4, 5, 6, 7]


def test_b10_what_is_stored_is_what_the_object_held(volume_path):
    objects = [filled(key) for key in EIGHT]
    with L2(volume_path) as l2:
        l2.store(EIGHT, objects=objects)
        for obj in objects:
            memoryview(obj.raw_data.numpy())[:] = bytes(CHUNK)
        assert l2.load(EIGHT) == ALL


def test_two_servers_share_a_volume(volume_path):
    with L2(volume_path) as first, L2(volume_path) as second:
        first.store(EIGHT)
        assert second.lookup(EIGHT) == second.load(EIGHT) == ALL


def test_b8_threads_mix_nothing_up(volume_path, request):
    """Both controllers and several requests at once, at more than the capacity."""
    seed = request.config.option.seed
    with L2(volume_path, capacity="16MiB") as l2:
        errors = []

        def run(number):
            rng = random.Random(seed + number)
            try:
                for _ in range(30):
                    prompt = rng.randrange(60)
                    keys = [object_key(1000 * prompt + i) for i in range(12)]
                    hits = lookup(keys)
                    wanted = [keys[i] for i in hits]
                    if wanted:
                        load(wanted)
                    store([k for i, k in enumerate(keys) if i not in hits])
            except BaseException as error:
                errors.append(error)

        # One poller for each kind, as LMCache has it; here each call asks by itself.
        def lookup(keys):
            layout = l2_module_layout()
            task = l2.adapter.submit_lookup_and_lock_task(keys, {0: layout})
            return ask(l2.adapter.query_lookup_and_lock_result, task).get_indices_list()

        def load(keys):
            objects = [empty() for _ in keys]
            task = l2.adapter.submit_load_task(keys, objects)
            found = ask(l2.adapter.query_load_result, task)
            for i in found.get_indices_list():
                assert bytes(objects[i].byte_array) == bytes(filled(keys[i]).byte_array)

        def store(keys):
            if keys:
                task = l2.adapter.submit_store_task(keys, [filled(k) for k in keys])
                deadline = time.monotonic() + 20
                while task not in done:
                    done.update(l2.adapter.pop_completed_store_tasks())
                    assert time.monotonic() < deadline
                    time.sleep(0.0005)

        done: dict[int, object] = {}
        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == [], f"seed {seed}"
        assert l2.adapter._faults.count == 0
        assert l2.adapter.report_status()["evictions"] > 0


def empty():
    from lmcache_harness import memory

    return memory()


def l2_module_layout():
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc([torch.Size(SHAPE)], [DTYPE])


def ask(query, task, timeout=20.0):
    deadline = time.monotonic() + timeout
    while (answer := query(task)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return answer


# ---- L2: locks, eviction, chains ----------------------------------------------------


def test_c9_lookups_leave_nothing_pinned(volume_path):
    with L2(volume_path, capacity="16MiB") as l2:
        l2.store(EIGHT)
        for _ in range(300):
            assert l2.lookup(EIGHT) == ALL
        assert l2.adapter._spaces.root.stats().volume.pinned_entries == 0
        many = [object_key(10_000 + i) for i in range(2 * (16 << 20) // CHUNK)]
        for start in range(0, len(many), 64):
            l2.store(many[start : start + 64])
        assert l2.adapter.report_status()["evictions"] > 0


def test_c10_eviction_between_lookup_and_load_is_a_failed_load(volume_path):
    with L2(volume_path) as l2, Cache.open(volume_path) as other:
        l2.store(EIGHT)
        assert l2.lookup(EIGHT) == ALL
        namespace = l2.adapter._spaces.known()[0][1].identity.namespace()
        with Cache.open(other.paths[0], namespace=namespace) as mine:
            for number in (0, 4):
                mine.remove(digest(number))
        assert l2.load(EIGHT) == [1, 2, 3, 5, 6, 7]
        assert l2.adapter._faults.count == 0


def test_c7_prefixes_lose_their_tails_and_keep_their_heads(volume_path):
    """64 prefixes of 32, in pieces of 8, room for half; the first is re-read."""
    prefixes = [[object_key(1000 * p + i) for i in range(32)] for p in range(64)]
    with L2(volume_path, capacity="16MiB", admission="always") as l2:
        for number, keys in enumerate(prefixes):
            l2.lookup(keys)
            for start in range(0, 32, 8):
                # The server may put stores of two requests into one task.
                piece = keys[start : start + 8]
                l2.store(piece)
            if number % 2:
                found = l2.lookup(prefixes[0])
                assert found == list(range(32))
                assert l2.load(prefixes[0]) == found
        usable = [leading(l2.lookup(keys)) for keys in prefixes]
        held = [len(l2.lookup(keys)) for keys in prefixes]
    assert usable[0] == 32
    partly = [u for u, h in zip(usable, held, strict=True) if 0 < h < 32]
    assert sum(u > 0 for u in partly) >= 0.9 * len(partly), (usable, held)


def leading(places):
    return next((i for i, place in enumerate(places) if i != place), len(places))


def test_chains_and_parents_come_from_the_lookup(volume_path, monkeypatch):
    calls = []
    with L2(volume_path) as l2:
        one = [object_key(i) for i in range(6)]
        two = [object_key(100 + i) for i in range(3)]
        l2.lookup(one)
        l2.lookup(two)
        cache = l2.adapter._spaces.known()[0][1].cache

        class Noted:
            def __getattr__(self, name):
                return getattr(cache, name)

            def put_many(self, items, *, chain, parent):
                calls.append(([key for key, _ in items], chain, parent))
                return cache.put_many(items, chain=chain, parent=parent)

        name, space = l2.adapter._spaces.known()[0]
        l2.adapter._spaces._spaces[name] = replace(space, cache=Noted())
        l2.store([one[0], one[1], two[0], two[1], one[2]])
        l2.store([two[2], one[3]])
        l2.adapter._spaces._spaces[name] = space
    d = digest
    assert calls == [
        ([d(0), d(1), d(2)], True, None),
        ([d(100), d(101)], True, None),
        ([d(102)], True, d(101)),
        ([d(3)], True, d(2)),
    ]


# ---- L2: listeners, deletion, status ------------------------------------------------


def test_listeners_hear_of_what_is_stored_loaded_and_gone(volume_path, monkeypatch):
    monkeypatch.setattr(l2_module, "_GONE_SECONDS", 0.0)
    with L2(volume_path) as l2:
        l2.store(EIGHT)
        assert l2.stored == EIGHT
        assert l2.adapter.get_usage().total_bytes_used == 8 * CHUNK
        namespace = l2.adapter._spaces.known()[0][1].identity.namespace()
        with Cache.open(volume_path, namespace=namespace) as other:
            other.remove(digest(3))
        assert l2.load(EIGHT) == [0, 1, 2, 4, 5, 6, 7]
        assert l2.accessed == [key for i, key in enumerate(EIGHT) if i != 3]
        assert l2.gone == [EIGHT[3]]
        l2.adapter.delete([EIGHT[0], object_key(77)])
        assert l2.gone == [EIGHT[3], EIGHT[0]]
        assert l2.lookup(EIGHT) == [1, 2, 4, 5, 6, 7]
        assert l2.adapter.get_usage().total_bytes_used == 6 * CHUNK
    with Cache.open(volume_path, namespace=namespace) as cache:
        assert len(cache) == 6


def test_status_is_what_is(volume_path):
    with L2(volume_path) as l2:
        l2.store(EIGHT)
        l2.lookup(EIGHT)
        status = l2.adapter.report_status()
        assert status["is_healthy"]
        assert status["capacity_bytes"] == 64 << 20
        assert (status["entries"], status["stored_objects"]) == (8, 8)
        assert (status["lookups"], status["hits"], status["faults"]) == (8, 8, 0)
        json.dumps(status)
    assert not l2.adapter.report_status()["is_healthy"]


# ---- L2: nothing reaches LMCache, nothing blocks ------------------------------------


def test_f11_a_slow_volume_holds_nobody_up_and_stores_are_dropped(
    volume_path, monkeypatch
):
    gate = threading.Event()
    with L2(volume_path, store_queue=4 * CHUNK) as l2:
        original = l2.adapter._write

        def slow(batch, objects):
            gate.wait(20)
            return original(batch, objects)

        monkeypatch.setattr(l2.adapter, "_write", slow)
        objects = {key: filled(key) for key in EIGHT}
        tasks, longest = [], 0.0
        for key in EIGHT:
            started = time.monotonic()
            tasks.append(l2.adapter.submit_store_task([key], [objects[key]]))
            longest = max(longest, time.monotonic() - started)
        assert longest < 5, "a submission waited for the volume"
        done = l2.adapter.pop_completed_store_tasks()
        assert set(done) == set(tasks[4:])
        assert not any(result.is_successful() for result in done.values())
        assert l2.lookup(EIGHT) == []
        gate.set()
        deadline = time.monotonic() + 20
        while set(done) != set(tasks):
            done |= l2.adapter.pop_completed_store_tasks()
            assert time.monotonic() < deadline
        assert l2.adapter.report_status()["dropped_objects"] == 4
        assert l2.load(EIGHT) == [0, 1, 2, 3]
        assert l2.adapter._queued_bytes == 0


def test_the_bound_of_the_queue_is_a_quarter_of_l1(volume_path):
    desc = L1MemoryDesc(ptr=0, size=40 << 20, align_bytes=4096)
    with L2(volume_path, desc=desc) as l2:
        assert l2.adapter._queue_limit == 10 << 20


@pytest.mark.parametrize("method", ["contains_many", "put_many", "get_many_into"])
def test_faults_of_the_volume_are_counted_misses(volume_path, method):
    with L2(volume_path) as l2:
        l2.store(EIGHT)
        name, space = l2.adapter._spaces.known()[0]

        class Broken:
            def __getattr__(self, other):
                if other == method:
                    raise OSError("a fault")
                return getattr(space.cache, other)

        l2.adapter._spaces._spaces[name] = replace(space, cache=Broken())
        more = [object_key(50 + i) for i in range(3)]
        found, stored, loaded = l2.lookup(EIGHT), l2.store(more), l2.load(EIGHT)
        l2.adapter._spaces._spaces[name] = space
        assert (method == "contains_many") == (found == [])
        assert (method == "put_many") == (not stored.is_successful())
        assert (method == "get_many_into") == (loaded == [])
        assert l2.adapter._faults.count >= 1


def test_tasks_after_close_are_answered(volume_path):
    l2 = L2(volume_path)
    l2.adapter.close()
    task = l2.adapter.submit_load_task(EIGHT[:1], [empty()])
    assert l2.adapter.query_load_result(task).get_indices_list() == []
    task = l2.adapter.submit_store_task(EIGHT[:1], [filled(EIGHT[0])])
    assert not l2.adapter.pop_completed_store_tasks()[task].is_successful()
    assert l2.adapter._spaces.known() == []
    task = l2.adapter.submit_lookup_and_lock_task(EIGHT, {0: l2_module_layout()})
    assert l2.adapter.query_lookup_and_lock_result(task).get_indices_list() == []
    l2.adapter.close()


def test_close_waits_for_stores(volume_path):
    l2 = L2(volume_path)
    for key in EIGHT:
        l2.adapter.submit_store_task([key], [filled(key)])
    l2.adapter.close()
    assert stored_keys(volume_path) == {digest(i) for i in range(8)}


def test_a_start_that_fails_leaves_nothing_behind(volume_path, monkeypatch):
    def fail(**_):
        raise RuntimeError("no threads")

    monkeypatch.setattr(l2_module, "CopyThreads", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="no threads"):
        L2(volume_path)
    assert len(os.listdir("/proc/self/fd")) <= before
    with Cache.open(volume_path) as cache:
        assert cache.stats().volume.processes == 1


def test_i8_loads_slower_than_recomputing_become_misses(volume_path, monkeypatch):
    monkeypatch.setattr(promises, "_SPEED_BYTES_MIN", 1)
    with L2(volume_path, recompute_tokens_per_second=1e12) as l2:
        l2.store(EIGHT)
        assert l2.lookup(EIGHT) == ALL
        l2.load(EIGHT)
        assert l2.lookup(EIGHT) == []
        assert l2.adapter.report_status()["slow_lookups"] == 8
        l2.adapter._slow._until = time.monotonic()
        assert l2.lookup(EIGHT) == ALL


def test_i7_much_stored_and_nothing_found_is_one_warning(volume_path, monkeypatch):
    said = []
    monkeypatch.setattr(l2_module.logger, "warning", lambda t, *a: said.append(t % a))
    monkeypatch.setattr(promises, "_USELESS_BYTES", 6 * CHUNK)
    with L2(volume_path) as l2:
        l2.lookup([object_key(99)])
        for _ in range(3):
            l2.store(EIGHT)
    assert len([line for line in said if "none of" in line]) == 1


# ---- L2: identity -------------------------------------------------------------------


def test_f9_every_rank_and_group_reads_its_own_bytes(volume_path):
    kinds = [
        {"rank": (rank, size), "group": group}
        for size in (1, 2, 4)
        for rank in range(size)
        for group in (0, 1)
    ]
    with L2(volume_path) as l2:
        for kind in kinds:
            keys = [object_key(i, **kind) for i in range(2)]
            assert l2.lookup(keys) == []
            l2.store(keys)
        for kind in kinds:
            keys = [object_key(i, **kind) for i in range(2)]
            assert l2.load(keys) == [0, 1]
        assert len(l2.adapter._spaces.known()) == len(kinds) == 14


def test_h8_tenants_find_their_own_salt_only_also_after_a_restart(volume_path):
    def salted(salt):
        return [object_key(i, salt=salt) for i in range(4)]

    with L2(volume_path) as l2:
        l2.store(salted("alice"))
        assert l2.lookup(salted("bob")) == l2.lookup(salted("")) == []
    with L2(volume_path) as l2:
        assert l2.lookup(salted("bob")) == l2.lookup(salted("")) == []
        assert l2.lookup(salted("alice")) == l2.load(salted("alice")) == [0, 1, 2, 3]
    assert b"alice" not in volume_path.read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "test-2"},
        {"model": "other"},
        {"key": {"model": "org/other"}},
        {"key": {"rank": (0, 2)}},
        {"key": {"group": 1}},
        {"call": {"dtype": torch.int32}},
        {"call": {"shape": (2, 4, 8, 64)}},
        {"version": 2},
        {"lmcache": "0.6.0"},
    ],
    ids=str,
)
def test_h2_changing_one_fact_finds_nothing_and_back_everything(
    volume_path, monkeypatch, change
):
    with L2(volume_path) as l2:
        l2.store(EIGHT)
    with monkeypatch.context() as patch:
        if "version" in change:
            patch.setattr(identities, "CONNECTOR_VERSION", change["version"])
        if "lmcache" in change:
            patch.setattr(identities.metadata, "version", lambda _: change["lmcache"])
        options = {k: v for k, v in change.items() if k in ("weights", "model")}
        keys = [object_key(i, **change.get("key", {})) for i in range(8)]
        with L2(volume_path, **options) as l2:
            call = change.get("call", {})
            assert l2.lookup(keys, **call) == l2.load(keys, **call) == []
    with L2(volume_path) as l2:
        assert l2.lookup(EIGHT) == l2.load(EIGHT) == ALL


def test_h2_the_folder_of_the_model_is_part_of_the_identity(tmp_path, volume_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    weights, config = folder / "model.safetensors", folder / "config.json"
    first = [os.urandom(10_000), json.dumps({"rope_theta": 1e4, "hidden_size": 64})]

    def write(data, text):
        weights.write_bytes(data)
        config.write_text(text)

    def hits():
        keys = [object_key(i, model=str(folder)) for i in range(4)]
        with L2(volume_path, weights=None) as l2:
            found = l2.lookup(keys)
            if not found:
                l2.store(keys)
            return len(found)

    write(*first)
    assert (hits(), hits()) == (0, 4)
    write(os.urandom(10_000), first[1])
    assert hits() == 0
    write(first[0], json.dumps({"rope_theta": 5e5, "hidden_size": 64}))
    assert hits() == 0
    write(*first)
    assert hits() == 4


def test_a_model_without_known_weights_is_neither_stored_nor_found(
    volume_path, monkeypatch
):
    said = []
    monkeypatch.setattr(
        l2_module.logger, "warning", lambda t, *a, **_: said.append(t % a)
    )
    with L2(volume_path, weights=None) as l2:
        assert l2.lookup(EIGHT) == []
        assert not l2.store(EIGHT).is_successful()
        assert l2.load(EIGHT) == []
    assert len(said) == 1
    assert "name them in the options of the connector" in said[0]


def test_weights_may_be_given_for_each_model(volume_path):
    other = [object_key(i, model="org/other") for i in range(8)]
    with L2(volume_path, weights={"org/tiny": "w1", "org/other": "w2"}) as l2:
        l2.store(EIGHT)
        l2.store(other)
        assert l2.lookup(EIGHT) == l2.lookup(other) == ALL
    with L2(volume_path, weights={"org/tiny": "w1", "org/other": "w3"}) as l2:
        assert (l2.lookup(EIGHT), l2.lookup(other)) == (ALL, [])


FACTS = identities.ModelFacts("tiny", "w", "c", '{"theta":10000}')


def test_namespaces_are_the_golden_ones(monkeypatch):
    """A change here moves every stored object out of reach."""
    monkeypatch.setattr(identities.metadata, "version", lambda _: "0.5.6")
    l2 = identities.object_identity(
        FACTS, kv_rank=0x02010201, group=0, shapes=[SHAPE], dtypes=["torch.float32"]
    )
    assert (l2.tp_rank, l2.tp_size, l2.block_tokens) == (1, 2, 16)
    assert l2.namespace() == GOLDEN_L2
    chunk = identities.chunk_identity(
        FACTS, world_size=2, worker_id=1, dtype="bfloat16", kv_shape=(2, 2, 16, 2, 32),
        chunk_tokens=16, settings={"mla": False, "layerwise": False, "blending": False},
    )  # fmt: skip
    assert chunk.namespace() == GOLDEN_CHUNK
    assert identities.chunk_key(chunk_keys([1])[0]) == (
        b'lmcache chunk in an engine: {"hash":"1234567800000001"}'
    )


GOLDEN_L2 = (
    "cyclone_kv/1/lmcache/"
    "0024bdc26bac584764a11edbd6cf6f504b5be0b1ba3ac5b3c8af2e11c2112112"
)
GOLDEN_CHUNK = (
    "cyclone_kv/1/lmcache/"
    "b6a7994ff4f93b9f8b6996199e363049e48fad06a7c8735e2733c122d15066d6"
)


def test_keys_of_objects_and_chunks_never_meet():
    objects = [
        object_key(1),
        object_key(1, salt="a"),
        object_key(1, salt="aa"),
        replace_hash(object_key(1), b"short"),
        replace_hash(object_key(1, salt="b"), b"short"),
        replace_hash(object_key(1, salt="tb"), b"shor"),
    ]
    chunks = chunk_keys([1, 2, -3]) + chunk_keys([1], tags={"user": "a"})
    chunks += chunk_keys([1], tags={"user": "b"}) + chunks[0].split_layers(2)
    keys = [identities.object_key(o) for o in objects]
    keys += [identities.chunk_key(c) for c in chunks]
    assert len(set(keys)) == len(keys) == 13
    assert [len(k) == 32 for k in keys] == [True] + [False] * 12


def replace_hash(key, value):
    return replace(key, chunk_hash=value)


# ---- start: hashing, options --------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "seed", "fine"),
    [
        ("builtin", None, False),
        ("builtin", "random", False),
        ("builtin", "0", True),
        ("xxhash", None, False),
        ("sha256_cbor", None, True),
        ("no-such-hash", None, False),
        ("blake3", None, True),
    ],
)
def test_h1_hashes_that_differ_in_each_process_are_told(algorithm, seed, fine):
    pytest.importorskip("vllm")
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    assert (identities.random_hash(algorithm, environment) is None) is fine


def test_h1_without_vllm_lmcache_falls_back_to_python_hashes(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.utils.hashing", None)
    assert "Python's hash()" in identities.random_hash("sha256_cbor", {})


def test_h1_the_server_does_not_start_with_builtin_hashes(volume_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def server(hash_algorithm):  # as the context of LMCache's server
        with L2(volume_path) as l2:
            return l2.lookup(EIGHT)

    assert server("blake3") == []
    with pytest.raises(
        ValueError, match="Start the server with --hash-algorithm blake3"
    ):
        server("builtin")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert server("builtin") == []


def test_h1_where_the_algorithm_is_not_visible_the_hashes_tell(
    volume_path, monkeypatch
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    keys = [replace_hash(key, key.chunk_hash[:8]) for key in EIGHT]
    with L2(volume_path) as l2:
        assert not l2.store(keys).is_successful()
        assert l2.adapter._faults.count == 1
        assert l2.store(EIGHT).is_successful() is False  # the same kind of objects
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with L2(volume_path) as l2:
        assert l2.store(keys).is_successful()


def test_a_serde_around_the_adapter_is_refused(volume_path):
    with pytest.raises(ValueError, match="Remove the serde"):
        L2(volume_path, serde=object())
    assert not volume_path.exists()


def test_unknown_options_are_refused_with_a_hint(volume_path):
    with pytest.raises(TypeError, match="did you mean 'capacity'"):
        L2(volume_path, capactiy="1GiB")
    with pytest.raises(TypeError, match="did you mean 'store_threads'"):
        L2Options.parse({"path": "x", "store_thread": 1})
    with pytest.raises(TypeError, match="did you mean 'load_threads'"):
        BackendOptions.of_plugin(
            {"storage_plugin.c.class_name": "X", "storage_plugin.c.load_thread": 1}, "X"
        )


@pytest.mark.parametrize(
    "options",
    [
        {"weights": {"m": ""}},
        {"weights": {"m": 3}},
        {"weights": ""},
        {"model": "m", "weights": {"m": "w"}},
        {"model": "m"},
        {"store_threads": 0},
        {"load_threads": True},
        {"recompute_tokens_per_second": -1},
    ],
    ids=str,
)
def test_wrong_values_are_refused(options):
    with pytest.raises((TypeError, ValueError)):
        L2Options.parse({"path": "kv.cyc"} | options)


def test_a_missing_path_is_said(volume_path):
    with pytest.raises(ValueError, match="path is missing"):
        L2Options.parse({})


def test_h10_the_start_up_line_says_where_and_how_much(volume_path, monkeypatch):
    said = []
    monkeypatch.setattr(l2_module.logger, "info", lambda t, *a: said.append(t % a))
    with L2(volume_path) as l2:
        l2.store(EIGHT)
    first, second = said
    for part in (str(volume_path), "mode rw", "capacity 64.0 MiB", "free beside it"):
        assert part in first
    for part in ("identity cyclone_kv/1/lmcache/", "model tiny", "weights test-1"):
        assert part in second


def test_h10_objects_that_can_never_fit_end_the_start(volume_path):
    facts = metadata()
    facts.kv_shape = (1000, 2, 16, 2, 1 << 12)
    with pytest.raises(SystemExit, match="give a larger capacity"):
        InEngine(volume_path, metadata=facts)


# ---- in the engine ------------------------------------------------------------------


def test_chunks_come_back_after_a_restart(volume_path):
    keys = chunk_keys(range(6))
    with InEngine(volume_path) as engine:
        assert engine.manager.batched_contains(keys)[0] == 0
        engine.put(keys)
        assert engine.manager.batched_contains(keys)[0] == 6
        assert engine.get(keys) == [0, 1, 2, 3, 4, 5]
    with InEngine(volume_path) as engine:
        assert engine.manager.batched_contains(keys)[0] == 6
        assert engine.get(keys) == [0, 1, 2, 3, 4, 5]
        assert engine.manager.contains(keys[2]) == "cyclone"
        assert engine.backend._faults.count == 0


def test_the_last_chunk_of_a_prompt_may_be_shorter(volume_path):
    keys = chunk_keys(range(4))
    short = (*SHAPE[:2], 5, SHAPE[3])
    with InEngine(volume_path) as engine:
        engine.put(keys[:3])
        engine.put(keys[3:], shape=short)
        assert engine.get(keys) == [0, 1, 2, 3]
    for order in (keys, keys[::-1]):
        with InEngine(volume_path) as engine:
            assert engine.get(order) == [0, 1, 2, 3]


def test_single_calls_and_async_forms(volume_path):
    keys = chunk_keys(range(6))
    with InEngine(volume_path) as engine, Loop() as loop:
        backend = engine.backend
        engine.put(keys[:4])
        assert backend.contains(keys[0])
        assert not backend.contains(keys[5])
        assert backend.batched_contains(keys) == 4
        assert engine.check(keys[:1], [backend.get_blocking(keys[0])]) == [0]
        assert backend.get_blocking(keys[5]) is None
        assert backend.get_non_blocking(keys[5]) is None
        future = backend.get_non_blocking(keys[1])
        assert engine.check(keys[1:2], [future.result(20)]) == [0]
        assert loop.run(backend.batched_async_contains("r", keys, pin=True)) == 4
        objects = loop.run(backend.batched_get_non_blocking("r", keys))
        assert engine.check(keys, objects) == [0, 1, 2, 3]
        backend.remove(keys[1])
        objects = loop.run(backend.batched_get_non_blocking("r", keys))
        assert engine.check(keys, objects) == [0]
        assert loop.run(backend.async_batched_submit_put_task(keys[4:], [])) is None
        backend.touch_cache()
        backend.cancel_request("r")
        assert backend.get_allocator_backend() is engine.manager.local_cpu_backend


def test_references_are_balanced_whatever_happens(volume_path, monkeypatch):
    keys = chunk_keys(range(4))
    with InEngine(volume_path) as engine:
        engine.put(keys)
        backend = engine.backend
        objects = [engine.manager.allocate(torch.Size(SHAPE), DTYPE) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(backend, "_space", lambda key: 1 / 0)
            futures = backend.batched_submit_put_task(chunk_keys([50, 51]), objects)
            assert [future.result(20) for future in futures] == [False, False]
            assert backend.batched_get_blocking(keys) == [None] * 4
            assert backend.contains(keys[0]) is False
        assert [obj.meta.ref_count for obj in objects] == [1, 1]
        with monkeypatch.context() as patch:
            patch.setattr(backend, "_put", lambda *_: time.sleep(0.3))
            first = backend.batched_submit_put_task(chunk_keys([60]), objects[:1])
            assert len(first) == 1
            assert backend.exists_in_put_tasks(chunk_keys([60])[0])
            assert (
                backend.batched_submit_put_task(chunk_keys([60]), objects[1:]) is None
            )
            assert objects[1].meta.ref_count == 1
            backend._threads.drain()
        objects[0].ref_count_down()  # the one of the put that was played
        backend._putting.clear()
        backend._queued_bytes = 0
        for obj in objects:
            obj.ref_count_down()
        assert backend._faults.count >= 3


def test_b6_a_damaged_chunk_is_none_and_its_memory_is_given_back(volume_path):
    keys = chunk_keys(range(6))
    with InEngine(volume_path) as engine:
        engine.put(keys)
    with Cache.open(volume_path) as cache:
        second = sorted(cache.ls(), key=lambda entry: entry.offset)[1].key
    damage(volume_path, {second})
    with InEngine(volume_path) as engine:
        assert engine.manager.batched_contains(keys)[0] == 6
        found = engine.get(keys)
        assert len(found) == 5
        (lost,) = set(range(6)) - set(found)
        assert engine.manager.batched_contains(keys)[0] == lost
        engine.put([keys[lost]])
        assert engine.get(keys) == [0, 1, 2, 3, 4, 5]


def test_no_memory_left_is_a_shorter_answer(volume_path):
    keys = chunk_keys(range(8))
    with InEngine(volume_path) as engine, Loop() as loop:
        engine.put(keys)
        given = []
        allocate = engine.backend.local_cpu_backend.allocate

        def scarce(*args, **kwargs):
            if len(given) >= 3:
                return None
            given.append(1)
            return allocate(*args, **kwargs)

        engine.backend.local_cpu_backend = SimpleNamespace(allocate=scarce)
        objects = loop.run(engine.backend.batched_get_non_blocking("r", keys))
        assert engine.check(keys, objects) == [0, 1, 2]
        engine.backend.local_cpu_backend = engine.manager.local_cpu_backend


def test_pins_keep_nothing_when_nobody_unpins(volume_path):
    keys = chunk_keys(range(4))
    with InEngine(volume_path) as engine:
        engine.put(keys)
        for _ in range(100):
            assert engine.manager.batched_contains(keys, pin=True)[0] == 4
            assert engine.backend.pin(keys[0])
        assert engine.backend._spaces.root.stats().volume.pinned_entries == 0
        assert engine.backend.unpin(keys[0])
        assert not engine.backend.pin(chunk_keys([99])[0])
        engine.manager.batched_unpin(keys)
        with Cache.open(volume_path) as cache:
            assert {entry.heat for entry in cache.ls()} == {2}


def test_remove_and_clear_out(volume_path):
    keys = chunk_keys(range(4))
    with InEngine(volume_path) as engine:
        engine.put(keys)
        assert engine.manager.batched_remove(keys[:2], ["cyclone"]) == 2
        assert not engine.backend.remove(keys[0])
        assert engine.get(keys) == [2, 3]


def test_callbacks_come_once_for_each_stored_chunk(volume_path):
    keys = chunk_keys(range(3))
    told = []
    with InEngine(volume_path) as engine:
        objects = [engine.manager.allocate(torch.Size(SHAPE), DTYPE) for _ in keys]

        def tell(key):
            told.append(key)
            raise RuntimeError("a callback of somebody else")

        futures = engine.backend.batched_submit_put_task(
            keys, objects, on_complete_callback=tell
        )
        assert [future.result(20) for future in futures] == [True] * 3
        engine.settle(keys)
        for obj in objects:
            obj.ref_count_down()
    assert told == keys


def test_puts_beyond_the_bound_are_dropped(volume_path, monkeypatch):
    gate = threading.Event()
    with InEngine(volume_path, store_queue=2 * CHUNK) as engine:
        item = engine.backend._item
        monkeypatch.setattr(
            engine.backend, "_item", lambda *a: gate.wait(20) and item(*a)
        )
        keys = chunk_keys(range(4))
        objects = [engine.manager.allocate(torch.Size(SHAPE), DTYPE) for _ in keys]
        assert len(engine.backend.batched_submit_put_task(keys, objects)) == 2
        assert [obj.meta.ref_count for obj in objects] == [2, 2, 1, 1]
        gate.set()
        engine.settle(keys)
        assert [obj.meta.ref_count for obj in objects] == [1] * 4
        for obj in objects:
            obj.ref_count_down()
        assert engine.backend.batched_contains(keys) == 2


def test_layers_of_a_chunk_are_blocks_of_their_own(volume_path):
    (key,) = chunk_keys([1])
    layers = key.split_layers(3)
    shape = (SHAPE[2], 2, SHAPE[3])
    with InEngine(volume_path) as engine:
        engine.put(layers[:2], shape=shape)
        assert engine.backend.batched_contains(layers) == 2
        assert not engine.backend.contains(key)
        assert engine.get(layers) == [0, 1]


def test_f9_ranks_read_their_own_bytes(volume_path):
    for rank in range(3):
        with InEngine(volume_path, rank=(rank, 3)) as engine:
            keys = chunk_keys(range(2), rank=(rank, 3))
            assert engine.manager.batched_contains(keys)[0] == 0
            engine.put(keys)
    for rank in range(3):
        with InEngine(volume_path, rank=(rank, 3)) as engine:
            assert engine.get(chunk_keys(range(2), rank=(rank, 3))) == [0, 1]


def test_tags_separate_tenants(volume_path):
    alice, bob = (chunk_keys(range(3), tags={"user": name}) for name in ("a", "b"))
    with InEngine(volume_path) as engine:
        engine.put(alice)
        assert engine.get(bob) == engine.get(chunk_keys(range(3))) == []
        assert engine.get(alice) == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "test-2"},
        {"model": "other"},
        {"metadata": {"use_mla": True}},
        {"metadata": {"dtype": torch.bfloat16}},
        {"metadata": {"model": "org/other"}},
        {"metadata": {"rank": (1, 2)}},
        {"settings": {"use_layerwise": True}},
        {"chunk": 32},
        {"heads": 4},
    ],
    ids=str,
)
def test_h2_changing_one_fact_inside_the_engine(volume_path, change):
    keys = chunk_keys(range(3))
    with InEngine(volume_path) as engine:
        engine.put(keys)
    facts = metadata(**change.get("metadata", {}))
    if "chunk" in change:
        facts.chunk_size = change["chunk"]
    if "heads" in change:
        facts.kv_shape = (*facts.kv_shape[:3], change["heads"], 16)
    options = {k: v for k, v in change.items() if k in ("weights", "model")}
    given = change.get("metadata", {})
    changed = chunk_keys(
        range(3),
        **{k: given[k] for k in ("model", "rank", "dtype") if k in given},
    )
    settings = change.get("settings")
    with InEngine(volume_path, metadata=facts, settings=settings, **options) as engine:
        assert engine.backend.batched_contains(changed) == 0
        assert engine.get(changed) == []
    with InEngine(volume_path) as engine:
        assert engine.get(keys) == [0, 1, 2]


def test_the_scheduler_finds_what_workers_stored(volume_path):
    keys = chunk_keys(range(3))
    with InEngine(volume_path) as engine:
        engine.put(keys)
        scheduler = CycloneBackend(
            config=engine.manager.config,
            metadata=metadata(role="scheduler"),
            local_cpu_backend=None,
        )
        assert scheduler.batched_contains(keys) == 3
        assert scheduler.batched_get_blocking(keys) == [None] * 3
        scheduler.close()
        scheduler.close()


def test_foreign_headers_are_counted_misses(volume_path):
    keys = chunk_keys(range(2))
    with InEngine(volume_path) as engine:
        engine.put(keys)
        space = engine.backend._space(keys[0])
        headers = [
            b"",
            b"{}",
            b"[1]",
            b'{"dtypes":["save"],"shapes":[[1]],"format":"X"}',
        ]
        for header in headers:
            engine.backend._usual = None
            engine.backend._failed.discard(keys)
            space.cache.put(
                identities.chunk_key(keys[0]), bytes(100), header=header, overwrite=True
            )
            assert engine.backend.batched_get_blocking(keys[:1]) == [None]
        assert engine.backend._faults.count == len(headers)


def test_h1_builtin_hashing_ends_the_process_at_start(volume_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(SystemExit, match="pre_caching_hash_algorithm: sha256_cbor"):
        InEngine(volume_path, algorithm="builtin")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with InEngine(volume_path, algorithm="builtin") as engine:
        assert engine.backend.batched_contains(chunk_keys([1])) == 0


def test_mistakes_end_the_process_since_lmcache_would_go_on_without(volume_path):
    with pytest.raises(SystemExit, match="did you mean 'capacity'"):
        InEngine(volume_path, capactiy="1GiB")
    with pytest.raises(SystemExit, match="0 storage plugins"):
        CycloneBackend(
            config=SimpleNamespace(
                pre_caching_hash_algorithm="sha256_cbor", extra_config={}
            ),
            metadata=metadata(),
        )
    with pytest.raises(SystemExit, match="name them in the options"):
        InEngine(volume_path, weights=None)


def test_a_refused_start_ends_the_process(volume_path):
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from lmcache_harness import *\n"
        "InEngine(sys.argv[3], algorithm='builtin')\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    run = subprocess.run(
        [sys.executable, "-c", code, ROOT, Path(__file__).parent, volume_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert "Set pre_caching_hash_algorithm: sha256_cbor" in run.stderr


def test_keys_are_the_same_in_another_process():
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from lmcache_harness import *\n"
        "from cyclone_kv.connectors.lmcache import identity as i\n"
        "print(i.chunk_key(chunk_keys([1], tags={'a': 'b'})[0]).hex(),\n"
        "      i.object_key(object_key(1, salt='s')).hex())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(Path(__file__).parent)],
        env=os.environ | {"PYTHONHASHSEED": "random"},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    chunk = identities.chunk_key(chunk_keys([1], tags={"a": "b"})[0])
    salted = identities.object_key(object_key(1, salt="s"))
    assert run.stdout.splitlines()[-1].split() == [chunk.hex(), salted.hex()]


def test_identity_fields_are_used():
    """The fields that an LMCache identity leaves alone, so that nobody forgets one."""
    one = identities.object_identity(
        FACTS, kv_rank=0x02010201, group=3, shapes=[SHAPE], dtypes=["torch.float32"]
    )
    default = {"pp_rank", "pp_size", "cp_rank", "cp_size", "dp_rank", "dp_size"}
    default |= {"lora", "cache_salt"}
    unused = {f.name for f in fields(one) if getattr(one, f.name) in (0, 1, "", ())}
    # Ranks of all kinds are one number in LMCache; salts are part of the key.
    assert unused - {"connector_version", "tp_rank"} <= default
    assert isinstance(CacheEngineKey, type)
    assert backend_module.CycloneBackend is CycloneBackend
    assert CacheConfig.for_kv_tier("1GiB").verify == "once"
