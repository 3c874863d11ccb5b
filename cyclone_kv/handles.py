# SPDX-License-Identifier: Apache-2.0
"""Things that hold a block: Entry (read), Slot (being produced), Place (on disk).

Each is a context manager with an idempotent end. None may be used by several threads at
the same time; the memory behind them may.
"""

from __future__ import annotations

import warnings
from types import TracebackType

from cyclone_kv import _core

__all__ = ["Entry", "Place", "Slot"]


class Entry:
    """A block that was found, pinned until the entry and all its views are gone.

    Made by ``Cache.read``.  Leaving the ``with`` block releases the pin; that is a
    ``BufferError`` while a slice or an array made from ``view`` is in use.
    """

    __slots__ = ("_lease", "_view")

    def __init__(self, lease: _core.Lease) -> None:
        self._lease = lease
        self._view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        """The payload: read-only bytes that never change."""
        if self._view is None:
            self._view = memoryview(self._lease)
        return self._view

    @property
    def header(self) -> bytes:
        """The user header, a copy; empty when none was stored."""
        return self._lease.header

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self._lease.nbytes

    @property
    def released(self) -> bool:
        """True after ``release``."""
        return self._lease.released

    def ok(self) -> bool:
        """Return False once a page of the view had to be replaced by zeros.

        That happens only with ``CacheConfig.sigbus_guard``, when the device cannot
        deliver a page.  Ask after the bytes were used.
        """
        return self._lease.ok()

    def release(self) -> None:
        """Give the pin back.  Idempotent.

        Raises ``BufferError`` while slices or arrays made from ``view`` are in use; the
        pin then lasts as long as they do, and ``release`` may be tried again.
        """
        if self._view is not None:
            try:
                self._view.release()
            except BufferError as error:
                raise BufferError(
                    "the entry cannot be released: arrays made from its view are in "
                    "use (delete them before)"
                ) from error
            self._view = None  # a new one while a slice keeps the pin
        self._lease.release()

    def __len__(self) -> int:
        return self._lease.nbytes

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Entry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.release()
        except BufferError:
            # The frames of the error that is being raised may hold views; do not hide
            # it.  The pin ends with them.
            if kind is None:
                raise

    def __reduce__(self) -> str:
        raise TypeError("an Entry cannot be pickled or copied; send bytes(entry.view)")

    def __repr__(self) -> str:
        if self._lease.released:
            return "<Entry, released>"
        return f"<Entry of {self._lease.nbytes} bytes>"


class Slot:
    """A block that is produced in place.

    Made by ``Cache.reserve``.  Leaving the ``with`` block commits, an exception in it
    aborts. When the engine refused the reservation, ``view`` is scratch memory, so that
    the producer runs unchanged, and ``stored`` is False in the end.
    """

    __slots__ = ("_buffer", "_overwrite", "_stored", "_view")

    def __init__(
        self,
        reservation: _core.Reservation | None,
        nbytes: int,
        *,
        overwrite: bool,
        present: bool,
    ) -> None:
        self._buffer: _core.Reservation | bytearray | None = reservation
        if reservation is None:
            self._buffer = bytearray(nbytes)
        self._overwrite = overwrite
        self._stored = present
        self._view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        """The memory to fill: writable, zeroed, as long as was asked for."""
        if self._view is None:
            if self._buffer is None:
                raise ValueError("the reservation has ended")
            self._view = memoryview(self._buffer)
        return self._view

    @property
    def stored(self) -> bool:
        """True after a commit that stored the block, or found it stored already."""
        return self._stored and self._buffer is None

    def commit(self) -> bool:
        """Store the block; return whether every process can now find it.

        Raises ``BufferError`` and stores nothing while slices or arrays made from
        ``view`` are in use: whoever has one could still change the bytes.
        """
        buffer = self._buffer
        if buffer is None:
            raise ValueError("the reservation has ended")
        self._buffer = None
        try:
            if self._view is not None:
                self._view.release()
                self._view = None
            if isinstance(buffer, _core.Reservation):
                self._stored = False
                self._stored = buffer.commit(self._overwrite)
        except BufferError as error:
            if isinstance(buffer, _core.Reservation):
                buffer.abort()
            raise BufferError(
                "the block was not stored: memoryviews or arrays made from the view of "
                "the reservation are in use (delete them before it commits)"
            ) from error
        return self._stored

    def abort(self) -> None:
        """Drop the block.  Idempotent; views that are still out stay readable."""
        buffer, self._buffer = self._buffer, None
        if isinstance(buffer, _core.Reservation):
            self._stored = False
            buffer.abort()
        view, self._view = self._view, None
        if view is not None:
            try:
                view.release()
            except BufferError:
                return  # an array holds it; the memory goes with that array

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._buffer is not None:
            self.commit()

    def __del__(self) -> None:
        if isinstance(getattr(self, "_buffer", None), _core.Reservation):
            warnings.warn(
                f"{self!r} was neither committed nor aborted",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
            self.abort()

    def __reduce__(self) -> str:
        raise TypeError("a Slot cannot be pickled or copied; reserve in each process")

    def __repr__(self) -> str:
        state = "open" if self._buffer is not None else "ended"
        return f"<Slot, {state}>"


class Place:
    """Where a block lies in its file, pinned there.

    Made by ``Cache.locate``, for readers that take a descriptor (GPUDirect Storage,
    NIXL, io_uring).  ``fd`` belongs to this object: do not close it, and do not use it
    after ``release``.
    """

    __slots__ = ("_fd", "_lease", "_nbytes", "_offset")

    def __init__(self, lease: _core.Lease, fd: int, offset: int) -> None:
        self._lease = lease
        self._fd = fd
        self._offset = offset
        self._nbytes = lease.nbytes

    @property
    def fd(self) -> int:
        """A read-only descriptor."""
        if self._lease.released:
            raise ValueError("the place was released")
        return self._fd

    @property
    def offset(self) -> int:
        """Byte offset of the payload in the file; a multiple of 4096."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self._nbytes

    @property
    def header(self) -> bytes:
        """The user header, a copy."""
        return self._lease.header

    def release(self) -> None:
        """Give the pin and the descriptor back.  Idempotent."""
        self._lease.release()

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        lease = getattr(self, "_lease", None)
        if lease is not None and not lease.released:
            warnings.warn(
                f"{self!r} was not released",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
            lease.release()

    def __reduce__(self) -> str:
        raise TypeError("a Place cannot be pickled or copied; locate in each process")

    def __repr__(self) -> str:
        return f"<Place of {self._nbytes} bytes at {self._offset}>"
