# SPDX-License-Identifier: Apache-2.0
"""What a workload asked the kernel to do to its volume files, in order.

Every system call of the engine goes through one table (os.h).  Its members that change
a file are wrapped here: each call is done and written down under one lock, which
processes share, so the list is the order in which the page cache of the file changed.
Marks of the workload ("put of key 3, version 7 begins", "... returned True") stand in
the same list, so at each place of it is known what has been acknowledged.

    kind      meaning                                      offset, data
    write     bytes that write_at() took                   where, bytes
    truncate  the file has this length now                 length, -
    allocate  the file has at least this length now        length, -
    sync      fsync returned: a barrier for the whole file  -, -
    barrier   the same for a range                         where, length
    named     fsync of its folder returned                 -, -
    mark      the workload says something                  -, JSON
    mapped    a mapping that can be stored to: an error    -, -

Stores through a mapping would pass unseen.  The engine never makes them: it maps its
files read-only, and `mapped` in a stream fails the test that reads it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from os_faults import OsTable

__all__ = ["Event", "Recorder", "Stream", "read_stream"]


class Event(NamedTuple):
    kind: str
    file: int = -1  # index of the volume file
    offset: int = 0
    data: bytes = b""

    @property
    def mark(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.data)
        return found


class Stream:
    """The list; in memory, or a file that several processes append to."""

    def __init__(self, path: Path | None = None) -> None:
        self.events: list[Event] = []
        self._lock = threading.RLock()
        self._depth = 0
        self._file = path.open("ab") if path is not None else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._lock:
            if self._file is not None and self._depth == 0:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._file is not None and self._depth == 0:
                    self._file.flush()
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def add(self, event: Event) -> None:
        with self.locked():
            if self._file is None:
                self.events.append(event)
            else:
                pickle.dump(tuple(event), self._file)

    def mark(self, what: str, **values: Any) -> None:
        self.add(Event("mark", data=json.dumps({"what": what, **values}).encode()))


def read_stream(path: Path) -> list[Event]:
    events = []
    with path.open("rb") as file:
        while True:
            try:
                events.append(Event(*pickle.load(file)))
            except EOFError:
                return events


class Recorder:
    """Writes the calls of this process on `paths` into a stream, while it is entered.

    `lie` makes a sync a call that does nothing, for the test of the tests.
    """

    def __init__(
        self,
        core: Any,
        stream: Stream,
        paths: Sequence[Path | str],
        *,
        lie: bool = False,
        watch: Callable[[Event], None] | None = None,
    ) -> None:
        self.core = core
        self.stream = stream
        self.lie = lie
        self.watch = watch
        self.names = {os.path.realpath(path): i for i, path in enumerate(paths)}
        self.folders: dict[str, list[int]] = {}
        for name, file in self.names.items():
            self.folders.setdefault(os.path.dirname(name), []).append(file)
        self._files: dict[int, int] = {}
        self._directories: dict[int, list[int]] = {}
        self._table = OsTable(core)
        self._native = self._table.native

    def __enter__(self) -> Recorder:
        for name in (
            "open_file",
            "close_file",
            "write_at",
            "truncate_file",
            "allocate",
            "sync_file",
            "map",
        ):
            self._table.replace(name, getattr(self, f"_{name}"))
        if hasattr(self._native, "sync_range"):
            self._table.replace("sync_range", self._sync_range)
        return self

    def __exit__(self, *unused: object) -> None:
        self._table.__exit__(*unused)

    def _add(self, event: Event) -> None:
        self.stream.add(event)
        if self.watch is not None:
            self.watch(event)

    def _open_file(self, path: Any, flags: int, mode: int) -> int:
        name = self.core.ffi.string(path).decode()
        with self.stream.locked():
            fd = int(self._native.open_file(path, flags, mode))
            if fd >= 0:
                found = os.path.realpath(f"/proc/self/fd/{fd}")
                self._files.pop(fd, None)
                self._directories.pop(fd, None)
                if found in self.names:
                    self._files[fd] = self.names[found]
                elif found in self.folders and os.path.isdir(name):
                    self._directories[fd] = self.folders[found]
        return fd

    def _close_file(self, fd: int) -> int:
        self._files.pop(fd, None)
        self._directories.pop(fd, None)
        return int(self._native.close_file(fd))

    def _write_at(self, fd: int, iov: Any, count: int, offset: int) -> int:
        file = self._files.get(fd)
        if file is None:
            return int(self._native.write_at(fd, iov, count, offset))
        with self.stream.locked():
            done = int(self._native.write_at(fd, iov, count, offset))
            if done > 0:
                buffer = self.core.ffi.buffer
                data = b"".join(
                    bytes(buffer(iov[i].iov_base, iov[i].iov_len)) for i in range(count)
                )
                self._add(Event("write", file, offset, data[:done]))
        return done

    def _changed(self, kind: str, fd: int, length: int, call: Callable[[], int]) -> int:
        file = self._files.get(fd)
        if file is None:
            return call()
        with self.stream.locked():
            result = call()
            if result == 0:
                self._add(Event(kind, file, length))
        return result

    def _truncate_file(self, fd: int, length: int) -> int:
        call = lambda: int(self._native.truncate_file(fd, length))  # noqa: E731
        return self._changed("truncate", fd, length, call)

    def _allocate(self, fd: int, offset: int, length: int) -> int:
        call = lambda: int(self._native.allocate(fd, offset, length))  # noqa: E731
        return self._changed("allocate", fd, offset + length, call)

    def _sync_file(self, fd: int) -> int:
        file = self._files.get(fd)
        with self.stream.locked():
            result = int(self._native.sync_file(fd))
            if result == 0 and not self.lie:
                if file is not None:
                    self._add(Event("sync", file))
                for each in self._directories.get(fd, ()):
                    self._add(Event("named", each))
        return result

    def _sync_range(self, fd: int, address: Any, offset: int, length: int) -> int:
        file = self._files.get(fd)
        with self.stream.locked():
            result = int(self._native.sync_range(fd, address, offset, length))
            if result == 0 and file is not None and not self.lie:
                self._add(Event("barrier", file, offset, str(length).encode()))
        return result

    def _map(
        self,
        hint: Any,
        length: int,
        protection: int,
        flags: int,
        fd: int,
        offset: int,
        result: Any,
    ) -> int:
        file = self._files.get(fd)
        if file is not None and protection & mmap.PROT_WRITE:
            self._add(Event("mapped", file))
        return int(
            self._native.map(hint, length, protection, flags, fd, offset, result)
        )
