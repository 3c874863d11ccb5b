# SPDX-License-Identifier: Apache-2.0
"""Store and restore the KV cache of small random models, through a real volume."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from cyclone_kv import Cache, CacheConfig
from cyclone_kv.connectors.transformers import (
    BlockLayout,
    PrefixStore,
    chain_keys,
    model_identity,
    weights_fingerprint,
)

BLOCK = 16
VOCABULARY = 97


@pytest.fixture(scope="session")
def torch():
    pytest.importorskip("transformers", reason="needs transformers")
    return pytest.importorskip("torch", reason="needs torch")


def make_model(torch, *, dtype="float32", seed=1, layers=3, **settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **settings,
    )
    return LlamaForCausalLM(config).eval().to(getattr(torch, dtype))


@pytest.fixture(scope="session")
def model(torch):
    return make_model(torch)


@pytest.fixture(scope="session")
def identity(model):
    return model_identity(model, block_tokens=BLOCK)


def open_cache(volume_path, identity):
    config = CacheConfig.for_kv_tier(capacity="64MiB")
    return Cache.open(volume_path, config, namespace=identity.namespace())


def tokens(count, *, first=0):
    return [(first + 7 * i) % VOCABULARY for i in range(count)]


def forward(torch, model, ids, past=None):
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([ids]), past_key_values=past, use_cache=True
        )


def prefill(torch, model, ids, past=None, first=0):
    """Compute `ids` in steps of a block, as a server with chunked prefill does."""
    output = None
    for start in range(first, len(ids), BLOCK):
        output = forward(torch, model, ids[start : start + BLOCK], past)
        past = output.past_key_values
    return output


def same_tensors(torch, past, reference, count):
    assert len(past.layers) == len(reference.layers)
    return all(
        torch.equal(mine.keys, theirs.keys[:, :, :count])
        and torch.equal(mine.values, theirs.values[:, :, :count])
        for mine, theirs in zip(past.layers, reference.layers, strict=True)
    )


class FakeCache:
    """Records what the store hands to the engine, and answers what a test wants."""

    def __init__(self, present=0, put=None, got=None):
        self.present, self.put, self.got = present, put, got
        self.calls = []

    def longest_prefix(self, keys, *, touch):
        return min(self.present, len(keys))

    def put_many(self, items, **how):
        self.calls.append((items, how))
        return self.put or [True] * len(items)

    def get_many_into(self, keys, targets):
        self.calls.append((keys, targets))
        return self.got or [True] * len(keys)


# ---- keys ------------------------------------------------------------------------


def test_chain_keys_are_the_golden_ones():
    link = hashlib.sha256(b"space").digest()
    expected = []
    for block in ([1, 2, 3], [4, 5, 2**32 - 1]):
        link = hashlib.sha256(link + struct.pack("<3I", *block)).digest()
        expected.append(link)
    keys = chain_keys("space", [1, 2, 3, 4, 5, 2**32 - 1, 7], block_tokens=3)
    assert keys == expected
    assert (
        keys[1].hex()
        == "7b6bedc10c37cf591ea2caf3693bcd29283ec5c0938092455fa8a020148920d8"
    )


def test_chain_keys_cover_whole_blocks_only():
    counts = [len(chain_keys("s", tokens(n), block_tokens=4)) for n in range(10)]
    assert counts == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_chain_keys_depend_on_everything_in_front():
    one = chain_keys("s", [1, 2, 3, 4], block_tokens=2)
    other = chain_keys("s", [1, 9, 3, 4], block_tokens=2)
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert chain_keys("t", [1, 2, 3, 4], block_tokens=2)[0] != one[0]


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "a", None])
def test_chain_keys_refuse_what_is_no_token_id(bad):
    with pytest.raises(ValueError, match="token ids 2 to 3"):
        chain_keys("s", [1, 2, bad, 4], block_tokens=2)


def test_import_loads_neither_torch_nor_transformers():
    code = (
        "import sys, cyclone_kv.connectors.transformers\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


# ---- identity --------------------------------------------------------------------


def test_identity_of_equal_models_is_equal(torch, identity):
    assert model_identity(make_model(torch), block_tokens=BLOCK) == identity


def test_identity_notices_weights_type_shape_rope_and_settings(torch, identity):
    others = [
        make_model(torch, seed=2),
        make_model(torch, dtype="bfloat16"),
        make_model(torch, layers=2),
        make_model(torch, rope_theta=500.0),
        make_model(torch, rms_norm_eps=1e-3),
    ]
    namespaces = {model_identity(m, block_tokens=BLOCK).namespace() for m in others}
    assert len(namespaces - {identity.namespace()}) == len(others)


def test_identity_takes_a_given_fingerprint(model):
    identity = model_identity(model, weights="revision 7", name="m", cache_salt="s")
    assert (identity.weights, identity.model) == ("revision 7", "m")
    assert identity.block_tokens == 256


def test_fingerprint_notices_one_changed_weight(torch):
    model = make_model(torch)
    before = weights_fingerprint(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1
    assert weights_fingerprint(model) != before


def test_adapter_without_a_name_is_refused(torch):
    model = make_model(torch)
    model._hf_peft_config_loaded = True
    with pytest.raises(ValueError, match="lora="):
        model_identity(model)
    assert model_identity(model, lora="poet@1").lora == "poet@1"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
    ],
)
def test_rope_that_depends_on_the_length_is_refused(torch, rope):
    model = make_model(torch, rope_parameters=rope)
    with pytest.raises(ValueError, match=rope["rope_type"]):
        model_identity(model)


def test_layout_survives_the_identity(torch, model, identity):
    past = forward(torch, model, [1, 2]).past_key_values
    layout = BlockLayout.of(past, block_tokens=BLOCK)
    assert BlockLayout.from_identity(identity) == layout
    assert layout.block_bytes == 3 * 2 * 2 * 8 * 4 * BLOCK


def test_identity_of_another_connector_is_refused(identity):
    for changes in ({"connector": "vllm"}, {"layout": "HND"}, {"connector_version": 9}):
        with pytest.raises(ValueError, match="identity"):
            PrefixStore(FakeCache(), replace(identity, **changes))


# ---- store and load --------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_restored_prefix_continues_bit_for_bit(torch, volume_path, dtype):
    model = make_model(torch, dtype=dtype)
    identity = model_identity(model, block_tokens=BLOCK)
    document, question = tokens(4 * BLOCK), tokens(5, first=3)
    whole = prefill(torch, model, document).past_key_values
    with open_cache(volume_path, identity) as cache:
        assert PrefixStore(cache, identity).store(document, whole) == 4 * BLOCK
    with open_cache(volume_path, identity) as cache:  # a restart
        past, reused = PrefixStore(cache, identity).load(document + question)
    assert reused == past.get_seq_length() == 4 * BLOCK
    assert same_tensors(torch, past, whole, reused)
    for step in (question, [11], [5]):
        mine = forward(torch, model, step, past)
        theirs = forward(torch, model, step, whole)
        assert torch.equal(mine.logits, theirs.logits)


def test_load_ends_where_prompts_part(torch, volume_path, model, identity):
    one = tokens(5 * BLOCK)
    other = one[: 3 * BLOCK + 2] + [96] * (2 * BLOCK)
    whole = prefill(torch, model, one).past_key_values
    with open_cache(volume_path, identity) as cache:
        store = PrefixStore(cache, identity)
        store.store(one, whole)
        assert store.lookup(other) == 3 * BLOCK
        past, reused = store.load(other)
        assert reused == 3 * BLOCK
        assert same_tensors(torch, past, whole, reused)
        assert store.load([96] * BLOCK)[1] == 0
        assert store.load([])[1] == 0


def test_miss_gives_an_empty_cache_that_works(torch, volume_path, model, identity):
    ids = tokens(2 * BLOCK)
    with open_cache(volume_path, identity) as cache:
        past, reused = PrefixStore(cache, identity).load(ids)
    assert (reused, past.get_seq_length()) == (0, 0)
    mine = prefill(torch, model, ids, past)
    assert torch.equal(mine.logits, prefill(torch, model, ids).logits)


def test_tail_that_fills_no_block_is_not_stored(torch, volume_path, model, identity):
    ids = tokens(2 * BLOCK + 5)
    with open_cache(volume_path, identity) as cache:
        store = PrefixStore(cache, identity)
        past = prefill(torch, model, ids).past_key_values
        assert store.store(ids, past) == 2 * BLOCK
        assert len(cache) == 2


def test_shorter_of_tokens_and_cache_is_stored(torch, volume_path, model, identity):
    ids = tokens(4 * BLOCK)
    past = prefill(torch, model, ids[: 3 * BLOCK]).past_key_values
    with open_cache(volume_path, identity) as cache:
        store = PrefixStore(cache, identity)
        assert store.store(ids[:BLOCK], past) == BLOCK
        assert store.store(ids, past) == 3 * BLOCK
        assert store.lookup(ids) == 3 * BLOCK


def test_storing_after_each_step_stores_each_block_once(torch, model, identity):
    ids = tokens(3 * BLOCK)
    past = prefill(torch, model, ids).past_key_values
    keys = PrefixStore(FakeCache(), identity).keys(ids)
    for present in range(4):
        cache = FakeCache(present)
        assert PrefixStore(cache, identity).store(ids, past) == 3 * BLOCK
        if present == 3:
            assert cache.calls == []
            continue
        [(items, how)] = cache.calls
        assert [key for key, _ in items] == keys[present:]
        parent = keys[present - 1] if present else None
        assert how == {"chain": True, "parent": parent}


def test_refused_block_ends_what_counts_as_stored(torch, model, identity):
    ids = tokens(4 * BLOCK)
    past = prefill(torch, model, ids).past_key_values
    cache = FakeCache(1, put=[True, False, True])
    assert PrefixStore(cache, identity).store(ids, past) == 2 * BLOCK


def test_segments_are_pieces_of_the_tensors(torch, model, identity):
    ids = tokens(2 * BLOCK)
    past = prefill(torch, model, ids).past_key_values
    cache = FakeCache()
    PrefixStore(cache, identity).store(ids, past)
    [(items, _)] = cache.calls
    segments = items[1][1]
    assert len(segments) == 3 * 2 * 2  # layers, K and V, heads
    tensors = [t for layer in past.layers for t in (layer.keys, layer.values)]
    for index, segment in enumerate(segments):
        tensor, head = tensors[index // 2], index % 2
        piece = torch.frombuffer(segment, dtype=tensor.dtype)
        assert piece.data_ptr() == tensor[0, head, BLOCK:].data_ptr()
        assert torch.equal(piece, tensor[0, head, BLOCK:].flatten())


def test_load_fills_the_tensors_of_the_result(torch, model, identity):
    ids = tokens(2 * BLOCK)
    cache = FakeCache(2)
    past, reused = PrefixStore(cache, identity).load(ids)
    assert reused == 2 * BLOCK
    [(_, targets)] = cache.calls
    first = torch.frombuffer(targets[1][0], dtype=torch.float32)
    assert first.data_ptr() == past.layers[0].keys[0, 0, BLOCK:].data_ptr()


def test_cropped_cache_is_stored_as_it_looks(torch, volume_path, model, identity):
    ids = tokens(4 * BLOCK)
    whole = prefill(torch, model, ids).past_key_values
    past = prefill(torch, model, ids).past_key_values
    past.crop(-BLOCK - 3)
    assert not past.layers[0].keys.is_contiguous()
    with open_cache(volume_path, identity) as cache:
        store = PrefixStore(cache, identity)
        assert store.store(ids, past) == 2 * BLOCK
        restored, reused = store.load(ids)
    assert same_tensors(torch, restored, whole, reused)


def test_ids_may_be_a_list_or_a_tensor(torch, volume_path, model, identity):
    ids = tokens(2 * BLOCK)
    past = prefill(torch, model, ids).past_key_values
    with open_cache(volume_path, identity) as cache:
        store = PrefixStore(cache, identity)
        store.store(torch.tensor([ids]), past)
        for form in (
            ids,
            tuple(ids),
            iter(ids),
            torch.tensor(ids),
            torch.tensor([ids]),
        ):
            assert store.lookup(form) == 2 * BLOCK


# ---- loss and damage -------------------------------------------------------------


def flip_byte(volume_path, cache, key):
    """Return a function that flips a byte of the block, once the cache is closed."""
    with cache.locate(key) as place:
        offset = place.offset + place.nbytes // 3

    def flip():
        file = os.open(volume_path, os.O_RDWR)
        try:
            byte = os.pread(file, 1, offset)[0]
            os.pwrite(file, bytes([byte ^ 0x10]), offset)
        finally:
            os.close(file)

    return flip


@pytest.mark.parametrize("block", [0, 2, 4])
def test_flipped_byte_shortens_the_reuse_and_keeps_the_answer(
    torch, volume_path, model, identity, block
):
    ids, question = tokens(5 * BLOCK), tokens(4, first=9)
    whole = prefill(torch, model, ids).past_key_values
    with open_cache(volume_path, identity) as cache:
        store = PrefixStore(cache, identity)
        store.store(ids, whole)
        flip = flip_byte(volume_path, cache, store.keys(ids)[block])
    flip()
    with open_cache(volume_path, identity) as cache:
        store = PrefixStore(cache, identity)
        past, reused = store.load(ids)
        assert reused == block * BLOCK
        if reused:
            assert same_tensors(torch, past, whole, reused)
            assert past.layers[0].keys.is_contiguous()
        past = prefill(torch, model, ids, past, reused).past_key_values
        mine = forward(torch, model, question, past)
        assert torch.equal(mine.logits, forward(torch, model, question, whole).logits)
        assert store.store(ids, past) == 5 * BLOCK
        assert store.load(ids)[1] == 5 * BLOCK


def test_block_missing_in_the_middle_ends_the_reuse(
    torch, volume_path, model, identity
):
    ids = tokens(4 * BLOCK)
    past = prefill(torch, model, ids).past_key_values
    with open_cache(volume_path, identity) as cache:
        store = PrefixStore(cache, identity)
        store.store(ids, past)
        cache.remove(store.keys(ids)[2])
        assert store.lookup(ids) == 2 * BLOCK
        assert store.load(ids)[1] == 2 * BLOCK


@pytest.mark.parametrize(
    ("got", "blocks"), [([True, False, True], 1), ([False] * 3, 0)]
)
def test_block_lost_between_lookup_and_load_ends_the_reuse(
    torch, identity, got, blocks
):
    past, reused = PrefixStore(FakeCache(3, got=got), identity).load(tokens(3 * BLOCK))
    assert reused == past.get_seq_length() == blocks * BLOCK


CHANGES = {
    "model": "other",
    "weights": "other",
    "kv_dtype": "bfloat16",
    "layout": "layer,kv,head,token,element:[[3,2,4,8]]",
    "block_tokens": 8,
    "tp_size": 2,
    "tp_rank": (("tp_size", 2), ("tp_rank", 1)),
    "pp_size": 2,
    "pp_rank": (("pp_size", 2), ("pp_rank", 1)),
    "cp_size": 2,
    "cp_rank": (("cp_size", 2), ("cp_rank", 1)),
    "dp_size": 2,
    "dp_rank": (("dp_size", 2), ("dp_rank", 1)),
    "rope": "other",
    "lora": "poet",
    "cache_salt": "tenant",
    "group": 1,
    "extra": {"config": "other"},
}


def test_every_field_of_the_identity_separates_blocks(
    torch, volume_path, model, identity
):
    missing = {item.name for item in fields(identity)} - set(CHANGES)
    assert missing == {"connector", "connector_version"}  # refused, see above
    ids = tokens(3 * BLOCK)
    past = prefill(torch, model, ids).past_key_values
    with open_cache(volume_path, identity) as cache:
        PrefixStore(cache, identity).store(ids, past)
        for name, value in CHANGES.items():
            changes = dict(value) if isinstance(value, tuple) else {name: value}
            other = replace(identity, **changes)
            # Also without the help of the namespace: keys alone tell them apart.
            assert PrefixStore(cache, other).lookup(ids) == 0, name
            with open_cache(volume_path, other) as other_cache:
                assert PrefixStore(other_cache, other).load(ids)[1] == 0, name
        assert PrefixStore(cache, identity).load(ids)[1] == 3 * BLOCK


# ---- refusals --------------------------------------------------------------------


def refused(store, past, words):
    with pytest.raises(ValueError, match=words):
        store.store(tokens(2 * BLOCK), past)


def test_other_kinds_of_cache_are_refused(torch, model, identity):
    from transformers import DynamicCache, StaticCache

    class Special(DynamicCache):
        pass

    store = PrefixStore(FakeCache(), identity)
    refused(store, StaticCache(config=model.config, max_cache_len=64), "StaticCache")
    refused(store, Special(), "Special")
    refused(store, ((1, 2), (3, 4)), "tuple")
    refused(store, DynamicCache(), "empty")
    refused(store, DynamicCache(config=model.config), "holds no keys")


def test_layers_with_other_state_are_refused(torch, model, identity):
    from transformers.cache_utils import DynamicSlidingWindowLayer, QuantizedLayer

    class Quantized(QuantizedLayer):
        def __init__(self):
            pass

        def _quantize(self, tensor, axis):
            raise NotImplementedError

        def _dequantize(self, q_tensor):
            raise NotImplementedError

    store = PrefixStore(FakeCache(), identity)
    for layer in (DynamicSlidingWindowLayer(sliding_window=8), Quantized()):
        past = forward(torch, model, tokens(2 * BLOCK)).past_key_values
        past.layers[1] = layer
        refused(store, past, f"layer 1 is a {type(layer).__name__}")


def test_sliding_window_model_is_refused_at_the_start(torch):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        model_identity(MistralForCausalLM(config).eval())


def test_batches_are_refused(torch, model, identity):
    ids = tokens(2 * BLOCK)
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids, ids]), use_cache=True)
    refused(PrefixStore(FakeCache(), identity), output.past_key_values, "batch size 2")
    with pytest.raises(ValueError, match="2 sequences"):
        PrefixStore(FakeCache(), identity).lookup(torch.tensor([ids, ids]))


def test_scattered_tensors_are_refused(torch, model, identity):
    past = forward(torch, model, tokens(2 * BLOCK)).past_key_values
    keys = past.layers[2].keys
    past.layers[2].keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    refused(
        PrefixStore(FakeCache(), identity), past, "keys of layer 2 are not contiguous"
    )


def test_uneven_layers_are_refused(torch, model, identity):
    store = PrefixStore(FakeCache(), identity)
    past = forward(torch, model, tokens(2 * BLOCK)).past_key_values
    past.layers[1].crop(-1)
    refused(store, past, "all must hold the same")
    past = forward(torch, model, tokens(2 * BLOCK)).past_key_values
    past.layers[1].values = past.layers[1].values[:, :, 1:].contiguous()
    refused(store, past, "heads and tokens must agree")
    past = forward(torch, model, tokens(2 * BLOCK)).past_key_values
    past.layers[1].values = past.layers[1].values.to(torch.float16)
    refused(store, past, "mixes element types")


def test_other_device_is_refused(torch, model, identity):
    past = forward(torch, model, tokens(2 * BLOCK)).past_key_values
    past.layers[0].keys = past.layers[0].keys.to("meta")
    refused(PrefixStore(FakeCache(), identity), past, "keys of layer 0 are on meta")


def test_cache_of_another_model_is_refused(torch, identity):
    other = make_model(torch, layers=2)
    past = forward(torch, other, tokens(2 * BLOCK)).past_key_values
    refused(PrefixStore(FakeCache(), identity), past, "another model")


def test_gradients_do_not_matter(torch, model, identity):
    past = model(
        input_ids=torch.tensor([tokens(BLOCK)]), use_cache=True
    ).past_key_values
    assert past.layers[0].keys.requires_grad
    assert PrefixStore(FakeCache(), identity).store(tokens(BLOCK), past) == BLOCK


# ---- documentation ---------------------------------------------------------------


def test_example_of_the_documentation_runs(torch, volume_path, model):
    page = Path(__file__).parents[2] / "docs" / "connectors" / "transformers.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    assert "/nvme/kv.cyc" in code
    code = code.replace("/nvme/kv.cyc", str(volume_path)).replace("4GiB", "64MiB")
    answers = []
    for expected in (0, 256):
        names = {"model": model, "prompt": tokens(260)}
        exec(compile(code, str(page), "exec"), names)
        assert names["reused"] == expected
        answers.append(names["next_token"])
    assert answers[0] == answers[1]
