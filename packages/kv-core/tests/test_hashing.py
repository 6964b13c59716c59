"""Digests tell apart everything that attention state depends on, and nothing else."""

import hashlib
import itertools
import struct
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core import ChainScheme, InputError, Item, KeySequence
from kv_core.hashing import Digest
from kv_testing.strategies import SECRET, items, prompts, schemes

relaxed = settings(deadline=None, max_examples=150)


class Prompt(NamedTuple):
    """All that a digest may depend on, besides the scheme."""

    tokens: list[int]
    salt: str | None
    lora: str | None
    tags: dict[str, str]
    items: list[Item]

    def named(self, scheme: ChainScheme) -> dict[Digest, Any]:
        """Each digest, the tail's too, with what it stands for, worked out without any hash."""
        root = scheme.root(salt=self.salt, lora=self.lora, tags=self.tags)
        sequence = KeySequence(scheme, root=root, items=self.items)
        sequence.append(self.tokens)
        step = scheme.chunk_tokens
        digests = list(sequence.digests)
        if (tail := sequence.tail_digest()) is not None:
            digests.append(tail)
        stands_for = {}
        touching: tuple[Any, ...] = ()
        for chunk, digest in enumerate(digests):
            first, last = chunk * step, min((chunk + 1) * step, len(self.tokens))
            here = [
                (type(item.content), item.content, item.first_token, item.tokens)
                for item in self.items
                if item.first_token < last and first < item.first_token + item.tokens
            ]
            touching += (tuple(sorted(here, key=repr)),)
            before = (self.salt, self.lora, tuple(sorted(self.tags.items())))
            stands_for[digest] = (before, tuple(self.tokens[:last]), touching)
        assert len(stands_for) == len(digests)
        return stands_for


few_texts = st.one_of(st.none(), st.sampled_from(["", "a", "b", "ab"]))
few_tags = st.dictionaries(st.sampled_from(["", "a", "b", "ab"]), st.sampled_from(["", "a", "b", "ba"]), max_size=2)
whole_prompts = st.builds(Prompt, prompts(max_tokens=12), few_texts, few_texts, few_tags, items(max_tokens=12))


@st.composite
def kindred(draw: st.DrawFn) -> tuple[Prompt, Prompt]:
    """Two prompts that differ in one or two ways, or in none."""
    one, other = draw(whole_prompts), draw(whole_prompts)
    taken = draw(st.sets(st.sampled_from(Prompt._fields), max_size=2))
    changed = {name: getattr(other, name) for name in taken}
    if "tokens" in taken and draw(st.booleans()):
        kept = draw(st.integers(0, len(one.tokens)))
        changed["tokens"] = one.tokens[:kept] + other.tokens[kept:]
    return one, one._replace(**changed)


@given(scheme=schemes(), pair=kindred())
@relaxed
def test_two_digests_are_equal_exactly_if_they_stand_for_the_same(
    scheme: ChainScheme, pair: tuple[Prompt, Prompt]
) -> None:
    one, other = (prompt.named(scheme) for prompt in pair)
    for mine, theirs in itertools.product(one.items(), other.items()):
        assert (mine[0] == theirs[0]) == (mine[1] == theirs[1])


@given(tokens=prompts(max_tokens=12), schemes=st.tuples(schemes(), schemes()))
@relaxed
def test_schemes_of_different_names_share_no_key(tokens: list[int], schemes: tuple[ChainScheme, ChainScheme]) -> None:
    """Chunk sizes may share a digest (the message is SGLang's and does not say one); the key space has the name."""
    one, other = schemes
    assert (one.name == other.name) == (one == other)
    if one.algorithm != other.algorithm:
        assert not set(KeySequence(one).append(tokens)) & set(KeySequence(other).append(tokens))


