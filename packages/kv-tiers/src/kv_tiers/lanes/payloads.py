"""Converts chunks to what a tier stores of them, and back: header, codec, checksums.

Without a codec a chunk's own bytes are its payload: they are read once, for the checksum, and not moved. Encoded chunks
go through memory that belongs to the thread and is reused: room for one chunk, and during a store for every chunk of
the batch.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from kv_core.errors import ConfigError
from kv_core.hashing import checksum_of
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome

from kv_tiers import chunk_header
from kv_tiers.chunk_header import PAGE_BYTES, Header, WholeOnly, checksums_of, make_header, pack_header
from kv_tiers.codec import Codec, CodecError, CodesShards, DecodesPrefixes, EncodesFirst
from kv_tiers.lanes.jobs import Arrival, FirstBytes, Outgoing
from kv_tiers.pool.core_dumps import chunk_memory
from kv_tiers.tier import Read, Write

_log = limited_logger(__name__)

FindCodec = Callable[[str], Codec]
"""The codec of this name. Raises `ConfigError` if there is none here."""


def no_codec(name: str) -> Codec:
    """A `FindCodec` for a lane whose tier has only unencoded chunks."""
    raise ConfigError(f"there is no codec {name!r} here")


class Payloads:
    """Encodes and decodes for one lane. Thread-safe."""

    def __init__(
        self,
        format_id: bytes,
        codec: Codec | None = None,
        find_codec: FindCodec = no_codec,
        *,
        drops_parts: bool = False,
    ) -> None:
        """codec: the encoder; None: chunks are stored unencoded. find_codec: finds decoders, called once per name.
        drops_parts: the tier may have only first parts of a chunk left, which are then used. Otherwise a payload that
            is too short is damaged.
        """
        self._drops_parts = drops_parts
        self._format_id = format_id
        self._codec = codec
        self._find_codec = find_codec
        self._decoders: dict[str, Codec | str] = {} if codec is None else {codec.name: codec}
        self._local = threading.local()

    def writes(self, chunks: Sequence[Outgoing]) -> list[Write]:
        """The writes for the tier. Encoded payloads are in this thread's memory until its next call."""
        return [self._write(chunk, number) for number, chunk in enumerate(chunks)]

    def arrival(self, read: Read, loaded: Loaded, name: str) -> Arrival:
        """The outcome for a chunk that the tier reports as loaded: verified, and decoded into the read's own pages.

        name: the tier's name, for the log.
        """
        if self._drops_parts and loaded.nbytes < chunk_header.stored_bytes_in(read.header):
            # A reader of payloads gets no partial ones: it could not tell that only a part is left.
            partial = Arrival(read.key, Absent()) if read.as_stored else self.approximation(read, loaded)
            if partial is not None:
                return partial
        payload = read.pages[: loaded.nbytes]
        header = chunk_header.verify(
            read.header,
            payload,
            key=read.key,
            format_id=self._format_id,
            decoded_bytes=chunk_bytes(read),
            checksum=loaded.checksum,
        )
        if isinstance(header, Damaged):
            return Arrival(read.key, header)
        if not header.codec or read.as_stored:
            return Arrival(read.key, loaded, header.checksum)
        codec = self._decoder(header.codec)
        if isinstance(codec, str):
            _log.warning("tier %s: chunk %s cannot be decoded here: %s", name, read.key.hex(), codec)
            return Arrival(read.key, Absent())
        return self._decode(codec, header, payload, read)

    def approximations(
        self, reads: Sequence[Read], outcomes: Sequence[LoadOutcome], *, keeps: bool = False
    ) -> dict[int, Arrival]:
        """The outcomes for chunks whose `first_parts` were read, by the id of the read. A read that is missing has no
        first part that can be used alone: read it whole.

        keeps: as in `LoadChunks`.
        """
        arrivals = {
            id(read): self.approximation(read, outcome, keeps=keeps)
            if isinstance(outcome, Loaded)
            else Arrival(read.key, outcome)
            for read, outcome in zip(reads, outcomes, strict=True)
        }
        return {read: arrival for read, arrival in arrivals.items() if arrival is not None}

    def approximation(self, read: Read, loaded: Loaded, *, keeps: bool = False) -> Arrival | None:
        """Like `arrival`, for a chunk whose `first_parts` were read, decoded from these parts. None: the chunk has no
        such parts, or their codec is not here.

        The checksum is that of the approximation's bytes, which are what the pool holds from now on.
        """
        prefix = read.pages[: loaded.nbytes]
        size = chunk_bytes(read)
        header = chunk_header.verify_prefix(
            read.header, prefix, key=read.key, format_id=self._format_id, decoded_bytes=size
        )
        if isinstance(header, Damaged):
            return Arrival(read.key, header)
        if isinstance(header, WholeOnly) or not header.codec:
            return None
        codec = self._decoder(header.codec)
        if isinstance(codec, str) or not isinstance(codec, DecodesPrefixes):
            return None
        if prefix.nbytes == header.stored_bytes:
            return self._decode(codec, header, prefix, read)
        copied = self._copied(prefix, read)
        try:
            parts = codec.decode_prefix(copied, chunk := read.pages[:size])
        except CodecError as error:
            return Arrival(read.key, Damaged(f"{header.codec}: {error}"))
        first_bytes = FirstBytes(bytes(read.header), bytes(copied)) if keeps else None
        return Arrival(read.key, Loaded(size), checksum_of(chunk), parts, first_bytes)

    def _write(self, chunk: Outgoing, number: int) -> Write:
        chunk_view = chunk.pages[: chunk.nbytes]
        codec = None if self._codec is None else _of_shard(self._codec, chunk.key)
        if codec is not None and chunk.nbytes > PAGE_BYTES:
            out = self._buffer(number, len(chunk.pages))
            # The payload must be at least a page smaller, or nothing is saved on any medium.
            encode = codec.encode_first if chunk.parent is None and isinstance(codec, EncodesFirst) else codec.encode
            stored_bytes = encode(chunk_view, out[: chunk.nbytes - PAGE_BYTES])
            if stored_bytes is not None:
                checksum, pieces = checksums_of(out[:stored_bytes], chunk.nbytes)
                header = Header(
                    chunk.key,
                    chunk.parent,
                    chunk.nbytes,
                    stored_bytes,
                    self._format_id,
                    codec.name,
                    checksum,
                    checksum_of(chunk_view) if codec.is_lossless else None,
                    pieces,
                )
                return Write(chunk.key, chunk.parent, make_header(header), out, stored_bytes)
        header_bytes = pack_header(chunk.key, chunk.parent, chunk_view, self._format_id)
        return Write(chunk.key, chunk.parent, header_bytes, chunk.pages, chunk.nbytes)

    def _decode(self, model_codec: Codec, header: Header, payload: memoryview, read: Read) -> Arrival:
        codec = _of_shard(model_codec, read.key)
        if codec is None:
            return Arrival(read.key, Damaged(f"{model_codec.name} encodes no chunks of group {read.key.group}"))
        try:
            codec.decode(self._copied(payload, read), chunk := read.pages[: header.decoded_bytes])
        except CodecError as error:
            return Arrival(read.key, Damaged(f"{codec.name}: {error}"))
        checksum = checksum_of(chunk)
        if header.decoded_checksum not in (None, checksum):
            return Arrival(read.key, Damaged(f"{codec.name} decoded it to different bytes from those encoded"))
        return Arrival(read.key, Loaded(header.decoded_bytes), checksum)

    def _copied(self, payload: memoryview, read: Read) -> memoryview:
        """A copy in this thread's memory, so that the chunk can be decoded to where the payload was read."""
        import numpy as np  # a server whose tiers encode nothing starts faster and smaller without it

        copied = self._buffer(0, len(read.pages))[: payload.nbytes]
        np.copyto(np.frombuffer(copied, np.uint8), np.frombuffer(payload, np.uint8))  # without the interpreter's lock
        return copied

    def _decoder(self, name: str) -> Codec | str:
        """The codec, or why there is none."""
        if name not in self._decoders:
            try:
                self._decoders[name] = self._find_codec(name)
            except ConfigError as error:
                self._decoders[name] = str(error)
        return self._decoders[name]

    def _buffer(self, number: int, nbytes: int) -> memoryview:
        """This thread's buffer of this number, with this many bytes in whole pages."""
        try:
            buffers: list[memoryview] = self._local.buffers
        except AttributeError:
            buffers = self._local.buffers = []
        while len(buffers) <= number:
            buffers.append(chunk_memory(nbytes))
        return buffers[number]


def _of_shard(codec: Codec, key: ChunkKey) -> Codec | None:
    """The codec for this chunk; None: it is stored unencoded."""
    return codec.of_shard(key.group, key.shard) if isinstance(codec, CodesShards) else codec


def first_parts(read: Read, divisor: int) -> Read:
    """The same read, for one of this many equal parts of the chunk."""
    size = chunk_bytes(read)
    return replace(read, wanted_bytes=chunk_header.prefix_bytes(size // divisor, size))


def chunk_bytes(read: Read) -> int:
    """The chunk's decoded size."""
    return read.chunk_bytes or read.wanted_bytes
