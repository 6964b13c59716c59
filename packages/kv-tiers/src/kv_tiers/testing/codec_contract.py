"""The contract of `Codec`, as a test class. Inherit it, define `make`, and run pytest."""

import os
import random
import threading

import pytest

from kv_tiers.codec import Codec, CodecError
from kv_tiers.testing.side_by_side import side_by_side


class CodecContract:
    """Define `make`: the codec. A lossy one also overrides `assert_alike`."""

    def make(self) -> Codec:
        raise NotImplementedError

    def chunk(self, nbytes: int = 50_000) -> bytes:
        """A chunk that this codec makes smaller."""
        return (b"what is said twice " * (nbytes // 19 + 1))[:nbytes]

    def assert_alike(self, chunk: bytes, decoded: bytes) -> None:
        assert decoded == chunk

    def setup_method(self) -> None:
        self.codec = self.make()

    def encode(self, chunk: bytes) -> bytes | None:
        out = memoryview(bytearray(len(chunk)))
        size = self.codec.encode(memoryview(chunk), out)
        return None if size is None else bytes(out[:size])

    def encoded(self, chunk: bytes) -> bytes:
        encoded = self.encode(chunk)
        assert encoded is not None
        return encoded

    def decode(self, payload: bytes, nbytes: int) -> bytes:
        """Decode, and check that nothing is written outside the output."""
        guarded = bytearray(b"\xa5" * (nbytes + 128))
        self.codec.decode(memoryview(payload), memoryview(guarded)[64 : 64 + nbytes])
        assert guarded[:64] == guarded[64 + nbytes :] == b"\xa5" * 64
        return bytes(guarded[64 : 64 + nbytes])

    def test_its_name_fits_a_header(self) -> None:
        assert 0 < len(self.codec.name) <= 16
        assert self.codec.name.isascii()

    def test_what_was_encoded_is_decoded(self) -> None:
        chunk = self.chunk()
        encoded = self.encoded(chunk)
        assert len(encoded) < len(chunk)
        self.assert_alike(chunk, self.decode(encoded, len(chunk)))

    def test_what_does_not_get_smaller_is_not_encoded(self) -> None:
        chunk = self.chunk()
        assert self.codec.encode(memoryview(chunk), memoryview(bytearray(16))) is None
        if self.codec.is_lossless:
            assert self.encode(os.urandom(50_000)) is None

    def test_nothing_has_an_end(self) -> None:
        """Nothing to encode, or no room for it."""

        def encode() -> None:
            for room in (0, 1, 4096):
                sizes.append(self.codec.encode(memoryview(b""), memoryview(bytearray(room))) or 0)
            sizes.append(self.codec.encode(memoryview(self.chunk()), memoryview(b"")) is not None)

        sizes: list[int] = []
        thread = threading.Thread(target=encode, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "it never returns"
        assert len(sizes) == 4 and all(size <= room for size, room in zip(sizes, (0, 1, 4096, 0), strict=True))

    def test_another_size_is_an_error(self) -> None:
        chunk = self.chunk()
        encoded = self.encoded(chunk)
        for nbytes in (len(chunk) - 1, len(chunk) + 1, 1, 2 * len(chunk)):
            with pytest.raises(CodecError):
                self.decode(encoded, nbytes)

    def test_what_it_did_not_make_is_an_error_or_some_chunk_and_never_more(self) -> None:
        chunk = self.chunk()
        encoded = self.encoded(chunk)
        rng = random.Random(7)  # noqa: S311  # a test is repeatable
        payloads = [b"", b"x", rng.randbytes(5000), encoded[:-1], encoded[: len(encoded) // 2], encoded + b"more"]
        for _ in range(200):
            flipped = bytearray(encoded)
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            payloads.append(bytes(flipped))
        for payload in payloads:
            try:
                self.decode(payload, len(chunk))
            except CodecError:
                continue

    def test_threads_meet_without_harm(self) -> None:
        def work(number: int) -> None:
            for turn in range(20):
                chunk = self.chunk(10_000 + 4 * (100 * number + turn))
                self.assert_alike(chunk, self.decode(self.encoded(chunk), len(chunk)))

        side_by_side(work)
