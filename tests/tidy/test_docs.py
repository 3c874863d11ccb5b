# SPDX-License-Identifier: Apache-2.0
"""The documentation names every option and statistic; its links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from support.compile import ROOT

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {"build", "node_modules"} & set(path.relative_to(ROOT).parts)
    and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    and not path.stem.endswith(
        "_template"
    )  # its links are those of the page made of it
)


def documented() -> set[str]:
    """Every name in backquotes, in docs/ and in the README."""
    text = "\n".join(path.read_text() for path in [*DOCS, *ROOT.glob("README.md")])
    return {
        name
        for code in re.findall(r"`([^`\n]+)`", text)
        for name in re.findall(r"\w+", code)
    }


def statistics() -> list[str]:
    header = (ROOT / "csrc" / "include" / "cyclone_kv.h").read_text()
    table = header[header.index("#define CKV_STATISTICS(X)") :]
    return re.findall(r"X\((?:counter|gauge), (\w+),", table)


def test_the_header_has_statistics():
    assert len(statistics()) > 40


def test_the_reference_pages_are_current():
    command = [sys.executable, str(ROOT / "scripts" / "reference_pages.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_statistic_is_documented():
    assert [name for name in statistics() if name not in documented()] == []


def test_every_option_is_documented():
    from cyclone_kv import CacheConfig

    names = [field.name for field in dataclasses.fields(CacheConfig)]
    assert [name for name in names if name not in documented()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / unquote(name) if name else page
        if not path.exists():
            broken.append(target)
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            broken.append(f"{target} (no such heading)")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The names that a heading gets on a web page."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        found.add(plain.strip().replace(" ", "-"))
    return found
