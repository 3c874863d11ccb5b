# SPDX-License-Identifier: Apache-2.0
"""No byte of a volume is executed, unpickled or evaluated: the source has no means to.

Headers of blocks are bytes for the caller, and the connectors are callers: for them the
same holds, since what they read was written by whoever may write the volume.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "cyclone_kv").rglob("*.py"))
C_SOURCES = sorted((ROOT / "csrc").rglob("*.[ch]"))

# Modules that make objects, or code, out of bytes.
MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal"),
    *("shelve", "code", "codeop", "runpy", "yaml", "jsonpickle", "pty", "subprocess"),
}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
# torch.load and numpy.load(allow_pickle=True) unpickle; os.system and its like execute.
ATTRIBUTES = {
    *("load", "loads", "unpack_archive", "system", "popen", "execv", "execve"),
    *("execvp", "execvpe", "posix_spawn", "posix_spawnp", "load_module"),
    *("exec_module", "find_spec", "run_path", "run_module"),
}
# json makes numbers, strings, lists and dictionaries, and nothing else.
ALLOWED = {
    ("json", "loads"),
    ("json", "load"),
    ("tomllib", "load"),
    ("tomllib", "loads"),
}


def problems(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
            found += [f"{node.lineno}: imports {n}" for n in names if n in MODULES]
        elif isinstance(node, ast.ImportFrom):
            name = (node.module or "").split(".")[0]
            if node.level == 0 and name in MODULES:
                found.append(f"{node.lineno}: imports {name}")
        elif isinstance(node, ast.Name) and node.id in CALLS:
            found.append(f"{node.lineno}: {node.id}")
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            owner = node.value.id if isinstance(node.value, ast.Name) else "?"
            if (owner, node.attr) not in ALLOWED:
                found.append(f"{node.lineno}: {owner}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append(f"{node.lineno}: allow_pickle")
    return found


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.name)
def test_the_package_makes_no_objects_out_of_bytes(path: Path) -> None:
    assert problems(ast.parse(path.read_text())) == []


def test_the_check_can_fail() -> None:
    for text in (
        "import pickle",
        "from marshal import loads",
        "eval(header)",
        "x = exec",
        "torch.load(view)",
        "numpy.load(view, allow_pickle=True)",
        "os.system(header)",
        "builtins.__dict__['x'](__import__('os'))",
    ):
        assert problems(ast.parse(text)) != [], text
    assert problems(ast.parse("import json; json.loads(header)")) == []


def test_the_extension_and_the_engine_execute_nothing() -> None:
    """Nor do they map anything so that it could be executed."""
    banned = re.compile(
        r"\bPROT_EXEC\b|\b(dlopen|dlsym|system|popen|exec[lv]p?e?|fexecve|posix_spawn\w*"
        r"|PyRun_\w+|Py_CompileString\w*|PyEval_EvalCode\w*|PyMarshal_\w+)\s*\("
    )
    for path in C_SOURCES:
        text = re.sub(
            r"/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", "", path.read_text(), flags=re.S
        )
        found = banned.search(text)
        assert found is None, f"{path.name}: {found and found[0]}"
    assert banned.search("mmap(0, 1, PROT_READ | PROT_EXEC, 0, 0, 0)")
    assert banned.search("PyRun_SimpleString(text)")


def test_the_extension_imports_only_what_it_names() -> None:
    """The names of modules that C code imports are constants of ours."""
    imports = re.compile(r"PyImport_\w+\s*\(([^)]*)\)")
    names = set()
    for path in (ROOT / "csrc" / "python").glob("*.c"):
        names.update(imports.findall(path.read_text()))
    assert names
    for name in names:
        assert re.fullmatch(r'"[a-z_.]+"', name), name
