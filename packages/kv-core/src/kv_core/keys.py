"""Chunk keys: a key space, a tenant, a digest of the whole prefix, and the group, shard and layer.

A `ChunkKey` is a subclass of `bytes`, so an index hashes and compares it at the speed of `bytes`:

version 1 byte | space 16 | tenant 7 | group u16 | shard u16 | layer u16 (0xFFFF: all layers) | digest 16 or 32

Integers are big-endian, so that the keys of one digest's shards sort in order. The tenant's tag identifies the owner,
for quotas and accounting. It is the digest that keeps tenants apart: its chain begins with the whole salt, so even two
tenants with equal tags share nothing. The other notations (hex, a path, and a text that includes the whole key space)
convert back to the same bytes. Each has exactly one valid spelling, and parsers enforce it by formatting what they have
read and comparing it with the input.
"""

import hashlib
import re
import string
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from kv_core.errors import InputError, shortened

KEY_VERSION: Final = 1
"""First byte of every key. The meaning of a version never changes."""

ALL_LAYERS: Final = 0xFFFF
_SHARES: Final = struct.Struct(">HHH")
_PREFIX_BYTES: Final = 30
_PREFIX_OF: Final = itemgetter(slice(_PREFIX_BYTES))
KEY_BYTES: Final = (_PREFIX_BYTES + 16, _PREFIX_BYTES + 32)
"""The possible lengths of a key, which depend on its digest's."""

TENANT_BYTES: Final = 7
"""Version, space and tenant are 24 bytes: 32 characters of base64, so a tenant's names share a prefix there too."""

TENANT_AT: Final = slice(17, 17 + TENANT_BYTES)
"""The tenant's position in a key, for loops in which `ChunkKey.tenant` would be too slow."""

SPACE_ID_BYTES: Final = 16

NO_TENANT: Final = bytes(TENANT_BYTES)
"""The tag of chunks that anyone may share: those of prompts without a salt."""

_SPACE_MESSAGE: Final = b"kv-core/space/1"
_TENANT_MESSAGE: Final = b"kv-core/tenant/1"

_MAX_TEXT_CHARS: Final = 1024
_MAX_TAGS: Final = 64
_MAX_SPELLING_CHARS: Final = 1 << 20
_TAG_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DECIMAL: Final = re.compile(r"0|[1-9][0-9]{0,4}")
_RESERVED_TAGS: Final = ("revision", "format", "chain", "tenant", "group", "layer")
_UNESCAPED: Final = ":/+~"


