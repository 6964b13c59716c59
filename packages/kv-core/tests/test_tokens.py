"""Every container of the same tokens gives the same keys, and what is no token is named."""

import array
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core import ChainScheme, InputError, KeySequence, digests_of
from kv_core.tokens import MAX_TOKEN, pack_tokens
from kv_testing.strategies import prompts

relaxed = settings(deadline=None, max_examples=80)
SCHEME = ChainScheme(chunk_tokens=4)


class OwnSequence(Sequence[int]):
    """A sequence that is neither list nor tuple, as engines hand out."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: Any) -> Any:
        return self._tokens[index]


def whole(tokens: Any) -> tuple[list[bytes], bytes | None]:
    sequence = KeySequence(SCHEME)
    sequence.append(tokens)
    return list(sequence.digests), sequence.tail_digest()


@given(tokens=prompts(wide=False))
@relaxed
def test_every_container_of_the_same_tokens_gives_the_same_digests(tokens: list[int]) -> None:
    wanted = whole(tokens)
    assert whole(tuple(tokens)) == wanted
    assert whole(OwnSequence(tokens)) == wanted
    for code in "ILqQ":
        assert whole(array.array(code, tokens)) == wanted
        assert whole(memoryview(array.array(code, tokens))) == wanted


@given(tokens=prompts())
@relaxed
def test_numpy_gives_the_same_digests_in_any_byte_order_and_stride(tokens: list[int]) -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is no dependency of kv-core")
    wanted = whole(tokens)
    assert whole(numpy.array(tokens, dtype="<u8")) == wanted
    assert whole(numpy.array(tokens, dtype=">u8")) == wanted
    assert whole(numpy.repeat(numpy.array(tokens, dtype="u8"), 2)[::2]) == wanted
    assert whole([numpy.uint64(token) for token in tokens]) == wanted
    if max(tokens, default=0) < 2**63:
        assert whole(numpy.array(tokens, dtype="i8")) == wanted


@given(tokens=prompts(wide=False))
@relaxed
def test_torch_gives_the_same_digests(tokens: list[int]) -> None:
    torch = pytest.importorskip("torch", reason="torch is no dependency of kv-core")
    assert whole(torch.tensor(tokens, dtype=torch.int64)) == whole(tokens)


def test_a_range_is_a_sequence_of_tokens() -> None:
    assert whole(range(3, 14)) == whole(list(range(3, 14)))


BAD: list[tuple[object, str]] = [
    (-1, "is -1, which is negative"),
    (2**64, "which is too large"),
    (10**400, "a number of 1329 bits, which is too large"),
    (1.0, "is 1.0, a float"),
    (None, "a NoneType"),
    ("7", "is '7', a str"),
    ([7], r"is \[7\], a list"),
    (float("nan"), "a float"),
]


@pytest.mark.parametrize(("bad", "text"), BAD, ids=[text for _, text in BAD])
@pytest.mark.parametrize("place", [0, 3, 4, 7, 8, 9])
def test_what_is_no_token_is_named_with_its_place_and_nothing_is_appended(bad: object, text: str, place: int) -> None:
    """Whether it lies in the chunk that was begun, in a whole one, or in the tail."""
    tokens: list[Any] = list(range(10))
    tokens[place] = bad
    sequence = KeySequence(SCHEME)
    sequence.append([90, 91, 92, 93, 94, 95])
    before = (list(sequence.digests), sequence.tokens, sequence.tail_digest())
    with pytest.raises(InputError, match=f"token {place + 6} .*{text}.*whole numbers from 0"):
        sequence.append(tokens)
    assert (list(sequence.digests), sequence.tokens, sequence.tail_digest()) == before


@pytest.mark.parametrize("bad", ["text", b"\1\2", bytearray(4), 5, None, iter([1, 2]), {1, 2}, {1: 2}, object()])
def test_what_holds_no_tokens_is_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="tokens were given as"):
        KeySequence(SCHEME).append(bad)


@pytest.mark.parametrize("typecode", ["d", "f"])
def test_an_array_of_floats_is_refused(typecode: str) -> None:
    with pytest.raises(InputError, match=r"token 0 is 1\.0, a float"):
        KeySequence(SCHEME).append(array.array(typecode, [1, 2, 3, 4]))


def test_arrays_that_hold_no_tokens_are_refused() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is no dependency of kv-core")
    for bad, text in [
        (numpy.ones((2, 4), dtype="i8"), "2 axes"),
        (numpy.array(4), "0 axes"),
        (numpy.ones(4, dtype=bool), "a bool"),
        (numpy.ones(4, dtype="f2"), "a float"),
        (numpy.array([1, -2, 3, 4]), "token 1 is -2"),
        (numpy.array(["a"] * 4), "a str"),
    ]:
        with pytest.raises(InputError, match=text):
            KeySequence(SCHEME).append(bad)


def test_a_mask_given_as_tokens_is_recognised() -> None:
    for mask in ([True] * 9, [False, 1, 2, 3], [1, 2, 3, True], [1, 2, 3, 4, False]):
        with pytest.raises(InputError, match=r"a bool; .*mask"):
            KeySequence(SCHEME).append(mask)


def test_a_bool_amid_tokens_counts_as_the_number_that_it_equals() -> None:
    """Written down in the module: looking at every token's type would cost as much as hashing it."""
    assert digests_of(SCHEME, [9, True, 9, 9]) == digests_of(SCHEME, [9, 1, 9, 9])


@given(tokens=st.lists(st.integers(0, MAX_TOKEN), min_size=1, max_size=6))
@relaxed
def test_the_packed_bytes_give_the_tokens_back(tokens: list[int]) -> None:
    """So packing is injective: narrow or wide can be told by the length, and each of them unpacks."""
    packed = pack_tokens(tokens)
    if len(packed) % 2:
        assert packed[:1] == b"\xff"
        unpacked = struct.unpack(f"<{len(packed) // 8}Q", packed[1:])
    else:
        unpacked = struct.unpack(f"<{len(packed) // 4}I", packed)
    assert list(unpacked) == tokens
    assert (len(packed) % 2 == 1) == (max(tokens) >= 2**32)


def test_a_container_that_cannot_be_read_is_an_input_error() -> None:
    view = memoryview(array.array("I", [1, 2, 3, 4])).cast("B").cast("c")
    refused: Callable[[], object] = lambda: KeySequence(SCHEME).append(view)  # noqa: E731
    with pytest.raises(InputError, match=re.escape("a bytes")):
        refused()
