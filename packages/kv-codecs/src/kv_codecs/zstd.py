"""The library zstandard: the codec `zstd`, general-purpose and lossless, with what the other codecs take of it.

It is an optional package (the extra `kv-codecs[zstd]`).

Keys and values have little redundancy that a general codec finds: expect a tenth to a quarter less (measure it on
yours), at a tenth of a disk's speed. It suits tiers that are slow or small.
"""

import threading
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from kv_core.errors import ConfigError
from kv_tiers.codec import Codec, CodecError
from kv_tiers.options import read_options
from kv_tiers.tier import TierContext

from kv_codecs.kernels import SECTION_NUMBERS, Bytes

_MAX_WINDOW_BYTES: Final = 8 << 20
"""Memory that decoding one frame may take besides the chunk, whatever the frame claims. Our levels stay below."""
_MAX_LEVEL: Final = 19


class ZstdConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How hard it tries."""

    level: int = 1
    """1 to 19, or below 0 for faster than 1: decoding takes as long for all of them."""


def make_zstd_codec(options: Mapping[str, object], context: TierContext) -> Codec:
    """The factory of the codec `zstd`; `ZstdConfig` says what may be in `options`.

    Raises:
        ConfigError: options that cannot be honoured, or the package zstandard is not installed.
    """
    return ZstdCodec(read_options(ZstdConfig, options, "codec zstd"))


class ZstdCodec:
    """One frame per chunk, without a checksum of its own."""

    name = "zstd"
    is_lossless = True

    def __init__(self, config: ZstdConfig) -> None:
        """Raises `ConfigError`."""
        self._zstandard = zstandard_for(self.name)
        if not -100 <= config.level <= _MAX_LEVEL or config.level == 0:
            raise ConfigError(f"codec zstd: level is {config.level}; write 1 to {_MAX_LEVEL}, or -1 to -100")
        parameters = self._zstandard.ZstdCompressionParameters.from_level(
            config.level, window_log=_MAX_WINDOW_BYTES.bit_length() - 1, write_content_size=1, write_checksum=0
        )
        self._contexts = Contexts(self._zstandard, parameters, _MAX_WINDOW_BYTES)

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        if not chunk.nbytes:
            return None  # the library's reader of nothing never ends
        source = self._contexts.compressor.stream_reader(chunk, size=chunk.nbytes)
        written = 0
        while written < len(out):
            read = source.readinto(out[written:])
            if not read:
                return written
            written += read
        return None  # the frame may be longer

    def decode(self, payload: memoryview, out: memoryview) -> None:
        # As a stream: the one-shot function allocates as much as the frame claims.
        source = self._contexts.decompressor.stream_reader(payload)
        decoded = 0
        try:
            while decoded < len(out) and (read := source.readinto(out[decoded:])):
                decoded += read
            extra = source.read(1)
        except self._zstandard.ZstdError as error:
            raise CodecError(f"not a zstd frame: {error}") from error
        if decoded < len(out) or extra:
            raise CodecError(f"a frame of {decoded}{' and more' if extra else ''} bytes instead of {len(out)}")


class Contexts(threading.local):
    """zstandard's compressor and decompressor for each thread, as neither may be used by two threads at a time."""

    def __init__(self, zstandard: Any, parameters: Any, max_window_size: int) -> None:
        """The arguments are the library's. A thread's contexts are created on first use."""
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=max_window_size)


def zstandard_for(codec: str) -> Any:
    """The library zstandard, for this codec.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(f"codec {codec} needs the package zstandard; pip install 'kv-codecs[zstd]'") from error
    return zstandard


FRAME_SYMBOLS: Final = SECTION_NUMBERS
"""The most symbols in a frame."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """There are no options."""


class ByteCoder:
    """The entropy coder of the numeric codecs: bytes as frames of zstandard, for its Huffman coder. Safe to call from
    several threads at once.

    Its search for repetitions is practically off: planes of numbers have none, and searching would take four times as
    long as coding.
    """

    def __init__(self, codec: str) -> None:
        """codec: the codec that needs the coder, for the error.

        Raises:
            ConfigError: the package zstandard is not installed.
        """
        self._zstandard = zstandard_for(codec)
        # A small table that seldom matches lets zstandard move quickly over data that does not repeat.
        parameters = self._zstandard.ZstdCompressionParameters(
            strategy=self._zstandard.STRATEGY_FAST,
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            write_content_size=1,
            write_checksum=0,
        )
        self._contexts = Contexts(self._zstandard, parameters, FRAME_SYMBOLS)

    def encode(self, symbols: Bytes) -> bytes:
        """The frame of at most `FRAME_SYMBOLS` symbols."""
        frame: bytes = self._contexts.compressor.compress(symbols)
        return frame

    def decode(self, frame: memoryview | Bytes, symbols: int) -> Bytes:
        """Decode exactly this many symbols. The frame's claims are verified first, because decoding allocates the
        memory that it names.

        Raises:
            CodecError: the bytes are not a frame of that many symbols.
        """
        try:
            header = self._zstandard.get_frame_parameters(frame)
            if header.content_size != symbols or header.window_size > FRAME_SYMBOLS:
                raise CodecError(f"a frame of {header.content_size} bytes instead of {symbols}")
            decoded = self._contexts.decompressor.decompress(frame, max_output_size=symbols, allow_extra_data=False)
        except self._zstandard.ZstdError as error:
            raise CodecError(f"not a zstd frame: {error}") from error
        if len(decoded) != symbols:
            raise CodecError(f"a frame of {len(decoded)} bytes instead of {symbols}")
        return np.frombuffer(decoded, np.uint8)
