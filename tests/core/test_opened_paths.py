# SPDX-License-Identifier: Apache-2.0
"""Which paths the engine touches: a list that tests/trust/test_paths.py goes through.

Every member of the table of system calls that takes a path is watched, so that a new
path, or a new way to one, fails here until somebody has thought about what may lie
there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from os_faults import OsTable

from models import MIB, OK, OVERWRITE, Engine


def watched(table: OsTable, core: Any, seen: set[tuple[str, str]]) -> None:
    for name, field in core.ffi.typeof("struct ckv_os").fields:
        arguments = field.type.args if field.type.kind == "function" else None
        if arguments is None:
            arguments = field.type.item.args
        if any(a.cname == "char const *" or a.cname == "char *" for a in arguments):
            table.replace(name, note(core, table, name, arguments, seen))


def note(
    core: Any,
    table: OsTable,
    name: str,
    kinds: Any,
    seen: set[tuple[str, str]],
) -> Callable[..., Any]:
    native = getattr(table.native, name)

    def call(*arguments: Any) -> Any:
        for kind, argument in zip(kinds, arguments, strict=True):
            if kind.cname in {"char const *", "char *"}:
                seen.add((name, core.ffi.string(argument).decode()))
        return native(*arguments)

    return call


@pytest.mark.parametrize("apart", [False, True], ids=["beside", "apart"])
@pytest.mark.parametrize("files", [1, 2])
def test_no_other_path_is_touched(
    core: Any, tmp_path: Path, files: int, apart: bool
) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    home = tmp_path / "home"
    home.mkdir()
    paths = [(home / f"kv{i}", 16 * MIB) for i in range(files)]
    directory = core.ffi.new("char[]", str(shm).encode())
    options = {"shm_directory": directory} if apart else {}
    seen: set[tuple[str, str]] = set()
    with OsTable(core) as table:
        watched(table, core, seen)
        for _ in range(2):  # made, and found
            engine = Engine(core, paths, **options)
            assert engine.put(b"k" * 32, b"v" * 3 * MIB, flags=OVERWRITE) == OK
            target = bytearray(3 * MIB)
            assert engine.get_into(b"k" * 32, target) == (OK, len(target))
            engine.get_many_into([(b"k" * 32, [target])] * 2)
            lease = engine.get(b"k" * 32)
            assert lease is not None
            lease.release()
            engine.verify()
            engine.sync()
            engine.close()
        reader = Engine(core, paths, mode=1)
        reader.close()
    rest = set()
    region = str(shm) if apart else f"{home}/kv0-shm"
    for name, path in seen:
        if path in {str(p) for p, _ in paths} or path.startswith(region):
            continue
        if re.fullmatch(r"/proc/self/fd/\d+", path):  # a file that is open already
            continue
        if path in {str(home), f"{home}/.", str(shm)} and name in {
            "stat_path",  # whose it is
            "resolve_path",
            "open_file",  # O_DIRECTORY, to sync it
        }:
            continue
        rest.add((name, path))
    assert rest == set()
    called = {name for name, _ in seen}
    assert called >= {"open_file", "unlink_path", "stat_path", "lstat_path"}
    assert called >= {"resolve_path"}
