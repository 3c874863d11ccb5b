# SPDX-License-Identifier: Apache-2.0
"""The counters of the block device under a folder: what reached it, how busy it was.

They count for the whole device: whoever else writes is in them. So a measurement looks
at an idle stretch first, and its reader gets what was going on then.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

__all__ = ["Counters", "Device", "find"]

_SECTOR_BYTES = 512  # of the counters, whatever the device has
_SYS_DEV_BLOCK = Path("/sys/dev/block")


@dataclasses.dataclass(frozen=True, slots=True)
class Counters:
    """A reading, or the difference of two."""

    reads: int
    read_bytes: int
    read_ms: int
    writes: int
    written_bytes: int
    write_ms: int
    busy_ms: int
    seconds: float

    def since(self, earlier: Counters) -> Counters:
        """Return the difference."""
        return Counters(
            *(
                getattr(self, field.name) - getattr(earlier, field.name)
                for field in dataclasses.fields(self)
            )
        )

    @property
    def busy_share(self) -> float:
        """The share of the time in which a request was in flight."""
        return self.busy_ms / 1000 / self.seconds if self.seconds > 0 else 0.0

    @property
    def read_wait_ms(self) -> float | None:
        """Mean milliseconds of a read, waiting in the queue included."""
        return self.read_ms / self.reads if self.reads else None

    @property
    def write_wait_ms(self) -> float | None:
        """Mean milliseconds of a write, waiting in the queue included."""
        return self.write_ms / self.writes if self.writes else None


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """A block device with counters."""

    name: str
    stat: Path

    def read(self) -> Counters:
        """Read the counters now."""
        fields = [int(text) for text in self.stat.read_text().split()]
        return Counters(
            reads=fields[0],
            read_bytes=fields[2] * _SECTOR_BYTES,
            read_ms=fields[3],
            writes=fields[4],
            written_bytes=fields[6] * _SECTOR_BYTES,
            write_ms=fields[7],
            busy_ms=fields[9],
            seconds=time.monotonic(),
        )

    def idle_written_bytes_per_second(self, seconds: float) -> float:
        """Return what others write while this process waits."""
        before = self.read()
        time.sleep(seconds)
        passed = self.read().since(before)
        return passed.written_bytes / passed.seconds


def find(folder: Path, *, root: Path = _SYS_DEV_BLOCK) -> Device | str:
    """Return the device of the file system that holds ``folder``, or why there is none.

    tmpfs, overlayfs and btrfs show a number that no block device has.
    """
    number = os.stat(folder).st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    stat = root / name / "stat"
    if not stat.is_file():
        return (
            f"the file system of {folder} is on device {name}, which has no counters "
            f"of its own; writes cannot be attributed to it"
        )
    return Device(os.path.basename(os.path.realpath(root / name)), stat)
