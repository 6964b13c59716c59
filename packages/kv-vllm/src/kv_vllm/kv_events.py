"""vLLM's KV events for chunks that enter and leave the pool, for routers that send a prompt to an engine that has it.

vLLM publishes what `take_events` returns next to its own events, if `--kv-events-config` enables them; otherwise
nothing is created here and the cache keeps no record. A chunk is announced as vLLM's blocks, with the hashes, parents
and tokens that vLLM's own events have for them, so a router has one tree in which `medium` tells device from pool.

The cache knows keys, which cannot be turned back into tokens. Tokens are taken from requests: from those that store a
chunk, which is announced when it has entered the pool, and from those that load a chunk that was already there (from a
lower tier, an earlier process or another engine), which is announced by its load. So everything announced is in the
pool, but the pool may contain chunks that no request of this engine has used yet.

A chunk whose parent has left cannot be hit, so it is not announced: `kv_vllm.kv_events`.

Windows and states that a hit also needs are not announced: a chunk is announced when the groups that need the whole
prefix have it in all shards of the scheduler's node, with one event for each of vLLM's groups among them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kv_connect.halves.step import StepPlan
from kv_core.keys import ChunkKey, keys_in
from kv_core.shape import ConnectShape
from kv_tiers.events.changes import Changes
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)

Name = tuple[int, Any]
"""One of vLLM's block tables, and its hash of a chunk's last block."""
_MAX_EXPECTED: Final = 1 << 12
"""Limit of chunks that requests are about to store. Those already held, or refused, never arrive and are dropped when
others follow."""


@dataclass(slots=True)
class _Node:
    """A chunk's blocks. held: number of our chunks with these blocks. announced: whether routers know them."""

    stored: BlockStored
    held: int = 0
    announced: bool = False


class BlockTree:
    """The blocks of the chunks in the pool, by their parents. Not thread-safe.

    A router builds a tree from the blocks' parents. It drops a block with an unknown parent and, with a block, all its
    descendants, permanently (`dynamo._core.RadixTree` does). A pool can hold chunks whose parent it lacks: a chunk in
    the middle of a prompt was damaged, or was loaded where vLLM had the beginning itself. No hit reaches such a chunk,
    so it is announced only when its parent is.
    """

    def __init__(self) -> None:
        self._nodes: dict[Name, _Node] = {}
        self._children: dict[Name, set[Name]] = {}  # by their parent, which may be missing
        self._changes: list[BlockStored | BlockRemoved] = []

    def take(self) -> list[BlockStored | BlockRemoved]:
        """Changes that have not been announced yet."""
        changes, self._changes = self._changes, []
        return changes

    def hold(self, stored: BlockStored) -> None:
        """A chunk with these blocks is in the pool. Chunks with different tags may have the same blocks in vLLM."""
        name, parent = _name(stored), _parent(stored)
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes[name] = _Node(stored)
            self._children.setdefault(parent, set()).add(name)
        node.held += 1
        if not node.announced and (stored.parent_block_hash is None or self._is_announced(parent)):
            self._announce(name)

    def release(self, stored: BlockStored) -> None:
        """One of the chunks with these blocks has left the pool."""
        name, parent = _name(stored), _parent(stored)
        node = self._nodes[name]
        node.held -= 1
        if node.held:
            return
        if node.announced:
            self._retract(name)
        del self._nodes[name]
        self._children[parent].remove(name)
        if not self._children[parent]:
            del self._children[parent]

    def _is_announced(self, name: Name) -> bool:
        return name in self._nodes and self._nodes[name].announced

    def _announce(self, root: Name) -> None:
        """Announce these blocks and those that were waiting for them, parents first."""
        waiting = [root]
        while waiting:
            name = waiting.pop()
            node = self._nodes[name]
            node.announced = True
            self._changes.append(node.stored)
            waiting += self._children.get(name, ())

    def _retract(self, root: Name) -> None:
        """Retract these blocks and their announced descendants, children first."""
        subtree = [root]
        for name in subtree:
            node = self._nodes[name]
            node.announced = False
            subtree += self._children.get(name, ())
        for name in reversed(subtree):
            stored = self._nodes[name].stored
            self._changes.append(BlockRemoved(stored.block_hashes, stored.medium, group_idx=stored.group_idx))


def _name(stored: BlockStored) -> Name:
    return stored.group_idx or 0, stored.block_hashes[-1]


def _parent(stored: BlockStored) -> Name:
    return stored.group_idx or 0, stored.parent_block_hash


ChunkId = bytes
"""A key without its group and shard: the tenant, and the chunk of a prefix."""


@dataclass(slots=True)
class _Chunk:
    """A chunk that a request stores or loads.

    missing: its keys that have not entered the pool.
    """

    stored: Sequence[BlockStored]
    missing: set[ChunkKey]


