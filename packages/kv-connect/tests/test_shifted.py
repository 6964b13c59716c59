"""Layers that have at each place the KV of the token behind it too: the last place of a hit is computed once more."""

import pytest
from kv_connect.halves.request import RequestTokens, Scheduled
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.worker import WorkerHalf
from kv_core.coverage import ALL, Coverage
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace
from kv_core.shape import ConnectShape, GroupShape
from kv_testing.connect import DictCopier, DictService

BLOCK, CHUNK = 2, 4
SPACE = KeySpace("model", "r1", "float32", "f", 1, f"sha256:{CHUNK}")


def request(name: str, tokens: list[int]) -> RequestTokens:
    return RequestTokens(name, tokens, keep_tokens=len(tokens))


@pytest.mark.parametrize(
    ("groups", "after_8", "at_8"),
    [
        ((ALL,), 7, 7),
        ((ALL, Coverage("window", 3)), 8, 4),  # a window is held for a chunk's end, and the token before it sees more
    ],
)
def test_a_hit_ends_a_token_before_its_chunks_do(groups: tuple[Coverage, ...], after_8: int, at_8: int) -> None:
    """after_8, at_8: of a prompt that goes on behind 8 tokens with another than was stored, and of one that ends."""
    shape = ConnectShape(
        ChainScheme(chunk_tokens=CHUNK), SPACE, tuple(GroupShape(BLOCK, each) for each in groups), shifted=True
    )
    service, copiers = DictService(), [DictCopier() for _ in groups]
    worker = WorkerHalf(service, shape, copiers, shard=0, name="e")
    scheduler = SchedulerHalf(service, shape, name="e")
    computed = request("computed", list(range(8)))
    assert scheduler.match(computed, 0) == 0
    scheduler.allocated("computed", 0, ())
    for copier in copiers:
        copier.slots.update((slot, ("kv", slot)) for slot in range(20))
    worker.stores.start(scheduler.build_step([Scheduled(computed, 8, (range(1, 5),))]))
    worker.stores.finish()
    scheduler.finished("computed")
    assert scheduler.match(request("goes on", [*range(8), 99, 99]), 0) == after_8
    assert scheduler.match(request("ends", list(range(8))), 0) == at_8
    scheduler.allocated("goes on", after_8, ([1, 2, 3, 4, 5],))
    (load,) = scheduler.build_step([]).loads
    assert (load.first_token, load.last_token) == (0, 8), "its last block is loaded whole"
