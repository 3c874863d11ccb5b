# SPDX-License-Identifier: Apache-2.0
"""A volume of this process as devices see it, shared by all its handles."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cyclone_kv.cuda.flight import Flights
from cyclone_kv.cuda.gate import Gate
from cyclone_kv.cuda.registration import ChunkTable, Registration
from cyclone_kv.cuda.runtime import Runtime, current, log
from cyclone_kv.errors import ClosedError, ForkedError

if TYPE_CHECKING:
    from cyclone_kv import _core
    from cyclone_kv.cache import Cache

__all__ = ["Attachment", "Volume", "attach"]


class Volume:
    """Hold, registration and flights of a volume.

    It lives while a handle is attached. ``hold`` is None for a cache that was opened
    for reading only: there are no pins, so nothing is ever copied from its mapping.
    """

    def __init__(
        self, owner: Runtime, identity: int, hold: _core.Hold | None, nbytes: int
    ) -> None:
        self.runtime = owner
        self.flights = Flights()
        self.hold = hold
        self.table = None if hold is None else ChunkTable(owner, hold, nbytes)
        self._identity = identity
        self._nbytes = nbytes
        self._gate = Gate()
        self._work = threading.Lock()  # of register and unregister
        self._tokens: set[object] = set()  # attached handles; with runtime.lock
        self._askers: set[object] = set()  # of them, those that registered
        self._whole = True  # everything that was undone could be
        self._ended = False
        self.ending = False
        """No handle is left; with runtime.lock."""

    # ---- transfers -------------------------------------------------------------------

    @contextlib.contextmanager
    def transfer(self) -> Iterator[None]:
        """Keep registrations as they are while pins are taken and copies start."""
        with self._gate.shared():
            yield

    # ---- registration ----------------------------------------------------------------

    def register(
        self, token: object, device: int | None, budget: int | None, *, background: bool
    ) -> Registration:
        """Register once, however many ask."""
        if self.table is None:
            return Registration(
                device=device,
                volume_bytes=self._nbytes,
                covered_bytes=0,
                budget_bytes=0,
                handles=0,
                finished=True,
                reason='the cache was opened with mode="r", which takes no pins; '
                "uploads go through the pinned ring",
            )
        with self._work:
            if not self.table.started or (
                self.table.finished and self.table.covered_bytes == 0
            ):
                self.table.start(device, budget, background=background)
            elif not background:
                self.table.join()
            with self.runtime.lock:
                self._askers.add(token)
        return self.snapshot()

    def snapshot(self) -> Registration:
        """Return how far it is.  Requires: not for reading only."""
        assert self.table is not None
        return self.table.snapshot(len(self._askers))

    def unregister(self, token: object) -> None:
        """Undo the registration when nobody else asked for it."""
        if self.table is None:
            return
        with self._work:
            with self.runtime.lock:
                self._askers.discard(token)
                last = not self._askers
            if last and self.table.started:
                self._take_apart(None)

    def _take_apart(self, timeout_s: float | None) -> None:
        """Wait for copies and undo the registration."""
        if self.table is not None:
            self.table.stop()
            self.table.deselect()
        with self._gate.alone(timeout_s) as alone:
            if not alone:
                self._whole = False
                return
            if not self.flights.drain():
                self._whole = False
                self.runtime.kept.append(self.flights)
                self.flights = Flights()
            if self.table is not None and not self.table.undo():
                self._whole = False

    # ---- life ------------------------------------------------------------------------

    def attach(self, token: object) -> None:
        """Add a handle.  Requires: runtime.lock."""
        self._tokens.add(token)

    def detach(self, token: object) -> None:
        """Take a handle away; the last one ends the volume.  Idempotent."""
        self.unregister(token)
        with self.runtime.lock:
            if token not in self._tokens:
                return
            self._tokens.discard(token)
            if self._tokens:
                return
            self.ending = True
        self.end(timeout_s=None)

    def hurry(self, token: object | None) -> None:
        """Let a registration end early that only this handle, or nobody, waits for."""
        if self.table is not None and self._tokens <= {token}:
            self.table.request_stop()

    def wait_for_end(self) -> None:
        """Wait for ``end`` in another thread."""
        with self._work:
            pass

    def end(self, timeout_s: float | None) -> None:
        """Wait for copies, undo the registration, let the mapping go.  Idempotent."""
        with self._work:
            if self._ended:
                return
            self._ended = True
            self._take_apart(timeout_s)
            if self.hold is not None:
                if self._whole:
                    self.hold.release()
                else:
                    log.warning(
                        "the mapping of a volume stays in place until this process "
                        "ends, since a device may still use it"
                    )
                    self.hold.keep()
            if not self._whole:
                self.runtime.kept.append(self)
        with self.runtime.lock:
            self.runtime.volumes.pop(self._identity, None)
            if self._whole:
                self.runtime.release_devices()


class Attachment:
    """What a cache has of CUDA: made by its first call that needs it."""

    def __init__(self, cache: Cache, volume: Volume) -> None:
        self._volume = volume
        self._token = object()
        self._gate = Gate()
        self._closed = False
        volume.attach(self._token)
        orphans = volume.runtime.orphans
        self._finalizer = weakref.finalize(cache, orphans.append, (volume, self._token))
        self._finalizer.atexit = False

    @contextlib.contextmanager
    def use(self) -> Iterator[Volume]:
        """Be inside a call: ``close`` waits for it."""
        self.check_process()
        self._volume.runtime.collect()
        with self._gate.shared():
            if self._closed:
                raise ClosedError("the cache is closed")
            yield self._volume

    def check_process(self) -> None:
        """Refuse in a forked child."""
        if self.inherited:
            raise ForkedError(
                "this cache was opened before fork(); open it again in the child "
                "process (and note that CUDA does not work there unless the parent "
                "never used it)"
            )

    @property
    def inherited(self) -> bool:
        """True in a forked child."""
        return self._volume.runtime.pid != os.getpid()

    def register(
        self, device: int | None, budget: int | None, *, background: bool
    ) -> Registration:
        """See ``Volume.register``."""
        with self.use() as volume:
            return volume.register(self._token, device, budget, background=background)

    def unregister(self) -> None:
        """See ``Volume.unregister``."""
        with self.use() as volume:
            volume.unregister(self._token)

    def registration(self) -> Registration | None:
        """Return how far it is; None where nobody asked."""
        table = self._volume.table
        if self.inherited or table is None or not table.started:
            return None
        return self._volume.snapshot()

    def close(self) -> None:
        """Wait for calls in flight and detach.  Does nothing in a forked child."""
        if self.inherited:
            return
        self._volume.hurry(self._token)
        with self._gate.alone():
            if self._closed:
                return
            self._closed = True
        self._finalizer.detach()
        self._volume.detach(self._token)


def attach(cache: Cache) -> Attachment:
    """Return the attachment of an open cache; makes it at the first call."""
    owner = current()
    owner.collect()
    nbytes = sum(path.data_bytes for path in cache.info().paths if path.present)
    hold = cache._hold() if cache.mode == "rw" else None
    identity = -id(cache) if hold is None else hold.volume
    try:
        while True:
            with owner.lock:
                if cache._cuda is not None:  # another thread was first
                    return cache._cuda
                volume = owner.volumes.get(identity)
                if volume is None:
                    volume = Volume(owner, identity, hold, nbytes)
                    owner.volumes[identity] = volume
                    hold = None
                if not volume.ending:
                    cache._cuda = Attachment(cache, volume)
                    return cache._cuda
            volume.wait_for_end()
    finally:
        if hold is not None:
            hold.release()  # the volume has one
