"""The checksum of chunks, 128-bit XXH3, computed on the device.

The algorithm of docs/formats/chunk.md is usually written sequentially, but its expensive part is parallel. The input is
divided into stripes of 64 bytes, eight lanes each, and blocks of 16 stripes. A stripe adds to each lane a number that
depends only on the stripe, so the sums of all blocks are computed at once (`sum_blocks`, at the speed of the memory).
Only the scramble after each block depends on what came before; `fold_blocks` does that with one program per chunk, over
a sixteenth of the bytes. The final merge, of eight numbers, runs on the host.

XXH3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md (inputs of more than 240 bytes, the default secret,
seed 0). Written from that description; the tests compare it with the xxhash library.
"""

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from kv_core.errors import InputError

MIN_BYTES: Final = 241
"""Shorter inputs use another algorithm, which is not needed for chunks."""
_BLOCK_BYTES: Final = 1024
_STRIPE_BYTES: Final = 64
TILE_BLOCKS: Final = 16
AHEAD: Final = 16
"""Sums that `fold_blocks` prefetches, because it would otherwise wait for memory."""

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_AVALANCHE: Final = 0x165667919E3779F9
_START: Final = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_U64: Final = (1 << 64) - 1


def _words(start: int) -> list[int]:
    """Eight words of the secret, from byte `start` on."""
    return [int.from_bytes(_SECRET[offset : offset + 8], "little") for offset in range(start, start + 64, 8)]


_KEYS: Final = np.array(
    [*_words(0), *_words(64), *_words(128), *_words(121), *_START],
    np.uint64,
).view(np.int64)
"""The kernels' constants: the secret in words, of which stripe s uses eight from word s on and a scramble the last
eight; the words for the last stripe; the lanes' initial values."""
_LAST_KEYS: Final = tl.constexpr(24)
_SCRAMBLE_KEYS: Final = tl.constexpr(16)
_START_KEYS: Final = tl.constexpr(32)


@triton.jit(do_not_specialize=["chunks", "chunk_bytes", "blocks", "whole_stripes"])  # type: ignore[untyped-decorator]
def sum_blocks(  # type: ignore[no-untyped-def]  # a kernel's arguments have no types that mypy knows
    chunks,  # the first one's address, a multiple of 16
    sums,  # *i64 [chunks, blocks, 8]
    keys,  # *i64, `_KEYS`
    chunk_bytes,  # between chunks, a multiple of 16
    blocks,
    whole_stripes,  # of a chunk, except its last, which `fold_blocks` adds
    TILE: tl.constexpr,
):
    """The contribution of each block of each chunk to the lanes. One program handles `TILE` blocks of one chunk."""
    chunk = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    stripe = tl.arange(0, 16)
    lane = tl.arange(0, 8)
    in_block = stripe[:, None] * 8 + lane[None, :]
    exists = (block[:, None] * 16 + stripe[None, :] < whole_stripes)[:, :, None] & (lane >= 0)[None, None, :]
    first = tl.multiple_of((chunks + chunk * chunk_bytes).to(tl.pointer_type(tl.int64)), 16)
    places = first + block.to(tl.int64)[:, None, None] * 128 + in_block[None, :, :]
    data = tl.load(places, mask=exists, other=0).to(tl.uint64, bitcast=True)
    key = tl.load(keys + stripe[:, None] + lane[None, :]).to(tl.uint64, bitcast=True)
    mixed = data ^ key[None, :, :]
    product = tl.where(exists, (mixed & 0xFFFFFFFF) * (mixed >> 32), 0)
    # Each lane adds its neighbour's words unchanged.
    even, odd = tl.split(tl.reshape(tl.sum(data, 1), (TILE, 4, 2)))
    total = tl.sum(product, 1) + tl.reshape(tl.join(odd, even), (TILE, 8))
    out = sums + (chunk * blocks + block.to(tl.int64))[:, None] * 8 + lane[None, :]
    tl.store(out, total.to(tl.int64, bitcast=True), mask=(block < blocks)[:, None])


