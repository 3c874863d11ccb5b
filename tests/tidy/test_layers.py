# SPDX-License-Identifier: Apache-2.0
"""Includes point downwards: the layers of the engine, as a list.

A file includes headers of lower levels, its own header, and the neighbours that
SIDEWAYS allows it.  docs/architecture.md says what each part does.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.compile import CORE, ROOT

LEVELS = (
    "base point atomics status",
    "os crc32c sha256 format",
    "geometry admission hit_density guard io_pool write_behind bounce",
    "file",
    "volume",
    "slot region pin index entry stripe event announce policy prefix",
    "reader direct mapped writer chain rebuild check statistic maintenance",
    "cache",
    "api hold",
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names.split()}

# Neighbours that know each other, and why.
SIDEWAYS: dict[tuple[str, str], str] = {
    ("atomics", "point"): "a yield point stands before each access",
    ("point", "base"): "reports through ckv_log",
    ("point", "atomics"): "counts how often a point was reached",
    ("status", "base"): "implements ckv_fail, ckv_log and the assertions",
    ("status", "atomics"): "the log sink may change at any time",
    ("geometry", "admission"): "lays its memory out",
    ("geometry", "hit_density"): "lays its memory out",
    ("policy", "prefix"): "learns when a block is offered",
    ("entry", "prefix"): "what died is nobody's successor",
    ("stripe", "prefix"): "the cursor goes from leaf to leaf",
    ("prefix", "index"): "links blocks that were found",
    ("prefix", "pin"): "a block is pinned while its successors are counted",
    ("prefix", "stripe"): "finds the entries of a granule",
    ("entry", "policy"): "what was evicted is remembered",
    ("index", "entry"): "a full bucket evicts; an overwrite kills older versions",
    ("index", "slot"): "who has died over a record that is to be struck is swept",
    ("entry", "index"): "what died leaves the index",
    ("entry", "announce"): "what died is announced",
    ("entry", "event"): "what died without a key leaves a gap in the events",
    ("announce", "event"): "keeps what was announced",
    ("announce", "index"): "says what is there when it is asked",
    ("stripe", "entry"): "a run of pages is freed by killing its entries",
    ("slot", "entry"): "what a dead process condemned is struck",
    ("slot", "event"): "what a dead process may not have announced is a gap",
    ("stripe", "slot"): "of a lock's owner it must be known whether it lives",
    ("writer", "reader"): "a present block is verified before its put answers True",
    ("writer", "maintenance"): "after a put the path is asked for pending errors",
    ("reader", "direct"): "blocks that are not in memory are read around the cache",
    ("reader", "mapped"): "blocks that are in memory are copied out of the mapping",
    ("check", "reader"): "payloads are verified as a reader would",
    ("maintenance", "reader"): "a path that fails takes its marks along",
    ("maintenance", "rebuild"): "writes the checkpoint that a rebuild reads",
}
# The one include that points upwards.
UPWARDS = {
    ("file", "slot"): "no fork may happen while a descriptor owns a lock",
}
# volume.h says what an open volume is, and everything builds upon it; volume.c puts one
# together from its parts and takes it apart, so it stands above them.
SOURCE_LEVEL = {"volume.c": LEVEL_OF["cache"]}
# Parts of one module over several files share their header and their level.
PART = re.compile(r"^(os|crc32c|sha256|file|slot|stripe|index|cache|api)_\w+$")
FILES = sorted(CORE.glob("*.[ch]"))


def module_of(name: str) -> str:
    stem = Path(name).stem
    match = PART.match(stem)
    return match[1] if match and stem not in LEVEL_OF else stem


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include "([\w./]+)"', path.read_text(), flags=re.MULTILINE)


def test_each_file_has_a_level():
    assert {module_of(path.name) for path in FILES} <= LEVEL_OF.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_includes_point_downwards(path):
    module = module_of(path.name)
    level = SOURCE_LEVEL.get(path.name, LEVEL_OF[module])
    allowed = SIDEWAYS.keys() | UPWARDS.keys()
    wrong = []
    for name in includes(path):
        other = module_of(name)
        if name == "cyclone_kv.h" or other == module:
            continue
        lower = LEVEL_OF.get(other, 99) < level
        if not lower and (module, other) not in allowed:
            wrong.append(f"{path.name} includes {name}")
    assert not wrong, wrong


def test_neighbours_are_neighbours():
    for module, other in SIDEWAYS:
        assert LEVEL_OF[module] == LEVEL_OF[other], (module, other)


def test_no_neighbour_is_listed_in_vain():
    used = {
        (module_of(path.name), module_of(name))
        for path in FILES
        for name in includes(path)
    }
    assert (SIDEWAYS.keys() | UPWARDS.keys()) - used == set()


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.suffix == ".h"], ids=lambda path: path.name
)
def test_no_two_headers_include_each_other(path):
    seen, waiting = set(), [path.name]
    while waiting:
        for name in includes(CORE / waiting.pop()):
            if (CORE / name).exists() and name not in seen:
                seen.add(name)
                waiting.append(name)
    assert path.name not in seen


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "csrc" / "python").glob("*.[ch]")),
    ids=lambda path: path.name,
)
def test_the_binding_knows_the_public_header_only(path):
    assert set(includes(path)) <= {"binding.h", "cyclone_kv.h", "docstrings.h"}


def test_a_source_includes_its_own_header_first():
    wrong = [
        path.name
        for path in FILES
        if path.suffix == ".c"
        and path.with_suffix(".h").exists()
        and module_of(includes(path)[0]) != module_of(path.name)
    ]
    assert not wrong
