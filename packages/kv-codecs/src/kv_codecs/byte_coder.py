"""The entropy coder of the numeric codecs without options: zstandard frames, for their Huffman coder.

Its search for repetitions is practically off: planes of numbers have none, and searching would take four times as long
as coding.
"""

from typing import Final

import msgspec
import numpy as np
from kv_tiers.codec import CodecError

from kv_codecs.kernels import SECTION_NUMBERS, Bytes
from kv_codecs.zstd import Contexts, zstandard_for

FRAME_SYMBOLS: Final = SECTION_NUMBERS
"""The most symbols in a frame."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """There are no options."""


class ByteCoder:
    """Codes bytes as frames. Safe to call from several threads at once."""

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
