# SPDX-License-Identifier: Apache-2.0
"""The interpreter ends: with everything alive, and with threads inside every call.

No pickle.PickleBuffer is among what is alive: over any memoryview, in a cycle, it ends
CPython 3.11 itself by a signal.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from cyclone_kv import Cache, CacheConfig

from .conftest import key_of
from .test_threads import run_script

PRELUDE = """
    import atexit, gc, os, sys, threading, time
    import numpy
    from cyclone_kv import Cache, CacheConfig
    cache = Cache.open(sys.argv[1], CacheConfig(capacity="64MiB"))
    key = (1).to_bytes(8, "little") * 4
    other = (2).to_bytes(8, "little") * 4
    data = bytes(range(256)) * 400
    cache.put(key, data)
"""

EVERYTHING = """
    view = cache.get(key)
    lease = cache._lease(key)
    everything = [
        cache, view, view[5:], view.cast("I"), numpy.frombuffer(view, dtype="u1"),
        memoryview(numpy.frombuffer(view[256:], dtype="u4")),
        cache.read(key), cache.locate(key), cache.reserve(other, 100),
        cache._reserve(other, 10, None), lease, memoryview(lease), cache.stats(),
        cache.ls(), iter(view), cache.get,
    ]
    next(everything[13])
    everything[8].view
    class Cycle:
        def __init__(self):
            self.me, self.everything = self, everything
        def __del__(self):
            assert bytes(self.everything[1]) == data
    cycle = Cycle()
    local = threading.local()
    local.everything = everything
"""

HOLD = {
    "in the module": "",
    "in builtins": "import builtins; builtins.everything = everything",
    "in sys": "sys.everything = everything",
    "in another module": "import json; json.everything = everything",
    "in atexit": "atexit.register(lambda everything=everything: bytes(everything[1]))",
    "in a thread": """
        hold = lambda e: time.sleep(100)
        threading.Thread(target=hold, args=(everything,), daemon=True).start()
    """,
    "in a frame": """
        def generator(everything):
            yield
            bytes(everything[1])
        suspended = generator(everything)
        next(suspended)
    """,
    "closed": "cache.close()",
    "closed at exit": "atexit.register(cache.close)",
}


@pytest.mark.parametrize("hold", HOLD)
def test_with_everything_alive(volume_path: Path, hold: str) -> None:
    # Fragments have indentations of their own.
    script = "".join(
        textwrap.dedent(part)
        for part in (PRELUDE, EVERYTHING, HOLD[hold], "\nprint('fine', flush=True)\n")
    )
    result = run_script(script, str(volume_path))
    assert (result.stdout, result.returncode) == ("fine\n", 0), result.stderr
    for word in ("Fatal", "Error", "Segmentation", "Assertion"):
        assert word not in result.stderr, result.stderr
    with Cache.open(volume_path, CacheConfig(capacity="64MiB")) as cache:
        assert cache.get(key_of(1)) == bytes(range(256)) * 400
        assert not cache.contains(key_of(2))
        report = cache.verify()
        assert report.ok, report.first_fault
        assert cache.stats().volume.pinned_entries == 0


# One call each, made again and again by a daemon thread.
CALLS = {
    "put": "cache.put(other, data, overwrite=True)",
    "put_many": "cache.put_many([(key, data), (other, data)], overwrite=True)",
    "reserve": """with cache.reserve(other, 99999, overwrite=True) as slot:
        slot.view[:5] = b'12345'""",
    "get": "bytes(cache.get(key) or b'')",
    "read": """with cache.read(key) as entry:
        bytes(entry.view)""",
    "locate": """with cache.locate(key) as place:
        os.pread(place.fd, 100, place.offset)""",
    "get_into": "cache.get_into(key, target)",
    "get_many_into": "cache.get_many_into([key] * 8, targets)",
    "lookups": "cache.contains_many([key] * 9), cache.longest_prefix([key])",
    "prefetch": "cache.prefetch([key, other]), cache.touch([key])",
    "remove": "cache.remove(other), cache.put(other, data)",
    "clear": "cache.clear(), cache.put(key, data)",
    "verify": "cache.verify(progress=lambda done, total: time.sleep(0.001))",
    "care": "cache.sync(), cache.recover(), cache.stats(), cache.info()",
    "events": "cache.events(), list(cache.ls()), len(cache)",
    "open": "Cache.open(sys.argv[1], namespace=str(number % 9)).close()",
}


ENDS = [(call, "pass") for call in CALLS]
ENDS += [
    (call, end)
    for call in ("put", "get_many_into", "verify", "open")
    for end in ("cache.close()", "raise SystemExit(3)")
]


@pytest.mark.parametrize(("call", "end"), ENDS)
def test_with_daemon_threads_inside(volume_path: Path, call: str, end: str) -> None:
    loop = """
    entered = threading.Event()
    def work():
        target, number = bytearray(len(data)), 0
        targets = [bytearray(len(data)) for _ in range(8)]
        while True:
            number += 1
            try:
                CALL
            except Exception:
                if not cache.closed and number < 3:
                    raise
            if number == 3:
                entered.set()
    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    entered.wait(20)
    print("fine", flush=True)
    END
    """
    body = textwrap.dedent(loop).replace("END", end)
    body = body.replace("CALL", textwrap.indent(CALLS[call], " " * 8).lstrip())
    result = run_script(textwrap.dedent(PRELUDE) + body, str(volume_path))
    code = 3 if "SystemExit" in end else 0
    assert (result.stdout, result.returncode) == ("fine\n", code), result.stderr
    for word in ("Fatal", "Segmentation", "Exception ignored", "AssertionError"):
        assert word not in result.stderr, result.stderr
    with Cache.open(volume_path) as cache:
        report = cache.verify()
        assert report.ok, report.first_fault
