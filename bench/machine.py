# SPDX-License-Identifier: Apache-2.0
"""The machine under the measurement: what it is, its page cache, and its limits."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "CacheDropper",
    "describe",
    "device_limit",
    "memcpy_limit",
    "settle",
    "syncfs",
]

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_DEPTHS = (1, 4, 16)
_FIO_SECONDS = 2
_MIB = 1 << 20
_HUGE_PAGE = 2 * _MIB
_libc = ctypes.CDLL(None, use_errno=True)


def syncfs(folder: Path) -> None:
    """Write out everything that the file system of ``folder`` holds back."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not hasattr(_libc, "syncfs"):
            os.sync()
        elif _libc.syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
    finally:
        os.close(descriptor)


class CacheDropper:
    """Empties the page cache, of everything when we may, else of the given files."""

    def __init__(self) -> None:
        self.global_drop = os.access(_DROP_CACHES, os.W_OK)

    @property
    def how(self) -> str:
        """In words, for the reader of the table."""
        if self.global_drop:
            return "sync; echo 3 > /proc/sys/vm/drop_caches"
        return "syncfs; posix_fadvise(DONTNEED) on each file (not root)"

    def drop(self, folder: Path, files: Iterable[Path]) -> None:
        """Empty it.  Nobody may have the files mapped."""
        syncfs(folder)
        if self.global_drop:
            _DROP_CACHES.write_text("3")
            return
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def settle(folder: Path, nbytes: int) -> None:
    """Make ``nbytes`` of free memory fit for use, by a file that is deleted again.

    A virtual machine may hand free memory back to its host within seconds. The first
    lap into such memory is several times slower than later ones, and would be charged
    to whoever comes first; so this runs before everything that fills the page cache.
    """
    piece = bytes(4 * _MIB)
    path = folder / "settle"
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(0, nbytes, len(piece)):
                file.write(piece)
    finally:
        path.unlink(missing_ok=True)


def memcpy_limit(source: np.ndarray[Any, Any], target: memoryview) -> float:
    """Return GB/s of copying the rows of ``source``, one by one, into one buffer."""
    buffer = np.frombuffer(target, dtype=np.uint8)
    begin = time.perf_counter()
    for row in source:
        np.copyto(buffer, row)
    return float(source.nbytes) / (time.perf_counter() - begin) / 1e9


def device_limit(folder: Path, nbytes: int, piece: int) -> dict[str, Any]:
    """Read a file with O_DIRECT, several requests in flight; return the best GB/s.

    By threads with ``preadv``, and by fio when it is installed; the better one counts.
    Ours reads into huge pages, of which a request needs fewer segments.
    """
    path = folder / "direct"
    piece = min(piece, 2 * _MIB)
    try:
        with open(path, "wb", buffering=0) as file:
            block = np.random.default_rng(1).bytes(4 * _MIB)
            for _ in range(0, nbytes, len(block)):
                file.write(block)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        nbytes = path.stat().st_size
        tools = {"preadv threads": _preadv}
        if shutil.which("fio"):
            tools["fio"] = _fio
        found: list[tuple[float, str, int]] = []
        for tool, measure in tools.items():
            for depth in _DEPTHS:
                try:
                    found.append((measure(path, nbytes, piece, depth), tool, depth))
                except OSError:  # no O_DIRECT here (tmpfs)
                    break
        best = max(found, default=(None, "nothing, there is no O_DIRECT here", 0))
        return {
            "tool": best[1],
            "piece": piece,
            "gb_per_second": best[0],
            "depth": best[2],
            "tried": found,
        }
    finally:
        path.unlink(missing_ok=True)


def _fio(path: Path, nbytes: int, piece: int, depth: int) -> float:
    command = [
        "fio",
        "--name=limit",
        f"--filename={path}",
        f"--size={nbytes}",
        "--rw=read",
        f"--bs={piece}",
        "--direct=1",
        "--ioengine=libaio",
        f"--iodepth={depth}",
        "--time_based",  # over and over: its own start would weigh too much
        f"--runtime={_FIO_SECONDS}",
        "--output-format=json",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise OSError(result.stderr.strip())
    text = result.stdout[result.stdout.index("{") :]
    return float(json.loads(text)["jobs"][0]["read"]["bw_bytes"]) / 1e9


def _preadv(path: Path, nbytes: int, piece: int, depth: int) -> float:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    offsets = iter(range(0, nbytes - piece + 1, piece))
    lock = threading.Lock()
    failures: list[OSError] = []

    def read_some() -> None:
        with (
            mmap.mmap(-1, max(piece, _HUGE_PAGE)) as buffer,  # aligned
            memoryview(buffer)[:piece] as target,
        ):
            try:
                buffer.madvise(mmap.MADV_HUGEPAGE)
                while True:
                    with lock:
                        offset = next(offsets, None)
                    if offset is None:
                        return
                    os.preadv(descriptor, [target], offset)
            except OSError as error:
                failures.append(error)

    threads = [threading.Thread(target=read_some) for _ in range(depth)]
    begin = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os.close(descriptor)
    if failures:
        raise failures[0]
    return nbytes // piece * piece / (time.perf_counter() - begin) / 1e9


def _mount_of(folder: Path) -> tuple[str, str]:
    """Return (device, file system) of the longest mount point above ``folder``."""
    best, device, kind = "", "?", "?"
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return device, kind
    for line in mounts:
        source, point, found = line.split()[:3]
        prefix = point.rstrip("/") + "/"
        if f"{folder.resolve()}/".startswith(prefix) and len(prefix) >= len(best):
            best, device, kind = prefix, source, found
    return device, kind


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _cpu() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("cyclone-kv", "lmdb", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def describe(folder: Path) -> dict[str, Any]:
    """Return what a reader needs to judge, and repeat, a run in ``folder``."""
    device, kind = _mount_of(folder)
    status = os.statvfs(folder)
    name = os.path.basename(os.path.realpath(device))
    return {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": kind,
        "device": name,
        "readahead_kb": _read(f"/sys/class/block/{name}/queue/read_ahead_kb"),
        "scheduler": _read(f"/sys/class/block/{name}/queue/scheduler"),
        "free_bytes": status.f_bavail * status.f_frsize,
        "commit": _commit(),
        "versions": _versions(),
        "load_average": list(os.getloadavg()),
        "nice": os.nice(0),
    }
