# SPDX-License-Identifier: Apache-2.0
"""Every store behind the interface: round trips, misses, reopening, damage noticed."""

from __future__ import annotations

import mmap
import sys
import types

import pytest

for needed in ("lmdb", "numpy", "rocksdict"):
    pytest.importorskip(needed)

from bench import generators, stores  # noqa: E402
from bench.dataset import Dataset, buffers  # noqa: E402
from bench.phases import _batches, _copier, _copy, _Rate, _viewer  # noqa: E402
from bench.stores import StoreError, UnavailableError, store_type  # noqa: E402
from bench.stores.files import FileStore  # noqa: E402
from bench.stores.vllm_fs import VllmFsStore  # noqa: E402

NBYTES = 8192
HERE = [kind.name for kind in stores.available()[0]]


@pytest.fixture
def opened(request, disk_folder):
    store = store_type(request.param)(disk_folder, 4, NBYTES)
    store.open()
    yield store
    store.destroy()
    assert list(disk_folder.iterdir()) == []


def block(index):
    memory = memoryview(mmap.mmap(-1, NBYTES))  # on a page, as O_DIRECT needs
    memory[:] = generators.value(index, NBYTES)
    return memory


def test_what_cannot_be_missing_is_here():
    assert {"cyclone_kv", "lmdb", "rocksdb", "files", "vllm_fs"} <= set(HERE)


@pytest.mark.parametrize("opened", HERE, indirect=True)
def test_a_store_gives_back_what_was_put(opened):
    keys = [generators.key(index) for index in range(3)]
    for index in (0, 1):
        opened.put(keys[index], block(index))
    opened.sync()
    if opened.restarts:
        opened.close()
        assert opened.files()
        opened.open()
    targets = buffers(2, NBYTES, opened.target_alignment)
    for index in (1, 0):
        assert opened.contains(keys[index])
        assert opened.get_into(keys[index], targets[0]) == NBYTES
        assert targets[0] == block(index)
        assert opened.view(keys[index]) == NBYTES
        assert opened.view_touch(keys[index]) == bytes(block(index)[::4096])
    assert opened.get_many_into(keys[:2], targets)
    assert targets == [block(0), block(1)]


@pytest.mark.parametrize("opened", HERE, indirect=True)
def test_what_is_not_there_is_a_miss(opened):
    absent, present = generators.key(7), generators.key(1)
    opened.put(present, block(1))
    targets = buffers(2, NBYTES, opened.target_alignment)
    assert not opened.contains(absent)
    assert opened.get_into(absent, targets[0]) is None
    assert opened.view(absent) is None
    assert opened.view_touch(absent) is None
    assert not opened.get_many_into([present, absent], targets)
    opened.remove(present)
    assert not opened.contains(present)
    assert opened.get_into(present, targets[0]) is None
    opened.remove(present)


@pytest.mark.parametrize("opened", HERE, indirect=True)
def test_closing_twice_is_harmless(opened):
    opened.close()
    opened.close()
    opened.open()


@pytest.mark.parametrize("name", [name for name in HERE if name != "lmcache_disk"])
def test_another_reader_sees_the_blocks(name, disk_folder):
    store = store_type(name)(disk_folder, 4, NBYTES)
    assert store.processes
    store.open()
    store.put(generators.key(0), block(0))
    store.sync()
    store.close()
    reader = store_type(name)(disk_folder, 4, NBYTES)
    reader.open_reader()
    assert reader.view_touch(generators.key(0)) == bytes(block(0)[::4096])
    reader.destroy()


def test_a_rival_that_is_missing_is_named_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "lmdb", None)
    monkeypatch.delitem(sys.modules, "bench.stores.lmdb", raising=False)
    found, missing = stores.available(["cyclone_kv", "lmdb"])
    assert [kind.name for kind in found] == ["cyclone_kv"]
    assert "not importable here" in missing["lmdb"]
    with pytest.raises(UnavailableError, match="lmdb"):
        store_type("lmdb")


