# SPDX-License-Identifier: Apache-2.0
"""The cache: opening, and the methods that need more than the extension gives."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cyclone_kv import _core, results
from cyclone_kv.config import CacheConfig, encode_path, parse_size
from cyclone_kv.errors import ConfigError, VolumeNotFoundError
from cyclone_kv.handles import Entry, Place, Slot

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Buffer

    from cyclone_kv.cuda import Registration, Upload
    from cyclone_kv.cuda.volume import Attachment

__all__ = ["Cache"]

StrPath: TypeAlias = "str | os.PathLike[str]"
PathWithCapacity: TypeAlias = "tuple[StrPath, int | str]"

_LIST_BATCH = 512
_MODES = {"rw": 0, "r": 1}


class Cache(_core.Cache):
    """A bounded store of blocks in volume files, shared by threads and processes.

    Made by ``Cache.open``.  Methods may be called from any thread at the same time.

    >>> config = CacheConfig.for_kv_tier(capacity="64MiB")
    >>> with Cache.open("kv.cyc", config) as cache:
    ...     stored = cache.put(b"k" * 32, b"payload", header=b"float16")
    ...     view = cache.get(b"k" * 32)
    ...     if view is not None:
    ...         print(bytes(view))
    b'payload'
    """

    __slots__ = ("__weakref__", "_config", "_cuda", "_mode", "_namespace", "_paths")
    _config: CacheConfig
    _cuda: Attachment | None  # from the first call that has to do with a device on
    _mode: Literal["rw", "r"]
    _namespace: bytes
    _paths: tuple[str, ...]

    @classmethod
    def open(
        cls,
        path: StrPath | Sequence[StrPath | PathWithCapacity],
        config: CacheConfig | None = None,
        *,
        mode: Literal["rw", "r"] = "rw",
        namespace: str | bytes = "",
        create: bool = True,
    ) -> Self:
        """Open a volume; create it when it does not exist and a capacity is given.

        ``path`` names the volume file, or is a list with one file per device; the order
        does not matter.  Several plain paths share ``config.capacity`` equally; a list
        of (path, capacity) gives each its own.  ``~`` is expanded, URLs are refused.

        An existing volume keeps its geometry; a capacity that differs from it is a
        ``MismatchError``.  ``mode="r"`` needs no write permission and takes no process
        slot; its views are copies.  ``namespace`` separates users of one volume: none
        finds or removes the blocks of another.
        """
        if config is None:
            config = CacheConfig()
        elif not isinstance(config, CacheConfig):
            raise TypeError(
                f"config is {config!r}; it must be a CacheConfig "
                f"(see CacheConfig.from_dict)"
            )
        if not isinstance(mode, str) or mode not in _MODES:
            raise ConfigError(f'mode is {mode!r}; it must be "rw" or "r"')
        paths = _resolve(path, config)
        if not any(os.path.lexists(file) for file, _ in paths):
            # Of a set with some of its members there, the engine knows more.
            _check_creation(*paths[0], create=create and mode == "rw")
        options = config._engine_options()
        options["mode"] = _MODES[mode]
        options["create"] = create and mode == "rw"
        if not isinstance(namespace, (str, bytes)):
            raise TypeError(f"namespace is {namespace!r}; it must be str or bytes")
        raw = namespace.encode() if isinstance(namespace, str) else namespace
        options["namespace"] = raw
        self = cls.__new__(cls)
        self._namespace = raw
        self._config = config
        self._cuda = None
        self._mode = mode
        self._paths = tuple(os.fsdecode(file) for file, _ in paths)
        self._open(paths, options)
        return self

    @property
    def config(self) -> CacheConfig:
        """The configuration that was given to ``open``."""
        return self._config

    @property
    def mode(self) -> Literal["rw", "r"]:
        """``"rw"`` or ``"r"``."""
        return self._mode

    @property
    def paths(self) -> tuple[str, ...]:
        """The volume files, as given, with ``~`` expanded."""
        return self._paths

    @property
    def namespace_tag(self) -> bytes:
        """The 16 bytes by which ``events`` and ``ls`` name this handle's namespace."""
        raw = self._namespace
        return hashlib.sha256(raw).digest()[:16] if raw else bytes(16)

    # ---- one block ------------------------------------------------------------------

    def read(self, key: Buffer) -> Entry | None:
        """Pin a block and return it with its header, or None for a miss.

        >>> with Cache.open("kv.cyc", CacheConfig(capacity="64MiB")) as cache:
        ...     _ = cache.put(b"a key", b"payload", header=b"float16")
        ...     entry = cache.read(b"a key")
        ...     if entry is not None:
        ...         with entry:
        ...             print(entry.header, entry.nbytes)
        b'float16' 7
        """
        lease = self._lease(key)
        return None if lease is None else Entry(lease)

    def reserve(
        self,
        key: Buffer,
        nbytes: int,
        *,
        header: Buffer | None = None,
        overwrite: bool = False,
    ) -> Slot:
        """Return zeroed memory to produce a block of ``nbytes`` bytes in.

        Nothing is stored before it is committed, nor is it decided before whether the
        block is admitted.  ``ValueTooLargeError`` when the block could never fit.

        >>> with Cache.open("kv.cyc", CacheConfig(capacity="64MiB")) as cache:
        ...     with cache.reserve(b"made in place", 4) as slot:
        ...         slot.view[:] = b"1234"
        ...     slot.stored
        True
        """
        result = self._reserve(key, nbytes, header)
        if isinstance(result, int):
            present = result == _core.STATUSES["CKV_PRESENT"][0]
            return Slot(None, nbytes, overwrite=overwrite, present=present)
        return Slot(result, nbytes, overwrite=overwrite, present=False)

    def locate(self, key: Buffer) -> Place | None:
        """Pin a block and return where it lies on disk, or None for a miss.

        For readers that take a descriptor. They see the bytes as stored; nothing checks
        them on that way.
        """
        result = self._locate(key)
        return None if result is None else Place(*result)

    # ---- devices --------------------------------------------------------------------

    def register_cuda(
        self,
        device: int | None = None,
        budget: int | str | None = None,
        *,
        background: bool = False,
    ) -> Registration:
        """Let CUDA devices read blocks where they lie; return how far that went.

        The mapping of the volume is registered with the driver: read-only, in chunks of
        1 GiB that no block crosses, once per process however many handles ask. Its
        pages are pinned in memory from then on. What is not covered, for whatever
        reason of the kernel, the driver or the budget, is no error: ``reason`` of the
        result says why, and uploads of such blocks go through pinned buffers.

        ``device`` is an ordinal; None is that of the current context, else the only one
        in use. ``budget`` (bytes, or "64GiB") is how much may be pinned. Without one,
        all or nothing: a volume that is larger than half of the memory of the machine
        or the control group, or than RLIMIT_MEMLOCK, is not registered.

        Takes 0.1 to 1 s per GiB. ``background=True`` returns at once; uploads use
        what is registered already, ``cuda_registration`` tells how far it is, and
        ``close`` ends it early. Undone by ``close`` of the last handle that asked, or
        by ``unregister_cuda``, after all copies have ended; at exit too.
        """
        size = None if budget is None else parse_size(budget, "budget")
        if isinstance(device, bool) or not isinstance(device, (int, type(None))):
            raise TypeError(f"device is {device!r}; it must be an int or None")
        return self._attached().register(device, size, background=background)

    def unregister_cuda(self) -> None:
        """Undo ``register_cuda``, if no other handle of this process asked for it.

        Waits for uploads. Copies of your own that read from views must have ended.
        """
        if self._cuda is not None:
            self._cuda.unregister()

    @property
    def cuda_registration(self) -> Registration | None:
        """How much is registered now; None where nobody called ``register_cuda``."""
        return None if self._cuda is None else self._cuda.registration()

    def upload(
        self,
        keys: Sequence[Buffer] | Buffer,
        destinations: Sequence[Any],
        stream: Any = None,
    ) -> Upload:
        """Copy blocks into device memory, and wait until they have arrived.

        Like ``upload_async(...).wait()``.
        """
        return self.upload_async(keys, destinations, stream).wait()

    def upload_async(
        self,
        keys: Sequence[Buffer] | Buffer,
        destinations: Sequence[Any],
        stream: Any = None,
    ) -> Upload:
        """Enqueue copies of blocks into device memory on a stream.

        Each destination is a torch tensor, a cupy array, anything else that has
        ``__cuda_array_interface__`` or DLPack, or a pair (device pointer, bytes):
        contiguous, at least as long as the block, all on one device, none overlapping
        another. ``stream`` is a CUstream as int, or a stream of torch or cupy; None is
        the default stream.

        Returns when every copy is enqueued, so whatever is enqueued on the stream later
        sees the bytes. Registered blocks (``register_cuda``) are copied by the device
        out of the mapping; the others are read into pinned buffers in this call, while
        earlier ones are being copied. Misses are None in ``lengths`` of the result, and
        their destinations untouched. Bytes were checked before they are enqueued.

        Destinations are kept alive, and blocks pinned, until the copies have ended.
        ``ConfigError`` names a destination that does not fit, before anything is
        copied; ``CudaError`` a call of the driver that failed.
        """
        from cyclone_kv.cuda import transfer

        return transfer.upload(self._attached(), self, keys, destinations, stream)

    def put_from_device(
        self,
        items: Iterable[tuple[Buffer, Any] | tuple[Buffer, Any, Buffer | None]],
        stream: Any = None,
        *,
        chain: bool = False,
        parent: Buffer | None = None,
        overwrite: bool = False,
    ) -> list[bool]:
        """Store blocks that lie in device memory: ``put_many`` with such sources.

        Each item is (key, source) or (key, source, header), a source being what
        ``upload`` takes as a destination. Copies run on ``stream``, behind what is
        enqueued there, through pinned buffers; returns when all blocks are stored.
        """
        from cyclone_kv.cuda import transfer

        return transfer.put_from_device(
            self._attached(),
            self,
            items,
            stream,
            chain=chain,
            parent=parent,
            overwrite=overwrite,
        )

    def _attached(self) -> Attachment:
        if self._cuda is not None:
            return self._cuda
        from cyclone_kv.cuda.volume import attach

        return attach(self)

    # ---- care -----------------------------------------------------------------------

    def stats(self) -> results.Stats:
        """Return the statistics of the volume and of this process."""
        return results.make_stats(self._stats())

    def info(self) -> results.Info:
        """Return what the volume is like: files, sizes, limits."""
        return results.make_info(self._info())

    def verify(
        self,
        *,
        progress: Callable[[int, int], object] | None = None,
        repair: bool = False,
    ) -> results.VerifyReport:
        """Read every block, check every checksum, prove every invariant.

        ``progress(entries_done, entries_total)`` is called from this thread up to
        twenty times a second; an exception that it raises stops the walk and is raised
        here.  ``repair=True`` removes damaged blocks and puts the volatile structures
        right.
        """
        return results.VerifyReport(*self._verify(progress, repair))

    def events(self, since: int | None = 0, *, limit: int = 4096) -> results.Events:
        """Return what was stored and removed after event ``since``, oldest first.

        Of all namespaces and processes. Pass ``last`` of the result as ``since`` of the
        next call.  The last event of a key says whether the block is there now, those
        before it what was recorded; so who folds the events ends with what is stored,
        whoever was late or died.  ``lost`` counts what was overwritten or dropped, or
        may have been lost with a process or a path: then list what is there and go on
        from ``last``.  At most ``limit`` events (65 536) come at once.
        ``since=None`` returns none of them: its ``last`` is where the events from now
        on begin.
        """
        start = _core.EVENTS_FROM_NOW if since is None else since
        return results.make_events(self._events(start, limit))

    def ls(self) -> Iterator[results.EntryInfo]:
        """Iterate over the stored blocks of all namespaces.

        Not a snapshot: blocks stored or removed meanwhile may be missed or listed.
        """
        cursor = 0
        while True:
            rows, cursor = self._list(cursor, _LIST_BATCH)
            if not rows:
                return
            for row in rows:
                yield results.EntryInfo._make(row)

    # ---- life -----------------------------------------------------------------------

    def close(self) -> None:
        """End the handle.  Idempotent.

        Waits for calls of other threads, and refuses later ones with ``ClosedError``.
        Views and entries stay readable; what they need is kept until the last is gone.
        The last handle of the process also waits for its uploads and undoes
        ``register_cuda``.
        """
        # Twice: another thread may begin its first upload meanwhile.
        if (cuda := getattr(self, "_cuda", None)) is not None:
            cuda.close()
        super().close()
        if (cuda := getattr(self, "_cuda", None)) is not None:
            cuda.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("a Cache cannot be pickled; open the volume in each process")

    def __repr__(self) -> str:
        paths = ", ".join(getattr(self, "_paths", ()))
        return f"<Cache {paths}{', closed' if self.closed else ''}>"


