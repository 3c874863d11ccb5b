# SPDX-License-Identifier: Apache-2.0
"""The limit of the device, and memory that it can be read into quickly."""

from __future__ import annotations

import os

import pytest

for needed in ("lmdb", "numpy"):
    pytest.importorskip(needed)

import numpy as np  # noqa: E402

from bench import machine  # noqa: E402
from bench.machine import DeviceLimit, huge_memory  # noqa: E402

MIB = 1 << 20


def _map_of(address):
    """Return the lines of /proc/self/smaps about the map with an address."""
    found = None
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                found = [line] if low <= address < high else None
            elif found is not None:
                found.append(line)
                if line.startswith("VmFlags"):
                    return found
    raise AssertionError("no such map")


@pytest.mark.parametrize("nbytes", [4096, 2 * MIB, 5 * MIB])
def test_memory_is_private_huge_and_of_the_size_asked_for(nbytes):
    memory = huge_memory(nbytes)
    assert len(memory) == nbytes
    memory[:] = b"\x01" * nbytes
    address = np.frombuffer(memory, np.uint8).ctypes.data
    assert address % (2 * MIB) == 0
    head, *_, flags = _map_of(address)
    # Shared memory would be a file, whose pages are small as a rule.
    assert head.split()[1].endswith("p")
    assert "hg" in flags.split()


def test_the_limit_tries_depths_sizes_and_tools_and_repeats_the_best(
    disk_folder, monkeypatch
):
    speeds = {"fio": 1.0, machine._HUGE: 2.0}
    asked = []

    def run(self, tool, request, depth):
        asked.append((tool, request, depth))
        return speeds[tool] + request / MIB + (depth == 4)

    monkeypatch.setattr(machine.shutil, "which", lambda name: "/bin/fio")
    monkeypatch.setattr(DeviceLimit, "_run", run)
    limit = DeviceLimit(disk_folder, 4 * MIB, 65536)
    try:
        assert limit.measure() == 2.0 + 2 + 1
        assert (limit.tool, limit.request, limit.depth) == (machine._HUGE, 2 * MIB, 4)
        assert {tool for tool, _, _ in asked} == set(speeds)
        assert {request for tool, request, _ in asked if tool == "fio"} == {65536}
        asked.clear()
        assert limit.measure() == 2.0 + 2 + 1
        assert sorted(asked) == [("fio", 65536, 4), (machine._HUGE, 2 * MIB, 4)]
        assert limit.about()["request"] == 2 * MIB
    finally:
        limit.close()
    assert os.listdir(disk_folder) == []


def test_without_direct_reads_there_is_no_limit(disk_folder, monkeypatch):
    monkeypatch.delattr(machine.os, "O_DIRECT")
    limit = DeviceLimit(disk_folder, MIB, 65536)
    assert limit.measure() is None
    limit.close()
