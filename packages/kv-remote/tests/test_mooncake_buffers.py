"""The tier over a Mooncake Store when its connection is replaced or nodes fail. Mooncake's client is a stand-in."""

import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from kv_core.errors import TierDown
from kv_core.outcome import Absent, LoadOutcome
from kv_core.testing import key_chain
from kv_remote import mooncake
from kv_remote.mooncake import MooncakeTier, make_mooncake_tier
from kv_testing.wait import joined, until
from kv_tiers.chunk_header import HEADER_BYTES
from kv_tiers.testing.tier_contract import aligned_pages
from kv_tiers.tier import Read, TierContext

CONTEXT = TierContext(4096, 4096, "buffers")
NOT_FOUND = -704


class Client:
    """Mooncake's client, of a store without objects."""

    made: ClassVar[list["Client"]] = []

    def __init__(self) -> None:
        self.reading = self.calls = 0
        self.closed_beside: list[int] = []
        self.may_end, self.knows_us = threading.Event(), True
        self.made.append(self)

    def setup(self, *_settings: object) -> int:
        return 0

    def register_buffer(self, _address: int, _nbytes: int) -> int:
        return 0

    def batch_is_exist(self, names: Sequence[str]) -> list[int]:
        return [0 if self.knows_us else -1] * len(names)

    def batch_get_into(self, names: Sequence[str], _addresses: Sequence[int], _sizes: Sequence[int]) -> list[int]:
        self.reading += 1
        self.calls += 1
        assert self.may_end.wait(30)
        self.calls -= 1
        return [NOT_FOUND] * len(names)

    def close(self) -> None:
        self.closed_beside.append(self.calls)  # Mooncake's crashes beside any


@pytest.fixture
def tier(ending: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeTier]:
    library: Any = ModuleType("mooncake.store")
    library.MooncakeDistributedStore, library.ReplicateConfig = Client, object
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", library)
    monkeypatch.setattr(Client, "made", [])
    monkeypatch.setattr(mooncake, "_BUFFERS_S", 10.0)
    master = ending.enter_context(socket.create_server(("127.0.0.1", 0)))
    made = make_mooncake_tier({"master": f"127.0.0.1:{master.getsockname()[1]}", "transfers": 2}, CONTEXT)
    assert isinstance(made, MooncakeTier)
    yield made
    made.close()


def client_of(tier: MooncakeTier) -> Any:
    with tier._joined() as joined:
        return joined.client


def load(tier: MooncakeTier, branch: str) -> list[LoadOutcome]:
    nbytes = CONTEXT.chunk_bytes
    keys = key_chain(2, branch=branch)
    return tier.load([Read(key, bytearray(HEADER_BYTES), aligned_pages(nbytes), nbytes) for key in keys])


def test_buffers_of_a_new_connection_return_to_it_whoever_waited_for_those_of_the_old_one(tier: MooncakeTier) -> None:
    outcomes: dict[str, list[LoadOutcome]] = {}

    def run(branch: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: outcomes.update({branch: load(tier, branch)}), daemon=True)
        thread.start()
        return thread

    first = run("first")
    until(lambda: Client.made and Client.made[0].reading)
    second = run("second")
    until(lambda: tier._buffers_changed._waiters)  # type: ignore[attr-defined]  # both buffers are in use
    old = Client.made[0]
    old.knows_us = False  # the master has been restarted
    with pytest.raises(TierDown):
        tier.probe()
    tier.probe()
    new = Client.made[1]
    until(lambda: new.reading)
    assert old.closed_beside == []
    old.may_end.set()
    new.may_end.set()
    joined(first, second)
    assert outcomes == {"first": [Absent()] * 2, "second": [Absent()] * 2}
    assert load(tier, "third") == [Absent()] * 2
    assert (old.reading, new.reading) == (1, 2)
    assert (old.closed_beside, new.closed_beside) == ([0], [])


def test_nodes_that_have_failed_are_not_remembered_for_longer_than_they_are_excluded(
    tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is started again has another address, so what is known of the former is of no use."""
    now, nodes = [0.0], [f"127.0.0.1:{port}" for port in (1, 2, 3)]
    monkeypatch.setattr(mooncake, "time", SimpleNamespace(monotonic=lambda: now[0]))
    client = client_of(tier)
    monkeypatch.setattr(client, "batch_get_replica_desc", lambda names: {names[0]: [copy_at(nodes[0])]}, raising=False)
    for _ in range(3):
        tier._exclude_nodes(["a chunk"])
        assert list(tier._excluded) == nodes[:1]
        now[0] += tier._config.dead_node_s
        del nodes[0]


def copy_at(node: str) -> Any:
    """The description of a copy in a node's memory."""
    memory = SimpleNamespace(buffer_descriptor=SimpleNamespace(transport_endpoint=node))
    return SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: memory)
