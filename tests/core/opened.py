# SPDX-License-Identifier: Apache-2.0
"""A cache that the `core` fixture has open, and processes that have one open.

    cache = Opened(core, path)
    cache.put(b"key", b"bytes"); cache.get(b"key"); cache.verify(); cache.region
    with Peer(path, point="put.recorded:kill") as peer:
        peer.ask("put", "key", 4096)         # None: it died

Run as a program this file is the peer: one line of JSON in, one out.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20
PAGE = 4096
CAPACITY = 16 * MIB
HERE = Path(__file__).resolve().parent

FREE, RESERVED, LIVE, DYING, DEAD = range(5)


class Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.text = text
        super().__init__(f"{status}: {text}")


def payload_of(key: bytes, size: int) -> bytes:
    """Bytes that belong to this key alone."""
    seed = int.from_bytes(key[:8].ljust(8, b"."), "little") | 1
    word = (seed * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little")
    return (word * (size // 8 + 1))[:size]


class Opened:
    def __init__(
        self,
        core: Any,
        *paths: Path | str,
        capacity: int = CAPACITY,
        namespace: bytes = b"",
        **options: Any,
    ) -> None:
        self.core, self.lib, self.ffi = core, core.lib, core.ffi
        ffi = self.ffi
        self._kept = [ffi.new("char[]", os.fsencode(path)) for path in paths]
        entries = ffi.new("struct ckv_path[]", len(paths))
        for entry, text in zip(entries, self._kept, strict=True):
            entry.path, entry.capacity_bytes = text, capacity
        given = ffi.new("struct ckv_options *")
        self.lib.ckv_options_init(given)
        given.paths, given.path_count = entries, len(paths)
        given.sync_interval_ms = 0xFFFFFFFF
        if namespace:
            data = ffi.new("char[]", namespace)
            self._kept.append(data)
            given.namespace_data, given.namespace_length = data, len(namespace)
        for name, value in options.items():
            if isinstance(value, bytes):
                value = ffi.new("char[]", value)
                self._kept.append(value)
            setattr(given, name, value)
        self._cache = ffi.new("struct ckv_cache **")
        self._call(self.lib.ckv_open, given, self._cache)

    def _call(self, function: Any, *arguments: Any) -> int:
        error = self.ffi.new("struct ckv_error *")
        status = int(function(*arguments, error))
        if status < 0:
            raise Refused(status, self.ffi.string(error.text).decode())
        return status

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.lib.ckv_close(self._cache)

    @property
    def cache(self) -> Any:
        return self._cache[0]

    @property
    def volume(self) -> Any:
        return self.cache.volume

    @property
    def region(self) -> Any:
        return self.volume.region

    def _key(self, key: bytes) -> tuple[Any, Any]:
        data = self.ffi.new("char[]", key)
        return self.ffi.new("struct ckv_key *", (data, len(key))), data

    def put(self, key: bytes, data: bytes, flags: int = 0, header: bytes = b"") -> int:
        segment = self.ffi.new("struct ckv_segment *")
        kept = self.ffi.from_buffer(data)
        segment.data, segment.length = kept, len(data)
        item = self.ffi.new("struct ckv_item *")
        name, kept_name = self._key(key)
        item.key = name[0]
        item.segments, item.segment_count = segment, 1
        kept_header = self.ffi.new("char[]", header)
        item.header, item.header_length = kept_header, len(header)
        status = self._call(self.lib.ckv_put, self.cache, item, flags)
        assert kept_name is not None
        return status

    def pin(self, key: bytes) -> Any:
        """A lease (to be released by lib.ckv_lease_release), or None."""
        lease = self.ffi.new("struct ckv_lease **")
        name, kept = self._key(key)
        status = self._call(self.lib.ckv_get, self.cache, name, lease)
        assert kept is not None
        return lease if status == self.lib.CKV_OK else None

    def get(self, key: bytes) -> bytes | None:
        lease = self.pin(key)
        if lease is None:
            return None
        length = self.ffi.new("size_t *")
        data = self.lib.ckv_lease_data(lease[0], length)
        result = bytes(self.ffi.buffer(data, length[0]))
        self.lib.ckv_lease_release(lease)
        return result

    def remove(self, key: bytes) -> bool:
        name, kept = self._key(key)
        assert kept is not None
        return self._call(self.lib.ckv_remove, self.cache, name) == self.lib.CKV_OK

    def contains(self, key: bytes) -> bool:
        name, kept = self._key(key)
        present = self.ffi.new("bool *")
        self._call(self.lib.ckv_contains_many, self.cache, name, 1, present)
        assert kept is not None
        return bool(present[0])

    def clear(self) -> int:
        removed = self.ffi.new("uint64_t *")
        self._call(self.lib.ckv_clear, self.cache, removed)
        return int(removed[0])

    def count(self) -> int:
        entries = self.ffi.new("uint64_t *")
        self._call(self.lib.ckv_count, self.cache, entries)
        return int(entries[0])

    def recover(self) -> int:
        recovered = self.ffi.new("uint64_t *")
        self._call(self.lib.ckv_recover, self.cache, recovered)
        return int(recovered[0])

    def verify(self, *, repair: bool = False, progress: Any = None) -> Any:
        report = self.ffi.new("struct ckv_verify_report *")
        callback = self.ffi.NULL
        if progress is not None:
            callback = self.ffi.callback(
                "int(void *, uint64_t, uint64_t)",
                lambda _, done, total: progress(done, total),
            )
        self._call(
            self.lib.ckv_check, self.volume, repair, callback, self.ffi.NULL, report
        )
        found = {
            name: int(getattr(report, name))
            for name in (
                "entries_checked",
                "bytes_checked",
                "damaged_payloads",
                "unreadable",
                "structure_faults",
                "repaired",
            )
        }
        text = self.ffi.string(report.first_fault).decode()
        return SimpleNamespace(**found, first_fault=text)

    def stats(self) -> Any:
        stats = self.ffi.new("struct ckv_stats *")
        self._call(self.lib.ckv_get_stats, self.cache, stats, self.ffi.NULL)
        return stats

    def states(self, kind: int) -> list[int]:
        """The entries in a state of this kind."""
        states = self.region.states
        count = self.region.layout.entry_count
        return [e for e in range(count) if states[e] & 7 == kind]

    def assert_sound(self) -> None:
        report = self.verify()
        assert report.structure_faults == 0, report.first_fault
        assert report.damaged_payloads == report.unreadable == 0, report.first_fault


# ---- other processes ---------------------------------------------------------------


class Peer:
    """A process with the cache open.  `ask` returns its answer, None when it died."""

    def __init__(self, *paths: Path | str, point: str = "", **options: Any) -> None:
        environment = {**os.environ, "CYCLONE_KV_TEST_POINT": point}
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(HERE / "opened.py"),
                json.dumps(options),
                *map(str, paths),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.hello = self._answer()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def ask(self, command: str, *arguments: Any, timeout: float = 120) -> Any:
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()
        readable, _, _ = select.select([self.process.stdout], [], [], timeout)
        if not readable:
            self.kill()
            raise TimeoutError(f"the peer did not answer {command} in {timeout} s")
        return self._answer()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)

    def close(self) -> None:
        """In order."""
        self.process.stdin.close()
        self.process.wait(timeout=30)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                stream.close()


@contextmanager
def stopped(peer: Peer) -> Iterator[None]:
    peer.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        peer.signal(signal.SIGCONT)


def _fork_idle() -> int:
    """A child that does nothing but live."""
    child = os.fork()
    if child == 0:
        os.setsid()
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        time.sleep(600)
        os._exit(0)
    return child


def _serve(cache: Opened, leases: list[Any], command: str, arguments: list[Any]) -> Any:
    if command == "put":
        key, size, *rest = arguments
        return cache.put(key.encode(), payload_of(key.encode(), size), *rest)
    if command == "pin":
        leases.append(cache.pin(arguments[0].encode()))
        return leases[-1] is not None
    if command == "remove":
        return cache.remove(arguments[0].encode())
    if command == "clear":
        return cache.clear()
    if command == "churn":
        size, seconds = arguments
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            key = f"{os.getpid()}-{number % 300}".encode()
            cache.put(key, payload_of(key, size), number % 3 == 0)
            if number % 5 == 0:
                cache.remove(key)
            number += 1
        return number
    if command == "fork":
        return _fork_idle()
    if command == "closerange":
        os.closerange(3, 4096)
        return True
    if command == "fork-storm":
        return _fork_storm(cache.core, arguments[0])
    if command == "fork-open":
        return _fork_open(cache, arguments[0])
    raise ValueError(command)


def _fork_storm(core: Any, path: str) -> Any:
    """Forks at any moment of opens and closes; what the last open then finds."""
    children: list[int] = []
    ended = threading.Event()

    def fork_now_and_then() -> None:
        while not ended.is_set():
            children.append(_fork_idle())
            time.sleep(0.003)

    thread = threading.Thread(target=fork_now_and_then)
    thread.start()
    for _ in range(30):
        with Opened(core, path):
            pass
    ended.set()
    thread.join()
    try:
        with Opened(core, path) as again:
            return [len(children), again.volume.slot, again.volume.incarnation]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fork_open(cache: Opened, path: str) -> Any:
    """What a child sees: its inherited handle refuses, a new one works."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            cache.get(b"k")
            inherited = 0
        except Refused as refusal:
            inherited = refusal.status
        with Opened(cache.core, path) as own:
            answer = [inherited, own.volume.slot, own.put(b"child", b"x" * 100)]
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    return json.loads(os.read(reading, 1000) or b"null")


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _main() -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import build_core

    module = build_core.load()
    core = SimpleNamespace(lib=module.lib, ffi=module.ffi)
    options, *paths = sys.argv[1:]
    try:
        cache = Opened(core, *paths, **json.loads(options))
    except Refused as refusal:
        _say({"status": refusal.status, "text": refusal.text})
        return
    _say({"slot": cache.volume.slot, "incarnation": cache.volume.incarnation})
    leases: list[Any] = []
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        _say(_serve(cache, leases, command, arguments))
    for lease in leases:
        if lease is not None:
            core.lib.ckv_lease_release(lease)
    cache.close()


if __name__ == "__main__":
    _main()
