"""Which tokens of a blended prompt the engine computes: all outside its segments, and some in them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from kv_blend.plan import BlendPlan, Moved


@dataclass(frozen=True, slots=True)
class Selection:
    """Of one request.

    reused: the segments whose KV is in place, in order.
    computed: this many tokens at the prompt's start are in the engine's blocks already.
    """

    plan: BlendPlan
    reused: tuple[Moved, ...]
    computed: int = 0

    def first(self) -> list[int]:
        """The first tokens of each segment, as many as its share."""
        return [token for each in self.reused for token in range(each.first, each.first + self.plan.recomputed(each))]

    def attended(self, attention: torch.Tensor) -> list[int]:
        """The tokens to which most attention is given, as many as the share is of all segments. attention: to each
        token up to the last segment's end; negative: it cannot be selected."""
        count = sum(self.plan.recomputed(each) for each in self.reused)
        found = torch.topk(attention, min(count, int((attention >= 0).sum())))
        return list(found.indices.sort().values.tolist())

    def batches(self, selected: Iterable[int], most_tokens: int, most_runs: int) -> Iterator[list[tuple[int, int]]]:
        """What is computed when these tokens of segments are: runs [first, end), in order, in batches of at most so
        many tokens and runs. A longer run becomes several."""
        batch: list[tuple[int, int]] = []
        room = most_tokens
        for first, end in self._runs(selected):
            begin = first
            while begin < end:
                if not room or len(batch) == most_runs:
                    yield batch
                    batch, room = [], most_tokens
                stop = min(end, begin + room)
                batch.append((begin, stop))
                room -= stop - begin
                begin = stop
        if batch:
            yield batch

    def _runs(self, selected: Iterable[int]) -> Iterator[tuple[int, int]]:
        is_reused = bytearray(self.plan.end)
        for each in self.reused:
            is_reused[each.first : each.end] = b"\1" * (each.end - each.first)
        for token in selected:
            is_reused[token] = 0
        first = self.computed
        while (first := is_reused.find(0, first)) >= 0:
            end = is_reused.find(1, first)
            end = self.plan.end if end < 0 else end
            yield first, end
            first = end


def attention_of(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """The attention of all queries and heads to each key, as if there were no others. queries: [tokens, heads ×
    head_dim]. keys: [tokens, heads, head_dim]; several heads of queries share one. Float32."""
    heads, head_dim = keys.shape[1:]
    grouped = queries.reshape(len(queries), heads, -1, head_dim).float()
    total = torch.zeros(len(keys), device=keys.device)
    for head in range(heads):
        weights = grouped[:, head].flatten(0, 1) @ keys[:, head].float().T
        total += (weights * scale).softmax(-1).sum(0)
    return total
