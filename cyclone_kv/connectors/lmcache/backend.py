# SPDX-License-Identifier: Apache-2.0
"""`CycloneBackend`: a volume as a storage plugin inside the engine.

    contains, pin     contains(), longest_prefix()   memory only
    get...         -> get_many_into()                caller's thread, or a load thread
    put...         -> store thread -> put_many()     the caller goes on

K1  A put takes a reference to each object before it returns and drops it after the
    copy, or at once if it refuses the object.
K2  What a get returns was allocated by LMCache's CPU backend, has one reference, which
    the caller owns, and holds the stored bytes, checksum verified.  What could not be
    loaded is None, and its memory was given back.
K3  Shape, type and format of an object lie in the header of its block.  Objects of the
    largest layout that was seen, that of whole chunks, are read in one batch; what has
    another length, such as the last chunk of a prompt, is allocated by its header and
    read for itself.  Within one identity the length tells layouts apart.
K4  A pin is two passes of the eviction cursor and needs no unpin: a request that is
    aborted leaves nothing pinned, and eviction before the load is a None.
K5  After the start no exception reaches LMCache.
K6  What waits to be stored is bounded in bytes, since it holds LMCache's memory.

LMCache logs what a plugin's constructor raises, and goes on without the plugin.  A
mistake in the configuration would then run for weeks without a tier; so it ends the
process, by SystemExit.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from lmcache.logging import init_logger
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from cyclone_kv.connectors._common import Faults
from cyclone_kv.connectors._copy_threads import CopyThreads
from cyclone_kv.connectors._identity import Identity, canonical_json
from cyclone_kv.connectors._predecessors import Predecessors
from cyclone_kv.connectors._promises import FailedBlocks, HitWatch, SlowLoads
from cyclone_kv.connectors.lmcache.identity import (
    ModelFacts,
    chunk_identity,
    chunk_key,
    random_hash,
)
from cyclone_kv.connectors.lmcache.options import BackendOptions
from cyclone_kv.connectors.lmcache.spaces import Space, Spaces
from cyclone_kv.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface

__all__ = ["CycloneBackend"]

logger = init_logger("lmcache.cyclone_kv.backend")

_CPU_BYTES = 4 << 30  # for the bound of the queue when LMCache does not tell
_HASH_REMEDY = (
    "Set pre_caching_hash_algorithm: sha256_cbor, or PYTHONHASHSEED to one value "
    "everywhere"
)

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _guarded(instead: Any) -> Callable[[_Method], _Method]:
    """Turn an exception of a method into a counted fault and a harmless result (K5)."""

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def call(self: CycloneBackend, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._faults.note(method.__name__, error)
                return instead() if callable(instead) else instead

        return cast(_Method, call)

    return decorate


@dataclass(frozen=True, slots=True)
class _Layout:
    """How to allocate an object (K3)."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    fmt: MemoryFormat

    @classmethod
    def of(cls, obj: MemoryObj) -> _Layout:
        meta = obj.meta
        shapes, dtypes = meta.shapes or [meta.shape], meta.dtypes or [meta.dtype]
        return cls(
            tuple(tuple(int(n) for n in shape) for shape in shapes),
            tuple(dtypes),
            meta.fmt,
        )

    def header(self) -> bytes:
        return canonical_json(
            {
                "shapes": self.shapes,
                "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
                "format": self.fmt.name,
            }
        ).encode("ascii")

    @classmethod
    def parse(cls, header: bytes) -> _Layout:
        """Return the layout in a header; ValueError for anything else."""
        try:
            facts = json.loads(header)
            dtypes = tuple(getattr(torch, name) for name in facts["dtypes"])
            shapes = tuple(tuple(int(n) for n in shape) for shape in facts["shapes"])
            fmt = MemoryFormat[facts["format"]]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no layout of an object: {header[:80]!r}") from error
        if not all(isinstance(dtype, torch.dtype) for dtype in dtypes) or any(
            n < 0 for shape in shapes for n in shape
        ):
            raise ValueError(f"no layout of an object: {header[:80]!r}")
        return cls(shapes, dtypes, fmt)

    def nbytes(self) -> int:
        return sum(
            torch.Size(shape).numel() * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


class CycloneBackend(StoragePluginInterface):  # type: ignore[misc]
    """KV chunks in a cyclone_kv volume, as a storage plugin of LMCache.

    Made by LMCache from `storage_plugins` and `extra_config`; the options are those of
    `BackendOptions` and `CacheConfig`.  Any thread may use it.
    """

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        try:
            self._start(config, metadata, local_cpu_backend)
        except Exception as error:
            if loop is not None:
                # LMCache runs it on a thread that would keep the process from ending.
                loop.call_soon_threadsafe(loop.stop)
            raise SystemExit(f"cyclone_kv: {error}") from error

    def _start(self, config: Any, metadata: Any, local_cpu_backend: Any) -> None:
        if config is None or metadata is None:
            raise ConfigError("LMCache gave the plugin no configuration and no model")
        reason = random_hash(config.pre_caching_hash_algorithm, os.environ)
        if reason is not None:
            raise ConfigError(reason + _HASH_REMEDY)
        self._options, cache_config = BackendOptions.of_plugin(
            config.extra_config or {}, type(self).__name__
        )
        self._model = ModelFacts.of(
            metadata.model_name,
            model=self._options.model,
            weights=self._options.weights,
        )
        self._settings = {
            "mla": bool(metadata.use_mla),
            "layerwise": bool(getattr(config, "use_layerwise", False)),
            "blending": bool(getattr(config, "enable_blending", False)),
        }
        self._faults = Faults(logger)
        self._failed: FailedBlocks[CacheEngineKey] = FailedBlocks()
        self._slow = SlowLoads(self._options.recompute_tokens_per_second, logger)
        self._watch = HitWatch(logger)
        self._predecessors = Predecessors()
        self._usual: _Layout | None = None
        size = getattr(config, "max_local_cpu_size", None)
        self._queue_limit = self._options.store_queue_bytes(
            int(size * 2**30) if size and local_cpu_backend is not None else _CPU_BYTES
        )
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._putting: set[CacheEngineKey] = set()
        self._closed = False
        self._spaces = Spaces(
            self._options.path,
            cache_config,
            logger=logger,
            faults=self._faults,
            object_bytes=sum(
                torch.Size(shape).numel() * dtype.itemsize
                for shape, dtype in zip(
                    metadata.get_shapes(), metadata.get_dtypes(), strict=True
                )
            ),
        )
        try:
            self._open_own(metadata)
        except BaseException:
            self._spaces.close()
            raise
        self._threads = CopyThreads(
            name="cyclone-kv-backend",
            loads=self._options.load_threads,
            stores=self._options.store_threads,
            on_fault=lambda error: self._faults.note("a copy thread", error),
        )

    def _open_own(self, metadata: Any) -> None:
        """Open the namespace of this worker, so that the log names its identity."""
        name = (
            metadata.model_name,
            metadata.world_size,
            metadata.worker_id,
            metadata.kv_dtype,
        )
        if self._spaces.get(name, lambda: self._identity(*name)) is None:
            raise ConfigError(f"the identity of this worker has no place: {name}")

    def __str__(self) -> str:
        return type(self).__name__

    # ---- lookups --------------------------------------------------------------------

    @_guarded(False)
    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Say whether a chunk is stored, from memory alone."""
        return self._leading([key], pin) == 1

    @_guarded(0)
    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Count the leading chunks that are stored, from memory alone."""
        return self._leading(keys, pin)

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """Count the leading chunks that are stored, from memory alone."""
        return self.batched_contains(keys, pin)

    def _leading(self, keys: Sequence[CacheEngineKey], pin: bool) -> int:
        space = self._space(keys[0]) if keys else None
        if space is None:
            return 0
        if self._slow:
            return 0
        blocks = [chunk_key(key) for key in keys]
        if len(keys) > 1:
            self._predecessors.learn(blocks)
        found = space.cache.longest_prefix(blocks)
        for place in range(found if len(self._failed) else 0):
            if keys[place] in self._failed:
                found = place
                break
        if pin and found:
            space.cache.touch(blocks[:found])  # K4
        self._watch.looked_up(len(keys), found)
        return found

    @_guarded(False)
    def pin(self, key: CacheEngineKey) -> bool:
        """Spare a chunk from eviction for a while (K4)."""
        return self._leading([key], True) == 1

    @_guarded(False)
    def unpin(self, key: CacheEngineKey) -> bool:
        """Do nothing (K4); return whether the chunk is stored."""
        return self._leading([key], False) == 1

    def touch_cache(self) -> None:
        """Do nothing: reads and pins are the touches of a volume."""

    # ---- puts -----------------------------------------------------------------------

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Say whether the chunk waits to be stored, or is being stored."""
        with self._lock:
            return key in self._putting

    @_guarded(None)
    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> list[Future[bool]] | None:
        """Queue chunks to be stored; return a future for each that was taken.

        Its result says whether the chunk is stored.  None when none was taken: when
        all are being stored already, or too much waits.
        """
        taken: list[tuple[CacheEngineKey, MemoryObj, Future[bool]]] = []
        with self._lock:
            for key, obj in zip(keys, objs, strict=True):
                size = obj.get_size()
                queued = self._queued_bytes
                full = bool(queued) and queued + size > self._queue_limit
                if key in self._putting or full or self._closed:
                    continue
                self._putting.add(key)
                self._queued_bytes += size
                taken.append((key, obj, Future()))
        if not taken:
            return None
        for _, obj, _ in taken:
            obj.ref_count_up()  # K1
        try:
            self._threads.submit(
                "store", lambda: self._put(taken, on_complete_callback)
            )
        except RuntimeError:
            self._end_put(taken, set(), None)
            raise
        return [future for _, _, future in taken]

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """Queue chunks to be stored."""
        self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback)

    def _put(
        self,
        taken: list[tuple[CacheEngineKey, MemoryObj, Future[bool]]],
        on_complete: Callable[[CacheEngineKey], None] | None,
    ) -> None:
        """Write chunks; runs on a store thread."""
        good: set[int] = set()
        try:
            space = self._space(taken[0][0])
            blocks = [chunk_key(key) for key, _, _ in taken]
            if space is not None:
                for chain in self._predecessors.chains(blocks):
                    items = [self._item(blocks[i], taken[i][1]) for i in chain.places]
                    flags = space.cache.put_many(items, chain=True, parent=chain.parent)
                    good.update(
                        i for i, ok in zip(chain.places, flags, strict=True) if ok
                    )
        except Exception as error:
            self._faults.note("storing", error)
        finally:
            self._end_put(taken, good, on_complete)

    def _item(self, block: bytes, obj: MemoryObj) -> tuple[bytes, Any, bytes]:
        layout = _Layout.of(obj)
        self._learn_layout(layout)
        return block, obj.byte_array, layout.header()

    def _end_put(
        self,
        taken: list[tuple[CacheEngineKey, MemoryObj, Future[bool]]],
        good: set[int],
        on_complete: Callable[[CacheEngineKey], None] | None,
    ) -> None:
        stored = sum(taken[i][1].get_size() for i in good)
        with self._lock:
            for key, obj, _ in taken:
                self._putting.discard(key)
                self._queued_bytes -= obj.get_size()
        self._failed.discard(taken[i][0] for i in good)
        for i, (key, obj, future) in enumerate(taken):
            obj.ref_count_down()  # K1
            future.set_result(i in good)
            if i in good and on_complete is not None:
                try:
                    on_complete(key)
                except Exception as error:
                    self._faults.note("a callback after a put", error)
        self._watch.stored(stored)

    # ---- gets -----------------------------------------------------------------------

    @_guarded(None)
    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Return a chunk, or None."""
        return self._read([key], wait=True)[0]

    def batched_get_blocking(
        self, keys: list[CacheEngineKey]
    ) -> list[MemoryObj | None]:
        """Return for each chunk its object, or None."""
        try:
            return self._read(keys, wait=True)
        except Exception as error:
            self._faults.note("batched_get_blocking", error)
            return [None] * len(keys)

    @_guarded(None)
    def get_non_blocking(
        self, key: CacheEngineKey, location: str | None = None
    ) -> Future[MemoryObj | None] | None:
        """Return a future of a chunk, or None when it is not stored."""
        if self._leading([key], False) == 0:
            return None
        return self._later(lambda: self._read([key], wait=False)[0])

    async def batched_get_non_blocking(
        self,
        lookup_id: str,
        keys: list[CacheEngineKey],
        transfer_spec: Any = None,
    ) -> list[MemoryObj]:
        """Return the leading chunks that could be loaded."""
        try:
            future = self._later(lambda: self._read(keys, wait=False))
            objects = await asyncio.wrap_future(future)
        except Exception as error:
            self._faults.note("batched_get_non_blocking", error)
            return []
        leading = objects.index(None) if None in objects else len(objects)
        for obj in objects[leading:]:
            if obj is not None:
                obj.ref_count_down()
        return cast("list[MemoryObj]", objects[:leading])

    def _later(self, work: Callable[[], Any]) -> Future[Any]:
        """Do `work` on a load thread."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._threads.submit("load", run)
        return future

    def _read(
        self, keys: Sequence[CacheEngineKey], *, wait: bool
    ) -> list[MemoryObj | None]:
        """Allocate and fill an object for each chunk that is stored (K2)."""
        started = time.monotonic()
        objects: list[MemoryObj | None] = [None] * len(keys)
        space = self._space(keys[0]) if keys else None
        if space is None:
            return objects
        blocks = [chunk_key(key) for key in keys]
        try:
            wanted = [i for i, ok in enumerate(space.cache.contains_many(blocks)) if ok]
            left = wanted
            if self._usual is None and left:
                objects[left[0]] = self._read_one(space, blocks[left[0]], wait=wait)
                left = left[1:]
            for i in self._read_batch(space, blocks, left, objects, wait=wait):
                objects[i] = self._read_one(space, blocks[i], wait=wait)
        except BaseException:
            for obj in objects:
                if obj is not None:
                    obj.ref_count_down()
            raise
        self._failed.add(keys[i] for i in wanted if objects[i] is None)
        sizes = [obj.get_size() for obj in objects if obj is not None]
        if sizes:
            self._slow.learn(
                nbytes=sum(sizes),
                seconds=time.monotonic() - started,
                bytes_per_token=max(sizes) / self._tokens(),
            )
        return objects

    def _read_batch(
        self,
        space: Space,
        blocks: Sequence[bytes],
        wanted: Sequence[int],
        objects: list[MemoryObj | None],
        *,
        wait: bool,
    ) -> list[int]:
        """Read what has the usual layout in one call; return what is left (K3)."""
        layout = self._usual
        if layout is None:
            return list(wanted)
        targets: list[MemoryObj] = []
        for _ in wanted:
            obj = self._allocate(layout, wait=wait)
            if obj is None:
                break
            targets.append(obj)
        read = wanted[: len(targets)]
        try:
            flags = space.cache.get_many_into(
                [blocks[i] for i in read],
                [obj.byte_array for obj in targets],
                exact=True,
            )
        except BaseException:
            for obj in targets:
                obj.ref_count_down()
            raise
        for i, obj, ok in zip(read, targets, flags, strict=True):
            if ok:
                objects[i] = obj
            else:
                obj.ref_count_down()
        left = [i for i in read if objects[i] is None]
        there = space.cache.contains_many([blocks[i] for i in left])
        return [i for i, ok in zip(left, there, strict=True) if ok]

    def _read_one(self, space: Space, block: bytes, *, wait: bool) -> MemoryObj | None:
        """Read a block as its header says (K3)."""
        entry = space.cache.read(block)
        if entry is None:
            return None
        with entry:
            layout, nbytes = _Layout.parse(entry.header), entry.nbytes
        if layout.nbytes() != nbytes:
            raise ValueError(f"a block of {nbytes} bytes has the header {layout}")
        self._learn_layout(layout)
        obj = self._allocate(layout, wait=wait)
        if obj is None:
            return None
        try:
            (ok,) = space.cache.get_many_into([block], [obj.byte_array], exact=True)
        except BaseException:
            obj.ref_count_down()
            raise
        if ok:
            return obj
        obj.ref_count_down()
        return None

    def _learn_layout(self, layout: _Layout) -> None:
        if self._usual is None or layout.nbytes() > self._usual.nbytes():
            self._usual = layout

    def _allocate(self, layout: _Layout, *, wait: bool) -> MemoryObj | None:
        if self.local_cpu_backend is None:
            raise RuntimeError("LMCache gave the plugin no memory to read into")
        return self.local_cpu_backend.allocate(
            [torch.Size(shape) for shape in layout.shapes],
            list(layout.dtypes),
            fmt=layout.fmt,
            busy_loop=wait,
        )

    # ---- the rest of the interface --------------------------------------------------

    @_guarded(False)
    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove a chunk; return whether there was one."""
        space = self._space(key)
        return space is not None and space.cache.remove(chunk_key(key))

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """Return who allocates the objects: LMCache's CPU backend."""
        return self.local_cpu_backend

    def close(self) -> None:
        """Let copies end, then give back threads and volume.  Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._threads.close()
        self._spaces.close()

    def _tokens(self) -> int:
        return max(int(getattr(self.metadata, "chunk_size", 1)), 1)

    def _space(self, key: CacheEngineKey) -> Space | None:
        """Return the space of a key; all keys of a call have the same one."""
        name = (key.model_name, key.world_size, key.worker_id, key.dtype)
        return self._spaces.get(name, lambda: self._identity(*name))

    def _identity(
        self, model_name: str, world_size: int, worker_id: int, dtype: torch.dtype
    ) -> Identity:
        facts = self._model
        if model_name != self.metadata.model_name:
            facts = ModelFacts.of(model_name, model=None, weights=self._options.weights)
        return chunk_identity(
            facts,
            world_size=world_size,
            worker_id=worker_id,
            dtype=str(dtype).removeprefix("torch."),
            kv_shape=self.metadata.kv_shape,
            chunk_tokens=self._tokens(),
            settings=self._settings,
        )
