"""An engine over several nodes: a hit is what all of them hold, whatever is lost between them."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_connect.nodes import PATIENCE_S, RENEW_S, NodeAgent, NodesCache, RankShare, share_of
from kv_core.clock import HandClock
from kv_core.cost import Costs
from kv_core.coverage import ALL, STATE, ChunkShape, Coverage, longest_hit
from kv_core.errors import ConfigError
from kv_core.hashing import ChainScheme
from kv_core.keys import ChunkKey, KeySpace
from kv_core.service import CacheService, Ended, LoadFailed, LookupPlan
from kv_core.shape import ConnectShape, GroupShape
from kv_tiers.cache.local import LocalCache
from kv_tiers.pool.host_pool import HostPool

CHUNK_TOKENS = 4
SPACE = KeySpace("model", "revision", "float32", "format", 8, "sha256:4")
COVERAGES = [
    (ALL,),
    (ALL, ALL),
    (ALL, Coverage("window", 5)),
    (ALL, STATE),
    (Coverage("window", 9), STATE),
]


def prompt(chunks: int, shape: ChunkShape, branch: int = 0) -> list[ChunkKey]:
    digests = [bytes([branch, chunk]) * 16 for chunk in range(chunks)]
    return SPACE.keys(digests, groups=len(shape.groups), shards=shape.shards)


class World:
    """Nodes with a cache each, and what the engine carries between them."""

    def __init__(self, share: RankShare, coverages: tuple[Coverage, ...] = (ALL,), *, lease_s: float = 300.0) -> None:
        self.clock = HandClock()
        self.share = share
        self.lease_s = lease_s
        groups = tuple(GroupShape(CHUNK_TOKENS, coverage) for coverage in coverages)
        self.connect = ConnectShape(ChainScheme("sha256", CHUNK_TOKENS), SPACE, groups, share.shards)
        self.shape = self.connect.chunk
        self.on = [True] * share.nodes
        self.caches = [self.cache() for _ in range(share.nodes)]
        self.nodes = NodesCache(self.caches[0], share, groups=len(groups), clock=self.clock)
        self.agents = {node: self.agent(node) for node in range(1, share.nodes)}

    def cache(self) -> LocalCache:
        return LocalCache(HostPool.anonymous("test", 64, 256), clock=self.clock, lease_s=self.lease_s)

    def agent(self, node: int) -> NodeAgent:
        def served() -> tuple[CacheService, ConnectShape] | None:
            return (self.caches[node], self.connect) if self.on[node] else None

        return NodeAgent(replace(self.share, rank=node * self.share.ranks_here), served)

    def here(self, node: int, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those of the node's shards."""
        return [key for key in keys if key.shard in self.share.shards_at(node)]

    def store(self, node: int, keys: Sequence[ChunkKey]) -> None:
        cache = self.caches[node]
        for key in self.here(node, keys):
            cache.commit(cache.begin_store([key], "writer"))

    def lookup(self, keys: Sequence[ChunkKey], holder: str = "a", **more: Any) -> LookupPlan:
        return self.nodes.lookup(keys, holder, shape=self.shape, **more)

    def step(self, *, loses_plan: bool = False, loses_output: bool = False) -> int:
        """How many messages the nodes were sent."""
        messages = pickle.loads(pickle.dumps(self.nodes.take()))
        for agent in self.agents.values():
            if not loses_plan:
                agent.receive(messages)
            said = agent.take()
            if not loses_output:
                self.nodes.receive(pickle.loads(pickle.dumps(said)))
        return len(messages)

    def settled(self, keys: Sequence[ChunkKey], holder: str = "a", **more: Any) -> tuple[LookupPlan, int]:
        """The final plan, and the steps that it took."""
        for steps in range(100):
            plan = self.lookup(keys, holder, **more)
            if plan.ended is not Ended.PENDING:
                return plan, steps
            self.step()
        raise AssertionError("it never ends")

    def run(self, node: int, keys: Sequence[ChunkKey]) -> int:
        """The leading chunks that the node holds, of its shards."""
        stride = self.shape.keys_per_chunk // self.share.shards * len(self.share.shards_at(node))
        resident = set(self.caches[node].admin.resident_keys())
        held = [key in resident for key in self.here(node, keys)]
        return (held.index(False) if False in held else len(held)) // stride

    def leases(self) -> list[int]:
        return [cache.counts().read_leases for cache in self.caches]


TWO = share_of(0, 2, 8, nodes=2)


@dataclass
class Placed:
    share: RankShare
    coverages: tuple[Coverage, ...]
    held: list[list[bool]]  # by node, of every key of the prompt


