"""Every policy keeps the contract of `EvictionPolicy`; the simple ones act like slow and obvious models."""

import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core import plugins
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_eviction import POLICY_NAMES, EvictionPolicy, LruPolicy, make_policy
from kv_eviction.arc import ArcPolicy
from kv_eviction.prefix import PrefixPolicy
from kv_eviction.prefix.returns import Returns, class_of, growth_of
from kv_eviction.prefix.segments import Rule
from kv_eviction.simple import LfuPolicy
from kv_eviction.testing import PolicyContract
from kv_observe.sim import Served, TierPlan, optimum, simulate
from kv_observe.trace_file import Trace, read_trace
from kv_tiers import HostConfig
from kv_tiers.cache.local import LocalCache
from kv_tiers.options import read_options
from kv_tiers.pool.host_pool import HostPool

TRACES = Path(__file__).parents[3] / "benchmarks/traces"


class TestLru(PolicyContract):
    def make(self) -> EvictionPolicy:
        return LruPolicy()

    def test_the_oldest_use_leaves_first(self) -> None:
        policy = self.make()
        first, second = key_chain(2, branch="first"), key_chain(2, branch="second")
        policy.added(first, [0, 1])
        policy.added(second, [2, 3])
        policy.used(first, [0, 1])
        assert self.drained(policy) == [3, 2, 1, 0]

    def test_what_is_reinserted_was_used_last(self) -> None:
        policy = self.filled(3)
        policy.exclude(2)
        policy.reinsert([2])
        assert self.drained(policy) == [1, 0, 2]


class TestArc(PolicyContract):
    def make(self) -> EvictionPolicy:
        return make_policy("arc", 6)


class TestLfu(PolicyContract):
    def make(self) -> EvictionPolicy:
        return make_policy("lfu", 6)

    def test_hits_leave_nothing_behind(self) -> None:
        policy = LfuPolicy()
        often, once = key_chain(2, branch="often"), key_chain(2, branch="once")
        policy.added([*often, *once], range(4))
        for _ in range(1000):
            policy.used(often, [0, 1])
            assert policy.victim() == 3
        assert len(policy._counts) == len(policy._in_heap) < 100
        assert self.drained(policy) == [3, 2, 1, 0]


class TestFifo(PolicyContract):
    def make(self) -> EvictionPolicy:
        return make_policy("fifo", 6)


class TestMru(PolicyContract):
    def make(self) -> EvictionPolicy:
        return make_policy("mru", 6)


class TestPrefix(PolicyContract):
    def make(self) -> EvictionPolicy:
        return make_policy("prefix", 6)

    def test_chunks_of_an_earlier_process_are_joined_when_they_are_asked_for(self) -> None:
        policy = self.make()
        stem, branch = key_chain(4), key_chain(2, branch="other")
        for slot, key in [(4, branch[0]), (5, branch[1]), (3, stem[3]), (2, stem[2]), (1, stem[1]), (0, stem[0])]:
            policy.added([key], [slot])
        policy.used(stem, [0, 1, 2, 3])
        policy.used([*stem[:2], *branch], [0, 1, 4, 5])
        order = self.drained(policy)
        assert [slot for slot in order if slot < 4] == [3, 2, 1, 0]
        assert [slot for slot in order if slot not in (2, 3)] == [5, 4, 1, 0]

    def test_a_forgotten_head_that_comes_back_leaves_after_its_tail(self) -> None:
        policy = self.filled(4)
        keys = key_chain(4)
        policy.extended(keys, [0, 1, 2, 3])
        policy.removed(1)
        policy.added([keys[1]], [5])
        policy.extended(keys, [0, 5, 2, 3])
        policy.used(keys, [0, 5, 2, 3])
        assert self.drained(policy) == [3, 2, 5, 0]


class _OfOthers:
    """What the entry point below names: a policy with one parameter."""

    @staticmethod
    def make(capacity_chunks: int, parameters: Mapping[str, object]) -> EvictionPolicy:
        if set(parameters) - {"seed"}:
            raise ConfigError(f"theirs: there is no parameter {min(parameters)}")
        return LruPolicy()


