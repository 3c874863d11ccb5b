# SPDX-License-Identifier: Apache-2.0
"""Whether somebody else worked on this machine while we measured.

The processor time of all processes that are neither ours nor the kernel's, from
``/proc``: what a process and its reaped children used between two looks. One that came
and went in between shows in its parent; what the kernel's own threads do counts for
nobody, since they also write our pages out. Steal is the time that a hypervisor gave to
other guests.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

__all__ = ["ForeignLoad"]

SHARE_MAX = 0.05
"""More of one processor than this, on average, and a run is marked."""
STEAL_MAX = 0.02

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_KTHREADD = 2


class ForeignLoad:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._ticks = _ticks()
        self._steal = _steal()

    def report(self) -> dict[str, Any]:
        """Return the shares of one processor since the beginning, and the verdict."""
        seconds = max(time.monotonic() - self._begin, 1e-9)
        now = _ticks()
        foreign = 0
        for pid, (ticks, _) in now.items():
            foreign += max(0, ticks - self._ticks.get(pid, (0, 0))[0])
        for pid, (ticks, parent) in self._ticks.items():
            if pid in now:
                continue
            while parent not in now and parent in self._ticks:
                parent = self._ticks[parent][1]  # which ended too
            if parent in now:
                # Its whole life is in that one's account now; only the end was here.
                foreign -= ticks
        share = max(0, foreign) / _TICKS / seconds
        steal = max(0, _steal() - self._steal) / _TICKS / seconds
        return {
            "seconds": seconds,
            "foreign_cpu_share": share,
            "steal_share": steal,
            "foreign_load": share > SHARE_MAX or steal > STEAL_MAX,
        }


def _ticks() -> dict[int, tuple[int, int]]:
    """Return (processor ticks, parent) by pid, of processes that are not ours."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in _PROC.glob("[0-9]*"):
        try:
            text = (entry / "stat").read_text()
        except OSError:  # gone meanwhile
            continue
        fields = text.rpartition(")")[2].split()
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))
    ours = _family(parents)
    return {
        pid: (count, parents[pid])
        for pid, count in ticks.items()
        if pid not in ours and pid != _KTHREADD and parents[pid] != _KTHREADD
    }


def _family(parents: dict[int, int]) -> set[int]:
    """Return this process, what it came from, and all that came from it.

    Ancestors wait for us, and are charged with what we used once we are reaped.
    """
    ours = set()
    pid = os.getpid()
    while pid > 0 and pid not in ours:
        ours.add(pid)
        pid = parents.get(pid, 0)
    for candidate in parents:
        line: list[int] = []
        pid = candidate
        while pid > 0 and pid not in line:
            if pid == os.getpid():
                ours.update(line)
                break
            line.append(pid)
            pid = parents.get(pid, 0)
    return ours


def _steal() -> int:
    try:
        line = (_PROC / "stat").read_text().splitlines()[0].split()
    except OSError:
        return 0
    return int(line[8]) if len(line) > 8 else 0
