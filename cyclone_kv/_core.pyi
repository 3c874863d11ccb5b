# SPDX-License-Identifier: Apache-2.0
"""The extension.  Private: import ``cyclone_kv``.

Buffers: ``Buffer`` is any contiguous bytes-like object (bytes, bytearray, memoryview,
numpy array).  They are held for the length of a call only.  All methods may be called
from any thread; long ones release the GIL.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypedDict, final

from typing_extensions import Buffer, disjoint_base

_Keys: TypeAlias = Sequence[Buffer] | Buffer
_Pieces: TypeAlias = Buffer | Sequence[Buffer]
_Item: TypeAlias = tuple[Buffer, _Pieces] | tuple[Buffer, _Pieces, Buffer | None]
_RawEvent: TypeAlias = tuple[int, int, bytes, bool, bytes]
_RawEntry: TypeAlias = tuple[bytes, bytes, bool, bool, int, int, int, int, int, int]
_RawReport: TypeAlias = tuple[int, int, int, int, int, int, str]

class _RawInfo(TypedDict):
    set_id: bytes
    format_version: int
    payload_max_bytes: int
    overhead_bytes: int
    shm_bytes: int
    shm_path: str | None
    crc32c_kernel: str
    paths: list[dict[str, Any]]

EVENTS_FROM_NOW: int
PATHS_MAX: int
STATISTICS: tuple[tuple[str, str, str, str], ...]
"""(kind, name, unit, sentence) of each statistic."""
STATUSES: dict[str, tuple[int, str]]
"""Name of each status of the engine to (value, text)."""

def crc32c(data: Buffer, crc: int = 0, /) -> int:
    """Return the CRC-32C (Castagnoli) of data, continuing from crc."""

@final
class Lease:
    """A pinned block as a read-only buffer."""

    @property
    def address(self) -> int: ...
    @property
    def header(self) -> bytes: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def released(self) -> bool: ...
    def ok(self) -> bool: ...
    def release(self) -> None:
        """Unpin.  BufferError while a buffer of it is in use."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class Hold:
    """A hold on the mapping of the data area, in chunks that no block crosses."""

    @property
    def chunks(self) -> int: ...
    @property
    def volume(self) -> int: ...
    def chunk(self, index: int, /) -> tuple[int, int]: ...
    def keep(self) -> None: ...
    def populate(self, index: int, offset: int, nbytes: int, /) -> None: ...
    def release(self) -> None: ...
    def select(self, index: int, selected: bool, /) -> None: ...

