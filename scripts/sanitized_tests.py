# SPDX-License-Identifier: Apache-2.0

"""Runs the test suite with an engine that was built under sanitizers.

    python scripts/sanitized_tests.py address,undefined [pytest arguments]

The extension of the package, the cffi module of the core and the processes that tests
start are all instrumented; the interpreter is not, so the runtime is preloaded and
leaks are left to the C programs (scripts/stress.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.compile import BUILD, sanitizer_environment  # noqa: E402
from support.points import build_overlay  # noqa: E402


def main() -> int:
    """Run pytest, then show what the sanitizers had to say."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sanitize, *arguments = sys.argv[1:]
    environment = {
        **os.environ,
        **sanitizer_environment(sanitize),
        "PYTHONPATH": str(build_overlay(sanitize)),
    }
    environment.setdefault("CKV_HYPOTHESIS", "quick")
    # pytest captures the standard streams, and a process that a sanitizer ends takes
    # what was captured along: reports go to files.
    reports = BUILD / "sanitizer"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS"):
        environment[name] += f":log_path={reports / 'report'}"
    # Not "python -m pytest": that would put the tree, and the plain extension in it,
    # ahead of the instrumented one.
    pytest = Path(sys.executable).with_name("pytest")
    result = subprocess.run(
        [str(pytest), *arguments], cwd=ROOT, env=environment, check=False
    )
    for report in sorted(reports.iterdir()):
        print(f"---- {report.name}\n{report.read_text()[:6000]}")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
