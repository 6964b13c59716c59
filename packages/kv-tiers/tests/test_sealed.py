"""Sealed fields are believed whole or not at all, one by one or many at once."""

import random

import pytest
from kv_tiers.chunk_header import intact, seal, unseal

ROWS, ROW_BYTES = 16, 64


@pytest.fixture
def rows() -> bytearray:
    return bytearray(b"".join(seal(random.Random(row).randbytes(ROW_BYTES - 8)) for row in range(ROWS)))


@pytest.mark.parametrize("bit", random.Random(1).sample(range(8 * ROW_BYTES), 40))
def test_one_flipped_bit_spoils_its_own_row_and_no_other(rows: bytearray, bit: int) -> None:
    spoiled = bit % ROWS
    rows[spoiled * ROW_BYTES + bit // 8] ^= 1 << bit % 8
    starts = range(0, len(rows), ROW_BYTES)
    assert intact(memoryview(rows), starts, ROW_BYTES) == [row != spoiled for row in range(ROWS)]
    assert [unseal(rows[at : at + ROW_BYTES]) is not None for at in starts] == [row != spoiled for row in range(ROWS)]


def test_only_the_rows_that_are_named_are_looked_at(rows: bytearray) -> None:
    rows[ROW_BYTES] ^= 1
    assert intact(memoryview(rows), [2 * ROW_BYTES, 0], ROW_BYTES) == [True, True]
