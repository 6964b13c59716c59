"""Keys name exactly one chunk's bytes, and every spelling gives back the key it spells."""

import pickle
from base64 import urlsafe_b64encode
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core import ChainScheme, ChunkKey, InputError, KeySpace, tenant_tag
from kv_core.keys import NO_TENANT
from kv_core.testing import key_chain
from kv_testing.strategies import chunk_keys, digests, key_spaces, tenants, texts

relaxed = settings(deadline=None, max_examples=150)
SPACE = KeySpace("org/model", "rev", "bfloat16", "f0", 4, "sha256:256", (("zone", "x"),))
TENANT = tenant_tag("s")
KEY = SPACE.key(bytes(range(32)), group=1, shard=3, tenant=TENANT)


@given(key=chunk_keys())
@relaxed
def test_bytes_hex_and_path_give_the_key_back(key: ChunkKey) -> None:
    assert ChunkKey.from_bytes(bytes(key)) == key
    assert ChunkKey.from_hex(key.hex()) == key
    assert ChunkKey.from_path(key.path()) == key
    assert pickle.loads(pickle.dumps(key)) == key
    assert type(pickle.loads(pickle.dumps(key))) is ChunkKey
    parts = key.path().split("/")
    assert all(part not in ("", ".", "..") and len(part) <= 64 for part in parts)
    assert key.path().isascii()
    assert key.path() == key.path().lower()


@given(space=key_spaces(), data=st.data())
@relaxed
def test_the_text_gives_key_and_space_back(space: KeySpace, data: st.DataObject) -> None:
    key = data.draw(chunk_keys(space))
    text = space.spell(key)
    assert KeySpace.parse(text) == (space, key)
    assert KeySpace.parse(text)[0].fingerprint == space.fingerprint
    assert text.isascii()
    assert not set(text) & set(" \\\n\0")


@given(space=key_spaces(), data=st.data())
@relaxed
def test_a_key_says_what_it_was_made_of(space: KeySpace, data: st.DataObject) -> None:
    digest = data.draw(digests())
    group, shard = data.draw(st.integers(0, 65534)), data.draw(st.integers(0, space.world - 1))
    tenant = data.draw(tenants())
    key = space.key(digest, group, shard, tenant=tenant)
    assert (key.space_id, key.tenant, key.group, key.shard, key.layer, key.digest) == (
        space.fingerprint, tenant, group, shard, None, digest,
    )  # fmt: skip
    layers = key.split_layers(3)
    assert [layer.layer for layer in layers] == [0, 1, 2]
    assert {layer[:28] + layer[30:] for layer in layers} == {key[:28] + key[30:]}


FIELDS = ["model", "revision", "dtype", "format", "chain"]


@given(space=key_spaces(), other=key_spaces(), taken=st.sets(st.sampled_from([*FIELDS, "world", "tags"]), max_size=2))
@relaxed
def test_spaces_share_a_fingerprint_only_if_they_are_equal(space: KeySpace, other: KeySpace, taken: set[str]) -> None:
    changed = replace(space, **{name: getattr(other, name) for name in taken})
    assert (changed.fingerprint == space.fingerprint) == (changed == space)


@given(left=texts(min_size=1), right=texts(min_size=1))
@relaxed
def test_text_cannot_move_from_one_field_to_the_next(left: str, right: str) -> None:
    one = KeySpace("m", left, right, "", 1, "c").fingerprint
    assert one != KeySpace("m", left + right, "", "", 1, "c").fingerprint
    assert one != KeySpace("m", "", left + right, "", 1, "c").fingerprint
    assert one != KeySpace("m" + left, "", right, "", 1, "c").fingerprint


def test_keys_are_chunk_major_and_for_every_shard_unless_said() -> None:
    chain = [bytes([number]) * 32 for number in range(3)]
    named = [(key.digest, key.group, key.shard) for key in SPACE.keys(chain, groups=2)]
    assert named == [(digest, group, shard) for digest in chain for group in range(2) for shard in range(4)]
    named = [(key.digest, key.group, key.shard) for key in SPACE.keys(chain, groups=range(5, 7), shards=[2])]
    assert named == [(digest, group, 2) for digest in chain for group in (5, 6)]
    assert len(set(SPACE.keys(chain, groups=2))) == 24
    assert SPACE.keys([]) == []
    assert [key.shard for key in key_chain(2, shards=2)] == [0, 1, 0, 1]


