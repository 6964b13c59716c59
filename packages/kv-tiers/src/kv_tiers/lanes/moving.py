"""How a lane moves chunks to its tier and reads all of a payload, its first parts, or its remainder, a step at a time.

The remainder of a payload is read while no request is waiting (`LoadRemainder`), so it is read in steps of at most
`STEP_BYTES` if the tier can resume a read: a load requested meanwhile shares the medium with one step, and not with a
whole chunk. A payload that was read in several steps is verified as a whole. It may be wrong although nothing is
damaged, because the chunk was stored again in between; so only a payload that was read in one call is ever reported as
damaged.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Condition
from typing import Final

from kv_core.clock import Clock
from kv_core.errors import ConfigError
from kv_core.hashing import checksum_of
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, ReadFailed, Refused, Stored, StoreOutcome, Unstorable

from kv_tiers import chunk_header
from kv_tiers.chunk_header import PAGE_BYTES, Header, WholeOnly, checksums_of, make_header, pack_header
from kv_tiers.codec import Codec, CodecError, CodesShards, DecodesPrefixes, EncodesFirst
from kv_tiers.encryption import Cipher
from kv_tiers.lanes.jobs import Arrival, Ask, FirstBytes, Job, Jobs, LoadChunks, LoadRemainder, Outgoing, Store
from kv_tiers.lanes.speed import LoadSpeed
from kv_tiers.pool.core_dumps import chunk_memory
from kv_tiers.tier import Read, ReadsPrefixes, ReadsRemainders, Tier, Write
from kv_tiers.tier_state import LaneCounts

_log = limited_logger(__name__)

# Converts chunks to what a tier stores of them, and back: header, codec, checksums.
#
# Without a codec a chunk's own bytes are its payload: they are read once, for the checksum, and not moved. Encoded
# chunks go through memory that belongs to the thread and is reused: room for one chunk, and during a store for every
# chunk of the batch.


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
        cipher: Cipher | None = None,
    ) -> None:
        """codec: the encoder; None: chunks are stored unencoded. find_codec: finds decoders, called once per name.
        cipher: payloads are encrypted with it; None: they are not.
        drops_parts: the tier may have only first parts of a chunk left, which are then used. Otherwise a payload that
            is too short is damaged.
        """
        self._drops_parts = drops_parts
        self._format_id = format_id
        self._cipher = cipher
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
        if isinstance(header, Header) and (header.encryption or self._cipher is not None):
            header = self._decrypted(header, payload, read)
            loaded = Loaded(loaded.nbytes)
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
            if stored_bytes is not None and self._cipher is not None:
                return self._encrypted(self._cipher, chunk, codec.name, out[:stored_bytes], out)
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
                return Write(chunk.key, chunk.parent, make_header(header), _padded(out, stored_bytes), stored_bytes)
        if self._cipher is not None:
            return self._encrypted(self._cipher, chunk, "", chunk_view, self._buffer(number, len(chunk.pages)))
        header_bytes = pack_header(chunk.key, chunk.parent, chunk_view, self._format_id)
        return Write(chunk.key, chunk.parent, header_bytes, chunk.pages, chunk.nbytes)

    def _encrypted(self, cipher: Cipher, chunk: Outgoing, codec: str, payload: memoryview, out: memoryview) -> Write:
        """A write of this payload's ciphertext, from `out`. codec: the payload's.

        The header has no checksum of the chunk's own bytes: it would tell who guesses them whether he is right.
        """
        size = payload.nbytes
        header = Header(chunk.key, chunk.parent, chunk.nbytes, size, self._format_id, codec, bytes(16), None, ())
        nonce, tag = cipher.encrypt(chunk.key, _names(header), payload, out[:size])
        header = replace(header, checksum=tag, encryption=nonce)
        return Write(chunk.key, chunk.parent, make_header(header), _padded(out, size), size)

    def _decrypted(self, header: Header, payload: memoryview, read: Read) -> Header | Damaged:
        """Decrypt the payload in its place. Returns the header that it would have unencrypted, which is the read's from
        now on if it reads what is stored."""
        cipher, names = self._cipher, _names(header)
        if cipher is None or not cipher.decrypt(read.key, names, header.encryption, header.checksum, payload):
            return Damaged("the bytes are not those that were encrypted")
        checksum = checksum_of(payload)
        plain = replace(header, format_id=cipher.plain_format_id, checksum=checksum, encryption=b"")
        plain = replace(plain, decoded_checksum=None if header.codec else checksum)
        if read.as_stored:
            read.header[:] = make_header(plain)
        return plain

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


def _padded(out: memoryview, nbytes: int) -> memoryview:
    """These pages, with zeros behind the payload in its last one: tiers write whole pages, and what the memory still
    holds there is another chunk's, perhaps another tenant's, and not encrypted."""
    padding = -nbytes % PAGE_BYTES
    out[nbytes : nbytes + padding] = bytes(padding)
    return out


def _names(header: Header) -> bytes:
    """What a header says of a payload besides its key and its bytes, to be authenticated with them."""
    sizes = f"{header.decoded_bytes} {header.stored_bytes} {header.codec} ".encode()
    return sizes + header.format_id + (header.parent or b"")


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


STEP_BYTES: Final = 1 << 20
_DECODED_BYTES: Final = 4 << 20
"""Size of one load of chunks that must be decoded: a few milliseconds of decoding, the part that is not hidden."""


class Moving:
    """Moves chunks for one lane, on its threads. decodes: some of the tier's chunks must be decoded."""

    def __init__(
        self,
        tier: Tier,
        payloads: Payloads,
        clock: Clock,
        *,
        jobs: Jobs,
        speed: LoadSpeed,
        counts: LaneCounts,
        changed: Condition,
    ) -> None:
        """jobs, speed, counts: the lane's objects, used under its lock, which is `changed`."""
        self.decodes = False
        self.tier = tier
        self._payloads = payloads
        self._jobs = jobs
        self._speed = speed
        self._counts = counts
        self._changed = changed
        self._clock = clock

    def batch_bytes(self, wanted: int) -> int:
        """As in `Lane`."""
        return min(wanted, _DECODED_BYTES) if self.decodes else wanted

    def load(self, job: LoadChunks) -> list[Arrival]:
        """The outcome of each read."""
        with self._changed:
            # A load that is based on an answer from before a discard would bring the discarded chunks back.
            wanted = [read for read in job.reads if not self._jobs.is_hidden(read.key)]

        def was_read(outcomes: Sequence[LoadOutcome]) -> None:
            nbytes = sum(outcome.nbytes for outcome in outcomes if isinstance(outcome, Loaded))
            with self._changed:
                self._speed.was_read(id(job), nbytes, self._clock.now_s())

        by_read = self._load_reads(job, wanted, was_read)
        arrivals = [by_read.get(id(read)) or Arrival(read.key, Absent()) for read in job.reads]
        with self._changed:
            self._counts.loaded += sum(isinstance(arrival.outcome, Loaded) for arrival in arrivals)
            self._counts.absent += sum(isinstance(arrival.outcome, Absent) for arrival in arrivals)
            self._counts.approximate += sum(arrival.parts > 0 for arrival in arrivals)
        return arrivals

    def learn(self, job: LoadChunks, arrivals: Sequence[Arrival], now_s: float) -> None:
        """Learn how long the load took, and how large the stored payloads are. Under the lane's lock."""
        all_loaded = all(isinstance(arrival.outcome, Loaded) for arrival in arrivals)
        stored_bytes = sum(chunk_header.stored_bytes_in(read.header) for read in job.reads) if all_loaded else 0
        self.decodes = self.decodes or 0 < stored_bytes < sum(map(chunk_bytes, job.reads))
        self._speed.ended(id(job), now_s, loaded=all_loaded, stored_bytes=stored_bytes)

    def remainder(self, remainder: LoadRemainder, must_stop: Callable[[], bool]) -> Arrival | None:
        """Read the remainder; its outcome. None: it had to stop early. must_stop: called before every step, under the
        lock."""
        if (first_bytes := remainder.first_bytes) is not None:
            remainder.read.header[:], remainder.first_bytes = first_bytes.header, None
            remainder.bytes_read = len(first_bytes.payload)
            remainder.read.pages[: remainder.bytes_read] = first_bytes.payload
        arrival: Arrival | None = None
        while arrival is None:
            with self._changed:
                if must_stop():
                    return None
                if self._jobs.is_clearing or self._jobs.is_hidden(remainder.read.key):
                    return Arrival(remainder.read.key, Absent())
            arrival = self._step(remainder)
        return arrival

    def faults(self, arrivals: Sequence[Arrival]) -> tuple[dict[ChunkKey, str], list[str]]:
        """Which of these chunks are damaged, and why; and why others could not be read, a fault of the device."""
        damaged = {
            arrival.key: outcome.reason for arrival in arrivals if isinstance(outcome := arrival.outcome, Damaged)
        }
        failures = [outcome.reason for arrival in arrivals if isinstance(outcome := arrival.outcome, ReadFailed)]
        with self._changed:
            self._counts.damaged += len(damaged)
            self._counts.read_failed += len(failures)
        return damaged, list(dict.fromkeys(failures))

    def store(self, job: Store) -> list[StoreOutcome]:
        with self._changed:
            chunks = [chunk for chunk in job.chunks if chunk.key not in job.dropped]
        writes = self._payloads.writes(chunks)
        outcome_of = dict(zip([write.key for write in writes], self.tier.store(writes) if writes else (), strict=True))
        outcomes = [outcome_of.get(chunk.key, Refused("it was discarded meanwhile")) for chunk in job.chunks]
        stored = sum(isinstance(outcome, Stored) for outcome in outcomes)
        for reason in dict.fromkeys(outcome.reason for outcome in outcomes if isinstance(outcome, Unstorable)):
            _log.warning("tier %s cannot store some chunks: %s", self.tier.name, reason)
        with self._changed:
            self._counts.stored += stored
            self._counts.refused += len(outcomes) - stored
        return outcomes

    def _load_reads(
        self, job: LoadChunks, wanted: Sequence[Read], was_read: Callable[[Sequence[LoadOutcome]], None]
    ) -> dict[int, Arrival]:
        """The outcomes of these reads of a load, by the id of the read. was_read: called with each answer."""
        arrivals: dict[int, Arrival] = {}
        if job.divisor > 1 and wanted:
            assert isinstance(self.tier, ReadsPrefixes)
            prefixes = self.tier.load_prefixes([first_parts(read, job.divisor) for read in wanted])
            was_read(prefixes)
            arrivals = self._payloads.approximations(wanted, prefixes, keeps=job.keeps)
            wanted = [read for read in wanted if id(read) not in arrivals]
        if wanted:
            outcomes = self.tier.load(wanted)
            was_read(outcomes)
            arrivals.update(
                (id(read), self._arrival(read, outcome)) for read, outcome in zip(wanted, outcomes, strict=True)
            )
        return arrivals

    def _step(self, remainder: LoadRemainder) -> Arrival | None:
        """Read one step of the payload. None: there is more to read."""
        read = remainder.read
        if remainder.in_one or not isinstance(self.tier, ReadsRemainders) or not isinstance(self.tier, ReadsPrefixes):
            return self._arrival(read, self.tier.load([read])[0])
        if remainder.bytes_read:
            upto_bytes = min(remainder.bytes_read + STEP_BYTES, chunk_header.stored_bytes_in(read.header))
            outcome = self.tier.load_remainders(
                [replace(read, wanted_bytes=upto_bytes, from_bytes=remainder.bytes_read)]
            )[0]
        else:
            upto_bytes = chunk_header.prefix_bytes(min(STEP_BYTES, chunk_bytes(read)), chunk_bytes(read))
            outcome = self.tier.load_prefixes([replace(read, wanted_bytes=upto_bytes)])[0]
        if not isinstance(outcome, Loaded):
            return Arrival(read.key, outcome)
        remainder.bytes_read = outcome.nbytes
        if outcome.nbytes == upto_bytes and upto_bytes < _stored_bytes(read):
            return None
        arrival = self._arrival(read, Loaded(outcome.nbytes))
        if isinstance(arrival.outcome, Damaged):
            remainder.in_one = True
            return None
        return arrival

    def _arrival(self, read: Read, outcome: LoadOutcome) -> Arrival:
        if not isinstance(outcome, Loaded):
            return Arrival(read.key, outcome)
        return self._payloads.arrival(read, outcome, self.tier.name)


def refuse(job: Job, why: str) -> None:
    """Answer a job that is not done."""
    match job:
        case LoadChunks():
            job.done([Arrival(read.key, Absent()) for read in job.reads])
        case Ask():
            job.done([False] * len(job.keys))
        case LoadRemainder():
            job.done(Arrival(job.read.key, Absent()))
        case Store():
            job.done([Refused(why)] * len(job.chunks))


def _stored_bytes(read: Read) -> int:
    """The payload's size if its header is valid, else 0."""
    header = chunk_header.read_header(read.header)
    return 0 if isinstance(header, Damaged) or header.decoded_bytes != chunk_bytes(read) else header.stored_bytes
