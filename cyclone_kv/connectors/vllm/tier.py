# SPDX-License-Identifier: Apache-2.0
"""`CycloneTier`: the methods that vLLM's tiering manager calls.

    lookup         contains()         scheduler's thread, memory only: HIT or MISS
    submit_load  -> load thread  ->   get_many_into()  \
    submit_store -> store thread ->   put_many()       /  no GIL; result into a deque
    get_finished_jobs <- deque        counters, failed keys, announcements
    take_events    contains_many(), events()          STORAGE stored and removed

T1  A chunk is a row of the primary tier's memory and one block of the volume.  Its key
    is vLLM's block hash as it is; the group index is in the namespace.
T2  Every job that was submitted is reported exactly once, whatever happened to it.
T3  A load reports exactly the keys whose bytes arrived with the right checksum.  The
    others are misses for a while, also if the volume still lists them: a request that
    was promised a chunk and did not get it must not be promised it again at once.
T4  Views of the primary memory live no longer than the job that uses them; vLLM keeps
    the rows in place until the job is reported.
T5  After the start no exception reaches the engine.  `_guarded` says what is returned
    instead.
T6  What waits to be stored is bounded in bytes, since it pins the primary tier.
T7  Counters, failed keys and announcements belong to the scheduler's thread (vLLM 0.33:
    to whoever holds the manager's lock).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from cyclone_kv.cache import Cache
from cyclone_kv.connectors._common import (
    Faults,
    human_bytes,
    self_check,
    startup_line,
)
from cyclone_kv.connectors._copy_threads import CopyThreads
from cyclone_kv.connectors._events import AnnouncedBlocks
from cyclone_kv.connectors._promises import FailedBlocks, HitWatch, SlowLoads
from cyclone_kv.connectors.vllm.identity import (
    engine_config,
    group_identities,
    random_hash_seed,
)
from cyclone_kv.connectors.vllm.measures import Measures, metric_definitions
from cyclone_kv.connectors.vllm.options import TierOptions

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

__all__ = ["CycloneTier"]

# Named as a child of vLLM's logger, whose handlers and level then apply.
logger = init_logger("vllm.cyclone_kv")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _guarded(instead: Any) -> Callable[[_Method], _Method]:
    """Turn an exception of a method into a counted fault and a harmless result (T5)."""

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def call(self: CycloneTier, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._faults.note(method.__name__, error)
                return instead

        return cast(_Method, call)

    return decorate


@dataclass(frozen=True, slots=True)
class _Group:
    """A KV cache group and its namespace of the volume."""

    cache: Cache
    namespace: str
    chunk_tokens: int


@dataclass(slots=True)
class _Batch:
    """The chunks of one job and one group, head of the prefix first where known."""

    group: _Group
    keys: list[OffloadKey]
    hashes: list[bytes]
    rows: list[int]
    chained: bool = False
    parent: bytes | None = None


@dataclass(slots=True)
class _Job:
    """A job from submission to report."""

    job_id: int
    request_id: str
    keys: list[OffloadKey]
    nbytes: int
    submitted: float
    is_load: bool
    batches: list[_Batch] = field(default_factory=list)
    good: list[OffloadKey] = field(default_factory=list)
    seconds: float = 0.0
    dropped: bool = False
    announce: bool = True


class _Tails:
    """Last stored or loaded chunk of each group of a request: end token and hash.

    Lies in the request's own scratch space and ends with it.
    """

    def __init__(self) -> None:
        self.ends: dict[int, tuple[int, bytes]] = {}


class CycloneTier(SecondaryTierManager):  # type: ignore[misc]
    """KV chunks in a cyclone_kv volume, as a secondary tier of vLLM's KV offloading.

    Made by vLLM from an entry of `secondary_tiers`; the options are those of
    `TierOptions` and `CacheConfig`.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any | None = None,
        **options: Any,
    ) -> None:
        # vLLM 0.30 knows no detector.
        detector = () if backpressure_detector is None else (backpressure_detector,)
        super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
        self._options, config = TierOptions.parse(options)
        self.locality = Locality(self._options.locality)
        rows, self._chunk_bytes = _shape(primary_kv_view)
        self._faults = Faults(logger)
        self._jobs: dict[int, _Job] = {}
        self._finished: deque[_Job] = deque()
        self._failed: FailedBlocks[OffloadKey] = FailedBlocks()
        self._queued_bytes = 0
        self._queue_limit = self._options.store_queue_bytes(rows * self._chunk_bytes)
        self._slow = SlowLoads(self._options.recompute_tokens_per_second, logger)
        self._watch = HitWatch(logger)
        self._live: dict[str, ReqContext] = {}
        self._loaded: dict[str, list[OffloadKey]] = {}
        self._to_announce: list[OffloadKey] = []
        self._announced_at: dict[OffloadKey, float] = {}
        self._closed = False

        with ExitStack() as undo:
            self._groups, facts = self._open(offloading_spec, config, undo)
            group = next(iter(self._groups.values()))
            self_check(group.cache, self._chunk_bytes)
            self._measures = Measures(group.cache)
            self._announced = self._make_announced(offloading_spec)
            self._rows = primary_kv_view.cast("B")
            undo.callback(self._rows.release)
            self._threads = CopyThreads(
                name="cyclone-kv",
                loads=self._options.load_threads,
                stores=self._options.store_threads,
                on_fault=lambda error: self._faults.note("a copy thread", error),
            )
            undo.pop_all()
        logger.info("%s", startup_line(group.cache, group.namespace, facts))

    # ---- start ----------------------------------------------------------------------

    def _open(
        self, spec: OffloadingSpec, config: Any, undo: ExitStack
    ) -> tuple[dict[int, _Group], str]:
        """Open the volume once for each group; return the groups and a few words."""
        vllm_config = engine_config()
        seeded = random_hash_seed(vllm_config, os.environ)
        if seeded is not None:
            raise ValueError(
                f"prefix_caching_hash_algo is {seeded!r}, whose seed is random in each "
                "process: nothing stored would be found again. Set PYTHONHASHSEED to "
                "one value everywhere, or use sha256_cbor"
            )
        identities = group_identities(
            spec.config,
            chunk_bytes=self._chunk_bytes,
            vllm_config=vllm_config,
            model=self._options.model,
            weights=self._options.weights,
            warn=logger.warning,
        )
        groups = {}
        for index, identity in identities.items():
            namespace = identity.namespace()
            cache = Cache.open(self._options.path, config, namespace=namespace)
            undo.callback(cache.close)
            groups[index] = _Group(cache, namespace, identity.block_tokens)
        first = next(iter(identities.values()))
        facts = (
            f"model {first.model}, weights {first.weights[:24]}, {first.kv_dtype}, "
            f"{first.block_tokens} tokens and {human_bytes(self._chunk_bytes)} a "
            f"block, {len(groups)} cache group(s), tp {first.tp_size}, "
            f"pp {first.pp_size}, cp {first.cp_size}"
        )
        return groups, facts

    def _make_announced(
        self, spec: OffloadingSpec
    ) -> AnnouncedBlocks[OffloadKey] | None:
        if not self._options.enable_kv_events:
            return None
        if not spec.kv_events_config.enable_kv_cache_events:
            logger.warning(
                "cyclone_kv: enable_kv_events is set, but KV cache events are off in "
                "the engine (--kv-events-config): none will be sent"
            )
            return None
        return AnnouncedBlocks(group.cache for group in self._groups.values())

    # ---- lookups --------------------------------------------------------------------

    @_guarded(LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether the chunk is stored, from memory alone."""
        self._measures.add("lookups")
        self._watch.looked_up(1, 0)
        if key in self._failed:
            return LookupResult.MISS
        if self._slow:
            self._measures.add("slow_lookups")
            return LookupResult.MISS
        group = self._groups.get(get_offload_group_idx(key))
        if group is None or not group.cache.contains(get_offload_block_hash(key)):
            return LookupResult.MISS
        self._watch.looked_up(0, 1)
        self._measures.add("hits")
        return LookupResult.HIT

    @_guarded(None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Give the chunks two passes of the eviction cursor."""
        for batch in self._batches(keys, range(len(keys)), req_context):
            batch.group.cache.touch(batch.hashes)

    # ---- jobs -----------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue a store; when too much waits already, drop it and count it."""
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue a load."""
        self._submit(job_metadata, is_load=True)

    def _submit(self, job_metadata: TransferJob, *, is_load: bool) -> None:
        job = _Job(
            job_id=job_metadata.job_id,
            request_id=job_metadata.req_context.req_id,
            keys=list(job_metadata.keys),
            nbytes=len(job_metadata.keys) * self._chunk_bytes,
            submitted=time.monotonic(),
            is_load=is_load,
        )
        self._jobs[job.job_id] = job
        try:
            context = job_metadata.req_context
            job.batches = self._batches(
                job.keys, job_metadata.chunk_ids.tolist(), context
            )
            self._find_parents(job.batches, context)
            queued = self._queued_bytes
            if not is_load and queued and queued + job.nbytes > self._queue_limit:
                job.dropped = True
                self._finished.append(job)
                return
            self._threads.submit(
                "load" if is_load else "store", lambda: self._copy(job)
            )
            if not is_load:
                self._queued_bytes += job.nbytes
        except Exception as error:
            self._faults.note("submitting a job", error)
            job.dropped = True
            self._finished.append(job)

    def _batches(
        self, keys: Iterable[OffloadKey], rows: Iterable[int], context: ReqContext
    ) -> list[_Batch]:
        """Part keys by group and bring them into the order of the prefix.

        vLLM hands out the keys of a store as a set; where a chunk ends in its prefix is
        known from 0.31 on.
        """
        parted: dict[int, list[tuple[int | None, OffloadKey, int]]] = {}
        position = getattr(context, "get_offload_key_position", lambda key: None)
        for key, row in zip(keys, rows, strict=True):
            parted.setdefault(get_offload_group_idx(key), []).append(
                (position(key), key, row)
            )
        batches = []
        for index, chunks in parted.items():
            group = self._groups[index]
            ends = [end for end, _, _ in chunks if end is not None]
            chained = len(ends) == len(chunks)
            if chained:
                chunks.sort(key=lambda chunk: chunk[0] or 0)
                span = max(ends) - min(ends)
                chained = span == (len(ends) - 1) * group.chunk_tokens
            batches.append(
                _Batch(
                    group=group,
                    keys=[key for _, key, _ in chunks],
                    hashes=[get_offload_block_hash(key) for _, key, _ in chunks],
                    rows=[row for _, _, row in chunks],
                    chained=chained,
                )
            )
        return batches

    def _find_parents(self, batches: list[_Batch], context: ReqContext) -> None:
        """Remember where each batch ends, and find what the next one continues."""
        tails = context.get_state(_Tails)
        if tails is None:
            tails = _Tails()
            context.set_state(tails)
        for batch in batches:
            if not batch.chained:
                continue
            index = get_offload_group_idx(batch.keys[0])
            first = context.get_offload_key_position(batch.keys[0])
            tail = tails.ends.get(index)
            if tail is not None and tail[0] + batch.group.chunk_tokens == first:
                batch.parent = tail[1]
            last = context.get_offload_key_position(batch.keys[-1])
            tails.ends[index] = (last, batch.hashes[-1])

    def _copy(self, job: _Job) -> None:
        """Move the bytes of a job; runs on a copy thread and always reports."""
        started = time.monotonic()
        try:
            for batch in job.batches:
                move = self._read if job.is_load else self._write
                flags = move(batch)
                job.good += [
                    key for key, ok in zip(batch.keys, flags, strict=True) if ok
                ]
        except Exception as error:
            self._faults.note("loading" if job.is_load else "storing", error)
        finally:
            job.seconds = time.monotonic() - started
            self._finished.append(job)

    def _row(self, row: int) -> memoryview:
        return self._rows[row * self._chunk_bytes : (row + 1) * self._chunk_bytes]

    def _read(self, batch: _Batch) -> list[bool]:
        targets = [self._row(row) for row in batch.rows]
        return batch.group.cache.get_many_into(batch.hashes, targets, exact=True)

    def _write(self, batch: _Batch) -> list[bool]:
        sources = [self._row(row) for row in batch.rows]
        return batch.group.cache.put_many(
            list(zip(batch.hashes, sources, strict=True)),
            chain=batch.chained,
            parent=batch.parent,
        )

    # ---- results --------------------------------------------------------------------

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Report the jobs that ended since the last call."""
        results = []
        while self._finished:
            job = self._finished.popleft()
            if self._jobs.pop(job.job_id, None) is None:
                continue  # reported before (T2)
            results.append(_job_result(job, self._chunk_bytes))
            try:
                self._account(job)
            except Exception as error:
                self._faults.note("accounting for a job", error)
        return results

    def _account(self, job: _Job) -> None:
        count, good = len(job.keys), len(job.good)
        if job.is_load:
            self._measures.add("loaded_chunks", good)
            self._measures.add("load_failed_chunks", count - good)
            if good < count:
                self._failed.add(set(job.keys) - set(job.good))
            self._learn_speed(job)
            announce = self._announced is not None and job.announce
            if announce and job.request_id in self._live:
                self._loaded.setdefault(job.request_id, []).extend(job.good)
            return
        if job.dropped:
            self._measures.add("dropped_chunks", count)
            return
        self._queued_bytes -= job.nbytes
        self._measures.add("stored_chunks", good)
        self._measures.add("refused_chunks", count - good)
        self._failed.discard(job.good)
        if self._announced is not None and job.announce:
            self._to_announce += job.good
        self._watch.stored(good * self._chunk_bytes)

    def _learn_speed(self, job: _Job) -> None:
        """Take the speed of a load into account, waiting included."""
        if job.batches:
            self._slow.learn(
                nbytes=len(job.good) * self._chunk_bytes,
                seconds=time.monotonic() - job.submitted,
                bytes_per_token=self._chunk_bytes / job.batches[0].group.chunk_tokens,
            )

    def drain_jobs(self) -> None:
        """Wait for every submitted job; abort none.

        vLLM calls it when it resets its caches and with them what it knows about
        chunks, so nothing that was announced, or is about to be, holds any longer.
        """
        self._threads.drain()
        for job in tuple(self._finished):
            job.announce = False
        self._to_announce.clear()
        self._announced_at.clear()
        self._loaded.clear()
        if self._announced is not None:
            self._announced.forget()

    # ---- requests -------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for nothing special: chunks are stored as they are computed."""
        self._live[req_context.req_id] = req_context
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request."""
        self._live.pop(req_context.req_id, None)
        self._loaded.pop(req_context.req_id, None)

    @_guarded(None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Announce again what scheduled requests were loaded from, or reuse.

        By now vLLM has seen those chunks in its primary tier and knows their tokens,
        which it does not after a restart; without them an event names nothing that a
        router could use.
        """
        for request_id in context.new_req_ids:
            loaded = self._loaded.pop(request_id, [])
            self._to_announce += loaded
            self._to_announce += self._due(request_id, set(loaded))

    def _due(self, request_id: str, but: set[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks of a request whose announcement is old.

        A reset of the prefix cache that spares the connector makes routers forget all
        tiers and calls nothing here, and a chunk that is found in the primary tier is
        not loaded.  Only what was announced: vLLM knows its tokens.
        """
        request = self._live.get(request_id)
        if request is None or not self._announced_at:
            return []
        before = time.monotonic() - self._options.announce_again_seconds
        return [
            key
            for key in getattr(request, "_offload_key_positions", ())
            if self._announced_at.get(key, before + 1) <= before and key not in but
        ]

    def has_pending_work(self) -> bool:
        """Keep the engine stepping until the last announcement is out."""
        return bool(self._to_announce)

    # ---- events ---------------------------------------------------------------------

    @_guarded(())
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Report chunks that are stored, and announced ones that anybody evicted."""
        if self._announced is None:
            return ()
        keys, self._to_announce = self._to_announce, []
        by_group: dict[int, dict[OffloadKey, bytes]] = {}
        for key in keys:
            by_group.setdefault(get_offload_group_idx(key), {})[key] = (
                get_offload_block_hash(key)
            )
        stored = [
            key
            for index, blocks in by_group.items()
            for key in self._announced.announce(self._groups[index].cache, blocks)
        ]
        lost = self._announced.lost
        gone = self._announced.gone()
        self._measures.add("events_lost", self._announced.lost - lost)
        now = time.monotonic()
        self._announced_at.update((key, now) for key in stored)
        for key in gone:
            self._announced_at.pop(key, None)
        self._measures.add("announced_chunks", len(stored))
        self._measures.add("gone_chunks", len(gone))
        return [
            _event(keys, removed=removed, locality=self.locality)
            for keys, removed in ((stored, False), (gone, True))
            if keys
        ]

    # ---- metrics, end ---------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Declare the metrics of the tier."""
        return metric_definitions()

    @_guarded(None)
    def get_stats(self) -> Any | None:
        """Return what was counted since the last call."""
        return self._measures.take(faults=self._faults.count)

    def shutdown(self) -> None:
        """Let copies end, then give back threads, memory and volume.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._threads.close()
        self._rows.release()
        for group in self._groups.values():
            group.cache.close()


def _shape(view: memoryview) -> tuple[int, int]:
    """Return the rows of the primary tier's memory and the bytes of each."""
    if view.shape is None or len(view.shape) != 2 or not view.c_contiguous:
        raise ValueError(
            f"the primary tier's memory has the shape {view.shape}; rows of bytes that "
            "follow each other were expected: is this version of vLLM supported?"
        )
    return view.shape[0], view.shape[1] * view.itemsize


def _job_result(job: _Job, chunk_bytes: int) -> JobResult:
    success = len(job.good) == len(job.keys) and not job.dropped
    values: dict[str, Any] = {
        "job_id": job.job_id,
        "success": success,
        "transfer_time": job.seconds,
        "transfer_bytes": len(job.good) * chunk_bytes,
    }
    if job.is_load and not success:
        values["successful_keys"] = tuple(job.good) or None
    return JobResult(**{k: v for k, v in values.items() if k in _RESULT_FIELDS})


def _event(
    keys: list[OffloadKey], *, removed: bool, locality: Locality
) -> OffloadingEvent:
    """Make an event that routers take: no owner, and removals to be expected."""
    values: dict[str, Any] = {
        "keys": keys,
        "medium": Medium.STORAGE,
        "removed": removed,
        "locality": locality,
        "removal_expected": not removed,
    }
    return OffloadingEvent(**{k: v for k, v in values.items() if k in _EVENT_FIELDS})


# vLLM 0.30 lacks some of them.
_RESULT_FIELDS = {item.name for item in fields(JobResult)}
_EVENT_FIELDS = {item.name for item in fields(OffloadingEvent)}
