# SPDX-License-Identifier: Apache-2.0
"""The engine as tests call it, and plain Python models of its structures.

Engine      one open handle: the public interface, and a view of the shared region
Ring        a clock in place: what stripe.h says, over a sorted list of extents
Gclock      equal sizes: eviction.md 0, in twenty lines
Zipf        the stream of reference.md 5.1
"""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = 4096
MIB = 1 << 20
GIB = 1 << 30
NONE = 0xFFFFFFFF

OK, MISS, PRESENT, BUSY, NO_RUN, NOT_ADMITTED = range(6)
IN_FLIGHT, FAILED_PATH, IO_FAILED, SHORT_BUFFER = range(6, 10)
E_INVALID, E_CLOSED, E_TOO_LARGE, E_READ_ONLY = -1, -8, -10, -13
FREE, RESERVED, LIVE, DYING, DEAD = range(5)
OVERWRITE, CHAIN = 1, 2


class EngineError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


class Lease:
    """A pinned block."""

    def __init__(self, engine: Engine, pointer: Any) -> None:
        self.engine = engine
        self.pointer = pointer  # struct ckv_lease **

    @property
    def entry(self) -> int:
        return int(self.pointer[0].entry)

    @property
    def data(self) -> bytes:
        ffi, length = self.engine.ffi, self.engine.ffi.new("size_t *")
        data = self.engine.lib.ckv_lease_data(self.pointer[0], length)
        return bytes(ffi.buffer(data, length[0]))

    @property
    def header(self) -> bytes | None:
        ffi, length = self.engine.ffi, self.engine.ffi.new("size_t *")
        data = self.engine.lib.ckv_lease_header(self.pointer[0], length)
        return None if data == ffi.NULL else bytes(ffi.buffer(data, length[0]))

    def release(self) -> None:
        self.engine.lib.ckv_lease_release(self.pointer)


