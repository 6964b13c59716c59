"""Shares: the part of a pool that each tenant has, and which chunk is evicted when that part is full.

A tenant with a quota has a share of its own, as large as the quota, with a policy of its own. All others have the
common share, which is what the quotas leave. Shares lend nothing: a full share evicts its own chunks, however much is
free elsewhere, so no chunk is ever evicted for a chunk of another share, and no tenant affects another's order.

Slots count towards their tenant from when they are taken until they are free again, including those whose chunk is no
longer found but still being read. So the tenants' use always adds up to the pool's.

In the pool a slot counts as one. In a tier, whose chunks differ in size, shares are measured in units of its medium,
and a slot counts as the units that its chunk takes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey

from kv_eviction.policy import EvictionPolicy


class Share:
    """One tenant's share, or the common one. slots_used may exceed slots for a while after a quota was lowered."""

    __slots__ = ("_make_policy", "_policy", "is_common", "slots", "slots_used")

    def __init__(self, make_policy: Callable[[], EvictionPolicy], slots: int, *, is_common: bool = False) -> None:
        """make_policy: called when the policy is first needed, as most of many tenants may never have a chunk."""
        self._make_policy = make_policy
        self._policy: EvictionPolicy | None = None
        self.slots = slots
        self.slots_used = 0
        self.is_common = is_common

    @property
    def policy(self) -> EvictionPolicy:
        if self._policy is None:
            self._policy = self._make_policy()
        return self._policy


@dataclass(eq=False, slots=True)
class _Account:
    """The account of a tenant that has a slot."""

    tenant: bytes
    share: Share
    slots_used: int = 0


@dataclass(slots=True)
class _Move:
    """The move of a tenant's slots from the share in which they were taken to its present one, a few at a time.

    account: of the slots that have not moved.
    owed: slots that the new share still lacks. The new share grows as they arrive, so that the old one is never smaller
        than what the others use of it.
    """

    account: _Account
    new: Share
    owed: int


@dataclass(frozen=True, slots=True)
class SlotUse:
    """slots_quota: None for a tenant of the common share."""

    tenant: bytes
    slots_used: int
    slots_quota: int | None


