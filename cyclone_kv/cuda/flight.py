# SPDX-License-Identifier: Apache-2.0
r"""Copies under way, and what must not go before they are done.

    open ----(copies are enqueued)----> recorded ----(the event is done)----> landed
      \_________________________(an error: the stream is waited for)_________/

A flight is on the list of its volume from before its first copy until it has landed, so
that pins outlive the DMA whatever becomes of the objects of the caller, and whatever
exception comes between two steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from cyclone_kv.cuda.closed import DeviceClosedError
from cyclone_kv.errors import CudaError

if TYPE_CHECKING:
    from cyclone_kv.cuda.runtime import Device

__all__ = ["Flight", "Flights"]


class Flight:
    """Some copies, what they need, and the event that ends them.  Any thread."""

    __slots__ = ("_after", "_device", "_event", "_keep", "_lock", "landed", "stuck")

    def __init__(
        self, device: Device, keep: list[object], after: Callable[[], None] | None
    ) -> None:
        self._device = device
        self._event = 0  # 0 while open
        self._keep: list[object] | None = keep  # leases, buffers, capsules
        self._after = after
        self._lock = threading.Lock()
        self.landed = False
        self.stuck = False
        """Nobody knows whether the copies are done: what they need is kept for ever."""

    def recorded(self, event: int) -> None:
        """Say which event comes after the last copy; the flight owns it from now on."""
        self._event = event

    @property
    def open(self) -> bool:
        """True before ``recorded``."""
        return self._event == 0 and not self.landed

    def poll(self) -> bool:
        """Tell whether the copies are done; lands the flight then."""
        event = self._event
        if self.landed:
            return True
        if event == 0 or self.stuck:
            return False
        try:
            with self._device as device:
                if self.landed or device.driver.event_done(event):
                    self.land()  # inside: the device waits for what this gives back
        except DeviceClosedError:
            return True
        return self.landed

    def wait(self) -> None:
        """Wait for the copies.  A flight must not be open."""
        event = self._event
        if self.landed:
            return
        with contextlib.suppress(DeviceClosedError), self._device as device:
            if not self.landed:
                device.driver.wait_event(event)
            self.land()

    def settle(self, stream: int | None) -> None:
        """Wait for whatever was enqueued, by other means than an event.

        Lands the flight; or leaves it stuck, when even that fails.
        """
        if self.landed or self.stuck:
            return
        waits = [self._device.driver.synchronize]
        if stream is not None:
            waits.insert(0, lambda: self._device.driver.synchronize_stream(stream))
        for wait in waits:
            try:
                with self._device:
                    wait()
                    self.land()
            except CudaError:
                continue
            return
        self.stuck = True

    def land(self) -> None:
        """Give back what the copies needed.  Idempotent."""
        with self._lock:
            keep, self._keep = self._keep, None
            after, self._after = self._after, None
            event, self._event = self._event, 0
            self.landed = True
        if event != 0:
            self._device.give_event(event)
        if keep is not None:
            keep.clear()
        if after is not None:
            after()


class Flights:
    """The flights of one volume in the order of their start.  Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: list[Flight] = []

    def start(
        self,
        device: Device,
        keep: list[object],
        after: Callable[[], None] | None = None,
    ) -> Flight:
        """Return a new, open flight."""
        flight = Flight(device, keep, after)
        with self._lock:
            self._flights.append(flight)
        return flight

    def reap(self) -> None:
        """Land what is done; does not wait and does not raise."""
        with self._lock:
            flights = list(self._flights)
        for flight in flights:
            try:
                flight.poll()
            except CudaError:
                continue  # whoever waits for it is told
        self._forget_landed()

    def drain(self) -> bool:
        """Wait for all; False when some are stuck.

        Requires: nobody else starts one or is between two steps of one.
        """
        with self._lock:
            flights = list(self._flights)
        for flight in flights:
            if flight.stuck:
                continue
            try:
                if flight.open:
                    flight.settle(None)
                else:
                    flight.wait()
            except CudaError:
                flight.settle(None)
        self._forget_landed()
        with self._lock:
            return not self._flights

    def _forget_landed(self) -> None:
        with self._lock:
            self._flights = [f for f in self._flights if not f.landed]

    def __len__(self) -> int:
        with self._lock:
            return len(self._flights)
