# SPDX-License-Identifier: Apache-2.0

"""Shortens comment lines of C files that grew too long, and nothing else.

    python scripts/wrap_comments.py FILE...

clang-format cannot: it would join numbered invariants into one paragraph.  Here the
last words of a long line move to the front of the next one, when that continues the
same paragraph, or to a new line.  Lines with columns or arrows are left alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TRIGGER = 90  # what tests/tidy/test_source.py allows
LIMIT = 88
COMMENT = re.compile(r"^(\s*(?:/\*| ?\*)(?!/) *)(\S.*)$")
LABEL = re.compile(r"^(?:[A-Z]\d+  +|\d+\. +|- +)(?=\S)")
DRAWING = re.compile(r"[|^v]---|--[->]|<-|\S   +\S")


def continuation(prefix: str, text: str, follower: re.Match[str] | None) -> str:
    """Return what a further line of this paragraph begins with."""
    column = prefix.index("*")  # that of "/*" lies above the others
    width = len(prefix)
    if label := LABEL.match(text):
        width += len(label[0])
    elif follower is not None and re.match(r"\S+(?: \S+){0,3}  \S", text):
        width = max(width, len(follower[1]))  # a label of another form
    return (" " * column + "*").ljust(width)


def shorten(line: re.Match[str], pending: list[str]) -> str:
    """Return the line without its last words, which go into the pending lines."""
    prefix, text = line[1], line[2]
    closing = " */" if text.endswith("*/") else ""
    follower = COMMENT.match(pending[0]) if pending and not closing else None
    words = re.split(r"(?<=\S)(?= )", text.removesuffix("*/").rstrip())
    moved: list[str] = []
    while words[1:] and len(prefix + "".join(words)) + 3 * (not moved) > LIMIT:
        moved.insert(0, words.pop())
    begin = continuation(prefix, text, follower)
    rest = begin + "".join(moved).strip()
    if (
        follower is not None
        and follower[1] == begin
        and not LABEL.match(follower[2])
        and not DRAWING.search(follower[2])
    ):
        space = "  " if rest.endswith(".") else " "
        pending[0] = rest + space + follower[2]
    else:
        pending.insert(0, rest + closing)
    return (prefix + "".join(words)).rstrip()


def wrap(lines: list[str]) -> list[str]:
    """Return the lines with every long comment line shortened."""
    result = []
    pending = list(lines)
    limit = TRIGGER
    while pending:
        line = pending.pop(0)
        match = COMMENT.match(line)
        if len(line) <= limit or match is None or DRAWING.search(match[2]):
            result.append(line)
            limit = TRIGGER
        else:
            result.append(shorten(match, pending))
            limit = LIMIT  # the rest of the paragraph is new anyway
    return result


def main() -> None:
    """Change the files named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        before = path.read_text()
        after = "\n".join(wrap(before.split("\n")))
        if after != before:
            path.write_text(after)
            print(f"wrapped comments of {name}")


if __name__ == "__main__":
    main()
