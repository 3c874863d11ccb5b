# SPDX-License-Identifier: Apache-2.0
"""The command line, inside this process and as a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cyclone_kv import Cache, CacheConfig
from cyclone_kv.cli import cli

from .conftest import CAPACITY, key_of


def run(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(cli, [str(value) for value in arguments], input=text)


@pytest.fixture
def volume(volume_path: Path) -> Path:
    with Cache.open(volume_path, CacheConfig(capacity=CAPACITY)) as cache:
        for number in range(10):
            cache.put(key_of(number), bytes(1000), header=b"h")
    with Cache.open(volume_path, namespace="other") as cache:
        cache.put(b"short", b"data")
    return volume_path


def test_create_makes_a_volume_and_shows_it(volume_path: Path) -> None:
    result = run("create", volume_path, "--capacity", "64MiB")
    assert result.exit_code == 0, result.output
    assert "kv.cyc" in result.stdout
    with Cache.open(volume_path) as cache:
        assert cache.put(key_of(1), b"x")
    again = run("create", volume_path, "--capacity", "64MiB")
    assert again.exit_code == 2
    assert "exists" in again.stderr


def test_create_takes_several_paths(volume_path: Path) -> None:
    paths = [volume_path.parent / name for name in ("a.cyc", "b.cyc")]
    result = run("create", *paths, "--capacity", "128MiB", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["format_version"] >= 1
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--capacity", "1G"], "64GiB"),
        (["--capacity", "64MiB", "--file-mode", "rw"], "octal"),
        (["--capacity", "64MiB", "--stripes", "-1"], "stripes"),
    ],
)
def test_create_says_what_is_wrong(
    volume_path: Path, arguments: list[str], words: str
) -> None:
    result = run("create", volume_path, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not volume_path.exists()


@pytest.mark.parametrize("command", ["info", "stats", "verify", "ls", "clear"])
def test_a_missing_volume_is_one_line_and_exit_code_2(
    volume_path: Path, command: str
) -> None:
    result = run(command, volume_path)
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
    assert "Traceback" not in result.output


def test_info(volume: Path) -> None:
    assert "kv.cyc" in run("info", volume).stdout
    values = json.loads(run("info", volume, "--json").stdout)
    assert values["paths"][0]["path"] == str(volume)


def test_stats(volume: Path) -> None:
    text = run("stats", volume).stdout
    assert "puts_stored" in text
    values = json.loads(run("stats", volume, "--json").stdout)
    assert values["entries"] == 11
    assert run("stats", volume, "--watch", "0").exit_code == 2


def test_verify_of_a_sound_volume(volume: Path) -> None:
    result = run("verify", volume)
    assert result.exit_code == 0, result.output
    assert "no damage" in result.stdout
    values = json.loads(run("verify", volume, "--json", "--repair").stdout)
    assert values["ok"]


def test_ls(volume: Path) -> None:
    lines = run("ls", volume).stdout.splitlines()
    assert len(lines) == 11
    assert sum("digested" in line for line in lines) == 1
    assert len(run("ls", volume, "--limit", "3").stdout.splitlines()) == 3
    rows = [
        json.loads(line) for line in run("ls", volume, "--json").stdout.splitlines()
    ]
    assert key_of(4).hex() in {row["key"] for row in rows}


def test_clear_asks_first_and_spares_other_namespaces(volume: Path) -> None:
    refused = run("clear", volume, text="n\n")
    assert refused.exit_code != 0
    assert len(run("ls", volume).stdout.splitlines()) == 11
    assert "10 blocks removed" in run("clear", volume, text="y\n").stdout
    result = run("clear", volume, "--namespace", "other", "--yes", "--json")
    assert json.loads(result.stdout) == {"removed": 1}


def test_prometheus_text_and_file(volume: Path, tmp_path: Path) -> None:
    assert "cyclone_kv_entries{" in run("prometheus", volume).stdout
    target = tmp_path / "kv.prom"
    assert run("prometheus", volume, "--textfile", target).exit_code == 0
    assert "cyclone_kv_entries{" in target.read_text()
    both = run("prometheus", volume, "--textfile", target, "--port", 0)
    assert both.exit_code == 2


def test_prometheus_serves(volume: Path) -> None:
    command = [sys.executable, "-m", "cyclone_kv", "prometheus", str(volume)]
    server = subprocess.Popen(
        [*command, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        match = re.search(r"http://\S+", server.stdout.readline())
        assert match is not None
        with urllib.request.urlopen(match[0], timeout=10) as reply:
            assert b"cyclone_kv_entries{" in reply.read()
    finally:
        server.terminate()
        server.communicate()


def test_the_module_runs_as_a_program(volume_path: Path) -> None:
    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cyclone_kv", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    assert program("create", str(volume_path), "--capacity", "64MiB").returncode == 0
    assert program("verify", str(volume_path)).returncode == 0
    missing = program("info", str(volume_path) + ".not")
    assert missing.returncode == 2
    assert missing.stderr.startswith("Error: ")
    assert len(missing.stderr.splitlines()) == 1


def test_the_program_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'click'\", name='click')"
    )
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    script += "from cyclone_kv.__main__ import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "cyclone-kv[cli]" in result.stderr
