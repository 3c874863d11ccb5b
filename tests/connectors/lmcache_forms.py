# SPDX-License-Identifier: Apache-2.0
"""How much a `native_plugin` of LMCache could save, at most.  Run by hand:

    .venv-vllm/bin/python tests/connectors/lmcache_forms.py

LMCache wraps a native client into its own `NativeConnectorL2Adapter`: Python that
spells out keys, keeps tables, and passes completions on from a thread.  Here it wraps
a client that does nothing at all and is done at once.  What that takes is the least
that any native form of ours could take; our adapter does its work beside it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import (  # noqa: E402
    NativeConnectorL2Adapter,
)
from lmcache_harness import L2, filled, object_key, wait  # noqa: E402

OBJECTS, CALLS, ROUNDS = 16, 200, 15


class Nothing:
    """A native client whose work is done before it is handed over."""

    def __init__(self):
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._next, self._done = 0, []

    def event_fd(self):
        return self._fd

    def _finish(self, answers):
        self._next += 1
        self._done.append((self._next, True, "", answers))
        os.eventfd_write(self._fd, 1)
        return self._next

    def submit_batch_get(self, keys, buffers):
        return self._finish([True] * len(keys))

    def submit_batch_set(self, keys, buffers):
        return self._finish(None)

    def submit_batch_exists(self, keys):
        return self._finish([True] * len(keys))

    def drain_completions(self):
        done, self._done = self._done, []
        return done

    def close(self):
        pass


def time_calls(adapter, driver, keys, objects):
    """Return the microseconds of a lookup and of a load, medians over rounds."""
    lookups, loads = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            assert len(L2.lookup(driver, keys)) == OBJECTS
        lookups.append(time.perf_counter() - started)
        started = time.perf_counter()
        for _ in range(CALLS):
            task = adapter.submit_load_task(keys, objects)
            fd = adapter.get_load_event_fd()
            wait(fd, lambda task=task: adapter.query_load_result(task))
        loads.append(time.perf_counter() - started)
    return [
        (statistics.median(times) / CALLS * 1e6, min(times) / CALLS * 1e6)
        for times in (lookups, loads)
    ]


def main():
    keys = [object_key(i) for i in range(OBJECTS)]
    objects = [filled(key) for key in keys]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with L2(Path(folder) / "kv.cyc") as driver:
            driver.store(keys, objects=objects)
            ours = time_calls(driver.adapter, driver, keys, objects)
        driver = L2.__new__(L2)
        driver.adapter = NativeConnectorL2Adapter(Nothing())
        native = time_calls(driver.adapter, driver, keys, objects)
        driver.adapter.close()
    size = objects[0].get_size() >> 10
    print(f"{OBJECTS} objects of {size} KiB; us: median, least of {ROUNDS} x {CALLS}")
    for name, mine, theirs in zip(("lookup", "load"), ours, native, strict=True):
        print(
            f"{name:7} our plugin {mine[0]:7.1f} {mine[1]:7.1f}    "
            f"a native client that does nothing {theirs[0]:7.1f} {theirs[1]:7.1f}"
        )


if __name__ == "__main__":
    main()
