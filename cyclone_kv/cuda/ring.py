# SPDX-License-Identifier: Apache-2.0
"""Pinned buffers between the reads of the engine and the copies of the device.

One per device and process, shared by all threads. A slot is free, or filled by a
thread, or the source of copies under way; the event of those copies frees it, and
nothing else does, so a slot is never written to while a device may still read it. After
an error that leaves that unknown it is lost.

Who wants slots waits in a queue and holds none meanwhile, so nobody waits for himself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING

from cyclone_kv.errors import CudaError

if TYPE_CHECKING:
    from cyclone_kv.cuda.flight import Flight
    from cyclone_kv.cuda.runtime import Device

__all__ = ["Ring", "Shape", "Slot"]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How large the ring is.

    The default is chosen without a measurement: none of the engine's has run on a
    device yet. It is large enough that a lot is worth a direct read, and four slots let
    one be read while another is copied. ``bench/gpu_upload`` compares shapes.
    """

    slots: int = 4
    slot_bytes: int = 32 << 20

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.slots * self.slot_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A pinned buffer."""

    address: int
    view: memoryview


class Ring:
    """See above."""

    def __init__(self, device: Device, shape: Shape) -> None:
        self._device = device
        self.shape = shape
        with device:
            self._address = device.driver.allocate_host(shape.nbytes)
        view = device.driver.host_view(self._address, shape.nbytes)
        size = shape.slot_bytes
        self._free = [
            Slot(self._address + i * size, view[i * size : (i + 1) * size])
            for i in range(shape.slots)
        ]
        self._changed = threading.Condition()
        self._queue = threading.Lock()
        self._busy: list[Flight] = []
        self._lost = 0

    def take(self, count: int) -> list[Slot]:
        """Return free slots; waits for them.

        CudaError when copies under way fail, or when so many are lost that ``count``
        will never be free.
        """
        with self._queue:
            while True:
                with self._changed:
                    left = self.shape.slots - self._lost
                if left < count:
                    raise CudaError(
                        f"{self._lost} of {self.shape.slots} pinned buffers are lost: "
                        f"after an error nobody knows whether copies still use them; "
                        f"{count} are needed and {left} are left. Restart the process"
                    )
                slots = self._take_free(count)
                if slots:
                    return slots
                with self._changed:
                    self._busy = [each for each in self._busy if not each.landed]
                    busy = list(self._busy)
                    if not busy and len(self._free) < count:
                        # Others are filling theirs: they notify, or their flights
                        # appear.
                        self._changed.wait(0.01)
                        continue
                if not any([flight.poll() for flight in busy]):
                    busy[0].wait()

    def try_take(self, count: int) -> list[Slot]:
        """Return free slots, or none; does not wait."""
        with self._changed:
            busy = list(self._busy)
        for flight in busy:
            flight.poll()
        return self._take_free(count)

    def _take_free(self, count: int) -> list[Slot]:
        with self._changed:
            if len(self._free) < count:
                return []
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give(self, slots: list[Slot]) -> None:
        """Give slots back that no copy uses any more."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def lose(self, slots: list[Slot]) -> None:
        """Never use slots again: copies of which nothing is known may be in them."""
        with self._changed:
            self._lost += len(slots)
            self._changed.notify_all()

    def flying(self, flight: Flight) -> None:
        """Say that slots will come back when this flight lands."""
        with self._changed:
            self._busy = [each for each in self._busy if not each.landed]
            self._busy.append(flight)
            self._changed.notify_all()

    def close(self) -> None:
        """Free the memory, unless copies are stuck in it.

        Requires: nobody uses the ring, and the flights of all volumes are drained.
        """
        with self._changed:
            whole = len(self._free) == self.shape.slots
            self._free = []
        if whole:
            with contextlib.suppress(CudaError), self._device:
                self._device.driver.free_host(self._address)
