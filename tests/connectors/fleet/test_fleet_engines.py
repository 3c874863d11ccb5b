# SPDX-License-Identifier: Apache-2.0
"""Requests follow the blocks with real engines: two of vLLM on the CPU, a volume each.

`story` starts both, drives them through resets, a restart and an eviction, and notes
what NVIDIA Dynamo's selection service said; the tests look at the notes.  Rows are
blocks in the device's memory, in the primary tier too, on disk too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("dynamo.llm", reason="needs the routers: make test-connectors")

from selection import BLOCK, Selection

from cyclone_kv import Cache

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm_engine"))
from engines import ROOT, Engine

BLOCKS, ANSWER = 6, 8
NOTHING, ON_DISK = (0, 0, 0), (0, 0, BLOCKS)
ALL = (BLOCKS,) * 3

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location(
        "prepare", ROOT / "examples/demo/prepare.py"
    )
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    folder = prepare.models_folder() / prepare.MODEL_NAME
    if not prepare.is_prepared(folder):
        pytest.fail(f"{folder} is missing: run examples/demo/prepare.py")
    return folder


@pytest.fixture(scope="module")
def folder():
    parent = Path(os.environ.get("CKV_TEST_DISK", ROOT / "build" / "volumes"))
    parent.mkdir(parents=True, exist_ok=True)
    path = parent / f"fleet-{os.getpid()}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Replica:
    """An engine with a volume of its own, as a worker of the selection service."""

    def __init__(self, worker, model, folder):
        self.worker, self._model = worker, model
        self.volume = folder / f"replica{worker}.cyc"
        self.endpoints = [f"ipc://{folder}/{name}{worker}" for name in ("e", "r")]
        self._random = random.Random(worker)

    def start(self):
        tier = {
            "type": "CycloneTier",
            "module_path": "cyclone_kv.connectors.vllm",
            "path": str(self.volume),
            "capacity": "512MiB",
            "enable_kv_events": True,
            "announce_again_seconds": 0,
        }
        self.engine = Engine(
            self._model,
            [tier],
            events=self.endpoints[0],
            replay=self.endpoints[1],
            device_blocks=24,
            max_model_len=512,
            primary_bytes=48 << 20,
        )

    def stop(self):
        self.engine.__exit__()

    def join(self, service):
        service.add(self.worker, self.endpoints)
        marker = self.other()
        service.wait(self.worker, marker[:BLOCK], (1, 1, 1), lambda: self.serve(marker))

    def serve(self, tokens):
        return self.engine.generate(tokens, ANSWER)

    def step(self):
        """An idle engine sends no events."""
        self.engine.generate([1, 5, 6], 2)

    def flood(self):
        """Push everything out of the device's memory and the primary tier."""
        for _ in range(10):
            self.serve(self.other())

    def other(self):
        return [self._random.randrange(1000, 40_000) for _ in range(200)]

    def keys(self):
        with Cache.open(self.volume) as cache:
            return {entry.key for entry in cache.ls()}

    def remove(self, keys):
        namespace = re.search(r"identity (cyclone_kv/\S+)", self.engine.output())[1]
        with Cache.open(self.volume, namespace=namespace) as cache:
            for key in keys:
                assert cache.remove(key)


@pytest.fixture(scope="module")
def story(model, folder):
    seed = int(os.environ.get("CKV_SEED", "7"))
    print("seed", seed)
    chance = random.Random(seed)
    prompt, unrelated = (
        [chance.randrange(1000, 40_000) for _ in range(200)] for _ in range(2)
    )
    replicas = [Replica(worker, model, folder) for worker in (1, 2)]
    first, second = replicas
    service, said = Selection(), SimpleNamespace(rows={}, choices={})

    def note(name, row):
        """Wait for the second replica's row; note both rows and 30 choices."""
        service.wait(second.worker, prompt, row, second.step)
        said.rows[name] = [service.row(r.worker, prompt) for r in replicas]
        said.choices[name] = service.choices(prompt, 30)

    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Replica.start, replicas))
        for replica in replicas:
            replica.join(service)
        note("start", NOTHING)
        before = second.keys()
        said.stored = second.serve(prompt)
        note("served", ALL)
        keys = second.keys() - before
        second.flood()
        note("on disk only", ON_DISK)
        said.unrelated = service.choices(unrelated, 60)
        said.back = second.serve(prompt)

        for connector in (False, True):
            second.engine.ask(reset=True, connector=connector)
            note(f"reset {connector}", NOTHING)
            said.back_after_reset = second.serve(prompt)
            second.flood()
            note(f"reset {connector}, used", ON_DISK)

        second.stop()
        second.start()
        service.remove(second.worker)
        second.join(service)
        note("restarted", NOTHING)
        said.back_after_restart = second.serve(prompt)
        second.flood()
        note("restarted, used", ON_DISK)

        second.remove(keys)
        note("removed", NOTHING)
        said.elsewhere = first.serve(prompt)
        yield said
    finally:
        service.close()
        for replica in replicas:
            if hasattr(replica, "engine"):
                replica.stop()
        notes = {name: str(value) for name, value in vars(said).items()}
        (ROOT / "build/fleet-engines.json").write_text(json.dumps(notes, indent=1))


def test_the_request_goes_where_the_blocks_are_on_disk(story):
    assert story.rows["on disk only"] == [NOTHING, ON_DISK]
    assert story.choices["on disk only"] == {2: 30}
    assert len(story.unrelated) == 2


def test_there_it_reuses_every_block_and_elsewhere_none_with_equal_tokens(story):
    assert story.back["cached"] == BLOCKS * BLOCK
    assert story.elsewhere["cached"] == 0
    assert story.back["tokens"] == story.stored["tokens"] == story.elsewhere["tokens"]


@pytest.mark.parametrize("connector", [False, True])
def test_a_reset_hides_the_blocks_until_their_next_use(story, connector):
    assert story.back_after_reset["cached"] == BLOCKS * BLOCK
    assert story.rows[f"reset {connector}, used"] == [NOTHING, ON_DISK]
    assert story.choices[f"reset {connector}, used"] == {2: 30}


def test_a_restart_hides_the_blocks_until_their_next_use(story):
    assert story.back_after_restart["cached"] == BLOCKS * BLOCK
    assert story.back_after_restart["tokens"] == story.stored["tokens"]
    assert story.rows["restarted, used"] == [NOTHING, ON_DISK]
    assert story.choices["restarted, used"] == {2: 30}


def test_what_another_process_removed_is_no_reason_to_go_there(story):
    assert story.rows["removed"] == [NOTHING, NOTHING]
    assert len(story.choices["removed"]) == 2  # by chance all 30 the same: 2^-29
