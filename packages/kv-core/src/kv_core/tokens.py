"""Token ids in any container, and their bytes as the hash chain reads them.

Containers are sliced in place, and a slice of an array becomes a list by its own `tolist`, so there is one code path
and neither numpy nor torch is imported. Packing validates tokens: `struct` refuses anything that is not a 32-bit
integer, and only then does Python search for the offending token.

The one mistake that `struct` accepts is a `bool` inside a list, because Python treats it as 0 or 1. Checking every
token's type would cost as much as hashing, so only the ends of each run are checked. That catches the usual mistake, a
mask passed as tokens.
"""

import operator
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from kv_core.errors import InputError, shortened

MAX_TOKEN = 2**64 - 1
_WIDE_MARK = b"\xff"
_ADVICE = f"tokens are whole numbers from 0 to {MAX_TOKEN}"


class HasTolist(Protocol):
    """The interface that arrays and tensors share."""

    def tolist(self) -> Any: ...


Tokens: TypeAlias = Sequence[int] | HasTolist
"""list, tuple, range, array.array, numpy array, torch tensor, or any other sequence of whole numbers."""


def sliceable(tokens: Tokens) -> Sequence[int]:
    """The same ids as something that `part_of` can slice. Their values are not checked yet; `pack_tokens` does that.

    Raises:
        InputError: not a flat sequence of tokens.
    """
    container: Any = tokens
    if isinstance(container, (list, tuple)):
        return container
    kind = type(container).__name__
    if isinstance(container, (str, bytes, bytearray)):
        raise InputError(f"tokens were given as {kind}; give token ids, not text: {_ADVICE}")
    axes = getattr(container, "ndim", 1)
    if axes != 1:
        raise InputError(f"tokens were given as an array of {axes} axes; give one row at a time")
    if hasattr(container, "tolist") and hasattr(container, "__getitem__") and hasattr(container, "__len__"):
        array: Sequence[int] = container
        return array
    if isinstance(container, Sequence):
        return list(container)
    try:
        return memoryview(container)
    except (TypeError, ValueError, BufferError):
        raise InputError(f"tokens were given as {kind}; give a list, a tuple or an array of ids") from None


def part_of(tokens: Sequence[int], start: int, stop: int) -> Sequence[int]:
    """tokens[start:stop] as a list or tuple."""
    part: Any = tokens[start:stop]
    if isinstance(part, (list, tuple)):
        return part
    try:
        token_ids: list[int] = part.tolist()
    except (NotImplementedError, TypeError, ValueError) as error:
        raise InputError(f"tokens in a {type(tokens).__name__} cannot be read ({error}); give a list") from None
    return token_ids


@lru_cache(maxsize=4096)
def narrow_packer(count: int) -> Callable[..., bytes]:
    """Packs `count` tokens as little-endian u32, or raises `struct.error`."""
    return struct.Struct(f"<{count}I").pack


def pack_tokens(tokens: Sequence[int], first_position: int = 0) -> bytes:
    """The tokens' bytes: little-endian u32 each or, if any is wider, 0xFF and then little-endian u64 each.

    The mark makes the length odd, so that no run of wide tokens has the bytes of a run of narrow ones.

    first_position: the first token's position in its prompt, for error messages.

    Raises:
        InputError: names the first invalid token and its position.
    """
    if tokens and (type(tokens[0]) is bool or type(tokens[-1]) is bool):
        raise_for_invalid_token(tokens, first_position)
    try:
        return narrow_packer(len(tokens))(*tokens)
    except struct.error:
        return pack_wide(tokens, first_position)


def pack_wide(tokens: Sequence[int], first_position: int) -> bytes:
    """Like `pack_tokens`, for tokens that did not pack as u32: one of them is wide, or invalid."""
    raise_for_invalid_token(tokens, first_position)
    return _WIDE_MARK + struct.pack(f"<{len(tokens)}Q", *tokens)


def raise_for_invalid_token(tokens: Sequence[int], first_position: int) -> None:
    """Raise `InputError` for the first invalid token; return if all are valid."""
    for position, token in enumerate(tokens, first_position):
        if isinstance(token, bool):
            raise InputError(f"token {position} is {token}, a bool; {_ADVICE} (was a mask given as tokens?)")
        try:
            value = operator.index(token)
        except TypeError:
            kind = type(token).__name__
            raise InputError(f"token {position} is {shortened(token)}, a {kind}; {_ADVICE}") from None
        if not 0 <= value <= MAX_TOKEN:
            problem = "negative" if value < 0 else "too large"
            raise InputError(f"token {position} is {shortened(value)}, which is {problem}; {_ADVICE}")
