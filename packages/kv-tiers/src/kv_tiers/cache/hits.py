"""Finds the longest hit of a prompt: what `kv_core.coverage.longest_hit` defines, at the speed of an index.

Groups that need the whole prefix are a leading run, which the index follows as fast as for a plain model. From the end
of that run the search goes back: a boundary at which a window or a state is missing implies how far back the next
candidate is, because the chunks that a shorter prefix needs never begin later. So each key is looked up at most once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from kv_core.cost import Costs
from kv_core.coverage import ChunkShape
from kv_core.keys import ChunkKey
from kv_core.service import Ended

from kv_tiers.index.residency import Residency


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lookup finds.

    chunks, prefix_chunks, lacking, ended: as in `LookupPlan`.
    keys, slots: what the hit needs: groups that need the whole prefix first, in the prompt's order, then the others,
        group by group. There may be more keys than slots, because eviction policies receive those too.
    """

    chunks: int
    prefix_chunks: int
    lacking: int
    ended: Ended
    keys: Sequence[ChunkKey]
    slots: list[int]


def own_chunks(costs: Costs | None, shape: ChunkShape) -> int:
    """How many of a lookup's leading chunks the engine has in its own blocks: it neither computes nor loads those."""
    return 0 if costs is None else costs.computed_tokens // shape.chunk_tokens


def find_hit(index: Residency, keys: list[ChunkKey], shape: ChunkShape) -> Hit:
    """keys: whole chunks, chunk-major. The slots may be the index's own list: do not change it."""
    stride = shape.keys_per_chunk
    requested = len(keys) // stride
    if shape.is_plain:
        slots = index.leading(keys)
        chunks, partial = divmod(len(slots), stride)
        return Hit(chunks, chunks, -1, _ended(chunks, requested, partial), keys, slots[:-partial] if partial else slots)

    columns = [number for group in shape.whole_groups for number in columns_of(group, shape)]
    if requested and columns and index.find(keys[columns[0]]) is None:  # nearly all prompts that were never stored
        return Hit(0, 0, -1, Ended.ABSENT, [], [])
    prefix, partial = requested, 0
    whole: list[ChunkKey] = []
    if columns:
        whole = interleaved([keys[column::stride] for column in columns])
        slots = index.leading(whole)
        prefix, partial = divmod(len(slots), len(columns))
    find = index.find
    chunks, lacking = last_boundary(shape, prefix, lambda place: find(keys[place]) is not None)
    if lacking >= 0 and columns:
        ended = Ended.INCOMPLETE
    else:
        prefix, lacking, ended = chunks, -1, _ended(chunks, requested, partial)
    needed = whole[: chunks * len(columns)]
    slots = slots[: len(needed)] if columns else []
    for group in shape.other_groups:
        first = shape.first_chunk(group, chunks)
        group_keys = interleaved(
            [keys[column + first * stride : chunks * stride : stride] for column in columns_of(group, shape)]
        )
        needed += group_keys
        slots += [slot for key in group_keys if (slot := find(key)) is not None]
    assert len(slots) == len(needed)
    return Hit(chunks, prefix, lacking, ended, needed, slots)


def last_boundary(shape: ChunkShape, prefix: int, is_there: Callable[[int], bool]) -> tuple[int, int]:
    """The longest boundary of at most `prefix` chunks at which every group but those of the whole prefix has what it
    needs, and the first group that lacks something at `prefix`, -1 if none does.

    is_there: whether the key at an index of the chunk-major list is there.
    """
    stride, shards = shape.keys_per_chunk, shape.shards
    others = shape.other_groups
    boundary, lacking = prefix, -1
    complete_from = dict.fromkeys(others, prefix)  # by group: it is complete from this chunk to the boundary
    while boundary:
        for group in others:
            first, chunk = shape.first_chunk(group, boundary), min(complete_from[group], boundary)
            while chunk > first:
                place = (chunk - 1) * stride + group * shards
                if not (is_there(place) if shards == 1 else all(map(is_there, range(place, place + shards)))):
                    break
                chunk -= 1
            complete_from[group] = chunk
            if chunk > first:
                if lacking < 0:
                    lacking = group
                boundary = complete_from[group] = chunk - 1  # boundaries in between need the missing chunk as well
                break
        else:
            break
    return boundary, lacking


def whole_prefix(shape: ChunkShape, chunks: int, is_there: Callable[[int], bool]) -> int:
    """How many of `chunks` leading chunks those groups have that need the whole prefix. is_there: as above."""
    stride = shape.keys_per_chunk
    columns = [column for group in shape.whole_groups for column in columns_of(group, shape)]
    places = (chunk * stride + column for chunk in range(chunks) for column in columns)
    return next((place // stride for place in places if not is_there(place)), chunks)


def slowest_tiers(
    chunks: int, shape: ChunkShape, sources: Sequence[str], order: Callable[[str], int], fastest: str
) -> tuple[str, ...]:
    """For each chunk of a hit the slowest tier that one of its keys comes from.

    sources: the tier of each key that the hit needs (`ChunkShape.needed_places`). order: how slow a tier is.
    fastest: the tier of chunks of which nothing is needed.
    """
    if shape.is_plain and shape.keys_per_chunk == 1:
        return tuple(sources)
    tiers = [fastest] * chunks
    if sources.count(fastest) < len(sources):
        for place, source in zip(shape.needed_places(chunks), sources, strict=True):
            chunk = place // shape.keys_per_chunk
            tiers[chunk] = max(tiers[chunk], source, key=order)
    return tuple(tiers)


def needed_count(shape: ChunkShape, chunks: int) -> int:
    """The number of keys that a hit of this many chunks needs."""
    return sum(map(len, shape.needed(chunks))) * shape.shards


def fitting(shape: ChunkShape, chunks: int, room: int) -> int:
    """The longest boundary of at most this many chunks whose hit needs at most `room` keys."""
    while (excess := needed_count(shape, chunks) - room) > 0:
        chunks -= -(-excess // shape.keys_per_chunk)  # one chunk less saves at most that many keys
    return chunks


def columns_of(group: int, shape: ChunkShape) -> range:
    """The indexes of a group's keys within a chunk."""
    return range(group * shape.shards, (group + 1) * shape.shards)


def interleaved(columns: list[list[ChunkKey]]) -> list[ChunkKey]:
    """Columns of equal length, chunk by chunk."""
    return columns[0] if len(columns) == 1 else list(chain.from_iterable(zip(*columns, strict=True)))


def _ended(chunks: int, requested: int, partial: int) -> Ended:
    """partial: how many keys of the next chunk are held."""
    if chunks == requested:
        return Ended.ALL_HELD
    return Ended.INCOMPLETE if partial else Ended.ABSENT
