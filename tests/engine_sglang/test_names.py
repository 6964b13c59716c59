"""The names of a hand-over's pages, by SGLang's own hashes: the same where the KV is the same, and only there."""

import json
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_core.errors import ConfigError, InputError
from kv_sglang import plugin
from kv_sglang.attach import check_hashes
from kv_sglang.names import Names, is_marked, names_of, page_hashes, unmarked
from kv_sglang.transfer import refuse_what_is_not_served
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

TREE = SimpleNamespace(page_size=4)


def request(tokens: Sequence[int], **given: Any) -> Any:
    usual = {"extra_key": None, "cache_salt": None, "input_embeds": None, "positional_embed_overrides": None}
    return SimpleNamespace(origin_input_ids=array("q", tokens), **usual | given)


def names(**given: Any) -> Names:
    """Of a prompt of the same token, as SGLang replaces embeddings by."""
    return names_of(request([1] * 10, **given), TREE)


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


def test_a_request_that_is_computed_again_has_the_names_of_what_was_decoded_too() -> None:
    """The decode engine has a part of it as its answer, and sends all of it to the prefill engine as a prompt."""
    answered = {"output_ids": array("q", [11, 12, 13]), "pd_rebootstrap_in_progress": True}
    again = names_of(request(range(1, 11), **answered), TREE)
    assert again == names_of(request([*range(1, 11), 11, 12, 13]), TREE)
    assert again.tail_tokens == 1 and len(again.hashes) == 4


PAD = MM_PAD_SHIFT_VALUE + 12345
"""In the place of an image's tokens: of any image whose hash is this one, by chance or because a client says so."""
TEXT = list(range(1, 9))


def pages_of(tokens: Sequence[int], last: str | None = None) -> list[str]:
    return page_hashes(array("q", tokens), TREE, None, None, last)


def test_pages_with_media_and_all_after_them_are_marked() -> None:
    """What SGLang hashes later, such as generated tokens, follows the hash that it was given before."""
    prompt = [*TEXT, 9, PAD, PAD, 10, *TEXT]
    assert [is_marked(each) for each in pages_of(prompt)] == [False, False, True, True, True]
    first = pages_of(prompt)[:3]
    assert pages_of(prompt)[3:] == pages_of(TEXT, first[2]), "SGLang goes on from where it was"
    assert pages_of(prompt)[:2] == pages_of(TEXT)
    assert not any(is_marked(each) for each in pages_of([MM_PAD_SHIFT_VALUE - 1] * 8))
    generated = get_hash_str(array("q", TEXT), first[2], page_size=4)
    assert all(is_marked(each) for each in generated)
    assert is_marked(get_hash_str(array("q", [PAD] * 4)))
    check_hashes()  # of a storage that is attached later


def test_pages_of_pairs_of_tokens_are_marked_from_the_pair_that_media_begin_in() -> None:
    """A head that guesses (EAGLE) has each token's KV from the next one, too."""
    eagle = SimpleNamespace(page_size=4, tree_core=SimpleNamespace(is_eagle=True))
    marks = [is_marked(each) for each in page_hashes(array("q", [1, 2, 3, 4, PAD, *TEXT]), eagle, None, None)]
    assert marks == [True] * 3
    marks = [is_marked(each) for each in page_hashes(array("q", [1, 2, 3, 4, 5, PAD, *TEXT]), eagle, None, None)]
    assert marks == [False, True, True]


@pytest.mark.parametrize("tokens", [[*TEXT, PAD, 9], [*TEXT, PAD, 9, 9, 9], [PAD, *TEXT], [9, 9, 9, 9, PAD]])
def test_a_hand_over_of_media_is_found_by_no_other(tokens: list[int]) -> None:
    """Of two images of one name, the second would be decoded with the KV of the first."""
    one, again, other = (names_of(request(tokens, bootstrap_room=room), TREE) for room in (7, 7, 8))
    assert one == again and one.tail_tokens == len(tokens) % 4
    text = sum(not is_marked(each) for each in pages_of(tokens))
    assert one.hashes[:text] == other.hashes[:text]
    assert not {*one.hashes[text:]} & {*other.hashes[text:], *map(unmarked, pages_of(tokens))}
    assert len(one.hashes) > text and all(len(bytes.fromhex(each)) == 32 for each in one.hashes)
    with pytest.raises(InputError, match="needs a bootstrap_room"):
        names_of(request(tokens, bootstrap_room=None), TREE)


HRM = {
    "architectures": ["HrmTextForCausalLM"],
    "model_type": "hrm_text",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (HRM, "attention to the whole prompt"),
        (HRM | {"prefix_lm": False}, ""),
        ({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}, "an encoder"),
    ],
)
def test_a_model_whose_pages_depend_on_more_than_their_names_is_not_handed_over(
    config: dict[str, object], said: str, tmp_path: Path
) -> None:
    """Of two prompts with the same first page, the second would be decoded with the KV of the first."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = pytest.raises(ConfigError, match=f"a model with {said}") if said else nullcontext()
    with refused, get_parallel().override(pp_size=1, attn_cp_size=1, attn_dcp_size=1, attn_dp_size=1):
        refuse_what_is_not_served(
            SimpleNamespace(state_types=[], num_draft_entries=0), ServerArgs(model_path=str(tmp_path), device="cpu")
        )


class Side:
    """A sender or a receiver."""

    def __init__(self) -> None:
        self.named: list[Names] = []
        self.failed: list[str] = []

    def name_pages(self, names: Names) -> None:
        self.named.append(names)

    def fail(self, why: str) -> None:
        self.failed.append(why)


@pytest.mark.parametrize("tokens", [[1, 2, -3, 4, 5], [1, 2, 3, 4, -5]])
def test_a_prompt_that_has_no_names_costs_its_request_and_not_the_engine(tokens: list[int]) -> None:
    """SGLang accepts any `input_ids`, and an engine that decodes never looks them up in its model."""
    sent, received = Side(), Side()
    asked = request(tokens, disagg_kv_sender=sent)
    plugin._name_sent(True, SimpleNamespace(scheduler=SimpleNamespace(tree_cache=TREE)), asked)
    plugin._name_received(SimpleNamespace(kv_receiver=received), SimpleNamespace(tree_cache=TREE), asked)
    assert sent.named == received.named == []
    assert sent.failed == received.failed and "negative" in sent.failed[0]
    plugin._name_received(SimpleNamespace(kv_receiver=received), SimpleNamespace(tree_cache=TREE), request([1] * 5))
    assert [each.tail_tokens for each in received.named] == [1]
