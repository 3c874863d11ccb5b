# SPDX-License-Identifier: Apache-2.0
"""What each method does when nothing goes wrong, and what it refuses."""

from __future__ import annotations

import array
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cyclone_kv import Cache, CacheConfig, ConfigError, Event, ValueTooLargeError, _core

from .conftest import CAPACITY, OpenCache, key_of

SIZES = [0, 1, 511, 4095, 4096, 4097, 65_536, (2 << 20) - 1, (2 << 20) + 1]


@pytest.mark.parametrize("size", SIZES)
def test_a_block_comes_back_as_it_was_stored(cache: Cache, size: int) -> None:
    data = os.urandom(size)
    assert cache.put(key_of(1), data, header=b"a header")
    view = cache.get(key_of(1))
    assert view is not None
    assert view == data
    assert view.readonly
    assert (view.format, view.itemsize, view.ndim, view.nbytes) == ("B", 1, 1, size)
    target = bytearray(b"\xa5" * (size + 3))
    assert cache.get_into(key_of(1), target) == size
    assert target[:size] == data


@pytest.mark.parametrize("length", [1, 2, 16, 31, 32, 33, 64, 65_535])
def test_keys_of_any_length_are_told_apart(cache: Cache, length: int) -> None:
    key = os.urandom(length)
    other = bytes([key[0] ^ 1]) + key[1:]
    assert cache.put(key, b"one")
    assert not cache.contains(other)
    assert cache.put(other, b"two")
    assert cache.get(key) == b"one"
    assert cache.get(other) == b"two"


ODD_NAMES = [
    *(b"a", b"a\0", b"a\0b", b"\0", b"\0\0", b"a/b", b"../a", b"a\n", b"a@b", b" a"),
    *(b"\xff\xfe", "emoji \N{BLOWFISH}".encode(), b"A", b"%s%n", b"~", b"."),
    *(bytes(255), bytes(256), bytes(4096), b"m/" * 2048, b"m" * 65_535),
]


def test_keys_of_odd_bytes_are_taken_for_each_other(cache: Cache) -> None:
    """A key that ends at a NUL, or is a path, would be another one."""
    for number, key in enumerate(ODD_NAMES):
        assert not cache.contains(key), key[:20]
        assert cache.put(key, key_of(number))
    assert [cache.get(key) for key in ODD_NAMES] == [
        key_of(number) for number in range(len(ODD_NAMES))
    ]
    assert cache.contains_many(ODD_NAMES) == [True] * len(ODD_NAMES)
    assert len(cache) == len(ODD_NAMES)


def test_namespaces_of_odd_bytes_fail_or_meet(
    open_cache: OpenCache, volume_path: Path
) -> None:
    """A name that becomes part of a file name fails when it is long or has a slash."""
    spaces = [open_cache(namespace=name) for name in ODD_NAMES]
    for number, space in enumerate(spaces):
        assert not space.contains(key_of(1)), ODD_NAMES[number][:20]
        assert space.put(key_of(1), key_of(number))
    for number, space in enumerate(spaces):
        assert space.get(key_of(1)) == key_of(number)
        assert len(space) == 1
    text = open_cache(namespace="emoji \N{BLOWFISH}")
    assert text.contains(key_of(1)), "str and its UTF-8 are two namespaces"
    for name in (bytes(65_536), "m" * 65_536, "\ud800"):
        with pytest.raises(ValueError, match=r"."):
            open_cache(namespace=name)
    assert sorted(each.name for each in volume_path.parent.iterdir()) == [
        "kv.cyc",
        "kv.cyc-shm",
    ]
    assert spaces[0].stats().volume.entries == len(ODD_NAMES)
    for space in spaces:
        space.close()
    for number, name in enumerate(ODD_NAMES):
        assert open_cache(namespace=name).get(key_of(1)) == key_of(number)


