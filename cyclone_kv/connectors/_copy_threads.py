# SPDX-License-Identifier: Apache-2.0
"""Threads that copy blocks while the scheduler goes on.

C1  Loads and stores have threads of their own: a load never waits behind stores.
C2  Work that was handed over runs to its end, whatever happens; `drain` and `close`
    wait for it and cancel nothing.
C3  The work of one kind starts in the order in which it was handed over.

The engine's batch calls release the GIL for the whole batch, so one thread for each
direction keeps a device busy; more of them let small jobs pass a large one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Literal

__all__ = ["CopyThreads"]

Work = Callable[[], None]


class CopyThreads:
    """A fixed number of threads for loads, and another for stores.

    Work must not raise: `on_fault` gets what it raises all the same.
    """

    def __init__(
        self,
        *,
        name: str,
        loads: int,
        stores: int,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._on_fault = on_fault
        self._idle = threading.Condition()
        self._pending = 0
        self._closed = False
        self._queues: dict[str, SimpleQueue[Work | None]] = {
            "load": SimpleQueue(),
            "store": SimpleQueue(),
        }
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(self._queues[kind],),
                name=f"{name}-{kind}-{index}",
                daemon=True,
            )
            for kind, count in (("load", loads), ("store", stores))
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, kind: Literal["load", "store"], work: Work) -> None:
        """Hand work over; return at once.  RuntimeError after `close`."""
        with self._idle:
            if self._closed:
                raise RuntimeError("the copy threads were closed")
            self._pending += 1
        self._queues[kind].put(work)

    def drain(self) -> None:
        """Wait until everything handed over so far has ended."""
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0)

    def close(self) -> None:
        """Let the work in hand end, then end the threads.  Idempotent."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: self._pending == 0)
        for queue in self._queues.values():
            for _ in self._threads:
                queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run(self, queue: SimpleQueue[Work | None]) -> None:
        while (work := queue.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._on_fault(error)
            finally:
                del work  # it may hold views of the engine's memory
                with self._idle:
                    self._pending -= 1
                    self._idle.notify_all()
