"""The judge: compares a model's continuation from KV that went through a format with that from exact KV.

A window of text is a context and its continuation. The context is computed once; its keys and values are what a cache
would have stored. The continuation is then predicted from them, exact and restored, token by token after the text's own
tokens, and a greedy answer is generated from both.

The model runs in transformers, without an engine, in float32: rounding before the logits costs as much as a good format
does and would hide it. The stored KV has the engine's dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kv_core.errors import ConfigError
from kv_tiers.verdict import FormatQuality, Verdict

from kv_codecs.judge.roundtrip import Layers, Trip


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
