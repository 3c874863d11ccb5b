# SPDX-License-Identifier: Apache-2.0
"""The storage of SGLang's hierarchical cache, inside SGLang's own classes.

`make test-connectors` runs this file.  No engine: SGLang's kernels are built for GPUs.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import random
import threading
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("sglang") is None:  # importing it needs the harness
    pytest.skip("needs SGLang: make test-connectors", allow_module_level=True)

import sglang_harness
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang_harness import (
    PAGE,
    PAGE_BYTES,
    Engine,
    damage,
    host_pool,
    mla_pool,
    page_keys,
    prompt,
    storage_config,
)

from cyclone_kv import Cache
from cyclone_kv.connectors import _promises as promises
from cyclone_kv.connectors.sglang import CycloneHiCache
from cyclone_kv.connectors.sglang import hicache as hicache_module
from cyclone_kv.connectors.sglang import identity as identities

EIGHT = page_keys(prompt(1, 8))


def test_every_method_has_the_signature_that_sglang_calls():
    compared = 0
    for name, method in inspect.getmembers(HiCacheStorage, inspect.isfunction):
        if name.startswith("_") or name not in vars(CycloneHiCache):
            continue
        own = inspect.unwrap(getattr(CycloneHiCache, name))
        assert list(inspect.signature(own).parameters) == list(
            inspect.signature(method).parameters
        ), name
        compared += 1
    assert compared >= 12
    assert not CycloneHiCache.__abstractmethods__


# ---- pages --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_pages_come_back_after_a_restart(volume_path, layout):
    with Engine(volume_path, pool=host_pool(layout=layout)) as engine:
        assert engine.backend.batch_exists(EIGHT) == 0
        assert engine.load(EIGHT) == 0
        assert engine.store(EIGHT)
        assert engine.backend.batch_exists(EIGHT) == 8
        assert engine.load(EIGHT, first=20) == 8
    with Engine(volume_path, pool=host_pool(layout=layout)) as engine:
        assert engine.backend.batch_exists(EIGHT) == 8
        assert engine.load(EIGHT) == 8
        assert engine.backend.batch_exists(page_keys(prompt(2, 8))) == 0
        assert engine.storage._faults.count == 0


def test_pages_of_mla_pools_come_back(volume_path):
    for _ in range(2):
        with Engine(volume_path, pool=mla_pool(), mla=True) as engine:
            found = engine.backend.batch_exists(EIGHT)
            assert engine.load(EIGHT) == found
            assert engine.store(EIGHT)
    assert found == 8


def test_k_and_v_of_a_page_are_one_block_under_sglangs_hash(volume_path):
    with Engine(volume_path) as engine:
        engine.store(EIGHT[:2])
        assert len(engine.page(0)) == 2
        regions = [bytes(region) for region in engine.page(0)]
    with Cache.open(volume_path) as cache:
        stored = {entry.key: entry for entry in cache.ls()}
        assert set(stored) == {bytes.fromhex(key) for key in EIGHT[:2]}
        assert {entry.nbytes for entry in stored.values()} == {PAGE_BYTES}
        offset = stored[bytes.fromhex(EIGHT[0])].offset
    with open(volume_path, "rb") as file:
        file.seek(offset)
        assert file.read(PAGE_BYTES) == b"".join(regions)


def test_pages_may_lie_anywhere_in_the_pool(volume_path, request):
    rng = random.Random(request.config.option.seed)
    places = rng.sample(range(40), 8)
    with Engine(volume_path) as engine:
        engine.store(EIGHT)
        indices = torch.cat([engine.indices(place, 1) for place in places])
        assert engine.backend.batch_get_v1(EIGHT, indices, None) == [True] * 8
        for key, place in zip(EIGHT, places, strict=True):
            for number, region in enumerate(engine.page(place)):
                wanted = sglang_harness.pattern(key, number, len(region))
                assert (region == wanted).all()


def test_i7_every_whole_page_is_matched_and_no_more(volume_path):
    with Engine(volume_path) as engine:
        for pages, tail in ((1, 0), (5, 1), (7, PAGE - 1)):
            tokens = prompt(pages, pages, tail)
            engine.store(page_keys(tokens))
            assert engine.backend.batch_exists(page_keys(tokens)) == pages
            assert engine.load(page_keys(tokens)) == len(tokens) // PAGE == pages


def test_b6_a_damaged_page_ends_the_prefix_and_is_stored_anew(volume_path):
    with Engine(volume_path) as engine:
        engine.store(EIGHT)
    damage(volume_path, [EIGHT[5]])
    with Engine(volume_path) as engine:
        assert engine.backend.batch_exists(EIGHT) == 8
        answers = engine.backend.batch_get_v1(EIGHT, engine.indices(0, 8), None)
        assert answers == [key != EIGHT[5] for key in EIGHT]
        assert engine.backend.batch_exists(EIGHT) == 5
        assert engine.load(EIGHT) == 5
        assert engine.store(EIGHT[5:])
        assert engine.backend.batch_exists(EIGHT) == engine.load(EIGHT) == 8


def test_h2_a_block_of_another_length_is_no_page(volume_path):
    with Engine(volume_path) as engine:
        engine.store(EIGHT)
        cache = engine.storage._cache
        for place, nbytes in ((3, PAGE_BYTES // 2), (5, 2 * PAGE_BYTES)):
            cache.put(bytes.fromhex(EIGHT[place]), bytes(nbytes), overwrite=True)
        answers = engine.backend.batch_get_v1(EIGHT, engine.indices(0, 8), None)
        assert answers == [place not in (3, 5) for place in range(8)]


def test_c10_eviction_between_the_question_and_the_load_is_false(volume_path):
    with Engine(volume_path) as engine:
        engine.store(EIGHT)
        assert engine.backend.batch_exists(EIGHT) == 8
        engine.storage._cache.remove(bytes.fromhex(EIGHT[3]))
        assert engine.load(EIGHT) == 3
        assert engine.storage._faults.count == 0


def test_c7_and_c9_heads_stay_and_nothing_is_pinned(volume_path):
    prefixes = [page_keys(prompt(n, 32)) for n in range(1, 140)]
    with Engine(volume_path, capacity="16MiB", admission="always") as engine:
        for number, keys in enumerate(prefixes):
            engine.backend.batch_exists(keys)
            for start in range(0, 32, 8):
                engine.store(keys[start : start + 8])
            if number % 2:
                assert engine.backend.batch_exists(prefixes[0]) == 32
                assert engine.load(prefixes[0]) == 32
        cache = engine.storage._cache
        assert cache.stats().volume.evictions > 0
        assert cache.stats().volume.pinned_entries == 0
        usable, held = [], []
        for keys in prefixes:
            flags = cache.contains_many([bytes.fromhex(key) for key in keys])
            usable.append([*flags, False].index(False))
            held.append(sum(flags))
    partly = [u for u, h in zip(usable, held, strict=True) if 0 < h < 32]
    assert sum(u > 0 for u in partly) >= 0.9 * len(partly)


@pytest.mark.parametrize("passed", [True, False])
def test_a_batch_is_one_chain_behind_its_prefix(volume_path, monkeypatch, passed):
    calls = []
    with Engine(volume_path) as engine:
        cache = engine.storage._cache

        def put_many(items, *, chain, parent):
            calls.append((len(items), chain, parent and parent.hex()))
            return cache.put_many(items, chain=chain, parent=parent)

        if not passed:
            engine.backend.batch_exists(EIGHT)
        engine.storage._cache = SimpleNamespace(
            put_many=put_many, close=cache.close, longest_prefix=cache.longest_prefix
        )
        engine.store(EIGHT[:3])
        engine.store(EIGHT[3:], first=3, prefix=EIGHT[:3] if passed else None)
    assert calls == [(3, True, None), (5, True, EIGHT[2])]


def test_two_engines_share_a_volume(volume_path):
    with Engine(volume_path) as first, Engine(volume_path) as second:
        first.store(EIGHT)
        assert second.load(EIGHT) == 8


def test_b8_threads_mix_nothing_up(volume_path, request):
    seed = request.config.option.seed
    errors = []

    def run(number, engine):
        rng = random.Random(seed + number)
        try:
            for _ in range(40):
                keys = page_keys(prompt(rng.randrange(1, 400), 8))
                if engine.backend.batch_exists(keys) < 8:
                    engine.store(keys, first=10 * number)
                assert engine.load(keys, first=10 * number) >= 0
        except BaseException as error:
            errors.append(error)

    with Engine(volume_path, capacity="16MiB") as engine:
        threads = [threading.Thread(target=run, args=(n, engine)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.storage._faults.count == 0
    assert errors == [], f"seed {seed}"


def test_the_older_interface_moves_the_same_bytes(volume_path):
    with Engine(volume_path) as engine:
        engine.store(EIGHT[:2])
        tensor = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
        assert engine.backend.get(EIGHT[0], tensor) is tensor
        assert bytes(tensor.numpy()) == b"".join(map(bytes, engine.page(0)))
        assert engine.backend.get(EIGHT[5], tensor) is None
        assert engine.backend.get(EIGHT[0], torch.zeros(5)) is None
        assert engine.backend.get(EIGHT[0]) is None
        assert engine.backend.set(EIGHT[4], tensor)
        assert engine.backend.exists(EIGHT[4])
        assert not engine.backend.exists(EIGHT[5])
        two = [torch.zeros(PAGE_BYTES, dtype=torch.uint8) for _ in range(2)]
        first, missing = engine.backend.batch_get([EIGHT[4], EIGHT[6]], two)
        assert torch.equal(first, tensor)
        assert missing is None
        assert engine.backend.batch_set(EIGHT[5:7], two)
        assert not engine.backend.batch_set(EIGHT[5:7], [tensor])
        assert not engine.backend.set(EIGHT[7], torch.zeros(4, 4).t()[1:])


def test_clear_takes_this_identity_only(volume_path):
    with Engine(volume_path) as one, Engine(volume_path, weights="w2") as two:
        one.store(EIGHT)
        two.store(EIGHT)
        one.backend.clear()
        assert one.backend.batch_exists(EIGHT) == 0
        assert two.load(EIGHT) == 8


def test_metrics_have_sglangs_shape(volume_path):
    with Engine(volume_path, enable_storage_metrics=True) as engine:
        engine.store(EIGHT)
        engine.load(EIGHT[:3])
        stats = engine.backend.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([8], [3])
        assert stats.backup_bandwidth[0] > 0
        assert stats.prefetch_bandwidth[0] > 0
        assert engine.backend.get_stats().backup_pgs == []
    with Engine(volume_path) as engine:
        engine.load(EIGHT)
        assert engine.backend.get_stats() is None


# ---- nothing reaches SGLang's threads -----------------------------------------------


class Broken:
    def __getattr__(self, name):
        raise OSError("a fault")


def test_faults_are_counted_and_never_raised(volume_path):
    transfer = PoolTransfer(name=PoolName.MAMBA, keys=EIGHT[:2])
    with Engine(volume_path) as engine:
        engine.store(EIGHT)
        cache, engine.storage._cache = engine.storage._cache, Broken()
        indices = engine.indices(0, 8)
        calls = [
            (engine.backend.batch_exists(EIGHT), 0),
            (engine.backend.exists(EIGHT[0]), False),
            (engine.backend.batch_get_v1(EIGHT, indices, None), [False] * 8),
            (engine.backend.batch_set_v1(EIGHT, indices, None), [False] * 8),
            (engine.backend.get(EIGHT[0], torch.zeros(4)), None),
            (engine.backend.batch_get(EIGHT[:2], [torch.zeros(4)] * 2), [None] * 2),
            (engine.backend.set(EIGHT[0], torch.zeros(4)), False),
            (engine.backend.batch_set(EIGHT[:1], [torch.zeros(4)]), False),
            (engine.backend.clear(), None),
            (engine.backend.batch_get_v2([transfer]), {"mamba": [False, False]}),
            (engine.backend.batch_set_v2([transfer]), {"mamba": [False, False]}),
        ]
        engine.storage._cache = cache
        for number, (answer, wanted) in enumerate(calls):
            assert answer == wanted, number
        assert engine.storage._faults.count >= 11
        assert engine.load(EIGHT[:0]) == 0


def test_a_batch_of_wrong_length_touches_nothing(volume_path):
    with Engine(volume_path) as engine:
        engine.store(EIGHT)
        answers = engine.backend.batch_get_v1(EIGHT, engine.indices(0, 7), None)
        assert answers == [False] * 8
        assert engine.load(EIGHT) == 8


def test_after_close_everything_is_a_miss(volume_path):
    with Engine(volume_path) as engine:
        engine.store(EIGHT)
        engine.storage.close()
        assert engine.backend.batch_exists(EIGHT) == 0
        assert engine.load(EIGHT) == 0
        assert not engine.store(EIGHT)


def test_sglangs_own_failure_injector(volume_path, monkeypatch):
    """With random failures around it, pages are right or missing."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    with Engine(volume_path) as engine:
        assert engine.backend is not engine.storage
        stored = loaded = 0
        for number in range(1, 60):
            keys = page_keys(prompt(number, 8))
            stored += engine.store(keys)
            loaded += engine.load(keys)
        assert 0 < stored < 59
        assert loaded > 0
        assert engine.storage._faults.count == 0


