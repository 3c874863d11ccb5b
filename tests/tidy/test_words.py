# SPDX-License-Identifier: Apache-2.0
"""The tree speaks of the project, not of the machine or the place it was made on."""

from __future__ import annotations

import re
import subprocess

import pytest
from support.compile import ROOT

# Folders of one machine, and words that only its users would understand.  They are put
# together from pieces so that this file passes its own test.
MACHINE = r"(?<![\w.])/(?:wor" + r"k|roo" + r"t|far" + r"m|tmp/bash_job" + r"s)/"
WORDS = "|".join(["CE" + "O", "work" + "place", "sha" + r"red/(?:design|style)"])


def tracked() -> list[str]:
    """Files that are, or could be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if result.returncode != 0:
        pytest.skip("not a git checkout")
    return sorted(name for name in result.stdout.decode().split("\0") if name)


def test_no_file_names_a_machine_or_its_surroundings():
    found = []
    for name in tracked():
        path = ROOT / name
        if not path.is_file() or path.is_symlink() or path.suffix in {".png", ".jpg"}:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(rf"{MACHINE}|\b(?:{WORDS})\b", line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)
