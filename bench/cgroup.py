# SPDX-License-Identifier: Apache-2.0
"""A memory cgroup for one run: made below our own, entered by a child, removed after.

Both versions of the interface are known. What is different between them is in the two
tables of file names; and that version 1 does not slow a writer down as its dirty pages
fill the group, while version 2 does.

  G1  A group is only ever made below the one that this process is in, so every limit
      that holds for us still holds, and no process but our own children is moved.
  G2  Where no group may be made, ``create`` returns the reason instead; the caller
      prints it and runs without a limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MemoryCgroup", "Refusal", "create", "join", "joined", "memory_cgroup"]

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTS = Path("/proc/self/mounts")
_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_PEAK = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}
_CURRENT = {1: "memory.usage_in_bytes", 2: "memory.current"}
_SWAP = {1: None, 2: "memory.swap.max"}  # version 1 limits swap with memory.memsw
_REMOVE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no group."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A group with a limit."""

    path: Path
    version: int
    limit_bytes: int

    def peak_bytes(self) -> int | None:
        """Return the most memory that the group held, page cache included."""
        return _number(self.path / _PEAK[self.version])

    def current_bytes(self) -> int | None:
        """Return what the group holds now."""
        return _number(self.path / _CURRENT[self.version])

    def dirty_bytes(self) -> int | None:
        """Return the dirty pages and those under write-back that are charged to it."""
        names = {1: ("dirty", "writeback"), 2: ("file_dirty", "file_writeback")}
        try:
            text = (self.path / "memory.stat").read_text()
        except OSError:
            return None
        fields = dict(line.split()[:2] for line in text.splitlines() if " " in line)
        found = [int(fields[name]) for name in names[self.version] if name in fields]
        return sum(found) if found else None

    def remove(self) -> None:
        """Remove it; its processes must have ended.  Their pages go to the parent."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        while True:
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                # The last process may still be on its way out.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _own_groups(membership: Path) -> dict[int, str]:
    """Return our own path in the hierarchy that has memory, by version."""
    groups: dict[int, str] = {}
    for line in membership.read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            groups[1] = path
        elif hierarchy == "0":
            groups[2] = path
    return groups


def _mount_points(mounts: Path) -> dict[int, Path]:
    points: dict[int, Path] = {}
    for line in mounts.read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        if kind == "cgroup2":
            points.setdefault(2, Path(point))
        elif kind == "cgroup" and "memory" in options.split(","):
            points.setdefault(1, Path(point))
    return points


def _below(point: Path, own: str) -> Path:
    """Return the folder of our own group.

    In a container the mount may begin at our own group although the path names what is
    above it.
    """
    folder = point / own.lstrip("/")
    return folder if folder.is_dir() else point


def create(
    name: str,
    limit_bytes: int,
    *,
    membership: Path = _MEMBERSHIP,
    mounts: Path = _MOUNTS,
) -> MemoryCgroup | Refusal:
    """Make a group with a limit below our own, or say why that is not possible."""
    try:
        groups, points = _own_groups(membership), _mount_points(mounts)
    except (OSError, ValueError) as error:
        return Refusal(f"the cgroups of this process cannot be read: {error}")
    reasons = []
    for version in (1, 2):
        if version not in groups or version not in points:
            reasons.append(f"version {version} has no memory controller mounted")
            continue
        parent = _below(points[version], groups[version])
        made = _make(parent, name, limit_bytes, version)
        if isinstance(made, MemoryCgroup):
            return made
        reasons.append(made.reason)
    return Refusal("; ".join(reasons))


def _make(
    parent: Path, name: str, limit_bytes: int, version: int
) -> MemoryCgroup | Refusal:
    if version == 2:
        refusal = _delegate(parent)
        if refusal is not None:
            return refusal
    path = parent / name
    try:
        path.mkdir()
    except OSError as error:
        return Refusal(f"{path} cannot be made: {error.strerror}")
    try:
        swap = _SWAP[version]
        if swap is not None and (path / swap).exists():
            (path / swap).write_text("0")
        (path / _LIMIT[version]).write_text(str(limit_bytes))
        found = _number(path / _LIMIT[version])
    except OSError as error:
        found, reason = None, f"{path} takes no limit: {error.strerror}"
    else:
        reason = f"{path} has the limit {found}, not {limit_bytes}"
    # The kernel keeps whole pages.
    if found is None or not limit_bytes - 65536 < found <= limit_bytes:
        with contextlib.suppress(OSError):
            path.rmdir()
        return Refusal(reason)
    return MemoryCgroup(path, version, found)


def _delegate(parent: Path) -> Refusal | None:
    """Let the children of ``parent`` have memory limits."""
    try:
        if "memory" not in (parent / "cgroup.controllers").read_text().split():
            return Refusal(f"{parent} has no memory controller")
        control = parent / "cgroup.subtree_control"
        if "memory" not in control.read_text().split():
            # Refused (EBUSY) while processes sit in the group itself, which is ours:
            # moving them would be meddling.
            control.write_text("+memory")
    except OSError as error:
        return Refusal(f"{parent} gives no memory limits to groups below: {error}")
    return None


@contextlib.contextmanager
def memory_cgroup(name: str, limit_bytes: int) -> Iterator[MemoryCgroup | Refusal]:
    """Make a group for the time of a block, see ``create``."""
    group = create(f"{name}-{os.getpid()}", limit_bytes)
    try:
        yield group
    finally:
        if isinstance(group, MemoryCgroup):
            group.remove()


def joined(path: Path) -> MemoryCgroup:
    """Return the group ``path``, which exists."""
    version = 1 if (path / _LIMIT[1]).exists() else 2
    return MemoryCgroup(path, version, _number(path / _LIMIT[version]) or 0)


def join(path: Path) -> None:
    """Move this process into the group ``path``; what it allocates next counts."""
    (path / "cgroup.procs").write_text(str(os.getpid()))
