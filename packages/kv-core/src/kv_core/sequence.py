"""The digests of a growing request: append tokens as they arrive, get the digest of each chunk that they complete.

Only new tokens are read. A sequence keeps its digests and the tokens after its last whole chunk.
"""

from collections.abc import Iterable, Sequence

from kv_core.errors import InputError
from kv_core.hashing import ChainScheme, Digest, Item
from kv_core.tokens import Tokens, pack_tokens, part_of, sliceable


class KeySequence:
    """The chain of one prompt. A call that raises leaves it as it was."""

    __slots__ = ("_digests", "_items", "_root", "_scheme", "_tail")

    def __init__(self, scheme: ChainScheme, *, root: Digest = b"", items: Iterable[Item] = ()) -> None:
        scheme.check_parent(root)
        self._scheme = scheme
        self._root = root
        self._digests: list[Digest] = []
        self._tail: list[int] = []
        self._items: tuple[Item, ...] = ()
        self.add_items(items)

    @property
    def digests(self) -> Sequence[Digest]:
        """The digests of all whole chunks so far. Do not modify."""
        return self._digests

    @property
    def tokens(self) -> int:
        """The number of tokens appended so far."""
        return len(self._digests) * self._scheme.chunk_tokens + len(self._tail)

    def add_items(self, items: Iterable[Item]) -> None:
        """Add what the model reads besides tokens, in any order, before the first chunk of each is complete.

        Raises:
            InputError: a chunk that an item touches has been hashed without it.
        """
        new_items = tuple(items)
        hashed = len(self._digests) * self._scheme.chunk_tokens
        for item in new_items:
            if item.first_token < hashed:
                raise InputError(
                    f"an item at token {item.first_token} comes too late: {hashed} tokens are hashed already; "
                    "give items when the sequence is made, or before their tokens"
                )
        self._items += new_items

    def append(self, tokens: Tokens) -> list[Digest]:
        """Append more tokens; returns the digests of the chunks that they complete.

        Raises:
            InputError: names the invalid token and its position in the prompt. Nothing was appended.
        """
        new_tokens = sliceable(tokens)
        step = self._scheme.chunk_tokens
        digests: list[Digest] = []
        start = 0
        if self._tail:
            start = min(step - len(self._tail), len(new_tokens))
            head = part_of(new_tokens, 0, start)
            pack_tokens(head, self.tokens)  # only to validate: an error must name the position in the prompt
            chunk = [*self._tail, *head]
            if len(chunk) < step:
                self._tail = chunk
                return []
            digests.append(self._extend(self._parent, chunk, len(self._digests) * step))
        whole_end = start + (len(new_tokens) - start) // step * step
        parent = digests[-1] if digests else self._parent
        digests += self._extend_whole(parent, new_tokens, start, whole_end, self.tokens + start)
        tail = list(part_of(new_tokens, whole_end, len(new_tokens)))
        pack_tokens(tail, self.tokens + whole_end)
        self._tail = tail
        self._digests += digests
        return digests

    def tail_digest(self) -> Digest | None:
        """The digest of the tokens after the last whole chunk, if any. It names them; nothing extends it."""
        if not self._tail:
            return None
        first = len(self._digests) * self._scheme.chunk_tokens
        return self._scheme.extend_tail(self._parent, self._tail, self._touching(first, first + len(self._tail)))

    @property
    def _parent(self) -> Digest:
        return self._digests[-1] if self._digests else self._root

    def _touching(self, first_token: int, last_token: int) -> list[Item]:
        return [item for item in self._items if item.touches(first_token, last_token)]

    def _extend(self, parent: Digest, chunk: Sequence[int], first_token: int) -> Digest:
        parent = self._scheme.with_items(parent, self._touching(first_token, first_token + len(chunk)))
        return self._scheme.extend_all(parent, chunk, 0, len(chunk), first_token)[0]

    def _extend_whole(
        self, parent: Digest, tokens: Sequence[int], start: int, stop: int, position: int
    ) -> list[Digest]:
        if not self._touching(position, position + stop - start):  # nearly always
            return self._scheme.extend_all(parent, tokens, start, stop, position)
        step = self._scheme.chunk_tokens
        digests = []
        for offset in range(start, stop, step):
            parent = self._extend(parent, part_of(tokens, offset, offset + step), position + offset - start)
            digests.append(parent)
        return digests


def digests_of(
    scheme: ChainScheme,
    tokens: Tokens,
    *,
    root: Digest = b"",
    items: Iterable[Item] = (),
    skip_tokens: int = 0,
    mask: Sequence[bool] | None = None,
) -> list[Digest]:
    """The digests of a prompt's whole chunks, except those that the caller does not need.

    skip_tokens: leave out the chunks of this many leading tokens (they are hashed, because later digests depend on
        them).
    mask: the same per token, False for a token to skip.

    Raises:
        InputError: the skipped tokens are not a whole number of leading chunks, or a token is invalid.
    """
    token_ids = sliceable(tokens)
    if mask is not None:
        if skip_tokens:
            raise InputError("give skip_tokens or a mask, not both")
        skip_tokens = _leading_false(mask, len(token_ids))
    if isinstance(skip_tokens, bool) or not isinstance(skip_tokens, int) or not 0 <= skip_tokens <= len(token_ids):
        raise InputError(f"skip_tokens is {skip_tokens!r}; it must be from 0 to the {len(token_ids)} tokens given")
    if skip_tokens % scheme.chunk_tokens:
        fitting = skip_tokens - skip_tokens % scheme.chunk_tokens
        raise InputError(
            f"{skip_tokens} tokens to skip are not a whole number of chunks of {scheme.chunk_tokens}; skip {fitting}"
        )
    digests = KeySequence(scheme, root=root, items=items).append(token_ids)
    return digests[skip_tokens // scheme.chunk_tokens :]


def _leading_false(mask: Sequence[bool], tokens: int) -> int:
    flags = [bool(flag) for flag in (mask.tolist() if hasattr(mask, "tolist") else mask)]
    if len(flags) != tokens:
        raise InputError(f"the mask has {len(flags)} entries for {tokens} tokens")
    leading = flags.index(True) if True in flags else len(flags)
    if not all(flags[leading:]):
        gap = flags.index(False, leading)
        raise InputError(f"the mask skips token {gap} after it kept token {leading}; it may only skip from the front")
    return leading
