# SPDX-License-Identifier: Apache-2.0
"""What is known about the blocks, in mapped memory that the engine does not know.

Each process alone writes what belongs to its own blocks:

    pending[p][k]    raised before a put of that version begins
    floor[p][k]      no version below may be seen: raised when a put or remove returned
    present[p][k]    the version that a put stored last; 0 from before a remove on
    anchor[p][k]     a version that its owner has pinned, 0 for none
    cleared[c][p][k] no version up to it may be seen: raised when a clear of c returned

A reader looks at floor, cleared, present and anchor before, at pending, present and
anchor after its read.  A version outside of [floor, pending] is stale or was never
stored.  A miss is a loss if the block was pinned all the time, or was present all the
time on a volume that does not evict.  A process that dies between two of these stores
leaves them too cautious, never too strict.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from night.plan import ANCHORS, Plan

__all__ = ["CLEARERS", "COUNTERS", "WAITS", "Oracle"]

CLEARERS = 2
COUNTERS = (
    "operations",
    "puts",
    "refused",
    "hits",
    "pinned_hits",  # of blocks that were pinned all the time
    "misses",
    "bytes_checked",
    "events",
    "resyncs",  # events were lost, and the watch began anew with what is listed
    "opens",
    "open_timeouts",
    "failed_writes",  # puts that met a planted error of a write
    "wrong",  # bytes that are not those of the block
    "stale",  # versions that were replaced, removed, cleared, or never stored
    "lost",  # acknowledged, not evicted, and missing
    "other",  # anything else that must not be
)
WAITS = ("call", "sync", "open")  # a call of data; sync and verify; open and close


class Oracle:
    """The file is made by whoever comes first; all zeros is a good beginning."""

    def __init__(self, path: Path, plan: Plan) -> None:
        workers, keys = plan.processes, plan.keys
        everybody = workers + 1  # the last one is the watch
        shapes = {
            "pending": (workers, keys),
            "floor": (workers, keys),
            "present": (workers, keys),
            "cleared": (CLEARERS, workers, keys),
            "anchor": (workers, ANCHORS),
            "spent": (workers,),
            "stops": (everybody,),
            "beat": (everybody,),
            "counters": (everybody, len(COUNTERS)),
            "waits": (everybody, len(WAITS)),
            "end": (1,),
            "unsynced": (1,),
        }
        words = sum(int(np.prod(shape)) for shape in shapes.values())
        with path.open("ab+") as file:
            file.truncate(8 * words)
            self._map = mmap.mmap(file.fileno(), 8 * words)
        memory = np.frombuffer(self._map, dtype=np.uint64)
        arrays: dict[str, np.ndarray] = {}
        at = 0
        for name, shape in shapes.items():
            count = int(np.prod(shape))
            arrays[name] = memory[at : at + count].reshape(shape)
            at += count
        self.pending = arrays["pending"]
        self.floor = arrays["floor"]
        self.present = arrays["present"]
        self.cleared = arrays["cleared"]
        self.anchor = arrays["anchor"]
        self.spent = arrays["spent"]
        self.stops = arrays["stops"]
        self.beat = arrays["beat"]
        self.counters = arrays["counters"]
        self.waits = arrays["waits"]
        self.end = arrays["end"]
        """Not 0: workers end by themselves."""
        self.unsynced = arrays["unsynced"]
        """Not 0: nobody syncs, since an image of the last sync was taken."""

    def lowest(self, process: int, number: int) -> int:
        """The lowest version that a read that begins now may see."""
        cleared = int(self.cleared[:, process, number].max())
        return max(int(self.floor[process, number]), cleared + 1)

    def count(self, who: int, name: str, amount: int = 1) -> None:
        """Adds to a counter of one process."""
        self.counters[who, COUNTERS.index(name)] += np.uint64(amount)

    def counts(self) -> dict[str, int]:
        """The counters of all processes together."""
        totals = self.counters.sum(axis=0)
        return {name: int(totals[at]) for at, name in enumerate(COUNTERS)}

    def longest(self) -> dict[str, float]:
        """The longest wait of each kind, in seconds."""
        longest = self.waits.max(axis=0)
        return {name: int(longest[at]) / 1e9 for at, name in enumerate(WAITS)}