class Engine:
    """One handle; negative results are raised, positive ones returned."""

    def __init__(
        self,
        core: Any,
        paths: Path | Sequence[tuple[Path, int]],
        capacity: int = 16 * MIB,
        **options: Any,
    ) -> None:
        self.lib, self.ffi = core.lib, core.ffi
        ffi = self.ffi
        if isinstance(paths, Path):
            paths = [(paths, capacity)]
        self._kept: list[Any] = [ffi.new("char[]", str(path).encode()) for path, _ in paths]
        rows = ffi.new("struct ckv_path[]", len(paths))
        for row, name, (_, size) in zip(rows, self._kept, paths, strict=True):
            row.path, row.capacity_bytes = name, size
        self._kept.append(rows)
        settings = ffi.new("struct ckv_options *")
        self.lib.ckv_options_init(settings)
        settings.paths, settings.path_count = rows, len(paths)
        settings.sync_interval_ms = 0xFFFFFFFF
        settings.allow_shared_directory = True
        namespace = options.pop("namespace", b"")
        text = ffi.new("char[]", namespace)
        settings.namespace_data, settings.namespace_length = text, len(namespace)
        for name, value in options.items():
            setattr(settings, name, value)
        self.pointer = ffi.new("struct ckv_cache **")
        self.error = ffi.new("struct ckv_error *")
        self._check(self.lib.ckv_open(settings, self.pointer, self.error))

    def _check(self, status: int) -> int:
        if status < 0:
            text = self.ffi.string(self.error.text).decode(errors="replace")
            raise EngineError(status, text)
        return int(status)

    # ---- the public interface ----------------------------------------------------

    def key(self, key: bytes) -> tuple[Any, Any]:
        data = self.ffi.new("char[]", key) if key else self.ffi.NULL
        return self.ffi.new("struct ckv_key *", {"data": data, "length": len(key)}), data

    def keys(self, keys: Sequence[bytes]) -> tuple[Any, Any]:
        kept = [self.ffi.new("char[]", key) for key in keys]
        rows = self.ffi.new("struct ckv_key[]", max(len(keys), 1))
        for row, data, key in zip(rows, kept, keys, strict=False):
            row.data, row.length = data, len(key)
        return rows, kept

    def fill_item(
        self, item: Any, key: bytes, segments: Sequence[Any], header: bytes
    ) -> list[Any]:
        ffi = self.ffi
        name = ffi.new("char[]", key)
        views = [ffi.from_buffer(s) if len(s) else ffi.NULL for s in segments]
        rows = ffi.new("struct ckv_segment[]", max(len(segments), 1))
        for row, view, segment in zip(rows, views, segments, strict=False):
            row.data, row.length = view, len(segment)
        text = ffi.new("char[]", header) if header else ffi.NULL
        item.key.data, item.key.length = name, len(key)
        item.segments, item.segment_count = rows, len(segments)
        item.header, item.header_length = text, len(header)
        return [name, views, rows, text]

    def put(
        self, key: bytes, *segments: Any, header: bytes = b"", flags: int = 0
    ) -> int:
        item = self.ffi.new("struct ckv_item *")
        kept = self.fill_item(item, key, segments, header)
        status = self._check(
            self.lib.ckv_put(self.pointer[0], item, flags, self.error)
        )
        del kept
        return status

    def put_many(
        self,
        items: Sequence[tuple[bytes, bytes]],
        flags: int = 0,
        parent: bytes | None = None,
    ) -> list[int]:
        rows = self.ffi.new("struct ckv_item[]", max(len(items), 1))
        kept = [
            self.fill_item(row, key, [data], b"")
            for row, (key, data) in zip(rows, items, strict=False)
        ]
        above, name = self.key(parent) if parent is not None else (self.ffi.NULL, None)
        self._check(
            self.lib.ckv_put_many(
                self.pointer[0], rows, len(items), flags, above, self.error
            )
        )
        del kept, name
        return [int(rows[i].status) for i in range(len(items))]

    def get(self, key: bytes) -> Lease | None:
        lease = self.ffi.new("struct ckv_lease **")
        name, kept = self.key(key)
        status = self._check(
            self.lib.ckv_get(self.pointer[0], name, lease, self.error)
        )
        del kept
        return Lease(self, lease) if status == OK else None

    def read(self, key: bytes) -> bytes | None:
        lease = self.get(key)
        if lease is None:
            return None
        data = lease.data
        lease.release()
        return data

    def get_into(self, key: bytes, *targets: bytearray) -> tuple[int, int]:
        read = self.ffi.new("struct ckv_read *")
        kept = self.fill_read(read, key, targets)
        status = self._check(self.lib.ckv_get_into(self.pointer[0], read, self.error))
        del kept
        assert status == read.status
        return status, int(read.payload_length)

    def fill_read(self, read: Any, key: bytes, targets: Sequence[bytearray]) -> list[Any]:
        ffi = self.ffi
        name = ffi.new("char[]", key)
        views = [
            ffi.from_buffer(t, require_writable=True) if len(t) else ffi.NULL
            for t in targets
        ]
        rows = ffi.new("struct ckv_target[]", max(len(targets), 1))
        for row, view, target in zip(rows, views, targets, strict=False):
            row.data, row.length = view, len(target)
        read.key.data, read.key.length = name, len(key)
        read.targets, read.target_count = rows, len(targets)
        return [name, views, rows]

    def get_many_into(
        self, wanted: Sequence[tuple[bytes, Sequence[bytearray]]]
    ) -> list[tuple[int, int]]:
        rows = self.ffi.new("struct ckv_read[]", max(len(wanted), 1))
        kept = [
            self.fill_read(row, key, targets)
            for row, (key, targets) in zip(rows, wanted, strict=False)
        ]
        self._check(
            self.lib.ckv_get_many_into(self.pointer[0], rows, len(wanted), self.error)
        )
        del kept
        return [
            (int(rows[i].status), int(rows[i].payload_length))
            for i in range(len(wanted))
        ]

    def contains(self, *keys: bytes) -> list[bool]:
        rows, kept = self.keys(keys)
        present = self.ffi.new("bool[]", max(len(keys), 1))
        self._check(
            self.lib.ckv_contains_many(
                self.pointer[0], rows, len(keys), present, self.error
            )
        )
        del kept
        return [bool(present[i]) for i in range(len(keys))]

    def _walk(self, function: str, keys: Sequence[bytes], *more: Any) -> int:
        rows, kept = self.keys(keys)
        found = self.ffi.new("size_t *")
        call = getattr(self.lib, function)
        self._check(
            call(self.pointer[0], rows, len(keys), *more, found, self.error)
        )
        del kept
        return int(found[0])

    def longest_prefix(self, keys: Sequence[bytes], *, touch: bool = False) -> int:
        return self._walk("ckv_longest_prefix", keys, touch)

    def touch(self, keys: Sequence[bytes]) -> int:
        return self._walk("ckv_touch", keys)

    def prefetch(self, keys: Sequence[bytes]) -> int:
        return self._walk("ckv_prefetch", keys)

    def remove(self, key: bytes) -> int:
        name, kept = self.key(key)
        status = self._check(self.lib.ckv_remove(self.pointer[0], name, self.error))
        del kept
        return status

    def clear(self) -> int:
        removed = self.ffi.new("uint64_t *")
        self._check(self.lib.ckv_clear(self.pointer[0], removed, self.error))
        return int(removed[0])

    def count(self) -> int:
        entries = self.ffi.new("uint64_t *")
        self._check(self.lib.ckv_count(self.pointer[0], entries, self.error))
        return int(entries[0])

    def sync(self) -> None:
        self._check(self.lib.ckv_sync(self.pointer[0], self.error))

    def recover(self) -> int:
        paths = self.ffi.new("uint64_t *")
        self._check(self.lib.ckv_recover(self.pointer[0], paths, self.error))
        return int(paths[0])

    def verify(self, *, repair: bool = False) -> Any:
        report = self.ffi.new("struct ckv_verify_report *")
        self._check(
            self.lib.ckv_verify(
                self.pointer[0],
                repair,
                self.ffi.NULL,
                self.ffi.NULL,
                report,
                self.error,
            )
        )
        return report

    def assert_clean(self) -> int:
        """Nothing is wrong with the volume; returns the number of entries."""
        report = self.verify()
        text = self.ffi.string(report.first_fault).decode()
        assert report.structure_faults == 0, text
        assert report.damaged_payloads == 0, text
        assert report.unreadable == 0, text
        return int(report.entries_checked)

    def list(self, piece: int = 7) -> list[Any]:
        cursor = self.ffi.new("uint64_t *")
        count = self.ffi.new("size_t *")
        rows = self.ffi.new("struct ckv_entry_info[]", piece)
        found = []
        while True:
            self._check(
                self.lib.ckv_list(
                    self.pointer[0], cursor, rows, piece, count, self.error
                )
            )
            if count[0] == 0:
                return found
            for i in range(count[0]):
                copy = self.ffi.new("struct ckv_entry_info *")
                copy[0] = rows[i]
                found.append(copy)

    def events(self, since: int = 0) -> tuple[list[Any], int, int]:
        rows = self.ffi.new("struct ckv_event[]", 20000)
        count = self.ffi.new("size_t *")
        lost = self.ffi.new("uint64_t *")
        last = self.ffi.new("uint64_t *")
        self._check(
            self.lib.ckv_events(
                self.pointer[0], since, rows, 20000, count, lost, last, self.error
            )
        )
        return [rows[i] for i in range(count[0])], int(lost[0]), int(last[0])

    @property
    def stats(self) -> Any:
        stats = self.ffi.new("struct ckv_stats *")
        self._check(
            self.lib.ckv_get_stats(self.pointer[0], stats, self.ffi.NULL, self.error)
        )
        return stats

    @property
    def info(self) -> Any:
        info = self.ffi.new("struct ckv_info *")
        self._check(self.lib.ckv_get_info(self.pointer[0], info, self.error))
        return info

    def close(self) -> None:
        self.lib.ckv_close(self.pointer)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what lies behind it -----------------------------------------------------

    @property
    def volume(self) -> Any:
        return self.pointer[0].volume

    @property
    def region(self) -> Any:
        return self.pointer[0].volume.region

    def kind(self, entry: int) -> int:
        return int(self.region.states[entry]) & 7

    def identity(self, key: bytes) -> Any:
        """What a key becomes (cache.c)."""
        digested = len(key) != 32
        identity = self.ffi.new("struct ckv_identity *")
        self.ffi.memmove(identity.namespace_tag, self.pointer[0].namespace_tag, 16)
        raw = hashlib.sha256(key).digest() if digested else key
        self.ffi.memmove(identity.key, raw, 32)
        identity.digested = digested
        identity.namespace_index = self.pointer[0].namespace_index
        identity.hash = self.lib.ckv_index_hash(
            self.volume, identity.namespace_tag, identity.key, digested
        )
        return identity

    def find(self, key: bytes) -> Any | None:
        found = self.ffi.new("struct ckv_found *")
        ok = self.lib.ckv_index_find(self.volume, self.identity(key), found)
        return found if ok else None

    def reserve_pages(self, pages: int) -> tuple[int, Any]:
        extent = self.ffi.new("struct ckv_extent *")
        return int(self.lib.ckv_stripe_reserve(self.volume, pages, extent)), extent

    def publish(self, key: bytes, extent: Any, payload: int, crc: int) -> bool:
        """Makes a reserved extent a block without writing its data."""
        identity = self.identity(key)
        record = self.ffi.new("struct ckv_record *")
        record.payload_bytes, record.payload_crc = payload, crc
        record.first_page = extent.first_page
        record.flags = (self.lib.CKV_RECORD_DIGESTED if identity.digested else 0) | (
            self.lib.CKV_RECORD_HOLE if extent.hole else 0
        )
        self.ffi.memmove(record.namespace_tag, identity.namespace_tag, 16)
        self.ffi.memmove(record.key, identity.key, 32)
        status = self.lib.ckv_entry_publish(
            self.volume, extent.entry, identity.namespace_index, record
        )
        assert status == OK
        return bool(
            self.lib.ckv_index_insert(
                self.volume, identity.hash, extent.entry, record.sequence
            )
        )
