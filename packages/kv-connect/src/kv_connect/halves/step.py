"""Messages between the halves: one plan per step to the worker, one report back, as plain data.

A plan may travel to another process, so it consists of lists, dicts, strings, ints and bytes only: any serialiser can
carry it, no class has to be unpickled, and `from_plain` validates what arrives. It names chunks by the digests of their
prefix, never by extents or pointers; each worker derives the keys of its own shard and queries the cache.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kv_core.errors import InputError
from kv_core.extent import FileExtent, HostExtent
from kv_core.keys import SPACE_ID_BYTES, TENANT_BYTES
from kv_core.transfer import BlockTable, packed

Plain: TypeAlias = Any
"""Lists, dicts with string keys, strings, ints and bytes. (A recursive alias would not tell a reader more.)"""

STEP_VERSION = 11
_MAX_BLOCK: Final = (1 << 31) - 1
NO_SPACE = bytes(SPACE_ID_BYTES)
"""The key space of an empty plan that was made before the scheduler knew its own."""


@dataclass(frozen=True, slots=True)
class LoadStep:
    """Fill the request's blocks with tokens `first_token … last_token` (excluded) of its prompt.

    first_chunk: the number of the chunk that `digests[0]` names.
    digests: the digests of all chunks that the tokens to be loaded touch.
    tenant: the tag in the keys, see `tenant_tag`. The salt stays with the scheduler.
    blocks: for each of the engine's block tables, the request's blocks from the prompt's first token on, packed.
    first_token, last_token: positions in the prompt. In a group that does not need the whole prefix, only the tokens
        that the group needs are filled (`kv_core.shape.load_from`).
    extents: for a layerwise load (`kv_connect.halves.layerwise`), the place of each chunk in the pool, shard by shard.
        The scheduler leases them all until every rank has reported that the load has ended. Empty: the worker leases
        the chunks and loads them between two steps.
    files: for the last of these chunks, their place in a tier's files, where the worker reads them. The scheduler keeps
        their lease until the load is reported as ended.
    """

    request_id: str
    first_chunk: int
    digests: tuple[bytes, ...]
    tenant: bytes
    blocks: tuple[BlockTable, ...]
    first_token: int
    last_token: int
    extents: tuple[HostExtent, ...] = ()
    files: tuple[FileExtent, ...] = ()


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Where a linear layer's state at a boundary is after this step's forward pass.

    table: the block table that contains it.
    chunk: number of the chunk that ends at the boundary.
    """

    table: int
    block: int
    chunk: int


