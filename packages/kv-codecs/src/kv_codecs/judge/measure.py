"""The judge: compares a model's continuation from KV that went through a format with that from exact KV.

A window of text is a context and its continuation. The context is computed once; its keys and values are what a cache
would have stored. The continuation is then predicted from them, exact and restored, token by token after the text's own
tokens, and a greedy answer is generated from both.

The model runs in transformers, without an engine, in float32: rounding before the logits costs as much as a good format
does and would hide it. The stored KV has the engine's dtype. It goes through a format and back by the code that engines
use: `RoundTrip` for a format of the pool, `ThroughCodec` for a lossy codec of tiers, `FirstParts` for one where only
the first part of a chunk is read.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from kv_core.errors import ConfigError
from kv_core.format import QUANTISED, ChunkFormat, QuantisedKind
from kv_cuda.quantise import LARGEST_SCALE, Codes
from kv_tiers.codec import APPROXIMATE_SHARE
from kv_tiers.verdict import FIRST_PARTS, FormatQuality, Verdict

from kv_codecs.progressive import make_progressive_codec

CHUNK_TOKENS: Final = 256

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
        super().__init__(FIRST_PARTS, make_progressive_codec({}))

    def layers(self, layers: Layers) -> Layers:
        """Like `Trip.layers`.

        Raises:
            ConfigError: the elements are not bfloat16.
        """
        if layers[0][0].dtype != torch.bfloat16:
            raise ConfigError(f"format {FIRST_PARTS} is for bfloat16: judge it with --dtype bfloat16, or leave it out")
        return super().layers(layers)

    def _decode(self, payload: memoryview, out: memoryview) -> int:
        quarter = len(out) // APPROXIMATE_SHARE
        self._codec.decode_prefix(payload[:quarter], out)
        return quarter


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


@dataclass(frozen=True, slots=True)
class Windows:
    """How text is cut.

    context_tokens: tokens whose KV is stored and loaded, rounded down to whole chunks.
    continuation_tokens: tokens predicted after each context.
    greedy_tokens: tokens generated after each context.
    most: the largest number of windows.
    """

    context_tokens: int = 1024
    continuation_tokens: int = 128
    greedy_tokens: int = 32
    most: int = 8


@dataclass(slots=True)
class _Sums:
    """Sums over all windows. positions: how many tokens were predicted."""

    positions: int = 0
    kl: float = 0.0
    same_top: int = 0
    exact_nll: float = 0.0
    lossy_nll: float = 0.0
    greedy_same: int = 0
    greedy: int = 0


class Model:
    """A causal language model of transformers, run with given KV."""

    def __init__(self, name: str, *, dtype: str = "bfloat16", device: str = "cpu") -> None:
        """
        name: a directory, or the model's name on the Hugging Face hub.
        dtype: the dtype of keys and values in an engine's cache.

        Raises:
            ConfigError: transformers is missing, or there is no such model.
        """
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise ConfigError("kv judge needs the package transformers, which engines install") from error
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device).eval()
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # a damaged file raises what the library for its format has
            raise ConfigError(f"model {name}: {error}") from error
        self.name = name
        self.kv_dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device)

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def computed(self, tokens: Sequence[int]) -> Layers:
        """The KV of these tokens, in the dtype of the engine's cache.

        Raises:
            ConfigError: the model's cache is not just keys and values of every token, with heads of one size.
        """
        cache = self._cache([])
        self._forward(tokens, cache)
        attention = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        if len(attention) != len(cache.layers) or any(layer.keys.shape[2] != len(tokens) for layer in attention):
            raise ConfigError(f"model {self.name} stores something other than all keys and values: it cannot be judged")
        return self._as_stored(attention)

    def attended(self, tokens: Sequence[int]) -> Layers:
        """Like `computed`, but only for the layers with attention; those with states are left out."""
        cache = self._empty_cache()
        self._forward(tokens, cache)
        return self._as_stored([cache.layers[number] for number in self._attention_layers()])

    def _as_stored(self, attention: Sequence[Any]) -> Layers:
        for number, layer in enumerate(attention):
            keys, values = layer.keys.shape, layer.values.shape
            if keys != values:
                # As with multi-head latent attention, which stores the latent that keys and values are made from.
                raise ConfigError(
                    f"model {self.name}: in layer {number} a token's keys are {keys[1]} × {keys[3]} numbers and its "
                    f"values {values[1]} × {values[3]}. Lossy formats are judged only where both are alike: store this "
                    "model's KV as it is, which needs no verdict and no calibration"
                )
        return [(layer.keys.to(self.kv_dtype), layer.values.to(self.kv_dtype)) for layer in attention]

    def predicted(self, layers: Layers, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary], float32, of the token after each of these, given the layers' KV."""
        logits = self._forward(tokens, self._cache(layers))
        return torch.log_softmax(logits[0].float(), -1)

    def answered(self, layers: Layers, first: int, count: int) -> list[int]:
        """Greedily generate this many tokens after `first`."""
        cache, answer, token = self._cache(layers), [], first
        for _ in range(count):
            token = int(self._forward([token], cache)[0, -1].argmax())
            answer.append(token)
        return answer

    def rotations(self, tokens: int) -> list[tuple[Any, Any]]:
        """For each layer with attention, the cosines and sines, each [tokens, rotated elements or half of them], by
        which it rotates keys. Empty: the model has none, or not in the usual place.

        Raises:
            ConfigError: they cannot be obtained as from other models.
        """
        if getattr(self._model.base_model, "rotary_emb", None) is None:
            return []
        positions, dummy = torch.arange(tokens)[None], torch.zeros(1, 1, 1)
        tables = []
        try:
            embedding, config = self._model.base_model.rotary_emb, self._model.config
            for number in self._attention_layers():
                # Gemma rotates layers with a sliding window differently from those without.
                kind = [config.layer_types[number]] if hasattr(embedding, "layer_types") else []
                cos, sin = embedding(dummy, positions, *kind)
                tables.append((cos[0].float().numpy(), sin[0].float().numpy()))
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"model {self.name} rotates its keys in an unknown way: {error}") from error
        return tables

    def frequencies(self) -> list[Any]:
        """All tables of frequencies that it rotates by, in radians a token, each [pairs of elements], float64,
        unordered."""
        embedding = getattr(self._model.base_model, "rotary_emb", None)
        buffers = [] if embedding is None else list(embedding.buffers())
        return [buffer.double().cpu().numpy() for buffer in buffers if buffer.ndim == 1]

    def keys_at(self, tokens: Sequence[int], first: int) -> list[Any]:
        """The keys of each layer with attention, [heads, tokens, head_dim], float32, of a text that begins at this
        position."""
        cache = self._empty_cache()
        self._forward(tokens, cache, first)
        return [cache.layers[number].keys[0].float().cpu().numpy() for number in self._attention_layers()]

    @property
    def max_tokens(self) -> int:
        """The longest prompt that the model supports."""
        return int(getattr(self._model.config.get_text_config(), "max_position_embeddings", 1 << 17))

    def _attention_layers(self) -> list[int]:
        from transformers.cache_utils import DynamicLayer

        layers = self._as_configured().layers
        return [number for number, layer in enumerate(layers) if isinstance(layer, DynamicLayer)]

    def _as_configured(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def _empty_cache(self) -> Any:
        """An empty cache, for all tokens in every layer with attention, and for states if there are any."""
        from transformers.cache_utils import LinearAttentionCacheLayerMixin

        cache = self._as_configured()
        has_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
        return cache if has_states else self._cache([])

    def _cache(self, layers: Layers) -> Any:
        """A cache of all tokens in every layer, including layers with sliding windows: their mask hides the tokens
        outside the window.
        """
        from transformers import DynamicCache

        cache = DynamicCache()
        for number, (keys, values) in enumerate(layers):
            cache.update(keys.float(), values.float(), number)
        return cache

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int], cache: Any, first: int | None = None) -> torch.Tensor:
        """first: the first token's position; None: after the tokens in the cache."""
        ids = torch.tensor([list(tokens)], device=self.device)
        positions = {}
        if first is not None:
            positions["position_ids"] = torch.arange(first, first + len(tokens), device=self.device)[None]
        logits: torch.Tensor = self._model(input_ids=ids, past_key_values=cache, use_cache=True, **positions).logits
        return logits


