"""Messages between the halves: one plan per step to the worker, one report back, as plain data.

A plan may travel to another process, so it becomes lists, dicts, strings, ints, bytes and None only: any serialiser can
carry it, no class has to be unpickled, and `from_plain` validates what arrives. (Serialisers disagree on lists and
tuples, so both are accepted.) It names chunks by the digests of their prefix, never by extents or pointers; each worker
derives the keys of its own shard and queries the cache.
"""

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
from kv_core.errors import InputError
from kv_core.keys import SPACE_ID_BYTES, TENANT_BYTES
from kv_core.transfer import BlockTable, FileExtent, HostExtent, packed

if TYPE_CHECKING:
    from kv_core.transfer import BlockTable
else:
    BlockTable = array  # which msgspec can read: before Python 3.12 an array has no type of its items

Plain: TypeAlias = Any
"""Lists, dicts with string keys, strings, ints, bytes and None. (A recursive alias would not tell a reader more.)"""
Count = Annotated[int, msgspec.Meta(ge=0)]
TenantTag = Annotated[bytes, msgspec.Meta(min_length=TENANT_BYTES, max_length=TENANT_BYTES)]

STEP_VERSION = 14
_MAX_BLOCK: Final = (1 << 31) - 1
_CHECKSUM_BYTES: Final = 16
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
    first_chunk: Count
    digests: tuple[bytes, ...]
    tenant: TenantTag
    blocks: tuple[BlockTable, ...]
    first_token: Count
    last_token: Count
    extents: tuple[HostExtent, ...] = ()
    files: tuple[FileExtent, ...] = ()


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Where a linear layer's state at a boundary is after this step's forward pass.

    chunk: number of the chunk that ends at the boundary.
    """

    table: Count
    block: Count
    chunk: Count


@dataclass(frozen=True, slots=True)
class StoreStep:
    """After this step's forward pass the request's first `len(digests)` chunks are computed: store those that are not
    held.

    digests: the digests of these chunks, from the prompt's first.
    blocks: for each of the engine's block tables, the blocks of these chunks.
    states: the states to store, of groups that have states.
    tail_tokens: the last digest names a partial chunk of this many tokens, at the end of a prompt that another engine
        continues. 0: it is a whole chunk like the others.
    hold_ms: how long the chunks are held in the pool for another engine, unless it reads them earlier; 0: no hold.
    retain_ms: how long they stay there in any case, within limits.
    tiers: the tiers that the chunks may be spilled to; None: all.
    is_demoted: the chunks are the first to be evicted.
    """

    request_id: str
    digests: tuple[bytes, ...]
    tenant: TenantTag
    blocks: tuple[BlockTable, ...]
    states: tuple[StateBlock, ...] = ()
    tail_tokens: Count = 0
    hold_ms: Count = 0
    retain_ms: Count = 0
    tiers: tuple[str, ...] | None = None
    is_demoted: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work for every worker: loads, and stores after the forward pass.

    refused: requests whose allocation was inconsistent; their loads are reported as failed without touching a byte.
    space_id: the fingerprint of the key space that the loads and stores are in. The scheduler decides it, because
        new weights in a running engine change the key space from one step to the next.
    number: the number of the last plan with stores whose blocks the engine holds until every worker has acknowledged
        that plan (`kv_connect.halves.stores`); this plan's if it has stores. So workers need not wait for the copies.
        0: no blocks are held.
    trial: if not 0, the stores are committed only once the scheduler reports that the trial of this number was passed:
        that other connectors or ranks did fill the blocks with which the step computes (`kv_vllm.trials`).
    overwritten: stores of chunks in blocks that this step overwrites, to be gathered before its loads and forward pass
        (`kv_connect.halves.lazy_stores`). The tables have only the blocks of these chunks.
    """

    loads: tuple[LoadStep, ...] = ()
    stores: tuple[StoreStep, ...] = ()
    refused: tuple[str, ...] = ()
    space_id: Annotated[bytes, msgspec.Meta(min_length=SPACE_ID_BYTES, max_length=SPACE_ID_BYTES)] = NO_SPACE
    number: Count = 0
    trial: Count = 0
    overwritten: tuple[StoreStep, ...] = ()

    def to_plain(self) -> Plain:
        return {"version": STEP_VERSION} | msgspec.to_builtins(self, builtin_types=(bytes,), enc_hook=list)

    @classmethod
    def from_plain(cls, plain: Plain) -> "StepPlan":
        """Read a plan that came from elsewhere.

        Raises:
            InputError: it is not a step plan of this version.
        """
        if not isinstance(plain, dict) or plain.get("version") != STEP_VERSION:
            raise InputError(f"not a step plan of version {STEP_VERSION}: both halves must run the same release")
        try:
            plan = msgspec.convert(plain, cls, dec_hook=_read_table)
        except msgspec.ValidationError as error:
            raise InputError(f"the step plan is damaged: {error}") from None
        chains = [load.digests for load in plan.loads] + [store.digests for store in (*plan.stores, *plan.overwritten)]
        if any(len(digest) not in (16, 32) for digests in chains for digest in digests):
            raise InputError("the step plan has something else where a chunk's digest belongs")
        places = [(place.offset, place.nbytes) for load in plan.loads for place in load.extents]
        places += [(place.offset, place.nbytes) for load in plan.loads for place in load.files]
        if any(min(place) < 0 for place in places):
            raise InputError("the step plan has places that begin before 0, or have fewer bytes")
        if any(len(file.checksum) != _CHECKSUM_BYTES for load in plan.loads for file in load.files):
            raise InputError("the step plan has something else where a checksum belongs")
        return plan


def _read_table(_kind: type, entry: Plain) -> BlockTable:
    are_blocks = isinstance(entry, list | tuple) and not set(map(type, entry)) - {int}
    if not are_blocks or (entry and not 0 <= min(entry) <= max(entry) <= _MAX_BLOCK):
        raise ValueError("a block table with something else than blocks")
    return packed(entry)


@dataclass(frozen=True, slots=True)
class StepReport:
    """Loads that ended since the last report; their chunks are no longer read.

    finished: requests whose loads have ended, so that their wait is over.
    failed: requests among these whose tokens have to be computed.
    """

    finished: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


NO_REPORT: Final = StepReport()
"""The report of most steps."""
