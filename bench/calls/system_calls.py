# SPDX-License-Identifier: Apache-2.0
"""How many system calls each call makes.

Counted by ``strace`` in a child: a call that nothing else makes marks where each name
begins and ends. Without strace a filter of the kernel says whether there is one at all.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.calls.volume import (
    BLOCK_BYTES,
    absent_keys,
    asked,
    make_events,
    open_cache,
)
from cyclone_kv import Cache

__all__ = ["Count", "count", "named_calls", "parse"]

_TIMES = 100
_WARM = 30
_KEYS = 64
_MARK = "/ckv-calls/"
_MACHINES = {"x86_64": (0xC000003E, 231), "aarch64": (0xC00000B7, 94)}
_ROOT = Path(__file__).resolve().parents[2]
_LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")
_MISSED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """System calls of one call."""

    each: float | None
    """Of the calling thread; None: not counted."""
    names: Mapping[str, float]
    """By name, of the calling thread."""
    beside: float
    """Of other threads of the process meanwhile."""
    text: str
    """For a reader."""


def named_calls(cache: Cache, entries: int) -> dict[str, Callable[[int], object]]:
    """Return what is counted; the argument says which turn it is."""
    keys = asked(entries, _KEYS)
    rows = b"".join(keys)
    absent = absent_keys(entries, 1)[0]
    value = bytes(BLOCK_BYTES)
    last = make_events(cache)
    target = bytearray(BLOCK_BYTES)
    targets = [bytearray(BLOCK_BYTES) for _ in keys]

    def key(turn: int) -> bytes:
        return keys[turn % _KEYS]

    return {
        "view": lambda turn: cache.get(key(turn)),
        "get_absent": lambda turn: cache.get(absent),
        "contains": lambda turn: cache.contains(key(turn)),
        "contains_many": lambda turn: cache.contains_many(rows),
        "longest_prefix": lambda turn: cache.longest_prefix(rows),
        "touch": lambda turn: cache.touch(rows),
        "put_present": lambda turn: cache.put(key(turn), value),
        "len": lambda turn: len(cache),
        "stats": lambda turn: cache.stats(),
        "events": lambda turn: cache.events(last - 64, limit=64),
        "get_into": lambda turn: cache.get_into(key(turn), target),
        "get_many_into": lambda turn: cache.get_many_into(keys, targets),
    }


def _child(path: Path, entries: int, only: str | None) -> None:
    """Be the process that is watched; ``only``: one name, under the filter."""
    cache = open_cache(path)
    calls = named_calls(cache, entries)
    calls["open_handle"] = lambda turn: open_cache(path).close()
    for name, call in calls.items():
        if only not in (None, name):
            continue
        for turn in range(max(_WARM, _KEYS)):  # what is mapped, verified, grown once
            call(turn)
        if only is None:
            os.access(f"{_MARK}{name}", os.F_OK)
        else:
            _forbid()
        for turn in range(_TIMES):
            call(turn)
        if only is None:
            os.access(f"{_MARK}end", os.F_OK)
    os._exit(0)


def _forbid() -> None:
    """From here on the kernel ends this thread at any system call but exit_group."""
    arch, exit_group = _MACHINES[platform.machine()]

    def step(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
        return struct.pack("=HBBI", code, jump_true, jump_false, value)

    load, equal, back, allow, kill = 0x20, 0x15, 0x06, 0x7FFF0000, 0x80000000
    program = (
        step(load, 0, 0, 4)
        + step(equal, 1, 0, arch)
        + step(back, 0, 0, kill)
        + step(load, 0, 0, 0)
        + step(equal, 0, 1, exit_group)
        + step(back, 0, 0, allow)
        + step(back, 0, 0, kill)
    )
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    given = ctypes.create_string_buffer(header)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(38, 1, 0, 0, 0) != 0 or prctl(22, 2, given, 0, 0) != 0:
        os._exit(_MISSED)


def _command(path: Path, entries: int, only: str = "") -> list[str]:
    module = "bench.calls.system_calls"
    return [sys.executable, "-m", module, str(path), str(entries), only]


def count(path: Path, entries: int) -> dict[str, Count]:
    """Return the counts of the volume at ``path``, by name of the call."""
    strace = shutil.which("strace")
    if strace is not None:
        found = _by_strace(strace, path, entries)
        if found:
            return found
    return _by_filter(path, entries)


def _by_strace(strace: str, path: Path, entries: int) -> dict[str, Count]:
    with tempfile.TemporaryDirectory(prefix="calls-") as folder:
        log = Path(folder) / "strace"
        done = subprocess.run(
            [strace, "-f", "-qq", "-s", "64", "-o", log, *_command(path, entries)],
            capture_output=True,
            text=True,
            check=False,
            cwd=_ROOT,
        )
        # A strace that may not trace says so, and there is no log of the child.
        return parse(log.read_text()) if done.returncode == 0 and log.exists() else {}


def parse(log: str) -> dict[str, Count]:
    """Return the counts in the output of ``strace -f``."""
    found: dict[str, Count] = {}
    name, caller = "", ""
    mine: collections.Counter[str] = collections.Counter()
    beside = 0
    for line in log.splitlines():
        match = _LINE.match(line)
        if match is None:  # a signal, an exit, the second half of an unfinished call
            continue
        thread, call, rest = match.groups()
        at = rest.find(_MARK)
        if at >= 0:
            mark = rest[at + len(_MARK) :].split('"')[0]
            if mark != "end":
                name, caller, beside = mark, thread, 0
                mine = collections.Counter()
                continue
            names = {call: n / _TIMES for call, n in sorted(mine.items())}
            each = sum(names.values())
            text = ", ".join(f"{call} {n:g}" for call, n in names.items()) or "none"
            found[name] = Count(each, names, beside / _TIMES, text)
            name = ""
        elif name and thread == caller:
            mine[call] += 1
        elif name:
            beside += 1
    return found


def _by_filter(path: Path, entries: int) -> dict[str, Count]:
    with open_cache(path) as cache:
        names = [*named_calls(cache, entries), "open_handle"]
    found = {}
    for name in names:
        unknown = Count(None, {}, 0, "not counted: neither strace nor a filter works")
        if platform.machine() in _MACHINES and sys.platform == "linux":
            command = _command(path, entries, name)
            code = subprocess.run(
                command, capture_output=True, check=False, cwd=_ROOT
            ).returncode
            if code == 0:
                found[name] = Count(0, {}, 0, "none")
                continue
            if code < 0:
                unknown = Count(None, {}, 0, "some; strace would count them")
        found[name] = unknown
    return found


if __name__ == "__main__":
    _child(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None)
