# SPDX-License-Identifier: Apache-2.0

"""Compiles the whole core and its internal headers into a private cffi module.

The module has every function that a fragment in cdef/ declares.  cffi lets the C
compiler check each declaration against the real headers, so a fragment cannot drift.
Rules for fragments: cdef/README.md.

    python tests/core/build_core.py            build, print where the module lies
    CKV_SANITIZE=address,undefined python ...  the same, instrumented
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import cffi
from cffi import recompiler

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from support import compile as c  # noqa: E402  (the path is set up above)

# Fragments that others build upon come first; the rest follows by name.
FIRST = (
    "types.h",
    "public.h",
    "atomics.h",
    "os.h",
    "format.h",
    "geometry.h",
    "file.h",
    "admission.h",
)
FLAGS = ("-DCKV_POINTS", "-O1")


def fragments() -> list[Path]:
    found = {path.name: path for path in (HERE / "cdef").glob("*.h")}
    first = [found.pop(name) for name in FIRST if name in found]
    return first + [found[name] for name in sorted(found)]


def preamble() -> str:
    headers = sorted(path.name for path in c.CORE.glob("*.h"))
    return "".join(f'#include "{name}"\n' for name in ["cyclone_kv.h", *headers])


def build(sanitize: str = "", sources: Sequence[Path] = ()) -> Path:
    """Returns the path of the module, compiling what changed.

    `sources` stand in for the files of the core that have the same names.
    """
    flags = [*FLAGS, *c.sanitizer_flags(sanitize)]
    others = {path.name: path for path in sources}
    files = [others.get(path.name, path) for path in c.core_sources()]
    objects = c.compile_objects(files, flags)

    declarations = [(path.name, path.read_text()) for path in fragments()]
    parts = [preamble(), sys.version, *flags, *(path.name for path in objects)]
    parts += [text for pair in declarations for text in pair]
    # The generated code sees the headers: they count as well.
    parts += [path.read_text() for path in sorted(c.CORE.glob("*.h"))]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    name = f"_ckv_core_{key}"
    target = c.BUILD / "core" / f"{name}.so"
    if target.exists():
        return target

    ffi = cffi.FFI()
    for fragment, text in declarations:
        try:
            ffi.cdef(text, override=True)  # a function may be repeated
        except Exception as error:
            raise RuntimeError(f"tests/core/cdef/{fragment}: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    glue = target.with_suffix(".c")
    recompiler.make_c_source(ffi, name, preamble(), str(glue), verbose=False)
    # cffi knows nothing of _Atomic: a fragment says uint64_t where the header has
    # ckv_atomic_u64, and only the qualifier differs.
    glue_flags = [
        f"-I{sysconfig.get_paths()['include']}",
        "-Wno-incompatible-pointer-types",
        "-Wno-discarded-qualifiers",
        "-Werror=int-conversion",
        "-Werror=implicit-function-declaration",
    ]
    glued = c.compile_objects([glue], [*flags, *glue_flags])
    link_flags = [*c.sanitizer_flags(sanitize), "-Wl,-z,now"]
    return c.link([*objects, *glued], target, link_flags, shared=True)


def load(sanitize: str | None = None) -> ModuleType:
    """Builds and imports the module; `sanitize` defaults to CKV_SANITIZE."""
    if sanitize is None:
        sanitize = os.environ.get("CKV_SANITIZE", "")
    return load_from(build(sanitize))


def load_from(path: Path) -> ModuleType:
    """Imports a module that was built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(build(os.environ.get("CKV_SANITIZE", "")))
