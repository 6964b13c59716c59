"""Space allocation for payloads of any size on a medium, with bounded waste.

The space consists of *slots*, each with room for a whole chunk, and a slot is divided into equal *units*. A payload
takes as many units as it needs, from any slots, in any order: no gap is too small to be used, so there is no external
fragmentation, and less than one unit per chunk is lost. A whole chunk takes a whole slot while there is one, so that
its bytes are contiguous; smaller ones share slots, contiguously where possible.

A unit is at most a twelfth of a slot (8.4 %), so each chunk loses less than that of a whole chunk's room, and half of
it on average. A chunk stored whole loses only what rounds its slot up to whole units: nothing up to 24 pages, at most
4.2 % beyond, and at most 1.6 % from 256 pages (1 MiB) on.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from kv_core.keys import ChunkKey

from kv_tiers import chunk_header
from kv_tiers.codec import PREFIX_DIVISORS
from kv_tiers.pool.host_pool import PAGE_BYTES

MAX_UNITS: Final = 24
_MIN_UNITS: Final = 12
CHUNKS_A_SLOT: Final = 4
"""A medium holds at most this many chunks per slot on average, however small they are: each costs memory and a
record."""
_MAX_SLOTS_TRIED: Final = 8


@dataclass(frozen=True, slots=True)
class Geometry:
    """unit_bytes: size of a unit, in whole pages. slot_units: units of a slot, at most `MAX_UNITS`."""

    unit_bytes: int
    slot_units: int

    @classmethod
    def of(cls, chunk_bytes: int) -> "Geometry":
        """The geometry for chunks that take this many bytes when stored whole, with their headers."""
        pages = -(-chunk_bytes // PAGE_BYTES)
        if pages <= MAX_UNITS:
            return cls(PAGE_BYTES, pages)
        # What rounding loses, weighed against what the last unit of a smaller payload will lose.
        slot_units = min(range(MAX_UNITS, _MIN_UNITS - 1, -1), key=lambda units: 8 * (-pages % units) - -pages // units)
        return cls(-(-pages // slot_units) * PAGE_BYTES, slot_units)

    @property
    def slot_bytes(self) -> int:
        return self.unit_bytes * self.slot_units

    def units_for(self, stored_bytes: int) -> int:
        return -(-stored_bytes // self.unit_bytes) or 1


PackedUnits = int | tuple[int, ...]
"""A whole slot's units, represented by the first: for many chunks this takes half the memory, and costs the garbage
collector no work."""


def pack(units: Sequence[int]) -> PackedUnits:
    return units.start if isinstance(units, range) else tuple(units)


def unpack(packed: PackedUnits, slot_units: int) -> Sequence[int]:
    return range(packed, packed + slot_units) if isinstance(packed, int) else packed


def runs(units: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First unit and number of units of each run of adjacent units, in their order."""
    if isinstance(units, range):
        yield units.start, len(units)
        return
    first = count = 0
    for unit in units:
        if count and unit == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = unit, 1
    yield first, count


