# SPDX-License-Identifier: Apache-2.0
"""A storm of SIGKILL and SIGSTOP over processes that store, replace, remove and read.

The oracle is memory that all of them share and none of the engine's.  Each process
alone stores the blocks of its own keys, with versions that only grow:

    pending[p][k]    raised before a put of version n begins
    committed[p][k]  raised after it returned True

A read sees `committed` before and `pending` after itself: a version outside of these
two is stale or was never written, a miss of a committed block is a loss (where nothing
is evicted), and bytes of no version at all are wrong.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import time
from pathlib import Path
from typing import Any

from crash.blobs import blob, key_of
from crash.nursery import Child, fork

from cyclone_kv import Cache, CacheConfig

KEYS = 48
COUNTERS = ("puts", "refused", "hits", "misses", "opens", "faults")


class Oracle:
    def __init__(self, path: Path, processes: int) -> None:
        self._processes = processes
        self._words = 2 * processes * KEYS
        size = 8 * (self._words + processes * len(COUNTERS))
        with path.open("ab+") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._view = memoryview(self._map).cast("Q")

    def committed(self, process: int, key: int) -> int:
        return self._view[process * KEYS + key]

    def commit(self, process: int, key: int, version: int) -> None:
        self._view[process * KEYS + key] = version

    def pending(self, process: int, key: int) -> int:
        return self._view[self._words // 2 + process * KEYS + key]

    def intend(self, process: int, key: int, version: int) -> None:
        self._view[self._words // 2 + process * KEYS + key] = version

    def count(self, process: int, name: str) -> None:
        self._view[self._words + process * len(COUNTERS) + COUNTERS.index(name)] += 1

    def counts(self) -> dict[str, int]:
        totals = dict.fromkeys(COUNTERS, 0)
        for process in range(self._processes):
            for at, name in enumerate(COUNTERS):
                totals[name] += self._view[self._words + process * len(COUNTERS) + at]
        return totals


def _length(process: int, key: int, version: int, largest: int) -> int:
    return 16 + (process * 977 + key * 7919 + version * 104729) % largest


_HEAD = struct.Struct("<QQ")


def _payload(process: int, key: int, version: int, largest: int) -> bytes:
    body = blob(_name(process, key), _length(process, key, version, largest), version)
    return _HEAD.pack(version, len(body)) + body


def _name(process: int, key: int) -> bytes:
    return key_of("storm", process, key)


def _version(data: bytes, process: int, key: int, largest: int) -> int:
    """The version that a payload is, or -1 when it is none."""
    if len(data) < _HEAD.size:
        return -1
    version = _HEAD.unpack_from(data)[0]
    if version > 2**40:
        return -1
    return version if data == _payload(process, key, version, largest) else -1


class Sailor:
    """One process of the storm."""

    def __init__(self, me: int, options: dict[str, Any], seed: int) -> None:
        self.me = me
        self.path: str = options["path"]
        self.processes: int = options["processes"]
        self.largest: int = options["largest"]
        self.capacity: int = options["capacity"]
        self.evicts: bool = options["evicts"]
        self.random = random.Random(seed)
        self.oracle = Oracle(Path(f"{self.path}.oracle"), self.processes)
        self.held: list[tuple[memoryview, int, int, int] | None] = [None] * 6
        self.buffer = bytearray(self.largest + 4096)
        self.open()

    def open(self) -> None:
        config = CacheConfig(capacity=self.capacity, sync_interval=1.5)
        self.cache = Cache.open(self.path, config)
        self.oracle.count(self.me, "opens")

    def fault(self, text: str) -> None:
        self.oracle.count(self.me, "faults")
        with open(f"{self.path}.faults", "a") as file:
            file.write(f"process {self.me}: {text}\n")

    def run(self) -> None:
        choices = [
            (35, self.put),
            (4, self.remove),
            (38, self.read),
            (20, self.hold),
            (2, self.reopen),
            (1, self.sync),
        ]
        weights = [weight for weight, _ in choices]
        actions = [action for _, action in choices]
        while True:
            for action in self.random.choices(actions, weights, k=50):
                action()

    def put(self) -> None:
        key = self.random.randrange(KEYS)
        version = self.oracle.pending(self.me, key) + 1
        self.oracle.intend(self.me, key, version)
        data = _payload(self.me, key, version, self.largest)
        third = len(data) // 3
        if self.cache.put(
            _name(self.me, key), [data[:third], data[third:]], overwrite=True
        ):
            self.oracle.commit(self.me, key, version)
            self.oracle.count(self.me, "puts")
        else:
            self.oracle.count(self.me, "refused")

    def remove(self) -> None:
        if self.evicts:  # a miss is then no loss
            self.cache.remove(_name(self.me, self.random.randrange(KEYS)))

    def read(self) -> None:
        process = self.random.randrange(self.processes)
        key = self.random.randrange(KEYS)
        committed = self.oracle.committed(process, key)
        length = self.cache.get_into(_name(process, key), self.buffer)
        pending = self.oracle.pending(process, key)
        if length is None:
            self.oracle.count(self.me, "misses")
            if committed and not self.evicts:
                self.fault(f"lost {process}/{key}, version {committed} of {pending}")
            return
        self.oracle.count(self.me, "hits")
        version = _version(bytes(self.buffer[:length]), process, key, self.largest)
        if version < 0:
            self.fault(f"wrong bytes of {process}/{key}")
        elif not committed <= version <= pending:
            self.fault(
                f"{process}/{key} has {version}, not in [{committed}, {pending}]"
            )

    def hold(self) -> None:
        at = self.random.randrange(len(self.held))
        held = self.held[at]
        if held is not None:
            view, process, key, version = held
            if _version(bytes(view), process, key, self.largest) != version:
                self.fault(f"a view of {process}/{key} version {version} has changed")
            self.held[at] = None
            return
        process = self.random.randrange(self.processes)
        key = self.random.randrange(KEYS)
        got = self.cache.get(_name(process, key))
        if got is not None:
            version = _version(bytes(got), process, key, self.largest)
            if version < 0:
                self.fault(f"a view of {process}/{key} has wrong bytes")
            self.held[at] = (got, process, key, version)

    def sync(self) -> None:
        self.cache.sync()

    def reopen(self) -> None:
        if self.random.randrange(20) == 0:
            self.cache.close()
            self.open()


def sail(me: int, options: dict[str, Any], seed: int) -> None:
    Sailor(me, options, seed).run()


def _create(options: dict[str, Any]) -> None:
    Cache.open(options["path"], CacheConfig(capacity=options["capacity"])).close()


def storm(
    path: str,
    seconds: float,
    processes: int,
    seed: int,
    *,
    evicts: bool,
    stops: bool,
) -> dict[str, int]:
    """Raises and kills processes for a while; returns what they counted."""
    options = {
        "path": path,
        "processes": processes,
        "evicts": evicts,
        # Where nothing may be lost, a lap is some 10 000 puts: 40 for each key, whose
        # owner has stored it anew long before the cursor comes back to it.
        "largest": 200_000 if evicts else 20_000,
        "capacity": (16 << 20) if evicts else (128 << 20),
    }
    oracle = Oracle(Path(f"{path}.oracle"), processes)
    dice = random.Random(seed)
    crew: list[Child | None] = [None] * processes
    # On a slow machine nobody may live long enough to create it.
    fork(_create, options).result()
    end = time.monotonic() + seconds
    kills = 0
    while time.monotonic() < end:
        for me in range(processes):
            if crew[me] is None:
                crew[me] = fork(sail, me, options, dice.getrandbits(32))
        time.sleep(dice.random() * 0.08)
        everybody = dice.randrange(20) == 0
        chosen = range(processes) if everybody else [dice.randrange(processes)]
        for me in chosen:
            child = crew[me]
            assert child is not None
            if stops and not everybody and dice.randrange(3) == 0:
                child.signal(signal.SIGSTOP)
                time.sleep(dice.random() * 0.3)
                if dice.randrange(2):
                    child.signal(signal.SIGCONT)
                    continue
            child.signal(signal.SIGKILL)
            if child.wait() != -signal.SIGKILL:
                child.result()  # it ended by itself: raises why
            crew[me] = None
            kills += 1
    for child in crew:
        if child is not None:
            child.kill()
    fork(_after_storm, options).result(120)
    faults = Path(f"{path}.faults")
    assert not faults.exists(), faults.read_text()[:3000]
    return {**oracle.counts(), "kills": kills, "pid": os.getpid()}


def _after_storm(options: dict[str, Any]) -> None:
    path, processes = options["path"], options["processes"]
    oracle = Oracle(Path(f"{path}.oracle"), processes)
    with Cache.open(path) as cache:
        report = cache.verify()
        assert not report.structure_faults, report.first_fault
        assert not report.unreadable, report.first_fault
        if not options["evicts"]:
            assert report.ok, report.first_fault
        stats = cache.stats().volume
        assert (stats.processes, stats.pinned_entries) == (1, 0)
        buffer = bytearray(options["largest"] + 4096)
        for process in range(processes):
            for key in range(KEYS):
                committed = oracle.committed(process, key)
                length = cache.get_into(_name(process, key), buffer)
                if length is None:
                    assert not committed or options["evicts"], f"lost {process}/{key}"
                    continue
                data = bytes(buffer[:length])
                version = _version(data, process, key, options["largest"])
                pending = oracle.pending(process, key)
                assert version >= 0, f"wrong bytes of {process}/{key}"
                assert version <= pending, f"{process}/{key}: {version} of {pending}"
                if not options["evicts"]:
                    assert version >= committed, f"{process}/{key} is stale"
        assert cache.put(key_of("after"), b"x" * 100_000), "a put was refused"
        report = cache.verify(repair=True)
        report = cache.verify()
        assert report.ok, report.first_fault
