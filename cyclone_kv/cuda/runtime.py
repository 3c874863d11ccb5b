# SPDX-License-Identifier: Apache-2.0
"""What a process has of CUDA: the driver, devices in use, and volumes that use them.

Everything begins with the first call that needs it and ends with the last volume that
is closed, or at exit: uploads are waited for, then registrations are undone, then the
pinned ring is freed, then the primary contexts are given back.

A forked child has none of it: CUDA does not work there, and what is registered is the
parent's. It starts with an empty ``Runtime`` of its own and never calls the driver on
behalf of what it inherited.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from cyclone_kv.cuda.closed import DeviceClosedError
from cyclone_kv.cuda.driver import Driver
from cyclone_kv.cuda.ring import Ring, Shape
from cyclone_kv.errors import ConfigError, CudaError, ForkedError

if TYPE_CHECKING:
    from cyclone_kv.cuda.volume import Volume

__all__ = ["Device", "Runtime", "current", "log"]

log = logging.getLogger("cyclone_kv")


class Device:
    """A device with its primary context retained, its events and its ring.

    ``with device:`` makes the context current in this thread, and puts back what was.
    ``close`` waits until nobody is inside. In a forked child nobody gets in.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.pid = os.getpid()
        self.ordinal = ordinal
        self.number = driver.device(ordinal)
        self.context = driver.retain_primary(self.number)
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False
        self._events: list[int] = []
        self._ring: Ring | None = None
        self._ring_refused = ""

    def __enter__(self) -> Device:
        if os.getpid() != self.pid:  # before the lock: the fork may have found it held
            raise ForkedError(
                "these copies were started before fork(); only the parent can wait for "
                "them, and CUDA does not work in this process"
            )
        with self._changed:
            if self._closed:
                raise DeviceClosedError("the device is no longer in use")
            self._inside += 1
        try:
            self.driver.push(self.context)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            with contextlib.suppress(CudaError):  # the context is gone: nothing to pop
                self.driver.pop()
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def take_event(self) -> int:
        """Return an event that nobody waits for.  Requires: inside ``with``."""
        with self._lock:
            if self._events:
                return self._events.pop()
        return self.driver.create_event()

    def give_event(self, event: int) -> None:
        """Give an event back that is done.

        It is not destroyed before ``close``: another thread may be about to ask for it.
        """
        with self._lock:
            self._events.append(event)

    def drop_event(self, event: int) -> None:
        """End an event of which nothing is known."""
        with contextlib.suppress(CudaError), self:
            self.driver.destroy_event(event)

    def ring(self, shape: Shape) -> Ring | None:
        """Return the pinned ring, made at the first question; None when refused."""
        with self._lock:
            if self._ring is None and not self._ring_refused:
                try:
                    self._ring = Ring(self, shape)
                except CudaError as error:
                    self._ring_refused = str(error)
                    log.warning(
                        "no pinned memory for uploads (%d MiB); they go through "
                        "pageable memory, at about half the speed: %s",
                        shape.nbytes >> 20,
                        error,
                    )
            return self._ring

    def drop_ring(self) -> None:
        """Free the ring.  Requires: nobody uses it."""
        with self._lock:
            ring, self._ring, self._ring_refused = self._ring, None, ""
        if ring is not None:
            ring.close()

    def close(self) -> None:
        """Give everything back.  Requires: everything has landed.

        Others may still ask whether it has.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._inside == 0)
        self.drop_ring()
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            self.drop_event(event)
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._inside == 0)
        with contextlib.suppress(CudaError):
            self.driver.release_primary(self.number)


class Runtime:
    """See above.  ``lock`` guards the lists; it is never held across a transfer."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.shape = Shape()
        self.volumes: dict[int, Volume] = {}
        self.orphans: collections.deque[tuple[Volume, object]] = collections.deque()
        """Handles that went without ``close``; appended by finalizers, which may run
        anywhere and must not wait."""
        self.kept: list[object] = []
        """What a device may still use, nobody knows: for ever."""
        self._driver: Driver | None = None
        self._devices: dict[int, Device] = {}
        atexit.register(self._at_exit)

    @property
    def loaded(self) -> bool:
        """True once the driver was loaded."""
        return self._driver is not None

    def driver(self) -> Driver:
        """Return the driver; loads it.  CudaUnavailableError without one."""
        with self.lock:
            if self._driver is None:
                self._driver = Driver()
            return self._driver

    def device(self, ordinal: int) -> Device:
        """Return a device in use; retains its primary context."""
        with self.lock:
            driver = self.driver()
            if not 0 <= ordinal < driver.count:
                raise ConfigError(
                    f"device is {ordinal}; this process sees {driver.count} devices, "
                    f"numbered from 0 (CUDA_VISIBLE_DEVICES may hide some)"
                )
            if ordinal not in self._devices:
                self._devices[ordinal] = Device(driver, ordinal)
            return self._devices[ordinal]

    def devices(self) -> list[Device]:
        """Return the devices in use."""
        with self.lock:
            return list(self._devices.values())

    def choose_device(self) -> int:
        """Return the ordinal that ``device=None`` means; makes no context."""
        driver = self.driver()
        current = driver.current_device()
        if current is not None:
            return current
        if driver.count == 1:
            return 0
        active = [
            ordinal
            for ordinal in range(driver.count)
            if driver.primary_active(driver.device(ordinal))
        ]
        if len(active) == 1:
            return active[0]
        raise ConfigError(
            f"device is None, and this thread has no current CUDA context while "
            f"{driver.count} devices are there; name one: register_cuda(device=0)"
        )

    def collect(self) -> None:
        """Detach handles that were forgotten.  Called where no lock is held."""
        while self.orphans:
            with contextlib.suppress(IndexError):
                volume, token = self.orphans.popleft()
                volume.detach(token)

    def release_devices(self) -> None:
        """Give devices back when no volume is left.  Requires: ``lock``."""
        if self.volumes:
            return
        for device in self._devices.values():
            device.close()
        self._devices.clear()

    def _at_exit(self) -> None:
        if os.getpid() != self.pid:
            return
        self.collect()
        with self.lock:
            volumes = list(self.volumes.values())
        # The interpreter ends: whatever is still open will not be closed by anybody.
        for volume in volumes:
            volume.hurry(None)
            volume.end(timeout_s=5.0)


_lock = threading.Lock()
_runtime: Runtime | None = None
_inherited: list[Runtime] = []


def current() -> Runtime:
    """Return the one of this process."""
    global _runtime
    with _lock:
        if _runtime is None:
            _runtime = Runtime()
        return _runtime


def _forget() -> None:
    """In a forked child: keep what was inherited from being finalized, start anew."""
    global _lock, _runtime
    _lock = threading.Lock()
    if _runtime is not None:
        _inherited.append(_runtime)
        _runtime = None


os.register_at_fork(after_in_child=_forget)
