# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's tiering run on a CPU: stands in for one class, and only in tests.

vLLM's own worker moves blocks between GPU memory and the primary tier with CUDA copies
and refuses a CPU.  This one copies the same rows with torch.  Scheduler, connector,
tiering manager, primary tier and every secondary tier stay vLLM's own code.
"""

from __future__ import annotations

import time

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuPlatformTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with a worker for the CPU platform."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _CopyWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker


class _CopyWorker(OffloadingWorker):
    """Copies at once; a job is finished when it was submitted."""

    def __init__(self, kv_caches, region, blocks_per_chunk):
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._device, self._host = [], []
        for cache in kv_caches.tensors:
            page = cache.page_size_bytes
            self._device.append(cache.tensor.view(torch.int8).view(-1, page))
            rows = region.create_next_worker_view(page * blocks_per_chunk)
            self._host.append(rows.unflatten(1, (blocks_per_chunk, page)))
        self._finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def _copy(self, job_id, device_spec, host_spec, *, to_host):
        started, nbytes = time.monotonic(), 0
        blocks = torch.from_numpy(device_spec.block_ids).long()
        chunks = torch.from_numpy(host_spec.block_ids).long()
        block_at = chunk_at = 0
        sizes = zip(device_spec.group_sizes, device_spec.block_indices, strict=True)
        for refs, (size, index) in zip(self._refs, sizes, strict=True):
            if not size:
                continue
            place = torch.arange(size) + index % self._blocks_per_chunk
            rows = chunks[chunk_at + place // self._blocks_per_chunk]
            parts = place % self._blocks_per_chunk
            mine = blocks[block_at : block_at + size]
            for ref in refs:
                device, host = self._device[ref.tensor_idx], self._host[ref.tensor_idx]
                page = ref.page_size_bytes
                if to_host:
                    host[rows, parts, :page] = device[mine, :page]
                else:
                    device[mine, :page] = host[rows, parts, :page]
                nbytes += size * page
            block_at += size
            chunk_at += int(place[-1]) // self._blocks_per_chunk + 1
        assert block_at == len(blocks)
        assert chunk_at == len(chunks)
        seconds = time.monotonic() - started
        self._finished.append(TransferResult(job_id, True, nbytes, seconds))
        return True

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self._device, self._host = [], []
        self._region.cleanup()
