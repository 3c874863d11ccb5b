# SPDX-License-Identifier: Apache-2.0
"""The pages on failures name only tests that exist, and each N has one."""

from __future__ import annotations

import re

import pytest
from support.compile import ROOT

TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}
PAGES = ["failure-model.md", "known-faults.md"]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("name", PAGES)
def test_every_test_that_a_page_on_failures_names_exists(name: str):
    named = set(re.findall(r"`(test_\w+)`", page(name)))
    assert len(named) > 20
    assert named - TESTS == set()


def test_every_known_fault_has_a_test_or_a_reason():
    rows = re.findall(r"^\| (.+) \|$", page("known-faults.md"), re.MULTILINE)
    faults = [row for row in rows if not row.startswith("fault |")]
    assert len(faults) > 60
    for row in faults:
        fault, happens, proof = row.split(" | ")
        assert fault, row
        assert happens, row
        assert re.fullmatch(r"`test_\w+`(, `test_\w+`)*", proof) or (
            proof.startswith("no test: ") and len(proof) > 40
        ), row


def test_every_promise_has_a_test_that_carries_its_number():
    for number in range(1, 8):
        assert any(f"_n{number}_" in f"{name}_" for name in TESTS), f"N{number}"
