# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines over real LMCache servers, with our L2 adapter, on the CPU.

As `test_engine.py`, with a server in front of each engine: `story` starts four engines
and three servers, at most two of each at a time.  Reuse comes from the volume and from
nowhere else, since the L1 of a server is in its own memory and each server that is
asked to reuse has seen nothing before.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-connectors")
pytest.importorskip("lmcache", reason="needs LMCache: make test-connectors")

from engines import ROOT, Engine
from lmcache_server import CHUNK, Server
from test_engine import ANSWER, DOCUMENT, flip, folder, model, prompts, same

from cyclone_kv import Cache

__all__ = ["folder", "model", "prompts"]  # fixtures

DAMAGED = 10  # the damaged chunk of document 2

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def story(model, prompts, folder):
    volume = folder / "lmcache.cyc"
    adapter = {
        "type": "plugin",
        "module_path": "cyclone_kv.connectors.lmcache",
        "class_name": "CycloneL2Adapter",
        "adapter_params": {"path": str(volume), "capacity": "512MiB"},
    }
    said = SimpleNamespace()

    with Engine(model) as engine:
        said.alone_first = engine.generate(prompts.first, ANSWER)
        said.alone_second = engine.generate(prompts.second, ANSWER)

    # Two servers with an engine each, one volume.
    with Server(adapter) as server, Engine(model, lmcache_port=server.port) as first:
        said.stored_first = first.generate(prompts.first, ANSWER)
        first.flush()
        settle(volume, DOCUMENT // CHUNK)
        with (
            Server(adapter) as beside,
            Engine(model, lmcache_port=beside.port) as other,
        ):
            said.other_first = other.generate(prompts.first, ANSWER)
            said.stored_second = other.generate(prompts.second, ANSWER)
            other.flush()
            settle(volume, 2 * DOCUMENT // CHUNK)
            said.back_second = first.generate(prompts.second, ANSWER)
        said.server_log = server.output()

    # All are gone.  A new pair finds document 1 whole and document 2 damaged.
    said.damaged_key = damage(volume, prompts.second, model)
    with Server(adapter) as server, Engine(model, lmcache_port=server.port) as engine:
        said.again_first = engine.generate(prompts.first, ANSWER)
        said.damaged_second = engine.generate(prompts.second, ANSWER)
        engine.flush()
        settle(volume, 2 * DOCUMENT // CHUNK)
        said.log = server.output()
    with Cache.open(volume) as cache:
        said.stored_anew = said.damaged_key in {entry.key for entry in cache.ls()}
        said.verify = cache.verify()
    keep(said)
    return said


def test_run_1_stores_and_answers_as_without_a_connector(story):
    assert story.stored_first["cached"] == 0
    assert same(story.stored_first) == same(story.alone_first)


def test_run_2_restarted_reuses_every_whole_chunk_with_equal_answers(story):
    assert story.again_first["cached"] == DOCUMENT
    assert same(story.again_first) == same(story.alone_first)


def test_run_3_a_damaged_chunk_shortens_the_reuse_and_keeps_the_answer(story):
    assert "failed its checksum" in story.log
    assert story.damaged_second["cached"] == DAMAGED * CHUNK
    assert story.damaged_second["tokens"] == story.alone_second["tokens"]
    # Other steps, other roundings.
    assert story.damaged_second["logprobs"] == pytest.approx(
        story.alone_second["logprobs"], abs=1e-3
    )


def test_run_3_the_damaged_chunk_is_stored_anew(story):
    assert story.stored_anew
    assert story.verify.ok, story.verify


def test_two_engines_on_one_volume_reuse_each_others_chunks(story):
    assert story.other_first["cached"] == DOCUMENT
    assert same(story.other_first) == same(story.alone_first)
    assert story.stored_second["cached"] == 0
    assert same(story.stored_second) == same(story.alone_second)
    assert story.back_second["cached"] == DOCUMENT
    assert same(story.back_second) == same(story.alone_second)


def test_start_up_lines_say_where_how_much_and_whose(story):
    for part in ("lmcache.cyc", "free beside it", "mode rw", "capacity 512.0 MiB"):
        assert part in story.server_log
    for part in (
        "identity cyclone_kv/1/lmcache/",
        "SmolLM2-135M",
        "float32",
        "sampled:",
    ):
        assert part in story.server_log


# ---- helpers ------------------------------------------------------------------------


def settle(volume, chunks, timeout=60.0):
    """Wait until the volume holds so many chunks."""
    deadline = time.monotonic() + timeout
    with Cache.open(volume) as cache:
        while (count := sum(1 for _ in cache.ls())) < chunks:
            assert time.monotonic() < deadline, f"{count} of {chunks} chunks"
            time.sleep(0.1)


def damage(volume, prompt, model):
    """Flip bits in a chunk of a prompt; return its key, LMCache's own hash."""
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    key = TokenHasher(CHUNK).compute_chunk_hashes(prompt)[DAMAGED]
    with Cache.open(volume) as cache:
        (place,) = [entry.offset for entry in cache.ls() if entry.key == key]
    flip(volume, place, 32 << 10)
    return key


def keep(said):
    """Leave the answers in build/lmcache-engines.json, for people."""
    answers = {name: value for name, value in vars(said).items() if type(value) is dict}
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build/lmcache-engines.json").write_text(json.dumps(answers, indent=1))
