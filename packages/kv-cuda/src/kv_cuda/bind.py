"""Binds an engine's memory: proves the layout of every group of layers and builds the copiers for its chunks.

Every payload takes a slot of the pool, however small it is. A group with far more bytes than another (all layers'
states next to one layer's keys) is therefore cut by layers into several groups with the same coverage and block table.
A slot holds as many whole layers as fit, which is more than half of it, so a group of n bytes takes fewer than 2 n /
slot + 1 slots. The size is chosen for the least waste, which is usually far below that, because engines that share
pages between groups give their layers pages of equal size.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Final

import torch
from kv_core.coverage import Coverage
from kv_core.format import ChunkFormat, FormatSetting
from kv_core.log import limited_logger
from kv_core.shape import GroupShape, check_blocks

from kv_cuda.canary import LayerGroup, Proof, Refusal, prove
from kv_cuda.choose import BoundCopier, make_copier
from kv_cuda.layout import PagedLayout
from kv_cuda.states import StateGroup, prove_states

_log = limited_logger(__name__)

_KEY: Final = Fraction(1, 128)
"""Fraction of all slots' bytes that may be wasted for each group fewer, because each adds a key to every chunk."""
MOST_GROUPS: Final = 64


@dataclass(frozen=True, slots=True)
class BoundGroup:
    """Layers whose bytes are one payload of every chunk: a group of the engine's, or some layers of one.

    layout: the layout that was proved.
    coverage: which part of a prefix these layers need.
    table: the engine's block table that they use.
    block_tokens: tokens per block of that table; for states, the distance between their entries in it.
    numbers: its layers' numbers in the model; () for states, and where the engine does not report them.
    """

    tensors: tuple[torch.Tensor, ...]
    layout: PagedLayout
    format: ChunkFormat
    copier: BoundCopier
    coverage: Coverage
    table: int
    block_tokens: int
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BoundGroups:
    """The proved groups of an engine's layers, cut so that their payloads are of similar size.

    groups: the groups in the order of the keys.
    kv_scales: a digest of the factors that a quantised cache's numbers are multiplied by; "" where all are 1.
    """

    groups: tuple[BoundGroup, ...]
    kv_scales: str

    @property
    def copiers(self) -> tuple[BoundCopier, ...]:
        return tuple(group.copier for group in self.groups)

    @property
    def formats(self) -> tuple[ChunkFormat, ...]:
        return tuple(group.format for group in self.groups)

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        return tuple(group.layout for group in self.groups)

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """The payload size of each group."""
        return tuple(group.format.nbytes for group in self.groups)

    @property
    def fingerprint(self) -> str:
        """What must be equal for chunks to be interchangeable: the formats and, unless all are `all`, the coverages."""
        formats = "-".join(group.format.fingerprint for group in self.groups)
        if all(group.coverage.kind == "all" for group in self.groups):
            return formats
        description = [[group.format.fingerprint, str(group.coverage)] for group in self.groups]
        return hashlib.sha256(json.dumps(description).encode()).hexdigest()[:32]

    @property
    def shapes(self) -> tuple[GroupShape, ...]:
        """The groups in the form that both halves of a connector take."""
        return tuple(GroupShape(group.block_tokens, group.coverage, group.table) for group in self.groups)

    @property
    def kind(self) -> str:
        """The format of the attention groups, by which engines are compared; "blocks" for a model with only states."""
        return self._first.format.kind

    @property
    def _first(self) -> BoundGroup:
        return next((group for group in self.groups if group.coverage.kind != "state"), self.groups[0])

    @property
    def kv_dtype(self) -> str:
        """The dtype of attention's KV, for the key space; for a model that has only states, the states' dtype."""
        first = self._first
        return str(first.tensors[0].dtype) if first.format.kind == "blocks" else first.layout.dtype


