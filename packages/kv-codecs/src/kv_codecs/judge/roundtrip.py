"""Keys and values through a format and back, by the code that engines use: `RoundTrip` for a format of the pool,
`ThroughCodec` for a lossy codec of tiers, `FirstParts` for one where only the first part of a chunk is read."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, Final, Protocol

import torch
from kv_core.errors import ConfigError
from kv_core.format import QUANTISED, ChunkFormat, QuantisedKind
from kv_cuda.quantise.codes import LARGEST_SCALE, Codes
from kv_tiers.verdict import FIRST_PARTS

CHUNK_TOKENS: Final = 256
_APPROXIMATE_SHARE: Final = 4
"""The first part of a payload ends within the chunk's size divided by this."""

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""For each layer its keys and values, each [1, heads, tokens, head_dim]."""


@dataclass(slots=True)
class Cost:
    """Measurements of a round trip, added up over layers and chunks.

    numbers: count of KV elements.
    exact_bytes, stored_bytes: bytes of whole chunks, before and after encoding.
    worst: the largest error of an element, relative to the largest element of its head and token.
    """

    numbers: int = 0
    exact_bytes: int = 0
    stored_bytes: int = 0
    worst: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def add(self, exact: torch.Tensor, decoded: torch.Tensor, stored_bytes: int) -> None:
        """Add elements of one dtype, [..., head_dim], that were stored in this many bytes."""
        peak = exact.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
        self.worst = max(self.worst, float(((decoded.float() - exact.float()).abs() / peak).max()))
        self.numbers += exact.numel()
        self.exact_bytes += exact.numel() * exact.itemsize
        self.stored_bytes += stored_bytes


class Trip(Protocol):
    """A round trip through one format. name: the format's name in findings. cost: the cost of all layers so far."""

    name: str
    cost: Cost

    def layers(self, layers: Layers) -> Layers:
        """All layers of one context after a round trip. Chunks are cut from the first token on; tokens after the last
        whole chunk are not stored, so they stay exact.
        """


class RoundTrip:
    """The round trip through a format of one byte per element."""

    def __init__(self, kind: QuantisedKind) -> None:
        self.name: str = kind
        self.kind = kind
        self.cost = Cost()
        self._codes: dict[tuple[int, int, str], tuple[ChunkFormat, Codes]] = {}

    def layers(self, layers: Layers) -> Layers:
        restored = [(keys.clone(), values.clone()) for keys, values in layers]
        for layer in restored:
            replace_chunks([layer], self._chunk)
        return restored

    def _chunk(self, exact: torch.Tensor, _first: int) -> torch.Tensor:
        stored_format, codes = self._format_and_codes(exact)
        source = exact.view(torch.uint8).reshape(-1)
        # Written once, as a pool's pages are before they are timed.
        stored = torch.full((stored_format.nbytes,), 1, dtype=torch.uint8, device=exact.device)
        decoded_bytes = source.clone()
        largest = torch.zeros((), device=exact.device)
        self.cost.encode_s += _seconds(exact.device, lambda: codes.encode(source, stored, largest))
        if not float(largest) <= LARGEST_SCALE:
            return exact  # such a chunk is not stored
        self.cost.decode_s += _seconds(exact.device, lambda: codes.decode(stored, decoded_bytes, 0, CHUNK_TOKENS))
        decoded = decoded_bytes.view(exact.dtype).view(exact.shape)
        self.cost.add(exact, decoded, stored_format.nbytes)
        return decoded

    def _format_and_codes(self, exact: torch.Tensor) -> tuple[ChunkFormat, Codes]:
        *_, heads, head_dim = exact.shape
        dtype = str(exact.dtype).removeprefix("torch.")
        entry = self._codes.get((heads, head_dim, dtype))
        if entry is None:
            exact_format = ChunkFormat("canonical", ("k", "v"), 1, CHUNK_TOKENS, heads, head_dim, dtype, exact.itemsize)
            stored = replace(
                exact_format, kind=self.kind, dtype=QUANTISED[self.kind], itemsize=1, exact_itemsize=exact.itemsize
            )
            entry = stored, Codes(exact_format, stored, exact.device)
            self._codes[heads, head_dim, dtype] = entry
        return entry


