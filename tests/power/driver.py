# SPDX-License-Identifier: Apache-2.0
"""The engine under a recorder: does what it is told and marks it in the stream.

The marks are what the oracle (oracle.py) reads:

    {"what": "begin", "who", "op", "key", "value": [version, length]}
    {"what": "end", "who", "op", "key", "ok"}
    {"what": "seen", "who", "removed": [keys], "lost": n}       after each operation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crash.blobs import blob, key_of
from opened import Opened
from power.stream import Stream

__all__ = ["EVENTS", "Driver", "payload"]

EVENTS = 4096
REMOVED = 2


def payload(key: bytes, value: Sequence[int]) -> bytes:
    version, length = value
    return blob(key, length, version)


class Driver:
    """One handle; keys are numbers, each written by one process alone."""

    def __init__(
        self, core: Any, stream: Stream, who: str, *paths: Any, **options: Any
    ) -> None:
        self.core = core
        self.stream = stream
        self.who = who
        self.paths = paths
        self.options = {"event_capacity": EVENTS, "io_threads": 1, **options}
        self.versions: dict[str, int] = {}
        self.opened: Opened | None = None
        self._events_seen = 0

    # ---- life ----------------------------------------------------------------------

    def open(self) -> None:
        self._begin("open")
        self.opened = Opened(self.core, *self.paths, **self.options)
        self._events_seen = 0
        self._end("open", ok=True)
        self._look()

    def close(self) -> None:
        if self.opened is not None:
            self._begin("close")
            self.opened.close()
            self.opened = None
            self._end("close", ok=True)

    @property
    def cache(self) -> Opened:
        assert self.opened is not None
        return self.opened

    # ---- operations ----------------------------------------------------------------

    def put(self, key: str, length: int, *, overwrite: bool = True) -> bool:
        name = key_of(key)
        value = self._next(key, length)
        self._begin("put", key, value=value)
        header = b"h" * (value[0] % 5)
        status = self.cache.put(name, payload(name, value), int(overwrite), header)
        self._end("put", key, ok=status in (0, 2))
        self._look()
        return status == 0

    def put_many(
        self, keys: Sequence[str], length: int, *, chain: bool, overwrite: bool = True
    ) -> None:
        ffi, lib = self.core.ffi, self.core.lib
        values = [self._next(key, length) for key in keys]
        for key, value in zip(keys, values, strict=True):
            self._begin("put", key, value=value)
        items = ffi.new("struct ckv_item[]", len(keys))
        kept: list[Any] = []
        for item, key, value in zip(items, keys, values, strict=True):
            name = key_of(key)
            data = ffi.new("char[]", payload(name, value))
            text = ffi.new("char[]", name)
            segment = ffi.new("struct ckv_segment *", (data, value[1]))
            kept += [data, text, segment]
            item.key.data, item.key.length = text, len(name)
            item.segments, item.segment_count = segment, 1
        error = ffi.new("struct ckv_error *")
        flags = int(overwrite) | (2 if chain else 0)
        status = lib.ckv_put_many(
            self.cache.cache, items, len(keys), flags, ffi.NULL, error
        )
        assert status >= 0, ffi.string(error.text)
        for item, key in zip(items, keys, strict=True):
            self._end("put", key, ok=item.status in (0, 2))
        self._look()

    def remove(self, key: str) -> None:
        self._begin("remove", key)
        self.cache.remove(key_of(key))
        self._end("remove", key, ok=True)
        self._look()

    def clear(self) -> None:
        self._begin("clear")
        self.cache.clear()
        self._end("clear", ok=True)
        self._look()

    def sync(self) -> None:
        self._begin("sync")
        error = self.core.ffi.new("struct ckv_error *")
        status = self.core.lib.ckv_sync(self.cache.cache, error)
        self._end("sync", ok=status == 0)
        self._look()

    def get(self, key: str) -> bytes | None:
        return self.cache.get(key_of(key))

    # ---- marks ---------------------------------------------------------------------

    def _next(self, key: str, length: int) -> list[int]:
        self.versions[key] = self.versions.get(key, 0) + 1
        return [self.versions[key], length]

    def _begin(self, op: str, key: str | None = None, **more: Any) -> None:
        self.stream.mark("begin", who=self.who, op=op, key=key, **more)

    def _end(self, op: str, key: str | None = None, *, ok: bool) -> None:
        self.stream.mark("end", who=self.who, op=op, key=key, ok=ok)

    def _look(self) -> None:
        """What was evicted meanwhile, as the engine tells it."""
        ffi = self.core.ffi
        found = ffi.new("struct ckv_event[]", 256)
        count, lost, last = (
            ffi.new("size_t *"),
            ffi.new("uint64_t *"),
            ffi.new("uint64_t *"),
        )
        error = ffi.new("struct ckv_error *")
        removed: list[str] = []
        total = 0
        while True:
            status = self.core.lib.ckv_events(
                self.cache.cache,
                self._events_seen,
                found,
                256,
                count,
                lost,
                last,
                error,
            )
            assert status >= 0, ffi.string(error.text)
            self._events_seen = int(last[0])
            total += int(lost[0])
            removed += [
                bytes(ffi.buffer(event.key)).hex()
                for event in found[0 : count[0]]
                if event.kind == REMOVED
            ]
            if count[0] < 256:
                break
        self.stream.mark("seen", who=self.who, removed=removed, lost=total)
