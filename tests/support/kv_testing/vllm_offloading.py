"""vLLM's own offloading on a CPU, for comparisons: its managers, tiers and shared memory, with copies by memcpy.

vLLM's `TieringOffloadingSpec` refuses an engine without a GPU for one reason: its worker copies on CUDA streams. This
is a spec of ours outside vLLM's tree, which its connector loads by name, and only the worker is another one. Where
vLLM's copies run beside the engine, these are made in the call, as ours are on a CPU.

    {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": "MemcpyOffloadingSpec",
     "spec_module_path": "kv_testing.vllm_offloading", "cpu_bytes_to_use": 1073741824}}
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec, but for the worker."""

    _memcpy_worker: "MemcpyWorker | None" = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._memcpy_worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._memcpy_worker = MemcpyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._memcpy_worker


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between the engine's blocks and vLLM's shared memory, a block of one tensor at a time."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region, self._blocks_per_chunk = region, blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._finished: list[TransferResult] = []
        self._tensors = [tensor.tensor for tensor in kv_caches.tensors]  # keeps the engine's cache alive
        self._page_bytes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        self._views = [region.create_next_worker_view(page * blocks_per_chunk) for page in self._page_bytes]

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        pairs = self._pairs(src_spec, dst_spec)
        self._copy(job_id, ((chunk, block, nbytes) for block, chunk, nbytes in pairs))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._copy(job_id, self._pairs(dst_spec, src_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """All are done when they have been submitted."""

    def shutdown(self) -> None:
        self._views.clear()
        self._tensors.clear()
        self._region.cleanup()

    def _pairs(self, blocks: GPULoadStoreSpec, chunks: Any) -> Iterator[tuple[int, int, int]]:
        """Addresses of a block's page in the engine and in the shared memory, and its size: of each group's blocks,
        which follow each other, the first may lie within a chunk."""
        block_ids: Sequence[int] = blocks.block_ids.tolist()
        chunk_ids: Sequence[int] = chunks.block_ids.tolist()
        for group, (size, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            if not size:
                continue
            skipped = first % self._blocks_per_chunk
            of_group, block_ids = block_ids[:size], block_ids[size:]
            used = -(-(skipped + size) // self._blocks_per_chunk)
            in_chunks, chunk_ids = chunk_ids[:used], chunk_ids[used:]
            for ref in self._groups[group]:
                tensor, view = self._tensors[ref.tensor_idx], self._views[ref.tensor_idx]
                page_bytes = self._page_bytes[ref.tensor_idx]
                for number, block in enumerate(of_group, start=skipped):
                    chunk, place = divmod(number, self._blocks_per_chunk)
                    there = view.data_ptr() + in_chunks[chunk] * view.stride(0) + place * page_bytes
                    yield tensor.data_ptr() + block * page_bytes, there, ref.page_size_bytes

    def _copy(self, job_id: int, copies: Iterator[tuple[int, int, int]]) -> None:
        """copies: to, from, how many bytes."""
        total = 0
        for to, source, nbytes in copies:
            ctypes.memmove(to, source, nbytes)
            total += nbytes
        self._finished.append(TransferResult(job_id=job_id, success=True, transfer_size=total, transfer_time=0.0))