class Space:
    """Which units of one medium are free. Slots are numbered from 0, and the units of slot n from n × `slot_units`."""

    def __init__(self, slots: int, slot_units: int) -> None:
        self._slots, self._slot_units = slots, slot_units
        self.grows = True
        """Unused slots may be handed out."""
        self._untouched_from = 0
        self._whole: deque[int] = deque()
        self._parts: dict[int, list[int]] = {}  # the free units of partly taken slots
        self._part_units = 0

    @property
    def free_units(self) -> int:
        """Free units of slots that were used before."""
        return self._part_units + len(self._whole) * self._slot_units

    @property
    def used_units(self) -> int:
        return self._untouched_from * self._slot_units - self.free_units

    def has_untouched(self) -> bool:
        return self.grows and self._untouched_from < self._slots

    def has_room(self, count: int) -> bool:
        """Whether `take` would find this many."""
        return bool(self._whole) or self._part_units >= count or self.has_untouched()

    def adopt(self, taken: Iterable[PackedUnits]) -> None:
        """Mark these as taken, as they were before a restart. Only valid while nothing is taken."""
        whole: set[int] = set()
        parts: dict[int, set[int]] = {}
        for packed in taken:
            if isinstance(packed, int):
                whole.add(packed // self._slot_units)
            else:
                for unit in packed:
                    parts.setdefault(unit // self._slot_units, set()).add(unit)
        self._untouched_from = max(*whole, *parts, -1, -1) + 1
        self._whole = deque(slot for slot in range(self._untouched_from) if slot not in whole and slot not in parts)
        free_of = {slot: [unit for unit in self._units_of(slot) if unit not in units] for slot, units in parts.items()}
        self._parts = {slot: free for slot, free in free_of.items() if free}
        self._part_units = sum(map(len, self._parts.values()))

    def take(self, count: int) -> Sequence[int] | None:
        """Take this many units; a whole slot's as a `range`. None: there are not enough."""
        if count < self._slot_units:
            for slot, free in islice(self._parts.items(), _MAX_SLOTS_TRIED):
                if len(free) >= count:
                    return self._take_of(slot, count)
        whole_slot = self._next_whole()
        if whole_slot is not None:
            units = self._units_of(whole_slot)
            if count == self._slot_units:
                return units
            self._parts[whole_slot] = list(units[count:])
            self._part_units += self._slot_units - count
            return tuple(units[:count])
        if self._part_units < count:
            return None
        scattered: list[int] = []
        while len(scattered) < count:
            slot, free = next(iter(self._parts.items()))
            scattered += self._take_of(slot, min(len(free), count - len(scattered)))
        return tuple(scattered)

    def give(self, units: Sequence[int], *, last: bool = False) -> None:
        """Free these units. last: whole slots among them are reused after all other free ones."""
        if isinstance(units, range):
            self._add_whole(units.start // self._slot_units, last)
            return
        for unit in units:
            slot = unit // self._slot_units
            free = self._parts.setdefault(slot, [])
            free.append(unit)
            self._part_units += 1
            if len(free) == self._slot_units:
                del self._parts[slot]
                self._part_units -= self._slot_units
                self._add_whole(slot, last)

    def _units_of(self, slot: int) -> range:
        return range(slot * self._slot_units, (slot + 1) * self._slot_units)

    def _add_whole(self, slot: int, last: bool) -> None:
        if last:
            self._whole.appendleft(slot)
        else:
            self._whole.append(slot)

    def _next_whole(self) -> int | None:
        if self._whole:
            return self._whole.pop()
        if not self.has_untouched():
            return None
        self._untouched_from += 1
        return self._untouched_from - 1

    def _take_of(self, slot: int, count: int) -> tuple[int, ...]:
        free = self._parts[slot]
        free.sort()
        taken, remaining = free[:count], free[count:]
        self._part_units -= count
        if remaining:
            self._parts[slot] = remaining
        else:
            del self._parts[slot]
        return tuple(taken)


# Where chunks are on a medium that is divided into units, and how much of each may be left.

CUTS: Final = (1, *PREFIX_DIVISORS)
"""The steps in which a chunk is cut, as divisors of its size: first the whole chunk, then ever smaller parts."""


def cut_bytes(decoded_bytes: int, divisor: int) -> int:
    """The size of what is left of a cut payload. decoded_bytes: of the chunk. divisor: one of `CUTS`, but not 1."""
    return chunk_header.prefix_bytes(decoded_bytes // divisor, decoded_bytes)


class Extent(NamedTuple):
    """Where a payload is. units: of its entry's medium, in the order of the bytes. stored_bytes: size of the payload,
    or of what is left of it."""

    units: Sequence[int]
    stored_bytes: int


class RecoveredChunk(NamedTuple):
    """A chunk found at a restart. divisor: it is cut by this one of `CUTS`. decoded_bytes: as for `reserve`."""

    key: ChunkKey
    parent: ChunkKey | None
    entry: int
    stored_bytes: int
    units: PackedUnits
    decoded_bytes: int = 0
    divisor: int = 1


class RoomMade(NamedTuple):
    """What was done to make room.

    places: for each chunk its place, or None.
    evicted: entries whose chunks have left.
    cut: by entry of which less is stored than before: by which of `CUTS`.
    """

    places: list["Place | None"]
    evicted: list[int]
    cut: dict[int, int]


class Place(NamedTuple):
    """An entry and room that are reserved for a chunk. units, stored_bytes: as for `Extent`."""

    key: ChunkKey
    entry: int
    units: Sequence[int]
    stored_bytes: int
