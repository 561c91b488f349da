"""What vLLM's offloading lacks on the CPU: the worker that copies blocks to host memory and back, which has
for CUDA and XPU only. Scheduler, connector, tiers and host memory are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class Copying(OffloadingWorker):  # type: ignore[misc]
    """Each block of each tensor is copied at once; a chunk's blocks lie one after another in its row."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._groups, self._count, self._region = kv_caches.group_data_refs, blocks_per_chunk, region
        self._device = [
            one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors
        ]
        self._host = [
            region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk)
            for one in kv_caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, store=False)

    def _copy(self, job_id: int, device: Any, chunks: Any, store: bool) -> bool:
        for number, block, chunk, place in self._pairs(device, chunks.tolist()):
            for ref in self._groups[number]:
                size = self._device[ref.tensor_idx].shape[1]
                here = self._device[ref.tensor_idx][block]
                there = self._host[ref.tensor_idx][chunk, place * size : (place + 1) * size]
                (there if store else here).copy_(here if store else there)
        self._done.append(TransferResult(job_id, True))
        return True

    def _pairs(self, device: Any, chunks: list[int]) -> Iterator[tuple[int, int, int, int]]:
        """Group, block, chunk, and the block's place in it."""
        blocks, first = device.block_ids.tolist(), 0
        for number, (size, index) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
            for i in range(size):
                whole, place = divmod(index + i, self._count)
                yield number, blocks.pop(0), chunks[first + whole - index // self._count], place
            if size:
                first += (index + size - 1) // self._count - index // self._count + 1

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is pending."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()


class CPUTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
        )  # fmt: skip
        return Copying(kv_caches, self.blocks_per_chunk, region)
