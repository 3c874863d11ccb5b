# SPDX-License-Identifier: Apache-2.0
"""How much memory may be pinned: half of what this process can count on.

Registered pages of the volume are pinned pages of the page cache. They count as used,
are never reclaimed, and are charged to the control group of whoever read them first. So
the limit is that of the machine or of the control group, whichever is smaller, and not
what is free at the moment: page cache that could be reclaimed would count as used.
"""

from __future__ import annotations

import dataclasses
import os
import resource
from pathlib import Path

__all__ = ["Limits", "format_size", "limits"]

_CAP_IPC_LOCK = 1 << 14


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the memory of this process."""

    memory_bytes: int
    memory_source: str
    """Who says so, in words."""
    locked_bytes: int | None
    """RLIMIT_MEMLOCK; None where it is unlimited or does not bind this process."""

    @property
    def automatic_bytes(self) -> int:
        """What may be pinned unasked."""
        half = self.memory_bytes // 2
        return half if self.locked_bytes is None else min(half, self.locked_bytes)

    @property
    def ceiling_bytes(self) -> int:
        """What can be pinned at all."""
        if self.locked_bytes is None:
            return self.memory_bytes
        return min(self.memory_bytes, self.locked_bytes)

    def __str__(self) -> str:
        text = f"{self.memory_source} is {format_size(self.memory_bytes)}"
        if self.locked_bytes is not None:
            text += f", RLIMIT_MEMLOCK is {format_size(self.locked_bytes)}"
        return text


def format_size(nbytes: int) -> str:
    """Return a size for people."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes} bytes"


def limits(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> Limits:
    """Return the limits of this process; reads a few small files."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    source = "the memory of this machine"
    for group, limit in _group_limits(proc, cgroups):
        if limit < memory:
            memory, source = limit, f"the memory limit of control group {group}"
    return Limits(memory, source, _locked(proc))


def _group_limits(proc: Path, cgroups: Path) -> list[tuple[str, int]]:
    """Return the memory limits of our control groups and of those above them."""
    found = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that of the host; its root is then ours.
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:depth])
            text = _read(folder / name).strip()
            if text.isdecimal():
                found.append(("/" + "/".join(parts[:depth]), int(text)))
    return found


def _locked(proc: Path) -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    for line in _read(proc / "self" / "status").splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) & _CAP_IPC_LOCK:
            return None
    return limit


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
