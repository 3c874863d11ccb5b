# SPDX-License-Identifier: Apache-2.0
"""The file of the shared region: created safely, believed only when it is ours."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

import pytest
from opened import Opened, Peer, Refused, payload_of
from os_faults import OsTable


def region_path(volume_path):
    return volume_path.with_name("kv.cyc-shm")


def offsets(core) -> dict[str, tuple[int, int]]:
    """Offset and size of the members of the header of the region."""
    kind = core.ffi.typeof("struct ckv_region_header")
    sizes = {
        "magic": 8,
        "version": 4,
        "ready": 4,
        "nonce": 8,
        "set_id": 16,
        "layout_crc": 8,
    }
    fields = dict(kind.fields)
    return {name: (fields[name].offset, size) for name, size in sizes.items()}


# ---- creation ----------------------------------------------------------------------


def test_the_region_is_written_whole_and_has_the_mode_asked_for(core, disk_folder):
    path = disk_folder / "kv.cyc"
    with Opened(core, path, file_mode=0o666) as cache:  # whatever the umask is
        found = os.stat(region_path(path))
        assert found.st_size == cache.region.bytes
        assert found.st_blocks * 512 >= found.st_size
        assert stat.S_IMODE(found.st_mode) == 0o666
        assert (found.st_dev, found.st_ino) == (cache.region.device, cache.region.inode)


def test_no_descriptor_of_the_region_stays_open(core, volume_path):
    with Opened(core, volume_path):
        names = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                names.append(os.readlink(f"/proc/self/fd/{fd}"))
        assert not [name for name in names if name.endswith("-shm")]


def test_a_planted_symlink_is_replaced_and_its_target_left_alone(core, volume_path):
    victim = volume_path.parent / "victim"
    victim.write_bytes(b"precious")
    region_path(volume_path).symlink_to(victim)
    with Opened(core, volume_path) as cache:
        cache.put(b"k", b"x" * 100)
        assert not region_path(volume_path).is_symlink()
    assert victim.read_bytes() == b"precious"


def test_a_planted_hard_link_is_replaced_and_its_target_left_alone(core, volume_path):
    victim = volume_path.parent / "victim"
    victim.write_bytes(b"precious")
    region_path(volume_path).hardlink_to(victim)
    with Opened(core, volume_path):
        pass
    assert victim.read_bytes() == b"precious"


def test_what_cannot_be_removed_is_named(core, volume_path):
    region_path(volume_path).mkdir()
    with pytest.raises(Refused) as refused:
        Opened(core, volume_path)
    assert refused.value.status == core.lib.CKV_E_UNSAFE_PATH
    assert str(region_path(volume_path)) in refused.value.text


def test_it_lies_where_shm_directory_says(core, volume_path, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with Opened(core, volume_path, shm_directory=os.fsencode(elsewhere)) as cache:
        (name,) = os.listdir(elsewhere)
        assert bytes(cache.volume.set_id).hex() in name
        assert not region_path(volume_path).exists()
        with Peer(volume_path) as peer:  # learns it from the header
            assert peer.hello["slot"] == 1


@pytest.mark.parametrize("member", ["allocate", "write_at"])
def test_a_full_file_system_is_told_in_numbers(core, volume_path, member):
    with Opened(core, volume_path) as cache:
        needed = cache.region.bytes
    ino = volume_path.stat().st_ino
    with OsTable(core) as table:

        def full(fd, *arguments):
            if os.fstat(fd).st_ino != ino:
                return -errno.ENOSPC
            return getattr(table.native, member)(fd, *arguments)

        table.replace(member, full)
        with pytest.raises(Refused) as refused:
            Opened(core, volume_path)
    assert refused.value.status == core.lib.CKV_E_NO_SPACE
    assert str(needed) in refused.value.text
    assert "shm_dir" in refused.value.text
    assert not region_path(volume_path).exists()
    with Opened(core, volume_path):
        pass


def test_a_file_system_that_cannot_allocate_is_written_to(core, volume_path):
    with OsTable(core) as table:

        def allocate(fd, offset, length):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.endswith("-shm"):
                return -errno.EOPNOTSUPP
            return table.native.allocate(fd, offset, length)

        table.replace("allocate", allocate)
        with Opened(core, volume_path) as cache:
            found = os.stat(region_path(volume_path))
            assert found.st_blocks * 512 >= found.st_size
            assert cache.put(b"k", b"x") == core.lib.CKV_OK


def test_memory_that_may_not_be_locked_is_no_failure(core, volume_path):
    with OsTable(core) as table:
        table.replace("lock_memory", lambda address, length: -errno.ENOMEM)
        table.replace("populate_read", lambda address, length: -errno.EINVAL)
        with Opened(core, volume_path) as cache:
            assert cache.put(b"k", b"x") == core.lib.CKV_OK


# ---- attaching ---------------------------------------------------------------------


def refusal(core, volume_path) -> Refused:
    with pytest.raises(Refused) as refused:
        Opened(core, volume_path)
    text = refused.value.text
    assert str(region_path(volume_path)) in text
    assert "close every process that has this volume open" in text
    return refused.value


def test_a_region_that_was_removed_is_refused_while_somebody_lives(core, volume_path):
    with Peer(volume_path) as peer:
        assert peer.ask("put", "k", 5000) == core.lib.CKV_OK
        region_path(volume_path).unlink()
        assert refusal(core, volume_path).status == core.lib.CKV_E_FORMAT
        assert not region_path(volume_path).exists()
    with Opened(core, volume_path) as cache:  # all are gone: a new life
        assert cache.get(b"k") == payload_of(b"k", 5000)


@pytest.mark.parametrize(
    "member", ["magic", "version", "ready", "nonce", "set_id", "layout_crc"]
)
def test_a_header_that_is_not_ours_is_refused(core, volume_path, member):
    offset, size = offsets(core)[member]
    with Peer(volume_path) as peer:
        with open(region_path(volume_path), "r+b") as file:
            file.seek(offset)
            before = file.read(size)
            file.seek(offset)
            file.write(bytes(byte ^ 0x55 for byte in before))
        assert refusal(core, volume_path).status == core.lib.CKV_E_FORMAT
        with open(region_path(volume_path), "r+b") as file:
            file.seek(offset)
            file.write(before)
        with Opened(core, volume_path) as cache:
            assert cache.volume.slot == 1
        assert peer.ask("put", "k", 100) == core.lib.CKV_OK


def test_a_region_of_another_size_is_refused(core, volume_path):
    with Peer(volume_path):
        with open(region_path(volume_path), "ab") as file:
            file.write(b"\0" * 4096)
        assert refusal(core, volume_path).status == core.lib.CKV_E_FORMAT


@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder"])
def test_a_region_that_was_replaced_is_refused(core, volume_path, kind):
    with Peer(volume_path):
        shm = region_path(volume_path)
        if kind == "symlink":
            shm.rename(shm.with_name("moved"))
            shm.symlink_to("moved")
        else:
            shm.unlink()
            os.mkfifo(shm) if kind == "fifo" else shm.mkdir()
        with pytest.raises(Refused) as refused:
            Opened(core, volume_path)
        assert refused.value.status in (
            core.lib.CKV_E_UNSAFE_PATH,
            core.lib.CKV_E_FORMAT,
            core.lib.CKV_E_OS,
        )
        assert str(shm) in refused.value.text


# ---- namespaces --------------------------------------------------------------------


def test_namespaces_are_numbered_once_and_end_at_256(core, volume_path):
    with Opened(core, volume_path) as cache:
        find = core.lib.ckv_region_namespace
        tags = [
            bytes([1, number % 256, number // 256, *[7] * 13]) for number in range(300)
        ]
        assert find(cache.volume, tags[0], False) == -1
        numbers = [find(cache.volume, tag, True) for tag in tags]
        assert numbers[:255] == list(range(1, 256))  # 0 is the default one
        assert set(numbers[255:]) == {-1}
        assert [find(cache.volume, tag, False) for tag in tags] == numbers
        with pytest.raises(Refused) as refused:
            Opened(core, volume_path, namespace=b"one too many")
        assert refused.value.status == core.lib.CKV_E_NO_NAMESPACE
