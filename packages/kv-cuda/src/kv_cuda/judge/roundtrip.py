"""Keys and values through a format and back, by the code that engines use."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from kv_core.format import QUANTISED, ChunkFormat, QuantisedKind

from kv_cuda.quantise.codes import LARGEST_SCALE, Codes

CHUNK_TOKENS: Final = 256


@dataclass(slots=True)
class Cost:
    """What was seen on the way, added up over layers and chunks.

    numbers: of KV.
    exact_bytes, stored_bytes: of whole chunks, before and after.
    worst: the largest error of a number, of the largest of its head and token.
    encode_s, decode_s: seconds.
    """

    numbers: int = 0
    exact_bytes: int = 0
    stored_bytes: int = 0
    worst: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0


class RoundTrip:
    """Of one format."""

    def __init__(self, kind: QuantisedKind) -> None:
        self.kind = kind
        self.cost = Cost()
        self._codes: dict[tuple[int, int, str], tuple[ChunkFormat, ChunkFormat, Codes]] = {}

    def __call__(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values, each [tokens, heads, head_dim], as they come back.

        Chunks are cut from the first token on; what is behind the last whole chunk is not stored, so it stays exact.
        """
        keys, values = keys.clone(), values.clone()
        for first in range(0, len(keys) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
            some = slice(first, first + CHUNK_TOKENS)
            keys[some], values[some] = self._chunk(torch.stack((keys[some], values[some])))
        return keys, values

    def _chunk(self, exact: torch.Tensor) -> torch.Tensor:
        exact_format, stored_format, codes = self._made(exact)
        source = exact.contiguous().view(torch.uint8).reshape(-1)
        stored = torch.empty(stored_format.nbytes, dtype=torch.uint8, device=exact.device)
        back = torch.empty_like(source)
        largest = torch.zeros((), device=exact.device)
        self.cost.encode_s += _seconds(exact.device, lambda: codes.encode(source, stored, largest))
        if not float(largest) <= LARGEST_SCALE:
            return exact  # such a chunk is not stored
        self.cost.decode_s += _seconds(exact.device, lambda: codes.decode(stored, back, 0, CHUNK_TOKENS))
        decoded = back.view(exact.dtype).view(exact.shape)
        peak = exact.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
        self.cost.worst = max(self.cost.worst, float(((decoded.float() - exact.float()).abs() / peak).max()))
        self.cost.numbers += exact.numel()
        self.cost.exact_bytes += exact_format.nbytes
        self.cost.stored_bytes += stored_format.nbytes
        return decoded

    def _made(self, exact: torch.Tensor) -> tuple[ChunkFormat, ChunkFormat, Codes]:
        _, _, heads, head_dim = exact.shape
        dtype = str(exact.dtype).removeprefix("torch.")
        known = self._codes.get((heads, head_dim, dtype))
        if known is None:
            exact_format = ChunkFormat("canonical", ("k", "v"), 1, CHUNK_TOKENS, heads, head_dim, dtype, exact.itemsize)
            stored = replace(exact_format, kind=self.kind, dtype=QUANTISED[self.kind], itemsize=1)
            known = exact_format, stored, Codes(exact_format, stored, exact.device)
            self._codes[heads, head_dim, dtype] = known
        return known


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
