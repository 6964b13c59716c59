"""The names of a hand-over's pages, by SGLang's own hashes: the same where the KV is the same, and only there."""

from types import SimpleNamespace
from typing import Any

import torch
from kv_sglang.names import Names, names_of
from sglang.srt.managers.embed_types import PositionalEmbeds

TREE = SimpleNamespace(page_size=4)


def names(tokens: int = 10, **given: Any) -> Names:
    """Of a prompt of the same token, as SGLang replaces embeddings by."""
    usual = {"extra_key": None, "cache_salt": None, "input_embeds": None, "positional_embed_overrides": None}
    return names_of(SimpleNamespace(origin_input_ids=[1] * tokens, **usual | given), TREE)


def at(*positions: int, value: float = 1.0) -> PositionalEmbeds:
    return PositionalEmbeds(torch.full((len(positions), 8), value, dtype=torch.bfloat16), list(positions))


def test_prompts_of_embeddings_share_no_page_with_others_of_the_same_length() -> None:
    """SGLang has the same tokens for all of them."""
    rows = [[0.5, float(number)] for number in range(10)]
    others = [*rows[:9], [0.5, 0.0]]
    assert names(input_embeds=rows) == names(input_embeds=[list(row) for row in rows])
    every = [names(), names(input_embeds=rows), names(input_embeds=others), names(input_embeds=rows, cache_salt="a")]
    assert [each.tail_tokens for each in every] == [2] * 4
    assert len({page for each in every for page in each.hashes}) == 4 * 3


def test_prompts_with_embeddings_among_their_tokens_neither() -> None:
    assert names(positional_embed_overrides=at(1, 2)) == names(positional_embed_overrides=at(1, 2))
    some = [at(1, 2), at(1, 3), at(1, 2, value=2.0)]
    every = [names(), *(names(positional_embed_overrides=each) for each in some)]
    assert len({page for each in every for page in each.hashes}) == 4 * 3