class ChunkKey(bytes):
    """One chunk's name. The constructor trusts its bytes; `from_bytes` validates those from outside."""

    __slots__ = ()

    @property
    def space_id(self) -> bytes:
        """The fingerprint of the key space."""
        return self[1:17]

    @property
    def tenant(self) -> bytes:
        """The tag of the tenant that owns it; `NO_TENANT` if anyone may share it."""
        return self[TENANT_AT]

    @property
    def group(self) -> int:
        return self[24] << 8 | self[25]

    @property
    def shard(self) -> int:
        return self[26] << 8 | self[27]

    @property
    def layer(self) -> int | None:
        """None: the chunk holds all layers of its group."""
        layer = self[28] << 8 | self[29]
        return None if layer == ALL_LAYERS else layer

    @property
    def digest(self) -> bytes:
        return self[_PREFIX_BYTES:]

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "ChunkKey":
        """Take a key from outside.

        Raises:
            InputError: not the bytes of a key.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InputError(f"a chunk key must be bytes, not {shortened(data)}")
        key = cls(data)
        if len(key) not in KEY_BYTES:
            raise InputError(f"a chunk key has {KEY_BYTES[0]} or {KEY_BYTES[1]} bytes, not {len(key)}")
        if key[0] != KEY_VERSION:
            raise InputError(f"a chunk key of version {key[0]}; this release knows version {KEY_VERSION}")
        return key

    @classmethod
    def from_hex(cls, text: str) -> "ChunkKey":
        """The inverse of `hex()`.

        Raises:
            InputError: not the lower-case hex digits of a key.
        """
        return cls.from_bytes(_unhex(text, "a chunk key", {2 * nbytes for nbytes in KEY_BYTES}))

    def path(self) -> str:
        """A relative path with /, safe on every file system: space, tenant, places, two digits to spread, digest."""
        places = f"{self.group}-{self.shard}" + ("" if self.layer is None else f"-{self.layer}")
        digest = self.digest.hex()
        return f"{self[0]}-{self.space_id.hex()}/{self.tenant.hex()}/{places}/{digest[:2]}/{digest}"

    @classmethod
    def from_path(cls, path: str) -> "ChunkKey":
        """The inverse of `path()`.

        Raises:
            InputError: anything else, such as .., a leading /, or upper-case digits.
        """
        if not isinstance(path, str) or len(path) > 160:
            raise InputError(f"not the path of a chunk key: {shortened(path)}")
        parts = path.split("/")
        places = parts[2].split("-") if len(parts) == 5 else []
        if len(places) not in (2, 3) or not all(_DECIMAL.fullmatch(place) for place in places):
            raise InputError(f"not the path of a chunk key: {shortened(path)}")
        version, _, space = parts[0].partition("-")
        group, shard, layer = [int(place) for place in places] + [ALL_LAYERS] * (3 - len(places))
        if version != str(KEY_VERSION) or max(group, shard, layer) > ALL_LAYERS:
            raise InputError(f"not the path of a chunk key of version {KEY_VERSION}: {shortened(path)}")
        key = cls.from_bytes(
            bytes([KEY_VERSION])
            + _unhex(space, "a key space", {32})
            + _unhex(parts[1], "a tenant", {2 * TENANT_BYTES})
            + _SHARES.pack(group, shard, layer)
            + _unhex(parts[4], "a digest", {32, 64})
        )
        if key.path() != path:
            raise InputError(f"not the path of a chunk key: {shortened(path)}")
        return key

    def split_layers(self, layers: int) -> list["ChunkKey"]:
        """The keys of the chunk's first `layers` layers, one per layer.

        Raises:
            InputError: the key already names a single layer, or there cannot be that many.
        """
        if self.layer is not None:
            raise InputError(f"this key names layer {self.layer} alone; split the key of the whole chunk")
        if not 1 <= layers <= ALL_LAYERS:
            raise InputError(f"{layers} layers; there can be 1 to {ALL_LAYERS}")
        head, digest = self[: _PREFIX_BYTES - 2], self.digest
        return [ChunkKey(head + layer.to_bytes(2, "big") + digest) for layer in range(layers)]

    def __repr__(self) -> str:
        return f"ChunkKey({self.hex()})"

    __str__ = __repr__


@dataclass(frozen=True, slots=True)
class KeySpace:
    """What must be equal for the bytes of two chunks to be interchangeable.

    model: the model's name.
    revision: the model's revision, or a fingerprint of its weights.
    dtype: the dtype of the stored KV.
    format: `ChunkFormat.fingerprint`.
    world: the number of shards of each chunk.
    chain: `ChainScheme.name`.
    tags: anything else, by name; sorted.
    """

    model: str
    revision: str
    dtype: str
    format: str
    world: int
    chain: str
    tags: tuple[tuple[str, str], ...] = ()
    fingerprint: bytes = field(init=False, repr=False, compare=False)
    """16 bytes that represent all of the above in every key."""

    def __post_init__(self) -> None:
        for name in ("model", "revision", "dtype", "format", "chain"):
            _check_text(name, getattr(self, name))
        if not self.model:
            raise InputError("a key space needs the model's name")
        if isinstance(self.world, bool) or not isinstance(self.world, int) or not 1 <= self.world <= ALL_LAYERS:
            raise InputError(f"world is {self.world!r}; it must be a number of shards from 1 to {ALL_LAYERS}")
        object.__setattr__(self, "tags", tuple(sorted((name, value) for name, value in self.tags)))
        _check_tags(self.tags)
        object.__setattr__(self, "fingerprint", self._compute_fingerprint())

    def _compute_fingerprint(self) -> bytes:
        texts = [self.model, self.revision, self.dtype, self.format, self.chain]
        message = _SPACE_MESSAGE + struct.pack("<QQ", self.world, len(self.tags))
        for text in texts + [text for tag in self.tags for text in tag]:
            encoded = text.encode()
            message += struct.pack("<Q", len(encoded)) + encoded
        return hashlib.sha256(message).digest()[:16]

    def key(self, digest: bytes, group: int = 0, shard: int = 0, *, tenant: bytes = NO_TENANT) -> ChunkKey:
        """The key of one shard of the chunk that `digest` names."""
        return self.keys([digest], groups=(group,), shards=(shard,), tenant=tenant)[0]

    def keys(
        self,
        digests: Iterable[bytes],
        *,
        groups: int | Iterable[int] = 1,
        shards: int | Iterable[int] | None = None,
        tenant: bytes = NO_TENANT,
    ) -> list[ChunkKey]:
        """The keys of every shard of every chunk: for each digest, for each group, for each shard.

        groups, shards: how many, counted from 0, or which ones; by default all `world` shards.
        tenant: `tenant_tag` of the salt that the digests' chain began with.

        Raises:
            InputError: a shard that the space does not have, a digest that is not 16 or 32 bytes, or an invalid tag.
        """
        shard_numbers = range(self.world) if shards is None else _numbers(shards)
        for shard in shard_numbers:
            if not 0 <= shard < self.world:
                raise InputError(f"shard {shard} of a key space with {self.world} shards (shards are numbered from 0)")
        return keys_in(self.fingerprint, digests, groups=groups, shards=shard_numbers, tenant=tenant)

    def spell(self, key: ChunkKey) -> str:
        """The whole space and key as text: `model@world@shard@digest@dtype`, then `@tag%value` for everything else.

        Raises:
            InputError: the key belongs to another space.
        """
        if key.space_id != self.fingerprint:
            raise InputError(f"{key!r} does not belong to the key space of {self.model}")
        parts = [_escape(self.model), str(self.world), str(key.shard), key.digest.hex(), _escape(self.dtype)]
        tenant = "" if key.tenant == NO_TENANT else key.tenant.hex()
        layer = "" if key.layer is None else str(key.layer)
        reserved = (self.revision, self.format, self.chain, tenant, str(key.group), layer)
        tags = [*zip(_RESERVED_TAGS, reserved, strict=True), *self.tags]
        return "@".join(parts + [f"{name}%{_escape(value)}" for name, value in tags])

    @classmethod
    def parse(cls, text: str) -> tuple["KeySpace", ChunkKey]:
        """The inverse of `spell`.

        Raises:
            InputError: `spell` does not write such text.
        """
        if not isinstance(text, str) or len(text) > _MAX_SPELLING_CHARS:
            raise InputError(f"not a key's spelling: {shortened(text)}")
        parts = text.split("@")
        tags = [tuple(part.partition("%")[::2]) for part in parts[5:]]
        reserved = [value for _, value in tags[: len(_RESERVED_TAGS)]]
        if tuple(name for name, _ in tags[: len(_RESERVED_TAGS)]) != _RESERVED_TAGS:
            raise InputError(
                f"not a key's spelling, which is model@world@shard@digest@dtype and then "
                f"@{'%…@'.join(_RESERVED_TAGS)}%…: {shortened(text)}"
            )
        model, dtype, revision, chunk_format, chain = [_unescape(part) for part in (parts[0], parts[4], *reserved[:3])]
        numbers = [parts[1], parts[2], reserved[4], reserved[5] or str(ALL_LAYERS)]
        if not all(_DECIMAL.fullmatch(number) and int(number) <= ALL_LAYERS for number in numbers):
            raise InputError(f"world, shard, group and layer are numbers up to {ALL_LAYERS}: {shortened(text)}")
        world, shard, group, layer = map(int, numbers)
        other_tags = tuple((name, _unescape(value)) for name, value in tags[len(_RESERVED_TAGS) :])
        space = cls(model, revision, dtype, chunk_format, world, chain, other_tags)
        tenant = _unhex(reserved[3], "a tenant", {2 * TENANT_BYTES}) if reserved[3] else NO_TENANT
        key = space.key(_unhex(parts[3], "a digest", {32, 64}), group, shard, tenant=tenant)
        key = ChunkKey(key[: _PREFIX_BYTES - 2] + layer.to_bytes(2, "big") + key.digest)
        if space.spell(key) != text:
            raise InputError(f"not the canonical spelling of this key: {shortened(text)}")
        return space, key


def keys_in(
    space_id: bytes,
    digests: Iterable[bytes],
    *,
    groups: int | Iterable[int] = 1,
    shards: Iterable[int] = (0,),
    tenant: bytes = NO_TENANT,
) -> list[ChunkKey]:
    """`KeySpace.keys` for a caller that has only the fingerprint of the key space.

    Raises:
        InputError: the group, the tag or the fingerprint is invalid, or a digest is not 16 or 32 bytes.
    """
    if not isinstance(space_id, bytes) or len(space_id) != SPACE_ID_BYTES:
        raise InputError(f"a key space's fingerprint has {SPACE_ID_BYTES} bytes")
    if not isinstance(tenant, bytes) or len(tenant) != TENANT_BYTES:
        raise InputError(f"a tenant's tag has {TENANT_BYTES} bytes, see `tenant_tag`")
    prefixes = _prefixes(space_id, groups if isinstance(groups, int) else tuple(groups), tuple(shards), tenant)
    digest_list = list(digests)
    if wrong_sizes := set(map(len, digest_list)) - {16, 32}:
        raise InputError(f"a digest of {wrong_sizes.pop()} bytes; a chain's digests have 16 or 32")
    return [ChunkKey(prefix + digest) for digest in digest_list for prefix in prefixes]


@lru_cache(maxsize=1024)
def _prefixes(
    space_id: bytes, groups: int | tuple[int, ...], shards: tuple[int, ...], tenant: bytes
) -> tuple[bytes, ...]:
    """The bytes before the digest in the keys of a chunk: the same for all of an engine's requests of one tenant."""
    head = bytes([KEY_VERSION]) + space_id + tenant
    prefixes: list[bytes] = []
    for group in _numbers(groups):
        if not 0 <= group < ALL_LAYERS:
            raise InputError(f"group {group}; there can be groups 0 to {ALL_LAYERS - 1}")
        prefixes += [head + _SHARES.pack(group, shard, ALL_LAYERS) for shard in shards]
    return tuple(prefixes)


