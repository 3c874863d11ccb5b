# SPDX-License-Identifier: Apache-2.0
"""`CycloneHiCache`: the methods that SGLang's cache controller calls.

    batch_exists   longest_prefix()   prefetch thread, memory only
    batch_get_v1   get_many_into()    prefetch thread  \
    batch_set_v1   put_many()         backup thread    /  no GIL

G1  A page of the host pool is one block of the volume: its regions (K and V, or one for
    each layer) are gathered when it is stored and scattered when it is loaded, without
    a copy between.  Its key is SGLang's page hash as it is.
G2  A page is loaded, or stored, exactly if its answer is True: all of its bytes, with
    the right checksum.  What did not arrive is a miss for a while.
G3  SGLang keeps the pages of a batch in place until the call returns; no view of them
    outlives it.
G4  The identity needs the host pool, so the volume is opened when SGLang registers it;
    a mistake raises there, and SGLang does not start.
G5  After that no exception reaches SGLang's threads.  `_guarded` says what is returned
    instead.
G6  Pools beside the one of KV pages are refused: with them half of a model's state
    would be restored.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from cyclone_kv.cache import Cache
from cyclone_kv.connectors._common import Faults, self_check, startup_line
from cyclone_kv.connectors._predecessors import Predecessors
from cyclone_kv.connectors._promises import FailedBlocks, HitWatch, SlowLoads
from cyclone_kv.connectors.sglang.identity import page_identity
from cyclone_kv.connectors.sglang.options import HiCacheOptions
from cyclone_kv.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
    )

__all__ = ["CycloneHiCache"]

logger = logging.getLogger("sglang.cyclone_kv")

_HASH_DIGITS = 64
_KV_POOL = "kv"

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _guarded(instead: Callable[[Any], Any]) -> Callable[[_Method], _Method]:
    """Turn an exception of a method into a counted fault and a harmless result (G5).

    `instead` makes the result from the first argument.
    """

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def call(self: CycloneHiCache, first: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, first, *args, **kwargs)
            except Exception as error:
                self._faults.note(method.__name__, error)
                return instead(first)

        return cast(_Method, call)

    return decorate


def _all_false(keys: Sequence[str]) -> list[bool]:
    return [False] * len(keys)


class CycloneHiCache(HiCacheStorage):  # type: ignore[misc]
    """KV pages in a cyclone_kv volume, as storage of SGLang's hierarchical cache.

    Made by SGLang's dynamic loader; the options are those of `HiCacheOptions` and
    `CacheConfig`.  Any thread may use it.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None
    ) -> None:
        self._config = storage_config
        self._options, self._cache_config = HiCacheOptions.of_extra_config(
            storage_config.extra_config or {}
        )
        if storage_config.should_split_heads:
            raise ConfigError(
                "tp_lcm_size shares pages between engines of different tensor parallel "
                "size by splitting heads; cyclone_kv stores whole pages. Remove it"
            )
        self._faults = Faults(logger)
        self._failed: FailedBlocks[bytes] = FailedBlocks()
        self._slow = SlowLoads(self._options.recompute_tokens_per_second, logger)
        self._watch = HitWatch(logger)
        self._predecessors = Predecessors()
        self._cache: Cache | None = None
        self._pool: Any = None
        self._page_bytes = 0
        self._measures = _Measures(enabled=storage_config.enable_storage_metrics)

    # ---- start ----------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool whose pages are stored; open the volume for them (G4)."""
        if not hasattr(mem_pool_host, "get_page_buffer_meta"):
            raise ConfigError(
                f"the host pool {type(mem_pool_host).__name__} does not say where its "
                "pages lie; cyclone_kv stores pools of one model's attention KV"
            )
        super().register_mem_pool_host(mem_pool_host)
        regions = _regions_of(mem_pool_host)
        identity = page_identity(
            self._config,
            mem_pool_host,
            regions=regions,
            model=self._options.model,
            weights=self._options.weights,
            warn=logger.warning,
        )
        namespace = identity.namespace()
        opened = Cache.open(
            self._options.path,
            self._cache_config,
            namespace=namespace,
        )
        try:
            self_check(opened, sum(regions))
        except BaseException:
            opened.close()
            raise
        self.close()
        self._cache, self._pool = opened, mem_pool_host
        self._page_bytes = sum(regions)
        facts = (
            f"model {identity.model}, weights {identity.weights[:24]}, "
            f"{identity.kv_dtype}, {mem_pool_host.layout}, {identity.block_tokens} "
            f"tokens and {self._page_bytes} B in {len(regions)} regions a page, "
            f"tp {identity.tp_rank} of {identity.tp_size}, "
            f"pp {identity.pp_rank} of {identity.pp_size}, "
            f"cp {identity.cp_rank} of {identity.cp_size}"
        )
        logger.info("%s", startup_line(opened, namespace, facts))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse every pool but the one of KV pages (G6)."""
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if name != _KV_POOL:
            raise NotImplementedError(
                f"this model keeps state in a pool {name!r} beside its KV pages. "
                "cyclone_kv stores KV pages alone, and without the rest a hit would "
                "restore half of the state. Use it for models of plain attention "
                "(MHA, GQA, MLA), or another storage for this model"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # ---- lookups --------------------------------------------------------------------

    @_guarded(lambda key: False)
    def exists(self, key: str) -> bool:
        """Say whether a page is stored, from memory alone."""
        return bool(self.batch_exists([key]))

    @_guarded(lambda keys: 0)
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Count the leading pages that are stored, from memory alone."""
        blocks = [_block(key) for key in keys]
        if not blocks or self._slow:
            return 0
        self._predecessors.learn(blocks, parent=_parent(extra_info))
        # They are loaded next, and should still be there.
        found = self._opened().longest_prefix(blocks, touch=True)
        if len(self._failed):
            found = next((i for i in range(found) if blocks[i] in self._failed), found)
        self._watch.looked_up(len(keys), found)
        return found

    # ---- pages ----------------------------------------------------------------------

    @_guarded(_all_false)
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into the host pool; say for each whether it arrived."""
        return self._load(keys, self._pages(keys, host_indices))

    @_guarded(_all_false)
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of the host pool; say for each whether it is stored."""
        return self._store(keys, self._pages(keys, host_indices), _parent(extra_info))

    def _load(self, keys: Sequence[str], targets: Sequence[Any]) -> list[bool]:
        started = time.monotonic()
        blocks = [_block(key) for key in keys]
        flags = self._opened().get_many_into(blocks, targets, exact=True)
        seconds = time.monotonic() - started
        self._failed.add(b for b, ok in zip(blocks, flags, strict=True) if not ok)
        nbytes = sum(flags) * self._page_bytes
        self._slow.learn(
            nbytes=nbytes,
            seconds=seconds,
            bytes_per_token=self._page_bytes / self._pool.page_size,
        )
        self._measures.loaded(pages=sum(flags), nbytes=nbytes, seconds=seconds)
        return flags

    def _store(
        self, keys: Sequence[str], sources: Sequence[Any], parent: bytes | None
    ) -> list[bool]:
        """Store consecutive pages of one prefix."""
        started = time.monotonic()
        blocks = [_block(key) for key in keys]
        if parent is None and blocks:
            parent = self._predecessors.before(blocks[0])
        flags = self._opened().put_many(
            list(zip(blocks, sources, strict=True)), chain=True, parent=parent
        )
        self._failed.discard(b for b, ok in zip(blocks, flags, strict=True) if ok)
        nbytes = sum(flags) * self._page_bytes
        self._watch.stored(nbytes)
        self._measures.stored(
            pages=sum(flags), nbytes=nbytes, seconds=time.monotonic() - started
        )
        return flags

    def _pages(
        self, keys: Sequence[str], host_indices: torch.Tensor
    ) -> list[list[memoryview]]:
        """Return the regions of each page as memory (G1)."""
        self._opened()
        if len(host_indices) != len(keys) * self._pool.page_size:
            raise ValueError(
                f"{len(keys)} pages of {self._pool.page_size} tokens, and "
                f"{len(host_indices)} indices"
            )
        if not keys:
            return []
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        each = len(pointers) // len(keys)
        if each * len(keys) != len(pointers) or len(sizes) != len(pointers):
            raise ValueError(f"{len(pointers)} regions for {len(keys)} pages")
        regions = [_memory(p, n) for p, n in zip(pointers, sizes, strict=True)]
        return [regions[i : i + each] for i in range(0, len(regions), each)]

    # ---- the older interface --------------------------------------------------------

    @_guarded(lambda key: None)
    def get(
        self,
        key: str,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> Any | None:
        """Fill a tensor with a page, its regions in a row; return it, or None."""
        if target_location is None:
            raise ValueError("a tensor to read into is needed")
        (ok,) = self._load([key], [_bytes_of(target_location)])
        return target_location if ok else None

    @_guarded(lambda keys: [None] * len(keys))
    def batch_get(
        self,
        keys: list[str],
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> list[Any | None]:
        """Fill a tensor with each page; return those that arrived, and None."""
        targets = list(target_locations or ())
        flags = self._load(keys, [_bytes_of(target) for target in targets])
        return [t if ok else None for t, ok in zip(targets, flags, strict=True)]

    @_guarded(lambda key: False)
    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store the bytes of a tensor as a page."""
        return bool(self.batch_set([key], [value]))

    @_guarded(lambda keys: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store the bytes of tensors as pages; say whether all are stored."""
        sources = [_bytes_of(value) for value in values or ()]
        return all(self._store(keys, sources, None))

    # ---- hybrid pools: refused ------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Find nothing where other pools are asked for; else the leading pages."""
        if pool_transfers:
            self._refuse_v2("batch_exists_v2")
            return PoolTransferResult.empty()
        return PoolTransferResult(self.batch_exists(keys, extra_info), {})

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Load nothing."""
        return self._refuse_v2("batch_get_v2", transfers)

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Store nothing."""
        return self._refuse_v2("batch_set_v2", transfers)

    def _refuse_v2(
        self, what: str, transfers: Sequence[PoolTransfer] = ()
    ) -> dict[str, list[bool]]:
        self._faults.note(
            what, NotImplementedError("cyclone_kv stores no pools beside KV pages")
        )
        return {
            str(transfer.name): _all_false(transfer.keys or ())
            for transfer in transfers
        }

    # ---- the rest of the interface --------------------------------------------------

    def clear(self) -> None:
        """Remove every page of this identity; other identities stay."""
        try:
            self._opened().clear()
        except Exception as error:
            self._faults.note("clear", error)

    def get_stats(self) -> Any | None:
        """Return pages and speeds since the last call, for SGLang's metrics."""
        return self._measures.take()

    def close(self) -> None:
        """Give the volume back.  Idempotent."""
        opened, self._cache = self._cache, None
        if opened is not None:
            opened.close()

    def _opened(self) -> Cache:
        if self._cache is None:
            raise RuntimeError("no host pool is registered, or the storage was closed")
        return self._cache


class _Measures:
    """Pages and speeds of batches, in the shape of SGLang's StorageMetrics."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._loads: list[tuple[int, float]] = []
        self._stores: list[tuple[int, float]] = []

    def loaded(self, *, pages: int, nbytes: int, seconds: float) -> None:
        self._add(self._loads, pages, nbytes, seconds)

    def stored(self, *, pages: int, nbytes: int, seconds: float) -> None:
        self._add(self._stores, pages, nbytes, seconds)

    def _add(
        self, where: list[tuple[int, float]], pages: int, nbytes: int, seconds: float
    ) -> None:
        if self._enabled and pages:
            with self._lock:
                where.append((pages, nbytes / 2**30 / max(seconds, 1e-9)))

    def take(self) -> Any | None:
        if not self._enabled:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            loads, self._loads = self._loads, []
            stores, self._stores = self._stores, []
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in stores],
            prefetch_bandwidth=[speed for _, speed in loads],
            backup_bandwidth=[speed for _, speed in stores],
        )


def _block(key: str) -> bytes:
    """Return the key of a page: SGLang's SHA-256 as it is."""
    if len(key) == _HASH_DIGITS:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    return b"sglang page " + key.encode()


def _parent(extra_info: HiCacheStorageExtraInfo | None) -> bytes | None:
    """Return the key of the page in front of a call's first."""
    prefix = extra_info.prefix_keys if extra_info is not None else None
    return _block(prefix[-1]) if prefix else None


def _regions_of(pool: Any) -> list[int]:
    """Return the bytes of each region of a page."""
    import torch

    _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
    return [int(size) for size in sizes]


@cache
def _array_of(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """Return one type per length: ctypes never gives a type back."""
    return ctypes.c_ubyte * nbytes


def _memory(pointer: int, nbytes: int) -> memoryview:
    return memoryview(_array_of(nbytes).from_address(pointer))


def _bytes_of(tensor: Any) -> memoryview:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("a contiguous tensor on the CPU is needed")
    return _memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
