# SPDX-License-Identifier: Apache-2.0
"""A node of a fleet without an engine: our tier and vLLM's own way from it to the wire.

    python node.py SETTINGS_JSON     {"path": ..., "endpoint": ..., "replay": ...}

Real: the tier, vLLM's tiering manager, its tracker that makes self-describing events,
and its ZMQ publisher.  Played: scheduler and GPU (`vllm_harness.Engine`).  Commands are
JSON lines on standard input, as {"call": name, ...}; each is answered by a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import LookupResult
from vllm_harness import BLOCK, Engine, chain, offloading_config, prompt, tier_options

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # for whatever prints

PRIMARY_ROWS = 16
GROUP = GroupOffloadConfig(
    group_idx=0,
    tokens_per_block=BLOCK,
    tokens_per_chunk=BLOCK,
    hashes_per_chunk=1,
    kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
    sliding_window_size_in_chunks=None,
    kv_cache_spec=None,
    manager_cls=None,
)


class Node:
    """What one engine's scheduler does with its connector, for prompts by number."""

    def __init__(self, settings):
        options = tier_options(
            settings["path"],
            enable_kv_events=True,
            capacity=settings.get("capacity", "64MiB"),
            announce_again_seconds=0,
        )
        self._settings = settings
        self._config = offloading_config(options, events=True, rows=PRIMARY_ROWS)
        self._other = 20_000  # its tokens fit into 32 bits, or the batch is dropped
        self.start()

    def start(self):
        """A new engine on the same volume, whose publisher counts from 0 again."""
        self._engine = Engine(self._config)
        self._tracker = OffloadingEventsTracker(self._engine.spec.kv_events_config)
        self._publisher = ZmqEventPublisher(
            0, self._settings["endpoint"], self._settings["replay"], topic=""
        )
        return {"namespace": self._engine.tier._groups[0].namespace}

    def stop(self):
        self._engine.close()
        self._publisher.shutdown()
        return {}

    def restart(self):
        self.stop()
        return self.start()

    def step(self):
        """The end of a scheduler's step: whatever happened is published."""
        self._engine.step()
        return {"events": self._publish()}

    def store(self, number, blocks):
        """Compute a prompt; it goes to the primary tier and to the volume."""
        keys = self._record(number, 0, blocks, self._tracker.record_store)
        self._engine.store(keys)
        return {"events": self._publish()}

    def load(self, number, blocks):
        """Serve a prompt from what is there; the answer says how many blocks."""
        keys = chain(prompt(number, blocks))
        request = self._engine.begin(keys)
        events, pending = [], True
        while pending:
            hits, pending = 0, False
            for key in keys:
                result = self._engine.manager.lookup(key, request.context)
                if result is LookupResult.MISS:
                    break
                if result is LookupResult.HIT:
                    self._record(number, hits, hits + 1, self._tracker.record_lookup)
                else:
                    pending = True
                hits += 1
            self._engine.step(new=() if pending else [request.context.req_id])
            events += self._publish()
            time.sleep(0.0005)
        self._engine.step()
        events += self._publish()
        self._engine.finish(request)
        return {"hits": hits, "events": events}

    def flood(self):
        """Push everything out of the primary tier: other prompts, each stored."""
        for _ in range(2):
            self._other += 1
            self.store(self._other, PRIMARY_ROWS)
        return {}

    def gpu(self, number, blocks, removed=False):
        """Events of the device's own prefix cache, which the engine would send."""
        hashes = [_event_hash(key) for key in chain(prompt(number, blocks))]
        if removed:
            events = [BlockRemoved(block_hashes=hashes, medium="GPU", group_idx=0)]
        else:
            events = [
                BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=None,
                    token_ids=prompt(number, blocks),
                    block_size=BLOCK,
                    lora_id=None,
                    lora_name=None,
                    medium="GPU",
                    group_idx=0,
                )
            ]
        return {"events": self._publish(events)}

    def reset(self, connector):
        """`reset_prefix_cache`, with `reset_connector` or without."""
        if connector:
            self._engine.forget_primary()
            self._tracker.reset()
        return {"events": self._publish([AllBlocksCleared()])}

    def _record(self, number, first, end, record):
        """Let the tracker see blocks of a request, as the scheduler does."""
        tokens = prompt(number, end)
        keys = chain(tokens)
        hashes = [BlockHash(key[:-4]) for key in keys]
        request = SimpleNamespace(
            block_hashes=hashes, all_token_ids=tokens, lora_request=None
        )
        for index in range(first, end):
            record(request, GROUP, index, keys[index])
        return keys

    def _publish(self, events=()):
        raw, self._engine.events = self._engine.events, []
        events = list(events) + list(self._tracker.take_events(raw))
        if events:
            self._publisher.publish(KVEventBatch(ts=time.time(), events=events))
        return [
            {
                "type": type(event).__name__,
                "medium": getattr(event, "medium", None),
                "locality": getattr(event, "locality", None),
                "ownership": getattr(event, "ownership", None),
                "hashes": list(getattr(event, "block_hashes", ())),
                "parent": getattr(event, "parent_block_hash", None),
                "tokens": list(getattr(event, "token_ids", ())),
                "block_size": getattr(event, "block_size", None),
            }
            for event in events
        ]


def _event_hash(key):
    return maybe_convert_block_hash(BlockHash(key[:-4]))


def main():
    node = Node(json.loads(sys.argv[1]))
    namespace = node._engine.tier._groups[0].namespace
    print(json.dumps({"namespace": namespace}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(node, command.pop("call"))(**command)
        print(json.dumps(answer), file=answers)
    node.stop()


if __name__ == "__main__":
    main()
