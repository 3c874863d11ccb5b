# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Dynamo's selection service, asked what it knows and whom it would choose.

    python selection.py JSON     {"workers": {id: [events, replay]}, "tokens": [...]}

As a program it waits until a worker's row is what `until` says and prints 40 choices:
for settings that the service reads from the environment once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter

os.environ.setdefault("DYN_LOG", "warn")  # read at the import: a line for each choice

from dynamo.llm import SelectionService

MODEL, BLOCK = "m", 32
SECONDS = 20.0


class Selection:
    """The service in this process, with an event loop of its own."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._service = SelectionService(indexer_threads=1)

    def close(self):
        self._service.shutdown()
        self._loop.close()

    def add(self, worker, endpoints, block=BLOCK):
        """Subscribe to a worker."""
        record = {
            "worker_id": worker,
            "model_name": MODEL,
            "endpoint": f"http://worker-{worker}",
            "block_size": block,
            "data_parallel_size": 1,
            "kv_events_endpoints": {0: endpoints[0]},
            "replay_endpoint": endpoints[1],
        }
        self._run(lambda: self._service.upsert_worker(record))

    def remove(self, worker):
        self._run(lambda: self._service.delete_worker(worker))

    def row(self, worker, tokens):
        """Blocks of a prompt that a worker has: on the device, in memory too, on disk
        too.
        """
        request = {"model_name": MODEL, "token_ids": tokens}
        scores = self._run(lambda: self._service.overlap_scores(request))["workers"]
        for item in scores:
            if item["worker_id"] == worker:
                names = ("device_blocks", "host_pinned_blocks", "disk_blocks")
                return tuple(item[name] for name in names)
        return (0, 0, 0)

    def wait(self, worker, tokens, row, nudge=lambda: None):
        """Wait until the row of a worker is `row`; `nudge` makes the worker publish."""
        deadline = time.monotonic() + SECONDS
        while (found := self.row(worker, tokens)) != tuple(row):
            assert time.monotonic() < deadline, f"worker {worker}: {found}, not {row}"
            nudge()
            time.sleep(0.02)

    def choices(self, tokens, count=40):
        """Whom the service selects, how often."""
        request = {"model_name": MODEL, "token_ids": tokens}
        return Counter(
            self._run(lambda: self._service.select(request))["worker_id"]
            for _ in range(count)
        )

    def _run(self, call):
        async def ask():
            return await call()

        return self._loop.run_until_complete(ask())


def main():
    settings = json.loads(sys.argv[1])
    selection = Selection()
    for worker, endpoints in settings["workers"].items():
        selection.add(int(worker), endpoints)
    print(json.dumps("subscribed"), flush=True)
    selection.wait(settings["holder"], settings["tokens"], settings["until"])
    print(json.dumps(selection.choices(settings["tokens"])), flush=True)
    selection.close()


if __name__ == "__main__":
    main()
