"""A chunk's header vouches for every bit of itself and of the chunk."""

import re
import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from kv_core.errors import MisuseError
from kv_core.hashing import ChainScheme, checksum_of
from kv_core.keys import ChunkKey, KeySpace
from kv_core.outcome import Damaged
from kv_core.sequence import KeySequence
from kv_core.testing import key_chain
from kv_tiers import chunk_header

KEYS = key_chain(3)
FORM = chunk_header.format_id("a format")
CHUNK = memoryview(bytearray(b"what was computed" * 7))
HEADER = chunk_header.pack_header(KEYS[1], KEYS[0], CHUNK, FORM)


def damage(header: bytes, chunk: memoryview = CHUNK, key: ChunkKey = KEYS[1], form: bytes = FORM) -> str:
    found = chunk_header.check(header, chunk, key=key, format_id=form)
    return "" if found is None else found.reason


def test_what_was_packed_is_read_back() -> None:
    assert damage(HEADER) == ""
    read = chunk_header.read_header(HEADER)
    assert isinstance(read, chunk_header.Header)
    assert (read.key, read.parent, read.stored_bytes, read.format_id) == (KEYS[1], KEYS[0], CHUNK.nbytes, FORM)
    assert read.checksum == checksum_of(CHUNK) == read.decoded_checksum
    first = chunk_header.read_header(chunk_header.pack_header(KEYS[0], None, CHUNK, FORM))
    assert isinstance(first, chunk_header.Header)
    assert first.parent is None


def test_every_flipped_bit_of_the_header_is_damage() -> None:
    for bit in range(8 * len(HEADER)):
        flipped = bytearray(HEADER)
        flipped[bit // 8] ^= 1 << bit % 8
        assert damage(bytes(flipped)), f"bit {bit}"


def test_every_flipped_bit_of_the_chunk_is_damage() -> None:
    for bit in range(8 * CHUNK.nbytes):
        flipped = bytearray(CHUNK)
        flipped[bit // 8] ^= 1 << bit % 8
        assert damage(HEADER, memoryview(flipped)), f"bit {bit}"


@given(st.integers(0, 400))
def test_every_other_length_is_damage(length: int) -> None:
    if length != CHUNK.nbytes:
        assert damage(HEADER, memoryview(bytes(CHUNK) * 4)[:length])
    if length != len(HEADER):
        assert damage((HEADER * 2)[:length])


def test_another_key_or_format_is_damage() -> None:
    assert "names chunk" in damage(HEADER, key=KEYS[2])
    assert "another chunk format" in damage(HEADER, form=chunk_header.format_id("another"))


@given(st.binary(max_size=600))
def test_strangers_bytes_are_no_header_and_no_error(data: bytes) -> None:
    assert isinstance(chunk_header.read_header(data), Damaged)


def test_a_header_that_lies_consistently_about_a_later_version_is_refused() -> None:
    later = bytearray(HEADER)
    later[8:10] = struct.pack("<H", 3)
    later[376:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(later[:376])))
    assert "version 3" in damage(bytes(later))
    later[8:10] = struct.pack("<H", 2)
    later[12:14] = struct.pack("<H", 7)
    later[376:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(later[:376])))
    assert "a chunk key has" in damage(bytes(later))


def test_a_key_too_long_for_the_header_is_a_bug_of_ours() -> None:
    with pytest.raises(MisuseError, match="72"):
        chunk_header.pack_header(ChunkKey(bytes(73)), None, CHUNK, FORM)


def test_the_documents_example_is_what_is_written() -> None:
    page = (Path(__file__).parents[4] / "docs" / "formats" / "chunk.md").read_text(encoding="utf-8")
    written, dump = re.findall(r"```\n(.*?)\n```", page, flags=re.DOTALL)
    scheme = ChainScheme("sha256", 4)
    space = KeySpace(model="example", revision="1", dtype="float32", format="f0", world=1, chain=scheme.name)
    keys = space.keys(KeySequence(scheme).append(range(1, 9)))
    assert keys[1].hex() == written
    header = chunk_header.pack_header(keys[1], keys[0], memoryview(bytes(range(64))), chunk_header.format_id("f0"))
    assert bytes.fromhex("".join(line[4:] for line in dump.splitlines())) == header
