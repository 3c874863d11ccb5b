# SPDX-License-Identifier: Apache-2.0
"""The machine under the measurement: what it is, its page cache, and its limits."""

from __future__ import annotations

import ctypes
import datetime
import json
import mmap
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.stores import OURS, RIVALS, UnavailableError, store_type

__all__ = [
    "CacheDropper",
    "DeviceLimit",
    "describe",
    "huge_memory",
    "settle",
    "syncfs",
]

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_DEPTHS = (1, 4, 16, 32)
_HUGE_DEPTHS = (1, 2, 4, 8, 16, 32)
_HUGE = "preadv threads, huge pages"
_FIO = "fio"
_MIB = 1 << 20
_HUGE_PAGE = 2 * _MIB
_PREADV_BYTES_MIN = 256 * _MIB
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


class DeviceLimit:
    """Reads a file with O_DIRECT, several requests in flight.

    By fio where it is installed, and by threads with ``preadv`` into huge pages, of
    which a request needs fewer segments: that alone can be worth a factor of two. Small
    blocks are also read 2 MiB at a time by the latter, since stored order allows it.
    The first measurement tries all depths; later ones repeat what was best of each
    tool, and the best one counts. There is no result where there is no O_DIRECT
    (tmpfs).
    """

    def __init__(
        self, folder: Path, nbytes: int, piece: int, *, fio_seconds: float = 1.0
    ) -> None:
        self.piece = min(piece, 2 * _MIB)
        self.tool = "nothing, there is no O_DIRECT here"
        self.request = 0
        self.depth = 0
        self.tried: list[tuple[float, str, int, int]] = []
        """GB/s, tool, bytes of a request, depth."""
        self._best: list[tuple[str, int, int]] = []
        self._nbytes = max(nbytes, self.piece)
        self._fio_seconds = fio_seconds
        self._path = folder / f"direct-{self.piece}"

    def measure(self) -> float | None:
        """Return GB/s."""
        if not self._path.exists():
            self._write()
        if not self.tried:
            self.tried = list(self._try_all())
            best = {
                tool: max(r for r in self.tried if r[1] == tool)
                for tool in dict.fromkeys(row[1] for row in self.tried)
            }
            self._best = [row[1:] for row in best.values()]
            found = self.tried
        else:
            found = [(self._run(*how), *how) for how in self._best]
        if not found:
            return None
        speed, self.tool, self.request, self.depth = max(found)
        return speed

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def about(self) -> dict[str, Any]:
        """Return what was tried, for the record."""
        return {
            "piece": self.piece,
            "tool": self.tool,
            "request": self.request,
            "depth": self.depth,
            "tried": self.tried,
        }

    def _write(self) -> None:
        with open(self._path, "wb", buffering=0) as file:
            block = np.random.default_rng(1).bytes(max(4 * _MIB, self.piece))
            for _ in range(0, self._nbytes, len(block)):
                file.write(block)
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._nbytes = self._path.stat().st_size

    def _try_all(self) -> Iterator[tuple[float, str, int, int]]:
        if not hasattr(os, "O_DIRECT"):
            return
        requests = sorted({self.piece, min(_HUGE_PAGE, self._nbytes)})
        ways = [(_HUGE, request, _HUGE_DEPTHS) for request in requests]
        if shutil.which("fio"):
            ways.append((_FIO, self.piece, _DEPTHS))
        for tool, request, depths in ways:
            for depth in depths:
                try:
                    yield self._run(tool, request, depth), tool, request, depth
                except OSError:  # no O_DIRECT here
                    break

    def _run(self, tool: str, request: int, depth: int) -> float:
        if tool == _FIO:
            seconds = self._fio_seconds
            return _fio(self._path, self._nbytes, request, depth, seconds)
        return _preadv(self._path, self._nbytes, request, depth)


def _fio(path: Path, nbytes: int, piece: int, depth: int, seconds: float) -> float:
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
        f"--runtime={max(1, round(seconds * 1000))}ms",
        "--output-format=json",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise OSError(result.stderr.strip())
    text = result.stdout[result.stdout.index("{") :]
    return float(json.loads(text)["jobs"][0]["read"]["bw_bytes"]) / 1e9


