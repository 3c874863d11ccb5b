# SPDX-License-Identifier: Apache-2.0
"""A walk through the whole API that reaches every named point of the engine.

The journal says what has been acknowledged.  It is a file that the process maps, so it
is complete up to the instruction at which the process was killed.  Each key has a line:

    state   a put or removal that has not returned leaves its key "open": both outcomes
            are right.  Otherwise it is "stored" (with its version) or "gone".
"""

from __future__ import annotations

import mmap
import os
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crash.blobs import blob, fault_of, key_of

from cyclone_kv import Cache, CacheConfig, VolumeError

CAPACITY = 16 << 20
KEYS = 64  # of the journal; those of the filling are not in it
LAP = 20  # blocks of FILL_BYTES that are more than one lap
FILL_BYTES = 900_000
SIZES = (0, 1, 511, 4096, 4097, 40_000, 131_072, 300_001)
OTHER = "another namespace"

UNKNOWN, GONE, STORED, OPEN = range(4)


def length_of(number: int, version: int) -> int:
    return SIZES[(number + version) % len(SIZES)]


class Journal:
    """What one process was told about its keys."""

    _LINE = struct.Struct("<IIII")  # state, version, version to come, unused
    _HEAD = struct.Struct("<IIII")  # filling began, other namespace cleared, unused

    def __init__(self, path: Path) -> None:
        size = self._HEAD.size + KEYS * self._LINE.size
        with path.open("ab+") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)

    def line(self, number: int) -> tuple[int, int, int]:
        at = self._HEAD.size + number * self._LINE.size
        state, version, coming, _ = self._LINE.unpack_from(self._map, at)
        return state, version, coming

    def write(self, number: int, state: int, version: int, coming: int) -> None:
        at = self._HEAD.size + number * self._LINE.size
        self._LINE.pack_into(self._map, at, state, version, coming, 0)

    @property
    def filling(self) -> bool:
        return bool(self._HEAD.unpack_from(self._map)[0])

    def begin_filling(self) -> None:
        self._HEAD.pack_into(self._map, 0, 1, 0, 0, 0)


class Traveller:
    """Does what it is told and writes down what it was answered."""

    def __init__(self, who: str, journal: Journal) -> None:
        self.who = who
        self.journal = journal

    def key(self, number: int) -> bytes:
        return key_of(self.who, number)

    def put(self, cache: Cache, number: int) -> None:
        state, version, coming = self.journal.line(number)
        new = max(version, coming) + 1
        self.journal.write(number, OPEN, version, new)
        data = blob(self.key(number), length_of(number, new), new)
        stored = cache.put(self.key(number), data, header=b"h" * (number % 3))
        if not stored:
            state, new = OPEN, version  # what was replaced may be gone
        self.journal.write(number, STORED if stored else state, new, max(new, coming))

    def replace(self, cache: Cache, number: int) -> None:
        _, version, coming = self.journal.line(number)
        new = max(version, coming) + 1
        self.journal.write(number, OPEN, version, new)
        data = blob(self.key(number), length_of(number, new), new)
        stored = cache.put(self.key(number), [data[:99], data[99:]], overwrite=True)
        if stored:
            self.journal.write(number, STORED, new, new)

    def remove(self, cache: Cache, number: int) -> None:
        _, version, coming = self.journal.line(number)
        self.journal.write(number, OPEN, version, coming)
        cache.remove(self.key(number))
        self.journal.write(number, GONE, version, coming)

    def faults(self, cache: Cache, evicting: int) -> Iterator[str]:
        """What the volume does not have as the journal says."""
        for number in range(KEYS):
            state, version, coming = self.journal.line(number)
            if state == UNKNOWN:
                continue
            key = self.key(number)
            view = cache.get(key)
            name = f"{self.who} key {number} (version {version}, {coming} to come)"
            if view is None:
                if state == STORED and not evicting:
                    yield f"{name} was acknowledged and is lost"
                continue
            allowed = [version] if state == STORED else [version, coming]
            found = bytes(view)
            view.release()
            if state == GONE:
                yield f"{name} was removed and is back"
            elif not any(
                found == blob(key, length_of(number, each), each)
                for each in allowed
                if each
            ):
                wrong = fault_of(
                    found, key, length_of(number, allowed[-1]), allowed[-1]
                )
                yield f"{name} has wrong bytes: {wrong}"


def traveller_of(path: str, who: str) -> Traveller:
    return Traveller(who, Journal(Path(f"{path}.{who}")))


