# SPDX-License-Identifier: Apache-2.0
"""One process of the soak: stores, reads and checks until it is told to end or dies.

It reports what is wrong to the oracle and in words to a file; it never raises for it.
CKV_SOAK_PLANT makes the first worker lie now and then, so that the tests of the soak
see it fail: "flip" a byte that was read, "forget" a block that is pinned, "crash".
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from night.oracle import CLEARERS, WAITS, Oracle
from night.plan import ANCHORS, CLEARED, HEAD_BYTES, PAGE, Plan

from cyclone_kv import Cache, CycloneError, OpenTimeoutError

__all__ = ["Worker", "note_fault"]

ABORTED = b"\xee"  # fills reservations that must never be seen


def note_fault(folder: Path, oracle: Oracle, who: int, kind: str, text: str) -> None:
    """Counts a fault and says it, in one write."""
    oracle.count(who, kind)
    with (folder / "faults.txt").open("a") as file:
        file.write(f"{kind}: process {who}: {text}\n")


@dataclasses.dataclass
class Held:
    """A view that must not change."""

    view: memoryview
    process: int
    number: int
    version: int


class Worker:
    """The operations; each picks its blocks at random."""

    def __init__(
        self, me: int, plan: Plan, folder: Path, life: dict[str, Any], seed: int
    ) -> None:
        self.me = me
        self.plan = plan
        self.folder = folder
        self.life = life
        self.random = random.Random(seed)
        self.oracle = Oracle(folder / "oracle", plan)
        self.plant = os.environ.get("CKV_SOAK_PLANT", "") if me == 0 else ""
        self.paths = plan.paths(folder)
        self.buffer = bytearray(plan.longest + PAGE)
        self.held: list[Held] = []
        self.anchors: dict[int, memoryview] = {}
        self.since = 0
        self.counters: dict[str, int] = {}
        pages = max(plan.lengths) // PAGE + 2
        self.views_max = max(1, plan.capacity // (6 * plan.processes * pages * PAGE))
        self.views_max = min(8, self.views_max)
        self.budget = int(0.45 * plan.capacity / plan.processes)
        if self.random.randrange(3) == 0:
            # Does something where the soak runs under crash/shim.c only.
            code = self.random.choice((errno.ENOSPC, errno.EDQUOT))
            os.environ["CKV_SHIM"] = f"write={code}:{self.random.randrange(1, 400)}"
        self.open()

    # ---- the oracle -----------------------------------------------------------------

    def fault(self, kind: str, text: str) -> None:
        note_fault(self.folder, self.oracle, self.me, kind, text)

    def count(self, name: str, amount: int = 1) -> None:
        self.oracle.count(self.me, name, amount)

    def timed(
        self, kind: str, call: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Calls and keeps the longest wait; a stop of this process counts for none."""
        stops = int(self.oracle.stops[self.me])
        began = time.monotonic_ns()
        self.oracle.beat[self.me] = began
        result = call(*arguments, **options)
        took = time.monotonic_ns() - began
        at = WAITS.index(kind)
        if stops == int(self.oracle.stops[self.me]):
            if took > int(self.oracle.waits[self.me, at]):
                self.oracle.waits[self.me, at] = took
            if took > 5_000_000_000:
                with (self.folder / "waits.txt").open("a") as file:
                    file.write(f"{self.me} {call} took {took / 1e9:.1f} s\n")
        self.count("operations")
        return result

    def before(self, process: int, number: int) -> tuple[int, int, int]:
        """What the oracle says before a read: lowest version, present, anchored."""
        anchored = int(self.oracle.anchor[process, number]) if number < ANCHORS else 0
        present = int(self.oracle.present[process, number])
        return self.oracle.lowest(process, number), present, anchored

    def judge(
        self,
        process: int,
        number: int,
        before: tuple[int, int, int],
        data: bytes | memoryview | None,
        how: str,
    ) -> int:
        """Holds what was read against the oracle: the version, or -1 for a miss."""
        oracle = self.oracle
        lowest, present, anchored = before
        name = f"{process}/{number} by {how}"
        if data is None:
            self.count("misses")
            if anchored and int(oracle.anchor[process, number]) == anchored:
                self.fault("lost", f"{name}: version {anchored} is pinned, and a miss")
            kept = not self.plan.evicts and self.plan.space(number) == ""
            if kept and present and int(oracle.present[process, number]) == present:
                self.fault("lost", f"{name}: version {present} is a miss")
            return -1
        highest = int(oracle.pending[process, number])
        self.count("hits")
        self.count("bytes_checked", len(data))
        if anchored and int(oracle.anchor[process, number]) == anchored:
            self.count("pinned_hits")
        if self.plant == "flip" and self.random.randrange(20) == 0:
            changed = bytearray(data)
            changed[-1] ^= 1
            data = bytes(changed)
        version = self.plan.version_of(data, process, number)
        if version < 0:
            self.fault("wrong", f"{name}: {len(data)} bytes, {bytes(data[:32]).hex()}")
        elif not lowest <= version <= highest:
            self.fault("stale", f"{name}: {version} is not in [{lowest}, {highest}]")
        return version

    # ---- the life of a worker -------------------------------------------------------

    def open(self) -> None:
        config = self.plan.config(self.life)
        while True:
            try:
                self.caches = {
                    space: self.timed(
                        "open", Cache.open, self._path(), config, namespace=space
                    )
                    for space in ("", CLEARED, "chains")
                }
                break
            except OpenTimeoutError:  # whoever opens or rebuilds is stopped
                self.count("open_timeouts")
        self.cache = self.caches[""]
        self.chains = self.caches[self.plan.namespace_of_chains]
        self.count("opens")
        self.counters = {}

    def _path(self) -> str | list[str]:
        paths = self.random.sample(self.paths, len(self.paths))
        return paths if len(paths) > 1 else paths[0]

    def close(self) -> None:
        self.release_anchors()
        for cache in self.caches.values():
            self.timed("open", cache.close)
        for held in self.held:  # views outlive their cache
            self.look_at(held)
        self.held.clear()

    def run(self) -> None:
        choices: list[tuple[float, Callable[[], None]]] = [
            (20, self.put),
            (4, self.put_batch),
            (4, self.reserve),
            (4, self.remove),
            (16, self.copy),
            (8, self.copy_batch),
            (12, self.hold),
            (4, self.read_entry),
            (2, self.locate),
            (5, self.anchor),
            (8, self.store_chain),
            (8, self.load_chain),
            (0.7, self.remove_of_chain),
            (2, self.touch),
            (2, self.look_up),
            (2, self.events),
            (0.6, self.statistics),
            (0.5, self.clear),
            (0.5, self.sync),
            (0.3, self.drop_pages),
            (0.3, self.as_a_reader),
            (0.3, self.list),
            (0.2, self.reopen),
            (0.1, self.verify),
        ]
        weights = [weight for weight, _ in choices]
        actions = [action for _, action in choices]
        while not self.oracle.end[0]:
            for action in self.random.choices(actions, weights, k=20):
                action()
            if self.plant == "crash" and self.random.randrange(10) == 0:
                os.kill(os.getpid(), signal.SIGSEGV)
        self.close()

    # ---- storing --------------------------------------------------------------------

    def _may_spend(self, numbers: Iterable[int]) -> bool:
        """Where nothing is evicted, all puts together are less than a lap."""
        lengths = [
            self.plan.length(
                self.me, number, int(self.oracle.pending[self.me, number]) + 1
            )
            for number in numbers
        ]
        return self._may_take(lengths)

    def _may_take(self, lengths: Iterable[int]) -> bool:
        if self.plan.evicts:
            return True
        spent = sum(PAGE * (2 + length // PAGE) for length in lengths)
        spent += int(self.oracle.spent[self.me])
        if spent > self.budget:
            return False
        self.oracle.spent[self.me] = spent
        return True

    def _begin(self, number: int) -> tuple[int, bytes]:
        version = int(self.oracle.pending[self.me, number]) + 1
        self.oracle.pending[self.me, number] = version
        return version, self.plan.payload(self.me, number, version)

    def _end(self, number: int, version: int, stored: bool) -> None:
        if not stored:
            self.count("refused")
            return
        self.oracle.floor[self.me, number] = version
        self.oracle.present[self.me, number] = version
        self.count("puts")

    def _store(self, number: int) -> int:
        """Puts the next version of a block; 0 when it was refused."""
        if not self._may_spend([number]):
            return 0
        version, data = self._begin(number)
        pieces: Any = data
        if self.random.randrange(3) == 0:
            cuts = sorted(self.random.randrange(len(data)) for _ in range(3))
            pieces = [
                memoryview(data)[first:last]
                for first, last in zip([0, *cuts], [*cuts, len(data)], strict=True)
            ]
        stored = self.timed(
            "call",
            self.caches[self.plan.space(number)].put,
            self.plan.key(self.me, number),
            pieces,
            header=self.plan.header(self.me, number, version),
            overwrite=True,
        )
        self._end(number, version, stored)
        return version if stored else 0

    def _own(self) -> int:
        """A block of this process that is no anchor at the moment."""
        number = self.random.randrange(self.plan.keys)
        while number in self.anchors:
            number = self.random.randrange(self.plan.keys)
        return number

    def put(self) -> None:
        self._store(self._own())

    def put_batch(self) -> None:
        numbers = {self._own() for _ in range(self.random.randrange(1, 6))}
        numbers = {number for number in numbers if self.plan.space(number) == ""}
        if not self._may_spend(numbers):
            return
        items, versions = [], []
        for number in sorted(numbers):
            version, data = self._begin(number)
            header = self.plan.header(self.me, number, version)
            items.append((self.plan.key(self.me, number), data, header))
            versions.append((number, version))
        answers = self.timed("call", self.cache.put_many, items, overwrite=True)
        for (number, version), stored in zip(versions, answers, strict=True):
            self._end(number, version, stored)

    def reserve(self) -> None:
        number = self._own()
        end = self.random.choice(("commit", "commit", "abort", "drop", "raise"))
        if not self._may_spend([number]):
            return
        version, data = int(self.oracle.pending[self.me, number]), ABORTED * 4000
        if end == "commit":
            version, data = self._begin(number)
        cache = self.caches[self.plan.space(number)]
        slot = self.timed(
            "call",
            cache.reserve,
            self.plan.key(self.me, number),
            len(data),
            header=self.plan.header(self.me, number, version),
            overwrite=True,
        )
        if self.random.randrange(8) == 0 and bytes(slot.view) != bytes(len(data)):
            self.fault("wrong", "a reservation shows bytes that are not zero")
        slot.view[:] = data
        if end == "commit":
            self._end(number, version, self.timed("call", slot.commit))
        elif end == "abort":
            slot.abort()
        elif end == "raise":
            with contextlib.suppress(KeyError), slot:
                raise KeyError(number)

    def remove(self) -> None:
        number = self._own()
        if not self.plan.evicts and self.random.randrange(4):
            return  # or little would be left
        self.oracle.present[self.me, number] = 0
        self.timed(
            "call",
            self.caches[self.plan.space(number)].remove,
            self.plan.key(self.me, number),
        )
        self.oracle.floor[self.me, number] = self.oracle.pending[self.me, number] + 1

    def clear(self) -> None:
        if self.me >= CLEARERS or self.random.randrange(2):
            return
        before = self.oracle.floor.copy()
        before = np.where(self.oracle.present != 0, before, 0)
        self.timed("call", self.caches[CLEARED].clear)
        mine = self.oracle.cleared[self.me]
        odd = [number for number in range(self.plan.keys) if self.plan.space(number)]
        mine[:, odd] = np.maximum(mine[:, odd], before[:, odd])

    # ---- reading --------------------------------------------------------------------

    def _any(self) -> tuple[int, int]:
        process = self.random.randrange(self.plan.processes)
        few = ANCHORS if self.random.randrange(6) == 0 else self.plan.keys
        return process, self.random.randrange(few)

    def copy(self) -> None:
        process, number = self._any()
        cache = self.caches[self.plan.space(number)]
        offset = self.random.choice((0, 0, 1, 64, 4000))
        target = memoryview(self.buffer)[offset:]
        before = self.before(process, number)
        length = self.timed(
            "call", cache.get_into, self.plan.key(process, number), target
        )
        data = None if length is None else bytes(target[:length])
        self.judge(process, number, before, data, "get_into")

    def copy_batch(self) -> None:
        blocks = [self._any() for _ in range(self.random.randrange(1, 9))]
        blocks = [block for block in blocks if self.plan.space(block[1]) == ""]
        keys = [self.plan.key(*block) for block in blocks]
        before = [self.before(*block) for block in blocks]
        targets = [bytearray(self.plan.longest) for _ in blocks]
        answers = self.timed("call", self.cache.get_many_into, keys, targets)
        for block, known, target, answer in zip(
            blocks, before, targets, answers, strict=True
        ):
            data: bytes | None = None
            if answer:  # its length is in its first bytes
                length = HEAD_BYTES + int.from_bytes(target[8:HEAD_BYTES], "little")
                data = bytes(target[:length])
            self.judge(*block, known, data, "get_many_into")

    def hold(self) -> None:
        if self.held and self.random.randrange(2):
            at = self.random.randrange(len(self.held))
            self.look_at(self.held[at])
            if self.random.randrange(2):
                del self.held[at]
            return
        if len(self.held) >= self.views_max:
            self.held.pop(0)
        process, number = self._any()
        before = self.before(process, number)
        cache = self.caches[self.plan.space(number)]
        view: memoryview | None = self.timed(
            "call", cache.get, self.plan.key(process, number)
        )
        version = self.judge(process, number, before, view, "get")
        if view is not None and version >= 0:
            self.held.append(Held(view, process, number, version))

    def look_at(self, held: Held) -> None:
        array = np.frombuffer(held.view, dtype=np.uint8)
        again = self.plan.version_of(array.data, held.process, held.number)
        self.count("bytes_checked", len(array))
        if again != held.version:
            self.fault(
                "wrong",
                f"a view of {held.process}/{held.number} version {held.version} "
                f"has changed to {again}",
            )

    def read_entry(self) -> None:
        process, number = self._any()
        cache = self.caches[self.plan.space(number)]
        before = self.before(process, number)
        entry = self.timed("call", cache.read, self.plan.key(process, number))
        if entry is None:
            self.judge(process, number, before, None, "read")
            return
        with entry:
            data, header, ok = bytes(entry.view), entry.header, entry.ok()
        version = self.judge(process, number, before, data, "read")
        if version >= 0 and header != self.plan.header(process, number, version):
            self.fault("wrong", f"{process}/{number}: header {header.hex()}")
        if not ok:
            self.fault("other", f"{process}/{number}: pages are zeros")

    def locate(self) -> None:
        process, number = self._any()
        cache = self.caches[self.plan.space(number)]
        place = self.timed("call", cache.locate, self.plan.key(process, number))
        if place is None:
            self.count("misses")
            return
        with place:
            data = os.pread(place.fd, place.nbytes, place.offset)
        # Nothing checks bytes on that way: a damaged block is no fault of the engine.
        version = self.plan.version_of(data, process, number)
        self.count("hits" if version >= 0 else "misses")
        if version > int(self.oracle.pending[process, number]):
            self.fault("stale", f"{process}/{number} by locate: {version}")

    def anchor(self) -> None:
        """Pins the block just stored: until the pin ends, nobody may miss it."""
        number = self.random.randrange(ANCHORS)
        if number in self.anchors:
            self.oracle.anchor[self.me, number] = 0
            view = self.anchors.pop(number)
            version = self.plan.version_of(view, self.me, number)
            if version != int(self.oracle.present[self.me, number]):
                self.fault("wrong", f"anchor {self.me}/{number} shows {version}")
            return
        version = self._store(number)
        if version == 0:
            return
        view = self.timed("call", self.cache.get, self.plan.key(self.me, number))
        if view is None:
            return  # evicted at once
        if self.plan.version_of(view, self.me, number) != version:
            self.fault("wrong", f"anchor {self.me}/{number} is not {version}")
            return
        self.anchors[number] = view
        self.oracle.anchor[self.me, number] = version
        if self.plant == "forget":
            self.cache.remove(self.plan.key(self.me, number))

    def release_anchors(self) -> None:
        self.oracle.anchor[self.me, :] = 0
        self.anchors.clear()

    # ---- chains ---------------------------------------------------------------------

    def _chain(self) -> tuple[int, list[bytes]]:
        chain = min(
            self.random.randrange(self.plan.chains),
            self.random.randrange(self.plan.chains),
        )
        numbers = range(self.plan.chain_blocks)
        return chain, [self.plan.chain_key(chain, number) for number in numbers]

    def store_chain(self) -> None:
        chain, keys = self._chain()
        touch = bool(self.random.randrange(2))
        ahead = self.timed("call", self.chains.longest_prefix, keys, touch=touch)
        numbers = range(ahead, min(ahead + self.random.randrange(1, 9), len(keys)))
        items = [(keys[at], self.plan.chain_payload(chain, at)) for at in numbers]
        if not self._may_take([len(data) for _, data in items]):
            return
        parent = keys[ahead - 1] if ahead else None
        answers = self.timed(
            "call", self.chains.put_many, items, chain=True, parent=parent
        )
        self.count("puts", sum(answers))
        self.count("refused", len(answers) - sum(answers))

    def load_chain(self) -> None:
        chain, keys = self._chain()
        ahead = self.timed("call", self.chains.longest_prefix, keys, touch=True)
        first = self.random.randrange(ahead) if ahead else 0
        last = min(ahead, first + max(1, (16 << 20) // self.plan.longest))
        wanted = [self.plan.chain_payload(chain, at) for at in range(first, last)]
        targets: list[Any] = []
        for data in wanted:
            target = bytearray(b"\xa5" * (len(data) + 8))
            cut = self.random.randrange(len(data) + 1)
            view = memoryview(target)
            targets.append([view[:cut], view[cut : len(data)]])
            targets[-1].append(view[len(data) :])
        if self.random.randrange(4) == 0:
            self.timed("call", self.chains.prefetch, keys[first:last])
        answers = self.timed(
            "call", self.chains.get_many_into, keys[first:last], targets
        )
        for at, (data, target, answer) in enumerate(
            zip(wanted, targets, answers, strict=True), first
        ):
            self.count("hits" if answer else "misses")
            if not answer:
                continue
            self.count("bytes_checked", len(data))
            if b"".join(target[:2]) != data:
                self.fault("wrong", f"chain {chain} block {at} by get_many_into")
            if bytes(target[2]) != b"\xa5" * 8:
                self.fault("wrong", f"chain {chain} block {at}: behind its end")

    def remove_of_chain(self) -> None:
        _, keys = self._chain()
        self.timed("call", self.chains.remove, self.random.choice(keys))

    def touch(self) -> None:
        blocks = [self._any() for _ in range(4)]
        self.timed("call", self.cache.touch, [self.plan.key(*each) for each in blocks])

    def look_up(self) -> None:
        process, number = self._any()
        self.timed(
            "call", self.cache.contains_many, b"".join([self.plan.key(process, number)])
        )
        chain, keys = self._chain()
        found = self.timed("call", self.chains.get, keys[0])
        if found is not None and bytes(found) != self.plan.chain_payload(chain, 0):
            self.fault("wrong", f"chain {chain} block 0 by get")

    # ---- care -----------------------------------------------------------------------

    def events(self) -> None:
        events = self.timed("call", self.cache.events, self.since)
        numbers = [event.number for event in events.items]
        if numbers != sorted(set(numbers)) or (numbers and numbers[0] <= self.since):
            self.fault("other", f"events {numbers[:3]} ... since {self.since}")
        if len(numbers) + events.lost != events.last - self.since:
            self.fault("other", f"{len(numbers)} + {events.lost} of {events.last}")
        self.since = events.last
        self.count("events", len(numbers))

    def statistics(self) -> None:
        stats = self.timed("call", self.cache.stats).volume
        for name in ("lookups", "puts_stored", "evictions", "page_bytes_written"):
            if stats[name] < self.counters.get(name, 0):
                self.fault("other", f"{name} has shrunk to {stats[name]}")
            self.counters[name] = stats[name]
        if stats.failed_paths or stats.detached or stats.read_errors:
            self.fault("other", f"{stats!r}")
        if stats.resident_bytes > stats.capacity_bytes:
            self.fault("other", f"{stats.resident_bytes} bytes are resident")

    def sync(self) -> None:
        if not self.oracle.unsynced[0]:
            self.timed("sync", self.cache.sync)

    def drop_pages(self) -> None:
        """What is clean leaves the page cache; later reads are cold."""
        for path in self.paths:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    def as_a_reader(self) -> None:
        """Without a slot: its reads are copies, and never wrong."""
        try:
            reader = self.timed(
                "open", Cache.open, self._path(), self.plan.config({}), mode="r"
            )
        except OpenTimeoutError:
            self.count("open_timeouts")
            return
        with reader:
            for _ in range(8):
                process, number = self._any()
                if self.plan.space(number) == "":
                    key = self.plan.key(process, number)
                    before = self.before(process, number)
                    view = self.timed("call", reader.get, key)
                    self.judge(process, number, before, view, "a reader")

    def list(self) -> None:
        for entry in self.cache.ls():
            if not 0 <= entry.path_index < self.plan.files or entry.nbytes < 0:
                self.fault("other", f"listed: {entry}")

    def reopen(self) -> None:
        self.close()
        gc.collect()
        self.open()

    def verify(self) -> None:
        try:
            report = self.timed("sync", self.cache.verify)
        except CycloneError as error:
            self.fault("other", f"verify: {error}")
            return
        if report.structure_faults or report.unreadable:
            self.fault("other", f"verify: {report}")