@pytest.mark.parametrize("length", [0, 65_536])
def test_keys_of_impossible_length_are_refused(cache: Cache, length: int) -> None:
    with pytest.raises(ConfigError):
        cache.put(bytes(length), b"data")
    with pytest.raises(ConfigError):
        cache.get(bytes(length))


@pytest.mark.parametrize(
    "key", [bytearray(b"k" * 32), memoryview(b"k" * 32), array.array("B", b"k" * 32)]
)
def test_any_bytes_like_object_is_a_key(cache: Cache, key: object) -> None:
    assert cache.put(key, b"data")
    assert cache.contains(b"k" * 32)
    assert key in cache
    assert cache.contains_many([key, key]) == [True, True]


@pytest.mark.parametrize("key", ["text", 7, None, 1.5, ["k"], ("k", "v")])
def test_other_types_of_key_are_type_errors(cache: Cache, key: object) -> None:
    for call in (
        lambda: cache.put(key, b""),
        lambda: cache.get(key),
        lambda: cache.read(key),
        lambda: cache.locate(key),
        lambda: cache.contains(key),
        lambda: cache.remove(key),
        lambda: cache.get_into(key, bytearray(1)),
        lambda: cache.reserve(key, 1),
        lambda: cache.contains_many([b"k", key]),
        lambda: cache.put_many([(key, b"")]),
        lambda: key in cache,
    ):
        with pytest.raises(TypeError):
            call()
    assert len(cache) == 0


def test_a_miss_is_none_or_false(cache: Cache) -> None:
    key = key_of(404)
    assert cache.get(key) is None
    assert cache.read(key) is None
    assert cache.locate(key) is None
    assert cache.get_into(key, bytearray(8)) is None
    assert not cache.contains(key)
    assert not cache.remove(key)
    assert cache.get_many_into([key], [bytearray(8)]) == [False]
    assert cache.longest_prefix([key]) == 0
    assert cache.prefetch([key]) == 0
    assert cache.touch([key]) == 0


def test_a_present_key_is_a_cheap_true_and_keeps_its_bytes(cache: Cache) -> None:
    assert cache.put(key_of(1), b"first!")
    assert cache.put(key_of(1), b"second")
    assert cache.get(key_of(1)) == b"first!"
    assert cache.stats().volume.puts_present == 1


def test_overwrite_replaces_for_new_readers_only(cache: Cache) -> None:
    cache.put(key_of(1), b"old")
    old = cache.get(key_of(1))
    assert cache.put(key_of(1), b"newer", overwrite=True)
    assert cache.get(key_of(1)) == b"newer"
    assert old == b"old"
    assert len(cache) == 1


def test_a_block_is_stored_from_scattered_buffers(cache: Cache) -> None:
    pieces = [b"one", bytearray(b"-two-"), memoryview(b""), np.arange(3, dtype="u1")]
    assert cache.put(key_of(1), pieces)
    assert cache.get(key_of(1)) == b"one-two-\0\1\2"
    assert cache.put(key_of(2), [])
    assert cache.get(key_of(2)) == b""


def test_a_block_is_copied_into_scattered_buffers(cache: Cache) -> None:
    cache.put(key_of(1), bytes(range(100)))
    small, empty, rest = bytearray(3), bytearray(), np.zeros(200, dtype="u1")
    assert cache.get_into(key_of(1), [small, empty, rest]) == 100
    assert bytes(small) + rest[:97].tobytes() == bytes(range(100))


def test_a_short_target_is_a_counted_none(cache: Cache) -> None:
    cache.put(key_of(1), bytes(100))
    before = cache.stats().volume.short_buffers
    assert cache.get_into(key_of(1), bytearray(99)) is None
    assert cache.get_into(key_of(1), []) is None
    assert cache.get_many_into([key_of(1)], [bytearray(99)]) == [False]
    counters = cache.stats().volume
    assert counters.short_buffers == before + 3
    assert counters.lookups == counters.hits + counters.misses