def test_sorted_keys_keep_the_shares_of_a_group_together_in_order() -> None:
    keys = SPACE.keys([bytes(32)], groups=[0, 1, 255, 256])
    assert sorted(keys) == keys


def test_tags_are_named_and_not_ordered() -> None:
    one = replace(SPACE, tags=(("a", "1"), ("b", "2")))
    assert one == replace(SPACE, tags=(("b", "2"), ("a", "1")))
    assert hash(one) == hash(replace(SPACE, tags=(("b", "2"), ("a", "1"))))


def test_a_key_is_its_bytes() -> None:
    """So that an index may be asked with either, at the speed of bytes."""
    plain = bytes(KEY)
    assert plain == KEY
    assert hash(plain) == hash(KEY)
    assert {KEY: 1}[plain] == 1
    assert str(KEY) == f"ChunkKey({KEY.hex()})"
    with pytest.raises(AttributeError):
        KEY.note = 1  # type: ignore[attr-defined]


HEX, PATH, TEXT = KEY.hex(), KEY.path(), SPACE.spell(KEY)
HOSTILE_PATHS = [
    "",
    "/",
    "..",
    "../" + PATH,
    "/" + PATH,
    PATH + "/",
    "./" + PATH,
    PATH + "/..",
    PATH.upper(),
    PATH + "\0",
    PATH + "\n",
    PATH.replace("/", "\\"),
    PATH.replace("1-", "2-", 1),
    PATH.replace("1-", "01-", 1),
    PATH.replace("/1-3/", "/01-3/"),
    PATH.replace("/1-3/", "/1-3-65535/"),
    PATH.replace("/1-3/", "/1-65536/"),
    PATH.replace("/1-3/", "/1/"),
    PATH.replace("/1-3/", "/1-3-4-5/"),
    PATH.replace("/1-3/", "/-1-3/"),
    PATH.replace("/1-3/", "/\u0661-3/"),
    PATH.replace("/1-3/", "/ 1-3/"),
    PATH.replace("/1-3/", "/1-3/../1-3/"),
    PATH.replace(TENANT.hex(), TENANT.hex().upper()),
    PATH.replace(TENANT.hex(), TENANT.hex()[:-1]),
    PATH.replace(TENANT.hex(), ".."),
    PATH.replace("/" + TENANT.hex(), ""),
    PATH.replace("/00/", "/01/"),
    PATH.replace("/00/", "//"),
    PATH[:-1],
    PATH + "0",
    PATH * 9,
    "a" * 10**6,
]
HOSTILE_HEX = [
    "",
    "0",
    HEX[:-1],
    HEX[:-2],
    HEX + "00",
    HEX.upper(),
    " " + HEX[1:],
    HEX[:-1] + "\n",
    HEX[:-1] + "g",
    "02" + HEX[2:],
    HEX[:-1] + "\u0661",
    HEX[:-1] + "\uff11",
    HEX[:-1] + "\0",
    HEX * 1000,
    "0x" + HEX[2:],
    HEX[:40] + "  " + HEX[42:],
]
HOSTILE_TEXTS = [
    "",
    "@",
    "@@@@",
    "%",
    TEXT + "@",
    TEXT + "\0",
    TEXT + " ",
    " " + TEXT,
    TEXT[:-1] + "%",
    TEXT + "%4",
    TEXT + "%zz",
    TEXT + "%41",
    TEXT.replace("org/model", "org%2Fmodel"),
    TEXT.replace("org/model", ""),
    TEXT.replace("@4@", "@04@"),
    TEXT.replace("@4@", "@\u0664@"),
    TEXT.replace("@4@", "@3@"),
    TEXT.replace("@4@", "@0@"),
    TEXT.replace("@4@", "@-4@"),
    TEXT.replace("@4@", "@99999@"),
    TEXT.replace("@3@", "@4@"),
    TEXT.replace("0001", "000G"),
    TEXT.replace("0a", "0A"),
    TEXT.replace("@layer%", ""),
    TEXT.replace("@layer%", "@layer%65535"),
    TEXT.replace("@layer%", "@layer%-1"),
    TEXT.replace("@group%1@layer%", "@layer%@group%1"),
    TEXT.replace("@group%1", "@group%65535"),
    TEXT.replace("@group%1", "@group%1@group%1"),
    TEXT + "@zone%x",
    TEXT + "@tenant%x",
    TEXT.replace(TENANT.hex(), "0" * 14),
    TEXT.replace(TENANT.hex(), TENANT.hex().upper()),
    TEXT.replace(TENANT.hex(), TENANT.hex()[:-2]),
    TEXT.replace("@tenant%" + TENANT.hex(), ""),
    TEXT + "@a%1",
    TEXT + "@revision%x",
    TEXT + "@%x",
    TEXT + "@\u00e9%x",
    TEXT + "@zz",
    TEXT.replace("rev", "re%76", 1),
    TEXT.replace("%x", "%%FF"),
    TEXT.replace("%x", "%%00"),
    TEXT.replace("%x", "%%0a"),
    TEXT.replace("%x", "%\u00e9"),
    TEXT.replace("%x", "%%c3%a9"),
    TEXT.replace("%x", "%\ud800"),
    TEXT.replace("%x", "%%ED%A0%80"),
    TEXT + "x" * 2000,
    "@" * 10**6,
    "a" * (1 << 21),
]