def huge_memory(nbytes: int) -> memoryview:
    """Return memory that begins with a huge page, where the system has them.

    Direct I/O into it needs fewer segments than into small pages. It is private, since
    shared anonymous memory is a file of tmpfs, with huge pages only where the mount
    allows them. Freed with the last view.
    """
    length = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE
    buffer = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    begin = -np.frombuffer(buffer, np.uint8).ctypes.data % _HUGE_PAGE
    return memoryview(buffer)[begin : begin + nbytes]


def _preadv(path: Path, nbytes: int, piece: int, depth: int) -> float:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    laps = max(1, -(-_PREADV_BYTES_MIN // nbytes))
    offsets = iter(list(range(0, nbytes - piece + 1, piece)) * laps)
    lock = threading.Lock()
    ready = threading.Barrier(depth + 1)
    failures: list[OSError] = []

    def read_some() -> None:
        target = huge_memory(piece)
        target[:] = bytes(piece)  # present before the clock runs
        ready.wait()
        try:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                os.preadv(descriptor, [target], offset)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=read_some) for _ in range(depth)]
    try:
        for thread in threads:
            thread.start()
        ready.wait()
        begin = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
    finally:
        os.close(descriptor)
    if failures:
        raise failures[0]
    return nbytes // piece * piece * laps / seconds / 1e9


def _mount_of(folder: Path) -> tuple[str, str, str]:
    """Return (device, file system, options) of the mount point that it lies on."""
    best, found = "", ("?", "?", "?")
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return found
    for line in mounts:
        source, point, kind, options = line.split()[:4]
        prefix = point.rstrip("/") + "/"
        if f"{folder.resolve()}/".startswith(prefix) and len(prefix) >= len(best):
            best, found = prefix, (source, kind, options)
    return found


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


def _commit() -> tuple[str | None, bool | None]:
    """Return the commit, and whether files differ from it."""
    here = str(Path(__file__).resolve().parent)
    found = []
    for command in (
        ["rev-parse", "--short=12", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no"],
    ):
        try:
            result = subprocess.run(
                ["git", "-C", here, *command],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            return None, None
        if result.returncode != 0:
            return None, None
        found.append(result.stdout.strip())
    return found[0], found[1] != ""


def _queue(device: str) -> dict[str, str | None]:
    """Return settings of the block device; a partition has those of its disk."""
    base = Path("/sys/class/block") / device
    if not (base / "queue").exists():
        base = Path(os.path.realpath(base)).parent
    names = (
        "read_ahead_kb",
        "scheduler",
        "max_sectors_kb",
        "nr_requests",
        "rotational",
    )
    return {name: _read(str(base / "queue" / name)) for name in names}


def describe(folder: Path) -> dict[str, Any]:
    """Return what a reader needs to judge, and repeat, a run in ``folder``."""
    device, kind, options = _mount_of(folder)
    status = os.statvfs(folder)
    name = os.path.basename(os.path.realpath(device))
    commit, dirty = _commit()
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    missing = {}
    for store in (OURS, *RIVALS):
        try:
            versions[store] = store_type(store).version()
        except UnavailableError as error:
            missing[store] = str(error)
    versions["fio"] = _fio_version()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cpus": _cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": kind,
        "mount_options": options,
        "device": name,
        "queue": _queue(name),
        "dirty_ratio": _read("/proc/sys/vm/dirty_ratio"),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "free_bytes": status.f_bavail * status.f_frsize,
        "commit": commit,
        "dirty": dirty,
        "versions": versions,
        "not_importable": missing,
        "load_begin": list(os.getloadavg()),
        "nice": os.nice(0),
    }


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _fio_version() -> str:
    path = shutil.which("fio")
    if path is None:
        return "not installed"
    result = subprocess.run([path, "--version"], capture_output=True, text=True)
    return result.stdout.strip()
