# SPDX-License-Identifier: Apache-2.0
"""The counters of the block device, on a fake tree."""

from __future__ import annotations

import os

import pytest

from bench import block_device


@pytest.fixture
def fake_device(tmp_path):
    number = os.stat(tmp_path).st_dev
    folder = tmp_path / "sys" / f"{os.major(number)}:{os.minor(number)}"
    folder.mkdir(parents=True)
    return folder


def write(folder, *, reads, sectors_read, writes, sectors_written, busy):
    (folder / "stat").write_text(
        f"  {reads} 3 {sectors_read} 40  {writes} 6 {sectors_written} 90 0 {busy} 99\n"
    )


def test_sectors_are_512_bytes_and_differences_are_of_two_readings(fake_device):
    write(fake_device, reads=1, sectors_read=8, writes=2, sectors_written=16, busy=100)
    device = block_device.find(fake_device, root=fake_device.parent)
    assert isinstance(device, block_device.Device)
    before = device.read()
    assert (before.read_bytes, before.written_bytes) == (4096, 8192)
    write(
        fake_device, reads=5, sectors_read=16, writes=12, sectors_written=32, busy=350
    )
    passed = device.read().since(before)
    assert (passed.reads, passed.writes, passed.busy_ms) == (4, 10, 250)
    assert (passed.read_bytes, passed.written_bytes) == (4096, 8192)
    assert passed.seconds >= 0
    assert passed.write_wait_ms == 0.0


def test_what_did_not_happen_has_no_wait(fake_device):
    write(fake_device, reads=0, sectors_read=0, writes=0, sectors_written=0, busy=0)
    device = block_device.find(fake_device, root=fake_device.parent)
    assert isinstance(device, block_device.Device)
    assert device.read().read_wait_ms is None
    assert device.read().write_wait_ms is None


def test_a_file_system_without_a_device_says_so(tmp_path):
    found = block_device.find(tmp_path, root=tmp_path / "nothing")
    assert isinstance(found, str)
    assert "cannot be attributed" in found
