"""The hash chain: each chunk's hash extends its parent's, so one digest names a whole prefix.

The hashed bytes are specified in docs/formats/keys.md, with golden vectors in the tests (`golden_keys.json`). They
never change; another encoding would be a new algorithm with a new name. With `sha256`, the digests of whole chunks are
those that SGLang gives its pages, including its namespaces for LoRA and salt, so both engines name a prefix alike.
Tags, multimodal items and partial chunks are our extension: their messages begin with a prefix that no chunk of tokens
below 2**24 can begin with.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import xxhash

from kv_core.errors import InputError
from kv_core.tokens import Tokens, narrow_packer, pack_tokens, pack_wide, part_of, raise_for_invalid_token, sliceable

Algorithm = Literal["sha256", "xxh3_128", "blake2b"]
Digest = bytes

_NAMESPACE = b"sglang-cache-namespace-v1"
_TAGS = b"kv-core/tags/1"
_ITEMS = b"kv-core/items/1"
# 13 bytes, and then one for the parent's length: a tail's message is 2 or 3 bytes over a multiple of four, a whole
# chunk's 0 or 1, so that a tail can never be a chunk, whatever its tokens.
_TAIL = b"kv-core/tail1"
_MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 64  # the limit of a BLAKE2b key


@dataclass(frozen=True, slots=True)
class Item:
    """Something besides tokens that the model reads: an image, say, whose placeholder tokens look like any other's.

    content: a hash of the input; a `str` and its `bytes` are different contents.
    first_token, tokens: the positions in the prompt that it fills.
    """

    content: str | bytes
    first_token: int
    tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.content, (str, bytes)) or not self.content:
            raise InputError(f"an item's content is {self.content!r}; give its hash as text or bytes")
        for name in ("first_token", "tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
                raise InputError(f"an item's {name} is {value!r}; it must be a whole number of at least 0")
        if not self.tokens:
            raise InputError("an item fills 0 tokens; leave it out")
        self.encoded()  # so that text that is not Unicode is refused here and not in the middle of a chain

    def touches(self, first_token: int, last_token: int) -> bool:
        """Whether any of the tokens `first_token … last_token` (the last one excluded) belongs to the item."""
        return self.first_token < last_token and first_token < self.first_token + self.tokens

    def encoded(self) -> bytes:
        kind, content = (b"s", _utf8(self.content)) if isinstance(self.content, str) else (b"b", self.content)
        return kind + _sized(content) + struct.pack("<QQ", self.first_token, self.tokens)


@dataclass(frozen=True, slots=True)
class ChainScheme:
    """How digests are made. Two schemes that differ in anything name the same tokens differently.

    algorithm: `sha256` unless all callers are trusted not to look for collisions (`xxh3_128`), or tenants must not be
        able to compute each other's keys (`blake2b`).
    secret: the key of `blake2b`, 16 to 64 bytes; empty for the others.
    """

    algorithm: Algorithm = "sha256"
    chunk_tokens: int = 256
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            raise InputError(f"no algorithm {self.algorithm!r}; choose one of {', '.join(get_args(Algorithm))}")
        if isinstance(self.chunk_tokens, bool) or not isinstance(self.chunk_tokens, int):
            raise InputError(f"chunk_tokens is {self.chunk_tokens!r}; it must be a whole number")
        if not 1 <= self.chunk_tokens <= 2**20:
            raise InputError(f"chunk_tokens is {self.chunk_tokens}; it must be from 1 to {2**20}")
        if not isinstance(self.secret, bytes):
            raise InputError(f"the secret is a {type(self.secret).__name__}; it must be bytes")
        if self.algorithm != "blake2b":
            if self.secret:
                raise InputError(f"{self.algorithm} takes no secret; choose blake2b, or leave the secret out")
        elif not _MIN_SECRET_BYTES <= len(self.secret) <= _MAX_SECRET_BYTES:
            raise InputError(
                f"blake2b needs a secret of {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} bytes, and {len(self.secret)} "
                "were given; 32 random bytes are a good choice"
            )

    @property
    def name(self) -> str:
        """The value of `KeySpace.chain`: what besides the secret makes digests comparable."""
        return f"{self.algorithm}:{self.chunk_tokens}"

    @property
    def digest_bytes(self) -> int:
        return 16 if self.algorithm == "xxh3_128" else 32

    def check_parent(self, parent: Digest) -> None:
        """Refuse anything but a digest of this scheme: another length would let tokens pose as part of the parent."""
        if not isinstance(parent, bytes) or len(parent) not in (0, self.digest_bytes):
            raise InputError(
                f"a root or parent under {self.name} is empty or {self.digest_bytes} bytes, not {parent!r}"
            )

    def root(
        self, *, salt: str | None = None, lora: str | None = None, tags: Mapping[str, str] | None = None
    ) -> Digest:
        """The start of the chain: b"" for a prompt that anyone may share, else a digest of what separates it from
        others.

        salt: the tenant's secret or name. Empty text differs from None.
        lora: the adapter's identity. Empty text differs from None.
        """
        root = b""
        if salt is not None or lora is not None:
            message = _NAMESPACE
            for part in (lora, salt):
                message += b"\0" if part is None else b"\1" + _sized(_utf8(part))
            root = self._hash("root", message)
        if tags:
            pairs = sorted((_utf8(name), _utf8(value)) for name, value in tags.items())
            message = _TAGS + _sized(root) + struct.pack("<Q", len(pairs))
            message += b"".join(_sized(name) + _sized(value) for name, value in pairs)
            root = self._hash("tags", message)
        return root

    def extend_all(self, parent: Digest, tokens: Sequence[int], start: int, stop: int, position: int) -> list[Digest]:
        """The digests of the whole chunks in tokens[start:stop], none of which an item touches.

        This is the loop that long prompts spend their time in.

        position: the position of tokens[start] in the prompt, for error messages.
        """
        step = self.chunk_tokens
        pack = narrow_packer(step)
        sha256 = hashlib.sha256 if self.algorithm == "sha256" else None
        plain = isinstance(tokens, (list, tuple))
        digests = []
        for offset in range(start, stop - step + 1, step):
            chunk = tokens[offset : offset + step] if plain else part_of(tokens, offset, offset + step)
            if type(chunk[0]) is bool or type(chunk[-1]) is bool:
                raise_for_invalid_token(chunk, position + offset - start)
            try:
                packed = pack(*chunk)
            except struct.error:
                packed = pack_wide(chunk, position + offset - start)
            parent = sha256(parent + packed).digest() if sha256 else self._hash("chunk", parent + packed)
            digests.append(parent)
        return digests

    def extend_tail(self, parent: Digest, tokens: Tokens, items: Sequence[Item] = ()) -> Digest:
        """The digest of a last partial chunk. No whole chunk has the same digest; nothing extends it."""
        self.check_parent(parent)
        sequence = sliceable(tokens)
        tail = part_of(sequence, 0, len(sequence))
        if not 1 <= len(tail) < self.chunk_tokens:
            raise InputError(f"a partial chunk has 1 to {self.chunk_tokens - 1} tokens, and {len(tail)} were given")
        parent = self.with_items(parent, items)
        return self._hash("tail", _TAIL + bytes([len(parent)]) + parent + pack_tokens(tail))

    def with_items(self, parent: Digest, items: Sequence[Item]) -> Digest:
        """The parent that a chunk has when `items` touch it; the parent itself if none do."""
        if not items:
            return parent
        encoded = [
            item.encoded() for item in sorted(items, key=lambda item: (item.first_token, item.tokens, item.encoded()))
        ]
        return self._hash("items", _ITEMS + _sized(parent) + struct.pack("<Q", len(encoded)) + b"".join(encoded))

    def _hash(self, purpose: str, message: bytes) -> Digest:
        if self.algorithm == "sha256":
            return hashlib.sha256(message).digest()
        if self.algorithm == "xxh3_128":
            return xxhash.xxh3_128_digest(message)
        return hashlib.blake2b(message, digest_size=32, key=self.secret, person=_PERSONS[purpose]).digest()


_PERSONS = {purpose: b"kv-core/" + purpose.encode() for purpose in ("root", "tags", "chunk", "tail", "items")}


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise InputError(f"salt, lora and tags must be text, not {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        # A salt may be a secret, so it is not repeated.
        raise InputError("a salt, lora or tag is not valid Unicode") from None


# The checksum stored with a chunk wherever it leaves the host pool (docs/formats/chunk.md).


def checksum_of(chunk: memoryview) -> bytes:
    """128-bit XXH3, seed 0, in its canonical form. Other threads run meanwhile."""
    running = xxhash.xxh3_128()  # `update` releases the GIL; the one-shot function does not
    running.update(chunk)
    return running.digest()