def test_i8_loads_slower_than_recomputing_become_misses(volume_path, monkeypatch):
    monkeypatch.setattr(promises, "_SPEED_BYTES_MIN", 1)
    with Engine(volume_path, recompute_tokens_per_second=1e12) as engine:
        engine.store(EIGHT)
        assert engine.backend.batch_exists(EIGHT) == 8
        engine.load(EIGHT)
        assert engine.backend.batch_exists(EIGHT) == 0
        engine.storage._slow._until = 1e-9
        assert engine.backend.batch_exists(EIGHT) == 8


def test_i7_much_stored_and_nothing_found_is_one_warning(
    volume_path, monkeypatch, caplog
):
    monkeypatch.setattr(promises, "_USELESS_BYTES", 20 * PAGE_BYTES)
    with Engine(volume_path) as engine:
        for number in range(1, 8):
            keys = page_keys(prompt(number, 8))
            engine.backend.batch_exists(keys)
            engine.store(keys)
    assert caplog.text.count("lookups found anything") == 1


# ---- hybrid pools -------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in PoolName if n is not PoolName.KV])
def test_h9_pools_beside_kv_are_refused_in_words(volume_path, name):
    with (
        Engine(volume_path) as engine,
        pytest.raises(NotImplementedError, match="half of the state"),
    ):
        engine.backend.register_mem_host_pool_v2(object(), name)