@pytest.mark.parametrize("number", range(len(HOSTILE_PATHS)))
def test_hostile_paths_are_refused(number: int) -> None:
    with pytest.raises(InputError) as refused:
        ChunkKey.from_path(HOSTILE_PATHS[number])
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("number", range(len(HOSTILE_HEX)))
def test_hostile_hex_is_refused(number: int) -> None:
    with pytest.raises(InputError) as refused:
        ChunkKey.from_hex(HOSTILE_HEX[number])
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("number", range(len(HOSTILE_TEXTS)))
def test_hostile_texts_are_refused(number: int) -> None:
    with pytest.raises(InputError) as refused:
        KeySpace.parse(HOSTILE_TEXTS[number])
    assert len(str(refused.value)) < 300


@given(text=st.text(max_size=60), data=st.data())
@relaxed
def test_no_text_does_anything_but_parse_or_be_refused(text: str, data: st.DataObject) -> None:
    """Also text that is nearly right: a spelling with a piece replaced. What parses spells the same again."""
    whole, read = data.draw(st.sampled_from([(HEX, "hex"), (PATH, "path"), (TEXT, "text")]))
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    tried = whole[:first] + text + whole[last:]
    try:
        if read == "hex":
            assert ChunkKey.from_hex(tried).hex() == tried
        elif read == "path":
            assert ChunkKey.from_path(tried).path() == tried
        else:
            space, key = KeySpace.parse(tried)
            assert space.spell(key) == tried
    except InputError:
        pass


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\1" * 45,
        b"\1" * 47,
        b"\1" * 61,
        b"\2" + bytes(45),
        bytes(62),
        b"\1" * 63,
        62,
        10**15,
        pytest.param(10**5000, id="a number of 5,001 digits"),
        "a" * 62,
        None,
    ],
)
def test_bytes_that_are_no_key_are_refused(bad: Any) -> None:
    with pytest.raises(InputError):
        ChunkKey.from_bytes(bad)


@pytest.mark.parametrize("bad", [None, 5, b"00", ["a"]])
def test_what_is_no_text_is_refused(bad: Any) -> None:
    for read in (ChunkKey.from_hex, ChunkKey.from_path, KeySpace.parse):
        with pytest.raises(InputError):
            read(bad)