def by_chain(keys: Sequence[ChunkKey]) -> dict[bytes, list[ChunkKey]]:
    """The keys of each group and shard separately, in their order, by the bytes before the digest: each of these lists
    is a chain of its own."""
    if len(set(map(_PREFIX_OF, keys))) == 1:
        return {_PREFIX_OF(keys[0]): list(keys)}
    chains: dict[bytes, list[ChunkKey]] = {}
    for key in keys:
        chains.setdefault(key[:_PREFIX_BYTES], []).append(key)
    return chains


def tenant_tag(salt: str | None) -> bytes:
    """The 7-byte tag of the tenant with this salt. The salt cannot be read from it, only guessed.

    Empty text is a salt like any other; None gives `NO_TENANT`.

    Raises:
        InputError: the salt is not text, or not valid Unicode.
    """
    if salt is None:
        return NO_TENANT
    try:
        encoded = salt.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InputError("a salt must be valid Unicode text") from None  # and it is not repeated here: it is a secret
    return hashlib.sha256(_TENANT_MESSAGE + struct.pack("<Q", len(encoded)) + encoded).digest()[:TENANT_BYTES]


def _numbers(count_or_numbers: int | Iterable[int]) -> list[int]:
    return list(range(count_or_numbers)) if isinstance(count_or_numbers, int) else list(count_or_numbers)