def test_a_policy_of_another_package_gets_the_parameters_that_settings_give(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = EntryPoints([EntryPoint("theirs", "their_policies:OfOthers.make", "kv_eviction.policies")])
    monkeypatch.setattr(plugins, "entry_points", lambda group: offered.select(group=group))
    monkeypatch.setitem(sys.modules, "their_policies", SimpleNamespace(OfOthers=_OfOthers))
    host = read_options(HostConfig, {"capacity_bytes": "1MiB", "policy": {"name": "theirs", "seed": 1}}, "host")
    assert isinstance(make_policy(host.policy, 8), LruPolicy)
    assert isinstance(make_policy("theirs", 8), LruPolicy)
    with pytest.raises(ConfigError, match="theirs: there is no parameter sed"):
        make_policy({"name": "theirs", "sed": 1}, 8)
    with pytest.raises(ConfigError, match="'their'; did you mean 'theirs'"):
        make_policy("their", 8)
    with pytest.raises(ConfigError, match="'lru' has no parameters; leave out seed"):
        make_policy({"name": "lru", "seed": 1}, 8)
    with pytest.raises(ConfigError, match="say its name"):
        make_policy({"seed": 1}, 8)


def test_a_name_that_is_none_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'prefx'; did you mean 'prefix'"):
        make_policy("prefx", 8)
    with pytest.raises(ConfigError, match="there are arc, "):
        make_policy("", 8)


def prompts_of(shapes: list[tuple[int, int, int]]) -> list[list[ChunkKey]]:
    """From each shape a stem, how much of it, and how much of a branch of its own."""
    return [
        [*key_chain(5, branch=f"s{stem}")[:shared], *key_chain(own, branch=f"s{stem}-{shared}-{own}")]
        for stem, shared, own in shapes
    ]


some_prompts = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=40
).map(prompts_of)


EVERY_ORDER = (*POLICY_NAMES, *(f"prefix by {rule.name}" for rule in Rule))


def make_order(name: str, capacity_chunks: int) -> EvictionPolicy:
    """A policy, of which the prefix policy may follow a rule that so small a tier would not come to by itself."""
    if not name.startswith("prefix by "):
        return make_policy(name, capacity_chunks)
    policy = PrefixPolicy(capacity_chunks)
    policy.order.rule = Rule[name.removeprefix("prefix by ")]
    return policy


class Bench:
    """A tier of nothing but keys that drives a policy as the cache does, and shows every victim before it goes."""

    def __init__(
        self, policy: EvictionPolicy, slots: int, see: Callable[["Bench", int], None], *, asks: bool = True
    ) -> None:
        """asks: whether the policy may refuse chunks."""
        self.policy, self.see, self.asks = policy, see, asks
        self.free = list(range(slots))
        self.slot_of: dict[ChunkKey, int] = {}
        self.key_at: dict[int, ChunkKey] = {}
        self.parent: dict[ChunkKey, ChunkKey | None] = {}
        self.excluded: set[int] = set()

    def ask(self, prompt: list[ChunkKey]) -> list[int]:
        hits = []
        for key in prompt:
            if key not in self.slot_of:
                break
            hits.append(self.slot_of[key])
        self.policy.used(prompt, hits)
        return hits

    def store(self, prompt: list[ChunkKey]) -> None:
        self.parent.update(zip(prompt, [None, *prompt], strict=False))
        own = self.extend(prompt)
        self.excluded = set()
        keys, slots = [], []
        for key in prompt:
            if key in self.slot_of:
                continue
            if (slot := self.free.pop() if self.free else self.evict(own, key, is_last=key == prompt[-1])) is None:
                break
            keys.append(key)
            slots.append(slot)
        self.policy.reinsert([slot for slot in own if slot in self.excluded])
        self.excluded = set()
        if keys:
            self.slot_of.update(zip(keys, slots, strict=True))
            self.key_at.update(zip(slots, keys, strict=True))
            self.policy.added(keys, slots)
            self.extend(prompt)

    def extend(self, prompt: list[ChunkKey]) -> list[int]:
        keys = [key for key in prompt if key in self.slot_of]
        slots = [self.slot_of[key] for key in keys]
        if slots:
            self.policy.extended(keys, slots)
        return slots

    def end_turn(self, prompt: list[ChunkKey]) -> None:
        self.policy.turn_ended(prompt, [self.slot_of[key] for key in prompt if key in self.slot_of])

    def restart(self, policy: EvictionPolicy) -> None:
        """Have a new policy adopt what is here, one by one as from a named pool."""
        self.policy = policy
        for slot in sorted(self.key_at, reverse=True):
            policy.added([self.key_at[slot]], [slot])

    def evict(self, own: list[int], key: ChunkKey, *, is_last: bool) -> int | None:
        while (slot := self.policy.victim()) is not None:
            if slot not in own:
                if self.asks and self.policy.refuses(key, is_last=is_last):
                    return None
                self.see(self, slot)
                self.policy.removed(slot)
                del self.slot_of[self.key_at.pop(slot)]
                return slot
            self.policy.exclude(slot)
            self.excluded.add(slot)
        return None