@given(scheme=schemes(), tokens=prompts(), data=st.data())
@relaxed
def test_a_changed_token_changes_its_chunk_and_all_later_ones_and_no_other(
    scheme: ChainScheme, tokens: list[int], data: st.DataObject
) -> None:
    whole = len(tokens) // scheme.chunk_tokens
    if not whole:
        return
    place = data.draw(st.integers(0, whole * scheme.chunk_tokens - 1))
    changed = list(tokens)
    changed[place] = (changed[place] + 1) % 2**64
    before, after = (KeySequence(scheme).append(each) for each in (tokens, changed))
    same = [one == other for one, other in zip(before, after, strict=True)]
    assert same == [chunk < place // scheme.chunk_tokens for chunk in range(whole)]


@given(scheme=schemes(), tokens=prompts(), item=items().filter(bool))
@relaxed
def test_an_item_changes_the_chunks_it_touches_and_all_later_ones(
    scheme: ChainScheme, tokens: list[int], item: list[Item]
) -> None:
    first = min(each.first_token for each in item) // scheme.chunk_tokens
    plain = KeySequence(scheme).append(tokens)
    marked = KeySequence(scheme, items=item).append(tokens)
    assert [a == b for a, b in zip(plain, marked, strict=True)] == [chunk < first for chunk in range(len(plain))]


@given(scheme=schemes(), item=items(), tokens=prompts(), order=st.randoms(use_true_random=False))
@relaxed
def test_the_order_in_which_items_and_tags_are_given_does_not_matter(
    scheme: ChainScheme, item: list[Item], tokens: list[int], order: Any
) -> None:
    shuffled = list(item)
    order.shuffle(shuffled)
    assert KeySequence(scheme, items=item).append(tokens) == KeySequence(scheme, items=shuffled).append(tokens)
    assert scheme.root(tags={"a": "1", "b": "2"}) == scheme.root(tags={"b": "2", "a": "1"})


def test_sha256_is_the_chain_that_sglang_gives_its_pages() -> None:
    """Its rule, worked out here by hand; see docs/formats/keys.md."""
    scheme = ChainScheme(chunk_tokens=2)
    first = hashlib.sha256(struct.pack("<2I", 5, 2**32 - 1)).digest()
    second = hashlib.sha256(first + b"\xff" + struct.pack("<2Q", 7, 2**32)).digest()
    assert KeySequence(scheme).append([5, 2**32 - 1, 7, 2**32]) == [first, second]
    message = b"sglang-cache-namespace-v1" + b"\1" + struct.pack("<Q", 4) + b"lora" + b"\0"
    assert scheme.root(lora="lora") == hashlib.sha256(message).digest()
    message = b"sglang-cache-namespace-v1" + b"\0" + b"\1" + struct.pack("<Q", 5) + "sält".encode()
    assert scheme.root(salt="sält") == hashlib.sha256(message).digest()
    assert scheme.root() == b""


@given(scheme=schemes(), tokens=prompts(), item=items())
@relaxed
def test_extending_by_hand_is_what_a_sequence_does(scheme: ChainScheme, tokens: list[int], item: list[Item]) -> None:
    sequence = KeySequence(scheme, root=scheme.root(salt="s"), items=item)
    parent = scheme.root(salt="s")
    step = scheme.chunk_tokens
    for digest in sequence.append(tokens):
        at = sequence.digests.index(digest) * step
        here = [each for each in item if each.touches(at, at + step)]
        (parent,) = scheme.extend_all(scheme.with_items(parent, here), tokens, at, at + step, at)
        assert parent == digest
        assert len(digest) == scheme.digest_bytes


def test_a_tail_is_never_a_chunk_even_if_its_tokens_spell_a_parent() -> None:
    """Eight tokens can have the bytes of any digest; without a mark, this tail would be another's."""
    scheme = ChainScheme(chunk_tokens=16)
    parent = KeySequence(scheme).append(range(16))[0]
    posing = KeySequence(scheme)
    posing.append([*struct.unpack("<8I", parent), 7, 8])
    real = KeySequence(scheme)
    real.append([*range(16), 7, 8])
    assert posing.tail_digest() != real.tail_digest()


def test_secrets_are_needed_where_they_serve_and_never_shown() -> None:
    assert "a secret" not in repr(ChainScheme("blake2b", 4, SECRET))
    other = ChainScheme("blake2b", 4, SECRET[::-1])
    tokens = [1, 2, 3, 4]
    assert KeySequence(ChainScheme("blake2b", 4, SECRET)).append(tokens) != KeySequence(other).append(tokens)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": "md5"}, "no algorithm 'md5'; choose one of sha256, xxh3_128, blake2b"),
    ({"chunk_tokens": 0}, "chunk_tokens is 0"),
    ({"chunk_tokens": True}, "chunk_tokens is True"),
    ({"chunk_tokens": 2.0}, "chunk_tokens is 2.0"),
    ({"chunk_tokens": 2**21}, "chunk_tokens is 2097152"),
    ({"secret": SECRET}, "sha256 takes no secret"),
    ({"algorithm": "xxh3_128", "secret": SECRET}, "xxh3_128 takes no secret"),
    ({"algorithm": "blake2b"}, "needs a secret of 16 to 64 bytes, and 0"),
    ({"algorithm": "blake2b", "secret": b"short"}, "and 5 were given"),
    ({"algorithm": "blake2b", "secret": bytes(65)}, "and 65 were given"),
    ({"algorithm": "blake2b", "secret": "text" * 8}, "must be bytes"),
]


@pytest.mark.parametrize(("given_", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_a_scheme_that_cannot_be_is_refused(given_: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        ChainScheme(**given_)


@pytest.mark.parametrize(
    ("content", "first_token", "tokens"),
    [("", 0, 1), (b"", 0, 1), (5, 0, 1), ("a", -1, 1), ("a", 0, 0), ("a", 0, -1), ("a", 1.0, 1), ("a", True, 1),
     ("a", 2**63, 1), ("\ud800", 0, 1)],
)  # fmt: skip
def test_an_item_that_cannot_be_is_refused(content: Any, first_token: Any, tokens: Any) -> None:
    with pytest.raises(InputError):
        Item(content, first_token, tokens)


def test_other_bad_input_to_a_chain_is_refused() -> None:
    scheme = ChainScheme(chunk_tokens=4)
    for call, text in [
        (lambda: scheme.extend_tail(b"", [1, 2, 3, 4]), "1 to 3 tokens, and 4"),
        (lambda: scheme.extend_tail(b"", []), "1 to 3 tokens, and 0"),
        (lambda: KeySequence(scheme, root=bytes(16)), "empty or 32 bytes"),
        (lambda: KeySequence(scheme, root="r"), "empty or 32 bytes"),  # type: ignore[arg-type]
        (lambda: scheme.root(salt="\ud800"), "not valid Unicode"),
        (lambda: scheme.root(lora=5), "must be text"),  # type: ignore[arg-type]
        (lambda: scheme.root(tags={"a": 1}), "must be text"),  # type: ignore[dict-item]
    ]:
        with pytest.raises(InputError, match=text):
            call()
