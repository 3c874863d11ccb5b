# SPDX-License-Identifier: Apache-2.0
"""Fourteen live keys in the two buckets of a key, and what has to make room for it.

Buckets are half full by construction, so a volume of few blocks and keys chosen by
their hash are what it takes.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from opened import Opened, Peer

WORD = (1 << 64) - 1
SMALL: dict[str, Any] = {"expected_object_bytes": 512 * 1024}
FULL = 14  # slots of two buckets


def buckets_of(core: Any, cache: Opened, key: bytes) -> frozenset[int]:
    count = cache.region.layout.bucket_count
    mixed = int(core.lib.ckv_index_hash(cache.volume, bytes(16), key, False))
    first, second = (
        ((word & WORD) >> 32) * count >> 32
        for word in (mixed << 32, mixed * 0x9E3779B97F4A7C15)
    )
    return frozenset((first, (first + 1) % count if first == second else second))


def colliding(core: Any, cache: Opened, count: int) -> list[bytes]:
    """Keys of the same two buckets; the secret of a volume stays the same."""
    found: dict[frozenset[int], list[bytes]] = {}
    for number in itertools.count():
        key = b"%032d" % number
        mates = found.setdefault(buckets_of(core, cache, key), [])
        mates.append(key)
        if len(mates) == count:
            return mates
    raise AssertionError("unreachable")


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize(
    "point", ["index.crowded", "kill.condemn", "kill.condemned", "kill.struck"]
)
def test_n3_a_block_that_was_crowded_out_is_not_back(
    core: Any, volume_path: Path, point: str, how: str
) -> None:
    with Opened(core, volume_path, **SMALL) as cache:
        keys = colliding(core, cache, FULL + 1)
        for key in keys[:FULL]:
            assert cache.put(key, b"old" + key) == core.lib.CKV_OK
        with Peer(volume_path, point=f"{point}:{how}:1", **SMALL) as peer:
            if how == "kill":
                assert peer.ask("put", keys[FULL].decode(), 100) is None
            else:
                with pytest.raises(TimeoutError):  # and it is killed
                    peer.ask("put", keys[FULL].decode(), 100, timeout=1)
        for key in keys[:FULL]:
            cache.remove(key)
        cache._call(core.lib.ckv_sync, cache.cache)
        assert cache.verify().structure_faults == 0
    with Opened(core, volume_path, **SMALL) as cache:
        assert [key for key in keys[:FULL] if cache.contains(key)] == []


@pytest.mark.parametrize("crowded", [False, True])
def test_n3_a_removal_that_another_repeats_is_final(
    core: Any, volume_path: Path, crowded: bool
) -> None:
    """E4: the slot of a block whose record is not struck yet is given to nobody."""
    with Opened(core, volume_path, **SMALL) as cache:
        keys = colliding(core, cache, FULL + 1)
    with Peer(volume_path, **SMALL) as other:
        for key in keys[:FULL]:
            assert other.ask("put", key.decode(), 100) == core.lib.CKV_OK
        with Peer(volume_path, point="kill.condemned:kill:1", **SMALL) as peer:
            assert peer.ask("remove", keys[5].decode()) is None
        if crowded:
            assert other.ask("put", keys[FULL].decode(), 100) == core.lib.CKV_OK
        assert other.ask("remove", keys[5].decode()) is False
        other.kill()
    with Opened(core, volume_path, **SMALL) as cache:
        assert not cache.contains(keys[5])
        assert cache.verify().structure_faults == 0
        assert sum(cache.contains(key) for key in keys) == FULL - 1 + crowded


def test_a_lone_reader_of_a_crowded_volume_has_its_blocks(
    core: Any, volume_path: Path
) -> None:
    """One more record than two buckets take, and a reader may not strike any.

    A power cut can lose the strike of what was crowded out."""
    with Opened(core, volume_path, **SMALL) as cache:
        keys = colliding(core, cache, FULL + 1)
        for key in keys[:FULL]:
            assert cache.put(key, b"x" * 100) == core.lib.CKV_OK
        before = volume_path.read_bytes()
        assert cache.put(keys[FULL], b"x" * 100) == core.lib.CKV_OK
        (victim,) = (key for key in keys if not cache.contains(key))
    record_bytes = core.ffi.sizeof("struct ckv_record")
    at = before.index(victim) - core.ffi.offsetof("struct ckv_record", "key")
    with volume_path.open("r+b") as file:
        file.seek(at)
        file.write(before[at : at + record_bytes])
    with Opened(core, volume_path, mode=core.lib.CKV_MODE_READ) as cache:
        assert sum(cache.contains(key) for key in keys) == FULL


def test_an_older_version_is_not_crowded_out_by_its_newer_one(
    core: Any, volume_path: Path
) -> None:
    """It must not be missing for a moment, and another block is there to go."""
    with Opened(core, volume_path, **SMALL) as cache:
        keys = colliding(core, cache, FULL)
        for key in keys:
            assert cache.put(key, b"old" + key) == core.lib.CKV_OK
        with Peer(volume_path, point="put.indexed:stop:1", **SMALL) as peer:
            with pytest.raises(TimeoutError):
                peer.ask("put", keys[5].decode(), 100, timeout=1)
            assert cache.contains(keys[5])
            assert sum(cache.contains(key) for key in keys) == FULL - 1


@pytest.mark.parametrize("point", ["put.indexed", "put.recorded", "put.published"])
@pytest.mark.parametrize("again", [False, True])
def test_n3_a_put_that_died_is_not_back_after_a_removal(
    core: Any, volume_path: Path, point: str, again: bool
) -> None:
    """E4: who removes a key, or stores it anew, meets the record of the dead."""
    key = b"%032d" % 7
    with Peer(volume_path, **SMALL) as other:
        assert other.ask("put", key.decode(), 100) == core.lib.CKV_OK
        with Peer(volume_path, point=f"{point}:kill:1", **SMALL) as peer:
            assert peer.ask("put", key.decode(), 200) is None
        if again:
            assert other.ask("put", key.decode(), 300) == core.lib.CKV_OK
        assert other.ask("remove", key.decode()) or not again
        other.kill()
    with Opened(core, volume_path, **SMALL) as cache:
        assert not cache.contains(key)
        assert cache.verify().structure_faults == 0
