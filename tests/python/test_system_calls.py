# SPDX-License-Identifier: Apache-2.0
"""A warm lookup makes no system call: the kernel kills a thread that makes one."""

from __future__ import annotations

import os
import platform
import signal
import sys
from pathlib import Path

import pytest

from .test_threads import run_script

# (AUDIT_ARCH, write, exit_group) of <linux/audit.h> and <asm/unistd.h>.
MACHINES = {"x86_64": (0xC000003E, 1, 231), "aarch64": (0xC00000B7, 64, 94)}

SCRIPT = """
    import ctypes, gc, os, struct, sys
    from cyclone_kv import Cache, CacheConfig

    arch, write, exit_group = map(int, sys.argv[2:5])
    keys = [number.to_bytes(32, "little") for number in range(64)]
    rows = b"".join(keys)
    absent = b"absent" * 8
    config = CacheConfig(capacity="64MiB", admission="adaptive")
    cache = Cache.open(sys.argv[1], config)
    for key in [*keys, b"digested"]:
        assert cache.put(key, key * 1000)

    def work():
        for key in [*keys, b"digested"]:
            view = cache.get(key)
            assert view[:4] == key[:4]
            view.release()
            assert cache.contains(key) and key in cache
        assert cache.get(absent) is None and absent not in cache
        assert all(cache.contains_many(keys)) and all(cache.contains_many(rows))
        assert cache.longest_prefix(keys) == cache.longest_prefix(rows) == 64
        assert cache.longest_prefix([*keys[:9], absent, *keys], touch=True) == 9

    for _ in range(50):  # the first lookups map, verify and grow what is grown once
        work()
    assert cache.stats().volume.admission_requests > 0  # they do count requests
    gc.collect()
    gc.disable()

    def step(code, jump_true, jump_false, value):
        return struct.pack("=HBBI", code, jump_true, jump_false, value)

    LOAD, EQUAL, RETURN, ALLOW, KILL = 0x20, 0x15, 0x06, 0x7FFF0000, 0x80000000
    program = b"".join([
        step(LOAD, 0, 0, 4), step(EQUAL, 1, 0, arch), step(RETURN, 0, 0, KILL),
        step(LOAD, 0, 0, 0), step(EQUAL, 2, 0, write), step(EQUAL, 1, 0, exit_group),
        step(RETURN, 0, 0, KILL), step(RETURN, 0, 0, ALLOW),
    ])
    code = ctypes.create_string_buffer(program, len(program))
    filter = ctypes.create_string_buffer(
        struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
    prctl = libc.prctl
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter, 0, 0) != 0):
        print("no seccomp")
        sys.exit()
    for _ in range(300):
        work()
    os.write(1, b"silent")
    CONTROL
    os.write(1, b", control")
    os._exit(0)
"""


def run_filtered(path: Path, control: str) -> tuple[str, int, str]:
    machine = MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        pytest.skip("system calls are filtered on Linux, x86_64 and aarch64")
    if os.environ.get("CKV_SANITIZE"):
        pytest.skip("a sanitizer makes system calls of its own")
    script = SCRIPT.replace("CONTROL", control)
    # Not -X dev: its allocator asks the kernel for memory now and then.
    result = run_script(script, str(path), *map(str, machine), dev=False)
    if result.stdout == "no seccomp\n":
        pytest.skip("this kernel filters no system calls")
    return result.stdout, result.returncode, result.stderr


def test_warm_lookups_make_no_system_call(volume_path: Path) -> None:
    """get of a view, contains, contains_many and longest_prefix, hits and misses."""
    stdout, code, stderr = run_filtered(volume_path, "pass")
    assert (stdout, code) == ("silent, control", 0), stderr


def test_the_filter_would_notice_a_system_call(volume_path: Path) -> None:
    stdout, code, stderr = run_filtered(volume_path, "os.getppid()")
    assert (stdout, code) == ("silent", -signal.SIGSYS), stderr
