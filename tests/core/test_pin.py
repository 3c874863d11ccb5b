# SPDX-License-Identifier: Apache-2.0
"""Pins against kills: two calls interleaved at every named point, and storms."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable

import pytest
from callbacks import lasting_callback
from support import compile as c

from models import DEAD, DYING, MIB, OK, OVERWRITE, PRESENT, Engine, pattern

NAMES = [bytes([i]) * 32 for i in range(16)]
OLD, NEW = pattern(1, MIB), pattern(2, MIB)


@pytest.fixture
def engine(core, volume_path):
    with Engine(core, volume_path, expected_object_bytes=64 * 1024) as engine:
        yield engine
        assert not any(engine.region.masks[0 : engine.region.layout.entry_count])
        assert not any(
            word & 0xFFFFFFFF
            for word in engine.volume.pins[0 : engine.region.layout.entry_count]
        )
        engine.assert_clean()


class Points:
    """Calls `act` once, when the point `name` is reached for the `count`-th time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: list[str] = []
        self.at: int | None = None
        self.act: Callable[[str], None] | None = None
        self.inside = False
        self.failure: BaseException | None = None
        self.callback = lasting_callback(
            engine.ffi, "void (*)(const char *)", self.reached
        )

    def reached(self, text) -> None:
        name = self.engine.ffi.string(text).decode()
        # The thread of maintenance passes points of its own.
        if self.inside or name.startswith(("maintenance.", "rebuild.", "checkpoint.")):
            return
        self.seen.append(name)
        if self.act is not None and self.at in (None, len(self.seen) - 1):
            self.inside = True
            try:
                self.act(name)
            except BaseException as error:  # shown by the test, not by cffi
                self.failure = error
            finally:
                self.inside = False

    def run(self, call, act=None, at=None):
        self.seen, self.at, self.act, self.failure = [], at, act, None
        self.engine.lib.ckv_point_hook = self.callback
        try:
            result = call()
        finally:
            self.engine.lib.ckv_point_hook = self.engine.ffi.NULL
        if self.failure is not None:
            raise AssertionError(f"at {self.seen[-1]}") from self.failure
        return result


def prepare(engine: Engine) -> None:
    engine.clear()
    assert engine.put(NAMES[0], OLD) == OK
    for i in range(1, 8):
        assert engine.put(NAMES[i], pattern(i, MIB)) in (OK, PRESENT)


def lap(engine: Engine) -> None:
    """Puts that would take every page that may be taken."""
    for i in range(40):
        engine.put(i.to_bytes(32, "big"), bytes(MIB), flags=OVERWRITE)


ACTIONS: dict[str, Callable[[Engine], object]] = {
    "overwrite": lambda e: e.put(NAMES[0], NEW, flags=OVERWRITE),
    "remove": lambda e: e.remove(NAMES[0]),
    "clear": lambda e: e.clear(),
    "lap": lap,
    "remove and store": lambda e: (e.remove(NAMES[0]), e.put(NAMES[0], NEW)),
}


@pytest.mark.parametrize("how", ["get", "get_into"])
@pytest.mark.parametrize("action", list(ACTIONS))
def test_a_get_that_is_overtaken_anywhere(engine, how, action):
    """Right bytes or a miss; never a miss by an overwrite; views stay as they are."""
    points = Points(engine)
    target = bytearray(MIB)

    def call():
        if how == "get":
            return engine.get(NAMES[0])
        return engine.get_into(NAMES[0], target)[0]

    def act(name: str) -> None:
        if action == "remove and store" and name in ("pin.first", "pin.last"):
            return  # it would verify and so pin the entry whose word is locked
        ACTIONS[action](engine)

    for _ in range(2):  # the first one also maps the window
        prepare(engine)
        result = points.run(call)
        if how == "get":
            result.release()
    count = len(points.seen)
    assert count >= 4, points.seen
    for at in range(count):
        prepare(engine)
        target[:] = bytes(MIB)
        result = points.run(call, act, at)
        where = points.seen[at]
        if how == "get":
            data = result.data if result is not None else None
        else:
            data = bytes(target) if result == OK else None
        assert data in (None, OLD, NEW), where
        if action == "overwrite":
            assert data is not None, where
        if how == "get" and result is not None:
            lap(engine)
            engine.clear()
            lap(engine)
            assert result.data == data, where
            result.release()


