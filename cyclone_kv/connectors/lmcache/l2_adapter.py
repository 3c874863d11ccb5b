# SPDX-License-Identifier: Apache-2.0
"""`CycloneL2Adapter`: a volume as the L2 of `lmcache server`.

    submit_lookup...  contains_many(), touch()   caller's thread, memory only
    submit_load    -> load thread  ->  get_many_into()  \
    submit_store   -> store thread ->  put_many()       /  no GIL
    pop / query    <- results by task, and a signal on one of three eventfds

A1  Every task that was submitted gets exactly one result, whatever happened to it, and
    its eventfd is signalled after the result is there.
A2  A load says of each object whether its bytes arrived with the right checksum and the
    right length.  An object that did not arrive is a miss for a while.
A3  A lookup takes no lock that somebody would have to give back: what it finds gets two
    passes of the eviction cursor, and eviction before the load is a failed load of that
    object.  So nothing is left behind by requests that are aborted.
A4  LMCache keeps objects readable or writable until the task's result was taken; views
    of them live no longer than the job.
A5  After the start no exception reaches LMCache's controllers.
A6  What waits to be stored is bounded in bytes, since it pins L1.
A7  LMCache hears of each object that is stored, and that is gone, whoever evicted it.

Results have a lock of their own, held for moments.  The controllers of LMCache and our
copy threads may call at the same time.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from cyclone_kv.connectors._common import Faults
from cyclone_kv.connectors._copy_threads import CopyThreads
from cyclone_kv.connectors._events import AnnouncedBlocks
from cyclone_kv.connectors._predecessors import Predecessors
from cyclone_kv.connectors._promises import FailedBlocks, HitWatch, SlowLoads
from cyclone_kv.connectors.lmcache.identity import (
    ModelFacts,
    hash_algorithm_of_server,
    object_identity,
    object_key,
    process_local,
    random_hash,
    serde_of_server,
)
from cyclone_kv.connectors.lmcache.options import L2Options
from cyclone_kv.connectors.lmcache.spaces import Space, Spaces

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

__all__ = ["CycloneL2Adapter"]

logger = init_logger("lmcache.cyclone_kv.l2")

_L1_BYTES = 4 << 30  # for the bound of the queue when LMCache does not tell
_GONE_SECONDS = 1.0
_HASH_REMEDY = (
    "Start the server with --hash-algorithm blake3 (the default), or set "
    "PYTHONHASHSEED to one value everywhere"
)


@dataclass(slots=True)
class _Batch:
    """The objects of one task and one space; `places` are theirs in the task."""

    space: Space
    places: list[int]
    keys: list[bytes]


class CycloneL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Objects of LMCache's server in a cyclone_kv volume.

    Made by LMCache from an entry of ``--l2-adapter``; `adapter_params` are the options
    of `L2Options` and `CacheConfig`.  Thread-safe.
    """

    def __init__(
        self,
        adapter_params: Mapping[str, Any],
        l1_memory_desc: L1MemoryDesc | None = None,
    ) -> None:
        # The volume evicts by itself: no capacity that LMCache should watch.
        super().__init__(max_capacity_bytes=0)
        self._options, config = L2Options.parse(adapter_params)
        self._refuse_server_settings()
        self._faults = Faults(logger)
        self._failed: FailedBlocks[ObjectKey] = FailedBlocks()
        self._slow = SlowLoads(self._options.recompute_tokens_per_second, logger)
        self._watch = HitWatch(logger)
        self._predecessors = Predecessors()
        self._queue_limit = self._options.store_queue_bytes(
            _L1_BYTES if l1_memory_desc is None else l1_memory_desc.size
        )
        self._queued_bytes = 0
        self._counts: Counter[str] = Counter()
        self._task_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._stored: dict[int, L2StoreResult] = {}
        self._looked_up: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._models: dict[str, ModelFacts] = {}
        self._announce_lock = threading.Lock()
        self._next_gone = 0.0
        self._closed = False
        with ExitStack() as undo:
            self._spaces = Spaces(
                self._options.path, config, logger=logger, faults=self._faults
            )
            undo.callback(self._spaces.close)
            self._announced: AnnouncedBlocks[tuple[ObjectKey, int]] = AnnouncedBlocks(
                [self._spaces.root]
            )
            self._notifiers = [create_event_notifier() for _ in range(3)]
            for notifier in self._notifiers:
                undo.callback(notifier.close)
            self._store_notifier, self._lookup_notifier, self._load_notifier = (
                self._notifiers
            )
            self._threads = CopyThreads(
                name="cyclone-kv-l2",
                loads=self._options.load_threads,
                stores=self._options.store_threads,
                on_fault=lambda error: self._faults.note("a copy thread", error),
            )
            undo.pop_all()

    def _refuse_server_settings(self) -> None:
        """Raise for settings of the server under which nothing would be found again."""
        reason = random_hash(hash_algorithm_of_server(), os.environ)
        if reason is not None:
            raise ValueError(reason + _HASH_REMEDY)
        if serde_of_server():
            raise ValueError(
                "a serde is configured around CycloneL2Adapter: serialized objects "
                "have neither the shapes nor the lengths that their identity names. "
                "Remove the serde from this adapter"
            )

    # ---- event fds ------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Return the descriptor that says that stores ended."""
        return int(self._store_notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that says that lookups ended."""
        return int(self._lookup_notifier.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that says that loads ended."""
        return int(self._load_notifier.fileno())

    # ---- store ----------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Queue a store; when too much waits already, drop it and count it."""
        task = next(self._task_ids)
        try:
            nbytes = sum(obj.get_size() for obj in objects)
            with self._lock:
                queued = self._queued_bytes
                dropped = bool(queued) and queued + nbytes > self._queue_limit
                if not dropped:
                    self._queued_bytes += nbytes
            if dropped:
                self._count(dropped_objects=len(keys))
                self._finish_store(task, success=False, nbytes=0)
            else:
                self._submit(
                    "store",
                    lambda: self._store(task, keys, objects, nbytes),
                    lambda: self._end_store(task, nbytes, success=False, stored=0),
                )
        except Exception as error:
            self._faults.note("submitting a store", error)
            self._finish_store(task, success=False, nbytes=0)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the results of stores that ended since the last call."""
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    def _store(
        self,
        task: int,
        keys: Sequence[ObjectKey],
        objects: Sequence[MemoryObj],
        nbytes: int,
    ) -> None:
        """Write the objects of a task; runs on a store thread."""
        good: list[int] = []
        try:
            for batch in self._batches(keys, map(_layout, objects)):
                good += self._write(batch, objects)
            stored = [keys[place] for place in good]
            self._failed.discard(stored)
            self._announce_stored(keys, objects, good)
        except Exception as error:
            self._faults.note("storing", error)
        stored_bytes = sum(objects[place].get_size() for place in good)
        self._count(stored_objects=len(good), refused_objects=len(keys) - len(good))
        self._watch.stored(stored_bytes)
        success = len(good) == len(keys)
        self._end_store(task, nbytes, success=success, stored=stored_bytes)
        self._report_gone()

    def _write(self, batch: _Batch, objects: Sequence[MemoryObj]) -> list[int]:
        good = []
        for chain in self._predecessors.chains(batch.keys):
            flags = batch.space.cache.put_many(
                [
                    (batch.keys[i], objects[batch.places[i]].byte_array)
                    for i in chain.places
                ],
                chain=True,
                parent=chain.parent,
            )
            good += [
                batch.places[i] for i, ok in zip(chain.places, flags, strict=True) if ok
            ]
        return good

    def _end_store(self, task: int, nbytes: int, *, success: bool, stored: int) -> None:
        with self._lock:
            self._queued_bytes -= nbytes
        self._finish_store(task, success=success, nbytes=stored)

    def _finish_store(self, task: int, *, success: bool, nbytes: int) -> None:
        with self._lock:
            self._stored[task] = L2StoreResult(success, nbytes)
        self._signal(self._store_notifier)

    # ---- lookup ---------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look objects up at once, from memory alone."""
        task = next(self._task_ids)
        found = Bitmap(len(keys))
        try:
            layouts = {
                group: _plain(desc.shapes, desc.dtypes)
                for group, desc in group_layout_descs.items()
            }
            hits = 0
            for batch in self._batches(
                keys, (layouts.get(key.object_group_id) for key in keys)
            ):
                # A whole prompt of one shard and group, its head first.
                self._predecessors.learn(batch.keys)
                for place in self._find(batch, keys):
                    found.set(place)
                    hits += 1
            self._count(lookups=len(keys), hits=hits)
            self._watch.looked_up(len(keys), hits)
        except Exception as error:
            self._faults.note("looking up", error)
        with self._lock:
            self._looked_up[task] = found
        self._signal(self._lookup_notifier)
        return task

    def _find(self, batch: _Batch, keys: Sequence[ObjectKey]) -> list[int]:
        if self._slow:
            self._count(slow_lookups=len(batch.keys))
            return []
        cache = batch.space.cache
        present = [
            i
            for i, there in enumerate(cache.contains_many(batch.keys))
            if there and keys[batch.places[i]] not in self._failed
        ]
        if present:
            cache.touch([batch.keys[i] for i in present])
        return [batch.places[i] for i in present]

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return the result of a lookup, once."""
        with self._lock:
            return self._looked_up.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: lookups lock nothing (A3)."""

    # ---- load -----------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Queue a load."""
        task = next(self._task_ids)
        submitted = time.monotonic()
        failed = Bitmap(len(keys))
        try:
            self._submit(
                "load",
                lambda: self._load(task, keys, objects, submitted),
                lambda: self._finish_load(task, failed),
            )
        except Exception as error:
            self._faults.note("submitting a load", error)
            self._finish_load(task, failed)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return the result of a load, once."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    def _load(
        self,
        task: int,
        keys: Sequence[ObjectKey],
        objects: Sequence[MemoryObj],
        submitted: float,
    ) -> None:
        """Read the objects of a task; runs on a load thread."""
        good: list[int] = []
        try:
            for batch in self._batches(keys, map(_layout, objects)):
                flags = batch.space.cache.get_many_into(
                    batch.keys,
                    [objects[place].byte_array for place in batch.places],
                    exact=True,
                )
                loaded = [p for p, ok in zip(batch.places, flags, strict=True) if ok]
                good += loaded
                self._learn_speed(batch.space, objects, loaded, submitted)
        except Exception as error:
            self._faults.note("loading", error)
        result = Bitmap(len(keys))
        for place in good:
            result.set(place)
        reached = set(good)
        self._failed.add(key for i, key in enumerate(keys) if i not in reached)
        self._count(loaded_objects=len(good), load_failed_objects=len(keys) - len(good))
        try:
            if good:
                self._notify_keys_accessed([keys[place] for place in good])
        except Exception as error:
            self._faults.note("telling listeners", error)
        self._finish_load(task, result)
        self._report_gone()

    def _learn_speed(
        self,
        space: Space,
        objects: Sequence[MemoryObj],
        places: Sequence[int],
        submitted: float,
    ) -> None:
        if places:
            size = objects[places[0]].get_size()
            self._slow.learn(
                nbytes=size * len(places),
                seconds=time.monotonic() - submitted,
                bytes_per_token=size / space.identity.block_tokens,
            )

    def _finish_load(self, task: int, result: Bitmap) -> None:
        with self._lock:
            self._loaded[task] = result
        self._signal(self._load_notifier)

    # ---- what hangs together --------------------------------------------------------

    def _submit(
        self, kind: Any, work: Callable[[], None], fail: Callable[[], None]
    ) -> None:
        """Hand work to the copy threads; when they are closed, fail it."""
        try:
            self._threads.submit(kind, work)
        except RuntimeError as error:
            self._faults.note(f"submitting a {kind}", error)
            fail()

    def _batches(
        self, keys: Sequence[ObjectKey], layouts: Iterable[_Layout | None]
    ) -> list[_Batch]:
        """Part a task by space, in the order of its keys."""
        batches: dict[tuple[Any, ...], _Batch] = {}
        for place, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            if layout is None:
                continue
            name = (key.model_name, key.kv_rank, key.object_group_id, layout)
            batch = batches.get(name)
            if batch is None:
                space = self._spaces.get(name, partial(self._identity, key, layout))
                if space is None:
                    continue
                batch = batches[name] = _Batch(space, [], [])
            batch.places.append(place)
            batch.keys.append(object_key(key))
        return list(batches.values())

    def _identity(self, key: ObjectKey, layout: _Layout) -> Any:
        if process_local(key.chunk_hash, os.environ):
            raise ValueError(
                "hashes of 8 bytes come from Python's hash() and PYTHONHASHSEED is not "
                f"set: nothing stored would be found again. {_HASH_REMEDY}"
            )
        name = key.model_name
        facts = self._models.get(name)
        if facts is None:
            facts = self._models[name] = ModelFacts.of(
                name, model=self._options.model, weights=self._options.weights_of(name)
            )
        return object_identity(
            facts,
            kv_rank=key.kv_rank,
            group=key.object_group_id,
            shapes=layout[0],
            dtypes=layout[1],
        )

    def _announce_stored(
        self,
        keys: Sequence[ObjectKey],
        objects: Sequence[MemoryObj],
        good: Sequence[int],
    ) -> None:
        """Tell listeners what is stored (A7)."""
        told: list[tuple[ObjectKey, int]] = []
        with self._announce_lock:
            for batch in self._batches(
                [keys[place] for place in good],
                [_layout(objects[place]) for place in good],
            ):
                self._announced.add(batch.space.cache)
                told += self._announced.announce(
                    batch.space.cache,
                    {
                        (keys[good[p]], objects[good[p]].get_size()): block
                        for p, block in zip(batch.places, batch.keys, strict=True)
                    },
                )
        if told:
            self._notify_keys_stored([k for k, _ in told], [n for _, n in told])

    def _report_gone(self) -> None:
        """Tell listeners what is gone, at most once a second (A7)."""
        try:
            with self._announce_lock:
                now = time.monotonic()
                if now < self._next_gone:
                    return
                self._next_gone = now + _GONE_SECONDS
                gone = self._announced.gone()
            if gone:
                self._notify_keys_deleted([k for k, _ in gone], [n for _, n in gone])
        except Exception as error:
            self._faults.note("telling listeners", error)

    # ---- the rest of the interface --------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects of the kinds that this server has stored or looked up."""
        try:
            spaces = self._spaces.known()
            for key in keys:
                kind = (key.model_name, key.kv_rank, key.object_group_id)
                for name, space in spaces:
                    if name[:3] == kind:
                        space.cache.remove(object_key(key))
        except Exception as error:
            self._faults.note("deleting", error)
        self._next_gone = 0.0
        self._report_gone()

    def report_status(self) -> dict[str, Any]:
        """Return what `lmcache server` shows of its adapters."""
        status: dict[str, Any] = {"type": type(self).__name__, "is_healthy": False}
        try:
            volume = self._spaces.root.stats().volume
            with self._lock:
                status |= dict(self._counts)
                queued = self._queued_bytes
            status |= {
                "is_healthy": not self._closed and volume.failed_paths == 0,
                "paths": list(self._spaces.root.paths),
                "capacity_bytes": volume.capacity_bytes,
                "resident_bytes": volume.resident_bytes,
                "entries": volume.entries,
                "corrupt": volume.corrupt,
                "evictions": volume.evictions,
                "queued_bytes": queued,
                "announced_objects": len(self._announced),
                "faults": self._faults.count,
            }
        except Exception as error:
            self._faults.note("reporting", error)
        return status

    def close(self) -> None:
        """Let copies end, then give back threads and volume.  Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._threads.close()
        for notifier in self._notifiers:
            notifier.close()
        self._spaces.close()

    def _signal(self, notifier: Any) -> None:
        if not self._closed:  # while it closes nobody listens any more
            notifier.notify()

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


_Layout = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]


def _plain(shapes: Iterable[Iterable[int]], dtypes: Iterable[object]) -> _Layout:
    return tuple(tuple(shape) for shape in shapes), tuple(map(str, dtypes))


def _layout(obj: MemoryObj) -> _Layout:
    meta = obj.meta
    if meta.shapes and meta.dtypes:
        return _plain(meta.shapes, meta.dtypes)
    return _plain([meta.shape], [meta.dtype])
