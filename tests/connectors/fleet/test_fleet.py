# SPDX-License-Identifier: Apache-2.0
"""Requests follow the blocks: routers steer by what our tier says of its volume.

Two nodes, each with a volume and, where that is allowed, a network namespace of its
own.  No engine: `node.py` is vLLM's own code from the tier to the wire.  Real routers:
NVIDIA Dynamo's selection service in this process, and vllm-router as a proxy.

`make test-connectors` runs this file in the environment of the routers; the nodes run
in vLLM's, whose Python is named by CKV_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("dynamo.llm", reason="needs the routers: make test-connectors")

from network import hosts
from proxy import FakeWorker, Proxy
from selection import BLOCK, Selection

from cyclone_kv import Cache

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
VLLM_PYTHON = os.environ.get("CKV_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python")
BLOCKS = 8
NOTHING, ON_DISK = (0, 0, 0), (0, 0, BLOCKS)

pytestmark = pytest.mark.timeout(180)


class Node:
    """A node as a child process, its volume, and its name for the routers."""

    def __init__(self, worker, host, folder):
        self.worker, self.endpoints = worker, host.connect
        self.volume = folder / f"node{worker}.cyc"
        settings = {
            "path": str(self.volume),
            "endpoint": host.bind[0],
            "replay": host.bind[1],
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long
        self._process = subprocess.Popen(
            [*host.command, VLLM_PYTHON, HERE / "node.py", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ
            | {
                "PYTHONPATH": str(ROOT),
                "VLLM_LOGGING_STREAM": "ext://sys.stderr",
                "VLLM_NO_USAGE_STATS": "1",
            },
        )

    def started(self):
        self.namespace = self._answer()["namespace"]

    def __getattr__(self, name):
        def call(*arguments, **named):
            names = {
                "store": ("number", "blocks"),
                "load": ("number", "blocks"),
                "gpu": ("number", "blocks", "removed"),
                "reset": ("connector",),
            }.get(name, ())
            command = {"call": name} | dict(zip(names, arguments, strict=False)) | named
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            return self._answer()

        return call

    def on_disk_only(self, number, blocks=BLOCKS):
        """Compute a prompt and push it out of memory."""
        events = self.store(number, blocks)["events"]
        self.flood()
        return events

    def keys(self, events):
        """The keys on disk of announced blocks, in the prompt's order."""
        told = {
            tuple(event["tokens"]): event["hashes"][-1]
            for event in events
            if event["medium"] == "STORAGE"
        }
        with Cache.open(self.volume) as cache:
            keys = {int.from_bytes(e.key[-8:], "big"): e.key for e in cache.ls()}
        return [keys[told[tokens]] for tokens in sorted(told)]

    def remove(self, keys):
        """Remove blocks from the volume, as another process of the node."""
        with Cache.open(self.volume, namespace=self.namespace) as cache:
            for key in keys:
                assert cache.remove(key)

    def end(self):
        """Let it end; `close` waits."""
        self._process.stdin.close()

    def close(self):
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._log.close()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the node ended:\n{self._log.read()[-4000:]}")
        return json.loads(line)


@pytest.fixture(scope="module")
def folder():
    parent = Path("/dev/shm")
    if not parent.is_dir() or shutil.disk_usage(parent).free < 1 << 30:
        parent = None
    with tempfile.TemporaryDirectory(prefix="ckv-fleet-", dir=parent) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def nodes(folder):
    with hosts(2, folder) as places:
        found = []
        try:
            for worker, host in enumerate(places, 1):
                found.append(Node(worker, host, folder))
            for node in found:
                node.started()
            yield found
        finally:
            for node in found:
                node.end()
            for node in found:
                node.close()


@pytest.fixture(scope="module")
def selection(nodes):
    service = Selection()
    for node in nodes:
        service.add(node.worker, node.endpoints)
        meet(service, node)
    yield service
    service.close()


_numbers = iter(range(10, 1000))


@pytest.fixture
def number():
    """A prompt that no other test uses."""
    return next(_numbers)


def prompt(number, blocks=BLOCKS):
    return [number * 100_000 + i for i in range(blocks * BLOCK)]


def meet(service, node):
    """Publish until a new subscriber has heard of it: its first batches may be lost."""
    marker = next(_numbers)
    service.wait(node.worker, prompt(marker, 1), (1, 1, 1), lambda: node.gpu(marker, 1))


