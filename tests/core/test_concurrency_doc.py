# SPDX-License-Identifier: Apache-2.0
"""Every edge that the code names is explained in docs/concurrency.md."""

from __future__ import annotations

import re

from support.compile import CORE, ROOT

PAGE = ROOT / "docs" / "concurrency.md"
LABEL = re.compile(r"\b([WR])(\d+)\b")


def test_every_labelled_edge_has_a_row():
    rows = re.findall(r"^\| W(\d+) -> R(\d+) \|", PAGE.read_text(), flags=re.MULTILINE)
    explained = {store for store, load in rows if store == load}
    assert len(explained) == len(rows) > 10
    missing = []
    for path in sorted(CORE.glob("*.[ch]")):
        if path.name == "atomics.h":
            continue  # names one as an example
        for comment in re.findall(r"/\*.*?\*/", path.read_text(), flags=re.DOTALL):
            missing += [
                f"{path.name}: {kind}{number}"
                for kind, number in LABEL.findall(comment)
                if number not in explained
            ]
    assert missing == []


def test_functions_on_the_page_exist():
    code = "".join(path.read_text() for path in sorted(CORE.glob("*.[ch]")))
    table = PAGE.read_text().split("\n## Edges\n")[1]
    rows = "\n".join(line for line in table.splitlines() if line.startswith("| W"))
    named = set(re.findall(r"`(\w+)`", rows))
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", code)] == []
