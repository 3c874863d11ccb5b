# SPDX-License-Identifier: Apache-2.0
"""Runs the test suite with an engine that was built under sanitizers.

    python scripts/sanitized_tests.py address,undefined [pytest arguments]

The extension of the package, the cffi module of the core and the processes that tests
start are all instrumented; the interpreter is not, so the runtime is preloaded and
leaks are left to the C programs (scripts/stress.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.compile import sanitizer_environment  # noqa: E402
from support.points import build_overlay  # noqa: E402


def main() -> None:
    """Become pytest."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sanitize, *arguments = sys.argv[1:]
    environment = {
        **os.environ,
        **sanitizer_environment(sanitize),
        "PYTHONPATH": str(build_overlay(sanitize)),
    }
    environment.setdefault("CKV_HYPOTHESIS", "quick")
    # Not "python -m pytest": that would put the tree, and the plain extension in it,
    # ahead of the instrumented one.
    pytest = str(Path(sys.executable).with_name("pytest"))
    os.chdir(ROOT)
    os.execve(pytest, [pytest, *arguments], environment)


if __name__ == "__main__":
    main()