def judge(
    model: Model,
    text: str,
    trips: Sequence[Trip],
    windows: Windows,
    report: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Measure each format on the text.

    trips: one for each format; they accumulate its costs.
    report: called with a line about progress.

    Raises:
        ConfigError: the text is too short for one window, or the model cannot be judged.
    """
    sums = {trip.name: _Sums() for trip in trips}
    shapes: tuple[tuple[int, int], ...] = ()
    dtype = ""
    pairs = list(cut_windows(model, text, windows))
    for number, (context, continuation) in enumerate(pairs, 1):
        report(f"window {number} of {len(pairs)}: {len(context)} tokens and {len(continuation)} more")
        layers = model.computed(context[:-1])
        shapes = tuple((keys.shape[1], keys.shape[3]) for keys, _ in layers)
        dtype = str(layers[0][0].dtype).removeprefix("torch.")
        inputs = [context[-1], *continuation[:-1]]
        exact = model.predicted(layers, inputs)
        greedy = model.answered(layers, context[-1], windows.greedy_tokens)
        for trip in trips:
            lossy, trip_sums = trip.layers(layers), sums[trip.name]
            _add(trip_sums, exact, model.predicted(lossy, inputs), continuation)
            answer = model.answered(lossy, context[-1], windows.greedy_tokens)
            trip_sums.greedy += len(greedy)
            trip_sums.greedy_same += _count_leading_same(greedy, answer)
    return Verdict(
        model=model.name,
        heads=shapes,
        dtype=dtype,
        tokens=sum(len(continuation) for _, continuation in pairs),
        findings=tuple(_finding(trip, sums[trip.name]) for trip in trips),
    )


def cut_windows(model: Model, text: str, windows: Windows) -> Iterator[tuple[list[int], list[int]]]:
    tokens = model.tokens(text)
    window_tokens = windows.context_tokens + windows.continuation_tokens
    if len(tokens) < window_tokens:
        raise ConfigError(f"the text has {len(tokens)} tokens, and one window takes {window_tokens}: give more text")
    for first in range(0, min(len(tokens) - window_tokens + 1, windows.most * window_tokens), window_tokens):
        middle = first + windows.context_tokens
        yield tokens[first:middle], tokens[middle : first + window_tokens]


def _add(sums: _Sums, exact: torch.Tensor, lossy: torch.Tensor, continuation: Sequence[int]) -> None:
    sums.positions += len(continuation)
    sums.kl += float((exact.exp() * (exact - lossy)).sum(-1).sum())
    sums.same_top += int((exact.argmax(-1) == lossy.argmax(-1)).sum())
    indexes = torch.tensor(list(continuation), device=exact.device)[:, None]
    sums.exact_nll -= float(exact.gather(1, indexes).sum())
    sums.lossy_nll -= float(lossy.gather(1, indexes).sum())


def _count_leading_same(answer: Sequence[int], other: Sequence[int]) -> int:
    for count, (token, other_token) in enumerate(zip(answer, other, strict=True)):
        if token != other_token:
            return count
    return len(answer)


def _finding(trip: Trip, sums: _Sums) -> FormatQuality:
    cost = trip.cost
    return FormatQuality(
        format=trip.name,
        bits=8 * cost.stored_bytes / max(1, cost.numbers),
        kl=sums.kl / sums.positions,
        top1=sums.same_top / sums.positions,
        perplexity=float(torch.tensor((sums.lossy_nll - sums.exact_nll) / sums.positions).exp()) - 1,
        greedy=sums.greedy_same / max(1, sums.greedy),
        worst=cost.worst,
        encode_gbs=cost.exact_bytes / cost.encode_s / 1e9 if cost.encode_s else 0.0,
        decode_gbs=cost.exact_bytes / cost.decode_s / 1e9 if cost.decode_s else 0.0,
    )
