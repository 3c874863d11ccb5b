# SPDX-License-Identifier: Apache-2.0
"""Every public object can be pickled and copied, or says in words why not."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import cyclone_kv
from cyclone_kv import Cache, CacheConfig, _core, errors

from .conftest import key_of

ATTEMPTS = [
    *(lambda o, p=p: pickle.loads(pickle.dumps(o, protocol=p)) for p in range(6)),
    copy.copy,
    copy.deepcopy,
]


def objects(cache: Cache, path: Path) -> Iterator[tuple[str, object, bool]]:
    """One of each public name: whether it can be sent elsewhere."""
    cache.put(key_of(1), b"x" * 100, header=b"h")
    stats, info = cache.stats(), cache.info()
    entry, place = cache.read(key_of(1)), cache.locate(key_of(1))
    slot = cache.reserve(key_of(2), 10)
    yield "Cache", cache, False
    yield "Entry", entry, False
    yield "Place", place, False
    yield "Slot", slot, False
    yield "CacheConfig", CacheConfig.for_kv_tier(capacity="1GiB", shm_dir="/x"), True
    yield "Stats", stats, True
    yield "Counters", stats.volume, True
    yield "Info", info, True
    yield "PathInfo", info.paths[0], True
    yield "Events", cache.events(), True
    yield "Event", cache.events().items[0], True
    yield "EntryInfo", next(cache.ls()), True
    yield "VerifyReport", cache.verify(), True
    yield "parse_size", cyclone_kv.parse_size, True
    for name in cyclone_kv.__all__:
        kind = getattr(cyclone_kv, name)
        if inspect.isclass(kind) and issubclass(kind, BaseException):
            yield name, example(kind, path), True
    assert entry is not None
    assert place is not None
    slot.abort()
    place.release()
    entry.release()


def example(kind: type[BaseException], path: Path) -> BaseException:
    """As the engine raises it; some have an errno."""
    for status, _ in _core.STATUSES.values():
        for number in (0, errno.EIO, errno.EACCES, errno.ENOENT):
            if status < 0:
                error = errors.from_status(status, number, f'cannot use "{path}"')
                if type(error) is kind:
                    return error
    return kind("a sentence")


def test_each_public_object_is_sent_or_refused_in_words(
    cache: Cache, volume_path: Path
) -> None:
    seen = set()
    for name, thing, sent in objects(cache, volume_path):
        seen.add(name)
        for attempt in ATTEMPTS:
            if not sent:
                with pytest.raises(TypeError, match="pickled"):
                    attempt(thing)
                continue
            other = attempt(thing)
            assert type(other) is type(thing)
            if isinstance(thing, BaseException):
                assert str(other) == str(thing)
                assert other.args == thing.args
                assert vars(other) == vars(thing)
            else:
                assert other == thing, name
    assert seen == set(cyclone_kv.__all__)


def test_what_is_behind_them_is_refused_as_well(cache: Cache) -> None:
    """A copy of a lease would give its pin back twice."""
    cache.put(key_of(1), b"x")
    lease = cache._lease(key_of(1))
    reservation = cache._reserve(key_of(2), 10, None)
    raw = _core.Cache()
    view = cache.get(key_of(1))
    for thing in (lease, reservation, raw, view):
        for attempt in ATTEMPTS[2:]:  # the two oldest protocols fail at the other end
            with pytest.raises(TypeError):
                attempt(thing)
    reservation.abort()


def test_classes_are_sent_by_name() -> None:
    for name in cyclone_kv.__all__:
        kind = getattr(cyclone_kv, name)
        assert pickle.loads(pickle.dumps(kind)) is kind
