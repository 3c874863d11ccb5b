# SPDX-License-Identifier: Apache-2.0

"""Writes build/compile_commands.json, for clang-tidy and for editors.

python scripts/compile_database.py      prints the folder that it lies in
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-std=c17", "-D_GNU_SOURCE", "-pthread", "-Icsrc/include"]


def commands() -> list[dict[str, str | list[str]]]:
    """Return an entry for each C file."""
    python = ["-isystem", sysconfig.get_paths()["include"]]
    folders = {
        "csrc/core": ["-Icsrc/core"],
        "csrc/python": [*python, "-DPy_LIMITED_API=0x030b0000"],
        "tests/core/stress": ["-Icsrc/core", "-DCKV_POINTS"],
    }
    found: list[dict[str, str | list[str]]] = []
    for folder, flags in folders.items():
        for source in sorted((ROOT / folder).glob("*.c")):
            name = str(source.relative_to(ROOT))
            arguments = ["cc", *FLAGS, *flags, "-c", name]
            found.append({"directory": str(ROOT), "file": name, "arguments": arguments})
    return found


def main() -> None:
    """Write the file."""
    target = ROOT / "build"
    target.mkdir(exist_ok=True)
    text = json.dumps(commands(), indent=1)
    (target / "compile_commands.json").write_text(text)
    print(target)


if __name__ == "__main__":
    main()