def test_h9_a_hit_that_needs_other_pools_is_none(volume_path):
    with Engine(volume_path) as engine:
        engine.backend.register_mem_host_pool_v2(engine.pool, PoolName.KV)
        engine.store(EIGHT)
        transfer = PoolTransfer(
            name=PoolName.SWA, keys=EIGHT[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        assert engine.backend.batch_exists_v2(EIGHT, [transfer]).kv_hit_pages == 0
        assert engine.backend.batch_exists_v2(EIGHT).kv_hit_pages == 8
        assert engine.storage._faults.count == 1


def test_h9_a_pool_without_pages_is_refused(volume_path):
    with pytest.raises(ValueError, match="does not say where its pages lie"):
        Engine(volume_path, pool=SimpleNamespace(page_size=PAGE))


# ---- identity, start ----------------------------------------------------------------


def test_f9_every_rank_reads_its_own_bytes(volume_path):
    places = [
        {"tp": (tp, 4), "pp": (pp, 2), "cp": (cp, 2)}
        for tp in range(4)
        for pp in range(2)
        for cp in range(2)
    ]
    for place in places:
        with Engine(volume_path, **place) as engine:
            assert engine.backend.batch_exists(EIGHT[:2]) == 0
            engine.store(EIGHT[:2])
    with Cache.open(volume_path) as cache:
        assert len({entry.namespace_tag for entry in cache.ls()}) == 16
    for place in places:
        with Engine(volume_path, **place) as engine:
            assert engine.load(EIGHT[:2]) == 2


def test_ranks_that_hold_the_same_bytes_share_them(volume_path):
    with Engine(volume_path, pool=mla_pool(), mla=True, tp=(0, 4)) as engine:
        engine.store(EIGHT)
    with Engine(volume_path, pool=mla_pool(), mla=True, tp=(3, 4), dp_rank=1) as engine:
        assert engine.load(EIGHT) == 8


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "w2"},
        {"model": "other"},
        {"model_name": "org/other"},
        {"tp": (0, 2)},
        {"tp": (1, 2)},
        {"pp": (0, 2)},
        {"cp": (0, 2)},
        {"pool": {"dtype": torch.float16}},
        {"pool": {"layout": "layer_first"}},
        {"pool": {"layout": "page_first_direct"}},
        {"pool": {"heads": 4}},
        {"pool": {"page": 32}},
        {"version": 2},
        {"sglang": "0.6.0"},
        {"server": {"quantization": "fp8"}},
        {"server": {"kv_cache_dtype": "fp8_e5m2"}},
        {"server": {"json_model_override_args": '{"rope_theta":1}'}},
    ],
    ids=str,
)
def test_h2_changing_one_fact_finds_nothing_and_back_everything(
    volume_path, monkeypatch, change
):
    server = {"model_path": "org/tiny", "quantization": None, "dtype": "auto"}

    def run(patch, change):
        own = {k: v for k, v in change.items() if k not in ("pool", *OTHERS)}
        given = SimpleNamespace(**(server | change.get("server", {})))
        patch.setattr(identities, "_server_arguments", lambda warn: given)
        if "version" in change:
            patch.setattr(identities, "CONNECTOR_VERSION", change["version"])
        if "sglang" in change:
            patch.setattr(identities.metadata, "version", lambda _: change["sglang"])
        pool = host_pool(**change.get("pool", {}))
        with Engine(volume_path, pool=pool, **own) as engine:
            found = engine.backend.batch_exists(EIGHT)
            assert engine.load(EIGHT) == found
            if not change and not found:
                engine.store(EIGHT)
            return found

    for each, wanted in (({}, 0), (change, 0), ({}, 8)):
        with monkeypatch.context() as patch:
            assert run(patch, each) == wanted