@pytest.mark.parametrize("longer", [False, True])
def test_an_overwrite_hides_the_key_at_no_point(engine, longer):
    """A reader at each point of the put: the old value, then the new one for ever."""
    points = Points(engine)
    prepare(engine)
    new = NEW + b"more" if longer else NEW
    seen: list[bytes | None] = []

    def look(name: str) -> None:
        if name in ("pin.first", "pin.last"):
            return  # the word of the entry is locked by the very thread that asks
        seen.append(engine.read(NAMES[0]))
        assert engine.contains(NAMES[0]) == [True]

    call = lambda: engine.put(NAMES[0], new, flags=OVERWRITE)  # noqa: E731
    assert points.run(call, look) == OK
    assert len(seen) > 10
    assert None not in seen
    changes = sum(a != b for a, b in itertools.pairwise(seen))
    assert seen[0] == OLD
    assert seen[-1] == new
    assert changes == 1
    assert engine.count() == 8


def test_an_old_version_does_not_come_back(engine):
    """The new one is evicted before its put is done: then there is none."""
    points = Points(engine)
    prepare(engine)
    call = lambda: engine.put(NAMES[0], NEW, flags=OVERWRITE)  # noqa: E731

    def evict(name: str) -> None:
        found = engine.find(NAMES[0])
        if found is not None and found.record.sequence > before:
            reason = engine.lib.CKV_KILL_EVICT
            killed.append(name)
            engine.lib.ckv_entry_kill(engine.volume, found.entry, found.state, reason)

    killed: list[str] = []
    before = 2**63
    assert points.run(call) == OK
    for at in range(len(points.seen)):
        prepare(engine)
        before = int(engine.find(NAMES[0]).record.sequence)
        evicted = len(killed)
        assert points.run(call, evict, at) == OK
        expected = None if len(killed) > evicted else NEW
        assert engine.read(NAMES[0]) == expected, points.seen[at]
    assert "put.shown" in killed


def test_a_first_put_is_seen_whole_or_not_at_all(engine):
    points = Points(engine)
    prepare(engine)
    seen: list[bytes | None] = []
    call = lambda: engine.put(b"new", NEW, header=b"h" * 5000)  # noqa: E731
    assert points.run(call, lambda name: seen.append(engine.read(b"new"))) == OK
    assert set(seen) == {None, NEW}
    first = seen.index(NEW)
    assert all(data == NEW for data in seen[first:])


def test_a_remove_is_final_at_each_point(engine):
    points = Points(engine)
    prepare(engine)
    seen: list[bytes | None] = []
    call = lambda: engine.remove(NAMES[0])  # noqa: E731
    assert points.run(call, lambda name: seen.append(engine.read(NAMES[0]))) == OK
    gone = seen.index(None)
    assert all(data is None for data in seen[gone:])
    assert all(data == OLD for data in seen[:gone])
    assert engine.count() == 7


@pytest.mark.parametrize("action", ["pin", "remove", "overwrite"])
def test_an_eviction_that_is_overtaken_anywhere(engine, action):
    """A pin that comes late keeps the pages; nothing is freed twice."""
    points = Points(engine)

    def act(name: str) -> None:
        if action == "pin":
            lease = engine.get(NAMES[0])
            if lease is not None:
                held.append(lease)
        else:
            ACTIONS[action](engine)

    def call():
        return engine.put(b"big", pattern(9, 12 * MIB))

    def fill() -> None:
        """The cursor is before the block that matters."""
        engine.clear()
        lap(engine)
        while engine.region.stripes[0].cursor_page != 0:
            assert engine.put(os.urandom(32), bytes(MIB)) == OK
        assert engine.put(NAMES[0], OLD) == OK
        for i in range(1, 16):
            assert engine.put(NAMES[i], pattern(i, MIB)) == OK

    fill()
    held: list = []
    points.run(call)
    reached = list(points.seen)
    # An overwrite needs the stripe that the caller has locked: it would wait a second.
    steps = [
        at
        for at, name in enumerate(reached)
        if action == "pin" or not name.startswith(("stripe.", "kill.", "put.evicted"))
    ]
    if action != "pin":
        steps = [at for at in steps if reached[at] not in ("put.locked", "put.cursor")]
        steps = [
            at for at in steps if reached[at] not in ("put.occupy", "put.reserved")
        ]
    seen_names = set()
    for at in steps:
        if reached[at] in seen_names:
            continue  # the same point for another victim
        seen_names.add(reached[at])
        fill()
        held = []
        status = points.run(call, act, at)
        assert status >= 0
        if status == OK:
            assert engine.read(b"big") == pattern(9, 12 * MIB)
        for lease in held:
            assert lease.data == OLD, reached[at]
            lap(engine)
            assert lease.data == OLD, reached[at]
            lease.release()
        engine.assert_clean()
    assert len(seen_names) > 5