class Shares(EvictionPolicy):
    """Made of one policy per share, and the accounts of all tenants. Constant time per chunk.

    While there are no quotas it passes every call on and does nothing else.
    """

    def __init__(
        self,
        slots: int,
        policy: EvictionPolicy,
        make_policy: Callable[[int], EvictionPolicy],
        *,
        numbered: int | None = None,
    ) -> None:
        """policy: of the common share.
        make_policy: creates one for a share of the given size.
        numbered: how many slots there are, if these are not the `slots` of which each counts as one. They may grow.
        """
        self.common = Share(lambda: policy, slots, is_common=True)
        self.over: set[Share] = set()
        """Shares that exceed their size since a quota was set."""
        self._make_policy = make_policy
        self._quota_shares: dict[bytes, Share] = {}
        self._accounts: dict[bytes, _Account] = {}
        self._account_at: list[_Account | None] = [None] * (slots if numbered is None else numbered)
        self._moving: _Move | None = None

    def of(self, tenant: bytes) -> Share:
        """The share to which this tenant's chunks belong."""
        return self._quota_shares.get(tenant, self.common)

    def at(self, slot: int) -> Share:
        """The share to which this taken slot belongs."""
        account = self._account_at[slot]
        assert account is not None
        return account.share

    def tenant_at(self, slot: int) -> bytes:
        """The tenant to which this taken slot belongs."""
        account = self._account_at[slot]
        assert account is not None
        return account.tenant

    def grow(self, slots: int) -> None:
        """There are this many more slots."""
        self._account_at += [None] * slots

    def took(self, slots: Sequence[int], tenant: bytes, *, each: int = 1) -> None:
        """From now on the slots belong to this tenant, and to no other.

        each: as how much a slot counts. A slot of another tenant's that counts as more than one has to have `left`.
        """
        account = self._accounts.get(tenant) or _Account(tenant, self.of(tenant))
        for slot in slots:
            previous = self._account_at[slot]
            if previous is account:
                continue
            if previous is not None:
                self.left(slot)
            account.slots_used += each
            account.share.slots_used += each
            self._account_at[slot] = account
        if account.slots_used:
            self._accounts[tenant] = account

    def shrank(self, slot: int, by: int) -> None:
        """The slot counts as so much less."""
        account = self._account_at[slot]
        assert account is not None
        account.share.slots_used -= by
        account.slots_used -= by

    def left(self, slot: int, counted: int = 1) -> None:
        """The slot, which counted as so much, has become free."""
        self.shrank(slot, counted)
        account = self._account_at[slot]
        assert account is not None
        self._account_at[slot] = None
        if not account.slots_used and self._accounts.get(account.tenant) is account:
            del self._accounts[account.tenant]

    def uses(self) -> list[SlotUse]:
        """The use of every tenant that has a slot or a quota, by tag."""
        used = Counter({tenant: account.slots_used for tenant, account in self._accounts.items()})
        quotas = {tenant: share.slots for tenant, share in self._quota_shares.items()}
        if (move := self._moving) is not None:
            used[move.account.tenant] += move.account.slots_used
            if not move.new.is_common:
                quotas[move.account.tenant] += move.owed
        return [
            SlotUse(tenant, used[tenant], quotas.get(tenant))
            for tenant in sorted(used.keys() | quotas.keys())
            if used[tenant] or tenant in quotas
        ]

    def set_quota(self, tenant: bytes, slots: int | None) -> None:
        """Give the tenant a share of this many slots, or change its size; None: it uses the common share. Raises
        `ConfigError`: the other quotas leave less than that.

        If the tenant had no share before, or has none from now on, its slots must be moved: move all of `to_move` and
        then call `end_move` before another quota is set. Slots beyond a share's size stay until they are evicted
        (`over`).
        """
        assert self._moving is None
        share = self._quota_shares.get(tenant)
        free = self.common.slots + (0 if share is None else share.slots)
        if slots is not None and slots > free:
            raise ConfigError(f"a quota of {slots} chunks, where the other quotas leave {free}")
        if share is None and slots is not None:
            share = self._quota_shares[tenant] = Share(partial(self._make_policy, max(1, slots)), 0)
            self._begin_move(tenant, self.common, share, slots)
        elif share is not None and slots is None:
            del self._quota_shares[tenant]
            self._begin_move(tenant, share, self.common, share.slots)
        elif share is not None and slots is not None:
            share.slots, self.common.slots = slots, free - slots
            self._note_over([share, self.common])

    def to_move(self) -> list[int]:
        """The slots of the tenant that is being moved. Called without the lock, because it examines every slot of the
        pool; slots that the tenant takes meanwhile are already in its new share."""
        account = None if self._moving is None else self._moving.account
        if account is None or not account.slots_used:
            return []
        return [slot for slot, owner in enumerate(self._account_at) if owner is account]

    def move(self, slot: int, key: ChunkKey | None) -> bool:
        """Move one of `to_move`. key: of the chunk there, if it can be found. False: the tenant has lost the slot."""
        move = self._moving
        assert move is not None
        account = self._account_at[slot]
        if account is not move.account:
            return False
        if key is not None:
            account.share.policy.removed(slot)
        self.took([slot], account.tenant)
        if key is not None:
            move.new.policy.added([key], [slot])
        self._transfer(1)
        return True

    def end_move(self) -> None:
        """Everything in `to_move` has been moved."""
        if self._moving is not None:
            self._transfer(self._moving.owed)
            self._note_over([self._moving.account.share, self._moving.new])
            self._moving = None

    def _begin_move(self, tenant: bytes, old: Share, new: Share, slots: int) -> None:
        account = self._accounts.pop(tenant, None) or _Account(tenant, old)
        self._moving = _Move(account, new, slots)
        self._transfer(max(0, old.slots - old.slots_used))

    def _transfer(self, slots: int) -> None:
        """Take up to this many slots from the size of the old share and add them to that of the new one."""
        move = self._moving
        assert move is not None
        moved = min(slots, move.owed)
        move.owed -= moved
        move.account.share.slots -= moved
        move.new.slots += moved

    def note_over(self) -> None:
        """Find the shares that exceed their size. For use after rare operations, because it examines all shares."""
        self._note_over([self.common, *self._quota_shares.values()])

    def _note_over(self, shares: Sequence[Share]) -> None:
        self.over.update(share for share in shares if share.slots_used > share.slots)

    # As an `EvictionPolicy`.

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for share, share_keys, share_slots in self._by_share(keys, slots):
            share.policy.added(share_keys, share_slots)

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        if keys and not slots:  # a miss, from which policies learn, too
            self.of(keys[0].tenant).policy.used(keys, slots)
            return
        for share, share_keys, share_slots in self._by_share_of_prompt(keys, slots):
            share.policy.used(share_keys, share_slots)

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for share, share_keys, share_slots in self._by_share_of_prompt(keys, slots):
            share.policy.extended(share_keys, share_slots)

    def turn_ended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for share, share_keys, share_slots in self._by_share_of_prompt(keys, slots):
            share.policy.turn_ended(share_keys, share_slots)

    def removed(self, slot: int) -> None:
        self.at(slot).policy.removed(slot)

    def victim(self) -> int | None:
        """A victim of any share. To make room for a chunk, use its share's policy instead."""
        shares = (self.common, *self._quota_shares.values())
        offers = (share.policy.victim() for share in shares if share.slots_used)
        return next((slot for slot in offers if slot is not None), None)

    def refuses(self, key: ChunkKey, *, is_last: bool) -> bool:
        return self.of(key.tenant).policy.refuses(key, is_last=is_last)

    def exclude(self, slot: int) -> None:
        self.at(slot).policy.exclude(slot)

    def reinsert(self, slots: Sequence[int]) -> None:
        if not self._quota_shares and self._moving is None:
            self.common.policy.reinsert(slots)
            return
        slots_by_share: dict[Share, list[int]] = {}
        for slot in slots:
            slots_by_share.setdefault(self.at(slot), []).append(slot)
        for share, share_slots in slots_by_share.items():
            share.policy.reinsert(share_slots)

    def _by_share_of_prompt(
        self, keys: Sequence[ChunkKey], slots: Sequence[int]
    ) -> list[tuple[Share, Sequence[ChunkKey], Sequence[int]]]:
        """Like `_by_share`. Policies do not see a prompt that has been moved in part, because none has it from its
        first chunk on.
        """
        parts = self._by_share(keys, slots)
        return parts if len(parts) == 1 or self._moving is None else []

    def _by_share(
        self, keys: Sequence[ChunkKey], slots: Sequence[int]
    ) -> list[tuple[Share, Sequence[ChunkKey], Sequence[int]]]:
        """The chunks of each share. A prompt belongs to one tenant, so to one share; other lists may span several."""
        if not self._quota_shares and self._moving is None:
            return [(self.common, keys, slots)]
        shares = {account.share for account in set(map(self._account_at.__getitem__, slots)) if account is not None}
        if len(shares) == 1:
            return [(shares.pop(), keys, slots)]
        by_share: dict[Share, tuple[list[ChunkKey], list[int]]] = {}
        for key, slot in zip(keys, slots, strict=False):
            share_keys, share_slots = by_share.setdefault(self.at(slot), ([], []))
            share_keys.append(key)
            share_slots.append(slot)
        return [(share, share_keys, share_slots) for share, (share_keys, share_slots) in by_share.items()]
