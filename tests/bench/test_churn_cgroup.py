# SPDX-License-Identifier: Apache-2.0
"""Memory cgroups: both versions on fake trees, the real one where it may be made."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench import cgroup

MIB = 1 << 20


class Tree:
    """What the kernel shows, as plain files."""

    def __init__(self, folder):
        self.membership = folder / "membership"
        self.mounts = folder / "mounts"
        self.root = folder / "cgroup"
        self.root.mkdir()

    def create(self, limit=64 * MIB):
        return cgroup.create(
            "run", limit, membership=self.membership, mounts=self.mounts
        )


@pytest.fixture
def version1(tmp_path):
    tree = Tree(tmp_path)
    tree.membership.write_text("4:memory:/box\n2:cpu,cpuacct:/\n0::/unified\n")
    tree.mounts.write_text(
        f"cgroup {tree.root}/cpu cgroup rw,cpu 0 0\n"
        f"cgroup {tree.root}/memory cgroup rw,relatime,memory 0 0\n"
        f"cgroup2 {tree.root}/unified cgroup2 rw 0 0\n"
    )
    (tree.root / "memory" / "box").mkdir(parents=True)
    return tree


@pytest.fixture
def version2(tmp_path):
    tree = Tree(tmp_path)
    tree.membership.write_text("0::/box\n")
    tree.mounts.write_text(f"cgroup2 {tree.root} cgroup2 rw,nosuid 0 0\n")
    box = tree.root / "box"
    box.mkdir()
    (box / "cgroup.controllers").write_text("cpu memory\n")
    (box / "cgroup.subtree_control").write_text("")
    return tree


def test_version_1_is_made_below_our_own_group(version1):
    group = version1.create()
    assert isinstance(group, cgroup.MemoryCgroup)
    assert group.path == version1.root / "memory" / "box" / "run"
    assert (group.version, group.limit_bytes) == (1, 64 * MIB)
    limit = group.path / "memory.limit_in_bytes"
    assert limit.read_text() == str(64 * MIB)
    (group.path / "memory.max_usage_in_bytes").write_text("12345\n")
    (group.path / "memory.stat").write_text("cache 9\ndirty 8192\nwriteback 4096\n")
    assert group.peak_bytes() == 12345
    assert group.dirty_bytes() == 12288


def test_version_2_gets_the_controller_and_no_swap(version2, monkeypatch):
    made = []
    mkdir = type(version2.root).mkdir

    def kernel(self, *arguments, **options):
        mkdir(self, *arguments, **options)
        if self.name == "run":  # the kernel fills a new group with files
            (self / "memory.swap.max").write_text("max")
            made.append(self)

    monkeypatch.setattr(type(version2.root), "mkdir", kernel)
    group = version2.create()
    assert isinstance(group, cgroup.MemoryCgroup)
    assert (group.version, group.limit_bytes) == (2, 64 * MIB)
    box = version2.root / "box"
    assert made == [box / "run"]
    assert (box / "cgroup.subtree_control").read_text() == "+memory"
    assert (group.path / "memory.swap.max").read_text() == "0"
    (group.path / "memory.peak").write_text("77\n")
    assert group.peak_bytes() == 77


def test_a_host_without_the_controller_is_a_reason(version2):
    (version2.root / "box" / "cgroup.controllers").write_text("cpu\n")
    refusal = version2.create()
    assert isinstance(refusal, cgroup.Refusal)
    assert "no memory controller" in refusal.reason


def test_a_host_that_shows_no_groups_is_a_reason(tmp_path):
    tree = Tree(tmp_path)
    refusal = tree.create()
    assert isinstance(refusal, cgroup.Refusal)
    assert "cannot be read" in refusal.reason


def test_a_group_that_does_not_keep_its_limit_is_refused_and_removed(
    version1, monkeypatch
):
    monkeypatch.setattr(cgroup, "_number", lambda path: 4096)
    refusal = version1.create()
    assert isinstance(refusal, cgroup.Refusal)
    assert "has the limit 4096" in refusal.reason


def test_a_folder_that_may_not_be_made_is_a_reason(version1, monkeypatch):
    def refuse(self, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(version1.root), "mkdir", refuse)
    refusal = version1.create()
    assert isinstance(refusal, cgroup.Refusal)
    assert "cannot be made: Permission denied" in refusal.reason


def test_a_container_whose_mount_begins_at_its_own_group(version1):
    (version1.root / "memory" / "box").rmdir()
    group = version1.create()
    assert isinstance(group, cgroup.MemoryCgroup)
    assert group.path == version1.root / "memory" / "run"


def test_a_real_group_counts_what_a_child_allocates():
    with cgroup.memory_cgroup("cyclone-kv-test", 256 * MIB) as group:
        if isinstance(group, cgroup.Refusal):
            pytest.skip(f"no memory cgroup may be made here: {group.reason}")
        program = (
            "import sys; from pathlib import Path; from bench import cgroup;"
            "cgroup.join(Path(sys.argv[1])); data = bytearray(40 << 20);"
            "print(cgroup.joined(Path(sys.argv[1])).limit_bytes)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(group.path)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert int(done.stdout) == group.limit_bytes == 256 * MIB
        peak = group.peak_bytes()
        assert peak is not None
        assert 40 * MIB <= peak <= 256 * MIB
    assert not group.path.exists()
