"""States of linear layers (Mamba, gated delta nets, short convolutions): one per block, opaque, and proved like
layouts.

The meaning of a state's numbers is the engine's affair. We must know which bytes are the state of block i: all of them,
and no others. So marked bytes are written through the engine's own views of one block and moved to another
block by the copier that will move states. Read through the views, they must be as they were written, and the source
and the blocks around both must be unchanged. The previous content of the blocks is restored.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import torch
from kv_core.coverage import STATE, Coverage
from kv_core.errors import KVError
from kv_core.format import ChunkFormat
from kv_core.transfer import Copy, HostExtent, TransferPlan

from kv_cuda.canary import Proof, Refusal, kept_pages, pages_of
from kv_cuda.choose import make_copier
from kv_cuda.layout import PagedLayout, PartLayout

_POOL = "canary"


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers that keep one state per block and share one block table, as the engine provides them.

    tensors: one per layer, the first axis blocks: the bytes that contain the states.
    views: each layer's states as the engine reads and writes them, the first axis blocks.
    state_bytes: bytes of a block that are states. The engine may pad blocks.
    blocks: number of blocks of each layer.
    table_tokens: number of tokens that an entry of the block table stands for.
    origin: what makes states of two engines interchangeable.
    table: the engine's block table that they use.
    """

    tensors: tuple[torch.Tensor, ...]
    views: tuple[tuple[torch.Tensor, ...], ...]
    state_bytes: int
    blocks: int
    table_tokens: int
    origin: str
    table: int = 0

    @property
    def coverage(self) -> Coverage:
        return STATE


def prove_states(group: StateGroup) -> Proof | Refusal:
    """The layout and format by which states are copied, or why they cannot be."""
    if group.blocks < 4:
        return Refusal(f"the engine's cache has {group.blocks} blocks, and the canary needs 4")
    try:
        if (why := _why_not_contained(group)) is not None:
            return Refusal(f"the canary cannot find the engine's states: {why}")
        layout = _layout(group)
        # One "token" is one whole state, and its slot the number of its block.
        chunk_format = layout.blocks_format(1, group.origin)
        if (why := _why_not_copied(group, layout, chunk_format)) is not None:
            return Refusal(f"the canary copied a state incorrectly: {why}")
    except (KVError, RuntimeError, ValueError, LookupError, TypeError, AssertionError) as error:
        return Refusal(f"the engine's states cannot be tested: {error}")
    return Proof(layout, chunk_format, f"states of {group.state_bytes} bytes, format blocks")


def _layout(group: StateGroup) -> PagedLayout:
    first = group.tensors[0]
    stride = first.stride(0) * first.element_size()
    return PagedLayout(
        name="states",
        dtype="uint8",
        itemsize=1,
        layers=len(group.tensors),
        blocks=group.blocks,
        block_tokens=1,
        heads=1,
        head_dim=group.state_bytes,
        parts=(PartLayout("state", 0, stride, group.state_bytes, group.state_bytes, 1),),
    )


def _why_not_contained(group: StateGroup) -> str | None:
    """None if in every block the states are exactly the bytes that we would copy."""
    for tensor, views in zip(group.tensors, group.views, strict=True):
        start, stride = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
        if tensor.shape[0] != group.blocks or not views:
            return f"a layer has {tensor.shape[0]} blocks, not {group.blocks}, or no states"
        if (page_bytes := pages_of(tensor, group.blocks).shape[1]) < group.state_bytes:
            return f"a block of {page_bytes} bytes, and states of {group.state_bytes}"
        ranges = []
        for view in views:
            first = view.data_ptr() - start
            length = view[0].numel() * view.element_size()
            if view.shape[0] != group.blocks or view.stride(0) * view.element_size() != stride:
                return "the stride of a state is not that of its blocks"
            if not view[0].is_contiguous() or first < 0 or first + length > group.state_bytes:
                return f"a state reaches from byte {first} to {first + length} of {group.state_bytes}"
            ranges.append((first, first + length))
        ranges.sort()
        if ranges[0][0] != 0 or any(end != start for (_, end), (start, _) in pairwise(ranges)):
            return f"states at {ranges} are not side by side"
        if ranges[-1][1] != group.state_bytes:
            return f"states end at byte {ranges[-1][1]}, not {group.state_bytes}"
    return None


def _why_not_copied(group: StateGroup, layout: PagedLayout, chunk_format: ChunkFormat) -> str | None:
    source, target = 1, group.blocks - 1
    touched = sorted({0, source, source + 1, target - 1, target})
    copier = make_copier(layout, group.tensors, chunk_format)
    copier.attach(_POOL, memoryview(bytearray(chunk_format.nbytes)))
    extent = HostExtent(_POOL, 0, chunk_format.nbytes)
    with ExitStack() as attached, kept_pages(group.tensors, touched, group.blocks):
        attached.callback(copier.detach, _POOL)  # whatever is found: the driver must know no memory that is freed
        # All layers first, so that an overlap of two shows.
        written = [_write(layer, views, source) for layer, views in enumerate(group.views)]
        for views in group.views:
            for view in views:
                view[target] = 0
        before = _pages(group, touched)
        copier.store(TransferPlan((Copy(extent, 0, source, 1),), 1)).wait()
        if _pages(group, touched) != before:
            return "reading a state changed a block"
        copier.load(TransferPlan((Copy(extent, 0, target, 1),), 1)).wait()
        after = _pages(group, touched)
        for layer, views in enumerate(group.views):
            for number, view in enumerate(views):
                if not torch.equal(_bytes(view[source]), written[layer][number]):
                    return f"state {number} of layer {layer} overlaps other states"
                if not torch.equal(_bytes(view[target]), written[layer][number]):
                    return f"state {number} of layer {layer} is not what was written"
        if any(after[place] != before[place] for place in after if place[1] != target):
            return "writing a state back changed another block"
    return None


def _write(layer: int, views: Sequence[torch.Tensor], block: int) -> list[torch.Tensor]:
    """Write marked bytes to a block's states, through the engine's views; returns them."""
    generator = torch.Generator().manual_seed(layer)
    written = []
    for view in views:
        nbytes = view[block].numel() * view.element_size()
        # Any bytes, because no number is computed with; below 128, so that no float is a NaN that changes its bits.
        marks = torch.randint(1, 120, (nbytes,), generator=generator, dtype=torch.uint8)
        view[block] = marks.view(view.dtype).view(view[block].shape).to(view.device)
        written.append(marks)
    return written


def _bytes(state: torch.Tensor) -> torch.Tensor:
    return state.contiguous().cpu().view(-1).view(torch.uint8)


def _pages(group: StateGroup, blocks: Sequence[int]) -> dict[tuple[int, int], bytes]:
    return {
        (layer, block): pages_of(tensor, group.blocks)[block].cpu().numpy().tobytes()
        for layer, tensor in enumerate(group.tensors)
        for block in blocks
    }
