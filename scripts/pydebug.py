# SPDX-License-Identifier: Apache-2.0

"""Runs the tests of the package under a debug build of Python.

    python scripts/pydebug.py [pytest arguments]
    python scripts/pydebug.py --available           0: there is such a build

Such a build checks every reference count, fills freed memory, and counts all
references (sys.gettotalrefcount), which tests/python/test_leaks.py then holds still.
The extension is compiled against its headers; the other packages are those of this
environment, which it can load.  Development mode is on, every warning is an error.

The interpreter is $PYDEBUG, or pythonX.Y-dbg on the path, or Debian's, which is
unpacked into build/pydebug without being installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.compile import BUILD  # noqa: E402
from support.points import build_overlay  # noqa: E402

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = (
    f"python{VERSION}-dbg",
    f"libpython{VERSION}-dbg",
    f"libpython{VERSION}-stdlib",
    f"libpython{VERSION}-minimal",
    f"libpython{VERSION}-dev",
)
ASK = "import sys; print(hasattr(sys, 'gettotalrefcount'), sys.version_info[:2])"


def is_debug_build(python: str) -> bool:
    """Tell whether an interpreter counts references, and is of this version."""
    done = subprocess.run(
        [python, "-c", ASK], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() == f"True {sys.version_info[:2]}"


def unpack() -> str | None:
    """Fetch Debian's debug build; None where there is none of this version."""
    folder = BUILD / "pydebug"
    python = folder / "root" / "usr" / "bin" / f"python{VERSION}-dbg"
    if python.exists():
        return str(python)
    if shutil.which("apt-get") is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    fetch = subprocess.run(
        ["apt-get", "-qq", "download", *PACKAGES], cwd=folder, check=False
    )
    if fetch.returncode != 0:
        return None
    for archive in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", archive, folder / "root"], check=True)
        archive.unlink()
    return str(python)


def find_python() -> str | None:
    """Return a debug build of the version of this interpreter, if one can be had."""
    for name in (os.environ.get("PYDEBUG"), shutil.which(f"python{VERSION}-dbg")):
        if name and is_debug_build(name):
            return name
    unpacked = unpack()
    return unpacked if unpacked is not None and is_debug_build(unpacked) else None


def main() -> int:
    """Build the extension and run pytest."""
    python = find_python()
    if sys.argv[1:] == ["--available"]:
        return int(python is None)
    if python is None:
        sys.exit(
            f"no debug build of Python {VERSION}: install python{VERSION}-dbg, or "
            f"name one in PYDEBUG"
        )
    packages = sysconfig.get_paths()["purelib"]
    os.environ["PYTHONPATH"] = packages  # setuptools, for the build
    # Debian's headers include each other below this folder.
    os.environ["CPATH"] = str(Path(python).parents[1] / "include")
    overlay = build_overlay(points=False, python=python, name="debug")
    environment = {**os.environ, "PYTHONPATH": f"{overlay}{os.pathsep}{packages}"}
    environment.setdefault("CKV_HYPOTHESIS", "quick")
    arguments = sys.argv[1:] or ["-q"]
    if not any(Path(each.split("::")[0]).exists() for each in arguments):
        arguments.append("tests/python")
    # -P: the tree, and the plain extension in it, stay off the path.
    command = [python, "-P", "-X", "dev", "-W", "error", "-m", "pytest", *arguments]
    command += ["-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
