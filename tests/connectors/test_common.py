# SPDX-License-Identifier: Apache-2.0
"""The parts that connectors share; no engine is needed."""

from __future__ import annotations

import json
import logging
import os
import struct
import threading

import pytest

from cyclone_kv import Cache, CacheConfig, ConfigError, VolumeError
from cyclone_kv.connectors._common import (
    Faults,
    self_check,
    split_options,
    startup_line,
)
from cyclone_kv.connectors._copy_threads import CopyThreads
from cyclone_kv.connectors._events import AnnouncedBlocks, event_key
from cyclone_kv.connectors._weights import folder_fingerprint

BLOCK = b"x" * 8192


@pytest.fixture
def cache(volume_path):
    config = CacheConfig.for_kv_tier("16MiB")
    with Cache.open(volume_path, config, namespace="mine") as opened:
        yield opened


def key(number):
    return number.to_bytes(32, "big")


# ---- options ------------------------------------------------------------------------


def test_h10_an_unknown_option_is_refused_with_a_suggestion():
    with pytest.raises(TypeError, match=r"'capacty' is not .* did you mean 'capacity'"):
        split_options({"path": "x", "capacty": "1GiB"}, {"path"}, owner="a connector")
    with pytest.raises(TypeError, match="'zzz' is not an option of a connector; known"):
        split_options({"zzz": 1}, {"path"}, owner="a connector")


def test_options_are_parted_and_the_rest_makes_the_preset():
    own, config = split_options(
        {"path": "x", "capacity": "1GiB", "io_threads": 3}, {"path"}, owner="it"
    )
    assert own == {"path": "x"}
    assert (config.capacity, config.io_threads, config.write_behind) == (
        1 << 30,
        3,
        True,
    )


def test_without_a_capacity_an_existing_volume_is_taken_as_it_is(cache):
    _, config = split_options({}, set(), owner="it")
    with Cache.open(cache.paths[0], config) as again:
        assert again.stats().volume.capacity_bytes == 16 << 20


# ---- start --------------------------------------------------------------------------


def test_self_check_leaves_nothing_behind(cache):
    self_check(cache, 2 << 20)
    assert len(cache) == 0
    assert cache.stats().process.puts_stored == 1


def test_h10_the_self_check_fails_loudly(cache, monkeypatch):
    with pytest.raises(ConfigError, match="takes blocks of at most"):
        self_check(cache, 1 << 30)

    class Broken:
        paths, info, remove = cache.paths, cache.info, cache.remove
        put, stats = cache.put, cache.stats

        def get_into(self, name, target):
            found = cache.get_into(name, target)
            target[5] ^= 1
            return found

    with pytest.raises(VolumeError, match="read back something else"):
        self_check(Broken(), 8192)
    Broken.put = lambda self, name, data: False
    with pytest.raises(VolumeError, match="could not store a block"):
        self_check(Broken(), 8192)


def test_startup_line_says_path_file_system_capacity_free_and_identity(cache):
    line = startup_line(cache, "some/namespace", "model m")
    info = cache.info().paths[0]
    for part in (info.path, info.file_system, "mode rw", "capacity 16.0 MiB", "free"):
        assert part in line
    assert "identity some/namespace (model m)" in line


def test_faults_are_counted_and_each_kind_is_logged_once(caplog):
    faults = Faults(logging.getLogger("a test"))
    for _ in range(3):
        faults.note("reading", ValueError("odd"))
    faults.note("reading", OSError("gone"))
    assert faults.count == 4
    assert [record.exc_info[0] for record in caplog.records] == [ValueError, OSError]


# ---- copy threads -------------------------------------------------------------------


@pytest.fixture
def threads():
    made = CopyThreads(name="t", loads=1, stores=1, on_fault=lambda error: None)
    yield made
    made.close()


def test_loads_do_not_wait_behind_stores(threads):
    gate, loaded = threading.Event(), threading.Event()
    threads.submit("store", gate.wait)
    threads.submit("load", loaded.set)
    assert loaded.wait(10)
    gate.set()


def test_drain_waits_and_cancels_nothing(threads):
    gate, done = threading.Event(), []
    threads.submit("store", gate.wait)
    for number in range(20):
        threads.submit("store", lambda number=number: done.append(number))
    drained = threading.Thread(target=threads.drain)
    drained.start()
    drained.join(0.1)
    assert drained.is_alive()
    gate.set()
    drained.join(10)
    assert not drained.is_alive()
    assert done == list(range(20))


def test_work_that_raises_ends_nothing():
    seen = []
    threads = CopyThreads(name="t", loads=1, stores=1, on_fault=seen.append)
    threads.submit("load", lambda: 1 / 0)
    threads.drain()
    done = threading.Event()
    threads.submit("load", done.set)
    assert done.wait(10)
    assert [type(error) for error in seen] == [ZeroDivisionError]
    threads.close()
    threads.close()
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit("load", done.set)


# ---- announcements ------------------------------------------------------------------


