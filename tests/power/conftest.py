# SPDX-License-Identifier: Apache-2.0
"""The module of the core, which the power cuts are judged with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent / "core", HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# The calls of Linux are modelled, and the streams are recorded there.
collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]


@pytest.fixture(scope="session")
def core() -> SimpleNamespace:
    import build_core

    module = build_core.load()
    return SimpleNamespace(lib=module.lib, ffi=module.ffi)
