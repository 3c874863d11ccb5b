# SPDX-License-Identifier: Apache-2.0
"""The `core` fixture: internal functions of the engine, called from Python."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session")
def core() -> SimpleNamespace:
    """Has `.lib` (functions, constants) and `.ffi` of the module in build/core/."""
    import build_core

    module = build_core.load()
    return SimpleNamespace(lib=module.lib, ffi=module.ffi)