@final
class Reservation:
    """A block being produced, as a writable buffer."""

    def abort(self) -> None: ...
    def commit(self, overwrite: bool, /) -> bool:
        """Store.  BufferError, and nothing stored, while a buffer of it is in use."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@disjoint_base
class Cache:
    """Base of ``cyclone_kv.Cache``: the methods that need no Python around them."""

    @property
    def closed(self) -> bool:
        """True after ``close`` (or when never opened)."""
    def _open(
        self, paths: tuple[tuple[bytes, int], ...], options: dict[str, int | bytes]
    ) -> None: ...
    def _copy_many(self, keys: _Keys, targets: Sequence[_Pieces], /) -> list[int]: ...
    def _events(self, since: int, limit: int) -> tuple[list[_RawEvent], int, int]: ...
    def _hold(self) -> Hold: ...
    def _info(self) -> _RawInfo: ...
    def _lease(self, key: Buffer, /) -> Lease | None: ...
    def _list(self, cursor: int, limit: int) -> tuple[list[_RawEntry], int]: ...
    def _locate(self, key: Buffer, /) -> tuple[Lease, int, int] | None: ...
    def _pin_many(
        self, keys: _Keys, hold: Hold | None, /
    ) -> list[Lease | int | None]: ...
    def _reserve(
        self, key: Buffer, nbytes: int, header: Buffer | None
    ) -> Reservation | int: ...
    def _stats(self) -> tuple[dict[str, int], dict[str, int]]: ...
    def _verify(
        self, progress: Callable[[int, int], object] | None, repair: bool
    ) -> _RawReport: ...
    def clear(self) -> int:
        """Remove every block of this namespace; return how many there were.

        Durable when it returns.  Views of removed blocks stay as they are.
        """
    def close(self) -> None:
        """End the handle.  Idempotent.

        Waits for calls of other threads, and refuses later ones with ``ClosedError``.
        Views and entries stay readable; what they need is kept until the last is gone.
        """
    def contains(self, key: Buffer, /) -> bool:
        """Return whether a block is stored, from memory alone."""
    def contains_many(self, keys: _Keys, /) -> list[bool]:
        """Return for each key whether a block is stored, from memory alone.

        ``keys`` is a sequence of bytes-like keys, or for speed one contiguous buffer
        of n * 32 bytes, such as a uint8 array of shape (n, 32).
        """
    def get(self, key: Buffer, /) -> memoryview | None:
        """Return the payload as a read-only view of the volume, or None for a miss.

        The bytes never change and stay readable while the view, or anything made from
        it, lives: through eviction, ``remove``, ``clear`` and ``close``.  The block is
        pinned for as long; drop views soon, or use ``get_into``.
        """
    def get_into(self, key: Buffer, target: _Pieces) -> int | None:
        """Copy a block into a writable buffer, or a list of them filled in order.

        Return the bytes copied, or None for a miss and for a target that is too short
        (counted as ``short_buffers``).  After None the content of the target is
        undefined.
        """
    def get_many_into(
        self, keys: _Keys, targets: Sequence[_Pieces], *, exact: bool = False
    ) -> list[bool]:
        """Copy many blocks, one target (or list of buffers) for each key.

        Never raises for one key: False stands for a miss or a short target, whose
        content is then undefined.  With ``exact=True`` a target that is longer than
        the block is a False too.  The whole batch runs without the GIL.
        """
    def longest_prefix(self, keys: _Keys, *, touch: bool = False) -> int:
        """Return how many leading keys are stored, from memory alone.

        ``touch=True`` gives those blocks two passes of the eviction cursor, so that
        they are still there when a load follows.
        """
    def prefetch(self, keys: _Keys, /) -> int:
        """Start reading blocks into the page cache; return how many were found."""
    def put(
        self,
        key: Buffer,
        data: _Pieces,
        *,
        header: Buffer | None = None,
        overwrite: bool = False,
    ) -> bool:
        """Store a block; return whether every process can now find it.

        ``key`` has 1 to 65 535 bytes; 32 are used as they are, other lengths are
        digested.  ``data`` is a buffer, or a list of buffers that follow each other.
        A key that is stored already, with a block of these lengths, is a cheap True,
        unless ``overwrite`` replaces it.
        False: refused for now; ``stats()`` counts the reasons (``puts_busy``,
        ``puts_no_run``, ``puts_not_admitted``, ``puts_in_flight``,
        ``puts_failed_path``, ``puts_io_failed``).  ``ValueTooLargeError``: can never
        fit.  Bytes that another thread changes during the call become a miss later.
        """
    def put_many(
        self,
        items: Iterable[_Item],
        *,
        chain: bool = False,
        parent: Buffer | None = None,
        overwrite: bool = False,
    ) -> list[bool]:
        """Store many blocks, each (key, data) or (key, data, header).

        ``chain=True``: consecutive blocks of one prefix, its head first; they are
        stored so that the tail is evicted before the head. ``parent`` is the key of the
        block before the first. Never raises for one block: a False may also mean that
        it can never fit. The whole batch runs without the GIL.
        """
    def recover(self) -> int:
        """Verify failed paths; return how many are in use again."""
    def remove(self, key: Buffer, /) -> bool:
        """Remove a block; return whether there was one.  Durable with the next sync."""
    def sync(self) -> None:
        """Make every put that returned before the call durable."""
    def touch(self, keys: _Keys, /) -> int:
        """Give blocks two passes of the eviction cursor; return how many were found."""
    def __bool__(self) -> bool: ...
    def __contains__(self, key: object, /) -> bool: ...
    def __len__(self) -> int:
        """Blocks of this namespace."""