def test_an_exact_copy_wants_the_length_of_the_block(cache: Cache) -> None:
    keys = [key_of(1), key_of(2), key_of(3), key_of(4)]
    for key in keys[:3]:
        cache.put(key, bytes([7]) * 100)
    before = cache.stats().volume.short_buffers
    targets: list[Any] = [
        bytearray(101),
        [bytearray(60), bytearray(), bytearray(40)],
        bytearray(99),
        bytearray(100),
    ]
    found = cache.get_many_into(keys, targets, exact=True)
    assert found == [False, True, False, False]
    assert b"".join(targets[1]) == bytes([7]) * 100
    assert targets[0] == bytearray(101)
    counters = cache.stats().volume
    assert counters.short_buffers == before + 2
    assert counters.lookups == counters.hits + counters.misses
    assert cache.get_many_into(keys[:1], targets[:1]) == [True]


def test_targets_must_be_writable_and_contiguous(cache: Cache) -> None:
    cache.put(key_of(1), bytes(4))
    with pytest.raises((BufferError, TypeError)):
        cache.get_into(key_of(1), b"read")
    with pytest.raises((BufferError, ValueError)):
        cache.get_into(key_of(1), np.zeros(20, dtype="u1")[::2])
    with pytest.raises(TypeError):
        cache.get_into(key_of(1), "text")


def test_a_stored_block_does_not_follow_its_source(cache: Cache) -> None:
    """Engines free or reuse the source tensor right after the call."""
    source = bytearray(b"pattern!" * 1000)
    cache.put(key_of(1), source)
    source[:] = bytes(len(source))
    assert cache.get(key_of(1)) == b"pattern!" * 1000


