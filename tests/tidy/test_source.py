# SPDX-License-Identifier: Apache-2.0
"""What a machine can see in the text of a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.compile import ROOT

LINE_MAX = 90
C_FILES = sorted(
    path
    for folder in ("csrc", "tests/core/stress")
    for path in (ROOT / folder).rglob("*.[ch]")
)
PYTHON_FILES = sorted(
    path
    for folder in ("cyclone_kv", "tests", "bench", "examples", "scripts")
    for path in (ROOT / folder).rglob("*.py*")
    if path.suffix in {".py", ".pyi"} and "site-packages" not in path.parts
)

# Each banned call, and what to use.
BANNED = {
    r"\bstrcpy\s*\(": "snprintf or memcpy with a checked length",
    r"\bstrcat\s*\(": "snprintf",
    r"\bv?sprintf\s*\(": "snprintf",
    r"\bato[il]l?\s*\(": "strtoull, and look where it stopped",
    r"\balloca\s*\(": "malloc at open",
    r"\bgets\s*\(": "nothing reads lines here",
    r"(?<!asm )(?<!__asm__ )\bvolatile\b(?! sig_atomic_t)": "atomics.h",
    r"(?<![_\w])assert\s*\(": "CKV_CHECK or CKV_DCHECK",
    r"\bpthread_\w*robust\w*\s*\(": "no pthread object lies in a file (design)",
}
# Only these may spell a memory order or go to the system directly.
SYSTEM_CALLS = (
    "open|openat|close|mmap|munmap|madvise|fallocate|ftruncate|sync_file_range|fsync"
    "|fdatasync|pwritev?|preadv?|fcntl|unlink|rename|clock_gettime|nanosleep|getpid"
)
ONLY_IN = {
    r"\bmemory_order_\w+": {"atomics.h", "crc32c.c", "sha256.c"},
    rf"\b(?:{SYSTEM_CALLS})\s*\(": {
        "os_posix.c",
        "os_linux.c",
        "os_darwin.c",
        "guard.c",  # in a signal handler, where only plain calls are safe
        "point.c",  # kills the process on purpose, in test builds
    },
}


def without_comments(text: str) -> str:
    """Comments, strings and character constants become spaces; lines stay."""
    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)


def places(pattern: str, path: Path, text: str) -> list[str]:
    found = []
    for match in re.finditer(pattern, text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(f"{path.relative_to(ROOT)}:{line}: {match[0].strip()}")
    return found


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", C_FILES, ids=named)
def test_c_begins_with_its_license(path):
    first = path.read_text().splitlines()[0]
    assert first == "/* SPDX-License-Identifier: Apache-2.0 */"


@pytest.mark.parametrize("path", C_FILES, ids=named)
def test_c_uses_no_banned_call(path):
    text = without_comments(path.read_text())
    # The stress programs are no part of the engine; their abort is their report.
    found = [
        f"{place}: use {better}"
        for pattern, better in BANNED.items()
        for place in places(pattern, path, text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "path", [path for path in C_FILES if "core" in path.parts[-2:]], ids=named
)
def test_the_core_has_one_place_for_memory_orders_and_system_calls(path):
    text = without_comments(path.read_text())
    found = [
        place
        for pattern, allowed in ONLY_IN.items()
        if path.name not in allowed
        for place in places(rf"(?<![\w>.]){pattern}", path, text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "path", [path for path in C_FILES if "python" in path.parts], ids=named
)
def test_no_return_while_the_gil_is_released(path):
    text = without_comments(path.read_text())
    inside = r"Py_BEGIN_ALLOW_THREADS(.*?)Py_END_ALLOW_THREADS"
    for block in re.finditer(inside, text, flags=re.DOTALL):
        line = text.count("\n", 0, block.start()) + 1
        leaves = re.search(
            r"\b(return|goto|Py_RETURN_\w+)\b|\bPy(?:Err|Object)_", block[1]
        )
        assert leaves is None, f"{named(path)}:{line}: {leaves[0]} before Py_END"
    assert text.count("Py_BEGIN_ALLOW_THREADS") == text.count("Py_END_ALLOW_THREADS")


@pytest.mark.parametrize("path", [*C_FILES, *PYTHON_FILES], ids=named)
def test_lines_are_short_and_work_is_finished(path):
    words = ("FIX" + "ME", "TO" + "DO", "XX" + "X")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if len(line) > LINE_MAX and "http" not in line and "# noqa: E501" not in line:
            found.append(f"{named(path)}:{number}: {len(line)} columns")
        found += [
            f"{named(path)}:{number}: {word}"
            for word in words
            if re.search(rf"\b{word}\b", line)
        ]
        if line != line.rstrip() or "\t" in line:
            found.append(f"{named(path)}:{number}: white space")
    assert not found, "\n".join(found)
