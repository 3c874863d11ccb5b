# SPDX-License-Identifier: Apache-2.0
"""The declarations that tests use say what the headers say."""

from __future__ import annotations

import runpy
import shutil

import pytest
from support.compile import ROOT

CDEF = ROOT / "tests" / "core" / "cdef"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a preprocessor")
def test_public_fragment_is_current():
    derive = runpy.run_path(str(ROOT / "scripts" / "public_cdef.py"))["derive"]
    # Preprocessors differ in where they put spaces.
    assert (CDEF / "public.h").read_text().split() == derive().split(), (
        "run: python scripts/public_cdef.py --write"
    )
