# SPDX-License-Identifier: Apache-2.0
"""Records a workload and cuts the power under it, many times.

One line tells a failure so that it can be repeated: the workload and its seed make the
stream, the seed of the cut makes the image.  A stream that two processes wrote is not
the same when it is written again; so the folder of a failure is kept.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from power.disk import Disk
from power.judge import Counts, Judge, Wrong
from power.oracle import Oracle
from power.stream import Event, read_stream
from power.workloads import WORKLOADS, paths_of, record

__all__ = ["WORKLOADS", "Campaign", "Wrong", "campaign"]

SECOND_CUTS = 0.25  # share of the cuts after which the life that follows is cut, too


class Campaign:
    def __init__(self, core: Any, folder: Path, name: str, seed: str) -> None:
        self.name, self.seed = name, seed
        self.folder = folder
        self.events = read_stream(folder / "stream")
        assert not any(each.kind == "mapped" for each in self.events)
        self.oracle = Oracle.read(self.events)
        self.paths = paths_of(name, folder)
        region = self.paths[0].with_name("kv.cyc-shm")
        self.judge = Judge(core, self.paths, region)

    def check_complete(self) -> None:
        """All that was written, replayed, is what lies in the files."""
        disk = Disk.of(self.events, [path.with_name("replayed") for path in self.paths])
        for event in self.events:
            disk.feed(event)
        for file, path in zip(disk.files, self.paths, strict=True):
            file.feed(Event("sync"))
            content = path.read_bytes()
            if bytes(file.stable[: file.size]) != content:
                raise Wrong(f"the stream of {self.name} {self.seed} is not complete")

    def run(self, cuts: int, dice: random.Random) -> Counts:
        """Cuts at `cuts` places of the stream, in order; raises Wrong."""
        places = self._places(cuts, dice)
        disk = Disk.of(self.events, self.paths)
        at = 0
        for place in places:
            while at < place:
                disk.feed(self.events[at])
                at += 1
            self._cut(disk, place, dice.getrandbits(64))
        return self.judge.counts

    def _places(self, cuts: int, dice: random.Random) -> list[int]:
        """Half of them where something was just written, half where most is at stake:
        just before and after barriers and returns."""
        writes = [i + 1 for i, each in enumerate(self.events) if each.kind != "mark"]
        edges = [i for i, each in enumerate(self.events) if each.kind != "write"]
        chosen = dice.choices(writes, k=cuts // 2) + dice.choices(
            edges, k=cuts - cuts // 2
        )
        return sorted(chosen)

    def _cut(self, disk: Disk, place: int, seed: int) -> None:
        dice = random.Random(seed)
        how = disk.cut(dice)
        expected = self.oracle.expected(place)
        self.judge.recreating = self.name.startswith("recreation") and any(
            each.begin < place <= each.end for each in self.oracle.clears
        )
        where = f"{self.name} {self.seed}, cut {seed} after {place} events: {how}"
        try:
            life = self.judge.life(expected, dice, disk.touch)
        except Wrong as wrong:
            raise Wrong(f"{where}\n{wrong}") from wrong
        if dice.random() >= SECOND_CUTS:
            return
        # The same image again, and another cut in the life that followed.
        disk.cut(random.Random(seed))
        second = Disk.found(self.paths, disk)
        oracle = Oracle.read(life.events, expected)
        places = sorted(dice.choices(range(len(life.events) + 1), k=3))
        at = 0
        for later in places:
            while at < later:
                second.feed(life.events[at])
                at += 1
            again = second.cut(dice)
            try:
                self.judge.life(oracle.expected(later), dice, second.touch)
            except Wrong as wrong:
                raise Wrong(
                    f"{where}\nand then after {later} events: {again}\n{wrong}"
                ) from wrong
        for file in disk.files:
            file.dirty[:] = True


def campaign(
    core: Any,
    name: str,
    seed: str,
    cuts: int,
    *,
    keep: Path | None = None,
    lie: bool = False,
    built: Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> Counts:
    """Records `name` once and cuts it `cuts` times, on tmpfs where there is one.

    `core` judges; `built` is the module that records, by default the same build.
    """
    shm = Path("/dev/shm")
    parent = shm if shm.is_dir() and shutil.disk_usage(shm).free > 1 << 30 else None
    folder = Path(tempfile.mkdtemp(prefix="ckv-power-", dir=parent))
    try:
        record(name, seed, folder, lie=lie, built=built)
        run = Campaign(core, folder, name, seed)
        run.check_complete()
        counts = run.run(cuts, random.Random(f"{name} {seed} cuts"))
    except Wrong:
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "stream", keep / f"{name} {seed}.stream")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if tell is not None:
        tell(f"{name} {seed}: {counts}")
    return counts
