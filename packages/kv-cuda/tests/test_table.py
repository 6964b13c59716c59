"""A plan's table has the plan's copies, and refuses what `validate_and_split` refuses, in its words."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_core.errors import InputError
from kv_core.format import Kind
from kv_core.transfer import Copy, HostExtent, TransferPlan
from kv_cuda.copy.plan import copy_table, validate_and_split
from kv_testing.layouts import BLOCKS, TOKENS, small_caches

LAYOUT = small_caches()["K and V apart"].layout
CHUNK = 3 * TOKENS
POOLS = {"a": 1 << 20, "b": 1 << 20}
NBYTES = LAYOUT.canonical_format(CHUNK).nbytes
extents = st.sampled_from(
    [
        *[HostExtent(pool, number * 4096, NBYTES) for pool in POOLS for number in range(2)],
        *(HostExtent("c", 0, NBYTES), HostExtent("a", 0, NBYTES - 4), HostExtent("b", 1 << 20, NBYTES)),
    ]
)
by_blocks = st.integers(0, 2).map(lambda number: number * TOKENS)
copies = st.builds(
    Copy,
    extents,
    by_blocks | st.integers(-1, CHUNK),
    st.integers(0, BLOCKS).map(lambda number: number * TOKENS) | st.integers(-1, BLOCKS * TOKENS),
    st.just(TOKENS) | st.integers(0, CHUNK),
)


@given(
    st.lists(copies, max_size=6), st.sampled_from(["canonical", "blocks"]), st.booleans(), st.just(CHUNK) | st.just(8)
)
def test_a_table_is_made_of_exactly_the_plans_that_are_split(
    made: list[Copy], kind: Kind, to_engine: bool, chunk_tokens: int
) -> None:
    described = LAYOUT.canonical_format(CHUNK) if kind == "canonical" else LAYOUT.blocks_format(CHUNK, "test")
    plan = TransferPlan(tuple(made), chunk_tokens)
    refused = ""
    try:
        validate_and_split(plan, LAYOUT, described, POOLS, to_engine=to_engine)
    except InputError as error:
        refused = str(error)
    if refused:
        with pytest.raises(InputError, match=f"^{re.escape(refused)}$"):
            copy_table(plan, LAYOUT, described, POOLS, to_engine=to_engine)
        return
    table = copy_table(plan, LAYOUT, described, POOLS, to_engine=to_engine)
    bounds = table.starts.tolist()
    rows = list(zip(table.first_token.tolist(), table.first_slot.tolist(), table.tokens.tolist(), strict=True))
    assert bounds[-1] == len(rows)
    found = {
        extent: [Copy(extent, *row) for row in rows[first:end]]
        for extent, first, end in zip(table.extents, bounds, bounds[1:], strict=False)
    }
    assert list(found.items()) == list(plan.by_chunk().items())
