# SPDX-License-Identifier: Apache-2.0
"""What is made of a view outlives the cache, and ends the pin when it goes."""

from __future__ import annotations

import array
import ctypes
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cyclone_kv import Cache, CacheConfig

from .conftest import CAPACITY, OpenCache, key_of
from .test_threads import in_child

DATA = bytes(range(256)) * 400


class Dlpack:
    """A consumer that knows DLPack alone: numpy takes the capsule from it."""

    def __init__(self, source: np.ndarray[Any, Any]) -> None:
        # Version 1 says that the memory is read-only; older ones cannot.
        self.capsule = source.__dlpack__(max_version=(1, 0))
        self.device = source.__dlpack_device__()

    def __dlpack__(self, **_: object) -> object:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def numbers(view: memoryview) -> np.ndarray[Any, Any]:
    return np.frombuffer(view, dtype="u1")


# Each makes of a view something that holds it and can be turned into its bytes.
EXPORTS: dict[str, Callable[[memoryview], tuple[object, Callable[[Any], bytes]]]] = {
    "view": lambda view: (view, bytes),
    "memoryview": lambda view: (memoryview(view), bytes),
    "slice": lambda view: (view[:], bytes),
    "slice of a slice": lambda view: (view[0:][0:], bytes),
    "cast": lambda view: (view.cast("I"), bytes),
    "cast with a shape": lambda view: (view.cast("B", (400, 256)), bytes),
    "toreadonly": lambda view: (view.toreadonly(), bytes),
    "iterator": lambda view: (iter(view), bytes),
    "array": lambda view: (numbers(view), lambda a: a.tobytes()),
    "array of an array": lambda view: (
        numbers(view).view("u4").reshape(-1, 64)[:, :],
        lambda a: a.tobytes(),
    ),
    "array of a slice": lambda view: (numbers(view[:]), lambda a: a.tobytes()),
    "memoryview of an array": lambda view: (memoryview(numbers(view)), bytes),
    "array interface": lambda view: (
        np.asarray(numbers(view).view(np.recarray)),
        lambda a: a.tobytes(),
    ),
    "DLPack capsule": lambda view: (
        Dlpack(numbers(view)),
        lambda d: np.from_dlpack(d).tobytes(),
    ),
    "DLPack array": lambda view: (
        np.from_dlpack(Dlpack(numbers(view))),
        lambda a: a.tobytes(),
    ),
    "pickle buffer": lambda view: (pickle.PickleBuffer(view), bytes),
    "in a container": lambda view: ({"a": [(view[:],)]}, lambda d: bytes(d["a"][0][0])),
}


@pytest.fixture(params=EXPORTS)
def export(request: pytest.FixtureRequest) -> Any:
    return EXPORTS[request.param]


def pinned(cache: Cache) -> int:
    return cache.stats().volume.pinned_entries


@pytest.mark.parametrize("source", ["get", "read", "reader"])
def test_it_outlives_the_cache(
    open_cache: OpenCache, volume_path: Path, export: Any, source: str
) -> None:
    cache = open_cache()
    assert cache.put(key_of(1), DATA)
    # The views of a reader are copies.
    used = open_cache(mode="r") if source == "reader" else cache
    if source == "read":
        entry = used.read(key_of(1))
        assert entry is not None
        thing, content = export(entry.view)
        del entry
    else:
        view = used.get(key_of(1))
        assert view is not None
        thing, content = export(view)
        del view
    assert cache.remove(key_of(1))
    used.close()
    cache.close()
    del cache, used
    gc.collect()
    # Another life of the volume, which wants the room.
    with Cache.open(volume_path) as other:
        for number in range(2, 70 if source == "get" else 3):
            other.put(key_of(number), bytes(1 << 20))
        assert content(thing) == DATA
    del thing
    gc.collect()


def test_the_pin_ends_with_it(cache: Cache, export: Any) -> None:
    assert cache.put(key_of(1), DATA)
    view = cache.get(key_of(1))
    assert view is not None
    thing, content = export(view)
    del view
    gc.collect()
    assert pinned(cache) == 1
    assert content(thing) == DATA
    del thing, content
    gc.collect()
    assert pinned(cache) == 0


def test_an_entry_says_that_it_is_in_use(cache: Cache, export: Any) -> None:
    assert cache.put(key_of(1), DATA)
    entry = cache.read(key_of(1))
    assert entry is not None
    thing, content = export(entry.view)
    if thing is entry.view:
        entry.release()
        return
    if hasattr(thing, "__next__"):  # which holds the view, and no memory of it
        entry.release()
        with pytest.raises(ValueError, match="released"):
            content(thing)
        return
    with pytest.raises(BufferError):
        entry.release()
    assert content(thing) == DATA
    del thing, content
    gc.collect()
    entry.release()
    assert pinned(cache) == 0


def test_none_of_it_can_be_written_to(cache: Cache) -> None:
    assert cache.put(key_of(1), DATA)
    view = cache.get(key_of(1))
    assert view is not None
    for writer in (
        lambda: io.BytesIO(DATA).readinto(view),
        lambda: io.BytesIO(DATA).readinto(view.cast("I")),
        lambda: (ctypes.c_char * len(DATA)).from_buffer(view),
        lambda: numbers(view).__setitem__(0, 1),
        lambda: np.from_dlpack(Dlpack(numbers(view))).__setitem__(0, 1),
        lambda: numbers(view).setflags(write=True),
        lambda: numbers(view).sort(),
        lambda: np.copyto(numbers(view), 1),
        lambda: cache.get_into(key_of(1), view),
        lambda: cache.get_many_into([key_of(1)], [view]),
        lambda: array.array("B").frombytes(view) or memoryview(view).__setitem__(0, 1),
    ):
        with pytest.raises((TypeError, ValueError, BufferError)):
            writer()
    # numpy asks the owner of the memory before it says that it may be written to.
    assert not numbers(view).flags.writeable
    assert view == DATA


