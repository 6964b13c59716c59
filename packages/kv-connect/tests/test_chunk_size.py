"""A chunk's length fits the engine's blocks by itself where nobody has chosen one; what was chosen must fit."""

import pytest
from kv_connect.engine import EngineFacts, fitted
from kv_core.coverage import ALL, STATE, Coverage
from kv_core.errors import ConfigError
from kv_core.shape import GroupShape
from kv_tiers.settings import load


@pytest.mark.parametrize(
    ("blocks", "chunk_tokens"), [([16], 256), ([48], 288), ([16, 32], 256), ([24, 16], 288), ([60], 300)]
)
def test_the_default_becomes_the_smallest_number_of_whole_blocks_from_256_on(
    blocks: list[int], chunk_tokens: int
) -> None:
    settings, in_force = load({}, {})
    assert fitted(settings, in_force, blocks).chunk_tokens == chunk_tokens


@pytest.mark.parametrize(
    ("blocks", "chunk_tokens"),
    [([64], 64), ([128, 128], 128), ([528], 528), ([176], 176), ([96, 64], 192), ([1024, 256], 1024)],
)
def test_it_is_one_block_where_blocks_are_long(blocks: list[int], chunk_tokens: int) -> None:
    settings, in_force = load({}, {})
    assert fitted(settings, in_force, blocks).chunk_tokens == chunk_tokens


@pytest.mark.parametrize(
    ("blocks", "chunk_tokens"), [([16, 16], 64), ([128], 128), ([528, 528], 528), ([400], 400), ([96, 64], 192)]
)
def test_with_states_it_is_one_block_so_that_every_state_lies_at_the_end_of_a_chunk(
    blocks: list[int], chunk_tokens: int
) -> None:
    settings, in_force = load({}, {})
    assert fitted(settings, in_force, blocks, has_states=True).chunk_tokens == chunk_tokens
    chosen, in_force = load({"chunk_tokens": 4 * chunk_tokens}, {})
    assert fitted(chosen, in_force, blocks, has_states=True) == chosen


@pytest.mark.parametrize("environ", [{}, {"KV_CHUNK_TOKENS": "256"}])
def test_what_was_set_is_kept_or_refused_with_what_fits(environ: dict[str, str]) -> None:
    given = {} if environ else {"chunk_tokens": 256}
    settings, in_force = load(given, environ)
    assert fitted(settings, in_force, [64]).chunk_tokens == 256
    with pytest.raises(ConfigError, match=r"chunk_tokens=256 .* of 528 tokens; write chunk_tokens: 528"):
        fitted(settings, in_force, [528])


def test_what_processes_tell_each_other_of_groups_comes_back() -> None:
    groups = (GroupShape(528, STATE, 0), GroupShape(528, ALL, 3), GroupShape(16, Coverage("window", 4096), 1))
    facts = EngineFacts(528, groups, 2, "bfloat16", "", ("blocks", "canonical", "canonical"), ("states", "a, b", "c"))
    assert EngineFacts.from_text(facts.to_text()) == facts
    assert "window of 4096 tokens" in facts.described and "states" in facts.described
