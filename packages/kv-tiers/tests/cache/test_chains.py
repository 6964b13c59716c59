"""The pieces of prompts that are offered."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from kv_core.testing import key_chain
from kv_tiers.cache.host import chains

KEYS = key_chain(24)


@given(
    wanted=st.sets(st.integers(0, 23)),
    parents=st.dictionaries(st.integers(0, 23), st.integers(0, 23), max_size=24),
    most=st.integers(1, 6),
)
def test_every_key_is_in_one_piece_whatever_the_hints_say(wanted: set[int], parents: dict[int, int], most: int) -> None:
    """They may branch, go round in circles, or name what is not wanted."""
    of = {KEYS[key]: KEYS[parent] for key, parent in parents.items()}
    pieces = list(chains([KEYS[number] for number in sorted(wanted)], of, most))
    offered = [key for chain, first in pieces for key in chain[first:]]
    assert sorted(offered) == sorted(KEYS[number] for number in wanted)
    for chain, first in pieces:
        assert 0 < len(chain) - first <= most
        assert len(set(chain)) == len(chain)
        assert all(of[key] == before for before, key in pairwise(chain))


def test_a_prompt_is_offered_in_its_order_with_what_is_before() -> None:
    of = dict(zip(KEYS[1:], KEYS, strict=False))
    assert list(chains(KEYS[3:10], of, 4)) == [(KEYS[:7], 3), (KEYS[:10], 7)]