def test_a_copy_is_nobodys(cache: Cache) -> None:
    assert cache.put(key_of(1), DATA)
    view = cache.get(key_of(1))
    assert view is not None
    copies = [
        bytes(view),
        view.tobytes(),
        pickle.dumps(pickle.PickleBuffer(view), protocol=5),
        (ctypes.c_char * 9).from_buffer_copy(view),
        numbers(view).copy(),
    ]
    view.release()
    assert pinned(cache) == 0
    assert copies[0] == DATA


# ---- cycles -----------------------------------------------------------------------


class Holder:
    """Something that holds itself and whatever it is given."""

    def __init__(self, *things: object) -> None:
        self.me = self
        self.things = things


def view_of(cache: Cache) -> memoryview:
    view = cache.get(key_of(1))
    assert view is not None
    return view


def slot_with(cache: Cache, *, cut: bool) -> Holder:
    slot = cache.reserve(key_of(2), 100)
    return Holder(slot, slot.view[5:] if cut else slot.view)


def entry_with_view(cache: Cache) -> Holder:
    entry = cache.read(key_of(1))
    assert entry is not None
    return Holder(entry, entry.view, entry.view[1:])


def raw(kind: Any) -> Holder:
    return Holder(kind, memoryview(kind))


# What a cycle holds, and whether its end is worth a warning.
CYCLES: dict[str, tuple[Callable[[Cache], Holder], bool]] = {
    "view": (lambda cache: Holder(view_of(cache)), False),
    "array": (lambda cache: Holder(numbers(view_of(cache))), False),
    "entry": (lambda cache: Holder(cache.read(key_of(1))), False),
    "entry and views": (entry_with_view, False),
    "lease": (lambda cache: raw(cache._lease(key_of(1))), False),
    "place": (lambda cache: Holder(cache.locate(key_of(1))), True),
    "slot": (lambda cache: slot_with(cache, cut=False), True),
    "slot and a slice": (lambda cache: slot_with(cache, cut=True), True),
    "reservation": (lambda cache: raw(cache._reserve(key_of(2), 9, None)), False),
    "cache": (lambda cache: Holder(cache, cache.get, cache.stats()), False),
}


def test_cycles_through_everything_are_collected(cache: Cache) -> None:
    assert cache.put(key_of(1), DATA)
    for name, (make, warns) in CYCLES.items():
        holder = make(cache)
        alive = weakref.ref(holder)
        del holder
        if warns:
            with pytest.warns(ResourceWarning):
                gc.collect()
        else:
            gc.collect()
        assert alive() is None, name
    gc.collect()
    assert pinned(cache) == 0
    assert not cache.contains(key_of(2))


def test_a_finalizer_in_a_cycle_may_use_what_it_holds(cache: Cache) -> None:
    """The garbage collector calls it before anything of the cycle is cleared."""
    assert cache.put(key_of(1), DATA)
    seen: list[object] = []

    class Late(Holder):
        def __del__(self) -> None:
            view, entry = self.things
            seen.append(bytes(view))
            seen.append(entry.nbytes)
            entry.release()
            seen.append(cache.contains(key_of(1)))

    Late(cache.get(key_of(1)), cache.read(key_of(1)))
    gc.collect()
    assert seen == [DATA, len(DATA), True]
    assert pinned(cache) == 0


def test_a_finalizer_may_bring_them_back(cache: Cache) -> None:
    assert cache.put(key_of(1), DATA)
    back: list[Any] = []

    class Risen(Holder):
        def __del__(self) -> None:
            back.append(self.things)

    entry = cache.read(key_of(1))
    assert entry is not None
    Risen(cache.get(key_of(1)), entry)
    del entry
    gc.collect()
    view, risen = back.pop()
    assert view == DATA
    assert risen.view == DATA
    risen.release()
    del view, risen
    gc.collect()
    assert pinned(cache) == 0


# ---- fork -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_what_a_child_inherits_is_readable_and_ends_nothing_of_the_parent(
    volume_path: Path,
) -> None:
    """A child that drops everything must not end a pin of its parent."""
    with Cache.open(volume_path, CacheConfig(capacity=CAPACITY)) as cache:
        assert cache.put(key_of(1), DATA)
        view = cache.get(key_of(1))
        assert view is not None
        things = [make(view) for make in EXPORTS.values()]
        entry, place = cache.read(key_of(1)), cache.locate(key_of(1))
        assert entry is not None
        assert place is not None
        before = pinned(cache)

        def check() -> None:
            nonlocal view, things
            for thing, content in things:
                if not isinstance(thing, Dlpack) and not hasattr(thing, "__next__"):
                    assert content(thing) == DATA
            assert entry.view == DATA
            things = []
            view = None
            gc.collect()
            entry.release()
            place.release()
            cache.close()

        assert in_child(check) == 0
        assert pinned(cache) == before > 0
        assert entry.view == DATA
        place.release()
        things.clear()
        view = None
        gc.collect()
        entry.release()
        assert pinned(cache) == 0
