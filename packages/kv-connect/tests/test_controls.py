"""What a request asks for itself, as the scheduler half goes by it."""

from collections.abc import Sequence

import pytest
from kv_connect.halves.request import RequestTokens, Scheduled
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.step import StepPlan
from kv_connect.halves.worker import WorkerHalf
from kv_connect.request_options import Controls
from kv_core.hashing import ChainScheme
from kv_core.keys import ChunkKey, KeySpace
from kv_core.sequence import KeySequence
from kv_core.service import Ended, LookupPlan
from kv_core.shape import ConnectShape, GroupShape
from kv_testing.connect import DictCopier, DictService

BLOCK, CHUNK = 2, 4
SPACE = KeySpace("model", "r1", "float32", "f", 1, f"sha256:{CHUNK}")
SHAPE = ConnectShape(ChainScheme(chunk_tokens=CHUNK), SPACE, (GroupShape(BLOCK),))
PROMPT = list(range(1, 18))  # four chunks and a token


class Halves:
    def __init__(self) -> None:
        self.service, self.copier = DictService(), DictCopier()
        self.scheduler = SchedulerHalf(self.service, SHAPE, name="e")
        self.worker = WorkerHalf(self.service, SHAPE, [self.copier], shard=0, name="e")
        self.requests = 0

    def run(self, controls: Controls, tokens: Sequence[int] = PROMPT, *, computed: int = 0) -> int:
        """Match a prompt, compute the rest, store what may be; how many tokens were offered."""
        self.requests += 1
        request = RequestTokens(f"r{self.requests}", tokens, keep_tokens=len(tokens), controls=controls)
        offered = self.scheduler.match(request, computed)
        assert offered is not None
        if offered:
            return self.give_back(request, offered)
        self.scheduler.allocated(request.request_id, 0, ())
        blocks = range(100, 100 + -(-len(tokens) // BLOCK))
        slots = {blocks[0] * BLOCK + at: ("kv", *tokens[: at + 1]) for at in range(len(tokens))}
        self.copier.slots.update(slots)
        plan = self.scheduler.build_step([Scheduled(request, len(tokens), (blocks,))])
        self.worker.stores.start(StepPlan.from_plain(plan.to_plain()))
        self.worker.stores.finish()
        self.scheduler.finished(request.request_id)
        assert self.scheduler.tracked_phases() == {} and self.service.promised == {}
        return 0

    def give_back(self, request: RequestTokens, offered: int) -> int:
        self.scheduler.finished(request.request_id)
        assert self.service.promised == {}
        return offered


@pytest.fixture
def halves() -> Halves:
    return Halves()


def test_a_request_that_may_not_store_leaves_nothing(halves: Halves) -> None:
    halves.run(Controls(store=False))
    assert halves.service.held == {}
    halves.run(Controls())
    assert len(halves.service.held) == 4


def test_a_request_that_may_not_load_is_not_looked_up(halves: Halves) -> None:
    halves.run(Controls())
    before = halves.scheduler.counts.lookups
    assert halves.run(Controls(load=False)) == 0
    assert halves.scheduler.counts.lookups == before
    assert halves.run(Controls()) == 16


@pytest.mark.parametrize(("least", "computed", "offered"), [(16, 0, 16), (17, 0, 0), (12, 4, 12), (13, 4, 0)])
def test_a_load_of_fewer_tokens_than_are_worthwhile_is_not_offered(
    halves: Halves, least: int, computed: int, offered: int
) -> None:
    """They count beyond what the engine has itself."""
    halves.run(Controls())
    longer = [*PROMPT, *range(50, 60)]
    assert halves.run(Controls(min_load_tokens=least), longer, computed=computed) == offered


def test_what_can_be_too_little_only_is_not_looked_up(halves: Halves) -> None:
    halves.run(Controls())
    before = halves.scheduler.counts.lookups
    halves.run(Controls(min_load_tokens=17))  # 16 of the 17 tokens could be loaded
    assert halves.scheduler.counts.lookups == before


def test_slower_tiers_are_left_alone_where_the_request_says_so(halves: Halves) -> None:
    halves.service.pending = 1
    assert halves.run(Controls(promote=False)) == 0  # None would be: ask again, more is on its way
    waits = RequestTokens("waits", [*PROMPT, 5, 6, 7, 8], keep_tokens=21)
    assert halves.scheduler.match(waits, 0) is None


@pytest.mark.parametrize("tiers", [None, (), ("disk",)])
def test_the_cache_is_told_which_tiers_a_request_may_use(halves: Halves, tiers: tuple[str, ...] | None) -> None:
    """Also where the plan has travelled as plain data."""
    halves.run(Controls(tiers=tiers))
    assert halves.service.tiers_read == halves.service.tiers_written == [tiers]


def test_the_cache_is_told_how_long_a_request_wants_its_chunks_retained(halves: Halves) -> None:
    for retain_s in (0.0, 12.5):
        halves.run(Controls(retain_s=retain_s), [round(retain_s) + 1, *PROMPT])
    assert halves.service.retain_s == [0.0, 12.5]


@pytest.mark.parametrize(("least", "chunks"), [(17, 4), (18, 0)])
def test_a_prompt_of_few_tokens_is_not_stored(halves: Halves, least: int, chunks: int) -> None:
    halves.run(Controls(min_store_tokens=least))
    assert len(halves.service.held) == chunks


@pytest.mark.parametrize(("most", "chunks"), [(None, 4), (16, 4), (15, 3), (3, 0)])
def test_what_is_beyond_the_limit_is_not_stored(halves: Halves, most: int | None, chunks: int) -> None:
    halves.run(Controls(max_store_tokens=most))
    assert len(halves.service.held) == chunks


def test_a_request_finds_only_chunks_with_its_tags(halves: Halves) -> None:
    tagged = Controls(tags={"session": "a", "kind": "draft"})
    halves.run(tagged)
    assert halves.run(Controls()) == 0
    assert halves.run(Controls(tags={"session": "b", "kind": "draft"})) == 0
    assert halves.run(Controls(tags={"kind": "draft", "session": "a"})) == 16
    assert halves.run(Controls()) == 16


def test_a_router_computes_the_keys_of_tagged_chunks(halves: Halves) -> None:
    """From kv-core's public names alone."""
    tags = {"session": "a"}
    halves.run(Controls(tags=tags))
    chain = KeySequence(SHAPE.scheme, root=SHAPE.scheme.root(tags=tags))
    assert set(SPACE.keys(chain.append(PROMPT))) == set(halves.service.held)


def test_lookups_and_their_tokens_are_counted_once_a_request(halves: Halves) -> None:
    halves.run(Controls())
    request = RequestTokens("asks often", PROMPT, keep_tokens=17)
    for _ in range(3):
        assert halves.scheduler.match(request, 0) == 16
    counts = halves.scheduler.counts
    assert (counts.lookups, counts.asked_tokens, counts.found_tokens) == (2, 32, 16)
    assert halves.scheduler.sources("asks often") == {"dict": 16}
    assert halves.scheduler.match(request, 10) == 6
    assert halves.scheduler.sources("asks often") == {"dict": 6}  # beyond what the engine has itself
    assert halves.scheduler.sources("nobody") == {}


def test_only_a_few_prompts_are_looked_up_before_the_engine_asks() -> None:
    """However many requests with hints arrive at once."""
    asked: list[str] = []

    class SlowService(DictService):
        def lookup(self, keys: Sequence[ChunkKey], holder: str, **options: object) -> LookupPlan:
            asked.append(holder)
            return LookupPlan(holder, 0, Ended.PENDING, ())

    scheduler = SchedulerHalf(SlowService(), SHAPE, name="e")

    def step() -> list[str]:
        asked.clear()
        scheduler.build_step([])
        return asked

    for number in range(9):
        scheduler.prefetch(RequestTokens(f"{number}", [90 + number, *PROMPT], keep_tokens=18))
    names = [f"e/{number}/prefetch" for number in range(9)]
    assert asked == names[:4] and step() == names[:4]
    scheduler.finished("1")
    assert step() == [names[0], *names[2:5]]
    scheduler.close()
    assert step() == [] and scheduler.tracked_phases() == {}