def no_follower_is_left(bench: Bench, slot: int) -> None:
    key = bench.key_at[slot]
    assert all(bench.parent[other] != key for other in bench.slot_of)


@pytest.mark.parametrize("name", EVERY_ORDER)
@given(prompts=some_prompts)
@settings(deadline=None, max_examples=60)
def test_no_head_leaves_before_its_tail(name: str, prompts: list[list[ChunkKey]]) -> None:
    bench = Bench(make_order(name, 12), 12, no_follower_is_left)
    for number, prompt in enumerate(prompts):
        bench.ask(prompt)
        bench.store(prompt[: len(prompt) // 2])
        bench.store(prompt)
        if number % 2:
            bench.end_turn(prompt)
    # Nothing is lost: what is resident can all be offered, once each.
    offered = []
    while (slot := bench.policy.victim()) is not None:
        offered.append(slot)
        bench.policy.removed(slot)
    assert sorted(offered) == sorted(bench.slot_of.values())


@pytest.mark.parametrize("name", EVERY_ORDER)
@given(prompts=some_prompts, forgotten=st.lists(st.integers(0, 11), max_size=40), restarts=st.sets(st.integers(0, 39)))
@settings(deadline=None, max_examples=100)
def test_chunks_forgotten_and_processes_restarted_confuse_nobody(
    name: str, prompts: list[list[ChunkKey]], forgotten: list[int], restarts: set[int]
) -> None:
    bench = Bench(make_order(name, 12), 12, lambda bench, slot: None)
    for number, prompt in enumerate(prompts):
        if number in restarts:
            bench.restart(make_order(name, 12))
        if number % 3:  # an engine that knows the prompt itself stores without asking
            bench.ask(prompt)
        bench.store(prompt)
        if forgotten and (slot := forgotten.pop()) in bench.key_at:
            bench.policy.removed(slot)
            del bench.slot_of[bench.key_at.pop(slot)]
            bench.free.append(slot)
        if number % 2:
            bench.end_turn(prompt)
    offered = []
    while (slot := bench.policy.victim()) is not None:
        offered.append(slot)
        bench.policy.removed(slot)
    assert sorted(offered) == sorted(bench.slot_of.values())


class Model:
    """Stamps on every resident chunk, searched from end to end."""

    def __init__(self, name: str) -> None:
        self.name, self.now = name, 0
        self.stamp: dict[int, int] = {}
        self.uses: dict[int, int] = {}

    def touch(self, slots: list[int], tail_youngest: bool = False) -> None:
        for slot in slots if tail_youngest else reversed(slots):
            self.now += 1
            self.stamp[slot] = self.now

    def choose(self, slots: set[int]) -> int:
        if self.name == "mru":
            return max(slots, key=self.stamp.__getitem__)
        if self.name == "lfu":
            return min(slots, key=lambda slot: (self.uses[slot], self.stamp[slot]))
        return min(slots, key=self.stamp.__getitem__)


@pytest.mark.parametrize("name", ["lru", "fifo", "lfu", "mru"])
@given(chains=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=40))
@settings(deadline=None, max_examples=60)
def test_simple_policies_act_like_their_slow_models(name: str, chains: list[tuple[int, int]]) -> None:
    """Chains share nothing here, so that what follows what does not matter; the order within a chain does."""
    policy, model = make_policy(name, 24), Model(name)
    for chain, event in chains:
        slots, keys = list(range(4 * chain, 4 * chain + 4)), key_chain(4, branch=str(chain))
        resident = set(slots) <= set(model.stamp)
        if event == 0 and not any(slot in model.stamp for slot in slots):
            policy.added(keys, slots)
            policy.extended(keys, slots)
            model.uses.update(dict.fromkeys(slots, 0))
            model.touch(slots, name == "mru")
        elif event == 1 and resident:
            policy.used(keys, slots)
            for slot in slots:
                model.uses[slot] += 1
            if name != "fifo":
                model.touch(slots, name == "mru")
        elif event == 2 and model.stamp:
            slot = policy.victim()
            assert slot == model.choose(set(model.stamp))
            policy.removed(slot)
            del model.stamp[slot]
        elif event == 3 and resident:
            policy.extended(keys, slots)  # the request stores nothing new
            if name != "fifo":
                model.touch(slots, name == "mru")


class SlowArc:
    """The paper's algorithm over lists, the oldest first, for chunks of one-chunk prompts."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def ask(self, key: int) -> None:
        if key in self.t1 or key in self.t2:
            (self.t1 if key in self.t1 else self.t2).remove(key)
            self.t2.append(key)
            return
        if len(self.t1) + len(self.t2) == self.c:
            self.replace()
        if key in self.b1:
            self.p = min(self.c, self.p + max(1.0, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            self.t2.append(key)
        else:
            self.t1.append(key)

    def replace(self) -> None:
        first = bool(self.t1) and (len(self.t1) > self.p or not self.t2)
        gone = (self.t1 if first else self.t2).pop(0)
        (self.b1 if first else self.b2).append(gone)
        while self.b1 and len(self.t1) + len(self.b1) > self.c:
            self.b1.pop(0)
        while self.b2 and len(self.b1) + len(self.b2) > self.c:
            self.b2.pop(0)


@given(asked=st.lists(st.integers(0, 11), max_size=120), capacity=st.integers(1, 6))
@settings(deadline=None)
def test_arc_acts_like_the_paper(asked: list[int], capacity: int) -> None:
    bench = Bench(ArcPolicy(capacity), capacity, no_follower_is_left)
    slow = SlowArc(capacity)
    for number in asked:
        prompt = key_chain(1, branch=str(number))
        bench.ask(prompt)
        bench.store(prompt)
        slow.ask(number)
        assert set(bench.slot_of) == {key_chain(1, branch=str(n))[0] for n in slow.t1 + slow.t2}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_prompt_stored_in_pieces_is_no_sign_of_use(name: str) -> None:
    """Its pieces are many calls about the head; one who comes back is one."""
    policy = make_policy(name, 8)
    pieces, back = key_chain(4, branch="pieces"), key_chain(4, branch="back")
    policy.added(back, [4, 5, 6, 7])
    policy.extended(back, [4, 5, 6, 7])
    policy.used(back, [4, 5, 6, 7])
    for chunks in range(1, 5):
        policy.added(pieces[chunks - 1 : chunks], [chunks - 1])
        policy.extended(pieces[:chunks], list(range(chunks)))
    if name in ("lfu", "arc"):
        assert policy.victim() == 3
    order = []
    while (slot := policy.victim()) is not None:
        order.append(slot)
        policy.removed(slot)
    assert [slot for slot in order if slot < 4] == [3, 2, 1, 0]


def test_the_life_table_learns_who_returns() -> None:
    """One class returns when it is 30 old, the other never: what keeping them is worth must come to say so."""
    returns = Returns(100)
    grown, alone = growth_of(20, continues=True), growth_of(20, continues=False)
    returning = [key_chain(1, branch=f"returns {number}")[0] for number in range(600)]
    never = [key_chain(1, branch=f"never {number}")[0] for number in range(600)]
    for turn in range(600):
        now = 10 * turn
        if turn >= 3:
            returns.requested([returning[turn - 3]], grown, now, has_end=False)
        returns.requested([returning[turn]], grown, now, has_end=False)
        returns.requested([never[turn]], alone, now, has_end=False)
    first, lost = class_of(1, grown), class_of(1, alone)
    assert returns.worth(first, 10) > 20 * returns.worth(lost, 10)
    assert returns.worth(first, 10) > 5 * returns.worth(first, 60)


@pytest.mark.parametrize(("times", "passes_learning"), [(1.2, 3), (1.8, 3), (3.0, 5)])
def test_a_loop_that_is_longer_than_the_tier_keeps_what_fits(times: float, passes_learning: int) -> None:
    """LRU finds nothing of it, ever."""
    capacity, length = 256, 8
    prompts = [key_chain(length, branch=str(number)) for number in range(int(times * capacity / length))] * 12
    warm_up = passes_learning / 12
    served = simulate(prompts, [TierPlan("host", capacity, "prefix")], warm_up=warm_up)
    best = optimum(prompts, capacity, warm_up=warm_up)
    assert served.hit_ratio >= 0.8 * best.hit_ratio
    assert served.tiers[0].chunks_stored < 0.1 * served.chunks_asked, "what is worth less is not even stored"


def test_a_loop_that_has_been_learnt_keeps_what_it_holds() -> None:
    """Two rules learn it at once: the one that refuses has to lead."""
    capacity = 512
    prompts = [key_chain(8, branch=str(number)) for number in range(int(1.8 * capacity / 8))] * 4
    served = simulate(prompts, [TierPlan("host", capacity, "prefix")], warm_up=3 / 4)
    assert served.hit_ratio >= 0.95 * optimum(prompts, capacity, warm_up=3 / 4).hit_ratio


def test_what_is_new_is_stored_again_after_the_working_set_has_changed() -> None:
    """A tier that refuses must not freeze with what nobody requests any more."""
    loop = [key_chain(8, branch=str(number)) for number in range(64)] * 12
    later = [key_chain(8, branch=f"later {number}") for number in range(24)] * 20
    before = simulate(loop, [TierPlan("host", 256, "prefix")], warm_up=0.5)
    assert before.hit_ratio > 0.4, "it refuses by now"
    both = simulate([*loop, *later], [TierPlan("host", 256, "prefix")], warm_up=(len(loop) + 240) / len(loop + later))
    assert both.hit_ratio > 0.95


def test_it_learns_that_who_has_ended_a_turn_does_not_come_back_as_soon() -> None:
    """Two new sessions at a time, of which one calls a tool and comes back. Nothing else tells them apart."""
    prompts: list[list[ChunkKey]] = []
    ends: list[bool] = []
    for number in range(600):
        prompts += [key_chain(8, branch=f"tool {number}"), key_chain(8, branch=f"user {number}")]
        ends += [False, True]
        if number >= 26:
            prompts.append([*key_chain(8, branch=f"tool {number - 26}"), *key_chain(1, branch=f"answer {number}")])
            ends.append(True)
    plans = [TierPlan("host", 256, "prefix")]
    untold, told = simulate(prompts, plans), simulate(prompts, plans, turn_ends=ends)
    assert told.saved_ratio > 1.2 * untold.saved_ratio
    lru = [TierPlan("host", 256, "lru")]
    assert simulate(prompts, lru, turn_ends=ends).saved_s == simulate(prompts, lru).saved_s


def test_a_tier_that_cannot_refuse_is_never_ordered_by_refusing() -> None:
    policy = PrefixPolicy(256)
    bench = Bench(policy, 256, lambda bench, slot: None, asks=False)
    for prompt in [key_chain(8, branch=str(number)) for number in range(58)] * 12:
        bench.ask(prompt)
        bench.store(prompt)
    assert policy.rule is not Rule.REFUSE


def test_a_small_tier_stays_with_lru() -> None:
    """A loop, in which refusing saves most, tells too little with so few chunks."""
    policy = PrefixPolicy(64)
    bench = Bench(policy, 64, lambda bench, slot: None)
    for prompt in [key_chain(8, branch=str(number)) for number in range(12)] * 12:
        bench.ask(prompt)
        bench.store(prompt)
    assert policy.rule is Rule.LRU


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    paths = {"synthetic": "mooncake/synthetic_trace.jsonl.gz", "agents": "agents/agents_a.jsonl.gz"}
    return {name: read_trace(str(TRACES / path)) for name, path in paths.items()}


def serve(trace: Trace, share: float, policy: str, *, prompts: int | None = None) -> Served:
    """prompts: only so many."""
    return simulate(trace.prompts[:prompts], [TierPlan("host", int(share * trace.chunks_unique), policy)])


@pytest.mark.parametrize(
    ("name", "share", "at_least"),
    [("synthetic", 0.05, 1.05), ("agents", 0.01, 1.15)],
)
@pytest.mark.slow
def test_prefix_saves_more_prefill_than_lru_and_arc_on_public_traces(
    traces: dict[str, Trace], name: str, share: float, at_least: float
) -> None:
    """The benchmark has all capacities of four traces, whole."""
    prompts = 1200 if name == "agents" else None
    lru, arc, ours = (
        serve(traces[name], share, policy, prompts=prompts).saved_ratio for policy in ("lru", "arc", "prefix")
    )
    assert ours > at_least * max(lru, arc)


def test_lru_and_arc_reach_on_a_public_trace_what_they_did(traces: dict[str, Trace]) -> None:
    assert serve(traces["synthetic"], 0.05, "lru").hit_ratio == pytest.approx(0.1808, abs=1e-4)
    assert serve(traces["synthetic"], 0.05, "arc").hit_ratio == pytest.approx(0.1869, abs=1e-4)


LEASED_AND_SPLIT = """
import random
from kv_core.testing import key_chain
from kv_eviction.prefix import PrefixPolicy
from kv_tiers.cache.local import LocalCache
from kv_tiers.pool.host_pool import HostPool

for seed in range(3):  # it took the second some hundred calls
    rng = random.Random(seed)
    cache = LocalCache(HostPool.anonymous("h", 100, 32), policy=PrefixPolicy(32))
    for _ in range(5000):
        keys = key_chain(rng.randint(1, 6), branch=str(rng.randrange(8)))
        match rng.randrange(6):
            case 0:
                cache.lookup(keys, f"r{rng.randrange(9)}")
            case 1:
                cache.load(keys, "l")
            case 2:
                cache.begin_store(keys, "left open")
                if rng.random() < 0.5:
                    cache.end("left open")
            case 3:
                for holder in [*(f"r{number}" for number in range(9)), "l", "left open"]:
                    cache.end(holder)
            case _:
                cache.commit(cache.begin_store(keys, "w"))
    cache.close()
"""


def test_prefix_finds_an_end_of_every_prompt_while_parts_of_it_are_leased() -> None:
    """A slot excluded at a split once made a segment its own ancestor, and a lookup went round for ever."""
    subprocess.run([sys.executable, "-c", LEASED_AND_SPLIT], check=True, timeout=60)


def test_prefix_offers_a_head_again_after_its_prompt_was_split_while_the_rest_was_leased() -> None:
    """A leased chunk is in no order, so the part of a split that has only leased ones is no reason to keep its head."""
    policy = make_policy("prefix", 32)
    prompt, other = key_chain(6), [*key_chain(5), *key_chain(3, branch="other")]
    policy.added(prompt, range(6))
    policy.extended(prompt, range(6))
    policy.used(prompt, range(6))
    for leased in (5, 4, 3):
        assert policy.victim() == leased
        policy.exclude(leased)
    policy.added(other[5:], [6, 7, 8])
    policy.extended(other, [0, 1, 2, 3, 4, 6, 7, 8])
    policy.reinsert([3, 4, 5])
    order = []
    while (slot := policy.victim()) is not None:
        order.append(slot)
        policy.removed(slot)
    assert sorted(order) == list(range(9))
    assert order[-5:] == [4, 3, 2, 1, 0], "both prompts need these"


@pytest.mark.parametrize("name", EVERY_ORDER)
def test_chunks_that_come_back_in_another_order_do_not_wait_for_each_other(name: str) -> None:
    """Leases of several holders end in the order of none of their prompts."""
    policy, keys = make_order(name, 8), key_chain(3)
    policy.added(keys, [5, 3, 1])
    policy.extended(keys, [5, 3, 1])
    for _ in range(3):
        leased = policy.victim()
        assert leased is not None
        policy.exclude(leased)
    policy.extended(keys, [5, 3, 1])
    policy.reinsert([1, 3, 5])
    policy.extended(keys, [5, 3, 1])
    order = []
    while (slot := policy.victim()) is not None:
        order.append(slot)
        policy.removed(slot)
    assert sorted(order) == [1, 3, 5]


@pytest.mark.parametrize("name", EVERY_ORDER)
def test_no_chunk_stays_for_good_because_parts_of_its_prompt_were_leased(name: str) -> None:
    """Each loses its turn while it is leased. Afterwards there is room for as many new chunks as there are slots."""
    for seed in range(20):
        rng = random.Random(seed)
        cache = LocalCache(HostPool.anonymous("h", 100, 32), policy=make_order(name, 32))
        for _ in range(200):
            branch = rng.randrange(6)
            stem = key_chain(3, branch=f"stem {branch % 3}")[: rng.randint(0, 3)]
            keys = [*stem, *key_chain(rng.randint(1, 5), branch=f"branch {branch}")]
            match rng.randrange(7):
                case 0 | 1:
                    cache.lookup(keys, f"r{rng.randrange(4)}")
                case 2:
                    cache.end(f"r{rng.randrange(4)}")
                case 3:
                    cache.forget([rng.choice(keys)])
                case _:
                    cache.commit(cache.begin_store(keys, "w"))
        for number in range(4):
            cache.end(f"r{number}")
        assert len(cache.begin_store(key_chain(32, branch="new"), "new").keys) == 32, f"seed {seed}"
        cache.close()
