# SPDX-License-Identifier: Apache-2.0
"""Spin finds no error in the models, and one in each that is broken on purpose."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.compile import ROOT

MODELS = ROOT / "models"
SPIN = shutil.which("spin")
COMPILER = shutil.which("gcc") or shutil.which("cc")

needs_spin = pytest.mark.skipif(
    SPIN is None or COMPILER is None,
    reason="needs spin and a C compiler (apt-get install spin gcc)",
)


def macros(model: Path) -> list[str]:
    """What the model can be compiled with, BROKEN_... and others."""
    used = re.findall(r"#if(?:n?def|.*?defined)\b\W*([A-Z_]+)", model.read_text())
    return sorted(set(used))


def variants() -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """(model, macros...) of those that must hold, and of those that must not."""
    sound, broken = [], []
    for model in sorted(MODELS.glob("*.pml")):
        settings = [()] + [(m,) for m in macros(model) if not m.startswith("BROKEN_")]
        faults = [m for m in macros(model) if m.startswith("BROKEN_")]
        for setting in settings:
            sound.append((model.name, *setting))
            broken += [(model.name, *setting, fault) for fault in faults]
    return sound, broken


SOUND, BROKEN = variants()


def errors_of(variant: tuple[str, ...], folder: Path) -> tuple[int, str]:
    """How many errors spin finds, and all that it says."""
    name, *defined = variant

    def run(*command: str) -> str:
        result = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}"
        return result.stdout

    assert SPIN is not None
    assert COMPILER is not None
    run(SPIN, *(f"-D{macro}" for macro in defined), "-a", str(MODELS / name))
    run(COMPILER, "-O1", "-w", "-DSAFETY", "-DNOFAIR", "-o", "pan", "pan.c")
    said = run("./pan", "-m100000", "-w24")
    # A walk that was cut short has proven nothing.
    assert "max search depth too small" not in said, said
    assert "Search not completed" not in said or "errors: 1" in said, said
    found = re.search(r"errors: (\d+)", said)
    assert found is not None, said
    return int(found[1]), said


def test_every_model_has_variants_that_must_fail():
    names = {path.name for path in MODELS.glob("*.pml")}
    assert names == {name for name, *_ in BROKEN}
    assert len(names) >= 4


def test_every_variant_is_explained_in_its_model():
    for model in MODELS.glob("*.pml"):
        head = model.read_text().split("*/\n#define")[0]
        assert [macro for macro in macros(model) if macro not in head] == []


@needs_spin
@pytest.mark.parametrize("variant", SOUND, ids=" ".join)
def test_a_sound_model_has_no_error(variant, tmp_path):
    errors, said = errors_of(variant, tmp_path)
    assert errors == 0, said


@needs_spin
@pytest.mark.parametrize("variant", BROKEN, ids=" ".join)
def test_a_broken_model_is_refuted(variant, tmp_path):
    errors, said = errors_of(variant, tmp_path)
    assert errors > 0, said
    assert "assertion violated" in said, said