def both(nodes, holder):
    return nodes[holder], nodes[1 - holder]


# ---- the blocks decide --------------------------------------------------------------


@pytest.mark.parametrize("holder", [0, 1])
def test_selections_follow_the_blocks_on_disk(nodes, selection, number, holder):
    node, other = both(nodes, holder)
    tokens = prompt(number)
    assert len(selection.choices(tokens, 60)) == 2  # by chance: all 60 the same, 2^-59
    events = node.on_disk_only(number)
    selection.wait(node.worker, tokens, ON_DISK)
    assert selection.row(other.worker, tokens) == NOTHING
    assert selection.choices(tokens) == {node.worker: 40}
    assert len(selection.choices(prompt(number + 5000), 60)) == 2

    node.remove(node.keys(events))
    selection.wait(node.worker, tokens, NOTHING, node.step)
    assert len(selection.choices(tokens, 60)) == 2


def test_without_credit_for_disks_the_same_blocks_decide_nothing(
    nodes, selection, number
):
    """The control: one variable of the router, and the choice is free again."""
    tokens = prompt(number)
    nodes[0].on_disk_only(number)
    selection.wait(nodes[0].worker, tokens, ON_DISK)
    answers = {}
    for weight in ("0", "0.25"):
        answers[weight] = elsewhere(nodes, nodes[0], tokens, weight)
    assert len(answers["0"]) == 2
    assert answers["0.25"] == {"1": 40}


def elsewhere(nodes, holder, tokens, weight):
    """40 choices of another service, which joins late and has everything replayed."""
    settings = {
        "workers": {node.worker: node.endpoints for node in nodes},
        "holder": holder.worker,
        "tokens": tokens,
        "until": ON_DISK,
    }
    child = subprocess.Popen(
        [sys.executable, HERE / "selection.py", json.dumps(settings)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"DYN_ROUTER_DISK_CACHE_HIT_WEIGHT": weight},
    )
    with child:
        assert json.loads(child.stdout.readline()) == "subscribed"
        deadline = time.monotonic() + 20
        marker = next(_numbers)
        while child.poll() is None and time.monotonic() < deadline:
            for node in nodes:
                node.gpu(marker, 1)
            time.sleep(0.1)
        child.kill()
        return Counter(json.loads(child.stdout.readline()))


def test_a_subscriber_that_joins_late_has_everything_replayed(nodes, number):
    tokens = prompt(number)
    nodes[1].on_disk_only(number)
    service = Selection()
    service.add(nodes[1].worker, nodes[1].endpoints)
    meet(service, nodes[1])
    service.wait(nodes[1].worker, tokens, ON_DISK)
    service.close()


def test_a_prefix_ends_at_the_first_hole(nodes, selection, number):
    node = nodes[0]
    keys = node.keys(node.on_disk_only(number))
    node.remove(keys[3:4])
    selection.wait(node.worker, prompt(number), (0, 0, 3), node.step)


def test_blocks_on_disk_continue_a_prefix_in_memory(nodes, selection, number):
    node = nodes[0]
    keys = node.keys(node.on_disk_only(number))
    node.remove(keys[:4])
    node.gpu(number, 4)
    selection.wait(node.worker, prompt(number), (4, 4, BLOCKS), node.step)


def test_much_on_disk_beats_little_in_memory_and_less_does_not(
    nodes, selection, number
):
    """By default a block on disk counts as a quarter of one in the device's memory."""
    holder, other = nodes
    tokens = prompt(number)
    holder.on_disk_only(number)
    selection.wait(holder.worker, tokens, ON_DISK)
    other.gpu(number, 1)
    selection.wait(other.worker, tokens, (1, 1, 1))
    assert selection.choices(tokens) == {holder.worker: 40}
    other.gpu(number, 3)
    selection.wait(other.worker, tokens, (3, 3, 3))
    assert selection.choices(tokens) == {other.worker: 40}


def test_what_another_process_evicts_leaves_the_index(nodes, selection, number):
    node = nodes[1]
    node.on_disk_only(number)
    selection.wait(node.worker, prompt(number), ON_DISK)
    block = bytes(64 << 10)
    with Cache.open(node.volume, namespace="somebody else") as cache:
        for lap in range(3):
            for index in range(1000):
                cache.put(f"{lap} {index}".encode().ljust(32), block)
    selection.wait(node.worker, prompt(number), NOTHING, node.step)


