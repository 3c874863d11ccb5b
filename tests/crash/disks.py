# SPDX-License-Identifier: Apache-2.0
"""Small file systems of our own: tmpfs, and images on a loop device.

    with mounted("ext4", 64 * MIB, tmp_path) as folder:
        ...

CannotMount says in words what the machine lacks; tests skip with that text.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CannotMount", "fill", "mounted", "remount"]

MIB = 1 << 20
MAKE = {
    "ext2": ["mkfs.ext2", "-q", "-F", "-m", "0"],  # without fallocate
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
}
XFS_MIN_BYTES = 300 * MIB  # of mkfs.xfs; the image is sparse


class CannotMount(Exception):
    """Why there is no such file system here."""


def _run(*command: str | Path) -> None:
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise CannotMount(f"{command[0]}: {result.stderr.strip()[-200:]}")


def remount(folder: Path | str, options: str) -> None:
    _run("mount", "-o", f"remount,{options}", folder)


@contextlib.contextmanager
def mounted(
    kind: str, size_bytes: int, scratch: Path, options: str = ""
) -> Iterator[Path]:
    """Mounts a new file system below `scratch`, which lies on a disk."""
    if os.geteuid() != 0:
        raise CannotMount("needs root for a mount of its own")
    point, image = scratch / f"mount-{kind}", scratch / f"{kind}.img"
    point.mkdir()
    extra = [options] if options else []
    if kind == "tmpfs":
        given = ",".join([f"size={size_bytes}", "mode=700", *extra])
        _run("mount", "-t", "tmpfs", "-o", given, "none", point)
    else:
        if shutil.which(MAKE[kind][0]) is None:
            raise CannotMount(f"{MAKE[kind][0]} is not installed")
        with image.open("wb") as file:
            file.truncate(max(size_bytes, XFS_MIN_BYTES if kind == "xfs" else 0))
        _run(*MAKE[kind], image)
        _run("mount", "-t", kind, "-o", ",".join(["loop", *extra]), image, point)
        point.chmod(0o700)
        with contextlib.suppress(OSError):
            (point / "lost+found").rmdir()
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)
        image.unlink(missing_ok=True)


def fill(path: str, leave_bytes: int = 0) -> None:
    """Makes a file that leaves so many bytes free, as far as the blocks allow."""
    folder = os.path.dirname(path)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        piece = 64 * MIB
        while piece >= 4096:
            size = os.fstat(file).st_size
            state = os.statvfs(folder)
            free = state.f_bavail * state.f_frsize - leave_bytes
            piece = min(piece, free // 4096 * 4096)
            if piece < 4096:
                break
            try:
                os.posix_fallocate(file, size, piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                piece //= 2
    finally:
        os.close(file)