@contextmanager
def no_writing() -> Iterator[None]:
    """Every write into a file fails with EFBIG; Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def config(**options: Any) -> CacheConfig:
    return CacheConfig(capacity=CAPACITY, sync_interval=None, **options)


def tour(path: str, who: str) -> None:
    """Every step that a process can be killed in, in an order that needs no other."""
    traveller = traveller_of(path, who)
    cache = Cache.open(path, config())
    for number in range(8):
        traveller.put(cache, number)
    held = cache.get(traveller.key(7))  # a pin, from here to the end of the first life
    for number in range(8):
        view = cache.get(traveller.key(number))
        del view
    cache.get(key_of("nobody stored this"))
    for number in (0, 1, 5):
        traveller.replace(cache, number)
    for number in (2, 3):
        traveller.remove(cache, number)
    traveller.put(cache, 3)
    _failed_put(cache, who)
    other = Cache.open(path, namespace=OTHER)
    other.put(key_of(who, "other"), b"x" * 5000)
    cache.events()
    other.clear()
    other.put(key_of(who, "other"), b"x" * 5000)
    cache.sync()
    cache.verify(repair=True)
    held = None  # noqa: F841
    other.close()
    cache.close()

    cache = Cache.open(path, config(admission="adaptive"))
    for number in range(8, 12):
        traveller.put(cache, number)
    traveller.replace(cache, 4)
    traveller.journal.begin_filling()
    fill(cache, who, LAP)
    _fail_path(path)
    cache.recover()
    fill(cache, f"{who} again", 4)
    ask_again(cache, who)
    cache.close()

    # A third life, in which a full volume refuses what it does not know.
    with Cache.open(path, config(admission="second-touch")) as cache:
        fill(cache, f"{who} once", 3)

    # A fourth one, with chains, if nobody has the volume open otherwise.
    with Cache.open(path, config(eviction="prefix")) as cache:
        grow_chains(cache, who, 12)


def grow_chains(cache: Cache, who: str, count: int) -> None:
    """Prompts that share a trunk, more of them than fit; some are asked for again."""
    trunk = [key_of(who, "trunk", i) for i in range(2)]
    for number in range(count):
        branch = [key_of(who, "branch", number, i) for i in range(3)]
        keys = trunk + branch
        held = cache.longest_prefix(keys, touch=True)
        parent = keys[held - 1] if held else None
        items = [(key, blob(key, FILL_BYTES)) for key in keys[held:]]
        cache.put_many(items, chain=True, parent=parent)
        view = cache.get(keys[-1])
        del view
        if number % 4 == 3:
            cache.remove(branch[1])
    cache.verify()


def ask_again(cache: Cache, who: str) -> None:
    """Requests enough for a decision of adaptive admission."""
    key = key_of(who, "asked for")
    cache.put(key, b"z" * 100)
    for _ in range(300):
        view = cache.get(key)
        del view


def _failed_put(cache: Cache, who: str) -> None:
    with no_writing():
        assert not cache.put(key_of(who, "refused"), b"y" * 9000)
    assert not cache.contains(key_of(who, "refused"))


def _fail_path(path: str) -> None:
    """An error on the way to the medium, met by clear(): the path is out of use."""
    with Cache.open(path, namespace=OTHER) as other, no_writing():
        try:
            other.clear()
        except VolumeError:
            return
    raise AssertionError("clear() could not write and did not say so")


def fill(cache: Cache, who: str, count: int) -> int:
    """Stores blocks under new keys; returns how many were taken."""
    taken = 0
    for number in range(count):
        key = key_of(who, "filling", number, os.getpid())
        taken += cache.put(key, blob(key, FILL_BYTES))
    return taken


# ---- sets of two paths -------------------------------------------------------------


def tour_of_two(folder: str) -> None:
    """Files of a set that were used apart: namespaces meet at one index."""
    paths = [f"{folder}/one.cyc", f"{folder}/two.cyc"]
    apart = CacheConfig(degraded=True)
    key = key_of("two")
    with Cache.open(paths, CacheConfig(capacity=2 * CAPACITY)) as cache:
        cache.put(key, blob(key, 1000))
        cache.clear()  # the first namespace of both files; the next differ
    for number, path in enumerate(paths):
        with Cache.open([path], apart, namespace=f"apart {number}") as cache:
            cache.put(key, blob(key, 1000))
            cache.clear()
    with Cache.open(paths) as cache:
        cache.put(key_of("after"), blob(key_of("after"), 1000))