def test_a_batch_follows_sources_that_are_used_again(cache: Cache) -> None:
    """One staging buffer for each step of an engine, filled again after each put."""
    key, staging, header = bytearray(32), bytearray(9000), bytearray(100)

    def fill(number: int) -> None:
        for buffer in (key, staging, header):
            buffer[:] = number.to_bytes(4, "little") * (len(buffer) // 4)

    for number in range(1, 201):
        fill(number)
        if number % 2:
            halves = [memoryview(staging)[:4500], memoryview(staging)[4500:]]
            assert cache.put_many([(key, halves, header)]) == [True]
        else:
            assert cache.put(key, staging, header=header)
        fill(0xFFFFFFFF)
    for number in range(1, 201):
        fill(number)
        entry = cache.read(key)
        assert entry is not None
        with entry:
            assert entry.view == staging
            assert entry.header == header


def test_a_block_that_can_never_fit_is_a_value_error(cache: Cache) -> None:
    limit = cache.info().payload_max_bytes
    with pytest.raises(ValueTooLargeError):
        cache.put(key_of(1), bytearray(limit + 1))
    with pytest.raises(ValueError, match=r"."):
        cache.reserve(key_of(1), limit + 1)
    assert cache.put_many([(key_of(1), bytearray(limit + 1)), (key_of(2), b"2")]) == [
        False,
        True,
    ]


@pytest.mark.parametrize("stripes", [1, 3, 4])
def test_a_block_as_large_as_a_stripe_is_taken_and_not_found(
    open_cache: OpenCache, stripes: int
) -> None:
    """And one byte more is refused before anything is evicted for it."""
    config = CacheConfig(capacity=CAPACITY, stripes=stripes)
    cache = open_cache(config)
    limit = cache.info().payload_max_bytes
    assert CAPACITY // stripes * 15 // 16 < limit <= CAPACITY // stripes
    largest = os.urandom(limit)
    for number in range(2 * stripes):
        assert cache.put(key_of(number), largest)
        assert cache.get(key_of(number)) == largest
    for number, short in enumerate((1, 4095, 4096, 4097), 100):
        assert cache.put(key_of(number), largest[short:])
        assert cache.get(key_of(number)) == largest[short:]
    before = cache.stats().volume
    for data, header in ((largest + b"x", None), (largest, b"h"), ([largest] * 9, b"")):
        with pytest.raises(ValueTooLargeError):
            cache.put(key_of(200), data, header=header)
        assert not cache.contains(key_of(200))
    with pytest.raises(ValueTooLargeError):
        cache.reserve(key_of(200), 2**63)
    after = cache.stats().volume
    for name in ("entries", "evictions", "resident_bytes", "puts_stored"):
        assert before[name] == after[name], name
    cache.close()
    assert open_cache(config).get(key_of(103)) == largest[4097:]


def test_a_set_of_two_sizes_says_what_its_larger_file_holds(volume_path: Path) -> None:
    paths = [volume_path, volume_path.with_suffix(".2")]
    members = [(paths[0], 16 << 20), (paths[1], 64 << 20)]
    with Cache.open(members, CacheConfig(stripes=1)) as cache:
        limit = cache.info().payload_max_bytes
        assert 16 << 20 < limit <= 64 << 20
        for number in range(4):
            assert cache.put(key_of(number), bytes(limit - number))
            view = cache.get(key_of(number))
            assert view is not None
            assert len(view) == limit - number
            del view
        with pytest.raises(ValueTooLargeError):
            cache.put(key_of(9), bytes(limit + 1))
        report = cache.verify()
        assert report.ok, report.first_fault


def test_headers_travel_with_their_block(cache: Cache) -> None:
    cache.put(key_of(1), b"data", header=b"h" * 65_535)
    entry = cache.read(key_of(1))
    assert entry is not None
    with entry:
        assert entry.header == b"h" * 65_535
        assert entry.view == b"data"
        assert (entry.nbytes, len(entry), entry.ok()) == (4, 4, True)
    assert entry.released
    with pytest.raises(ValueError, match="released"):
        _ = entry.nbytes
    cache.put(key_of(2), b"data")
    without = cache.read(key_of(2))
    assert without is not None
    with without:
        assert without.header == b""


def test_put_many_says_for_each_block_whether_it_is_stored(cache: Cache) -> None:
    items = [
        (key_of(0), b"zero"),
        (key_of(1), [b"o", b"ne"]),
        [key_of(2), b"two", b"header"],
        (key_of(0), b"again"),
        (b"short key", b"", None),
    ]
    assert cache.put_many(items) == [True] * 5
    assert cache.get(key_of(1)) == b"one"
    assert cache.get(b"short key") == b""
    entry = cache.read(key_of(2))
    assert entry is not None
    with entry:
        assert entry.header == b"header"
    assert cache.put_many([]) == []
    assert cache.put_many(iter([(key_of(9), b"9")])) == [True]


def test_put_many_stores_a_chain(cache: Cache) -> None:
    keys = [key_of(number) for number in range(40)]
    head, tail = keys[:20], keys[20:]
    assert all(cache.put_many([(key, b"x") for key in head], chain=True))
    assert all(
        cache.put_many([(key, b"x") for key in tail], chain=True, parent=head[-1])
    )
    assert cache.longest_prefix(keys, touch=True) == 40
    with pytest.raises(ValueError, match="chain=True"):
        cache.put_many([(key_of(99), b"x")], parent=keys[-1])


@pytest.mark.parametrize(
    "item", [b"key", (b"key",), (b"key", b"", b"", b""), (b"key", "text"), None]
)
def test_put_many_refuses_malformed_items_before_storing(
    cache: Cache, item: object
) -> None:
    with pytest.raises(TypeError):
        cache.put_many([(key_of(1), b"fine"), item])
    assert not cache.contains(key_of(1))


def test_get_many_into_fills_what_it_finds(cache: Cache) -> None:
    numbers = list(range(60))
    for number in numbers[::2]:
        cache.put(key_of(number), bytes([number]) * (1000 + number))
    targets = [
        [bytearray(500), bytearray(900)] if number % 4 == 0 else bytearray(1100)
        for number in numbers
    ]
    found = cache.get_many_into([key_of(number) for number in numbers], targets)
    assert found == [number % 2 == 0 for number in numbers]
    for number in numbers[::2]:
        target = targets[number]
        joined = b"".join(target) if isinstance(target, list) else bytes(target)
        assert joined[: 1000 + number] == bytes([number]) * (1000 + number)
    with pytest.raises(ValueError, match="2 keys and 1 target"):
        cache.get_many_into([b"1", b"2"], [bytearray(1)])


def test_lookups_take_keys_in_every_shape(cache: Cache) -> None:
    for number in (0, 1, 2, 4):
        cache.put(key_of(number), b"")
    keys = [key_of(number) for number in range(6)]
    joined = b"".join(keys)
    rows = np.frombuffer(joined, dtype="u1").reshape(6, 32)
    shapes = [
        keys,
        tuple(keys),
        joined,
        bytearray(joined),
        memoryview(joined),
        rows,
        rows.view("V32"),
        rows.view("u8"),
    ]
    for shape in shapes:
        assert cache.contains_many(shape) == [True, True, True, False, True, False]
        assert cache.longest_prefix(shape) == 3
        assert cache.longest_prefix(shape, touch=True) == 3
        assert cache.touch(shape) == 4
        assert cache.prefetch(shape) == 4
    assert cache.contains_many([]) == []
    assert cache.contains_many(b"") == []
    assert cache.longest_prefix([]) == 0


def test_lookups_refuse_shapes_that_are_no_keys(cache: Cache) -> None:
    for shape in (
        bytes(33),
        np.zeros((4, 16), dtype="u1"),
        np.zeros((2, 2, 32), dtype="u1"),
    ):
        with pytest.raises(ValueError, match="32 bytes"):
            cache.contains_many(shape)
    with pytest.raises((BufferError, ValueError)):
        cache.contains_many(np.zeros((4, 64), dtype="u1")[:, ::2])
    with pytest.raises(TypeError):
        cache.contains_many("text")
    with pytest.raises(TypeError):
        cache.contains_many(7)


def test_new_blocks_go_before_those_that_were_read_long_ago(
    open_cache: OpenCache,
) -> None:
    """New blocks that count as never used would be the first victims."""
    cache = open_cache(CacheConfig(capacity=CAPACITY, stripes=4))
    data = bytes(64 * 1024)
    old: list[bytes] = []
    while cache.stats().volume.evictions == 0:
        old.append(key_of(len(old)))
        assert cache.put(old[-1], data)
    for key in old[1:]:
        assert cache.get(key) is not None
    new = [key_of(10_000 + number) for number in range(len(old) // 2)]
    lost: set[bytes] = set()
    for number, key in enumerate(new, 1):
        assert cache.put(key, data)
        present = cache.contains_many(new[:number])
        assert present[-1]
        lost |= {each for each, there in zip(new, present, strict=False) if not there}
    # A cursor that has made a whole round for one block meets that block again.
    assert len(lost) <= len(new) // 50
    assert sum(cache.contains_many(old)) < 0.6 * len(old)


def test_usage_drifts_over_rounds_of_all_kinds(
    cache: Cache, open_cache: OpenCache
) -> None:
    """Puts are dropped in silence once bytes that nobody has count as used."""
    dice = random.Random(1)
    other = open_cache(namespace="other")
    sizes: dict[tuple[Cache, bytes], int] = {}
    for _ in range(1500):
        space, key = dice.choice((cache, other)), key_of(dice.randrange(30))
        draw = dice.random()
        if draw < 0.6:
            size = dice.choice((0, 1, 4095, 4096, 4097, 100_000, dice.randrange(9999)))
            assert space.put(key, bytes(size), overwrite=True)
            sizes[space, key] = max(1, -(-size // 4096)) * 4096
        elif draw < 0.98:
            assert space.remove(key) == ((space, key) in sizes)
            sizes.pop((space, key), None)
        else:
            gone = [pair for pair in sizes if pair[0] is space]
            assert space.clear() == len(gone)
            for pair in gone:
                del sizes[pair]
        stats = cache.stats().volume
        assert (stats.entries, stats.resident_bytes) == (
            len(sizes),
            sum(sizes.values()),
        )
        assert stats.evictions == 0
    cache.clear()
    other.clear()
    stats = cache.stats().volume
    assert (stats.entries, stats.resident_bytes) == (0, 0)
    for number in range(1000, 1900):  # what nobody has is there for others
        assert cache.put(key_of(number), bytes(65_536))
    assert all(cache.contains_many([key_of(n) for n in range(1000, 1900)]))
    assert cache.stats().volume.evictions == 0


def test_remove_and_clear(cache: Cache) -> None:
    for number in range(10):
        cache.put(key_of(number), bytes(1000))
    assert len(cache) == 10
    assert cache.remove(key_of(3))
    assert not cache.remove(key_of(3))
    assert key_of(3) not in cache
    assert cache.clear() == 9
    assert len(cache) == 0
    assert cache.put(key_of(3), b"back")
    assert cache.get(key_of(3)) == b"back"


def test_namespaces_do_not_see_each_other(open_cache: OpenCache) -> None:
    plain, one, two = (
        open_cache(namespace=name) for name in ("", "model 1", b"model 2")
    )
    for cache, data in ((plain, b"p"), (one, b"1"), (two, b"2")):
        assert cache.put(key_of(1), data)
    assert [cache.get(key_of(1)) for cache in (plain, one, two)] == [b"p", b"1", b"2"]
    assert one.clear() == 1
    assert [len(cache) for cache in (plain, one, two)] == [1, 0, 1]
    again = open_cache(namespace=b"model 1")
    assert not again.contains(key_of(1))


def test_an_empty_cache_is_true(cache: Cache) -> None:
    assert len(cache) == 0
    assert bool(cache)


def test_a_read_only_cache_reads_and_refuses_the_rest(open_cache: OpenCache) -> None:
    writer = open_cache()
    writer.put(key_of(1), b"data", header=b"h")
    reader = open_cache(mode="r")
    assert reader.get(key_of(1)) == b"data"
    assert reader.contains(key_of(1))
    target = bytearray(4)
    assert reader.get_into(key_of(1), target) == 4
    assert target == b"data"
    for call in (
        lambda: reader.put(key_of(2), b""),
        lambda: reader.put_many([(key_of(2), b"")]),
        lambda: reader.reserve(key_of(2), 1),
        lambda: reader.remove(key_of(1)),
        lambda: reader.clear(),
    ):
        with pytest.raises(PermissionError):
            call()
    assert writer.get(key_of(1)) == b"data"


def test_locate_gives_a_descriptor_of_the_payload(cache: Cache) -> None:
    data = os.urandom(100_000)
    cache.put(key_of(1), data, header=b"h")
    place = cache.locate(key_of(1))
    assert place is not None
    with place:
        assert os.pread(place.fd, place.nbytes, place.offset) == data
        assert place.header == b"h"
        assert not os.get_inheritable(place.fd)
        with pytest.raises(OSError, match=r"."):
            os.write(place.fd, b"x")
    with pytest.raises(ValueError, match="released"):
        _ = place.fd
    assert place.nbytes == len(data)


def test_events_from_now_on(cache: Cache) -> None:
    cache.put(key_of(1), b"")
    now = cache.events(None)
    assert (now.items, now.lost) == ((), 0)
    assert now.last == cache.events().last == 1
    cache.put(key_of(2), b"")
    assert [event.key for event in cache.events(now.last).items] == [key_of(2)]


@pytest.mark.parametrize("namespace", ["", "mine", b"\xff bytes"])
def test_the_tag_of_a_handle_is_that_of_its_events(
    open_cache: OpenCache, namespace: str | bytes
) -> None:
    cache = open_cache(namespace=namespace)
    cache.put(key_of(1), b"")
    (event,) = cache.events().items
    (entry,) = cache.ls()
    assert cache.namespace_tag == event.namespace_tag == entry.namespace_tag


def test_events_name_what_was_stored_and_removed(cache: Cache) -> None:
    cache.put(key_of(1), b"")
    cache.put(b"short", b"")
    cache.remove(key_of(1))
    cache.clear()
    events = cache.events()
    assert events.lost == 0
    kinds = [event.kind for event in events.items]
    assert kinds[:3] == ["stored", "stored", "removed"]
    assert "cleared" in kinds
    first, second = events.items[:2]
    assert isinstance(first, Event)
    assert (first.number, first.key, first.digested) == (1, key_of(1), False)
    assert second.digested
    assert len(first.namespace_tag) == 16
    assert events.last == events.items[-1].number
    assert cache.events(events.last) == ((), 0, events.last)
    page = cache.events(limit=2)
    assert len(page.items) == 2
    assert cache.events(page.last).items[0].number == 3
    with pytest.raises(ValueError, match="limit"):
        cache.events(limit=0)
    with pytest.raises(ValueError, match="since"):
        cache.events(-1)


def test_ls_lists_the_blocks_of_all_namespaces(open_cache: OpenCache) -> None:
    cache, other = open_cache(), open_cache(namespace="other")
    for number in range(700):
        cache.put(key_of(number), bytes(number), header=bytes(number % 3))
    other.put(b"not 32 bytes", b"data")
    entries = {entry.key: entry for entry in cache.ls()}
    assert len(entries) == 701
    entry = entries[key_of(500)]
    assert (entry.nbytes, entry.header_nbytes, entry.digested) == (500, 500 % 3, False)
    assert sum(entry.digested for entry in entries.values()) == 1


def test_statistics_count_what_happened(cache: Cache) -> None:
    for number in range(6):
        cache.put(key_of(number), bytes(1000))
    for _ in range(10):
        for number in range(10):
            cache.get(key_of(number))
    stats = cache.stats()
    for counters in (stats.volume, stats.process):
        assert counters.puts_stored == 6
        assert counters["hits"] == 60
        assert counters.misses == 40
        assert counters.lookups == counters.hits + counters.misses
        assert counters.entries == 6
        assert counters.pinned_entries == 0
        assert list(counters) == [row[1] for row in _core.STATISTICS]
    assert stats.volume.capacity_bytes >= CAPACITY // 2


def test_statistics_are_immutable(cache: Cache) -> None:
    stats = cache.stats()
    with pytest.raises(AttributeError):
        stats.volume.hits = 7
    with pytest.raises(AttributeError):
        stats.volume = stats.process
    with pytest.raises(AttributeError, match="no_such"):
        _ = stats.volume.no_such
    with pytest.raises(KeyError):
        _ = stats.volume["no_such"]


def test_info_tells_the_limits(cache: Cache) -> None:
    info = cache.info()
    assert len(info.paths) == 1
    assert info.paths[0].path == os.path.realpath(cache.paths[0])
    assert info.paths[0].present
    assert not info.paths[0].failed
    assert 0 < info.payload_max_bytes <= info.paths[0].data_bytes
    assert info.format_version >= 1


def test_verify_reports_progress(cache: Cache) -> None:
    for number in range(100):
        cache.put(key_of(number), bytes(100))
    calls: list[tuple[int, int]] = []
    report = cache.verify(progress=lambda done, total: calls.append((done, total)))
    assert report.ok
    assert report.entries_checked == 100
    assert report.first_fault == ""
    assert calls
    assert calls == sorted(calls)


def test_verify_stops_when_the_callback_raises(cache: Cache) -> None:
    cache.put(key_of(1), b"x")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.verify(progress=stop)
    assert cache.get(key_of(1)) == b"x"


def test_verify_refuses_close_from_its_callback(cache: Cache) -> None:
    cache.put(key_of(1), b"x")
    with pytest.raises(RuntimeError, match="progress callback"):
        cache.verify(progress=lambda done, total: cache.close())
    assert not cache.closed


def test_sync_and_recover(cache: Cache) -> None:
    cache.put(key_of(1), b"x")
    cache.sync()
    assert cache.stats().volume.syncs >= 1
    assert cache.recover() == 0


def test_keyword_arguments_are_checked(cache: Cache) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'ttl'"):
        cache.put(b"k", b"", ttl=7)
    with pytest.raises(TypeError, match="at most 2 positional"):
        cache.put(b"k", b"", b"header")
    with pytest.raises(TypeError, match="missing argument 'data'"):
        cache.put(b"k")
    with pytest.raises(TypeError, match="multiple values"):
        cache.put(b"k", b"", key=b"k")
    assert cache.put(key=b"k", data=b"v", header=None, overwrite=False)


def test_crc32c_agrees_with_an_independent_implementation() -> None:
    crc32c = pytest.importorskip("crc32c")
    data = os.urandom(10_007)
    for length in (0, 1, 7, 8, 9, 63, 64, 65, 1023, 4096, 10_007):
        assert _core.crc32c(data[:length]) == crc32c.crc32c(data[:length])
    assert _core.crc32c(data[5000:], _core.crc32c(data[:5000])) == crc32c.crc32c(data)


def test_the_first_eviction_is_not_said(tmp_path, caplog):
    """It is logged once in the life of the region, and not before anything gave way."""
    caplog.set_level("INFO", logger="cyclone_kv")
    config = CacheConfig(capacity="16MiB")
    with Cache.open(tmp_path / "kv.cyc", config) as cache:
        for i in range(64):
            cache.put(b"%d" % i, bytes(1 << 20))
            said = [m for m in caplog.messages if "the volume is full" in m]
            assert len(said) == (cache.stats().volume.evictions > 0)
        assert cache.stats().volume.evictions >= 48


def test_blocks_smaller_than_the_layout_evict_in_silence(tmp_path, caplog):
    config = CacheConfig(capacity="16MiB", expected_object_size="1MiB")
    with Cache.open(tmp_path / "kv.cyc", config) as cache:
        for i in range(64):
            assert cache.put(b"%d" % i, b"small")
        assert cache.stats().volume.entries_exhausted > 0
    assert sum("expected_object_size" in message for message in caplog.messages) == 1


def test_a_full_cache_that_asks_twice_refuses_and_says_so(
    open_cache: OpenCache,
) -> None:
    config = CacheConfig(capacity="16MiB", admission="second-touch")
    cache = open_cache(config)
    block = bytes(1 << 20)
    for number in range(17):  # the last one evicts
        assert cache.put(key_of(number), block)
    again = open_cache(CacheConfig(), namespace="another handle")
    assert not again.put(b"new", block)  # the first handle has decided
    assert cache.put_many([(b"a", block), (b"b", block)]) == [False, False]
    assert cache.stats().volume.puts_not_admitted == 3
    assert cache.stats().volume.admission_capacity == 16
    with cache.reserve(b"c", 1 << 20) as slot:
        slot.view[:] = block
    assert not slot.stored
    assert cache.put_many([(b"a", block), (b"c", block)]) == [True, True]
    assert cache.put(key_of(16), b"shorter", overwrite=True)
    assert cache.get(key_of(16)) == b"shorter"


def test_what_precedes_a_known_block_of_a_chain_is_admitted(volume_path: Path) -> None:
    """A ghost that lost the middle of a chain must not cut it off from its tail."""
    config = CacheConfig(
        capacity="16MiB", expected_object_size=4096, admission="second-touch"
    )
    chain = [(key_of(10_000 + number), bytes(4096)) for number in range(8)]
    with Cache.open(volume_path, config) as cache:
        for number in range(4200):  # more than fit
            cache.put(key_of(number), bytes(4096))
        assert not any(cache.put_many(chain[5:6], chain=True))
        assert cache.put_many(chain, chain=True) == [True] * 6 + [False] * 2
        assert cache.longest_prefix([key for key, _ in chain]) == 6
