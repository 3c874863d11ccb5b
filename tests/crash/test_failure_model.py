# SPDX-License-Identifier: Apache-2.0
"""The page names only tests that exist, and each N has one."""

from __future__ import annotations

import re

from support.compile import ROOT

TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


def test_every_test_that_the_failure_model_names_exists():
    page = (ROOT / "docs" / "failure-model.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 20
    assert named - TESTS == set()


def test_every_promise_has_a_test_that_carries_its_number():
    for number in range(1, 8):
        assert any(f"_n{number}_" in f"{name}_" for name in TESTS), f"N{number}"
