# SPDX-License-Identifier: Apache-2.0
"""The package with an instrumented engine, for tests that run another Python.

setup.py builds the extension with CKV_POINTS=1 (and CKV_SANITIZE) outside of the tree;
a folder of links to the package's Python files beside that extension goes first on
PYTHONPATH.  The process then runs the instrumented engine, and nothing else changes:

    build/points/cyclone_kv/            links, and _core*.so with test points
    build/points-address-undefined/...  the same under sanitizers

A point is "name:action:count" of csrc/core/point.h, for example "put.published:kill:1".
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .compile import BUILD, ROOT, sanitizer_environment

__all__ = ["PointsPython", "build_overlay"]

PACKAGE = "cyclone_kv"


def build_overlay(
    sanitize: str = "",
    *,
    points: bool = True,
    python: str = sys.executable,
    name: str = "",
) -> Path:
    """Returns the folder to put first on PYTHONPATH, building what changed.

    For another interpreter than this one give `python` and a `name` for the folder.
    """
    kind = "points" if points else "plain"
    name = "-".join([name or kind, *filter(None, sanitize.split(","))])
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        _build_extension(folder, sanitize, python, points=points)
        _link_package(folder / PACKAGE)
    return folder


class PointsPython:
    """Runs Python code in a process of its own, with the instrumented engine."""

    def __init__(self, overlay: Path, scratch: Path, sanitize: str = "") -> None:
        self.overlay = overlay
        self.scratch = scratch
        self.sanitize = sanitize
        self._count = 0

    def __call__(
        self,
        script: str,
        *arguments: str | os.PathLike[str],
        point: str | None = None,
        timeout: float = 120,
        environment: Mapping[str, str] | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `script` to its end; a killed process has returncode -SIGKILL."""
        return subprocess.run(
            self._command(script, arguments),
            env=self._environment(point, environment),
            cwd=self.scratch,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=check,
        )

    def start(
        self,
        script: str,
        *arguments: str | os.PathLike[str],
        point: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts `script`; the caller ends and waits for the process.

        Its standard streams are pipes: a script says "ready" by printing (flushed), and
        is told to go on by a line or the end of its input.
        """
        return subprocess.Popen(
            self._command(script, arguments),
            env=self._environment(point, environment),
            cwd=self.scratch,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _command(
        self, script: str, arguments: Sequence[str | os.PathLike[str]]
    ) -> list[str]:
        # A file, not -c: the working folder then stays off sys.path.
        self._count += 1
        path = self.scratch / f"script_{self._count}.py"
        path.write_text(script)
        return [sys.executable, str(path), *(os.fspath(item) for item in arguments)]

    def _environment(
        self, point: str | None, extra: Mapping[str, str] | None
    ) -> dict[str, str]:
        environment = dict(os.environ)
        environment.pop("CYCLONE_KV_TEST_POINT", None)
        environment["PYTHONPATH"] = str(self.overlay)
        environment.update(sanitizer_environment(self.sanitize))
        if point is not None:
            environment["CYCLONE_KV_TEST_POINT"] = point
        environment.update(extra or {})
        return environment


def _build_extension(folder: Path, sanitize: str, python: str, *, points: bool) -> None:
    inputs = [ROOT / "setup.py", ROOT / "pyproject.toml"]
    inputs += sorted(path for path in (ROOT / "csrc").rglob("*.[ch]"))
    digest = hashlib.sha256(sys.version.encode() + python.encode())
    for path in inputs:
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder / "lib", ignore_errors=True)
    environment = {
        **os.environ,
        "CKV_POINTS": "1" if points else "",
        "CKV_SANITIZE": sanitize,
    }
    environment.pop("LD_PRELOAD", None)  # the compiler is no business of a sanitizer
    command = [python, "setup.py", "--quiet", "build_ext", "--force"]
    command += [f"--build-lib={folder / 'lib'}", f"--build-temp={folder / 'temp'}"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}\n{result.stderr}")
    stamp.write_text(digest.hexdigest())


def _link_package(target: Path) -> None:
    """Links to every file of the package but an extension built in place.

    What is right stays as it is: others may be importing from here, and where a file is
    missing they silently get the installed package, whose engine has no points.
    """
    source = ROOT / PACKAGE
    extensions = list((target.parent / "lib" / PACKAGE).glob("_core*.so"))
    assert extensions, f"setup.py built no extension in {target.parent / 'lib'}"
    wanted = {target / path.name: path for path in extensions}
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
            wanted[target / path.relative_to(source)] = path
    for link in [*target.rglob("*")]:
        if link.is_symlink() and link not in wanted:
            link.unlink()
    for link, path in wanted.items():
        if link.is_symlink() and link.readlink() == path:
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One build at a time, also over test runs side by side."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
