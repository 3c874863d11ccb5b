# SPDX-License-Identifier: Apache-2.0
"""Opens what a cut left, as after a reboot, and says what is wrong with it.

The shared region of the time before is gone, or is there with anything in it: nobody
holds a byte lock, so the next open throws it away either way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash.blobs import key_of
from opened import Opened, Refused
from power.driver import Driver, payload
from power.oracle import Expected, Value
from power.stream import Event, Recorder, Stream

__all__ = ["Judge", "Wrong"]

MIB = 1 << 20
CAPACITIES = (16 * MIB, 18 * MIB)  # of recreation, see workloads.py


class Wrong(AssertionError):
    """A promise that was broken."""


@dataclass
class Counts:
    cuts: int = 0
    served: int = 0
    lost: int = 0  # blocks that were acknowledged and not synced, and are gone
    undone: int = 0  # older blocks that came back
    damaged: int = 0  # blocks that failed their checksum
    dropped: int = 0  # records that the rebuild refused


@dataclass
class Judge:
    core: Any
    paths: Sequence[Path]
    region: Path
    counts: Counts = field(default_factory=Counts)
    recreating: bool = False  # the power went while a set was laid out anew

    def open(self, **options: Any) -> Opened:
        why: Refused | None = None
        for capacity in CAPACITIES:
            try:
                return Opened(
                    self.core,
                    *self.paths,
                    capacity=capacity,
                    event_capacity=4096,
                    io_threads=1,
                    **options,
                )
            except Refused as refused:
                if refused.status != self.core.lib.CKV_E_MISMATCH:
                    raise Wrong(f"it does not open: {refused}") from refused
                why = why or refused
        if self.recreating:  # what was interrupted is finished when asked for again
            try:
                return Opened(
                    self.core,
                    *self.paths,
                    on_mismatch=1,
                    event_capacity=4096,
                    **options,
                )
            except Refused as refused:
                why = refused
        raise Wrong(f"it does not open: {why}")

    def life(
        self,
        expected: dict[str, Expected],
        dice: random.Random,
        watch: Callable[[Event], None],
    ) -> Stream:
        """One life after a cut: what it wrote, with marks, to be cut again."""
        self.counts.cuts += 1
        if dice.random() < 0.5:
            self.region.unlink(missing_ok=True)
        if dice.random() < 0.05 and all(path.exists() for path in self.paths):
            self._reader(expected)
        stream = Stream()
        with Recorder(self.core, stream, self.paths, watch=watch):
            self._live(expected, dice, stream)
        if dice.random() < 0.1:
            with Recorder(self.core, Stream(), self.paths, watch=watch):
                self._again(stream)
        if any(event.kind == "mapped" for event in stream.events):
            raise Wrong("a volume file is mapped for writing")
        return stream

    # ---- parts of a life -----------------------------------------------------------

    def _live(
        self, expected: dict[str, Expected], dice: random.Random, stream: Stream
    ) -> None:
        eviction = int(dice.random() < 0.1)
        driver = Driver(self.core, stream, "z", *self.paths)
        driver.opened = self.open(eviction=eviction, write_behind=False)
        cache = driver.cache
        try:
            self.counts.dropped += int(cache.region.header.rebuild_dropped)
            if dice.random() < 0.2:
                self._verify(cache, "before it was read", damage=True)
            found = self._read(cache, expected)
            for key, value in found.items():
                stream.mark("was", who="z", key=key, value=value)
            self._verify(cache, "after all was read", damage=True)
            self._write(driver, dice, expected)
            if dice.random() < 0.2:
                cache.verify(repair=True)
                self._verify(cache, "after a repair", damage=False)
        finally:
            driver.close()

    def _reader(self, expected: dict[str, Expected]) -> None:
        """mode="r": a private index, nothing struck."""
        before = [path.stat().st_mtime_ns for path in self.paths]
        try:
            cache = Opened(self.core, *self.paths, mode=1, capacity=0, io_threads=1)
        except Refused:
            return  # nothing was created yet; what cannot be opened shows below
        self._read(cache, expected)
        cache.close()
        if before != [path.stat().st_mtime_ns for path in self.paths]:
            raise Wrong("a reader wrote")

    def _read(
        self, cache: Opened, expected: dict[str, Expected]
    ) -> dict[str, Value | None]:
        found: dict[str, Value | None] = {}
        for key, wanted in expected.items():
            name = key_of(key)
            data = cache.get(name)
            value = None
            if data is not None:
                value = next(
                    (
                        each
                        for each in wanted.values
                        if each[1] == len(data) and payload(name, each) == data
                    ),
                    None,
                )
                if value is None:
                    raise Wrong(
                        f"{key} has {len(data)} bytes beginning {data[:16].hex()}, "
                        f"which is none of {sorted(wanted.values)}: "
                        f"{_what(name, data)}"
                    )
                self.counts.served += 1
                self.counts.undone += value != max(wanted.values)
            elif wanted.must:
                raise Wrong(f"{key} was synced as {sorted(wanted.values)} and is lost")
            else:
                self.counts.lost += bool(wanted.values)
            found[key] = value
        return found

    def _verify(self, cache: Opened, when: str, *, damage: bool) -> None:
        report = cache.verify()
        self.counts.damaged += report.damaged_payloads
        if report.structure_faults or report.unreadable:
            raise Wrong(f"verify {when}: {report.first_fault}")
        if report.damaged_payloads and not damage:
            raise Wrong(f"verify {when}: {report.first_fault}")

    def _write(
        self, driver: Driver, dice: random.Random, expected: dict[str, Expected]
    ) -> None:
        """It takes blocks, overwrites, removes, and syncs; and has what it took."""
        keys = sorted(expected)
        driver.versions = {
            key: 1000 + max((value[0] for value in each.values), default=0)
            for key, each in expected.items()
        }
        old = dice.choice(keys) if keys else "z0"
        lengths = (1, 5000, 60_000, 400_000)
        for key in (old, "z1", "z2"):
            length = dice.choice(lengths)
            if not driver.put(key, length):
                raise Wrong(f"a put of {length} bytes was refused")
            data = driver.get(key)
            if data != payload(key_of(key), (driver.versions[key], length)):
                raise Wrong(f"{key} is not what was just stored")
        if keys and dice.random() < 0.3:
            driver.remove(dice.choice(keys))
        driver.sync()
        if not driver.put("z3", 3000):
            raise Wrong("a put after the sync was refused")
        driver.put("z1", 7000)

    def _again(self, stream: Stream) -> None:
        """Opened once more, without a cut: nothing is missing now."""
        cache = self.open()
        try:
            for key, length in (("z3", 3000), ("z1", 7000)):
                data = cache.get(key_of(key))
                if data is None or len(data) != length:
                    raise Wrong(f"{key} is missing at the next open")
            self._verify(cache, "at the next open", damage=False)
        finally:
            cache.close()


def _what(name: bytes, data: bytes) -> str:
    for version in range(1, 2000):
        if payload(name, (version, len(data))) == data:
            return f"version {version}"
    return "bytes of no version"
