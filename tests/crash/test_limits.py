# SPDX-License-Identifier: Apache-2.0
"""Full disks and small machines: real file systems, limits and memory groups.

What a machine lacks (root, loop devices, mkfs.xfs, a memory cgroup) skips its test with
the reason.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash import cases_limits as limits
from crash import cases_system as system
from crash.disks import CannotMount, mounted

from bench import cgroup

MIB = 1 << 20
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="needs root to become another user")


def mount(kind: str, size_bytes: int, scratch: Path, options: str = "") -> Iterator:
    try:
        with mounted(kind, size_bytes, scratch, options) as folder:
            yield folder
    except CannotMount as reason:
        pytest.skip(f"no {kind} here: {reason}")


@pytest.fixture(params=["ext4", "xfs"])
def small_disk(request: pytest.FixtureRequest, disk_folder: Path) -> Iterator[Path]:
    """A file system of 64 MiB on a loop device; of xfs the smallest that there is."""
    yield from mount(request.param, 64 * MIB, disk_folder)


@pytest.fixture(params=["tmpfs", "ext4"])
def tiny_disk(request: pytest.FixtureRequest, disk_folder: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    yield from mount(request.param, 32 * MIB, disk_folder)


# ---- disks -------------------------------------------------------------------------


def test_d1_n6_a_full_disk_kills_the_process_or_a_put_on_ext4_and_xfs(
    nursery, small_disk
):
    nursery.call(system.small_disk, folder=small_disk, too_large=1024 * MIB)


def test_d1_n6_a_disk_of_any_size_takes_a_volume_whole_or_not_at_all(
    nursery, tiny_disk
):
    outcomes = nursery.call(
        limits.every_free_size, folder=tiny_disk, step_bytes=384 * 1024
    )
    assert outcomes["opened"] > 2
    assert outcomes["refused"] > 2


def test_n6_a_quota_is_told_in_words(nursery, disk_folder):
    for folder in mount(
        "tmpfs", 64 * MIB, disk_folder, "usrquota,usrquota_block_hardlimit=8M"
    ):
        nursery.call(limits.quota, folder=folder)


def test_d4_a_file_system_without_fallocate_gets_zeros(nursery, disk_folder):
    for folder in mount("ext2", 64 * MIB, disk_folder):
        with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
            # Not posix_fallocate(), which writes zeros by itself.
            _fallocate(folder / "probe")
        (folder / "probe").unlink()
        nursery.call(system.no_fallocate, folder=folder)


def _fallocate(path: Path) -> None:
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        size = ctypes.c_longlong(65536)
        if library.fallocate(file, 0, ctypes.c_longlong(0), size) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(file)


@pytest.mark.parametrize("end", ["close", "kill"])
@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs"])
def test_n4_read_only_media_can_be_read_and_refuse_a_writer_in_words(
    nursery, disk_folder, kind: str, end: str
):
    for folder in mount(kind, 64 * MIB, disk_folder):
        nursery.call(limits.read_only, folder=folder, end=end)


def test_n4_a_file_system_that_turns_read_only_ends_nobody(nursery, disk_folder):
    for folder in mount("ext4", 64 * MIB, disk_folder, "errors=remount-ro"):
        device = Path(_device_of(folder)).name
        if not Path(f"/sys/fs/ext4/{device}/trigger_fs_error").exists():
            pytest.skip("this kernel has no trigger_fs_error")
        nursery.call(limits.turned_read_only, folder=folder, device=device)


def _device_of(folder: Path) -> str:
    for line in Path("/proc/mounts").read_text().splitlines():
        device, point = line.split()[:2]
        if point == str(folder):
            return device
    raise LookupError(folder)


# ---- limits of a process -----------------------------------------------------------

# An address space that is limited to what a sanitizer reserves is none.
plain_only = pytest.mark.skipif(
    bool(os.environ.get("CKV_SANITIZE")), reason="a sanitizer takes all address space"
)


@plain_only
def test_n4_too_little_address_space_is_an_error_in_words(nursery, volume_path):
    outcomes = nursery.call(limits.address_space, path=volume_path)
    assert outcomes["opened"] > 2
    assert outcomes["refused"] > 2


@pytest.mark.parametrize("create", [False, True], ids=["opened", "created"])
def test_n4_too_few_descriptors_are_an_error_in_words(
    nursery, volume_path, create: bool
):
    outcomes = nursery.call(limits.descriptors, path=volume_path, create=create)
    assert outcomes["opened"] > 2
    assert outcomes["refused"] > 2


def test_too_few_descriptors_name_the_limit(nursery, volume_path):
    nursery.call(limits.too_few_descriptors_in_words, path=volume_path)


@pytest.mark.parametrize("signal", ["ignored", "default"])
def test_n4_a_limit_of_file_size_ends_the_process(nursery, volume_path, signal: str):
    outcomes = nursery.call(
        limits.file_size,
        folder=volume_path.parent,
        default_signal=signal == "default",
    )
    assert outcomes == {"opened": 1, "refused": 7}


def test_a_handler_of_sigxfsz_stays_and_exec_gets_the_default_back(
    nursery, volume_path
):
    nursery.call(limits.own_signal_handler, path=volume_path)


@needs_root
def test_memory_that_may_not_be_locked_is_no_error(nursery, volume_path):
    nursery.call(limits.locked_memory, folder=volume_path.parent)


@needs_root
@plain_only
def test_a_thread_that_cannot_be_started_is_an_error_in_words(nursery, volume_path):
    nursery.call(limits.no_threads, folder=volume_path.parent)


@pytest.mark.skipif(sys.platform != "linux", reason="keys run out otherwise elsewhere")
def test_n3_without_thread_keys_blocks_can_be_verified(nursery, volume_path):
    nursery.call(limits.no_thread_keys, path=volume_path)


# ---- memory ------------------------------------------------------------------------


def test_n4_a_memory_group_far_below_the_volume_kills_nobody(
    nursery, disk_folder, effort: float
):
    if os.environ.get("CKV_SANITIZE"):
        pytest.skip("a sanitizer needs more memory than the group has")
    with cgroup.memory_cgroup("ckv-limits", 72 * MIB) as group:
        if isinstance(group, cgroup.Refusal):
            pytest.skip(f"no memory group: {group.reason}")
        wrong = nursery.call(
            limits.small_memory_group,
            path=disk_folder / "kv.cyc",
            tasks=group.path / "cgroup.procs",
            capacity=round(256 * min(max(effort, 1), 16)) * MIB,
            rounds=2,
            timeout=300,
        )
        assert wrong == 0
        assert _oom_kills(group) == 0
        peak = group.peak_bytes()
        assert peak is None or peak <= group.limit_bytes


def _oom_kills(group: cgroup.MemoryCgroup) -> int:
    name = "memory.events" if group.version == 2 else "memory.oom_control"
    for line in (group.path / name).read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill":
            return int(value)
    return 0
