# SPDX-License-Identifier: Apache-2.0
"""Bounded tiers for churn: what each contender is like when it must evict.

The engine evicts by itself. LMDB, RocksDB and a file per block do not; the application
has to, and gets an exact LRU in memory, the common choice. ``DirectTier`` is no
contender but a limit: the same requests, each a direct read or write of the device.

A stored block is its user header (64 bytes, or none) and its payload. Contenders that
need them in one piece get them in one piece (``Block.whole``): making it is not timed.
"""
# ruff: noqa: D102  (what the methods do is said once, in Tier)

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import lmdb
import numpy as np

from cyclone_kv import Cache, CacheConfig

__all__ = [
    "TIERS",
    "Block",
    "CycloneTier",
    "DirectTier",
    "FileTier",
    "LmdbTier",
    "Lru",
    "RocksTier",
    "Tier",
    "available",
]

_PAGE = 4096
_MIB = 1 << 20


class Block:
    """A buffer for one block: the user header, then the payload on a page."""

    def __init__(self, nbytes: int, header_bytes: int) -> None:
        pages = -(-nbytes // _PAGE) + 1
        self._memory = mmap.mmap(-1, pages * _PAGE)
        start = _PAGE - header_bytes
        self.whole = memoryview(self._memory)[start : _PAGE + nbytes]
        self.header = self.whole[:header_bytes]
        self.payload = self.whole[header_bytes:]


class Tier(Protocol):
    """A tier of at most ``capacity_bytes`` in a folder of its own.

    ``get_into`` and ``insert`` are called by several threads at once.
    """

    name: ClassVar[str]

    def __init__(
        self, folder: Path, capacity_bytes: int, nbytes: int, header_bytes: int
    ) -> None: ...
    def open(self) -> None:
        """Open, and create when there is nothing; after a close, with all it had."""

    def close(self) -> None:
        """Close."""

    def get_into(self, key: bytes, target: memoryview) -> bool:
        """Copy the payload of a block; False for a miss."""

    def insert(self, key: bytes, block: Block) -> bool:
        """Store a block and make room for it; False when it was refused."""

    def counters(self) -> Mapping[str, int]:
        """Return what it counts itself."""


class Lru:
    """Which keys there are, the longest unused first: what an application keeps.

    Methods may be called from several threads.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("an LRU needs room for one block")
        self.capacity = capacity
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """Return how many keys there are."""
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        """Return the keys, the longest unused first; not while others change it."""
        return iter(self._keys)

    def used(self, key: bytes) -> bool:
        """Note a use; False when the key is not there."""
        with self._lock:
            if key not in self._keys:
                return False
            self._keys.move_to_end(key)
            return True

    def add(self, key: bytes) -> list[bytes]:
        """Note a new key as used; return which keys must go for it."""
        with self._lock:
            self._keys[key] = None
            self._keys.move_to_end(key)
            count = len(self._keys) - self.capacity
            return [self._keys.popitem(last=False)[0] for _ in range(count)]


class _Folder:
    name: ClassVar[str] = ""

    def __init__(
        self, folder: Path, capacity_bytes: int, nbytes: int, header_bytes: int
    ) -> None:
        self.folder = folder / "tier"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.capacity_bytes = capacity_bytes
        self.nbytes = nbytes
        self.header_bytes = header_bytes

    def counters(self) -> Mapping[str, int]:
        return {}


class CycloneTier(_Folder):
    """The engine with ``CacheConfig.for_kv_tier()``."""

    name = "cyclone_kv"
    options: ClassVar[Mapping[str, Any]] = {}
    _cache: Cache

    def open(self) -> None:
        config = CacheConfig.for_kv_tier(capacity=self.capacity_bytes, **self.options)
        self._cache = Cache.open(self.folder / "kv.cyc", config)

    def close(self) -> None:
        self._cache.close()

    def get_into(self, key: bytes, target: memoryview) -> bool:
        return self._cache.get_into(key, target) is not None

    def insert(self, key: bytes, block: Block) -> bool:
        return self._cache.put(key, block.payload, header=block.header)

    def counters(self) -> Mapping[str, int]:
        return dict(self._cache.stats().process)


class CycloneNoWriteBehind(CycloneTier):
    """The same without write-behind."""

    name = "cyclone_kv write_behind=False"
    options: ClassVar[Mapping[str, Any]] = {"write_behind": False}


class CycloneAlways(CycloneTier):
    """The same, admitting every block."""

    name = "cyclone_kv admission=always"
    options: ClassVar[Mapping[str, Any]] = {"admission": "always"}


class CycloneAdaptive(CycloneTier):
    """The same with adaptive admission."""

    name = "cyclone_kv admission=adaptive"
    options: ClassVar[Mapping[str, Any]] = {"admission": "adaptive"}


class _LruTier(_Folder):
    def __init__(
        self, folder: Path, capacity_bytes: int, nbytes: int, header_bytes: int
    ) -> None:
        super().__init__(folder, capacity_bytes, nbytes, header_bytes)
        self._new_lru()

    def _new_lru(self) -> None:
        self._lru = Lru(self.capacity_bytes // (self.nbytes + self.header_bytes))

    def counters(self) -> Mapping[str, int]:
        return {"entries": len(self._lru)}


class LmdbTier(_LruTier):
    """LMDB, not durable: no sync, a map of 1.5 times the capacity."""

    name = "lmdb"
    _env: lmdb.Environment

    def open(self) -> None:
        self._env = lmdb.open(
            str(self.folder),
            map_size=max(self.capacity_bytes * 3 // 2, 16 * _MIB),
            sync=False,
            metasync=False,
            max_readers=64,
        )
        self._new_lru()
        with self._env.begin() as transaction:
            for key in transaction.cursor().iternext(keys=True, values=False):
                self._lru.add(bytes(key))

    def close(self) -> None:
        self._env.close()

    def get_into(self, key: bytes, target: memoryview) -> bool:
        if not self._lru.used(key):
            return False
        with self._env.begin(buffers=True) as transaction:
            found = transaction.get(key)
            if found is None:
                return False
            # numpy copies without the GIL, a slice assignment would hold it.
            source = np.frombuffer(found, dtype=np.uint8)[self.header_bytes :]
            np.copyto(np.frombuffer(target, dtype=np.uint8), source)
            return True

    def insert(self, key: bytes, block: Block) -> bool:
        with self._env.begin(write=True) as transaction:
            # The writer's lock is held: what goes is decided in the order of writes.
            for victim in self._lru.add(key):
                transaction.delete(victim)
            return bool(transaction.put(key, block.whole))


class RocksTier(_LruTier):
    """RocksDB with blob files and their garbage collection, no write-ahead log."""

    name = "rocksdb"

    def open(self) -> None:
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(1024)
        options.set_blob_file_size(64 * _MIB)
        options.set_enable_blob_gc(True)
        options.set_blob_gc_age_cutoff(1.0)
        options.set_blob_gc_force_threshold(0.3)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_write_buffer_size(32 * _MIB)
        options.set_max_background_jobs(2)
        self._write = rocksdict.WriteOptions()
        self._write.disable_wal = True
        self._db = rocksdict.Rdict(str(self.folder), options)
        self._db.set_write_options(self._write)
        self._new_lru()
        for key in self._db.keys():  # noqa: SIM118  (an Rdict is no dict)
            self._lru.add(bytes(key))

    def close(self) -> None:
        self._db.flush()
        self._db.close()

    def get_into(self, key: bytes, target: memoryview) -> bool:
        if not self._lru.used(key):
            return False
        found = self._db.get(key)
        if found is None:
            return False
        source = np.frombuffer(found, dtype=np.uint8)[self.header_bytes :]
        np.copyto(np.frombuffer(target, dtype=np.uint8), source)
        return True

    def insert(self, key: bytes, block: Block) -> bool:
        # The binding takes bytes; this copy is its price.
        self._db.put(key, bytes(block.whole))
        for victim in self._lru.add(key):
            self._db.delete(victim)
        return True


class FileTier(_LruTier):
    """A file per block, in 256 folders: a temporary name, then a rename."""

    name = "files"

    def open(self) -> None:
        self._new_lru()
        found = []
        for number in range(256):
            sub = self.folder / f"{number:02x}"
            sub.mkdir(parents=True, exist_ok=True)
            for entry in os.scandir(sub):
                found.append((entry.stat().st_mtime_ns, entry.name))
        for _, name in sorted(found):
            self._lru.add(bytes.fromhex(name))

    def close(self) -> None:
        """Nothing is open."""

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.folder}/{name[:2]}/{name}"

    def get_into(self, key: bytes, target: memoryview) -> bool:
        if not self._lru.used(key):
            return False
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY)
        except FileNotFoundError:  # evicted just now
            return False
        try:
            done = 0
            while done < len(target):
                count = os.preadv(descriptor, [target[done:]], self.header_bytes + done)
                if count == 0:
                    return False
                done += count
            return True
        finally:
            os.close(descriptor)

    def insert(self, key: bytes, block: Block) -> bool:
        path = self._path(key)
        part = f"{path}.{threading.get_ident()}"
        with open(part, "wb", buffering=0) as file:
            if file.write(block.whole) != len(block.whole):
                raise RuntimeError("a short write")
        os.rename(part, path)
        for victim in self._lru.add(key):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(victim))
        return True


class DirectTier(_Folder):
    """The limit: each hit a direct read, each insert a direct write, nothing cached.

    Its places are given out by an LRU; one that is being read or written is not given
    to another key.
    """

    name = "device"

    def __init__(
        self, folder: Path, capacity_bytes: int, nbytes: int, header_bytes: int
    ) -> None:
        super().__init__(folder, capacity_bytes, nbytes, header_bytes)
        self._slots = capacity_bytes // nbytes
        self._lock = threading.Lock()
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(self._slots))
        self._users = [0] * self._slots
        self._local = threading.local()

    def open(self) -> None:
        self._fd = os.open(
            self.folder / "flat", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600
        )
        os.posix_fallocate(self._fd, 0, self._slots * self.nbytes)

    def close(self) -> None:
        os.close(self._fd)

    def get_into(self, key: bytes, target: memoryview) -> bool:
        with self._lock:
            slot = self._places.get(key)
            if slot is None:
                return False
            self._places.move_to_end(key)
            self._users[slot] += 1
        try:
            return os.preadv(self._fd, [target], slot * self.nbytes) == self.nbytes
        finally:
            with self._lock:
                self._users[slot] -= 1

    def _take(self, key: bytes) -> int | None:
        """Return a place for a key, in use."""
        with self._lock:
            if key in self._places:
                return None
            if self._free:
                slot = self._free.pop()
            else:
                idle = (
                    k for k, place in self._places.items() if not self._users[place]
                )
                victim = next(idle, None)
                if victim is None:
                    return None
                slot = self._places.pop(victim)
            self._users[slot] += 1
            return slot

    def insert(self, key: bytes, block: Block) -> bool:
        slot = self._take(key)
        if slot is None:
            return False
        written = os.pwritev(self._fd, [block.payload], slot * self.nbytes)
        with self._lock:
            self._users[slot] -= 1
            if key in self._places or written != self.nbytes:
                self._free.append(slot)  # another thread was first
                return False
            self._places[key] = slot
            return True


TIERS: dict[str, type[Tier]] = {
    kind.name: kind
    for kind in (
        CycloneTier,
        CycloneNoWriteBehind,
        CycloneAlways,
        CycloneAdaptive,
        LmdbTier,
        FileTier,
        RocksTier,
        DirectTier,
    )
}


def available(name: str) -> str | None:
    """Return why a tier cannot run here, None when it can."""
    kind = TIERS[name]
    if issubclass(kind, CycloneTier):
        known = {field.name for field in dataclasses.fields(CacheConfig)}
        missing = sorted(set(kind.options) - known)
        if missing:
            return f"this engine has no option {', '.join(missing)}"
    if kind is RocksTier:
        try:
            import rocksdict  # noqa: F401
        except ImportError as error:
            return f"no rocksdict: {error}"
    return None
