# SPDX-License-Identifier: Apache-2.0

"""Builds the simulation: the engine as a shared object, and the program around it.

    python tests/simulation/build_simulation.py     builds, prints where the two lie

The engine is compiled with its test points, with smaller volumes than users may have,
and with pthread replaced by the coroutines of threads.c.  mutants.py says how an engine
with a fault is made of the same sources.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from support import compile as c  # noqa: E402  (the path is set up above)

REPLACED = (
    *(f"mutex_{verb}" for verb in ("init", "destroy", "lock", "unlock")),
    *(f"rwlock_{verb}" for verb in ("init", "destroy", "rdlock", "wrlock", "unlock")),
    *(f"cond_{verb}" for verb in ("init", "destroy", "signal", "broadcast")),
    *(f"cond_{verb}" for verb in ("wait", "timedwait")),
    *("once", "key_create", "getspecific", "setspecific", "create", "join", "atfork"),
)

ENGINE_FLAGS = (
    "-DCKV_POINTS",
    "-DCKV_CAPACITY_MIN_BYTES=(UINT64_C(128)<<10)",
    "-O2",
    "-g1",
    "-fvisibility=default",
    *(f"-Dpthread_{name}=simulated_pthread_{name}" for name in REPLACED),
)
PROGRAM_FLAGS = ("-O2", "-g1", f"-I{HERE}", "-fvisibility=default", "-Wall", "-Wextra")


def build_engine(changed: Mapping[str, str] | None = None, name: str = "sound") -> Path:
    """Links the engine; `changed` replaces the text of some of its C files."""
    changed = changed or {}
    sources = []
    for source in c.core_sources():
        if source.name in changed:
            key = hashlib.sha256(changed[source.name].encode()).hexdigest()[:12]
            copy = c.BUILD / "simulation" / f"{name}-{key}" / source.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(changed[source.name])
            source = copy
        sources.append(source)
    objects = c.compile_objects(sources, ENGINE_FLAGS)
    key = hashlib.sha256("\0".join(map(str, objects)).encode()).hexdigest()[:12]
    target = c.BUILD / "simulation" / f"engine-{name}-{key}.so"
    if not target.exists():
        c.link(objects, target, ["-Wl,-Bsymbolic"], shared=True)
    return target


def build_program() -> Path:
    """Links the scheduler, the oracle and the workload."""
    objects = c.compile_objects(sorted(HERE.glob("*.c")), PROGRAM_FLAGS)
    key = hashlib.sha256("\0".join(map(str, objects)).encode()).hexdigest()[:12]
    target = c.BUILD / "simulation" / f"simulate-{key}"
    if not target.exists():
        c.link(objects, target, ["-rdynamic", "-ldl"])
    return target


if __name__ == "__main__":
    print(build_engine(), build_program())
