"""Forward passes of a worker's own model over parts of a request, outside the engine's steps.

Each part is a batch entry: its tokens are computed behind what the block table before them holds. In each layer the
engine writes the keys and values of all entries before it attends, so that an entry sees those before it. Model,
attention backend and metadata are the engine's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from kv_connect.interface import observe
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_runners: list[Any] = []


def watch_runner() -> None:
    """Remember the model runner of this process when vLLM gives it its KV cache, which is before it serves. Idempotent.

    vLLM passes a connector the cache's tensors, but not the model that fills them.
    """

    def around(initialize: Any) -> Any:
        def watched(self: Any, *arguments: Any, **named: Any) -> Any:
            _runners[:] = [self]
            return initialize(self, *arguments, **named)

        return watched

    observe(GPUModelRunner, "initialize_kv_cache", around)


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """Consecutive tokens of a sequence.

    row: how many tokens of the sequence are before them.
    position: of the first one, for the model's positional embedding: equal to `row`, except where a layer's rotation is
        measured.
    """

    blocks: Sequence[int]
    tokens: Sequence[int]
    row: int
    position: int

    @property
    def end(self) -> int:
        return self.row + len(self.tokens)


class EngineForward:
    """Of this process's model runner, whose model has one group of layers with full attention."""

    def __init__(self, block_tokens: int) -> None:
        """
        Raises:
            LookupError: vLLM has no model runner of the known kind in this process.
        """
        if not _runners:
            raise LookupError("vLLM's model runner is of an unknown kind, so its model cannot be reached")
        (self._runner,) = _runners
        self._block_tokens = block_tokens
        self._device = self._runner.device

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner.get_model()
        return model

    def slots(self, blocks: Sequence[int], first: int, end: int) -> torch.Tensor:
        """Where the engine has these tokens of a sequence: int64, on the device."""
        rows = torch.arange(first, end)
        table = torch.tensor(blocks)
        slots = table[rows // self._block_tokens] * self._block_tokens + rows % self._block_tokens
        return slots.to(self._device)

    @torch.inference_mode()
    def compute(self, entries: Sequence[BatchEntry]) -> None:
        """Compute the entries' keys and values into the engine's blocks."""
        lengths = [len(entry.tokens) for entry in entries]
        tokens = torch.tensor([token for entry in entries for token in entry.tokens], dtype=torch.int32)
        positions = [
            torch.arange(entry.position, entry.position + length)
            for entry, length in zip(entries, lengths, strict=True)
        ]
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        ends = torch.tensor([entry.end for entry in entries], dtype=torch.int32)
        table = torch.zeros(len(entries), max(len(entry.blocks) for entry in entries), dtype=torch.int32)
        for number, entry in enumerate(entries):
            table[number, : len(entry.blocks)] = torch.tensor(entry.blocks, dtype=torch.int32)
        slots = torch.cat([self.slots(entry.blocks, entry.row, entry.end) for entry in entries])
        device = self._device
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(device),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(entries),
            num_actual_tokens=len(tokens),
            max_query_len=max(lengths),
            max_seq_len=int(ends.max()),
            block_table_tensor=table.to(device),
            slot_mapping=slots,
            causal=True,
            is_prefilling=torch.ones(len(entries), dtype=torch.bool),
            positions=torch.cat(positions).to(device),
        )
        metadata: dict[str, Any] = {}
        for group in (group for groups in self._runner.attn_groups for group in groups):
            built = group.build_metadata(copy(common), 0)
            metadata.update(dict.fromkeys(group.layer_names, built))
        # Compiled, the model would not call the hooks of `attended`, and would be compiled for new shapes.
        with set_forward_context(
            metadata,
            self._runner.vllm_config,
            num_tokens=len(tokens),
            slot_mapping=dict.fromkeys(metadata, slots),
            skip_compiled=True,
        ):
            self.model(
                input_ids=tokens.to(device),
                positions=common.positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )


def latent_dims_of(layer: torch.nn.Module) -> int:
    """How many dimensions of an attention layer's latents are not rotated; 0: it has ordinary keys."""
    return int(getattr(layer, "kv_lora_rank", 0))


def keys_of_heads(layer: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The heads' keys in these rows of an attention layer's cache: [tokens, heads, head_dim] each. Latent attention
    computes them from latents. Raises `LookupError`: by weights that its backend has not kept."""
    dims, of = latent_dims_of(layer), cast(Any, layer)
    if not dims:
        return rows
    if not of.kv_b_proj.weight.numel():
        raise LookupError("its attention backend keeps no weights that select by the question; start it with CPU_MLA")
    latents, rotated = rows[..., :dims], rows[..., dims:]
    keys = of.kv_b_proj(latents[:, 0])[0].view(len(rows), of.num_heads, -1)[..., : of.qk_nope_head_dim]
    return torch.cat((keys, rotated.expand(-1, of.num_heads, -1)), -1)


@contextmanager
def attended(layers: Mapping[str, torch.nn.Module]) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The queries and keys, as rotated, that these attention layers are given while the body computes: [tokens, heads ×
    head_dim] each. Of latent attention the part of keys that is rotated, which all heads share."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def recorder(name: str) -> Callable[..., None]:
        def record(layer: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            found[name] = (arguments[0], arguments[2 if latent_dims_of(layer) else 1])

        return record

    hooks = [layer.register_forward_pre_hook(recorder(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
