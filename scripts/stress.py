# SPDX-License-Identifier: Apache-2.0

"""Builds and runs the stress programs of tests/core/stress against the core.

    python scripts/stress.py                                  plain, threads
    python scripts/stress.py --sanitize thread
    python scripts/stress.py --sanitize address,undefined --processes 3 --kills 4

A program that ends with 0 passed.  Leaks count here: nothing but C is in the process.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import compile as c  # noqa: E402

PROGRAMS = ROOT / "tests" / "core" / "stress"
SUPPRESSIONS = PROGRAMS / "tsan.supp"


def build(source: Path, sanitize: str, *, points: bool) -> Path:
    """Compile one program together with the core."""
    flags = [*c.sanitizer_flags(sanitize), "-O1" if sanitize else "-O2"]
    if points:
        flags.append("-DCKV_POINTS")
    objects = c.compile_objects([*c.core_sources(), source], flags)
    name = "-".join([source.stem, *filter(None, sanitize.split(","))])
    return c.link(objects, c.BUILD / "stress" / name, c.sanitizer_flags(sanitize))


def sanitizer_options() -> dict[str, str]:
    """Return what the runtimes are told: stop at the first finding."""
    thread = ["halt_on_error=1", "second_deadlock_stack=1", "history_size=4"]
    if SUPPRESSIONS.exists():
        thread.append(f"suppressions={SUPPRESSIONS}")
    return {
        "TSAN_OPTIONS": ":".join(thread),
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def run(program: Path, options: argparse.Namespace, folder: Path) -> int:
    """Run one program on a fresh volume; return its exit status."""
    command = [str(program), str(folder / "stress.cyc")]
    command += ["--seconds", str(options.seconds), "--seed", str(options.seed)]
    if program.name.startswith("stress_"):
        command += ["--threads", str(options.threads)]
        command += ["--processes", str(options.processes)]
        command += ["--kills", str(options.kills), "--cold", str(int(options.cold))]
    print("+", " ".join(command), flush=True)
    environment = {**os.environ, **sanitizer_options()}
    limit = 120 + 20 * options.seconds
    return subprocess.run(
        command, env=environment, timeout=limit, check=False
    ).returncode


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sanitize", default="", help="thread, or address,undefined")
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument(
        "--cold", action="store_true", help="copies go around the page cache"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--points", action="store_true", help="with CKV_DCHECK on")
    parser.add_argument(
        "--folder", type=Path, help="for the volume; default: temporary"
    )
    return parser.parse_args()


def main() -> int:
    """Run all programs; return 1 if one failed."""
    options = parse()
    failures = 0
    for source in sorted(PROGRAMS.glob("*.c")):
        # Those that look inside the engine are one process, with its test points.
        inside = not source.name.startswith("stress_")
        if inside and options.processes > 1:
            continue
        program = build(source, options.sanitize, points=options.points or inside)
        with tempfile.TemporaryDirectory(
            dir=options.folder, prefix="ckv-stress-"
        ) as name:
            started = time.monotonic()
            result = run(program, options, Path(name))
        verdict = "passed" if result == 0 else f"FAILED ({result})"
        print(
            f"{source.stem}: {verdict}, {time.monotonic() - started:.1f} s", flush=True
        )
        failures += result != 0
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
