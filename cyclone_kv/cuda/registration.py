# SPDX-License-Identifier: Apache-2.0
"""The mapping of a volume, registered with the driver chunk by chunk.

    chunk of the mapping (1 GiB, no block crosses its ends)
      -> populated: in memory, errors of the device met by a call that reports them
      -> registered: pinned, read-only, for all devices
      -> selected: uploads pin blocks there and copy them by DMA

A chunk is selected only while it is registered. Undoing goes the other way: nothing is
selected, all copies have landed, then the chunks are unregistered, the last one first,
and only then may the mapping go. What the driver does not give back is kept mapped
until the process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import TYPE_CHECKING

from cyclone_kv.cuda import budget as budgets
from cyclone_kv.cuda import driver as codes
from cyclone_kv.cuda.runtime import log
from cyclone_kv.errors import CudaError, CudaUnavailableError, VolumeError

if TYPE_CHECKING:
    from cyclone_kv import _core
    from cyclone_kv.cuda.runtime import Device, Runtime

__all__ = ["ChunkTable", "Registration"]

_POPULATE_BYTES = 64 << 20  # between two looks at whether to stop
_PAUSE_SHARE = 0.1  # of the time that a chunk took: other users of the driver get in
_GONE = {codes.DEINITIALIZED, codes.CONTEXT_IS_DESTROYED, codes.NOT_REGISTERED}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """How much of a volume a device can read directly, and why not more.

    True in a condition when that is anything at all.
    """

    device: int | None
    """Ordinal; None where there was no device to ask."""
    volume_bytes: int
    """The data area, of all paths."""
    covered_bytes: int
    """Of them, registered."""
    budget_bytes: int
    """What could have been registered at most."""
    handles: int
    """Open caches of this process that asked for it."""
    finished: bool
    """False while a registration in the background goes on."""
    reason: str
    """Why not all of it is covered; empty when it is, or may still be."""

    @property
    def complete(self) -> bool:
        """True when the whole volume is registered."""
        return self.covered_bytes == self.volume_bytes

    def __bool__(self) -> bool:
        return self.covered_bytes > 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    index: int
    address: int
    nbytes: int


class ChunkTable:
    """The chunks of one volume that are registered, and the work that registers them.

    One thread at a time calls ``start``, ``stop`` and ``undo`` (the volume sees to it);
    the others may be called by any.
    """

    def __init__(self, runtime: Runtime, hold: _core.Hold, volume_bytes: int) -> None:
        self._runtime = runtime
        self._hold = hold
        self._volume_bytes = volume_bytes
        self._chunks: list[_Chunk] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.device: int | None = None
        self.budget_bytes = 0
        self.covered_bytes = 0
        self.finished = True
        self.reason = ""
        self.started = False
        """Asked for, with whatever success; a second request changes nothing."""

    def start(
        self, ordinal: int | None, budget: int | None, *, background: bool
    ) -> None:
        """Register what fits.  ConfigError for a device that is not there."""
        self._stop.clear()
        self.reason, self.device, self.budget_bytes = "", None, 0
        device = self._ask(ordinal, budget)
        self.started = True
        if device is None:
            return
        self.finished = False
        if not background:
            self._run(device, pause=False)
            return
        self._thread = threading.Thread(
            target=self._run,
            args=(device,),
            kwargs={"pause": True},
            name="cyclone_kv register_cuda",
            daemon=True,
        )
        self._thread.start()

    def _ask(self, ordinal: int | None, budget: int | None) -> Device | None:
        """Return the device if there is anything to register; else say why not."""
        try:
            self._runtime.driver()
            chosen = self._runtime.choose_device() if ordinal is None else ordinal
            device = self._runtime.device(chosen)
            self.device = chosen
            if not device.driver.registers_host_memory(device.number):
                self.reason = f"device {chosen} cannot register host memory"
            elif not device.driver.registers_read_only(device.number):
                self.reason = (
                    f"device {chosen}, or its driver, cannot register memory that is "
                    f"mapped for reading only"
                )
        except CudaUnavailableError as error:
            self.reason = str(error)
            return None
        except CudaError as error:
            self.reason = str(error)
            return None
        if self.reason:
            return None
        known = budgets.limits()
        if budget is None:
            self.budget_bytes = known.automatic_bytes
            if self._volume_bytes > self.budget_bytes:
                self.reason = (
                    f"the volume has {budgets.format_size(self._volume_bytes)}, and "
                    f"unasked at most {budgets.format_size(self.budget_bytes)} are "
                    f"pinned ({known}); "
                    f'register a part of it with register_cuda(budget="...")'
                )
                return None
            return device
        self.budget_bytes = min(budget, known.ceiling_bytes)
        if self.budget_bytes < min(budget, self._volume_bytes):
            self.reason = (
                f"the budget of {budgets.format_size(budget)} was cut to "
                f"{budgets.format_size(self.budget_bytes)}: {known}"
            )
        return device

    def _run(self, device: Device, *, pause: bool) -> None:
        try:
            for index in range(self._hold.chunks):
                begin = time.monotonic()
                if not self._register(device, index):
                    break
                if pause:
                    self._stop.wait(_PAUSE_SHARE * (time.monotonic() - begin))
        except Exception as error:  # of a thread: nobody else would hear of it
            self._refuse(f"registering ended: {error!r}")
            if not pause:
                raise
        finally:
            self.finished = True

    def _refuse(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason

    def _register(self, device: Device, index: int) -> bool:
        """Register one chunk; False ends the walk."""
        if self._stop.is_set():
            self._refuse("it was stopped before the end")
            return False
        try:
            address, nbytes = self._hold.chunk(index)
            if self.covered_bytes + nbytes > self.budget_bytes:
                self._refuse(
                    f"{budgets.format_size(self.covered_bytes)} of "
                    f"{budgets.format_size(self._volume_bytes)} fit the budget of "
                    f"{budgets.format_size(self.budget_bytes)}, in chunks of up to "
                    f"1 GiB"
                )
                return False
            for offset in range(0, nbytes, _POPULATE_BYTES):
                if self._stop.is_set():
                    self._refuse("it was stopped before the end")
                    return False
                some = min(_POPULATE_BYTES, nbytes - offset)
                self._hold.populate(index, offset, some)
        except VolumeError as error:
            self._refuse(str(error))
            return False
        chunk = _Chunk(index, address, nbytes)
        # On the list first: if an exception comes between, `undo` tries both.
        self._chunks.append(chunk)
        try:
            with device:
                device.driver.register(address, nbytes)
        except CudaError as error:
            self._chunks.pop()
            done = budgets.format_size(self.covered_bytes)
            self._refuse(f"after {done} the driver refused: {error}")
            # A chunk that somebody else has registered says nothing about the next.
            return error.code == codes.ALREADY_REGISTERED
        self.covered_bytes += nbytes
        self._hold.select(index, True)
        return True

    def request_stop(self) -> None:
        """Let the registration that goes on end early; does not wait."""
        self._stop.set()

    def stop(self) -> None:
        """Let a registration in the background end; waits for the chunk at work."""
        self._stop.set()
        self.join()

    def join(self) -> None:
        """Wait for a registration in the background."""
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None

    def deselect(self) -> None:
        """Let no further upload use what is registered."""
        for index in range(self._hold.chunks):
            self._hold.select(index, False)

    def undo(self) -> bool:
        """Unregister everything; False when the driver may still use some of it.

        Requires: stopped, nothing selected, all copies landed.
        """
        for device in self._runtime.devices():
            # Copies of the caller's own, out of views, end before their memory goes.
            with contextlib.suppress(CudaError), device:
                device.driver.synchronize()
        whole = True
        while self._chunks:
            chunk = self._chunks[-1]
            try:
                self._unregister(chunk)
            except CudaError as error:
                if error.code not in _GONE:
                    whole = False
                    log.warning(
                        "a chunk of the volume cannot be unregistered and stays "
                        "mapped until this process ends: %s",
                        error,
                    )
            self._chunks.pop()
        self.covered_bytes = 0
        self.started = False
        return whole

    def _unregister(self, chunk: _Chunk) -> None:
        devices = self._runtime.devices()
        if not devices:
            raise CudaError("no device is in use")
        with devices[0] as device:
            device.driver.unregister(chunk.address)

    def snapshot(self, handles: int) -> Registration:
        """Return how things are."""
        covered = self.covered_bytes
        return Registration(
            device=self.device,
            volume_bytes=self._volume_bytes,
            covered_bytes=covered,
            budget_bytes=self.budget_bytes,
            handles=handles,
            finished=self.finished,
            reason="" if covered == self._volume_bytes else self.reason,
        )

    def ends(self) -> list[int]:
        """Return the addresses where registered chunks end, in order."""
        return sorted(chunk.address + chunk.nbytes for chunk in list(self._chunks))