@triton.jit(do_not_specialize=["chunks", "chunk_bytes", "nbytes", "blocks"])  # type: ignore[untyped-decorator]
def fold_blocks(  # type: ignore[no-untyped-def]
    chunks,  # as above
    sums,
    keys,
    lanes,  # *i64 [chunks, 8]
    chunk_bytes,
    nbytes,  # of a chunk
    blocks,  # the last of them is not scrambled
    AHEAD: tl.constexpr,
):
    """The lanes of each chunk after all its blocks, in order, and its last stripe. One program per chunk."""
    chunk = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 8)
    scramble = tl.load(keys + _SCRAMBLE_KEYS + lane).to(tl.uint64, bitcast=True)
    total = tl.load(keys + _START_KEYS + lane).to(tl.uint64, bitcast=True)
    chunk_sums = sums + chunk * blocks * 8 + lane
    scrambled = blocks - 1
    for start in range(0, scrambled // AHEAD * AHEAD, AHEAD):
        for ahead in tl.static_range(AHEAD):
            added = tl.load(chunk_sums + (start + ahead) * 8).to(tl.uint64, bitcast=True)
            total = _scrambled(total + added, scramble)
    for block in range(scrambled // AHEAD * AHEAD, scrambled):
        total = _scrambled(total + tl.load(chunk_sums + block * 8).to(tl.uint64, bitcast=True), scramble)
    total += tl.load(chunk_sums + scrambled * 8).to(tl.uint64, bitcast=True)
    # The last 64 bytes, which may begin anywhere and may already have been added in part.
    byte = tl.arange(0, 8)
    ends = (chunks + chunk * chunk_bytes + nbytes - 64).to(tl.pointer_type(tl.uint8))
    last_key = tl.load(keys + _LAST_KEYS + lane).to(tl.uint64, bitcast=True)
    shift = (byte * 8).to(tl.uint64)[None, :]
    lane_words = tl.sum(tl.load(ends + lane[:, None] * 8 + byte[None, :]).to(tl.uint64) << shift, 1)
    neighbour = tl.sum(tl.load(ends + (lane ^ 1)[:, None] * 8 + byte[None, :]).to(tl.uint64) << shift, 1)
    mixed = lane_words ^ last_key
    total += neighbour + (mixed & 0xFFFFFFFF) * (mixed >> 32)
    tl.store(lanes + chunk * 8 + lane, total.to(tl.int64, bitcast=True))


@triton.jit
def _scrambled(total, key):  # type: ignore[no-untyped-def]
    return (total ^ (total >> 47) ^ key) * 0x9E3779B1


class ChunkSums:
    """Checksums of chunks of one size. For one thread at a time; allocates its device memory once."""

    def __init__(self, device: torch.device, nbytes: int, max_chunks: int) -> None:
        """
        nbytes: size of a chunk. max_chunks: the most chunks in one call.

        Raises:
            InputError: the chunks are so small that XXH3 uses another algorithm.
        """
        if nbytes < MIN_BYTES:
            raise InputError(f"chunks of {nbytes} bytes; a device computes checksums of at least {MIN_BYTES} bytes")
        self._bytes = nbytes
        self._whole_stripes = (nbytes - 1) // _STRIPE_BYTES
        self._blocks = (nbytes - 1) // _BLOCK_BYTES + 1
        self._keys = torch.from_numpy(_KEYS).to(device)
        self._sums = torch.empty((max_chunks, self._blocks, 8), dtype=torch.int64, device=device)
        self._lanes = torch.empty((max_chunks, 8), dtype=torch.int64, device=device)

    def of(self, chunks: torch.Tensor) -> list[bytes]:
        """xxh3_128 of the first bytes of each row, in its canonical form. Runs on the current stream, and waits for it.

        chunks: uint8 [chunks, …] on the device, rows at multiples of 16 bytes.

        Raises:
            InputError: they are not such rows, or too many.
        """
        count, row_bytes = chunks.shape[0], chunks.stride(0)
        if chunks.dtype != torch.uint8 or chunks.dim() != 2 or chunks.shape[1] < self._bytes or chunks.stride(1) != 1:
            raise InputError(f"not rows of {self._bytes} bytes and more: {chunks.dtype} {tuple(chunks.shape)}")
        if chunks.data_ptr() % 16 or (count > 1 and row_bytes % 16) or count > len(self._sums):
            raise InputError(f"{count} rows that are {row_bytes} bytes apart; at most {len(self._sums)}, 16 × n apart")
        first, blocks = chunks.data_ptr(), self._blocks
        with torch.cuda.device_of(chunks):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            sum_blocks[(-(-blocks // TILE_BLOCKS), count)](
                first, self._sums, self._keys, row_bytes, blocks, self._whole_stripes, TILE=TILE_BLOCKS
            )
            fold_blocks[(count,)](
                first, self._sums, self._keys, self._lanes, row_bytes, self._bytes, blocks, AHEAD=AHEAD, num_warps=1
            )
        return [_merged(lanes, self._bytes) for lanes in self._lanes[:count].cpu().numpy().view(np.uint64).tolist()]


def _merged(lanes: list[int], nbytes: int) -> bytes:
    low = _mixed(lanes, _SECRET[11:75], nbytes * _PRIME64[0])
    high = _mixed(lanes, _SECRET[117:181], ~(nbytes * _PRIME64[1]))
    return ((high << 64) | low).to_bytes(16, "big")


def _mixed(lanes: list[int], secret: bytes, start: int) -> int:
    keys = np.frombuffer(secret, "<u8").tolist()
    total = start
    for lane in range(0, 8, 2):
        product = (lanes[lane] ^ keys[lane]) * (lanes[lane + 1] ^ keys[lane + 1])
        total += (product & _U64) ^ (product >> 64)
    total &= _U64
    total ^= total >> 37
    total = total * _AVALANCHE & _U64
    return total ^ (total >> 32)
