# SPDX-License-Identifier: Apache-2.0
"""Runs a script in a process of its own that has the module of the core.

The parent builds the module once: `lib` and `ffi` are there when the script begins.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import build_core

HERE = Path(__file__).resolve().parent


@functools.cache
def _prelude() -> str:
    path = build_core.build(os.environ.get("CKV_SANITIZE", ""))
    return textwrap.dedent(f"""
        import importlib.util, sys
        from types import SimpleNamespace
        sys.path[:0] = [{str(HERE)!r}]
        spec = importlib.util.spec_from_file_location({path.stem!r}, {str(path)!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        core = SimpleNamespace(lib=module.lib, ffi=module.ffi)
        lib, ffi = core.lib, core.ffi
    """)


def run(
    script: str, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    # Sanitizers would answer SIGBUS themselves, with a report and an exit.
    options = os.environ.get("ASAN_OPTIONS", "") + ":handle_sigbus=0"
    return subprocess.run(
        [sys.executable, "-c", _prelude() + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": options.lstrip(":"), **environment},
    )