def _resolve(
    path: StrPath | Sequence[StrPath | PathWithCapacity], config: CacheConfig
) -> tuple[tuple[bytes, int], ...]:
    """Return (path, capacity) of each file; capacity 0 stands for "as it is"."""
    if not isinstance(path, (str, bytes, os.PathLike, list)):
        raise TypeError(
            f"path is {path!r}; it must be str or os.PathLike, or a list: "
            f"[path, path] or [(path, capacity), ...]"
        )
    members: list[StrPath | PathWithCapacity]
    members = path if isinstance(path, list) else [path]
    if not 1 <= len(members) <= _core.PATHS_MAX:
        raise ConfigError(
            f"{len(members)} paths were given; a cache has 1 to {_core.PATHS_MAX}"
        )
    share = 0
    if config.capacity is not None:
        # Whole pages, so that the sum never exceeds what was asked for.
        share = parse_size(config.capacity)
        if len(members) > 1:
            share = share // len(members) // 4096 * 4096
            if share == 0:
                raise ConfigError(
                    f"capacity is {config.capacity}, which is less than a page for "
                    f"each of {len(members)} paths; give more, or fewer paths"
                )
    resolved: list[tuple[bytes, int]] = []
    for member in members:
        if not isinstance(member, tuple):
            resolved.append((encode_path(member), share))
            continue
        if len(member) != 2:
            raise TypeError(f"{member!r} is not (path, capacity)")
        if config.capacity is not None:
            raise ConfigError(
                f"capacity is given twice: {config.capacity} in the configuration and "
                f"{member[1]!r} with the path {member[0]!r}; leave one out"
            )
        capacity = parse_size(member[1], "capacity")
        if capacity == 0:
            raise ConfigError(f"the capacity of {member[0]!r} is 0")
        resolved.append((encode_path(member[0]), capacity))
    files = [file for file, _ in resolved]
    if len(set(files)) != len(files):
        raise ConfigError("the same path is given twice")
    return tuple(resolved)


def _check_creation(file: bytes, capacity: int, *, create: bool) -> None:
    """Refuse early, and in words, what the engine could only call "not found"."""
    if create and capacity != 0:
        return
    if create:
        hint = 'no capacity was given: add CacheConfig(capacity="64GiB") to create it'
    else:
        hint = 'it is not created with create=False or mode="r"'
    raise VolumeNotFoundError(
        errno.ENOENT, f"the volume does not exist, and {hint}", os.fsdecode(file)
    )