BAD_SPACES: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "needs the model's name"),
    ({"model": "a\0b"}, "control characters"),
    ({"model": "a\x85"}, "control characters"),
    ({"revision": "\ud800"}, "control characters"),
    ({"dtype": 5}, "dtype is 5; it must be text"),
    ({"format": "x" * 1025}, "format has 1025 characters"),
    ({"world": 0}, "world is 0"),
    ({"world": 65536}, "world is 65536"),
    ({"world": True}, "world is True"),
    ({"world": 2.0}, "world is 2.0"),
    ({"tags": (("a", "1"), ("a", "2"))}, "'a' is given twice"),
    ({"tags": (("chain", "1"),)}, "'chain' is reserved"),
    ({"tags": (("tenant", "1"),)}, "'tenant' is reserved"),
    ({"tags": (("", "1"),)}, "tag name"),
    ({"tags": (("a@b", "1"),)}, "tag name"),
    ({"tags": (("\u0661", "1"),)}, "tag name"),
    ({"tags": (("a\n", "1"),)}, "tag name"),
    ({"tags": (("a", "\n"),)}, "tag a is"),
    ({"tags": (("a", 1),)}, "tag a is 1; it must be text"),
    ({"tags": tuple((f"t{number}", "") for number in range(65))}, "65 tags"),
]


@pytest.mark.parametrize(("changed", "text"), BAD_SPACES, ids=[text for _, text in BAD_SPACES])
def test_a_space_that_cannot_be_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        replace(SPACE, **changed)


def test_shares_that_cannot_be_are_refused() -> None:
    digest = bytes(32)
    for call, text in [
        (lambda: SPACE.key(digest, shard=4), "shard 4 of a key space with 4 shards"),
        (lambda: SPACE.key(digest, shard=-1), "shard -1"),
        (lambda: SPACE.keys([digest], shards=5), "shard 4"),
        (lambda: SPACE.key(digest, group=65535), "group 65535"),
        (lambda: SPACE.key(digest, group=-1), "group -1"),
        (lambda: SPACE.key(bytes(20)), "a digest of 20 bytes"),
        (lambda: SPACE.key(b""), "a digest of 0 bytes"),
        (lambda: SPACE.key(digest, tenant=bytes(6)), "tag has 7 bytes"),
        (lambda: SPACE.key(digest, tenant="1234567"), "tag has 7 bytes"),  # type: ignore[arg-type]
        (lambda: KEY.split_layers(0), "0 layers"),
        (lambda: KEY.split_layers(65536), "65536 layers"),
        (lambda: KEY.split_layers(2)[1].split_layers(2), "names layer 1 alone"),
        (lambda: replace(SPACE, model="other").spell(KEY), "does not belong to the key space of other"),
    ]:
        with pytest.raises(InputError, match=text):
            call()


@given(salt=texts(), other=texts())
@relaxed
def test_a_tag_is_its_salt_s_and_nobody_else_s(salt: str, other: str) -> None:
    """Empty text too, which is a salt like any other: only no salt at all has no tenant."""
    assert (tenant_tag(salt) == tenant_tag(other)) == (salt == other)
    assert NO_TENANT == tenant_tag(None) != tenant_tag(salt)


def test_a_salt_that_is_none_is_refused_and_not_repeated() -> None:
    for bad in ("hush \ud800", 5, b"hush"):
        with pytest.raises(InputError) as refused:
            tenant_tag(bad)  # type: ignore[arg-type]
        assert "hush" not in str(refused.value)


@given(salt=texts(), shares=st.tuples(st.integers(0, 65534), st.integers(0, 3)), digest=digests())
@relaxed
def test_a_tenant_s_keys_are_one_prefix_in_every_spelling(salt: str, shares: tuple[int, int], digest: bytes) -> None:
    """Tiers that know chunks by name only list a tenant's by it."""
    tenant = tenant_tag(salt)
    key = SPACE.key(digest, *shares, tenant=tenant)
    head = bytes([1]) + SPACE.fingerprint + tenant
    assert key.startswith(head)
    assert key.hex().startswith(head.hex())
    assert urlsafe_b64encode(key).startswith(urlsafe_b64encode(head))
    assert key.path().startswith(f"1-{SPACE.fingerprint.hex()}/{tenant.hex()}/")


def test_the_chain_s_name_is_what_a_space_wants() -> None:
    assert ChainScheme().name == "sha256:256"
    assert ChainScheme("xxh3_128", 16).name == "xxh3_128:16"
