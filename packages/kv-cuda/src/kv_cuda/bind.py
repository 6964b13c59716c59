"""An engine's memory, all groups of its layers: proved, and with the copiers that move chunks in and out of it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.connect.shape import check_blocks
from kv_core.format import ChunkFormat, FormatSetting
from kv_core.log import limited_logger

from kv_cuda.canary import LayerGroup, Proof, Refusal, prove
from kv_cuda.choose import Copier, make_copier
from kv_cuda.layout import PagedLayout

_log = limited_logger(__name__)


@dataclass(frozen=True, slots=True)
class BoundGroups:
    """The groups of an engine's layers, as they were proved.

    groups: as the engine handed them over.
    proofs: of each its layout and the format of its chunks; all chunks have one size.
    copiers: of each.
    """

    groups: tuple[LayerGroup, ...]
    proofs: tuple[Proof, ...]
    copiers: tuple[Copier, ...]

    @property
    def formats(self) -> tuple[ChunkFormat, ...]:
        return tuple(proof.format for proof in self.proofs)

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        return tuple(proof.layout for proof in self.proofs)

    @property
    def chunk_bytes(self) -> int:
        return self.proofs[0].format.nbytes

    @property
    def fingerprint(self) -> str:
        return "-".join(proof.format.fingerprint for proof in self.proofs)

    @property
    def block_tokens(self) -> tuple[int, ...]:
        return tuple(group.block_tokens for group in self.groups)

    @property
    def kv_dtype(self) -> str:
        """What the numbers are, as the key space has it."""
        is_opaque = self.proofs[0].format.kind == "blocks"
        return str(self.groups[0].tensors[0].dtype) if is_opaque else self.proofs[0].layout.dtype

    @property
    def kv_scales(self) -> str:
        """A digest of what the numbers of a quantised cache are multiplied by; "" where they are what they say."""
        scales = [group.scales for group in self.groups]
        if all(pair == (1.0, 1.0) for of_group in scales for pair in of_group):
            return ""
        return hashlib.sha256(json.dumps(scales).encode()).hexdigest()[:32]


def bind_groups(groups: Sequence[LayerGroup], wanted: FormatSetting, chunk_tokens: int) -> BoundGroups | Refusal:
    """Prove each group's layout, and make its copier.

    Raises:
        ConfigError: a chunk is no whole number of blocks.
    """
    proofs: list[Proof] = []
    for group in groups:
        check_blocks(chunk_tokens, group.block_tokens)
        proof = prove(group, wanted, chunk_tokens)
        if isinstance(proof, Refusal):
            return proof
        proofs.append(proof)
        _log.info("the canary proved %s of %d layers", proof.description, len(group.tensors))
    if len({proof.format.nbytes for proof in proofs}) != 1:
        return Refusal("the groups' chunks differ in size, which one pool of equal slots cannot hold")
    copiers = [
        make_copier(proof.layout, group.tensors, proof.format) for group, proof in zip(groups, proofs, strict=True)
    ]
    return BoundGroups(tuple(groups), tuple(proofs), tuple(copiers))
