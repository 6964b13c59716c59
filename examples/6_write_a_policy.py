"""An eviction policy of your own, with a parameter, and the proof that it keeps the promises of every policy: least
recently used, but the first chunks of every prompt (system prompts, few-shot examples) leave last. In a package of
yours, this in its pyproject.toml makes it known wherever the package is installed:

    [project.entry-points."kv_eviction.policies"]
    heads_last = "your_package.your_module:make_heads_last"

and settings say `policy: {name: heads_last, head_chunks: 8}`.
"""

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_eviction import EvictionPolicy
from kv_eviction.testing import PolicyContract
from kv_tiers.options import read_options


class HeadsLastConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    head_chunks: int = 4
    """How many chunks of each prompt leave after all others."""


def make_heads_last(capacity_chunks: int, parameters: Mapping[str, object]) -> EvictionPolicy:
    config = read_options(HeadsLastConfig, parameters, "policy heads_last")
    if config.head_chunks < 0:
        raise ConfigError(f"policy heads_last: head_chunks is {config.head_chunks}; write 0 or more")
    return HeadsLastPolicy(config.head_chunks)


class HeadsLastPolicy(EvictionPolicy):
    def __init__(self, head_chunks: int) -> None:
        self._head_chunks = head_chunks
        self._heads: OrderedDict[int, None] = OrderedDict()  # slots, oldest first
        self._others: OrderedDict[int, None] = OrderedDict()
        self._excluded: dict[int, bool] = {}  # slot → whether it is a head

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for slot in reversed(slots):  # the tail of a prompt is older than its head: it is worthless without it
            self._others[slot] = None

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for place in reversed(range(len(slots))):
            slot, is_head = slots[place], place < self._head_chunks
            if slot in self._excluded:
                self._excluded[slot] = is_head
            else:
                self._queue_of(slot).pop(slot)
                (self._heads if is_head else self._others)[slot] = None

    extended = used

    def removed(self, slot: int) -> None:
        if slot in self._excluded:
            del self._excluded[slot]
        else:
            del self._queue_of(slot)[slot]

    def victim(self) -> int | None:
        return next(iter(self._others or self._heads), None)

    def exclude(self, slot: int) -> None:
        queue = self._queue_of(slot)
        del queue[slot]
        self._excluded[slot] = queue is self._heads

    def reinsert(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            (self._heads if self._excluded.pop(slot) else self._others)[slot] = None

    def _queue_of(self, slot: int) -> OrderedDict[int, None]:
        return self._heads if slot in self._heads else self._others


class TestHeadsLast(PolicyContract):
    """Every promise, tried on this policy, and what is special about it."""

    def make(self) -> EvictionPolicy:
        return make_heads_last(6, {"head_chunks": 2})

    def test_the_heads_of_all_prompts_leave_last(self) -> None:
        from kv_core.testing import key_chain

        policy = self.make()
        for first, branch in ((0, "one"), (4, "two")):
            keys, slots = key_chain(4, branch=branch), range(first, first + 4)
            policy.added(keys, slots)
            policy.extended(keys, slots)
        assert self.drained(policy) == [3, 2, 7, 6, 1, 0, 5, 4]


if __name__ == "__main__":
    sys.exit(subprocess.call([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]))
