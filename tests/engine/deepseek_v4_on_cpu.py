"""What vLLM's DeepSeek-V4 lacks on a CPU. It is there once this module is imported.

vLLM 0.32 has the model's kernels for CPUs, but prepares a step with a few of Triton's, of which there is no build for
CPUs to install. vLLM lets a platform replace those, which is done here. And its builder of metadata for CPUs is asked
for two kinds of layers that it does not know.
"""

from typing import Any

import torch
from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.attention.backends.mla import sparse_swa

BACKENDS = "vllm.v1.attention.backends.mla"


def requests_of_tokens(
    starts: torch.Tensor, output: torch.Tensor, requests: int, mapped: int, tokens: int, **_: Any
) -> None:
    places = torch.arange(tokens)
    numbers = torch.bucketize(places, starts[1 : requests + 1], right=True).clamp(max=requests - 1)
    output[:tokens] = torch.where(places < mapped, numbers, 0).to(output.dtype)


def slots_of_latents(
    output: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    _stride: int,
    block_latents: int,
    _ranks: int,
    _interleave: int,
    latent_tokens: int,
    padding: int,
    *_: Any,
) -> None:
    """A latent is written by the last of its tokens."""
    for number, (start, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        places = torch.arange(int(lengths[number]) - (end - start), int(lengths[number]))
        latents = places // latent_tokens
        blocks = tables[number, latents // block_latents].long()
        writes = ((places + 1) % latent_tokens == 0) & (slots[start:end] != padding)
        output[start:end] = torch.where(writes, blocks * block_latents + latents % block_latents, padding)


def prefills_of_index(
    starts: torch.Tensor,
    lengths: torch.Tensor,
    latent_starts: torch.Tensor,
    row_starts: torch.Tensor,
    requests: torch.Tensor,
    firsts: torch.Tensor,
    ends: torch.Tensor,
    slice_start: int,
    slice_end: int,
    _rank: int,
    _ranks: int,
    _interleave: int,
    _block: int,
    latent_tokens: int,
) -> None:
    """Of each token in the slice, which latents it may choose among; of each latent, whose it is."""
    for number, (start, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        requests[int(latent_starts[number]) : int(latent_starts[number + 1])] = number
        places = torch.arange(max(start, slice_start), min(end, slice_end))
        seen = (int(lengths[number]) - end + places + 1) // latent_tokens
        firsts[places - slice_start] = row_starts[number].to(firsts.dtype)
        ends[places - slice_start] = (row_starts[number] + seen).to(ends.dtype)


def nothing(*_: Any, **__: Any) -> None:
    """What only kernels for GPUs read."""


register_kernels(
    {
        "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": requests_of_tokens,
        f"{BACKENDS}.compressor_utils.CompressedSlotMappingKernel.kernel": slots_of_latents,
        f"{BACKENDS}.indexer.BuildPrefillChunkMetadataKernel.kernel": prefills_of_index,
        f"{BACKENDS}.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": nothing,
        f"{BACKENDS}.sparse_swa.ComputePrefillMetadataKernel.kernel": nothing,
    }
)
LAYERS = [getattr(sparse_swa, name) for name in vars(sparse_swa) if name.startswith("_LAYER_TYPE_")]
Builder.build_tile_scheduler = lambda self, num_decode_tokens: dict.fromkeys(LAYERS)
