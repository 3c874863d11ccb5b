# SPDX-License-Identifier: Apache-2.0
"""What a volume may and must have after a cut, from the marks of a stream.

The rules (docs/durability.md), for one key, whose operations come from one process:

  R1  The *base* is what the key was when the last good sync before the cut began, or
      when the last clear that returned began.
  R2  What comes back is the base, or a value of a later put that had begun: whole.
      Never a value from before the base.
  R3  If the base is a block, and nothing was done to the key later (no put, removal or
      clear began), and the engine did not say that it evicted it, it is there.
  R4  A later put, removal or clear of the key may have taken effect, may not have, and
      may have cost the key its block.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crash.blobs import key_of
from power.stream import Event

__all__ = ["Expected", "Oracle"]

Value = tuple[int, int]  # version, length
NEVER = 1 << 60


@dataclass
class Expected:
    values: set[Value]
    must: bool


@dataclass
class Operation:
    kind: str  # put, remove, clear, was
    begin: int
    end: int = NEVER
    ok: bool = False
    values: set[Value] = field(default_factory=set)
    must: bool = True


@dataclass
class Oracle:
    """All that the marks of one life say.  Positions are those of the stream."""

    keys: dict[str, list[Operation]] = field(default_factory=dict)
    clears: list[Operation] = field(default_factory=list)
    syncs: list[tuple[int, int]] = field(default_factory=list)  # end, begin
    evicted: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    lost: list[tuple[int, int]] = field(default_factory=list)  # windows of lost events
    opened: int = NEVER  # when the first open returned

    @classmethod
    def read(
        cls, events: Sequence[Event], before: dict[str, Expected] | None = None
    ) -> Oracle:
        oracle = cls()
        for key, expected in (before or {}).items():
            first = Operation("was", -2, -1, True, set(expected.values), expected.must)
            oracle.keys[key] = [first]
        names = {key_of(key).hex(): key for key in oracle.keys}
        open_ops: dict[tuple[str, str, str | None], Operation] = {}
        looked: dict[str, int] = {}
        for at, event in enumerate(events):
            if event.kind == "mark":
                oracle._take(at, event.mark, open_ops, looked, names)
        for name in list(oracle.evicted):  # the events name keys by their hash
            oracle.evicted[names.get(name, name)] = oracle.evicted.pop(name)
        return oracle

    def _take(
        self,
        at: int,
        mark: dict[str, Any],
        open_ops: dict[tuple[str, str, str | None], Operation],
        looked: dict[str, int],
        names: dict[str, str],
    ) -> None:
        who = mark["who"]
        if mark["what"] == "seen":
            window = (looked.get(who, -1), at)
            for name in mark["removed"]:
                self.evicted.setdefault(name, []).append(window)
            if mark["lost"]:
                self.lost.append(window)
            looked[who] = at
            return
        if mark["what"] == "was":
            value = mark["value"]
            values = {tuple(value)} if value else set()
            seen = Operation("was", at, at, True, values, bool(value))
            self.keys.setdefault(mark["key"], []).append(seen)
            return
        op, key = mark["op"], mark["key"]
        if mark["what"] == "begin":
            operation = Operation(op, at)
            if key is not None:
                names[key_of(key).hex()] = key
                if op == "put":
                    operation.values = {tuple(mark["value"])}
                self.keys.setdefault(key, []).append(operation)
            elif op == "clear":
                self.clears.append(operation)
            open_ops[who, op, key] = operation
            return
        operation = open_ops.pop((who, op, key))
        operation.end, operation.ok = at, mark["ok"]
        if op == "sync" and mark["ok"]:
            self.syncs.append((at, operation.begin))
        elif op == "open":
            self.opened = min(self.opened, at)

    # ---- at a cut ------------------------------------------------------------------

    def expected(self, cut: int) -> dict[str, Expected]:
        """For each key, when the power goes after the first `cut` events."""
        done = bisect.bisect_left(self.syncs, (cut, -1))
        synced = max((begin for _, begin in self.syncs[:done]), default=-1)
        return {key: self._expected(key, cut, synced) for key in self.keys}

    def _expected(self, key: str, cut: int, synced: int) -> Expected:
        operations = [each for each in self.keys[key] if each.begin < cut]
        operations += [each for each in self.clears if each.begin < cut]
        operations.sort(key=lambda each: each.begin)
        base = -1
        for at, each in enumerate(operations):
            if each.end < synced or (each.kind == "clear" and each.end < cut):
                base = at
        values, must = self._outcome(operations, base)
        for each in operations[base + 1 :]:
            values |= each.values
            must = False
        # A put that was under way when a clear began may be counted to either side.
        if base >= 0 and operations[base].kind == "clear":
            for each in operations[:base]:
                if each.end > operations[base].begin:
                    values |= each.values
        if must:
            began = operations[base].begin
            windows = self.evicted.get(key, []) + self.lost
            must = not any(low < cut and high > began for low, high in windows)
        return Expected(values, must)

    def _outcome(
        self, operations: Sequence[Operation], at: int
    ) -> tuple[set[Value], bool]:
        """What the key is after operation `at`, and whether it surely is."""
        if at < 0:
            return set(), False
        each = operations[at]
        if each.kind in ("remove", "clear"):
            return set(), False
        overlapped = any(
            other.kind == "clear" and other.begin < each.end and other.end > each.begin
            for other in operations
        )
        if each.ok and not overlapped:
            return set(each.values), each.must and bool(each.values)
        before, _ = self._outcome(operations, at - 1)
        return before | each.values, False
