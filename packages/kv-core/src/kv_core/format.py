"""Chunk formats: how one chunk's bytes are arranged, the same on every tier and in every engine with the same
fingerprint.

`canonical`: part after part (K then V, or MLA's single latent part), each [layers, tokens, heads, head_dim] in C order.
One layer of one part is one contiguous range, whatever order the engine uses, and SGLang's `page_first_direct` host
page is the same bytes.
`blocks`: [layers, blocks, block_bytes], the engine's blocks as opaque bytes: always right, useless to other engines.
`int8`, `fp8`: as `canonical` with one byte per element; each layer of each part is followed by the scales of its rows
and channels and by its first tokens unquantised; lossy (docs/formats/quantised.md).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeGuard, get_args

from kv_core.errors import InputError

QuantisedKind = Literal["int8", "fp8"]
Kind = Literal["canonical", "blocks", QuantisedKind]
FormatSetting = Literal["auto", Kind]
"""What a user may set. auto: canonical if it is proved, else blocks."""

QUANTISED: Final[Mapping[str, str]] = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""The dtype of each kind that stores one byte per element."""
SCALE_BYTES: Final = 4
"""Size of a scale, a float32: one for each head of each token in each layer of each part."""

QUANTISED_VERSION: Final = 2
"""Version of the bytes of `int8` and `fp8`; part of their fingerprints. Version 1 had only scales of rows."""
EXACT_TOKENS: Final = 4
"""The first tokens of a chunk, which `int8` and `fp8` store exactly: those of a prompt's first chunk are attention
sinks. None in chunks of fewer than `EXACT_FROM_TOKENS`, where they would cost too much."""
EXACT_FROM_TOKENS: Final = 128

FORMAT_VERSION = 1
"""Part of every fingerprint. The bytes of a version never change; a new order of bytes is a new version."""


def is_quantised_kind(kind: str) -> TypeGuard[QuantisedKind]:
    """Whether a kind of format, or a user's setting, stores numbers in one byte."""
    return kind in QUANTISED


@dataclass(frozen=True, slots=True)
class ChunkFormat:
    """Shape, dtype, size and fingerprint of one chunk of one group on one shard.

    parts: ("k", "v") or ("kv",); ("blocks",) in `blocks`.
    dtype: the stored element as torch spells it ("bfloat16"); "uint8" in `blocks`.
    heads, head_dim: one part's; in `blocks` 1 and the bytes of one token of one layer (block_bytes / block_tokens).
    origin: in `blocks` what makes the opaque bytes interchangeable (engine, backend, strides); "" elsewhere.
    exact_itemsize: in `int8` and `fp8`, the size of the engine's own element, as which the first tokens are stored; 0
        elsewhere.
    """

    kind: Kind
    parts: tuple[str, ...]
    layers: int
    chunk_tokens: int
    heads: int
    head_dim: int
    dtype: str
    itemsize: int
    block_tokens: int = 1
    origin: str = ""
    exact_itemsize: int = 0
    layer_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of one layer of one part."""
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InputError(f"no kind {self.kind!r} of chunk format; choose one of {', '.join(get_args(Kind))}")
        for name in ("layers", "chunk_tokens", "heads", "head_dim", "itemsize", "block_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise InputError(f"a chunk format's {name} is {value!r}; it must be a positive whole number")
        if not self.parts:
            raise InputError("a chunk format needs at least one part")
        if len(set(self.parts)) < len(self.parts):
            raise InputError(f"a part is named twice in {self.parts}")
        if self.kind == "blocks" and self.chunk_tokens % self.block_tokens:
            raise InputError(
                f"chunk_tokens={self.chunk_tokens} is not a multiple of the engine's block of "
                f"{self.block_tokens} tokens"
            )

        if self.kind in QUANTISED:
            self._check_quantised()
        # Computed once, because every copy needs them.
        behind_codes = self.scales_bytes + self.exact_bytes + self.exponents_bytes
        object.__setattr__(self, "layer_bytes", self.codes_bytes + behind_codes)
        object.__setattr__(self, "nbytes", len(self.parts) * self.layers * self.layer_bytes)

    def _check_quantised(self) -> None:
        if (self.dtype, self.itemsize) != (QUANTISED[self.kind], 1):
            raise InputError(
                f"format {self.kind} keeps {QUANTISED[self.kind]} of 1 byte, not {self.dtype} of {self.itemsize}"
            )
        if self.exact_itemsize not in (2, 4):
            raise InputError(
                f"format {self.kind} is made from elements of 2 or 4 bytes, not of exact_itemsize={self.exact_itemsize}"
            )
        if self.codes_bytes % SCALE_BYTES:
            raise InputError(
                f"format {self.kind}: {self.chunk_tokens} tokens of {self.heads} heads of {self.head_dim} are not a "
                f"multiple of {SCALE_BYTES} bytes, so the scales after them would be misaligned"
            )

    @property
    def is_quantised(self) -> bool:
        return self.kind in QUANTISED

    @property
    def codes_bytes(self) -> int:
        """Bytes of one layer of one part without what follows them in `int8` and `fp8`."""
        return self.chunk_tokens * self.heads * self.head_dim * self.itemsize

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales behind the codes of one layer of one part."""
        return self.chunk_tokens * self.heads * SCALE_BYTES if self.is_quantised else 0

    @property
    def exact_tokens(self) -> int:
        """How many of the first tokens are stored unquantised behind the scales."""
        return EXACT_TOKENS if self.is_quantised and self.chunk_tokens >= EXACT_FROM_TOKENS else 0

    @property
    def exact_bytes(self) -> int:
        """Bytes of these tokens in one layer of one part."""
        return self.exact_tokens * self.heads * self.head_dim * self.exact_itemsize

    @property
    def exponents_bytes(self) -> int:
        """Bytes of the channels' exponents in one layer of one part, padded to align the next layer's scales."""
        return -(-self.heads * self.head_dim // SCALE_BYTES) * SCALE_BYTES if self.is_quantised else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer of one part, of a format that is not quantised."""
        return self.heads * self.head_dim * self.itemsize

    def layer_offset(self, part: int, layer: int) -> int:
        """Offset in bytes, from the chunk's start, of layer `layer` of part `part`."""
        return (part * self.layers + layer) * self.layer_bytes

    @property
    def fingerprint(self) -> str:
        """32 hex digits that differ whenever the bytes would. Stable over processes, platforms and releases."""
        description = [
            FORMAT_VERSION,
            self.kind,
            list(self.parts),
            self.layers,
            self.chunk_tokens,
            self.heads,
            self.head_dim,
            self.dtype,
            self.itemsize,
            self.block_tokens if self.kind == "blocks" else 0,
            self.origin,
        ]
        if self.is_quantised or self.exact_itemsize:
            description += [QUANTISED_VERSION, self.exact_itemsize]
        return hashlib.sha256(json.dumps(description, separators=(",", ":")).encode()).hexdigest()[:32]
