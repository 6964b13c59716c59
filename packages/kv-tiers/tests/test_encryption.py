"""What a tier keeps of an encrypted chunk says nothing, and whatever is done to it there makes it a miss."""

import random
import sys
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_core.errors import ConfigError
from kv_core.hashing import checksum_of
from kv_core.keys import ChunkKey
from kv_core.outcome import Damaged, Loaded
from kv_core.service import Ended, ReadLease
from kv_core.testing import key_chain
from kv_testing.wait import until
from kv_tiers import chunk_header
from kv_tiers.build import build_lane, build_local_cache, check_settings
from kv_tiers.cache.local import LocalCache
from kv_tiers.chunk_header import HEADER_BYTES, Header, make_header, read_header
from kv_tiers.config import HostConfig
from kv_tiers.encryption import Cipher
from kv_tiers.lanes.jobs import Arrival, Outgoing
from kv_tiers.lanes.moving import Payloads
from kv_tiers.testing.tier_contract import aligned_pages, content
from kv_tiers.tier import Read, TierContext, Write

NBYTES = 8192  # whole pages: the tag finds no room behind the chunk
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
FIRST, SECOND = key_chain(2)
CONTEXT = TierContext(NBYTES, NBYTES, "f")


class Deflate:
    """A codec of the standard library's."""

    name = "deflate"
    is_lossless = True

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        encoded = zlib.compress(chunk)
        if len(encoded) > len(out):
            return None
        out[: len(encoded)] = encoded
        return len(encoded)

    def decode(self, payload: memoryview, out: memoryview) -> None:
        out[:] = zlib.decompress(payload)


def payloads(key: bytes = KEY, *, codec: Deflate | None = None) -> Payloads:
    cipher = Cipher(key, "f")
    return Payloads(chunk_header.format_id(cipher.fingerprint), codec, cipher=cipher)


def plain_payloads(codec: Deflate | None = None) -> Payloads:
    return Payloads(chunk_header.format_id("f"), codec)


