# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: names, documentation, errors, imports, log messages."""

from __future__ import annotations

import ast
import contextlib
import doctest
import errno
import gc
import importlib
import inspect
import logging
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cyclone_kv
from cyclone_kv import Cache, CacheConfig, CycloneError, VolumeError, _core, errors

from .conftest import CAPACITY

PACKAGE = Path(cyclone_kv.__file__).parent
MODULES = [
    "arrays",
    "cache",
    "cli",
    "config",
    "cuda",
    "cuda.budget",
    "cuda.closed",
    "cuda.driver",
    "cuda.flight",
    "cuda.gate",
    "cuda.registration",
    "cuda.ring",
    "cuda.runtime",
    "cuda.targets",
    "cuda.transfer",
    "cuda.volume",
    "errors",
    "handles",
    "metrics",
    "results",
]


def test_all_names_are_sorted_and_there() -> None:
    assert cyclone_kv.__all__ == sorted(cyclone_kv.__all__)
    for name in cyclone_kv.__all__:
        assert getattr(cyclone_kv, name) is not None
    for name in MODULES:
        module = importlib.import_module(f"cyclone_kv.{name}")
        assert module.__all__ == sorted(module.__all__)
        for member in module.__all__:
            assert hasattr(module, member)


def test_every_public_name_is_documented() -> None:
    stub = ast.parse((PACKAGE / "_core.pyi").read_text())
    documented = {
        item.name
        for node in stub.body
        if isinstance(node, ast.ClassDef) and node.name == "Cache"
        for item in node.body
        if isinstance(item, ast.FunctionDef) and ast.get_docstring(item)
    }
    for name in cyclone_kv.__all__:
        value = getattr(cyclone_kv, name)
        assert inspect.getdoc(value), name
        if not inspect.isclass(value):
            continue
        for member, thing in vars(value).items():
            if not member.startswith("_") and callable(thing):
                assert inspect.getdoc(thing), f"{name}.{member}"
    for member in vars(_core.Cache):
        if not member.startswith("_"):
            assert member in documented, member


@pytest.mark.parametrize("name", [*MODULES, ""])
def test_examples_in_the_documentation_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"cyclone_kv.{name}".rstrip("."))
    result = doctest.testmod(module)
    assert result.failed == 0


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = (
        "import sys, cyclone_kv\n"
        "heavy = {'numpy', 'torch', 'click', 'rich', 'prometheus_client', 'cffi', "
        "'transformers', 'typing_extensions', 'logging'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_nothing_of_a_volume_is_executed() -> None:
    """Bytes of a volume must never become code: no pickle and its like anywhere."""
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "__import__"}, path
            elif isinstance(node, ast.Attribute):
                assert ast.unparse(node) != "torch.load", path
            assert not banned & {name.split(".")[0] for name in names}, path


def test_a_pickle_in_a_block_is_just_bytes(cache: Cache) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit('executed')",)

    bomb = pickle.dumps(Bomb())
    cache.put(b"bomb", bomb, header=bomb)
    entry = cache.read(b"bomb")
    assert entry is not None
    with entry:
        assert entry.header == bomb
        assert entry.view == bomb


def test_every_status_has_its_exception() -> None:
    negative = {
        name.removeprefix("CKV_E_")
        for name, (value, _) in _core.STATUSES.items()
        if value < 0
    }
    assert set(errors.BY_STATUS) == negative
    for name, (value, text) in _core.STATUSES.items():
        if value < 0:
            error = errors.from_status(value, 0, text)
            assert type(error) is errors.BY_STATUS[name.removeprefix("CKV_E_")]
            assert str(error) == text


def test_errors_of_system_calls_carry_their_number() -> None:
    os_status = _core.STATUSES["CKV_E_OS"][0]
    for number, kind in (
        (errno.ENOENT, FileNotFoundError),
        (errno.EACCES, PermissionError),
        (errno.ENOSPC, errors.NoSpaceError),
        (errno.EIO, VolumeError),
    ):
        error = errors.from_status(os_status, number, "what and why")
        assert isinstance(error, kind)
        assert isinstance(error, CycloneError)
        assert isinstance(error, OSError)
        assert error.errno == number
        assert "what and why" in str(error)


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    drawn = re.findall(r"^ *[*+-] (\w+)", errors.__doc__ or "", re.MULTILINE)
    assert sorted(drawn) == errors.__all__


def test_statistics_are_described() -> None:
    names = [name for _, name, _, _ in _core.STATISTICS]
    assert len(set(names)) == len(names)
    for kind, name, unit, sentence in _core.STATISTICS:
        assert kind in {"counter", "gauge"}
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert unit
        assert sentence.endswith(".")


@pytest.fixture
def degraded(volume_path: Path) -> Callable[[], Cache]:
    """Opens a set without one of its members, which the engine has to say."""
    paths = [volume_path, volume_path.with_suffix(".2")]
    Cache.open(paths, CacheConfig(capacity=2 * CAPACITY)).close()
    for path in volume_path.parent.iterdir():
        if path != volume_path:
            path.unlink()
    return lambda: Cache.open(paths, CacheConfig(degraded=True))


class Handler(logging.Handler):
    """Raises what it is given, for each record."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.records: list[logging.LogRecord] = []

    def handle(self, record: logging.LogRecord) -> bool:
        self.records.append(record)
        raise self.error


@contextlib.contextmanager
def handler(error: BaseException) -> Iterator[Handler]:
    logger = logging.getLogger("cyclone_kv")
    failing = Handler(error)
    logger.addHandler(failing)
    try:
        yield failing
    finally:
        logger.removeHandler(failing)


def test_messages_of_the_engine_reach_logging(
    degraded: Callable[[], Cache], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="cyclone_kv"), degraded():
        pass
    assert any("opened without file number" in message for message in caplog.messages)
    for record in caplog.records:
        assert record.name == "cyclone_kv"
        assert record.levelno in {logging.INFO, logging.WARNING}


def test_a_failing_log_handler_does_not_fail_the_call(
    degraded: Callable[[], Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_value))
    error = ZeroDivisionError()
    with handler(error) as failing, degraded() as cache:
        assert cache.put(b"k", b"v")
    assert failing.records
    assert seen == [error] * len(failing.records)


def test_control_c_in_a_log_handler_is_not_lost(
    degraded: Callable[[], Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that came during the call was delivered to the handler, and gone."""
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_value))
    with handler(KeyboardInterrupt()) as failing, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # open() is interrupted
        with pytest.raises(KeyboardInterrupt):
            degraded()
        assert failing.records
        gc.collect()
    with degraded():  # says what was left in the queue
        pass
    assert seen == []


def test_the_build_breaks_on_windows_in_riddles() -> None:
    setup = PACKAGE.parent / "setup.py"
    if not setup.exists():
        pytest.skip("needs the source tree")
    script = (
        "import runpy, sysconfig, glob, setuptools, sys\n"
        "sys.platform = 'win32'\n"
        "runpy.run_path(sys.argv[1])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(setup)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "needs Linux or macOS" in result.stderr
    assert "Traceback" not in result.stderr


def test_every_public_method_says_what_it_does():
    for name in sorted(dir(Cache)):
        if not name.startswith("_"):
            text = getattr(Cache, name).__doc__
            assert text, name
            assert not text.startswith(name), name
    assert list(inspect.signature(Cache.get_into).parameters) == [
        "self",
        "key",
        "target",
    ]
