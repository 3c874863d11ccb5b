# SPDX-License-Identifier: Apache-2.0
"""The whole API against a dictionary, by hypothesis.

Volume: large enough that nothing is evicted, so every answer is known.
Small:  16 MiB, where a miss is allowed and wrong bytes are not.

Both hold views over everything that follows, and check them before they are let go.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from crash.cases_restart import store_one_and_end
from crash.nursery import Nursery
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cyclone_kv import Cache, CacheConfig, ReadOnlyError

SPACES = ("", "second")
KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(10)]
KEYS += [b"a short key", b"k", KEYS[0] + b"longer", hashlib.sha256(b"\0").digest()[:31]]
KEYS.append(hashlib.sha256(b"a short key").digest())  # the digest of another one

keys = st.sampled_from(KEYS)
key_lists = st.lists(keys, min_size=1, max_size=6)
spaces = st.sampled_from(SPACES)
lengths = st.one_of(
    st.sampled_from([0, 1, 511, 4095, 4096, 4097, 65_536]), st.integers(0, 200_000)
)
seeds = st.integers(0, 2**32)
headers = st.sampled_from([b"", b"h", b"float16 (2, 64)" * 300])
handles = st.integers(0, 2)

Block = tuple[bytes, bytes]  # payload, header


def payload(length: int, seed: int) -> bytes:
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(length)


def event_key(key: bytes) -> tuple[bytes, bool]:
    return (key, False) if len(key) == 32 else (hashlib.sha256(key).digest(), True)


def tag_of(space: str) -> bytes:
    return hashlib.sha256(space.encode()).digest()[:16] if space else bytes(16)


@functools.cache
def nursery() -> Nursery:
    return Nursery()


@pytest.fixture(scope="module", autouse=True)
def _close_nursery():
    yield
    if nursery.cache_info().currsize:
        nursery().close()


class Machine(RuleBasedStateMachine):
    """What both machines do; `exact` says that nothing is ever evicted."""

    exact = True
    capacity = 256 << 20
    files = 1

    def __init__(self) -> None:
        super().__init__()
        parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = Path(tempfile.mkdtemp(prefix="ckv-model-", dir=parent))
        self.paths = [self.folder / f"{i}.cyc" for i in range(self.files)]
        self.model: dict[tuple[str, bytes], Block] = {}
        self.held: list[tuple[Any, bytes]] = []
        self.present: set[tuple[bytes, bytes, bool]] = set()
        self.last_event = 0
        self.caches: dict[str, list[Cache]] = {}
        self.gets = 0

    @initialize()
    def start(self) -> None:
        self.open_all(CacheConfig(capacity=self.capacity))

    def where(self) -> Any:
        return self.paths if self.files > 1 else self.paths[0]

    def open_all(self, config: CacheConfig | None = None) -> None:
        self.caches = {
            space: [Cache.open(self.where(), config, namespace=space) for _ in range(3)]
            for space in SPACES
        }

    def teardown(self) -> None:
        try:
            if self.caches:
                self.check_held()
                self.check_all()
                report = self.cache("", 0).verify()
                assert report.ok, report.first_fault
                if self.exact:
                    assert report.entries_checked == len(self.model)
                self.close_all()
                self.check_held()
        finally:
            self.held.clear()
            gc.collect()
            shutil.rmtree(self.folder, ignore_errors=True)

    def close_all(self) -> None:
        for caches in self.caches.values():
            for cache in caches:
                cache.close()
        self.caches = {}

    def cache(self, space: str, handle: int) -> Cache:
        return self.caches[space][handle]

    def check(self, space: str, key: bytes, found: bytes | None) -> None:
        wanted = self.model.get((space, key))
        if found is None:
            assert wanted is None or not self.exact, "a stored block is a miss"
            self.model.pop((space, key), None)
        else:
            assert wanted is not None, "a block that was never stored, or was removed"
            assert found == wanted[0], "wrong bytes"

    def stored(self, space: str, key: bytes, block: Block, overwrite) -> None:
        old = self.model.get((space, key))
        same = old is not None and (len(old[0]), len(old[1])) == (
            len(block[0]),
            len(block[1]),
        )
        if overwrite or not same:
            self.model[space, key] = block

    # ---- storing --------------------------------------------------------------------

    @rule(
        space=spaces,
        handle=handles,
        key=keys,
        length=lengths,
        seed=seeds,
        header=headers,
        overwrite=st.booleans(),
        pieces=st.integers(1, 3),
    )
    def put(self, space, handle, key, length, seed, header, overwrite, pieces) -> None:
        data = payload(length, seed)
        self.forget_evicted(space, key)
        size = len(data) // pieces + 1
        parts = [data[at : at + size] for at in range(0, len(data) or 1, size)]
        cache = self.cache(space, handle)
        answer = cache.put(
            key,
            data if pieces == 1 else parts,
            header=header or None,
            overwrite=overwrite,
        )
        assert answer or not self.exact
        if answer:
            self.stored(space, key, (data, header), overwrite)
            if self.exact:
                assert cache.contains(key), "C16: stored, and not there"
        elif overwrite:
            self.model_unknown(space, key)

    def forget_evicted(self, space: str, key: bytes) -> None:
        """A block that was evicted is not "present" to a put that comes next."""
        if not self.exact and not self.cache(space, 0).contains(key):
            self.model.pop((space, key), None)

    def model_unknown(self, space: str, key: bytes) -> None:
        if not self.cache(space, 0).contains(key):
            self.model.pop((space, key), None)

    @rule(
        space=spaces,
        handle=handles,
        names=key_lists,
        length=lengths,
        seed=seeds,
        chain=st.booleans(),
        parent=st.none() | keys,
    )
    def put_many(self, space, handle, names, length, seed, chain, parent) -> None:
        items = [
            (key, payload(length, seed + i), b"many") for i, key in enumerate(names)
        ]
        for key in names:
            self.forget_evicted(space, key)
        answers = self.cache(space, handle).put_many(
            items, chain=chain, parent=parent if chain else None
        )
        order = range(len(items) - 1, -1, -1) if chain else range(len(items))
        for at in order:
            assert answers[at] or not self.exact
            if answers[at]:
                self.stored(space, items[at][0], items[at][1:], False)

    @rule(
        space=spaces,
        handle=handles,
        key=keys,
        length=lengths,
        seed=seeds,
        commit=st.booleans(),
        overwrite=st.booleans(),
    )
    def reserve(self, space, handle, key, length, seed, commit, overwrite) -> None:
        data = payload(length, seed)
        self.forget_evicted(space, key)
        slot = self.cache(space, handle).reserve(key, length, overwrite=overwrite)
        assert bytes(slot.view) == bytes(length), "the view of a reservation: zeros"
        slot.view[:] = data
        if not commit:
            slot.abort()
            assert not slot.stored
            return
        answer = slot.commit()
        assert answer == slot.stored
        assert answer or not self.exact
        if answer:
            self.stored(space, key, (data, b""), overwrite)

    # ---- removing -------------------------------------------------------------------

    @rule(space=spaces, handle=handles, key=keys)
    def remove(self, space, handle, key) -> None:
        answer = self.cache(space, handle).remove(key)
        known = self.model.pop((space, key), None) is not None
        assert answer == known if self.exact else known or not answer
        assert not self.cache(space, 0).contains(key)

    @rule(space=spaces, handle=handles)
    def clear(self, space, handle) -> None:
        count = self.cache(space, handle).clear()
        known = [name for name in self.model if name[0] == space]
        assert count == len(known) if self.exact else count <= len(known)
        for name in known:
            del self.model[name]
        assert len(self.cache(space, 0)) == 0

    # ---- reading --------------------------------------------------------------------

    @rule(space=spaces, handle=handles, key=keys, hold=st.booleans())
    def get(self, space, handle, key, hold) -> None:
        view = self.cache(space, handle).get(key)
        self.check(space, key, None if view is None else bytes(view))
        if view is not None:
            assert view.readonly
            if hold:
                self.hold(view, bytes(view))

    def hold(self, view: Any, data: bytes) -> None:
        if len(self.held) < 24:
            self.held.append((view, data))

    @rule(space=spaces, handle=handles, key=keys, hold=st.booleans())
    def read(self, space, handle, key, hold) -> None:
        entry = self.cache(space, handle).read(key)
        if entry is None:
            self.check(space, key, None)
            return
        self.check(space, key, bytes(entry.view))
        assert entry.nbytes == len(entry) == len(self.model[space, key][0])
        assert entry.header == self.model[space, key][1]
        assert entry.ok()
        if hold:
            self.hold(entry.view[1:], self.model[space, key][0][1:])
        else:
            entry.release()

    @rule(space=spaces, handle=handles, key=keys, slack=st.sampled_from([-1, 0, 7]))
    def get_into(self, space, handle, key, slack) -> None:
        block = self.model.get((space, key))
        length = len(block[0]) if block else 100
        target = bytearray(max(0, length + slack))
        count = self.cache(space, handle).get_into(key, target)
        if block is not None and len(target) < length:
            assert count is None, "a target that is too short"
            return
        self.check(space, key, None if count is None else bytes(target[:count]))

    @rule(space=spaces, handle=handles, names=key_lists, cut=st.integers(0, 99))
    def get_many_into(self, space, handle, names, cut) -> None:
        targets: list[Any] = []
        for key in names:
            block = self.model.get((space, key))
            target = bytearray(len(block[0]) if block else 10)
            view = memoryview(target)
            targets.append(view if cut % 2 else [view[:cut], view[cut:]])
        answers = self.cache(space, handle).get_many_into(names, targets)
        for key, target, answer in zip(names, targets, answers, strict=True):
            whole = target if cut % 2 else b"".join(target)
            self.check(space, key, bytes(whole) if answer else None)

    @rule(space=spaces, handle=handles, names=key_lists, touch=st.booleans())
    def lookups(self, space, handle, names, touch) -> None:
        cache = self.cache(space, handle)
        known = [(space, key) in self.model for key in names]
        leading = [*known, False].index(False)
        answers = cache.contains_many(names)
        prefix = cache.longest_prefix(names, touch=touch)
        found = cache.touch(names) if touch else cache.prefetch(names)
        assert answers == [cache.contains(key) for key in names]
        if self.exact:
            assert answers == known
            assert prefix == leading
            assert found == sum(known)
        else:
            assert all(k or not a for a, k in zip(answers, known, strict=True))
            assert prefix == [*answers, False].index(False)

    @rule(space=spaces, handle=handles, key=keys)
    def locate(self, space, handle, key) -> None:
        place = self.cache(space, handle).locate(key)
        if place is None:
            self.check(space, key, None)
            return
        with place:
            assert place.offset % 4096 == 0
            data = os.pread(place.fd, place.nbytes, place.offset)
            self.check(space, key, data)

    # ---- care -----------------------------------------------------------------------

    @rule(handle=handles)
    def sync(self, handle) -> None:
        self.cache("", handle).sync()

    @rule(handle=handles, repair=st.booleans())
    def verify(self, handle, repair) -> None:
        report = self.cache("", handle).verify(repair=repair)
        assert report.ok, report.first_fault
        assert report.repaired == 0
        if self.exact:
            assert report.entries_checked == len(self.model)

    @rule(handle=handles, limit=st.sampled_from([1, 3, 4096]))
    def events(self, handle, limit) -> None:
        while True:
            batch = self.cache("", handle).events(self.last_event, limit=limit)
            assert batch.lost == 0
            for event in batch.items:
                assert event.number == self.last_event + 1
                self.last_event = event.number
                name = (event.namespace_tag, event.key, event.digested)
                if event.kind == "stored":
                    self.present.add(name)
                elif event.kind == "removed":
                    self.present.discard(name)
                else:
                    self.present = {
                        each for each in self.present if each[0] != event.namespace_tag
                    }
            assert batch.last == self.last_event
            if not batch.items:
                break
        listed = {
            (entry.namespace_tag, entry.key, entry.digested)
            for entry in self.cache("", handle).ls()
        }
        assert self.present == listed, "stored minus removed minus cleared"
        known = {(tag_of(space), *event_key(key)) for space, key in self.model}
        assert listed == known if self.exact else listed <= known

    @rule(handle=handles)
    def stats_add_up(self, handle) -> None:
        stats = self.cache("", handle).stats()
        for counters in (stats.volume, stats.process):
            assert counters.lookups == counters.hits + counters.misses
            assert all(
                value >= 0 for name, value in counters.items() if name[:4] != "last"
            )
        listed = list(self.cache("", handle).ls())
        assert stats.volume.entries == len(listed)
        pages = sum(max(1, -(-(e.nbytes + e.header_nbytes) // 4096)) for e in listed)
        assert stats.volume.resident_bytes == pages * 4096
        assert stats.volume.resident_bytes <= stats.volume.capacity_bytes
        assert stats.volume.pinned_entries == len(self.held)
        assert stats.volume.processes == 1
        assert sum(len(self.cache(space, 0)) for space in SPACES) == len(listed)

    @rule(space=spaces, key=keys)
    def read_only(self, space, key) -> None:
        with Cache.open(self.where(), mode="r", namespace=space) as cache:
            view = cache.get(key)
            self.check(space, key, None if view is None else bytes(view))
            present = cache.contains(key)
            assert present == self.cache(space, 0).contains(key)
            assert len(cache) == len(self.cache(space, 0))
            with pytest.raises(ReadOnlyError):
                cache.put(key, b"refused")

    # ---- other lives ----------------------------------------------------------------

    def begin_another_life(self) -> None:
        self.present.clear()
        self.last_event = 0
        for space, key in self.model:
            if self.cache(space, 0).contains(key):
                self.present.add((tag_of(space), *event_key(key)))

    @rule()
    def reopen(self) -> None:
        held = bool(self.held)
        self.close_all()
        self.check_held()
        self.open_all()
        if not held:  # else a view kept the volume, and its events, alive
            self.begin_another_life()

    @precondition(lambda self: not self.held)
    @rule(space=spaces, key=keys, seed=seeds, how=st.sampled_from(["exit", "kill"]))
    def reopen_after_a_process_that_just_ended(self, space, key, seed, how) -> None:
        """It stores one block and ends without closing; nobody else is there."""
        data = payload(9000, seed)
        self.close_all()
        status = nursery().call(
            store_one_and_end,
            path=[str(path) for path in self.paths],
            space=space,
            key=key.hex(),
            data=data.hex(),
            how=how,
        )
        assert status == (0 if how == "exit" else -signal.SIGKILL)
        self.model[space, key] = (data, b"")
        self.open_all()
        self.begin_another_life()

    @rule(at=st.integers(0, 23))
    def let_go(self, at) -> None:
        if at < len(self.held):
            view, data = self.held.pop(at)
            assert bytes(view) == data, "N2: a held view has changed"

    def check_held(self) -> None:
        for view, data in self.held:
            assert bytes(view) == data, "N2: a held view has changed"

    def check_all(self) -> None:
        for (space, key), block in list(self.model.items()):
            found = self.cache(space, 1).read(key)
            self.check(space, key, None if found is None else bytes(found.view))
            if found is not None:
                assert found.header == block[1]

    @invariant()
    def counts_agree(self) -> None:
        if self.caches and self.exact:
            for space in SPACES:
                known = sum(name[0] == space for name in self.model)
                assert len(self.cache(space, 0)) == known


class SmallMachine(Machine):
    """Everything is evicted sooner or later; what is found is right."""

    exact = False
    capacity = 16 << 20

    @rule(space=spaces, handle=handles, seed=seeds, count=st.integers(1, 12))
    def fill(self, space, handle, seed, count) -> None:
        for number in range(count):
            key = hashlib.sha256(f"{seed} {number}".encode()).digest()
            self.forget_evicted(space, key)
            data = payload(1_500_000 + seed % 77_777, seed + number)
            if self.cache(space, handle).put(key, data):
                self.stored(space, key, (data, b""), False)
                view = self.cache(space, handle).get(key)
                assert view is not None, "C16: stored, and evicted by nothing"
                assert bytes(view) == data


class PairMachine(Machine):
    """A set of two files."""

    files = 2


EXAMPLES = max(5, settings().max_examples // 4)
STEPS = settings(stateful_step_count=40, max_examples=EXAMPLES)


@pytest.mark.parametrize(
    "machine", [Machine, PairMachine], ids=["one file", "two files"]
)
def test_n2_the_volume_agrees_with_a_dictionary(machine: type[Machine]):
    run_state_machine_as_test(machine, settings=STEPS)


def test_n1_i1_a_volume_that_evicts_never_serves_other_bytes():
    run_state_machine_as_test(SmallMachine, settings=STEPS)
