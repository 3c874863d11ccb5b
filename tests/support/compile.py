# SPDX-License-Identifier: Apache-2.0
"""Compiles C for the tests, one object at a time, and never twice.

An object is stored under the hash of everything that went into it: compiler, flags, the
source and each header that it included.  So the cffi module of the core, its sanitized
twin and the stress programs share what they can, and a change of one file costs one
object.  Files appear by rename: several test runs may use the same folder.

    build/objects/<name>-<flags>.json   the headers that the source included last time
    build/objects/<name>-<content>.o
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = [
    "BUILD",
    "CORE",
    "ROOT",
    "compile_objects",
    "core_sources",
    "link",
    "sanitizer_environment",
    "sanitizer_flags",
]

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "csrc" / "core"
BUILD = ROOT / "build"

BASE_FLAGS = (
    "-std=c17",
    "-D_GNU_SOURCE",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-g",
    f"-I{ROOT / 'csrc' / 'include'}",
    f"-I{CORE}",
)


def core_sources() -> list[Path]:
    """Every C file of the engine, in a stable order."""
    return sorted(CORE.glob("*.c"))


def compiler() -> str:
    return os.environ.get("CC", "gcc")


def sanitizer_flags(sanitize: str) -> list[str]:
    """Flags of compiler and linker for CKV_SANITIZE as setup.py understands it."""
    if not sanitize:
        return []
    flags = [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
    if "undefined" in sanitize:
        flags.append("-fno-sanitize-recover=undefined")
    return flags


def sanitizer_environment(sanitize: str) -> dict[str, str]:
    """What an uninstrumented python needs to load instrumented code.

    Leaks are not looked for: the interpreter itself ends with memory in use.
    """
    if not sanitize:
        return {}
    library = "libtsan.so" if "thread" in sanitize else "libasan.so"
    found = _run([compiler(), f"-print-file-name={library}"]).strip()
    return {
        "LD_PRELOAD": os.path.realpath(found),
        # SIGBUS is ours (csrc/core/guard.c); tests look at how a process ends by it.
        "ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "CKV_SANITIZE": sanitize,
    }


def compile_objects(sources: Iterable[Path], flags: Sequence[str]) -> list[Path]:
    """Compiles what changed, on all cores; returns the objects in the order given."""
    command = [compiler(), *BASE_FLAGS, *flags]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(functools.partial(_compile, command), sources))


def link(
    objects: Sequence[Path], target: Path, flags: Sequence[str], *, shared: bool = False
) -> Path:
    """Links a program or a shared object."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _appearing(target) as temporary:
        kind = ["-shared"] if shared else []
        names = [str(path) for path in objects]
        _run([compiler(), *kind, *flags, *names, "-o", temporary, "-pthread", "-lm"])
    return target


def _compile(command: Sequence[str], source: Path) -> Path:
    folder = BUILD / "objects"
    folder.mkdir(parents=True, exist_ok=True)
    identity = _digest([_compiler_version(), *command, str(source)])
    manifest = folder / f"{source.stem}-{identity}.json"
    if manifest.exists():
        stored = folder / f"{source.stem}-{_content_key(identity, manifest)}.o"
        if stored.exists():
            return stored
    # The text may change while it is compiled: what is named is what was there before.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made, rule = Path(scratch, "made.o"), Path(scratch, "made.d")
        _run([*command, "-MD", "-MF", str(rule), "-c", str(source), "-o", str(made)])
        names = re.sub(r"\\\n", " ", rule.read_text()).split(":", 1)[1].split()
        with _appearing(manifest) as temporary:
            Path(temporary).write_text(json.dumps(sorted(set(names))))
        stored = folder / f"{source.stem}-{_content_key(identity, manifest)}.o"
        os.replace(made, stored)
    return stored


def _content_key(identity: str, manifest: Path) -> str:
    parts = [identity]
    for name in json.loads(manifest.read_text()):
        path = Path(name)
        if not path.is_file():
            return "missing"
        parts += [name, hashlib.sha256(path.read_bytes()).hexdigest()]
    return _digest(parts)


@functools.cache
def _compiler_version() -> str:
    name = compiler()
    if shutil.which(name) is None:
        raise RuntimeError(f"no C compiler {name!r}: install gcc or set CC")
    return _run([name, "--version"])


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


class _appearing:
    """A temporary name that becomes `target` when the block ends without an error."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __enter__(self) -> str:
        handle, self.name = tempfile.mkstemp(dir=self.target.parent, suffix=".new")
        os.close(handle)
        return self.name

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            os.chmod(self.name, 0o755)
            os.replace(self.name, self.target)
        else:
            Path(self.name).unlink(missing_ok=True)  # a linker removes its own


def _run(command: Sequence[str]) -> str:
    # A sanitizer that this process was started under is not for the compiler.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    if result.returncode != 0:
        sys.stderr.write(result.stderr)
        raise RuntimeError(f"failed: {' '.join(command)}\n{result.stderr[-4000:]}")
    return result.stdout
