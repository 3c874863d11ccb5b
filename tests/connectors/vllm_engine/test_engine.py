# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines with a real model, on the CPU: what the tier promises, end to end.

`story` starts five engines, at most two at a time, and notes what they answered; the
tests look at the notes.  The model is SmolLM2-135M in float32.  Documents are 1 024
tokens, computed in steps of 512: a reuse that ends where a step ends leaves the same
arithmetic to be done, so tokens and logprobs are compared with ``==``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import time
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-connectors")

from engines import ROOT, Engine

from cyclone_kv import Cache

DOCUMENT, BLOCK = 1024, 32
DAMAGED = 20  # the damaged block, of document 2 in our tier, of document 1 in `fs`
ANSWER = 8

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location(
        "prepare", ROOT / "examples/demo/prepare.py"
    )
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    folder = prepare.models_folder() / prepare.MODEL_NAME
    if not prepare.is_prepared(folder):
        reason = f"{folder} is missing: run examples/demo/prepare.py"
        if os.environ.get("CKV_ENGINES"):
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="module")
def prompts(model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(" ".join(topics.values())[:40_000]).input_ids
    question = tokenizer("\n\nIn short, the text above says that").input_ids
    return SimpleNamespace(
        first=ids[:DOCUMENT] + question,
        second=ids[DOCUMENT : 2 * DOCUMENT] + question,
        third=ids[2 * DOCUMENT : 2 * DOCUMENT + 100],
    )


@pytest.fixture(scope="module")
def folder():
    parent = Path(os.environ.get("CKV_TEST_DISK", ROOT / "build" / "volumes"))
    parent.mkdir(parents=True, exist_ok=True)
    path = parent / f"engines-{os.getpid()}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def story(model, prompts, folder):
    volume, files = folder / "kv.cyc", folder / "fs"
    ours = {
        "type": "CycloneTier",
        "module_path": "cyclone_kv.connectors.vllm",
        "path": str(volume),
        "capacity": "512MiB",
        "enable_kv_events": True,
    }
    fs = {"type": "fs", "root_dir": str(files), "n_read_threads": 2}
    said = SimpleNamespace()
    said.first, said.second, said.third = (
        keys_of(prompt) for prompt in vars(prompts).values()
    )

    with Engine(model) as engine:
        said.alone_first = engine.generate(prompts.first, ANSWER)
        said.alone_second = engine.generate(prompts.second, ANSWER)

    # Two engines, one volume.  The first one also feeds vLLM's own tier.
    with Engine(model, [ours, fs]) as first:
        said.stored_first = first.generate(prompts.first, ANSWER)
        first.flush()
        endpoint = f"ipc://{folder}/events"
        with EventLog(endpoint) as log, Engine(model, [ours], events=endpoint) as other:
            said.other_first = other.generate(prompts.first, ANSWER)
            said.stored_second = other.generate(prompts.second, ANSWER)
            other.generate(prompts.third, ANSWER)
            other.flush()
            said.back_second = first.generate(prompts.second, ANSWER)
            said.back_third = first.generate(prompts.third, ANSWER)
            said.start_line = start_line(other)
            remove(volume, said.start_line, said.third[1])
            other.flush()
            said.metrics = other.ask(metrics=True)
            said.events = log.read()

    # Both are gone.  A new engine finds document 1 whole and document 2 damaged.
    flip(volume, place_of(volume, said.second[DAMAGED]), 32 << 10)
    with Engine(model, [ours]) as engine:
        said.again_first = engine.generate(prompts.first, ANSWER)
        said.damaged_second = engine.generate(prompts.second, ANSWER)
        engine.flush()
        said.log = engine.output()
    with Cache.open(volume) as cache:
        keys = {entry.key for entry in cache.ls()}
        said.stored_anew = said.second[DAMAGED] in keys
        said.verify = cache.verify()

    # The same damage to the same tensor bytes in vLLM's own tier.
    (file,) = files.rglob(f"{said.first[DAMAGED].hex()}.bin")
    flip(file, 0, 32 << 10)
    with Engine(model, [fs]) as engine:
        said.fs_damaged_first = engine.generate(prompts.first, ANSWER)
    keep(said)
    return said


def same(answer):
    return answer["tokens"], answer["logprobs"]


def test_run_1_stores_and_answers_as_without_a_connector(story):
    assert story.stored_first["cached"] == 0
    assert same(story.stored_first) == same(story.alone_first)


def test_run_2_restarted_reuses_every_whole_block_with_equal_answers(story):
    assert story.again_first["cached"] == DOCUMENT
    assert same(story.again_first) == same(story.alone_first)


def test_run_3_a_damaged_block_shortens_the_reuse_and_keeps_the_answer(story):
    assert "failed its checksum" in story.log
    assert story.damaged_second["cached"] == DAMAGED * BLOCK
    assert story.damaged_second["tokens"] == story.alone_second["tokens"]
    # Other steps, other roundings.
    assert story.damaged_second["logprobs"] == pytest.approx(
        story.alone_second["logprobs"], abs=1e-3
    )


def test_run_3_the_damaged_block_is_stored_anew(story):
    assert story.stored_anew
    assert story.verify.ok, story.verify


def test_the_engines_own_tier_answers_wrongly_after_the_same_damage(story):
    assert story.fs_damaged_first["cached"] == DOCUMENT
    assert story.fs_damaged_first["tokens"] != story.alone_first["tokens"]


def test_two_engines_on_one_volume_reuse_each_others_blocks(story):
    assert story.other_first["cached"] == DOCUMENT
    assert same(story.other_first) == same(story.alone_first)
    assert story.stored_second["cached"] == 0
    assert same(story.stored_second) == same(story.alone_second)
    assert story.back_second["cached"] == DOCUMENT
    assert same(story.back_second) == same(story.alone_second)


def test_i7_what_is_matched_is_every_whole_block_and_no_more(story, prompts):
    assert len(prompts.third) % BLOCK
    assert story.back_third["cached"] == len(prompts.third) // BLOCK * BLOCK


def test_start_up_line_says_where_how_much_and_whose(story):
    for part in ("kv.cyc", "free beside it", "mode rw", "capacity 512.0 MiB"):
        assert part in story.start_line
    for part in ("identity cyclone_kv/1/vllm/", "SmolLM2-135M", "float32", "sampled:"):
        assert part in story.start_line


def test_metrics_come_through_the_engine(story):
    named = {
        name.removeprefix("vllm:kv_offload_cyclone_"): value
        for name, value in story.metrics.items()
        if "cyclone" in name
    }
    assert named["loaded_chunks"] >= DOCUMENT // BLOCK
    assert named["stored_chunks"] >= DOCUMENT // BLOCK
    assert named["hits"] >= DOCUMENT // BLOCK
    assert named["announced_chunks"] >= 2 * DOCUMENT // BLOCK
    assert named["capacity_bytes"] == 512 << 20
    assert named.get("faults", 0) == 0


def storage_events(story, kind):
    return [
        event
        for event in story.events
        if type(event).__name__ == kind and event.medium == "STORAGE"
    ]


def test_stored_and_loaded_blocks_are_announced_with_their_tokens(story, prompts):
    told = {}
    for event in storage_events(story, "BlockStored"):
        assert (event.ownership, event.locality) == (None, "LOCAL")
        assert event.block_size == BLOCK
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        told[event.block_hashes[-1]] = list(event.token_ids)
    for name, prompt in vars(prompts).items():
        for index, key in enumerate(getattr(story, name)):
            tokens = prompt[index * BLOCK : (index + 1) * BLOCK]
            assert told[event_hash(key)] == tokens


def test_a_block_that_another_process_removed_is_announced_as_gone(story):
    gone = [
        block
        for event in storage_events(story, "BlockRemoved")
        for block in event.block_hashes
    ]
    assert gone == [event_hash(story.third[1])]


# ---- helpers ------------------------------------------------------------------------


def keep(said):
    """Leave the answers in build/vllm-engines.json, for people."""
    answers = {name: value for name, value in vars(said).items() if type(value) is dict}
    answers["start_line"] = said.start_line
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build/vllm-engines.json").write_text(json.dumps(answers, indent=1))


class EventLog:
    """Subscribes to an engine's KV events."""

    def __init__(self, endpoint):
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)

    def read(self, seconds=2.0):
        """Every event so far, in order."""
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        events, deadline = [], time.monotonic() + seconds
        while self._socket.poll(max(0, deadline - time.monotonic()) * 1000):
            events += decode(self._socket.recv_multipart()[-1]).events
        return events

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)


def keys_of(prompt):
    """The keys of a prompt's blocks: the engine's hashes, by its own functions."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(sha256_cbor)
    parent, keys = None, []
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        parent = kv_cache_utils.hash_block_tokens(
            sha256_cbor, parent, prompt[start : start + BLOCK], None
        )
        keys.append(bytes(parent))
    return keys


def event_hash(key):
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    return maybe_convert_block_hash(BlockHash(key))


def start_line(engine):
    return next(line for line in engine.output().splitlines() if "mode rw" in line)


def remove(volume, start_line, key):
    namespace = re.search(r"identity (cyclone_kv/\S+)", start_line)[1]
    with Cache.open(volume, namespace=namespace) as cache:
        assert cache.remove(key)


def place_of(volume, key):
    with Cache.open(volume) as cache:
        (entry,) = [entry for entry in cache.ls() if entry.key == key]
        return entry.offset


def flip(path, offset, nbytes):
    """Turn over a bit in the exponent of each float32 of a stretch."""
    with open(path, "r+b") as file:
        file.seek(offset)
        data = bytearray(file.read(nbytes))
        data[3::4] = bytes(byte ^ 0x04 for byte in data[3::4])
        file.seek(offset)
        file.write(data)
