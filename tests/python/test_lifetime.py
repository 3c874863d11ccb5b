# SPDX-License-Identifier: Apache-2.0
"""Views, entries and slots outlive what they came from, or say why they cannot."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import weakref
from pathlib import Path

import numpy as np
import pytest

from cyclone_kv import Cache, CacheConfig, ClosedError, _core

from .conftest import CAPACITY, OpenCache, key_of
from .test_threads import run_script

DATA = bytes(range(256)) * 400


def pinned(cache: Cache) -> int:
    return cache.stats().volume.pinned_entries


def test_views_stay_readable_after_close(open_cache: OpenCache) -> None:
    """An array over a closed mapping must not crash the process."""
    cache = open_cache()
    cache.put(key_of(1), DATA)
    view = cache.get(key_of(1))
    assert view is not None
    array = np.frombuffer(view, dtype="u1")
    piece = array[1:]
    slice_ = view[5:10]
    cache.close()
    del view
    gc.collect()
    assert array.tobytes() == DATA
    assert piece.tobytes() == DATA[1:]
    assert slice_ == DATA[5:10]


def test_views_stay_readable_after_the_with_block(volume_path: object) -> None:
    with Cache.open(str(volume_path), CacheConfig(capacity=CAPACITY)) as cache:
        cache.put(key_of(1), DATA)
        view = cache.get(key_of(1))
    del cache
    gc.collect()
    assert view == DATA


def test_views_do_not_change_when_their_block_goes(cache: Cache) -> None:
    cache.put(key_of(1), DATA)
    view = cache.get(key_of(1))
    cache.remove(key_of(1))
    cache.put(key_of(1), b"other")
    cache.clear()
    assert view == DATA


def test_the_pin_ends_with_the_last_view(cache: Cache) -> None:
    cache.put(key_of(1), DATA)
    view = cache.get(key_of(1))
    assert view is not None
    array = np.frombuffer(view, dtype="u2").reshape(2, -1)[1]
    assert pinned(cache) == 1
    del view
    gc.collect()
    assert pinned(cache) == 1
    del array
    gc.collect()
    assert pinned(cache) == 0


def test_releasing_the_view_ends_the_pin(cache: Cache) -> None:
    cache.put(key_of(1), DATA)
    with cache.get(key_of(1)) as view:
        assert view == DATA
    assert pinned(cache) == 0


def test_an_entry_is_not_released_under_an_array(cache: Cache) -> None:
    cache.put(key_of(1), DATA)
    entry = cache.read(key_of(1))
    assert entry is not None
    array = np.frombuffer(entry.view, dtype="u1")
    with pytest.raises(BufferError):
        entry.release()
    assert array.tobytes() == DATA
    assert not entry.released
    del array
    entry.release()
    entry.release()
    assert pinned(cache) == 0


def test_an_entry_is_not_released_under_a_slice(cache: Cache) -> None:
    cache.put(key_of(1), DATA)
    entry = cache.read(key_of(1))
    assert entry is not None
    piece = entry.view[10:20]
    with pytest.raises(BufferError, match="in use"):
        entry.__exit__(None, None, None)
    assert piece == DATA[10:20]
    del piece
    entry.release()
    assert pinned(cache) == 0


def test_an_entry_that_could_not_be_released_has_a_view_still(cache: Cache) -> None:
    """The failed attempt left a dead memoryview behind."""
    cache.put(key_of(1), DATA)
    entry = cache.read(key_of(1))
    assert entry is not None
    piece = entry.view[10:20]
    with pytest.raises(BufferError, match="delete"):
        entry.release()
    assert entry.view == DATA
    assert piece == DATA[10:20]
    entry.view.release()
    del piece
    entry.release()


def test_an_entry_whose_view_is_exported_says_what_to_do(cache: Cache) -> None:
    cache.put(key_of(1), DATA)
    entry = cache.read(key_of(1))
    assert entry is not None
    held = pickle.PickleBuffer(entry.view)
    with pytest.raises(BufferError, match="delete"):
        entry.release()
    assert held.raw() == DATA
    held.release()
    entry.release()


def test_an_entry_in_use_does_not_hide_the_error_of_its_block(cache: Cache) -> None:
    cache.put(key_of(1), DATA)
    entry = cache.read(key_of(1))
    assert entry is not None
    piece = entry.view[1:2]
    with pytest.raises(ZeroDivisionError), entry:
        raise ZeroDivisionError
    assert piece == DATA[1:2]


def test_views_cannot_be_written_to(cache: Cache) -> None:
    cache.put(key_of(1), DATA)
    view = cache.get(key_of(1))
    assert view is not None
    with pytest.raises(TypeError):
        view[0] = 1
    array = np.frombuffer(view, dtype="u1")
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(TypeError):
        (ctypes.c_char * 4).from_buffer(view)


def test_a_closed_cache_refuses_every_call(open_cache: OpenCache) -> None:
    cache = open_cache()
    cache.put(key_of(1), DATA)
    cache.close()
    cache.close()
    assert cache.closed
    key = key_of(1)
    for call in (
        lambda: cache.put(key, b""),
        lambda: cache.put_many([(key, b"")]),
        lambda: cache.get(key),
        lambda: cache.read(key),
        lambda: cache.get_into(key, bytearray(1)),
        lambda: cache.get_many_into([key], [bytearray(1)]),
        lambda: cache.reserve(key, 1),
        lambda: cache.contains(key),
        lambda: key in cache,
        lambda: cache.contains_many([key]),
        lambda: cache.longest_prefix([key]),
        lambda: cache.prefetch([key]),
        lambda: cache.touch([key]),
        lambda: cache.remove(key),
        lambda: cache.clear(),
        lambda: cache.locate(key),
        lambda: cache.stats(),
        lambda: cache.info(),
        lambda: cache.verify(),
        lambda: cache.recover(),
        lambda: cache.sync(),
        lambda: cache.events(),
        lambda: list(cache.ls()),
        lambda: len(cache),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert "closed" in repr(cache)


def test_a_cache_that_was_never_opened_is_closed() -> None:
    cache = Cache()
    assert cache.closed
    cache.close()
    with pytest.raises(ValueError, match=r"Cache\.open"):
        cache.get(b"k")
    raw = _core.Cache()
    with pytest.raises(ValueError, match="not open"):
        len(raw)
    raw.close()


def test_a_forgotten_cache_is_closed_with_a_warning(volume_path: object) -> None:
    cache = Cache.open(str(volume_path), CacheConfig(capacity=CAPACITY))
    cache.put(key_of(1), DATA)
    view = cache.get(key_of(1))
    held = [cache]
    del cache
    with pytest.warns(ResourceWarning, match="unclosed cache"):
        held.clear()
    assert view == DATA


def test_a_cache_in_a_cycle_with_its_view_is_collected(volume_path: object) -> None:
    class Holder(Cache):
        pass

    holder = Holder.open(str(volume_path), CacheConfig(capacity=CAPACITY))
    holder.put(key_of(1), DATA)
    holder.view = holder.get(key_of(1))
    holder.me = holder
    alive = weakref.ref(holder)
    del holder
    with pytest.warns(ResourceWarning, match="unclosed cache"):
        gc.collect()
    assert alive() is None


def test_a_cache_cannot_be_opened_twice_or_pickled(cache: Cache) -> None:
    with pytest.raises(ValueError, match="opened before"):
        cache._open((), {})
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(cache)


def test_what_holds_a_block_cannot_be_pickled_or_copied(cache: Cache) -> None:
    """A copy shared the pin, and gave it back while the original was in use."""
    cache.put(key_of(1), DATA)
    entry, place = cache.read(key_of(1)), cache.locate(key_of(1))
    assert entry is not None
    assert place is not None
    slot = cache.reserve(key_of(2), 10)
    for thing in (entry, place, slot):
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"{type(thing).__name__} cannot be"):
                attempt(thing)
    assert entry.view == DATA
    slot.abort()
    place.release()
    entry.release()


def test_warnings_as_errors_do_not_crash_a_forgotten_raw_cache(
    volume_path: Path,
) -> None:
    """Reporting the warning took a reference to an object that was being freed."""
    result = run_script(
        """
        import os, sys, warnings
        from cyclone_kv import _core
        warnings.simplefilter("error")
        for _ in range(5):
            cache = _core.Cache()
            cache._open(((os.fsencode(sys.argv[1]), 64 << 20),), {})
            del cache
        print("fine")
        """,
        str(volume_path),
    )
    assert (result.stdout, result.returncode) == ("fine\n", 0), result.stderr


def test_a_finalizer_may_close_the_cache_during_any_call(volume_path: Path) -> None:
    """A collection inside info() ran a finalizer whose close() waited for info()."""
    result = run_script(
        """
        import faulthandler, gc, sys
        from cyclone_kv import Cache, CacheConfig, ClosedError
        faulthandler.dump_traceback_later(20, exit=True)
        class Closer:
            def __init__(self, cache):
                self.cache, self.me = cache, self
            def __del__(self):
                self.cache.close()
        config = CacheConfig(capacity="64MiB")
        for call in ("_info", "_stats", "info", "stats", "verify", "events", "clear"):
            cache = Cache.open(sys.argv[1], config)
            gc.collect()
            Closer(cache)
            gc.set_threshold(1)
            try:
                getattr(cache, call)()
            except ClosedError:
                pass
            gc.set_threshold(0)
            gc.collect()
            assert cache.closed
        assert gc.isenabled()
        print("fine")
        """,
        str(volume_path),
    )
    assert (result.stdout, result.returncode) == ("fine\n", 0), result.stderr


def test_errors_keep_their_type_when_the_interpreter_ends(volume_path: Path) -> None:
    """They were imported at the first error, when imports had ended."""
    result = run_script(
        """
        import os, sys
        from cyclone_kv import Cache, CacheConfig
        class Late:
            def __del__(self, write=os.write):
                try:
                    self.cache.put(b"", b"")
                except Exception as error:
                    write(1, type(error).__name__.encode())
        late = Late()
        late.cache = Cache.open(sys.argv[1], CacheConfig(capacity="64MiB"))
        late.me = late
        """,
        str(volume_path),
    )
    assert result.stdout in {"ConfigError", "ClosedError"}, result.stderr
    assert "meta_path" not in result.stderr


def test_a_lease_cannot_be_made_by_hand() -> None:
    for kind in (_core.Lease, _core.Reservation):
        with pytest.raises(TypeError):
            kind()


# ---- reservations -----------------------------------------------------------------


def test_a_reserved_block_is_zeroed_and_stored_at_the_end(cache: Cache) -> None:
    with cache.reserve(key_of(1), 10_000, header=b"h") as slot:
        assert slot.view == bytes(10_000)
        assert not slot.view.readonly
        slot.view[:4] = b"made"
        assert not cache.contains(key_of(1))
        assert not slot.stored
    assert slot.stored
    assert cache.get(key_of(1)) == b"made" + bytes(9_996)
    entry = cache.read(key_of(1))
    assert entry is not None
    with entry:
        assert entry.header == b"h"


def test_an_empty_reservation(cache: Cache) -> None:
    with cache.reserve(key_of(1), 0) as slot:
        assert slot.view.nbytes == 0
    assert cache.get(key_of(1)) == b""


def test_an_exception_aborts_a_reservation(cache: Cache) -> None:
    with pytest.raises(ZeroDivisionError), cache.reserve(key_of(1), 100) as slot:
        raise ZeroDivisionError
    assert not slot.stored
    assert not cache.contains(key_of(1))
    with pytest.raises(ValueError, match="ended"):
        _ = slot.view
    with pytest.raises(ValueError, match="ended"):
        slot.commit()
    slot.abort()


def test_a_reservation_is_not_stored_while_an_array_is_out(cache: Cache) -> None:
    """Whoever still holds the memory could change bytes that were already checked."""
    slot = cache.reserve(key_of(1), 100)
    array = np.frombuffer(slot.view, dtype="u1")
    with pytest.raises(BufferError, match="was not stored"):
        slot.commit()
    assert not slot.stored
    assert not cache.contains(key_of(1))
    array[:] = 7  # still its own memory
    assert array.sum() == 700


def test_a_reservation_is_not_stored_while_a_slice_is_out(cache: Cache) -> None:
    with (
        pytest.raises(BufferError, match="was not stored"),
        cache.reserve(key_of(1), 100) as slot,
    ):
        piece = slot.view[10:]
    piece[0] = 1
    assert not cache.contains(key_of(1))


def test_a_view_of_a_stored_reservation_is_gone(cache: Cache) -> None:
    with cache.reserve(key_of(1), 10) as slot:
        view = slot.view
    with pytest.raises(ValueError, match="released"):
        view[0] = 1
    with pytest.raises(ValueError, match="has ended"):
        _ = slot.view


def test_reserving_over_a_present_block(cache: Cache) -> None:
    cache.put(key_of(1), b"old")
    with cache.reserve(key_of(1), 3) as slot:
        slot.view[:] = b"new"
    assert slot.stored
    assert cache.get(key_of(1)) == b"old"
    with cache.reserve(key_of(1), 3, overwrite=True) as slot:
        slot.view[:] = b"new"
    assert slot.stored
    assert cache.get(key_of(1)) == b"new"


def test_a_forgotten_reservation_warns_and_stores_nothing(cache: Cache) -> None:
    slot = cache.reserve(key_of(1), 3)
    slot.view[:] = b"new"
    held = [slot]
    del slot
    with pytest.warns(ResourceWarning, match="neither committed nor aborted"):
        held.clear()
    assert not cache.contains(key_of(1))


def test_closing_before_the_commit_stores_nothing(open_cache: OpenCache) -> None:
    cache = open_cache()
    slot = cache.reserve(key_of(1), 3)
    slot.view[:] = b"new"
    cache.close()
    with pytest.raises(ClosedError):
        slot.commit()
    slot.abort()
    assert not open_cache().contains(key_of(1))


@pytest.mark.parametrize("nbytes", [-1, 2**64, 1.5, "7", None])
def test_impossible_sizes_of_reservations_are_refused(
    cache: Cache, nbytes: object
) -> None:
    with pytest.raises((TypeError, ValueError)):
        cache.reserve(key_of(1), nbytes)


def test_a_forgotten_place_warns(cache: Cache) -> None:
    cache.put(key_of(1), DATA)
    place = cache.locate(key_of(1))
    assert place is not None
    held = [place]
    del place
    with pytest.warns(ResourceWarning, match="not released"):
        held.clear()
    assert pinned(cache) == 0
