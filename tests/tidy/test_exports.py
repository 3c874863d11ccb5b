# SPDX-License-Identifier: Apache-2.0
"""The extension shows one symbol to the dynamic linker."""

from __future__ import annotations

import shutil
import subprocess

import pytest


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_the_extension_exports_only_its_init_function():
    from cyclone_kv import _core

    command = ["nm", "--dynamic", "--defined-only", "--format=posix", _core.__file__]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {line.split()[0] for line in listing.splitlines()}
    # Sanitizers add their own.
    ours = {
        name
        for name in names
        if not name.startswith(("__asan", "__odr_asan", "_ubsan"))
    }
    assert ours == {"PyInit__core"}
