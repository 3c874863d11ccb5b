# SPDX-License-Identifier: Apache-2.0
"""The process that watches a life of the region: it is never killed before its end.

It answers one line of JSON for each line:

    inspect    reads every block there could be; what it found, and what is listed
    list       what is stored: for each identity the newest block
    sync       Cache.sync
    settle     when nobody else is left: verify, and the events folded against the list
    quit       closes and ends

Meanwhile it follows the events.
"""

from __future__ import annotations

import json
import select
import socket
import time
from pathlib import Path
from typing import Any

from night.oracle import Oracle
from night.plan import CLEARED, Plan
from night.worker import note_fault

from cyclone_kv import Cache, OpenTimeoutError

__all__ = ["Watch"]

Listed = dict[str, list[int]]
"""Identity (tag and key, hexadecimal): path index, offset, bytes, sequence."""


class Watch:
    """The watching process; `run` serves until it is told to quit."""

    def __init__(
        self, plan: Plan, folder: Path, life: dict[str, Any], line: socket.socket
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.line = line
        self.me = plan.processes
        self.oracle = Oracle(folder / "oracle", plan)
        paths = plan.paths(folder)
        began = time.monotonic_ns()
        self.caches: dict[str, Cache] = {}
        for space in ("", CLEARED, "chains"):
            self.caches[space] = Cache.open(
                paths if len(paths) > 1 else paths[0],
                plan.config({**life, "open_timeout": 60.0}),
                namespace=space,
            )
        took = time.monotonic_ns() - began
        self.oracle.waits[self.me, 2] = max(int(self.oracle.waits[self.me, 2]), took)
        self.cache = self.caches[""]
        self.since = self.cache.events(None).last
        self.present = set(self.listed())
        self.failed_writes = 0

    def fault(self, kind: str, text: str) -> None:
        note_fault(self.folder, self.oracle, self.me, kind, text)

    def count(self, name: str, amount: int = 1) -> None:
        self.oracle.count(self.me, name, amount)

    def run(self) -> None:
        answers = {
            "inspect": self.inspect,
            "list": self.listed,
            "sync": self.cache.sync,
            "settle": self.settle,
        }
        reader = self.line.makefile("r")
        while True:
            if not select.select([self.line], [], [], 0.01)[0]:
                self.follow()
                continue
            command = reader.readline().strip()
            if command in ("", "quit"):
                break
            answer = answers[command]()
            failed = self.cache.stats().volume.puts_io_failed
            self.count("failed_writes", failed - self.failed_writes)
            self.failed_writes = failed
            self.line.sendall(json.dumps(answer).encode() + b"\n")
        for cache in self.caches.values():
            cache.close()

    # ---- events ---------------------------------------------------------------------

    def follow(self) -> int:
        events = self.cache.events(self.since)
        self.since = events.last
        if events.lost:  # begins anew, like a router
            self.count("resyncs")
            self.present = set(self.listed())
            return len(events.items) + events.lost
        for event in events.items:
            identity = (event.namespace_tag + event.key).hex()
            if event.kind == "stored":
                self.present.add(identity)
            elif event.kind == "removed":
                self.present.discard(identity)
            else:
                tag = event.namespace_tag.hex()
                self.present = {one for one in self.present if one[:32] != tag}
        self.count("events", len(events.items))
        return len(events.items)

    def settle(self) -> dict[str, Any]:
        report = self.cache.verify()  # sweeps what the dead left
        if report.structure_faults or report.unreadable:
            self.fault("other", f"settled: {report}")
        while self.follow():
            pass
        listed = set(self.listed())
        if self.present != listed:
            more, less = self.present - listed, listed - self.present
            self.fault(
                "other",
                f"events fold to {len(more)} that are gone and lack {len(less)}: "
                f"{sorted(more)[:2]} {sorted(less)[:2]}",
            )
        stats = self.cache.stats().volume
        if stats.processes != 1 or stats.pinned_entries != 0:
            self.fault("other", f"settled, and in use: {stats!r}")
        return {
            "damaged": report.damaged_payloads,
            "corrupt": stats.corrupt,
        }

    # ---- what is stored -------------------------------------------------------------

    def listed(self) -> Listed:
        newest: Listed = {}
        for entry in self.cache.ls():
            identity = (entry.namespace_tag + entry.key).hex()
            place = [entry.path_index, entry.offset, entry.nbytes, entry.sequence]
            if identity not in newest or newest[identity][-1] < entry.sequence:
                newest[identity] = place
        return newest

    def inspect(self) -> dict[str, Any]:
        """After a restart: all that is there, byte by byte."""
        before = self.listed()
        corrupt = self.cache.stats().volume.corrupt
        versions = [
            [self._own(process, number) for number in range(self.plan.keys)]
            for process in range(self.plan.processes)
        ]
        chains = self.caches[self.plan.namespace_of_chains]
        for chain in range(self.plan.chains):
            for number in range(self.plan.chain_blocks):
                entry = chains.read(self.plan.chain_key(chain, number))
                if entry is None:
                    continue
                with entry:
                    if entry.view != self.plan.chain_payload(chain, number):
                        text = f"chain {chain} block {number} after a restart"
                        self.fault("wrong", text)
        report = self.cache.verify()
        if not report.ok:
            self.fault("other", f"after a restart: {report}")
        after = self.listed()
        count = self.cache.stats().volume.entries
        if count != len(after):
            self.fault("other", f"{count} entries, {len(after)} are listed")
        return {
            "before": before,
            "after": after,
            "versions": versions,
            "corrupt": self.cache.stats().volume.corrupt - corrupt,
        }

    def _own(self, process: int, number: int) -> int:
        """Reads a block with its header: one of the two may be torn."""
        cache = self.caches[self.plan.space(number)]
        entry = cache.read(self.plan.key(process, number))
        if entry is None:
            return 0
        with entry:
            version = self.plan.version_of(entry.view, process, number)
            header = entry.header
        if version < 0 or header != self.plan.header(process, number, version):
            self.fault("wrong", f"{process}/{number} after a restart")
        return max(version, 0)


def watch(plan: Plan, folder: Path, life: dict[str, Any], line: socket.socket) -> None:
    """Opens, however long others hold it up, says so, and serves."""
    while True:
        try:
            watching = Watch(plan, folder, life, line)
            break
        except OpenTimeoutError:
            continue
    line.sendall(b'"ready"\n')
    watching.run()