def test_without_ours_there_is_no_run(monkeypatch):
    monkeypatch.setitem(stores._MODULES, "cyclone_kv", ("bench.stores.none", "None"))
    with pytest.raises(UnavailableError, match="not importable here"):
        stores.available()


def test_the_file_layout_of_vllm(disk_folder):
    store = VllmFsStore(disk_folder, 1, NBYTES)
    store.open()
    store.put(generators.key(0), block(0))
    (path,) = store.files()
    name = generators.key(0).hex()
    model, *below = path.relative_to(store.folder).parts
    assert model.startswith("model_")
    assert model.endswith("_r0")
    assert below == [name[:3], name[3:5] + "_g0", name + ".bin"]
    before = path.stat().st_mtime_ns
    store.put(generators.key(0), block(1))  # a present block is kept
    assert path.stat().st_mtime_ns == before
    path.write_bytes(b"x" * 4096)
    with pytest.raises(StoreError, match="short read"):
        store.get_into(generators.key(0), block(0))
    store.destroy()


def test_the_functions_of_vllm_are_used_where_they_are(monkeypatch, disk_folder):
    calls = []
    module = types.ModuleType("vllm.v1.kv_offload.tiering.fs.io")

    def store_block(dest_path, buffer, offset, block_size, use_o_direct=True):
        calls.append(("store", block_size, use_o_direct))
        with open(f"{disk_folder}/it", "wb") as file:
            file.write(buffer[offset : offset + block_size])

    def load_block(source_path, view, offset, block_size, use_o_direct=True):
        calls.append(("load", block_size, use_o_direct))
        view[offset : offset + block_size] = (disk_folder / "it").read_bytes()

    module.store_block, module.load_block = store_block, load_block
    parts = module.__name__.split(".")
    for length in range(1, len(parts)):
        name = ".".join(parts[:length])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    store = VllmFsStore(disk_folder, 1, NBYTES)
    store.open()
    store.put(generators.key(0), block(0))
    target = memoryview(mmap.mmap(-1, NBYTES))
    assert store.get_into(generators.key(0), target) == NBYTES
    assert target == block(0)
    assert [call[0] for call in calls] == ["store", "load"]
    store.destroy()


# ---- the phases notice a store that is wrong ----------------------------------------


class Liar(FileStore):
    """Changes a byte of what it returns."""

    name = "liar"

    def get_into(self, key, target):
        length = super().get_into(key, target)
        target[17] ^= 1
        return length

    def view_touch(self, key):
        touched = bytearray(super().view_touch(key))
        touched[0] ^= 1
        return bytes(touched)


@pytest.fixture
def filled(request, disk_folder):
    data = Dataset(NBYTES, 8)
    store = request.param(disk_folder, data.count, data.nbytes)
    store.open()
    for key, row in zip(data.keys, data.values, strict=True):
        store.put(key, row.data)
    yield store, data
    store.destroy()


class _Short:
    warm_up_seconds = 0.001
    warm_seconds = 0.01


def _each_way(store, data):
    targets = data.targets(1, store.target_alignment)
    yield lambda: _copy(store, data, range(data.count), 0)
    yield lambda: _batches(store, data)
    rate = _Rate(_Short, data, 64)
    yield lambda: rate.measure(1, _copier(store, data, targets))
    yield lambda: rate.measure(1, _viewer(store, data))


@pytest.mark.parametrize("filled", [Liar], indirect=True)
def test_other_bytes_end_a_phase(filled):
    for measure in _each_way(*filled):
        with pytest.raises((RuntimeError, StoreError), match="other bytes"):
            measure()


@pytest.mark.parametrize("filled", [FileStore], indirect=True)
def test_right_bytes_do_not(filled):
    for measure in _each_way(*filled):
        measure()


@pytest.mark.parametrize("filled", [FileStore], indirect=True)
def test_a_missing_block_ends_a_phase(filled):
    store, data = filled
    for key in data.keys:
        store.remove(key)
    for measure in _each_way(store, data):
        with pytest.raises(StoreError, match="missing"):
            measure()
