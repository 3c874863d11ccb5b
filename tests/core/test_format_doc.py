# SPDX-License-Identifier: Apache-2.0
"""docs/format.md has every member of every struct where the compiler puts it."""

from __future__ import annotations

import re
import subprocess

import pytest
from support.compile import BASE_FLAGS, CORE, ROOT, compiler

PAGE = ROOT / "docs" / "format.md"
HEADER = CORE / "format.h"

Row = tuple[str, int, int]  # member, offset, size


def documented() -> dict[str, tuple[int, list[Row]]]:
    """Size and rows of each struct on the page."""
    found = {}
    parts = re.split(r"^### `struct (\w+)`", PAGE.read_text(), flags=re.MULTILINE)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        size = re.match(r", (\d+) bytes\n", text)
        assert size is not None, f"{name}: no size in the heading"
        rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", text, flags=re.MULTILINE)
        found[name] = (int(size[1]), [(m, int(o), int(s)) for o, s, m in rows])
    return found


def constants() -> dict[str, int]:
    text = PAGE.read_text().split("\n## Constants\n")[1]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|$", text, flags=re.MULTILINE)
    return {name: int(value, 0) for name, value in rows}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, int]:
    """What the compiler says to each expression that the page makes a claim about."""
    expressions = list(constants())
    for struct, (_, rows) in documented().items():
        expressions.append(f"sizeof(struct {struct})")
        for member, _, _ in rows:
            expressions.append(f"offsetof(struct {struct}, {member})")
            expressions.append(f"sizeof(((struct {struct} *)0)->{member})")
    lines = "".join(
        f'    printf("%s=%llu\\n", "{text}", (unsigned long long)({text}));\n'
        for text in expressions
    )
    folder = tmp_path_factory.mktemp("format")
    source = folder / "format.c"
    source.write_text(
        '#include <stdio.h>\n#include "file.h"\nint main(void)\n{\n' + lines + "}\n"
    )
    program = folder / "format"
    command = [compiler(), *BASE_FLAGS, "-w", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    pairs = (line.rsplit("=", 1) for line in said.splitlines())
    return {text: int(value) for text, value in pairs}


def test_every_struct_of_the_header_is_on_the_page():
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    declared = re.findall(r"^struct (\w+) \{", text, flags=re.MULTILINE)
    assert len(declared) > 10
    assert sorted(declared) == sorted(documented())


@pytest.mark.parametrize("struct", documented())
def test_struct_is_as_the_compiler_has_it(struct, compiled):
    size, rows = documented()[struct]
    actual = [
        (
            member,
            compiled[f"offsetof(struct {struct}, {member})"],
            compiled[f"sizeof(((struct {struct} *)0)->{member})"],
        )
        for member, _, _ in rows
    ]
    assert rows == actual
    assert size == compiled[f"sizeof(struct {struct})"]


@pytest.mark.parametrize("struct", documented())
def test_rows_leave_no_byte_out(struct):
    size, rows = documented()[struct]
    at = 0
    for member, offset, length in rows:
        assert offset == at, f"{member} does not follow what is before it"
        at = offset + length
    assert at == size


@pytest.mark.parametrize("name", constants())
def test_constant_is_as_the_compiler_has_it(name, compiled):
    assert constants()[name] == compiled[name]


def test_every_invariant_is_on_the_page():
    named = set(re.findall(r"^ \*   (F\d+)", HEADER.read_text(), flags=re.MULTILINE))
    assert named == set(re.findall(r"\*\*(F\d+)\*\*", PAGE.read_text()))
    assert len(named) >= 5