class ChunkEvents:
    """The KV events of one engine. Used on the scheduler's thread."""

    def __init__(
        self,
        shape: ConnectShape,
        changes_since: Callable[[int], Changes],
        *,
        hash_tokens: int,
        shards: Sequence[int] | None = None,
    ) -> None:
        """changes_since: the chunks that entered and left the pool. hash_tokens: tokens that one vLLM hash covers.
        shards: the shards that the pool holds; None: all."""
        self._groups = shape.chunk.whole_groups
        self._tables = {shape.groups[number].table: shape.groups[number].block_tokens for number in self._groups}
        self._shape = shape
        self._shards = range(shape.shards) if shards is None else shards
        self._hash_tokens = hash_tokens
        self._changes_since = changes_since
        self._upto = changes_since(0).upto
        self._expected: OrderedDict[ChunkId, _Chunk] = OrderedDict()
        self._announced: dict[ChunkId, Sequence[BlockStored]] = {}
        self._tree = BlockTree()

    def planned(self, plan: StepPlan, request_of: Callable[[str], Any]) -> None:
        """Note what a step will load and store. request_of: vLLM's request with this id; None: it is gone."""
        for store in plan.stores:
            if (request := request_of(store.request_id)) is not None:
                # Only the engine that a prompt is handed over to can find its partial chunk.
                for chunk, digest in enumerate(store.digests[: -1 if store.tail_tokens else None]):
                    keys = self._keys(plan.space_id, store.tenant, digest)
                    if keys and (chunk_id := _id_of(keys[0])) not in self._announced and chunk_id not in self._expected:
                        self._expect(chunk_id, self._events_of(request, chunk), keys)
        for load in plan.loads:
            if (request := request_of(load.request_id)) is not None:
                self._follow()  # the chunks that are loaded may have left and come back: announce these events in order
                for chunk, digest in enumerate(load.digests, load.first_chunk):
                    keys = self._keys(plan.space_id, load.tenant, digest)
                    if keys and (chunk_id := _id_of(keys[0])) not in self._announced:
                        self._expected.pop(chunk_id, None)
                        self._announce(chunk_id, self._events_of(request, chunk))

    def end(self) -> Iterable[BlockStored | BlockRemoved]:
        """Nothing is served from the pool any more."""
        self._all_left()
        return self._tree.take()

    def take(self) -> Iterable[BlockStored | BlockRemoved]:
        """The events since the last call."""
        self._follow()
        return self._tree.take()

    def _follow(self) -> None:
        changes = self._changes_since(self._upto)
        self._upto = changes.upto
        if not changes.is_whole:
            self._all_left()
        for change in changes.changes:
            if not change.keys:
                self._all_left()
            for key in change.keys:
                (self._key_entered if change.entered else self._key_left)(key)

    def _key_entered(self, key: ChunkKey) -> None:
        chunk_id = _id_of(key)
        chunk = self._expected.get(chunk_id)
        if chunk is not None:
            chunk.missing.discard(key)
            if not chunk.missing:
                del self._expected[chunk_id]
                self._announce(chunk_id, chunk.stored)

    def _key_left(self, key: ChunkKey) -> None:
        if key.group in self._groups:
            chunk_id = _id_of(key)
            self._retract(chunk_id)
            if (chunk := self._expected.get(chunk_id)) is not None:
                chunk.missing.add(key)

    def _all_left(self) -> None:
        for chunk_id in list(self._announced):
            self._retract(chunk_id)
        for chunk_id, chunk in self._expected.items():
            chunk.missing.update(self._keys_of(chunk_id))

    def _announce(self, chunk_id: ChunkId, stored: Sequence[BlockStored]) -> None:
        self._announced[chunk_id] = stored
        for event in stored:
            self._tree.hold(event)

    def _retract(self, chunk_id: ChunkId) -> None:
        """The chunk has left the pool, but may come back: a step that was planned ahead stores it again."""
        stored = self._announced.pop(chunk_id, None)
        if stored is None:
            return
        for event in stored:
            self._tree.release(event)
        self._expect(chunk_id, stored, self._keys_of(chunk_id))

    def _expect(self, chunk_id: ChunkId, stored: Sequence[BlockStored], keys: Iterable[ChunkKey]) -> None:
        self._expected[chunk_id] = _Chunk(stored, set(keys))
        if len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)

    def _keys(self, space_id: bytes, tenant: bytes, digest: bytes) -> list[ChunkKey]:
        return keys_in(space_id, [digest], groups=self._groups, shards=self._shards, tenant=tenant)

    def _keys_of(self, chunk_id: ChunkId) -> list[ChunkKey]:
        space_id, tenant, digest = chunk_id[1:17], chunk_id[17:24], chunk_id[24:]
        return self._keys(space_id, tenant, digest)

    def _events_of(self, request: Any, chunk: int) -> list[BlockStored]:
        chunk_tokens, lora = self._shape.chunk_tokens, request.lora_request
        start = chunk * chunk_tokens
        events = []
        for table, block_tokens in self._tables.items():
            hashes = resolve_block_hashes(request.block_hashes, self._hash_tokens, block_tokens)
            first, end = start // block_tokens, (start + chunk_tokens) // block_tokens
            if len(hashes) < end:
                continue
            event = BlockStored(
                block_hashes=[maybe_convert_block_hash(hashes[block]) for block in range(first, end)],
                parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
                token_ids=list(request.all_token_ids[start : start + chunk_tokens]),
                block_size=block_tokens,
                lora_id=None if lora is None else lora.adapter_id,
                medium=MEDIUM_CPU,
                lora_name=None if lora is None else lora.name,
                extra_keys=to_event_extra_keys(
                    generate_block_hash_extra_keys(request, token, token + block_tokens, 0)[0]
                    for token in range(start, start + chunk_tokens, block_tokens)
                ),
                group_idx=table,
                session_id=request.session_id,
            )
            events.append(event)
        return events


def _id_of(key: ChunkKey) -> ChunkId:
    return key[:24] + key.digest


def hash_tokens_of(kv_cache_manager: Any) -> int:
    """How many tokens one of a request's `block_hashes` covers."""
    return int(kv_cache_manager.coordinator.block_pool.hash_block_size)
