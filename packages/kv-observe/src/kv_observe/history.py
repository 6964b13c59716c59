"""The history: what happened to keys, in bounded memory for each cache, filled from events.

A key is stored as its hash in this process, and all keys of one event share one `ChunkFate`, so a key costs about 100
bytes. When the newer half is full, the older half is dropped as a whole, so that no order has to be maintained. A fate
records which keys were stored together and in what order, to show where prompts diverge. Fates are those of the host
pool. Lower tiers keep track of what they hold; the history records only when a chunk was stored there.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from kv_core.keys import ChunkKey, by_chain
from kv_tiers.cache.host import TIER
from kv_tiers.events.bus import Occurred, Subscriber
from kv_tiers.events.events import Aborted, Committed, DamageFound, Evicted, Forgotten, Promoted, Spilled, StoreBegun

What = Literal["stored", "promoted", "evicted", "forgotten", "damaged", "refused", "aborted"]

MAX_KNOWN_KEY_SPACES: Final = 64
"""Key spaces and tenants that are remembered for one cache: those that were stored in last."""


@dataclass(frozen=True, slots=True)
class ChunkFate:
    """The last thing that happened to a chunk. Times are of the bus's clock.

    what: which thing.
    at_s: when.
    tier: where.
    cause: of an eviction, what the room was for; of a refusal or damage, its reason.
    policy: of an eviction, the policy that chose the chunk.
    stored_s: when it last came into the pool.
    below: the lower tiers where it was stored since, each with the time.
    run: hashes of the keys that were stored with it, in the prompt's order.
    """

    what: What
    at_s: float
    tier: str = TIER
    cause: str = ""
    policy: str = ""
    stored_s: float | None = None
    below: tuple[tuple[str, float], ...] = ()
    run: "array[int] | None" = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class KnownKeySpace:
    """A key space and tenant of which chunks were stored.

    space: the key space's id.
    tenant: the tenant's tag.
    key_prefixes: what comes before the digest in a key, for each group and shard.
    """

    space: bytes
    tenant: bytes
    key_prefixes: tuple[bytes, ...]


class Memory:
    """What happened to one cache's keys. Written by the bus's thread, read by any."""

    def __init__(self, max_keys: int) -> None:
        self._half = max(1, max_keys // 2)
        self._young: dict[int, ChunkFate] = {}
        self._old: dict[int, ChunkFate] = {}
        self._young_next: dict[int, int] = {}
        self._old_next: dict[int, int] = {}
        self._key_prefixes: dict[tuple[bytes, bytes], tuple[bytes, ...]] = {}
        self._stores = 0
        self._last_store: dict[tuple[bytes, bytes], int] = {}  # by key space and tenant
        self.is_whole = True
        """Nothing has been dropped so far."""
        self.cleared_s: float | None = None

    def fate(self, key: ChunkKey) -> ChunkFate | None:
        """None: the key is unknown, or was dropped from the history."""
        key_hash = _key_hash(key)
        return self._young.get(key_hash) or self._old.get(key_hash)

    def diverged_after(self, parent: ChunkKey, key: ChunkKey) -> bool:
        """Whether another chunk than `key` followed `parent` in a prompt that was stored."""
        parent_hash, own_hash = _key_hash(parent), _key_hash(key)
        follower = self._young_next.get(parent_hash, self._old_next.get(parent_hash))
        if follower is not None and follower != own_hash:
            return True
        fate = self.fate(parent)
        if fate is None or fate.run is None:
            return False
        after = fate.run.index(parent_hash) + 1 if parent_hash in fate.run else len(fate.run)
        return after < len(fate.run) and fate.run[after] != own_hash

    def known_key_spaces(self) -> list[KnownKeySpace]:
        return [
            KnownKeySpace(space, tenant, prefixes) for (space, tenant), prefixes in list(self._key_prefixes.items())
        ]

    def change(self, keys: Iterable[ChunkKey], change: Callable[[ChunkFate | None], ChunkFate]) -> None:
        """Give all of these a new fate, derived from the previous one. Keys that shared a fate share the new one."""
        changed: dict[int, tuple[ChunkFate | None, ChunkFate]] = {}  # with the old fates, so that their ids stay taken
        young, old = self._young, self._old
        for key_hash in _key_hashes(keys):
            before = young.get(key_hash) or old.get(key_hash)
            after = changed.get(id(before))
            if after is None:
                after = changed[id(before)] = before, change(before)
            young[key_hash] = after[1]
        self._make_room()

    def store(self, keys: Iterable[ChunkKey], at_s: float) -> None:
        """These keys of one prompt, in its order, became visible in the pool."""
        key_hashes = _key_hashes(keys)
        fate = ChunkFate("stored", at_s, stored_s=at_s, run=array("q", key_hashes))
        self._young.update(dict.fromkeys(key_hashes, fate))
        self._make_room()

    def follow(self, parent: ChunkKey, key: ChunkKey) -> None:
        """A prompt continues with `key` after a chunk that was stored before."""
        self._young_next[_key_hash(parent)] = _key_hash(key)
        if len(self._young_next) >= self._half:
            self._young_next, self._old_next = {}, self._young_next

    def learn_key_space(self, key: ChunkKey) -> None:
        """Remember the key space and tenant of a chain that was stored, in the place of the one that was not stored in
        for longest."""
        prefix = key[: len(key) - len(key.digest)]
        owner = key.space_id, key.tenant
        self._stores += 1
        self._last_store[owner] = self._stores
        prefixes = self._key_prefixes.get(owner, ())
        if prefix not in prefixes:
            self._key_prefixes[owner] = tuple(sorted((*prefixes, prefix)))
        if len(self._key_prefixes) > MAX_KNOWN_KEY_SPACES:
            oldest = min(self._last_store, key=self._last_store.__getitem__)
            del self._key_prefixes[oldest], self._last_store[oldest]
            self.is_whole = False

    def _make_room(self) -> None:
        if len(self._young) >= self._half:
            self.is_whole = self.is_whole and not self._old
            self._young, self._old = {}, self._young

    def clear(self, at_s: float) -> None:
        """Everything was forgotten in the cache."""
        fate = ChunkFate("forgotten", at_s)
        for half in (self._young, self._old):
            for key_hash in half:
                half[key_hash] = fate
        self.cleared_s = at_s


class History(Subscriber):
    """The memories of all caches on a bus, up to `max_keys` keys each."""

    wants_requests = False

    def __init__(self, max_keys: int, now_s: float) -> None:
        """now_s: the time on the bus's clock."""
        self.max_keys = max_keys
        self.began_s = now_s
        self._memories: dict[str, Memory] = {}

    def of(self, cache: str) -> Memory:
        """The memory of the cache of this name on the bus."""
        return self._memories.get(cache) or self._memories.setdefault(cache, Memory(self.max_keys))

    def forget(self, cache: str) -> None:
        """Drop the memory of a cache that is closed, about which no queries can come."""
        self._memories.pop(cache, None)

    def take(self, occurred: Occurred) -> None:
        memory, at_s = self.of(occurred.source.name), occurred.at_s
        match occurred.event:
            case StoreBegun() as begun:
                chains = by_chain(begun.chain)
                for prefix, (first, *_) in by_chain(begun.reserved).items():
                    memory.learn_key_space(first)
                    if position := chains[prefix].index(first):
                        memory.follow(chains[prefix][position - 1], first)
                if begun.refused:
                    memory.change(
                        begun.refused, lambda before: _inherited(before, ChunkFate("refused", at_s, cause=begun.why))
                    )
            case Committed(keys=keys):
                for group_keys in by_chain(keys).values():
                    memory.store(group_keys, at_s)
            case Promoted(tier=tier, keys=keys):
                for first, *_ in by_chain(keys).values():  # after a restart nothing else names what the tiers kept
                    memory.learn_key_space(first)
                memory.change(keys, lambda before: _promoted(before, tier, at_s))
            case Aborted(keys=keys):
                memory.change(keys, lambda before: _inherited(before, ChunkFate("aborted", at_s)))
            case Evicted(tier, keys, cause, _, policy):
                memory.change(keys, lambda before: _inherited(before, ChunkFate("evicted", at_s, tier, cause, policy)))
            case DamageFound(tier, keys, reason):
                memory.change(keys, lambda before: _inherited(before, ChunkFate("damaged", at_s, tier, reason)))
            case Spilled(tier=tier, keys=keys):
                memory.change(keys, lambda before: _spilled(before, tier, at_s))
            case Forgotten(everything=True):
                memory.clear(at_s)
            case Forgotten(keys=keys):
                memory.change(keys, lambda before: ChunkFate("forgotten", at_s))


def _inherited(before: ChunkFate | None, after: ChunkFate) -> ChunkFate:
    """What happened, given what was known about the chunk before."""
    return after if before is None else replace(after, stored_s=before.stored_s, below=before.below, run=before.run)


def _promoted(before: ChunkFate | None, tier: str, at_s: float) -> ChunkFate:
    run = None if before is None else before.run
    return ChunkFate("promoted", at_s, tier, stored_s=at_s, below=_tiers_below(before) or ((tier, at_s),), run=run)


def _spilled(before: ChunkFate | None, tier: str, at_s: float) -> ChunkFate:
    below = (*(entry for entry in _tiers_below(before) if entry[0] != tier), (tier, at_s))
    return replace(before, below=below) if before is not None else ChunkFate("stored", at_s, below=below)


def _tiers_below(before: ChunkFate | None) -> tuple[tuple[str, float], ...]:
    return () if before is None else before.below


def _key_hash(key: ChunkKey) -> int:
    """Represents a key in this process: 60 bits of its hash. A Python integer of 64 bits takes half as much memory
    again.
    """
    return hash(key) >> 4


def _key_hashes(keys: Iterable[ChunkKey]) -> list[int]:
    return [hash(key) >> 4 for key in keys]