def announced_blocks(cache, *, names=(1, 2, 3)):
    for number in names:
        assert cache.put(key(number), BLOCK)
    announced = AnnouncedBlocks([cache])
    blocks = {f"block {number}": key(number) for number in names}
    assert announced.announce(cache, blocks) == list(blocks)
    return announced


def test_the_tag_of_a_namespace_is_that_of_its_events(cache):
    cache.put(key(1), BLOCK)
    cache.put(b"short", BLOCK)
    events = cache.events().items
    assert {event.namespace_tag for event in events} == {cache.namespace_tag}
    assert [(e.key, e.digested) for e in events] == [
        event_key(key(1)),
        event_key(b"short"),
    ]


def test_removed_by_another_handle_is_reported_once(cache):
    announced = announced_blocks(cache)
    with Cache.open(cache.paths[0], namespace="mine") as other:
        other.remove(key(2))
    assert announced.gone() == ["block 2"]
    assert announced.gone() == []
    assert len(announced) == 2


def test_evicted_blocks_are_reported(cache):
    announced = announced_blocks(cache)
    for number in range(100, 100 + 2 * (16 << 20) // (1 << 20)):
        cache.put(key(number), bytes(1 << 20))
    assert sorted(announced.gone()) == ["block 1", "block 2", "block 3"]


def test_what_is_not_announced_or_of_another_namespace_is_not_reported(cache):
    announced = announced_blocks(cache)
    with Cache.open(cache.paths[0], namespace="other") as other:
        other.put(key(1), BLOCK)
        other.remove(key(1))
    cache.put(key(9), BLOCK)
    cache.remove(key(9))
    assert announced.gone() == []


def test_a_block_that_is_gone_is_not_announced(cache):
    announced = announced_blocks(cache)
    cache.put(key(4), BLOCK)
    cache.remove(key(4))
    assert announced.announce(cache, {"block 4": key(4)}) == []
    assert announced.gone() == []


def test_a_removal_older_than_the_announcement_does_not_end_it(cache):
    announced = announced_blocks(cache)
    cache.remove(key(2))
    cache.put(key(2), BLOCK)
    assert announced.announce(cache, {"block 2": key(2)}) == ["block 2"]
    assert announced.gone() == []


def test_after_lost_events_everything_is_looked_up_again(volume_path):
    config = CacheConfig.for_kv_tier("16MiB", event_capacity=64)
    with Cache.open(volume_path, config, namespace="mine") as cache:
        announced = announced_blocks(cache)
        cache.remove(key(3))
        for number in range(200):
            cache.put(key(1000 + number), BLOCK)
        assert announced.gone() == ["block 3"]
        assert announced.lost > 0
        assert announced.gone() == []


def test_events_of_before_are_neither_read_nor_lost(volume_path):
    config = CacheConfig.for_kv_tier("16MiB", event_capacity=64)
    with Cache.open(volume_path, config, namespace="mine") as cache:
        for number in range(200):
            cache.put(key(1000 + number), BLOCK)
        announced = announced_blocks(cache)
        assert announced.gone() == []
        assert announced.lost == 0


def test_clear_ends_every_announcement(cache):
    announced = announced_blocks(cache)
    cache.clear()
    assert sorted(announced.gone()) == ["block 1", "block 2", "block 3"]


def test_forget_ends_them_without_a_word(cache):
    announced = announced_blocks(cache)
    announced.forget()
    cache.remove(key(1))
    assert announced.gone() == []


# ---- weights ------------------------------------------------------------------------


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, content in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(content)],
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_weights_are_told_apart_by_any_tensor(tmp_path):
    tensors = {f"layer.{i}": os.urandom(100_000) for i in range(20)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    before = folder_fingerprint(tmp_path)
    assert before.startswith("sampled:")
    assert folder_fingerprint(tmp_path) == before
    for name in ("layer.0", "layer.13", "layer.19"):
        write_safetensors(
            tmp_path / "model.safetensors", tensors | {name: os.urandom(100_000)}
        )
        assert folder_fingerprint(tmp_path) != before
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert folder_fingerprint(tmp_path) == before


def test_names_sizes_and_other_formats_count(tmp_path):
    with pytest.raises(ValueError, match="has no weights"):
        folder_fingerprint(tmp_path)
    (tmp_path / "a.bin").write_bytes(bytes(10_000))
    first = folder_fingerprint(tmp_path)
    (tmp_path / "b.bin").write_bytes(b"")
    assert folder_fingerprint(tmp_path) != first
    # The kind that engines prefer is the only one that counts.
    write_safetensors(tmp_path / "model.safetensors", {"t": b"123"})
    second = folder_fingerprint(tmp_path)
    (tmp_path / "b.bin").unlink()
    assert folder_fingerprint(tmp_path) == second


@pytest.mark.parametrize(
    "content",
    [b"", b"12345678", struct.pack("<Q", 2**40), struct.pack("<Q", 4) + b"[1]]"],
)
def test_odd_files_are_read_like_any_other(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    assert folder_fingerprint(tmp_path).startswith("sampled:")
    assert folder_fingerprint(tmp_path / "x.safetensors") == folder_fingerprint(
        tmp_path
    )