def test_a_clear_at_any_point_of_a_put_leaves_the_count_right(core, volume_path):
    wrong = []
    with Engine(core, volume_path, expected_object_bytes=64 * 1024) as engine:
        points = Points(engine)
        assert points.run(lambda: engine.put(b"k", b"v")) == OK
        for at, name in enumerate(list(points.seen)):
            engine.clear()
            points.run(lambda: engine.put(b"k", b"v"), lambda _: engine.clear(), at)
            engine.put(b"l", b"v")
            if engine.count() != len(engine.list()):
                wrong.append(name)
                engine.verify(repair=True)
    assert wrong == []


@pytest.mark.parametrize("which", [1, 5, 11])
def test_a_victim_that_another_thread_condemns(engine, which):
    """Both threads of one process write the same word: whose DYING it is counts."""
    points = Points(engine)
    for i in range(16):
        assert engine.put(NAMES[i], pattern(i, MIB)) == OK
    victim = engine.find(NAMES[which])
    done: list[bool] = []

    def act(name: str) -> None:
        if name == "kill.condemned" and not done:
            reason = engine.lib.CKV_KILL_REMOVE
            done.append(
                engine.lib.ckv_entry_condemn(
                    engine.volume, victim.entry, victim.state, reason
                )
            )

    big = pattern(9, 12 * MIB)
    assert points.run(lambda: engine.put(b"big", big), act) >= 0
    assert done == [True]
    assert engine.region.states[victim.entry] & 7 == DYING  # still in our hands
    engine.lib.ckv_entry_bury(engine.volume, victim.entry)
    assert engine.read(b"big") in (None, big)
    assert engine.put(b"big", big) in (OK, PRESENT)
    assert engine.read(b"big") == big


def test_counts_and_bits(engine):
    lib, volume = engine.lib, engine.volume
    assert engine.put(b"k", b"v") == OK
    entry, state = engine.find(b"k").entry, engine.find(b"k").state
    bit = 1 << volume.slot
    for _ in range(1001):
        assert lib.ckv_pin(volume, entry, state)
    assert engine.region.masks[entry] == bit
    lib.ckv_pin_set_populated(volume, entry, 0x123456789)
    assert lib.ckv_pin_populated(volume, entry, 0x123456789)
    assert not lib.ckv_pin_populated(volume, entry, 0x12345678A)
    assert not lib.ckv_pin(volume, entry, state + 8)
    assert not lib.ckv_pin(volume, entry, 0)
    engine.remove(b"k")
    assert engine.kind(entry) == DEAD
    assert not lib.ckv_pin(volume, entry, state)
    for i in range(1001):
        assert engine.region.masks[entry] == bit, i
        lib.ckv_unpin(volume, entry)
    assert engine.region.masks[entry] == 0
    assert lib.ckv_pin_populated(volume, entry, 0x123456789)


def test_bits_of_others_are_left_alone(engine):
    lib, volume = engine.lib, engine.volume
    assert engine.put(b"k", b"v") == OK
    entry, state = engine.find(b"k").entry, engine.find(b"k").state
    others = ~(1 << volume.slot) & 2**64 - 1
    engine.region.masks[entry] = others
    assert lib.ckv_pin(volume, entry, state)
    assert engine.region.masks[entry] == 2**64 - 1
    lib.ckv_unpin(volume, entry)
    assert engine.region.masks[entry] == others
    engine.region.masks[entry] = 0


# ---- threads ------------------------------------------------------------------------


def race(sanitize: str):
    flags = ["-DCKV_POINTS", "-O1", *c.sanitizer_flags(sanitize)]
    source = c.ROOT / "tests" / "core" / "stress" / "race.c"
    objects = c.compile_objects([*c.core_sources(), source], flags)
    name = f"race-{sanitize.replace(',', '-') or 'plain'}"
    return c.link(objects, c.BUILD / "core" / name, c.sanitizer_flags(sanitize))


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_storm(volume_path, sanitize):
    """Threads that pin, kill, overwrite and evict the same few entries (race.c)."""
    program = race(sanitize)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=0 exitcode=66"}
    environment.pop("LD_PRELOAD", None)  # the runtime of another sanitizer
    result = subprocess.run(
        [str(program), str(volume_path), "--seconds", "4"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    assert "WARNING: ThreadSanitizer" not in result.stderr, result.stderr[-6000:]
