"""How a lane moves chunks to its tier and reads all of a payload, its first parts, or its remainder, a step at a time.

The remainder of a payload is read while no request is waiting (`LoadRemainder`), so it is read in steps of at most
`STEP_BYTES` if the tier can resume a read: a load requested meanwhile shares the medium with one step, and not with a
whole chunk. A payload that was read in several steps is verified as a whole. It may be wrong although nothing is
damaged, because the chunk was stored again in between; so only a payload that was read in one call is ever reported as
damaged.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Condition
from typing import Final

from kv_core.clock import Clock
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, ReadFailed, Refused, Stored, StoreOutcome, Unstorable

from kv_tiers import chunk_header
from kv_tiers.lanes.jobs import Arrival, Ask, Job, Jobs, LoadChunks, LoadRemainder, Store
from kv_tiers.lanes.payloads import Payloads, chunk_bytes, first_parts
from kv_tiers.lanes.speed import LoadSpeed
from kv_tiers.tier import Read, ReadsPrefixes, ReadsRemainders, Tier
from kv_tiers.tier_state import LaneCounts

_log = limited_logger(__name__)

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