def outgoing(key: ChunkKey, parent: ChunkKey | None = None, *, repeated: bool = False) -> Outgoing:
    pages = aligned_pages(NBYTES)
    pages[:] = b"K and V!" * (NBYTES // 8) if repeated else random.Random(bytes(key)).randbytes(NBYTES)
    return Outgoing(key, parent, pages, NBYTES)


def read_of(key: ChunkKey, header: bytes, payload: bytes, *, as_stored: bool = False) -> Read:
    read = Read(key, bytearray(header), aligned_pages(NBYTES), NBYTES, as_stored=as_stored)
    read.pages[: len(payload)] = payload
    return read


def arrival(by: Payloads, write: Write, key: ChunkKey | None = None) -> tuple[Arrival, Read]:
    read = read_of(key or write.key, write.header, bytes(write.pages[: write.stored_bytes]))
    return by.arrival(read, Loaded(write.stored_bytes), "tier"), read


def forged(header: Header, payload: bytes) -> bytes:
    """A header that is right for this payload as far as somebody without the key can make it."""
    return make_header(replace(header, stored_bytes=len(payload)))


@pytest.mark.parametrize("codec", [None, Deflate()])
def test_a_chunk_comes_back_and_its_payload_and_header_say_nothing(codec: Deflate | None) -> None:
    chunks = [outgoing(FIRST, repeated=True), outgoing(SECOND, FIRST)]
    by = payloads(codec=codec)
    writes = by.writes(chunks)
    assert (writes[0].stored_bytes < NBYTES) == (codec is not None)
    assert [write.stored_bytes for write in writes][1] == NBYTES  # noise has no shorter encoding
    for chunk, write in zip(chunks, writes, strict=True):
        kept = write.header + bytes(write.pages)
        for secret in (chunk.pages[:64], chunk.pages[NBYTES - 64 :], checksum_of(chunk.pages)):
            assert bytes(secret) not in kept
        came, read = arrival(by, write)
        assert came == Arrival(chunk.key, Loaded(NBYTES if codec else write.stored_bytes), checksum_of(chunk.pages))
        assert read.pages == chunk.pages


@pytest.mark.parametrize("cipher", [Cipher(KEY, "f"), None])
def test_behind_a_payload_there_is_nothing_of_what_the_thread_decoded_before(cipher: Cipher | None) -> None:
    """Tiers write whole pages, and an encoded payload seldom ends with one."""
    by = Payloads(chunk_header.format_id(cipher.fingerprint if cipher else "f"), Deflate(), cipher=cipher)
    chunk = outgoing(FIRST)
    chunk.pages[NBYTES // 3 :] = bytes(NBYTES - NBYTES // 3)  # so that it has an encoding, of nearly a page
    (longer,) = by.writes([chunk])
    assert arrival(by, longer)[0].outcome == Loaded(NBYTES)
    (shorter,) = by.writes([outgoing(SECOND, repeated=True)])
    assert shorter.stored_bytes < longer.stored_bytes < 4096
    assert not any(shorter.pages[shorter.stored_bytes : 4096])


def test_the_same_chunk_is_another_ciphertext_each_time() -> None:
    by = payloads()
    assert len({bytes(by.writes([outgoing(FIRST)])[0].pages) for _ in range(50)}) == 50


def test_another_key_or_none_decrypts_nothing() -> None:
    (write,) = payloads().writes([outgoing(FIRST)])
    assert isinstance(arrival(payloads(OTHER_KEY), write)[0].outcome, Damaged)
    assert isinstance(arrival(plain_payloads(), write)[0].outcome, Damaged)
    (plain,) = plain_payloads().writes([outgoing(FIRST)])
    assert isinstance(arrival(payloads(), plain)[0].outcome, Damaged)
    # Nor does it if somebody writes the name of the reader's format into the header.
    for reader, kept in ((payloads(OTHER_KEY), write), (plain_payloads(), write), (payloads(), plain)):
        header = read_header(kept.header)
        assert isinstance(header, Header)
        form = replace(header, format_id=reader._format_id)
        forged_write = Write(FIRST, None, make_header(form), kept.pages, kept.stored_bytes)
        came, _ = arrival(reader, forged_write)
        assert came.outcome == Damaged("the bytes are not those that were encrypted")


def test_a_chunk_in_the_place_of_another_is_damaged() -> None:
    """Of another chunk, of another tenant, and behind another parent: with all checksums made right."""
    elsewhere = key_chain(1, salt="another")[0]
    by = payloads()
    (write,) = by.writes([outgoing(FIRST)])
    header = read_header(write.header)
    assert isinstance(header, Header)
    for key, parent in ((SECOND, None), (elsewhere, None), (FIRST, SECOND)):
        moved = make_header(replace(header, key=key, parent=parent))
        read = read_of(key, moved, bytes(write.pages))
        assert isinstance(by.arrival(read, Loaded(NBYTES), "tier").outcome, Damaged)


@given(st.integers(0, 8 * NBYTES - 1))
def test_each_bit_of_the_payload_counts(bit: int) -> None:
    by = payloads()
    (write,) = by.writes([outgoing(FIRST)])
    header = read_header(write.header)
    assert isinstance(header, Header)
    payload = bytearray(write.pages)
    payload[bit // 8] ^= 1 << bit % 8
    read = read_of(FIRST, forged(header, bytes(payload)), bytes(payload))
    assert isinstance(by.arrival(read, Loaded(NBYTES), "tier").outcome, Damaged)


@given(st.integers(0, 8 * 28 - 1) | st.just(-1), st.integers(0, 120))
def test_each_bit_of_what_is_needed_to_decrypt_counts(bit: int, length: int) -> None:
    by = payloads()
    (write,) = by.writes([outgoing(FIRST)])
    header = read_header(write.header)
    assert isinstance(header, Header)
    needed = bytearray(header.checksum + header.encryption)  # the tag, and the nonce
    if bit >= 0:
        needed[bit // 8] ^= 1 << bit % 8
    else:
        needed = bytearray((bytes(needed) + bytes(120))[: 16 + length])
    if bytes(needed) == header.checksum + header.encryption:
        return
    changed = make_header(replace(header, checksum=bytes(needed[:16]), encryption=bytes(needed[16:])))
    came = by.arrival(read_of(FIRST, changed, bytes(write.pages)), Loaded(NBYTES), "tier")
    assert isinstance(came.outcome, Damaged)


def test_a_payload_that_is_cut_is_damaged() -> None:
    by = payloads()
    (write,) = by.writes([outgoing(FIRST)])
    header = read_header(write.header)
    assert isinstance(header, Header)
    for nbytes in (0, 1, 4096, NBYTES - 1):
        cut = bytes(write.pages[:nbytes])
        header_bytes = forged(replace(header, codec="deflate"), cut)
        came = by.arrival(read_of(FIRST, header_bytes, cut), Loaded(nbytes), "tier")
        assert isinstance(came.outcome, Damaged), nbytes


@pytest.mark.parametrize("codec", [None, Deflate()])
def test_who_reads_what_is_stored_gets_it_as_it_would_be_without_encryption(codec: Deflate | None) -> None:
    """As a peer does, which has no key of this host's."""
    chunk = outgoing(FIRST, repeated=True)
    by = payloads(codec=codec)
    (write,) = by.writes([chunk])
    read = read_of(FIRST, write.header, bytes(write.pages[: write.stored_bytes]), as_stored=True)
    assert by.arrival(read, Loaded(write.stored_bytes), "tier").outcome == Loaded(write.stored_bytes)
    again = read_of(FIRST, bytes(read.header), bytes(read.pages[: write.stored_bytes]))
    assert plain_payloads(codec).arrival(again, Loaded(write.stored_bytes), "peer").outcome == Loaded(NBYTES)
    assert again.pages == chunk.pages


@pytest.fixture
def key_file(tmp_path: Path) -> Callable[[bytes], str]:
    def write(key: bytes) -> str:
        path = tmp_path / f"key-{len(list(tmp_path.glob('key-*')))}"
        path.write_text(key.hex() + "\n")
        path.chmod(0o600)
        return str(path)

    return write


def test_a_disk_keeps_no_byte_of_a_chunk_and_serves_it_after_a_restart_to_those_with_the_key(
    tmp_path: Path, key_file: Callable[[bytes], str]
) -> None:
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "4MiB"}
    encrypted = disk | {"encryption_key_file": key_file(KEY)}
    keys = key_chain(4)

    def opened(*tiers: dict[str, object]) -> LocalCache:
        host = HostConfig(capacity_bytes=8 * NBYTES)
        return build_local_cache(host, group_bytes=(NBYTES,), fingerprint="f", tiers=tiers)

    def found(*tiers: dict[str, object]) -> int:
        """How many chunks an engine gets; their bytes are right."""
        with closing(opened(*tiers)) as cache:
            until(lambda: cache.lookup(keys, "r", wait_for_promotion=True).ended is not Ended.PENDING)
            hit = keys[: cache.lookup(keys, "r").chunks]
            lease = cache.load(hit, "r")
            assert isinstance(lease, ReadLease)
            for key, extent in zip(hit, lease.extents, strict=True):
                assert cache.pool.view[extent.offset : extent.offset + extent.nbytes] == content(key, NBYTES)
            cache.release(lease)
            return len(hit)

    def store(options: dict[str, object]) -> list[bool]:
        """Which of the chunks can be recognised in the files."""
        with closing(opened(options)) as cache:
            lease = cache.begin_store(keys, "writer")
            for key, extent in zip(lease.keys, lease.extents, strict=True):
                cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, NBYTES)
            cache.commit(lease)
        kept = b"".join(path.read_bytes() for path in Path(str(options["directory"])).rglob("*") if path.is_file())
        return [content(key, 64) in kept for key in keys]

    assert store(disk | {"directory": str(tmp_path / "plain")}) == [True] * 4
    assert store(encrypted) == [False] * 4
    kept = b"".join(path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert len(kept) > len(keys) * 1000
    assert not any(content(key, 64) in kept for key in keys)
    assert found(encrypted) == 4
    other = disk | {"encryption_key_file": key_file(OTHER_KEY)}
    assert found(other) == 0
    assert found(disk) == 0
    assert found(other, encrypted | {"name": "old", "write": "never"}) == 4  # a change of the key
    assert found(encrypted) == 4  # who lacks the key harms nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"approximate": True, "codec": "progressive", "write": "never"}, "leave out approximate"),
        ({"type": "gds"}, "of type gds has no encryption_key_file"),
        ({"encryption_key_file": "/nowhere"}, "encryption_key_file /nowhere cannot be read"),
        ({"encryption_key_file": "{open}"}, "encryption_key_file"),
        ({"encryption_key_file": "{short}"}, "make one with: openssl rand -hex 32"),
        ({"encryption_key_file": "{words}"}, "make one with: openssl rand -hex 32"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_stored(
    options: dict[str, str], message: str, tmp_path: Path, key_file: Callable[[bytes], str]
) -> None:
    files = {"open": key_file(KEY), "short": key_file(b"short"), "words": key_file(KEY)}
    Path(files["open"]).chmod(0o644)
    Path(files["words"]).write_text("g" * 64)
    given = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "4MiB"}
    given |= {"encryption_key_file": key_file(KEY)} | options
    given["encryption_key_file"] = given["encryption_key_file"].format(**files)
    with pytest.raises(ConfigError, match=message):
        build_lane(given, CONTEXT, where="tiers[0]")
    with pytest.raises(ConfigError, match=message):
        check_settings(HostConfig(capacity_bytes=1 << 20), [given])
    assert not (tmp_path / "kv").exists()


def test_without_its_library_the_error_says_what_to_install(
    tmp_path: Path, key_file: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match=r"pip install 'kv-tiers\[encryption\]'"):
        build_lane({"type": "dram", "capacity_bytes": "1MiB", "encryption_key_file": key_file(KEY)}, CONTEXT, where="t")


def test_a_header_has_room_for_checksums_of_pieces_or_for_encryption() -> None:
    (write,) = payloads().writes([outgoing(FIRST)])
    header = read_header(write.header)
    assert isinstance(header, Header) and not header.pieces and len(header.encryption) == 12
    assert len(write.header) == HEADER_BYTES
    both = make_header(replace(header, pieces=(bytes(8),)))
    assert isinstance(read_header(both), Damaged)