def bind_groups(
    groups: Sequence[LayerGroup | StateGroup], wanted: FormatSetting, chunk_tokens: int
) -> BoundGroups | Refusal:
    """Prove each group's layout, cut groups that are too large, and make the copiers.

    Raises:
        ConfigError: a chunk is not a whole number of blocks.
    """
    proofs: list[Proof] = []
    for group in groups:
        check_blocks(chunk_tokens, table_tokens_of(group))
        if isinstance(group, StateGroup):
            proof = prove_states(group)
        else:
            shape = GroupShape(table_tokens_of(group), group.coverage)
            proof = prove(group, wanted, shape.stored_tokens(chunk_tokens))
        if isinstance(proof, Refusal):
            return Refusal(f"{_group_label(groups, group)}{proof.reason}")
        proofs.append(proof)
        _log.info("the canary proved %s of %d layers", proof.description, len(group.tensors))
    layers = [proof.format.layers for proof in proofs]
    layer_bytes = [proof.format.nbytes // count for proof, count in zip(proofs, layers, strict=True)]
    chunk_bytes, parts = cuts(layer_bytes, layers)
    bound = [
        _bind_run(group, proof, run, chunk_bytes)
        for group, proof, layers_of_parts in zip(groups, proofs, parts, strict=True)
        for run in runs(layers_of_parts)
    ]
    return BoundGroups(tuple(bound), _scales(groups))


def table_tokens_of(group: LayerGroup | StateGroup) -> int:
    """Tokens per block of this group's block table."""
    return group.table_tokens or (group.block_tokens if isinstance(group, LayerGroup) else 0)


def _group_label(groups: Sequence[LayerGroup | StateGroup], group: LayerGroup | StateGroup) -> str:
    """A prefix that names the group, where there are several; else ""."""
    return "" if len(groups) == 1 else f"group {group.table} of this model's layers ({group.coverage}): "


def _bind_run(group: LayerGroup | StateGroup, proof: Proof, run: range, largest_chunk_bytes: int) -> BoundGroup:
    whole_layout = proof.layout
    tensors_per_layer = len(whole_layout.parts) if whole_layout.own_tensors else 1
    tensors = tuple(
        group.tensors[part * whole_layout.layers + layer] for part in range(tensors_per_layer) for layer in run
    )
    layout, chunk_format = replace(whole_layout, layers=len(run)), replace(proof.format, layers=len(run))
    return BoundGroup(
        tensors=tensors,
        layout=layout,
        format=chunk_format,
        copier=make_copier(layout, tensors, chunk_format, stores_behind=True, largest_chunk_bytes=largest_chunk_bytes),
        coverage=group.coverage,
        table=group.table,
        block_tokens=table_tokens_of(group),
        numbers=group.numbers[run.start : run.stop] if isinstance(group, LayerGroup) else (),
    )


def _scales(groups: Sequence[LayerGroup | StateGroup]) -> str:
    scales = [group.scales for group in groups if isinstance(group, LayerGroup)]
    if all(pair == (1.0, 1.0) for layer_scales in scales for pair in layer_scales):
        return ""
    return hashlib.sha256(json.dumps(scales).encode()).hexdigest()[:32]


def cuts(layer_bytes: Sequence[int], layers: Sequence[int]) -> tuple[int, list[list[int]]]:
    """The size of a slot and, for each group, the number of layers in each of its parts.

    layer_bytes: for each group, the bytes that one layer adds to its payload. layers: for each group, the number of its
    layers.
    """
    largest = max(layer_bytes)
    sizes = {
        nbytes * count
        for nbytes, layer_count in zip(layer_bytes, layers, strict=True)
        for count in range(1, layer_count + 1)
    }
    choices = []
    for slot_bytes in sorted(size for size in sizes if size >= largest):
        parts = sum(_parts(nbytes, count, slot_bytes) for nbytes, count in zip(layer_bytes, layers, strict=True))
        choices.append((parts * slot_bytes, parts, slot_bytes))
    # With slots for whole groups, no group is cut: that many parts are always allowed.
    allowed = [choice for choice in choices if choice[1] <= max(MOST_GROUPS, len(layers))]
    _, _, slot_bytes = min(allowed, key=lambda choice: (choice[0] * (1 + choice[1] * _KEY), *choice))
    parts_of = [
        _even_sizes(count, _parts(nbytes, count, slot_bytes)) for nbytes, count in zip(layer_bytes, layers, strict=True)
    ]
    return max(nbytes * max(parts) for nbytes, parts in zip(layer_bytes, parts_of, strict=True)), parts_of


def _parts(layer_bytes: int, layers: int, slot_bytes: int) -> int:
    return -(-layers // (slot_bytes // layer_bytes))


def _even_sizes(layers: int, parts: int) -> list[int]:
    """Sizes as equal as whole layers allow, the larger ones first."""
    return [layers // parts + (number < layers % parts) for number in range(parts)]


def runs(parts: Sequence[int]) -> list[range]:
    """The layers of each part, in order."""
    return [range(first, end) for first, end in pairwise(accumulate(parts, initial=0))]
