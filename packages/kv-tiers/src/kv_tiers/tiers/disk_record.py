"""The records in a disk tier's index file: what each contains, and reading many at a time.

    record  magic 8 | number u64 | entry u64 | the chunk's header 384 | units 24 × u32 | xxh3_64 of the above

The magic shows how much of the payload is there: all of it, its first half or its first quarter (`extents.CUTS`). A
release without cut chunks does not recognise such a record.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from kv_tiers import chunk_header
from kv_tiers.chunk_header import intact, names_in, seal, unseal
from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.tiers.space import CUTS, MAX_UNITS, Geometry, PackedUnits, cut_bytes

RECORD_BYTES: Final = 512

_MAGIC_OF: Final = dict(zip(CUTS, (b"kvslot\r\n", b"kvhalf\r\n", b"kvquar\r\n"), strict=True))
_DIVISOR_OF: Final = {magic: divisor for divisor, magic in _MAGIC_OF.items()}
_RECORD: Final = struct.Struct(f"<8sQQ{chunk_header.HEADER_BYTES}s{4 * MAX_UNITS}s")
_UNITS: Final = tuple(struct.Struct(f"<{count}I") for count in range(MAX_UNITS + 1))
_HEADER_AT: Final = 24
_LAYOUT: Final = np.dtype(
    {
        "names": ["magic", "number", "entry", "decoded_bytes", "stored_bytes", "units"],
        "formats": ["S8", "<u8", "<u8", "<u8", "<u8", ("<u4", MAX_UNITS)],
        "offsets": [
            0,
            8,
            16,
            _HEADER_AT + chunk_header.DECODED_BYTES_AT,
            _HEADER_AT + chunk_header.STORED_BYTES_AT,
            _HEADER_AT + chunk_header.HEADER_BYTES,
        ],
        "itemsize": RECORD_BYTES,
    }
)


class Found(NamedTuple):
    """What a record contains. Compared by its number, which is larger for chunks stored later.

    entry: of the tier.
    key, parent: bytes for `ChunkKey`.
    stored_bytes: of the payload, or of what is left of it.
    units: empty if they are not all within allocated slots, as after a slab was lost.
    decoded_bytes: size of the chunk; 0 if it is stored unencoded, and so cannot be cut.
    divisor: of `CUTS`.
    """

    number: int
    entry: int
    key: bytes
    parent: bytes | None
    stored_bytes: int
    units: PackedUnits
    decoded_bytes: int
    divisor: int


def pack_record(entry: int, number: int, header: bytes, units: Sequence[int]) -> bytes:
    """entry: of its directory. header: the chunk's own (`kv_tiers.chunk_header`). units: where its payload is."""
    return seal(_RECORD.pack(_MAGIC_OF[1], number, entry, header, _UNITS[len(units)].pack(*units)))


def shortened(record: bytes | bytearray, entry: int, divisor: int, units: Sequence[int]) -> bytes | None:
    """The same record for a chunk of which only this part is left, in these units. None: the record is invalid."""
    fields = unseal(record)
    if fields is None:
        return None
    magic, number, recorded_entry, header, _ = _RECORD.unpack(fields)
    if magic not in _DIVISOR_OF or recorded_entry != entry:
        return None
    return seal(_RECORD.pack(_MAGIC_OF[divisor], number, entry, header, _UNITS[len(units)].pack(*units)))


def header_of(record: bytes | bytearray, entry: int) -> bytes | None:
    """The header in the record of a whole chunk; None if the record is of none, or is invalid."""
    fields = unseal(record)
    if fields is None:
        return None
    magic, _, recorded_entry, header, _ = _RECORD.unpack(fields)
    return bytes(header) if magic == _MAGIC_OF[1] and recorded_entry == entry else None


class RecordReader:
    """Reads the records of one directory of a tier."""

    def __init__(self, geometry: Geometry, slots: int, backed: Iterable[range], number: int, directories: int) -> None:
        """slots: of the directory. backed: those allocated on the medium. number, directories: which directory of the
        tier this is, of how many.
        """
        self._geometry = geometry
        self._backed = np.zeros(slots, bool)
        for run in backed:
            self._backed[run.start : run.stop] = True
        self._backed_slots = set(np.nonzero(self._backed)[0].tolist())
        self._number, self._directories = number, directories

    def found_in(self, piece: bytearray, start: int, count: int) -> Iterator[Found]:
        """The valid records among the first `count` in this memory. start: the entry of the first."""
        # Only plain objects: on others, the garbage collector would spend half a second per hundred thousand records.
        slot_units, unit_bytes = self._geometry.slot_units, self._geometry.unit_bytes
        records = np.frombuffer(piece, _LAYOUT)[:count]
        is_record = np.isin(records["magic"], list(_DIVISOR_OF)) & (records["entry"] == np.arange(start, start + count))
        (rows,) = np.nonzero(is_record)
        divisors = [_DIVISOR_OF[magic] for magic in records["magic"][rows].tolist()]
        decoded, stored = (records[name][rows].astype(np.int64) for name in ("decoded_bytes", "stored_bytes"))
        encoded = np.where(stored < decoded, decoded, 0)
        for row, divisor in enumerate(divisors):
            if divisor > 1:
                stored[row] = min(stored[row], cut_bytes(int(decoded[row]), divisor))
        units = records["units"][rows, :slot_units]
        first = units[:, 0]
        slots = first // slot_units
        last_slot = len(self._backed) - 1
        is_slot = (first % slot_units == 0) & (slots <= last_slot) & self._backed[np.minimum(slots, last_slot)]
        is_slot &= (units == first[:, None] + np.arange(slot_units)).all(axis=1)
        counts = (PAGE_BYTES + stored + unit_bytes - 1) // unit_bytes
        is_slot &= counts == slot_units
        starts = rows * RECORD_BYTES
        columns = (
            (start + rows) * self._directories + self._number,
            starts,
            records["number"][rows],
            stored,
            counts,
            first,
            is_slot,
            encoded,
        )
        values_of_rows = zip(
            *(column.tolist() for column in columns),
            divisors,
            intact(memoryview(piece), starts.tolist(), RECORD_BYTES),
            strict=True,
        )
        data = bytes(piece)  # keys are slices of it, and slices of a bytearray would be bytearrays
        for row, values in enumerate(values_of_rows):
            entry, begin, number, nbytes, unit_count, first_unit, is_whole, decoded_bytes, divisor, is_intact = values
            if not is_intact:
                continue
            packed_units: PackedUnits = first_unit
            if not is_whole:
                packed_units = tuple(units[row, :unit_count].tolist())
                slots_of_units = {unit // slot_units for unit in packed_units}
                if unit_count > slot_units or not slots_of_units <= self._backed_slots:
                    packed_units = ()
            key, parent = names_in(data, begin + _HEADER_AT)
            yield Found(number, entry, key, parent, nbytes, packed_units, decoded_bytes, divisor)
