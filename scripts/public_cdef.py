# SPDX-License-Identifier: Apache-2.0
"""Derives tests/core/cdef/public.h from csrc/include/cyclone_kv.h.

    python scripts/public_cdef.py           print it
    python scripts/public_cdef.py --write   write it

tests/tidy/test_cdef.py fails while the two differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "csrc" / "include" / "cyclone_kv.h"
TARGET = ROOT / "tests" / "core" / "cdef" / "public.h"

INTRODUCTION = """\
/* All of cyclone_kv.h, as the preprocessor leaves it.
 * Made by scripts/public_cdef.py --write; not edited by hand. */
"""


def derive() -> str:
    """Return what the fragment should be."""
    # Without __GNUC__ the attributes are empty; system headers are of no interest.
    command = [os.environ.get("CC", "gcc"), "-std=c17", "-E", "-P", "-U__GNUC__", "-"]
    source = re.sub(r"^#include <.*>$", "", HEADER.read_text(), flags=re.MULTILINE)
    text = subprocess.run(
        command, input=source, capture_output=True, text=True, check=True
    ).stdout
    text = " ".join(text.split())
    text = re.sub(r" ?\(\s+", "(", re.sub(r" ;", ";", text))
    text = re.sub(r"= \((-?\d+)\)", r"= \1", text)
    return INTRODUCTION + "".join(map(_layout, _statements(text)))


def _statements(text: str) -> list[str]:
    """Split at semicolons outside braces."""
    found, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == ";" and depth == 0:
            found.append(text[start : position + 1].strip())
            start = position + 1
    return found


def _layout(statement: str) -> str:
    head, brace, rest = statement.partition("{")
    if not brace:
        return "\n" + textwrap.fill(statement, 88, subsequent_indent="    ") + "\n"
    body, separator = rest.rpartition("}")[0].strip(), ";"
    if head.startswith("enum"):
        separator = ","
    members = [part.strip() for part in body.split(separator) if part.strip()]
    lines = [f"    {member}{separator}" for member in members]
    return "\n".join(["", head + "{", *lines, "};", ""])


def main() -> None:
    """Print or write it."""
    if "--write" in sys.argv[1:]:
        TARGET.write_text(derive())
    else:
        sys.stdout.write(derive())


if __name__ == "__main__":
    main()
