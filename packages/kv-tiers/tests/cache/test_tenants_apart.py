"""What tenants can learn of each other: nothing that anyone does moves a chunk of a tenant with a quota."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_core.errors import ConfigError
from kv_core.keys import NO_TENANT, ChunkKey, tenant_tag
from kv_core.service import ReadLease, WriteLease
from kv_core.testing import key_chain
from kv_eviction import POLICY_NAMES
from kv_testing.service_contract import assert_adds_up
from kv_testing.tenants import ANN, BEN, SLOT, cache_of, store, used
from kv_testing.tower import Tower
from kv_tiers.cache.local import LocalCache

STEM = 3

steps = st.tuples(st.sampled_from(["store", "ask", "load"]), st.integers(0, 3), st.integers(1, 6))


def prompt(salt: str | None, branch: int, chunks: int) -> list[ChunkKey]:
    """Some share a stem."""
    stem = key_chain(min(STEM, chunks), branch=str(branch % 2), salt=salt)
    return [*stem, *key_chain(max(0, chunks - STEM), branch=f"tail {branch}", salt=salt)]


def walk(cache: LocalCache, salt: str | None, step: tuple[str, int, int]) -> int:
    verb, branch, chunks = step
    keys = prompt(salt, branch, chunks)
    if verb == "store":
        return store(cache, keys)
    if verb == "load":
        lease = cache.load(keys, "l")
        return len(lease.keys) if isinstance(lease, ReadLease) and cache.release(lease) else -1
    return cache.lookup(keys, f"holder {salt} {branch}").chunks  # and the promise stays until it asks again


@pytest.mark.parametrize("policy", POLICY_NAMES)
@given(
    mine=st.lists(steps, max_size=25),
    noise=st.lists(st.tuples(st.sampled_from(["ben", "cyd", None]), steps), max_size=60),
    chance=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=40)
def test_a_tenant_hits_what_it_would_hit_alone(policy: str, mine: list[Any], noise: list[Any], chance: Any) -> None:
    def answers(among: list[Any]) -> list[int]:
        cache = cache_of(12, {ANN: 5, BEN: 3}, policy=policy)
        left = list(among)
        said = []
        for step in mine:
            while left and chance.random() < 0.7:
                walk(cache, *left.pop())
            said.append(walk(cache, "ann", step))
        return said

    assert answers(noise) == answers([])


class CountingDict(dict[Any, Any]):
    asked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


def spy(wrapped: Any, seen: Counter[str]) -> Any:
    class Spy:
        def __getattr__(self, name: str) -> Any:
            found = getattr(wrapped, name)
            if not callable(found):
                return found

            def call(*args: Any) -> Any:
                seen[name] += 1
                return found(*args)

            return call

    return Spy()


@dataclass(frozen=True)
class Work:
    """All that one question made the cache do."""

    answer: Any
    probes: int
    policy: dict[str, int]
    tiers: list[list[str]]
    counts: dict[str, int]
    waits: int
    promotions: Any


def work_of(tower: Tower, keys: list[ChunkKey], seen: Counter[str], index: CountingDict) -> Work:
    for tier in tower.tiers:
        tier.calls.clear()
    seen.clear()
    index.asked = 0
    before = tower.cache.counts()
    plan = tower.fetch(keys, "r")
    promotions = tower.cache.lower.promotions
    waits = len(promotions._waits)
    tower.cache.end("r")
    after = tower.cache.counts()
    names = ("lookups", "chunks_asked", "chunks_hit", "slots_used", "chunks_resident", "read_leases", "chunks_evicted")
    return Work(
        (plan.chunks, plan.ended, plan.tiers),
        index.asked,
        dict(seen),
        [list(tier.calls) for tier in tower.tiers],
        {name: getattr(after, name) - getattr(before, name) for name in names},
        waits,
        (promotions.counts.requested, promotions.counts.arrived),
    )


@pytest.mark.parametrize("where", ["pool", "below"])
@pytest.mark.parametrize("quotas", [{}, {ANN: 6 * SLOT, BEN: 8 * SLOT}], ids=["no quotas", "quotas"])
def test_another_tenants_prompt_is_looked_up_exactly_like_one_that_nobody_has(
    where: str, quotas: dict[bytes, int]
) -> None:
    """Not the answer, not the probes of the index, not what the policy hears, not what tiers are asked: nothing tells
    a tenant that another has the same prompt."""
    tower = Tower("through", "through", slots=24, remote=[False, True], quotas=quotas)
    tower.store(key_chain(6, branch="theirs", salt="ben"))
    tower.store(key_chain(2, branch="mine", salt="ann"))
    tower.run()
    if where == "below":
        tower.store(key_chain(24, branch="crowd", salt="ben"))
        tower.store(key_chain(24, branch="crowd"))
        tower.run()
        assert tower.cache.lookup(key_chain(6, branch="theirs", salt="ben"), "s").chunks == 0
    seen: Counter[str] = Counter()
    residency = tower.cache._index
    residency._policy = spy(residency._policy, seen)
    residency._slot_of = index = CountingDict(residency._slot_of)
    cached_by_another = work_of(tower, key_chain(6, branch="theirs", salt="ann"), seen, index)
    cached_by_nobody = work_of(tower, key_chain(6, branch="never seen", salt="ann"), seen, index)
    assert cached_by_another == cached_by_nobody
    own = work_of(tower, key_chain(6, branch="theirs", salt="ben"), seen, index)
    assert own.answer[0] == 6
    assert own != cached_by_another  # what is counted would have told
    tower.close()


PEOPLE: tuple[str | None, ...] = ("ann", "ben", "cyd", None)

POOL = 10

people = st.sampled_from(PEOPLE)

prompts = st.builds(prompt, people, st.integers(0, 3), st.integers(1, 6))


class TenantsMachine(RuleBasedStateMachine):
    """What each call may change, and what must hold after every one."""

    policy = "lru"

    @initialize()
    def start(self) -> None:
        self.cache = cache_of(POOL, policy=self.policy)
        self.quotas: dict[bytes, int] = {}
        self.writes: list[WriteLease] = []
        self.reads: list[ReadLease] = []
        self.void: set[int] = set()

    def resident(self) -> dict[bytes, set[ChunkKey]]:
        found: dict[bytes, set[ChunkKey]] = {}
        for key in self.cache.admin.resident_keys():
            found.setdefault(key.tenant, set()).add(key)
        return found

    def undisturbed(self, act: Callable[[], None], *tenants: bytes) -> None:
        """Nothing changes for tenants with a quota, but for these."""
        before = self.resident()
        act()
        after = self.resident()
        for tenant in self.quotas:
            if tenant not in tenants:
                assert after.get(tenant, set()) == before.get(tenant, set())

    @rule(keys=prompts)
    def store(self, keys: list[ChunkKey]) -> None:
        self.undisturbed(lambda: assert_stored(self.cache, keys), keys[0].tenant)

    @rule(keys=prompts)
    def begin(self, keys: list[ChunkKey]) -> None:
        self.undisturbed(lambda: self.writes.append(self.cache.begin_store(keys, "open")), keys[0].tenant)

    @rule(data=st.data(), whole=st.booleans())
    def finish(self, data: st.DataObject, whole: bool) -> None:
        if self.writes:
            lease = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
            own = {key.tenant for key in lease.keys}
            if whole:
                self.undisturbed(lambda: self.cache.commit(lease), *own)
            else:
                self.undisturbed(lambda: assert_true(self.cache.release(lease)), *own)

    @rule(keys=prompts, name=st.sampled_from("abc"))
    def ask(self, keys: list[ChunkKey], name: str) -> None:
        # The promise before ends, and it was perhaps the last that kept another tenant above its quota.
        over = self.over()
        self.undisturbed(lambda: assert_prefix(self.cache.lookup(keys, name).chunks, keys), *over)

    @rule(keys=prompts)
    def load(self, keys: list[ChunkKey]) -> None:
        lease = self.cache.load(keys, "l")
        if isinstance(lease, ReadLease):
            self.reads.append(lease)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.reads:
            lease = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
            good = lease.id not in self.void
            self.undisturbed(lambda: assert_true(self.cache.release(lease) == good), *self.over())

    @rule(name=st.sampled_from("abc"))
    def end(self, name: str) -> None:
        self.undisturbed(lambda: self.cache.end(name), *self.over())

    @rule(keys=prompts, name=st.sampled_from("pq"))
    def pin(self, keys: list[ChunkKey], name: str) -> None:
        self.undisturbed(lambda: assert_prefix(self.cache.admin.pin(keys, name), keys), *self.over())

    @rule(name=st.sampled_from("pq"))
    def unpin(self, name: str) -> None:
        self.undisturbed(lambda: assert_bool(self.cache.admin.unpin(name)), *self.over())

    @rule(keys=prompts)
    def retain(self, keys: list[ChunkKey]) -> None:
        self.undisturbed(lambda: assert_prefix(self.cache.admin.retain(keys, 3600.0), keys), *self.over())

    @rule(keys=prompts, with_store=st.booleans())
    def demote(self, keys: list[ChunkKey], with_store: bool) -> None:
        def stored() -> None:
            self.cache.commit(self.cache.begin_store(keys, "w", leaves_first=True))

        admin = self.cache.admin
        self.undisturbed(stored if with_store else lambda: assert_prefix(admin.demote(keys), keys), keys[0].tenant)

    @rule(keys=prompts)
    def forget(self, keys: list[ChunkKey]) -> None:
        self.void |= {lease.id for lease in self.reads if not set(keys).isdisjoint(lease.keys)}
        self.undisturbed(lambda: self.cache.forget(keys), keys[0].tenant)

    @rule(who=people)
    def clear(self, who: str | None) -> None:
        tenant = tenant_tag(who)
        self.void |= {lease.id for lease in self.reads if any(key.tenant == tenant for key in lease.keys)}
        held = len(self.resident().get(tenant, set()))
        self.undisturbed(lambda: assert_true(self.cache.admin.clear_tenant(tenant) == held), tenant)
        assert tenant not in self.resident()

    @rule(who=people, chunks=st.none() | st.integers(0, POOL))
    def set_quota(self, who: str | None, chunks: int | None) -> None:
        tenant = tenant_tag(who)
        others = sum(quota for one, quota in self.quotas.items() if one != tenant)
        nbytes = None if chunks is None else chunks * SLOT
        before = self.cache.admin.tenants(), self.resident()
        if chunks is not None and others + chunks > POOL:
            with pytest.raises(ConfigError):
                self.cache.admin.set_quota(tenant, nbytes)
            assert (self.cache.admin.tenants(), self.resident()) == before
            return
        self.undisturbed(lambda: self.cache.admin.set_quota(tenant, nbytes), tenant)
        self.quotas.pop(tenant, None)
        if chunks is not None:
            self.quotas[tenant] = chunks

    def over(self) -> list[bytes]:
        return [use.tenant for use in self.cache.admin.tenants() if use.chunks > self.quotas.get(use.tenant, POOL)]

    @invariant()
    def accounts_add_up(self) -> None:
        uses = {use.tenant: use for use in self.cache.admin.tenants()}
        assert_adds_up(self.cache.counts())
        assert sum(use.chunks for use in uses.values()) == self.cache.counts().slots_used
        resident = self.resident()
        assert uses.keys() >= resident.keys() | self.quotas.keys()
        for tenant, use in uses.items():
            assert use.chunks >= len(resident.get(tenant, ()))
            assert use.quota_bytes == (self.quotas[tenant] * SLOT if tenant in self.quotas else None)

    @invariant()
    def nobody_has_more_than_its_quota_but_what_is_in_use(self) -> None:
        uses = {use.tenant: use.chunks for use in self.cache.admin.tenants()}
        index = self.cache._index
        limits = {(tenant,): quota for tenant, quota in self.quotas.items()}
        common = tuple(tenant for tenant in uses if tenant not in self.quotas)
        limits[common] = POOL - sum(self.quotas.values())
        for tenants, limit in limits.items():
            if sum(uses[tenant] for tenant in tenants) > limit:
                for key in self.cache.admin.resident_keys():
                    slot = index.find(key)
                    assert key.tenant not in tenants or (slot is not None and index.is_leased(slot))

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for name in (*"abc", "l", "open", "w"):
            self.cache.end(name)
        for name in "pq":
            self.cache.admin.unpin(name)
        self.cache.holds.expire(inf)
        self.nobody_has_more_than_its_quota_but_what_is_in_use()
        assert not self.over()
        assert not any(self.cache._index._leases)
        for tenant in list(self.quotas):
            self.cache.admin.set_quota(tenant, None)
        assert store(self.cache, key_chain(POOL, branch="all")) == POOL  # no slot was lost
        assert used(self.cache) == {NO_TENANT: POOL}
        self.cache.close()


def assert_stored(cache: LocalCache, keys: list[ChunkKey]) -> None:
    assert store(cache, keys) <= len(keys)


def assert_prefix(chunks: int, keys: list[ChunkKey]) -> None:
    assert 0 <= chunks <= len(keys)


def assert_true(said: bool) -> None:
    assert said is True


def assert_bool(said: bool) -> None:
    assert isinstance(said, bool)


class PrefixTenantsMachine(TenantsMachine):
    policy = "prefix"


class ArcTenantsMachine(TenantsMachine):
    policy = "arc"


TestTenantsInAnyOrder = TenantsMachine.TestCase

TestTenantsInAnyOrder.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)

TestPrefixTenantsInAnyOrder = pytest.mark.slow(PrefixTenantsMachine.TestCase)

TestPrefixTenantsInAnyOrder.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)

TestArcTenantsInAnyOrder = pytest.mark.slow(ArcTenantsMachine.TestCase)

TestArcTenantsInAnyOrder.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