# ---- the shape ----------------------------------------------------------------------


def test_events_are_of_the_shape_that_routers_take(nodes, number):
    """Each of these makes one of the routers drop an event without a word."""
    node = nodes[0]
    events = node.store(number, BLOCKS)["events"]
    stored = [event for event in events if event["medium"] == "STORAGE"]
    assert len(stored) == BLOCKS
    tokens = prompt(number)
    by_tokens = {tuple(event["tokens"]): event for event in stored}
    parent = None
    for start in range(0, len(tokens), BLOCK):
        event = by_tokens[tuple(tokens[start : start + BLOCK])]
        assert event["type"] == "BlockStored"
        assert (event["ownership"], event["locality"]) == (None, "LOCAL")
        assert event["block_size"] == BLOCK
        assert event["parent"] == parent
        (parent,) = event["hashes"]
        assert isinstance(parent, int)
    node.remove(node.keys(events)[:1])
    (gone,) = node.step()["events"]
    assert (gone["type"], gone["medium"]) == ("BlockRemoved", "STORAGE")
    assert (gone["ownership"], gone["locality"]) == (None, "LOCAL")
    assert gone["hashes"] == by_tokens[tuple(tokens[:BLOCK])]["hashes"]


# ---- resets and restarts ------------------------------------------------------------


@pytest.mark.parametrize("connector", [False, True])
def test_after_a_reset_blocks_on_disk_come_back_into_the_index(
    nodes, selection, number, connector
):
    node = nodes[0]
    tokens = prompt(number)
    node.on_disk_only(number)
    selection.wait(node.worker, tokens, ON_DISK)
    node.reset(connector)
    selection.wait(node.worker, tokens, NOTHING)
    assert node.load(number, BLOCKS)["hits"] == BLOCKS
    node.flood()
    selection.wait(node.worker, tokens, ON_DISK)
    assert selection.choices(tokens) == {node.worker: 40}


def test_after_a_reset_blocks_that_are_in_memory_too_come_back(
    nodes, selection, number
):
    """The reset spares the connector: no call tells the tier, and nothing is loaded."""
    node = nodes[0]
    node.store(number, BLOCKS)
    selection.wait(node.worker, prompt(number), (0, BLOCKS, BLOCKS))
    node.reset(False)
    selection.wait(node.worker, prompt(number), NOTHING)
    assert node.load(number, BLOCKS)["hits"] == BLOCKS
    selection.wait(node.worker, prompt(number), ON_DISK)


def test_after_a_restart_blocks_on_disk_come_back_and_removals_are_told(
    nodes, selection, number
):
    node = nodes[0]
    tokens = prompt(number)
    keys = node.keys(node.on_disk_only(number))
    selection.wait(node.worker, tokens, ON_DISK)
    node.restart()
    # Its events count from 0 again, and the service would drop them as old ones.
    selection.remove(node.worker)
    selection.add(node.worker, node.endpoints)
    meet(selection, node)
    assert selection.row(node.worker, tokens) == NOTHING
    assert node.load(number, BLOCKS)["hits"] == BLOCKS
    node.flood()
    selection.wait(node.worker, tokens, ON_DISK)
    assert selection.choices(tokens) == {node.worker: 40}
    node.remove(keys)
    selection.wait(node.worker, tokens, NOTHING, node.step)


# ---- vllm-router --------------------------------------------------------------------


def test_a_proxy_forwards_to_the_node_that_has_the_blocks(nodes, number):
    """Where nobody has anything, one worker wins: the blocks are on the other one."""
    tokens = prompt(number)
    with FakeWorker() as first, FakeWorker() as second:
        workers = [first, second]
        with Proxy(workers, [node.endpoints for node in nodes]) as proxy:
            before = proxy.ask(prompt(next(_numbers)), 20)
            holder = before.index(min(before))
            node, mine = nodes[holder], [int(i == holder) for i in range(2)]
            marker = next(_numbers)
            assert proxy.until(prompt(marker), mine, lambda: node.gpu(marker, BLOCKS))
            events = node.on_disk_only(number)
            assert proxy.until(tokens, mine)
            assert proxy.ask(tokens, 20) == [20 * share for share in mine]
            node.remove(node.keys(events))
            node.step()
            assert proxy.until(tokens, mine[::-1])
            assert proxy.ask(tokens, 20)[holder] < 20
