# SPDX-License-Identifier: Apache-2.0
"""Streams of work to cut.  Each is recorded in processes of its own:

    python workloads.py NAME SEED FOLDER [--lie]

leaves FOLDER/stream and the volume as it ended.  A name stands for weights of random
operations, with options of the cache and numbers of files and processes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "core")]

from power.driver import Driver  # noqa: E402
from power.stream import Recorder, Stream  # noqa: E402

__all__ = ["WORKLOADS", "Workload", "paths_of", "record"]

MIB = 1 << 20
SIZES = (0, 1, 511, 4096, 4097, 40_000, 131_072, 300_001)
LARGE = (300_001, 700_000, 900_000, 1_500_000)
ADMISSION = {"always": 0, "second-touch": 1, "adaptive": 2}


@dataclass(frozen=True)
class Workload:
    weights: dict[str, int]
    steps: int = 70
    keys: int = 24
    sizes: tuple[int, ...] = SIZES
    files: int = 1
    processes: int = 1
    options: dict[str, Any] = field(default_factory=dict)


WORKLOADS = {
    "puts": Workload({"put": 12, "many": 3, "sync": 2, "get": 4}, keys=60),
    "overwrites": Workload({"put": 14, "sync": 2, "get": 3, "reopen": 1}, keys=5),
    "wrap": Workload({"put": 12, "many": 1, "sync": 2, "get": 3}, sizes=LARGE),
    "removes": Workload({"put": 10, "remove": 6, "clear": 1, "sync": 2}, keys=12),
    "checkpoints": Workload(
        {"put": 6, "reopen": 4, "checkpoint": 2, "get": 4, "sync": 1},
        sizes=LARGE + SIZES,
        options={"admission": ADMISSION["second-touch"]},
    ),
    "write-behind": Workload(
        {"put": 12, "many": 2, "sync": 2, "remove": 1, "get": 3},
        sizes=LARGE + SIZES,
        options={"write_behind": True, "stripe_count": 2},
    ),
    "chains": Workload(
        {"many": 10, "put": 2, "sync": 2, "get": 4, "remove": 1},
        steps=50,
        sizes=(300_001, 700_000),
        options={"eviction": 1},
    ),
    "two processes": Workload(
        {"put": 12, "many": 2, "remove": 2, "sync": 2, "get": 4, "reopen": 1},
        steps=40,
        keys=10,
        sizes=LARGE + SIZES,
        processes=2,
    ),
    "two files": Workload(
        {
            "put": 12,
            "many": 2,
            "remove": 2,
            "clear": 1,
            "sync": 2,
            "get": 3,
            "reopen": 1,
        },
        files=2,
        sizes=LARGE + SIZES,
        options={"stripe_count": 2},
    ),
    "creation": Workload({"put": 1}, steps=3),
    "creation of two files": Workload({"put": 1}, steps=3, files=2),
    "recreation": Workload({"put": 3, "recreate": 1, "sync": 1}, steps=8),
    "recreation of two files": Workload(
        {"put": 3, "recreate": 1, "sync": 1}, steps=8, files=2
    ),
}


def paths_of(name: str, folder: Path) -> list[Path]:
    """Each file in a folder of its own, as on a device of its own."""
    count = WORKLOADS[name].files
    return [folder / f"disk{number}" / "kv.cyc" for number in range(count)]


class Worker:
    def __init__(self, driver: Driver, workload: Workload, seed: str) -> None:
        self.driver = driver
        self.workload = workload
        self.dice = random.Random(seed)
        self.capacity = 16 * MIB

    def run(self) -> None:
        self.driver.open()
        names = list(self.workload.weights)
        weights = [self.workload.weights[name] for name in names]
        for name in self.dice.choices(names, weights, k=self.workload.steps):
            getattr(self, f"_{name}")()
        self.driver.sync()
        self._put()
        self.driver.close()

    def _key(self) -> str:
        return f"{self.driver.who}{self.dice.randrange(self.workload.keys)}"

    def _put(self) -> None:
        self.driver.put(self._key(), self.dice.choice(self.workload.sizes))

    def _many(self) -> None:
        first = self.dice.randrange(self.workload.keys)
        keys = [f"{self.driver.who}{first + i}" for i in range(self.dice.randint(2, 5))]
        length = self.dice.choice(self.workload.sizes)
        self.driver.put_many(keys, length, chain=bool(self.dice.getrandbits(1)))

    def _get(self) -> None:
        self.driver.get(self._key())

    def _remove(self) -> None:
        self.driver.remove(self._key())

    def _clear(self) -> None:
        self.driver.clear()

    def _sync(self) -> None:
        self.driver.sync()

    def _reopen(self) -> None:
        self.driver.close()
        self.driver.open()

    def _checkpoint(self) -> None:
        lib = self.driver.core.lib
        assert lib.ckv_checkpoint_write(self.driver.cache.volume) == 0

    def _recreate(self) -> None:
        """Everything is gone when it returns; before that it may be."""
        self.driver.close()
        self.capacity = (34 * MIB) - self.capacity
        self.driver.stream.mark("begin", who=self.driver.who, op="clear", key=None)
        self.driver.options.update(on_mismatch=1, capacity=self.capacity)
        self.driver.open()
        mark = {"who": self.driver.who, "op": "clear", "key": None, "ok": True}
        self.driver.stream.mark("end", **mark)


def _work(name: str, seed: str, folder: Path, who: str, *, lie: bool) -> None:
    from types import SimpleNamespace

    import build_core

    built = os.environ.get("CKV_POWER_CORE")  # see mutants.py
    module = build_core.load_from(Path(built)) if built else build_core.load()
    core = SimpleNamespace(lib=module.lib, ffi=module.ffi)
    workload = WORKLOADS[name]
    paths = paths_of(name, folder)
    stream = Stream(folder / "stream")
    with Recorder(core, stream, paths, lie=lie):
        driver = Driver(core, stream, who, *paths, **workload.options)
        Worker(driver, workload, f"{seed} {who}").run()


def record(
    name: str, seed: str, folder: Path, *, lie: bool = False, built: Path | None = None
) -> None:
    """Runs a workload in processes of its own; raises when one fails."""
    environment = {**os.environ, "CKV_POWER_CORE": str(built or "")}
    extra = ["--lie"] if lie else []
    for path in paths_of(name, folder):
        path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / "workloads.py"), name, seed, str(folder)]
    crew = [
        subprocess.Popen(
            [*command, who, *extra], stderr=subprocess.PIPE, text=True, env=environment
        )
        for who in "ab"[: WORKLOADS[name].processes]
    ]
    for process in crew:
        _, errors = process.communicate(timeout=120)
        if process.returncode != 0:
            raise AssertionError(f"{name} {seed} ended {process.returncode}:\n{errors}")


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if each != "--lie"]
    _work(
        arguments[0],
        arguments[1],
        Path(arguments[2]),
        arguments[3],
        lie="--lie" in sys.argv,
    )