class ThroughCodec:
    """A `Trip` of chunks of all layers through a codec of tiers. Layers of equal shape form one chunk, although an
    engine may divide them into several groups."""

    def __init__(self, name: str, codec: Any) -> None:
        """codec: a `kv_tiers.codec.Codec`."""
        self.name, self.cost = name, Cost()
        self._codec = codec

    def layers(self, layers: Layers) -> Layers:
        restored = [(keys.clone(), values.clone()) for keys, values in layers]
        for shape in dict.fromkeys(keys.shape for keys, _ in restored):
            replace_chunks([layer for layer in restored if layer[0].shape == shape], self._chunk)
        return restored

    def _chunk(self, exact: torch.Tensor, first: int) -> torch.Tensor:
        exact = exact.cpu()
        source = exact.view(torch.uint8).reshape(-1).numpy().data
        # Written once, as a pool's pages are before they are timed.
        payload, decoded = memoryview(bytearray(source)), exact.clone()
        decoded_bytes = decoded.view(torch.uint8).reshape(-1).numpy().data
        encode = self._codec.encode_first if not first and hasattr(self._codec, "encode_first") else self._codec.encode
        start = time.perf_counter()
        stored_bytes = encode(source, payload)
        encoded = time.perf_counter()
        if stored_bytes is None:  # such a chunk is stored unencoded, and read whole
            self.cost.add(exact, exact, len(source))
            return exact
        read_bytes = self._decode(payload[:stored_bytes], decoded_bytes)
        self.cost.decode_s += time.perf_counter() - encoded
        self.cost.encode_s += encoded - start
        self.cost.add(exact, decoded, read_bytes)
        return decoded

    def _decode(self, payload: memoryview, out: memoryview) -> int:
        """Decode; returns the number of payload bytes read."""
        self._codec.decode(payload, out)
        return len(payload)


class FirstParts(ThroughCodec):
    """A `Trip` of chunks of which only the first quarter is read back."""

    def __init__(self) -> None:
        """
        Raises:
            ConfigError: the codec, or a library that it needs, is not installed.
        """
        super().__init__(FIRST_PARTS, plugin("kv_codecs", FIRST_PARTS)({}, None))

    def layers(self, layers: Layers) -> Layers:
        """Like `Trip.layers`.

        Raises:
            ConfigError: the elements are not bfloat16.
        """
        if layers[0][0].dtype != torch.bfloat16:
            raise ConfigError(f"format {FIRST_PARTS} is for bfloat16: judge it with --dtype bfloat16, or leave it out")
        return super().layers(layers)

    def _decode(self, payload: memoryview, out: memoryview) -> int:
        quarter = len(out) // _APPROXIMATE_SHARE
        self._codec.decode_prefix(payload[:quarter], out)
        return quarter


def plugin(group: str, name: str) -> Any:
    """The object that an entry point of kv-tiers names; this package does not import kv-tiers.

    Raises:
        ConfigError: kv-tiers is not installed.
    """
    points = entry_points(group=group, name=name)
    if not points:
        raise ConfigError(f"format {name} needs the package kv-tiers; pip install 'kv-tiers[zstd]'")
    return next(iter(points)).load()


def replace_chunks(layers: Layers, trip: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Replace the whole chunks of these layers, which have one shape, by what comes back from a round trip.

    trip: the round trip of one chunk, [parts, layers, tokens, heads, head_dim], and the position of its first token.
    """
    for first in range(0, layers[0][0].shape[2] - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        tokens = slice(first, first + CHUNK_TOKENS)
        exact = torch.stack([torch.stack([layer[part][0, :, tokens] for layer in layers]) for part in (0, 1)])
        restored = trip(exact.transpose(2, 3).contiguous(), first).transpose(2, 3)
        for part in (0, 1):
            for number, layer in enumerate(layers):
                layer[part][0, :, tokens] = restored[part, number].to(layer[part].device)


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