def _check_tags(tags: tuple[tuple[str, str], ...]) -> None:
    if len(tags) > _MAX_TAGS:
        raise InputError(f"{len(tags)} tags; a key space has at most {_MAX_TAGS}")
    for number, (name, value) in enumerate(tags):
        if not isinstance(name, str) or not _TAG_NAME.fullmatch(name):
            raise InputError(f"the tag name {shortened(name)} is not 1 to 64 of A-Z a-z 0-9 . _ -")
        if name in _RESERVED_TAGS:
            raise InputError(f"the tag name {name!r} is reserved for the spelling of keys")
        if number and tags[number - 1][0] == name:
            raise InputError(f"the tag {name!r} is given twice")
        _check_text(f"tag {name}", value)


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise InputError(f"{name} is {shortened(text)}; it must be text")
    if len(text) > _MAX_TEXT_CHARS:
        raise InputError(f"{name} has {len(text)} characters; at most {_MAX_TEXT_CHARS} are allowed")
    if any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 or 0xD800 <= ord(char) < 0xE000 for char in text):
        raise InputError(f"{name} is {shortened(text)}; control characters are not allowed")


def _escape(text: str) -> str:
    return quote(text, safe=_UNESCAPED)


def _unescape(text: str) -> str:
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeError:
        raise InputError(f"not percent-encoded UTF-8: {shortened(text)}") from None


def _unhex(text: str, what: str, digits: set[int]) -> bytes:
    if not isinstance(text, str) or len(text) not in digits or not set(text) <= set(string.digits + "abcdef"):
        lengths = " or ".join(map(str, sorted(digits)))
        raise InputError(f"{what} is {lengths} lower-case hex digits, not {shortened(text)}")
    return bytes.fromhex(text)
