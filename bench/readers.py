# SPDX-License-Identifier: Apache-2.0
"""Several processes that read one store, each with a handle of its own.

The rate is the sum of the operations of all, over the mean of their times. A child is
told which store, opens it, says "ready", and runs what it is told when it is told, so
that all run at once; this module is also what the child runs.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import generators
from bench.dataset import CHECK_EVERY, ZIPF_DRAWS, Dataset, buffers
from bench.stores import Store, StoreError, store_type
from cyclone_kv import _core

__all__ = ["measure"]

_ROOT = Path(__file__).resolve().parent.parent


def measure(
    store: Store,
    data: Dataset,
    processes: int,
    *,
    warm_up_seconds: float,
    seconds: float,
) -> tuple[float, float]:
    """Return copies a second and looked-at views a second, of all together."""
    about = {
        "store": store.name,
        "folder": str(store.folder.parent),
        "count": data.count,
        "nbytes": data.nbytes,
        "capacity": getattr(store, "capacity", None),
        "checksums": data.checksums,
        "touched_checksums": data.touched_checksums,
        "warm_up_seconds": warm_up_seconds,
        "seconds": seconds,
    }
    children = []
    try:
        for number in range(processes):
            child = subprocess.Popen(
                [sys.executable, "-m", "bench.readers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=_ROOT,
                env=os.environ | {"PYTHONPATH": str(_ROOT)},
            )
            children.append(child)
            _tell(child, {**about, "number": number})
        for child in children:
            _hear(child)
        rates = []
        for kind in ("copy", "view"):
            for child in children:
                _tell(child, kind)
            answers = [_hear(child) for child in children]
            operations = sum(answer["operations"] for answer in answers)
            total = sum(answer["seconds"] for answer in answers)
            rates.append(operations / (total / len(answers)))
        for child in children:
            _tell(child, "end")
            if child.wait(timeout=60) != 0:
                raise StoreError("a reading process failed")
        return rates[0], rates[1]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.communicate()


def _tell(child: subprocess.Popen[str], what: Any) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(what) + "\n")
    child.stdin.flush()


def _hear(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise StoreError("a reading process failed")
    return json.loads(line)


class _Reader:
    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        count, nbytes = about["count"], about["nbytes"]
        kind = store_type(about["store"])
        self.store = kind(Path(about["folder"]), count, nbytes)
        if about["capacity"] is not None:
            vars(self.store)["capacity"] = about["capacity"]
        self.keys = [generators.key(index) for index in range(count)]
        order = generators.zipf_order(count, about["number"], ZIPF_DRAWS)
        self.order = itertools.cycle(order)
        self.target = buffers(1, nbytes, self.store.target_alignment)[0]

    def copy(self, index: int) -> bool:
        return self.store.get_into(self.keys[index], self.target) is not None

    def view(self, index: int) -> bool:
        self.touched = self.store.view_touch(self.keys[index])
        return self.touched is not None

    def right(self, kind: str, index: int) -> bool:
        if kind == "copy":
            return _core.crc32c(self.target) == int(self.about["checksums"][index])
        found = _core.crc32c(self.touched or b"")
        return found == int(self.about["touched_checksums"][index])

    def run(self, kind: str, seconds: float) -> dict[str, float]:
        operation = self.copy if kind == "copy" else self.view
        step = 1 if kind == "copy" and self.about["nbytes"] >= 1 << 20 else 16
        clock = time.perf_counter
        done, excluded = 0, 0.0
        begin = now = clock()
        while now - begin < seconds:
            for index in itertools.islice(self.order, step):
                if not operation(index):
                    raise StoreError("a block is missing")
                done += 1
                if done % CHECK_EVERY == 0:
                    stopped = clock()
                    if not self.right(kind, index):
                        raise StoreError(f"block {index} came back with other bytes")
                    excluded += clock() - stopped
            now = clock()
        return {"operations": done, "seconds": now - begin - excluded}


def _main() -> None:
    reader = _Reader(json.loads(sys.stdin.readline()))
    reader.store.open_reader()
    for index in range(reader.about["count"]):  # makes the pages present
        reader.view(index)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        kind = json.loads(line)
        if kind == "end":
            break
        reader.run(kind, reader.about["warm_up_seconds"])
        print(json.dumps(reader.run(kind, reader.about["seconds"])), flush=True)
    reader.store.close()


if __name__ == "__main__":
    _main()