@st.composite
def placed(draw: st.DrawFn) -> Placed:
    nodes, here = draw(st.sampled_from([(2, 1), (2, 2), (3, 1), (4, 1)]))
    ranks = nodes * here
    share = share_of(0, ranks, draw(st.sampled_from([1, ranks])), nodes=nodes)
    coverages = draw(st.sampled_from(COVERAGES))
    chunks = draw(st.integers(0, 7))
    mostly = st.sampled_from([True] * 5 + [False])
    keys = chunks * len(coverages) * share.shards
    return Placed(share, coverages, [draw(st.lists(mostly, min_size=keys, max_size=keys)) for _ in range(nodes)])


@given(placed())
@settings(max_examples=300, deadline=None)
def test_a_hit_is_the_longest_that_every_node_can_serve(case: Placed) -> None:
    world = World(case.share, case.coverages)
    keys = prompt(len(case.held[0]) // world.shape.keys_per_chunk, world.shape)
    at_all = [
        all(case.held[node][place] for node in range(case.share.nodes) if key.shard in case.share.shards_at(node))
        for place, key in enumerate(keys)
    ]
    for node, held in enumerate(case.held):
        world.store(node, [key for key, is_held in zip(keys, held, strict=True) if is_held])
    plan, _ = world.settled(keys)
    assert plan.chunks == longest_hit(at_all, world.shape)
    assert len(plan.tiers) == plan.chunks
    assert plan.prefix_chunks >= plan.chunks
    for node, cache in enumerate(world.caches):
        needed = world.here(node, [keys[place] for place in world.shape.needed_places(plan.chunks)])
        assert not isinstance(cache.load(needed, "worker"), LoadFailed)
        cache.end("worker")
    world.nodes.end("a")
    world.step()
    assert world.leases() == [0] * case.share.nodes


def test_what_this_node_does_not_have_is_a_miss_without_a_question() -> None:
    world = World(TWO)
    keys = prompt(4, world.shape)
    world.store(1, keys)
    assert world.lookup(keys).ended is Ended.ABSENT
    assert world.step() == 0


def test_what_does_not_pay_here_is_not_asked_elsewhere() -> None:
    world = World(TWO)
    keys = prompt(4, world.shape)
    for node in range(2):
        world.store(node, keys)
    plan = world.lookup(keys, costs=Costs(compute=(0.001, 0.0), load=(9.0, 0.0)))
    assert plan.choice is not None and (plan.chunks, plan.choice.chunks) == (4, 0)
    assert world.step() == 0


def test_a_hit_takes_one_step_and_its_leases_hold_on_every_node() -> None:
    world = World(TWO)
    keys = prompt(4, world.shape)
    for node in range(2):
        world.store(node, keys)
    plan, steps = world.settled(keys)
    assert (plan.chunks, plan.ended, steps) == (4, Ended.ALL_HELD, 1)
    assert world.leases() == [1, 1]
    # Waiting for blocks for longer than a lease: renewed at both, and at the other node not with every step.
    sent = 0
    for _ in range(100):
        world.clock.advance(5.0)
        assert world.nodes.renew("a")
        sent += world.step()
    assert world.leases() == [1, 1]
    assert sent == 500 / RENEW_S
    world.nodes.end("a")
    assert world.nodes.has_unsent
    world.step()
    assert world.leases() == [0, 0]


def test_a_short_lease_that_is_renewed_holds_on_every_node() -> None:
    world = World(TWO, lease_s=15.0)
    keys = prompt(4, world.shape)
    for node in range(2):
        world.store(node, keys)
    world.settled(keys)
    for _ in range(20):
        world.clock.advance(2.5)
        assert world.nodes.renew("a")
        world.step()
        assert world.leases() == [1, 1]


def test_a_promise_is_renewed_as_often_as_each_nodes_own_server_needs() -> None:
    """The nodes may have joined servers with other settings than the engine's, and than each other's."""
    world = World(TWO)
    world.lease_s = 15.0
    world.caches[1] = world.cache()
    keys = prompt(4, world.shape)
    for node in range(2):
        world.store(node, keys)
    world.settled(keys)
    assert (world.caches[0].lease_s, world.nodes.lease_s) == (300.0, 15.0)
    for _ in range(20):
        world.clock.advance(2.5)
        assert world.nodes.renew("a")
        world.step()
        assert world.leases() == [1, 1]


def test_a_promise_that_is_lost_elsewhere_is_looked_up_anew() -> None:
    world = World(TWO)
    keys = prompt(4, world.shape)
    for node in range(2):
        world.store(node, keys)
    world.settled(keys)
    world.caches[1] = world.cache()
    world.store(1, keys[:4])
    world.clock.advance(RENEW_S)
    assert world.nodes.renew("a")
    world.step()
    assert not world.nodes.renew("a")
    assert world.settled(keys)[0].chunks == 2


def test_a_node_that_is_off_has_nothing_and_one_that_is_silent_is_waited_for_once() -> None:
    world = World(TWO)
    keys = prompt(4, world.shape)
    for node in range(2):
        world.store(node, keys)
    world.on[1] = False
    assert world.settled(keys)[0].chunks == 0
    world.on[1] = True
    assert world.lookup(keys).ended is Ended.PENDING
    world.step(loses_plan=True)
    world.clock.advance(PATIENCE_S)
    assert world.lookup(keys) == LookupPlan("a", 0, Ended.REFUSED, ())
    assert world.lookup(keys, "b") == LookupPlan("b", 0, Ended.REFUSED, ())  # at once
    world.step()  # the question of b was sent all the same, and its answer ends the silence
    assert world.settled(keys, "c")[0].chunks == 4
    for holder in "abc":
        world.nodes.end(holder)
    world.step()
    assert world.leases() == [0, 0]


def test_an_agent_that_raises_has_nothing() -> None:
    """Its worker turns the cache off, and what was asked is refused, answered or not."""
    world = World(TWO)
    keys = prompt(4, world.shape)
    for node in range(2):
        world.store(node, keys)
    for holder in "ab":
        world.lookup(keys, holder)
    agent = world.agents[1]
    agent.receive(world.nodes.take())
    real = world.caches[1]
    world.caches[1] = object()  # type: ignore[call-overload]
    with pytest.raises(AttributeError):
        agent.take()
    world.caches[1] = real
    world.nodes.receive(agent.refuse_all())
    assert [world.lookup(keys, holder).chunks for holder in "ab"] == [0, 0]


def test_clearing_and_what_was_taken_or_ended_a_turn_reach_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(TWO)
    keys = prompt(4, world.shape)
    for node in range(2):
        lease = world.caches[node].begin_store(world.here(node, keys), "writer", hold_s=100.0)
        world.caches[node].commit(lease)
    assert [cache.holds.chunks for cache in world.caches] == [4, 4]
    world.nodes.received(keys)
    world.step()
    assert [cache.holds.chunks for cache in world.caches] == [0, 0]
    told: list[Sequence[ChunkKey]] = []
    for cache in world.caches:
        monkeypatch.setattr(cache, "turn_ended", told.append)
    world.nodes.turn_ended(keys)
    world.step()
    assert told == [world.here(node, keys) for node in range(2)]
    world.nodes.clear()
    world.step()
    assert [cache.counts().chunks_resident for cache in world.caches] == [0, 0]


@pytest.mark.parametrize(
    ("ranks", "heads", "stages", "nodes", "shards", "stores"),
    [
        (2, 8, 1, 2, [(0,), (1,)], [0, 1]),
        (2, 1, 1, 2, [(0,), (0,)], [0, 1]),  # MLA: each node has all, and stores it
        (4, 1, 1, 2, [(0,), (0,)], [0, 2]),
        (4, 2, 1, 2, [(0,), (1,)], [0, 2]),
        (4, 8, 1, 2, [(0, 1), (2, 3)], [0, 1, 2, 3]),
        (2, 8, 2, 2, [(0, 1), (2, 3)], [0, 1, 2, 3]),  # a stage a node
        (4, 8, 2, 4, [(0, 1), (2, 3), (4, 5), (6, 7)], list(range(8))),
        (1, 8, 2, 2, [(0,), (1,)], [0, 1]),
    ],
)
def test_which_node_has_and_stores_which_shards(
    ranks: int, heads: int, stages: int, nodes: int, shards: list[tuple[int, ...]], stores: list[int]
) -> None:
    shares = [
        share_of(rank, ranks, heads, stage=stage, stages=stages, nodes=nodes)
        for stage in range(stages)
        for rank in range(ranks)
    ]
    assert [share.rank for share in shares] == list(range(ranks * stages))
    assert [shares[0].shards_at(node) for node in range(nodes)] == shards
    assert [share.rank for share in shares if share.stores] == stores
    assert [share.rank for share in shares if share.is_first_here] == list(range(0, len(shares), shares[0].ranks_here))
    for node in range(nodes):
        assert {share.shard for share in shares if share.stores and share.node == node} == set(shards[node])
    with pytest.raises(ConfigError, match="cannot be spread evenly over"):
        share_of(0, ranks, heads, stages=stages, nodes=nodes + 7)


class Nodes(RuleBasedStateMachine):
    """Messages are lost either way, nodes lose chunks, start anew or go off, and time passes.

    The model: for every open lookup the most and the least that each node has held since it began.
    """

    HOLDERS = st.sampled_from("ab")
    PROMPTS = st.sampled_from([0, 1])

    def __init__(self) -> None:
        super().__init__()
        self.world = World(TWO, lease_s=1e9)
        self.prompts = [prompt(4, self.world.shape, branch) for branch in range(2)]
        self.open: dict[str, int] = {}
        self.seen: dict[str, list[list[int]]] = {}
        self.since_s: dict[str, float] = {}
        self.was_lost = False
        self.has_waited = False  # as long as a node is waited for

    def now(self, branch: int) -> list[int]:
        return [self.world.run(node, self.prompts[branch]) if self.world.on[node] else 0 for node in range(2)]

    @rule(node=st.integers(0, 1), branch=PROMPTS, chunks=st.integers(1, 4))
    def store(self, node: int, branch: int, chunks: int) -> None:
        self.world.store(node, self.prompts[branch][: chunks * self.world.shape.keys_per_chunk])

    @rule(node=st.integers(0, 1), branch=PROMPTS, chunk=st.integers(0, 3))
    def leaves(self, node: int, branch: int, chunk: int) -> None:
        key = self.prompts[branch][chunk * 2]
        self.world.caches[node].forget([key, self.prompts[branch][chunk * 2 + 1]])

    @rule()
    def starts_anew(self) -> None:
        self.world.caches[1] = self.world.cache()

    @rule()
    def goes_off_or_on(self) -> None:
        self.was_lost = True  # what is said while it is off
        self.world.on[1] = not self.world.on[1]

    @rule(plan=st.booleans(), output=st.booleans())
    def steps(self, plan: bool, output: bool) -> None:
        self.was_lost = self.was_lost or plan or output
        self.world.step(loses_plan=plan, loses_output=output)

    @rule(seconds=st.sampled_from([1.0, RENEW_S, PATIENCE_S]))
    def passes(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule(holder=HOLDERS, branch=PROMPTS)
    def looks_up(self, holder: str, branch: int) -> None:
        if self.open.get(holder, branch) != branch:
            return self.ends(holder)
        if holder not in self.open:
            self.open[holder], self.seen[holder] = branch, [self.now(branch)]
            self.since_s[holder] = self.world.clock.now_s()
        was_silent = bool(self.world.nodes._silent)
        plan = self.world.lookup(self.prompts[branch], holder)
        if plan.ended is Ended.PENDING:
            assert self.world.clock.now_s() - self.since_s[holder] < PATIENCE_S
            return None
        seen = self.seen.pop(holder)
        most = min(max(at[node] for at in seen) for node in range(2))
        assert plan.chunks <= most
        waited_s = self.world.clock.now_s() - self.since_s[holder]
        self.has_waited = self.has_waited or waited_s >= PATIENCE_S
        # Without a step in all that time no node could answer, and until it does, no other lookup waits for it either.
        is_given_up = plan.ended is Ended.REFUSED and (waited_s >= PATIENCE_S or was_silent)
        if not self.was_lost and not is_given_up:
            assert plan.chunks >= min(min(at[node] for at in seen) for node in range(2))
        if plan.chunks:
            self.world.nodes.renew(holder)
        self.ends(holder)
        return None

    @rule(holder=HOLDERS)
    def ends(self, holder: str) -> None:
        self.open.pop(holder, None)
        self.seen.pop(holder, None)
        self.world.nodes.end(holder)

    @precondition(lambda self: not self.open)
    @rule()
    def is_at_rest(self) -> None:
        """What a lost message left leased ends with its time."""
        while self.world.nodes.has_unsent:
            self.world.step()
        if not self.was_lost and all(self.world.on):
            assert self.world.leases() == [0, 0]

    @invariant()
    def no_node_is_given_up_early(self) -> None:
        assert self.has_waited or not self.world.nodes._silent

    @invariant()
    def look(self) -> None:
        for holder, seen in self.seen.items():
            seen.append(self.now(self.open[holder]))


def test_a_node_that_one_lookup_gave_up_is_not_waited_for_by_the_next() -> None:
    """Found by the state machine, which took it for a miss of what both nodes hold."""
    state = Nodes()
    state.store(branch=0, chunks=1, node=1)
    state.store(branch=1, chunks=1, node=0)
    state.looks_up(branch=1, holder="b")
    state.passes(seconds=PATIENCE_S)
    state.looks_up(branch=1, holder="b")
    state.store(branch=0, chunks=1, node=0)
    state.looks_up(branch=0, holder="a")
    assert not state.open
    for _ in range(2):  # the question is sent all the same, and its answer ends the silence
        state.steps(plan=False, output=False)
        state.looks_up(branch=0, holder="a")
    assert not state.open and not state.world.nodes._silent
    state.is_at_rest()


TestNodes = Nodes.TestCase
TestNodes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