OTHERS = ("version", "sglang", "server")


def test_h2_the_folder_of_the_model_is_part_of_the_identity(tmp_path, volume_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    weights, config = folder / "model.safetensors", folder / "config.json"
    first = [os.urandom(10_000), json.dumps({"rope_theta": 1e4})]

    def hits(data, text):
        weights.write_bytes(data)
        config.write_text(text)
        with Engine(volume_path, weights=None, model_name=str(folder)) as engine:
            found = engine.backend.batch_exists(EIGHT)
            engine.store(EIGHT)
            return found

    assert (hits(*first), hits(*first)) == (0, 8)
    assert hits(os.urandom(10_000), first[1]) == 0
    assert hits(first[0], json.dumps({"rope_theta": 5e5})) == 0
    assert hits(*first) == 8


def test_the_namespace_is_the_golden_one(volume_path, monkeypatch):
    """A change here moves every stored page out of reach."""
    monkeypatch.setattr(identities.metadata, "version", lambda _: "0.5.23")
    monkeypatch.setattr(identities, "_server_arguments", lambda warn: None)
    identity = identities.page_identity(
        storage_config(volume_path, tp=(1, 2)),
        host_pool(),
        regions=[4096, 4096],
        model=None,
        weights="w",
        warn=lambda text: None,
    )
    assert identity.namespace() == GOLDEN


GOLDEN = (
    "cyclone_kv/1/sglang/"
    "9bcb25e210569b4d279b9a45eda5c9ac63a35a57abb6b5f74ef118dfc79bb8cd"
)


def test_unknown_options_are_refused_with_a_hint(volume_path):
    with pytest.raises(TypeError, match="did you mean 'capacity'"):
        Engine(volume_path, capactiy="1GiB")
    with pytest.raises(ValueError, match='add "interface_v1": 1'):
        Engine(volume_path, interface_v1=None)
    with pytest.raises(ValueError, match="splitting heads"):
        Engine(volume_path, should_split_heads=True)
    with pytest.raises(ValueError, match="name them in the options"):
        Engine(volume_path, weights=None, model_name="org/nowhere")
    with pytest.raises(ValueError, match="above 0"):
        Engine(volume_path, recompute_tokens_per_second=0)
    assert not volume_path.exists()


def test_h10_the_start_up_line_says_where_how_much_and_whose(volume_path, caplog):
    with caplog.at_level("INFO", logger="sglang.cyclone_kv"), Engine(volume_path):
        pass
    for part in (
        str(volume_path),
        "mode rw",
        "capacity 64.0 MiB",
        "free beside it",
        "identity cyclone_kv/1/sglang/",
        "model tiny",
        "bfloat16, page_first, 16 tokens and 8192 B in 2 regions a page",
        "tp 0 of 1",
    ):
        assert part in caplog.text


def test_registering_a_pool_again_opens_anew(volume_path):
    with Engine(volume_path) as engine:
        engine.store(EIGHT)
        engine.backend.register_mem_pool_host(engine.pool)
        assert engine.load(EIGHT) == 8
        with pytest.raises(ValueError, match="does not say"):
            engine.backend.register_mem_pool_host(object())
        assert engine.load(EIGHT) == 8
    assert hicache_module.CycloneHiCache is CycloneHiCache