@dataclass(frozen=True, slots=True)
class StoreStep:
    """After this step's forward pass the request's first `len(digests)` chunks are computed: store those that are not
    held.

    digests: the digests of these chunks, from the prompt's first.
    tenant: the tag in the keys.
    blocks: for each of the engine's block tables, the blocks of these chunks.
    states: the states to store, of groups that have states.
    tail_tokens: the last digest names a partial chunk of this many tokens, at the end of a prompt that another engine
        continues. 0: it is a whole chunk like the others.
    hold_ms: how long the chunks are held in the pool for another engine, unless it reads them earlier; 0: no hold.
    retain_ms: how long they stay there in any case, within limits.
    tiers: the tiers that the chunks may be spilled to; None: all.
    """

    request_id: str
    digests: tuple[bytes, ...]
    tenant: bytes
    blocks: tuple[BlockTable, ...]
    states: tuple[StateBlock, ...] = ()
    tail_tokens: int = 0
    hold_ms: int = 0
    retain_ms: int = 0
    tiers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work for every worker.

    loads: the loads before the forward pass.
    stores: the stores after it.
    refused: requests whose allocation was inconsistent; their loads are reported as failed without touching a byte.
    space_id: the fingerprint of the key space that the loads and stores are in. The scheduler decides it, because
        new weights in a running engine change the key space from one step to the next.
    number: the number of the last plan with stores whose blocks the engine holds until every worker has acknowledged
        that plan (`kv_connect.halves.stores`); this plan's if it has stores. So workers need not wait for the copies.
        0: no blocks are held.
    trial: if not 0, the stores are committed only once the scheduler reports that the trial of this number was passed:
        that other connectors or ranks did fill the blocks with which the step computes (`kv_vllm.trials`).
    """

    loads: tuple[LoadStep, ...] = ()
    stores: tuple[StoreStep, ...] = ()
    refused: tuple[str, ...] = ()
    space_id: bytes = NO_SPACE
    number: int = 0
    trial: int = 0

    def to_plain(self) -> Plain:
        return {
            "version": STEP_VERSION,
            "loads": [
                [
                    load.request_id,
                    load.first_chunk,
                    list(load.digests),
                    load.tenant,
                    [list(blocks) for blocks in load.blocks],
                    load.first_token,
                    load.last_token,
                    [[extent.pool, extent.offset, extent.nbytes] for extent in load.extents],
                    [[file.path, file.offset, file.nbytes, file.checksum] for file in load.files],
                ]
                for load in self.loads
            ],
            "stores": [
                [
                    store.request_id,
                    list(store.digests),
                    store.tenant,
                    [list(blocks) for blocks in store.blocks],
                    [[state.table, state.block, state.chunk] for state in store.states],
                    store.tail_tokens,
                    store.hold_ms,
                    store.retain_ms,
                    [] if store.tiers is None else [list(store.tiers)],
                ]
                for store in self.stores
            ],
            "refused": list(self.refused),
            "space_id": self.space_id,
            "number": self.number,
            "trial": self.trial,
        }

    @classmethod
    def from_plain(cls, plain: Plain) -> "StepPlan":
        """Read a plan that came from elsewhere.

        Raises:
            InputError: it is not a step plan of this version.
        """
        if not isinstance(plain, dict) or plain.get("version") != STEP_VERSION:
            raise InputError(f"not a step plan of version {STEP_VERSION}: both halves must run the same release")
        try:
            return cls(
                loads=tuple(_load(entry) for entry in _sequence(plain["loads"])),
                stores=tuple(_store(entry) for entry in _sequence(plain["stores"])),
                refused=tuple(_text(entry) for entry in _sequence(plain["refused"])),
                space_id=_bytes(plain["space_id"], (SPACE_ID_BYTES,), "a key space's fingerprint"),
                number=_count(plain["number"]),
                trial=_count(plain["trial"]),
            )
        except KeyError as missing:
            raise InputError(f"the step plan lacks {missing}") from None


@dataclass(frozen=True, slots=True)
class StepReport:
    """Loads that ended since the last report.

    finished: requests whose wait is over.
    failed: requests among these whose tokens have to be computed.
    """

    finished: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


NO_REPORT: Final = StepReport()
"""The report of most steps."""


def _load(entry: Plain) -> LoadStep:
    request_id, first_chunk, digests, tenant, blocks, first_token, last_token, extents, files = _sequence(entry, 9)
    return LoadStep(
        _text(request_id),
        _count(first_chunk),
        _digests(digests),
        _tenant(tenant),
        _tables(blocks),
        _count(first_token),
        _count(last_token),
        tuple(_extent(extent) for extent in _sequence(extents)),
        tuple(_file(file) for file in _sequence(files)),
    )


def _store(entry: Plain) -> StoreStep:
    request_id, digests, tenant, blocks, states, *numbers, optional_tiers = _sequence(entry, 9)
    state_blocks = tuple(StateBlock(*map(_count, _sequence(state, 3))) for state in _sequence(states))
    tiers = next((tuple(map(_text, _sequence(names))) for names in _sequence(optional_tiers)), None)
    tail, hold, retain = map(_count, numbers)
    return StoreStep(
        _text(request_id), _digests(digests), _tenant(tenant), _tables(blocks), state_blocks, tail, hold, retain, tiers
    )


def _extent(entry: Plain) -> HostExtent:
    pool, offset, nbytes = _sequence(entry, 3)
    return HostExtent(_text(pool), _count(offset), _count(nbytes))


def _file(entry: Plain) -> FileExtent:
    path, offset, nbytes, checksum = _sequence(entry, 4)
    return FileExtent(_text(path), _count(offset), _count(nbytes), _bytes(checksum, (16,), "a checksum"))


def _tables(entry: Plain) -> tuple[BlockTable, ...]:
    tables = []
    for table in _sequence(entry):
        if set(map(type, _sequence(table))) - {int} or (table and not 0 <= min(table) <= max(table) <= _MAX_BLOCK):
            raise InputError("the step plan has a block table with something else than blocks")
        tables.append(packed(table))
    return tuple(tables)


def _sequence(entry: Plain, length: int | None = None) -> list[Plain] | tuple[Plain, ...]:
    # Serialisers disagree on lists and tuples, so both are accepted.
    if not isinstance(entry, list | tuple) or (length is not None and len(entry) != length):
        raise InputError(
            f"the step plan has {type(entry).__name__} where a list{f' of {length}' if length else ''} belongs"
        )
    return entry


def _text(entry: Plain) -> str:
    if not isinstance(entry, str):
        raise InputError(f"the step plan has {type(entry).__name__} where a string belongs")
    return entry


def _count(entry: Plain) -> int:
    if type(entry) is not int or entry < 0:
        raise InputError(f"the step plan has {entry!r} where a whole number of at least 0 belongs")
    return entry


def _bytes(entry: Plain, lengths: Container[int], what: str) -> bytes:
    if not isinstance(entry, bytes) or len(entry) not in lengths:
        raise InputError(f"the step plan has something else where {what} belongs")
    return entry


def _tenant(entry: Plain) -> bytes:
    return _bytes(entry, (TENANT_BYTES,), "a tenant's tag")


def _digests(entry: Plain) -> tuple[bytes, ...]:
    return tuple(_bytes(digest, (16, 32), "a chunk's digest") for digest in _sequence(entry))
