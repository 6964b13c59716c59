"""The tier over a Mooncake Store against a real master and real nodes, which are killed."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, Refused, Stored, Unstorable
from kv_core.testing import key_chain
from kv_remote.mooncake import MooncakeTier, make_mooncake_tier
from kv_testing.servers import free_port
from kv_testing.wait import line, until
from kv_tiers.build import tier_factory
from kv_tiers.chunk_header import HEADER_BYTES
from kv_tiers.testing.tier_contract import PersistentTierContract
from kv_tiers.tier import Tier, TierContext

store = pytest.importorskip(
    "mooncake.store", reason="Mooncake's client is not installed (scripts/setup.sh mooncake)", exc_type=ImportError
)

pytestmark = pytest.mark.slow  # a master and nodes for each test
NUMBERS = itertools.count()
NODE_BYTES = 64 << 20
NODE = f"""
import sys
from mooncake.store import MooncakeDistributedStore
node = MooncakeDistributedStore()
assert node.setup("127.0.0.1", "P2PHANDSHAKE", {NODE_BYTES}, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("READY", flush=True)
sys.stdin.read()
"""


class Store:
    """A master, and nodes that lend it memory."""

    def __init__(self) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.start_master()

    def start_master(self) -> None:
        binary = Path(store.__file__).parent / "mooncake_master"
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self.metrics_port}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.master = subprocess.Popen([binary, *ports], **quiet)
        until(self.answers, 30)

    def answers(self) -> bool:
        assert self.master.poll() is None
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def add_node(self) -> subprocess.Popen[bytes]:
        node = subprocess.Popen(
            [sys.executable, "-c", NODE, self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.nodes.append(node)
        said = line(node.stdout)
        while not said.startswith(b"READY"):  # its library may have something to say first
            assert said, "the node ended"
            said = line(node.stdout)
        return node

    def stop(self) -> None:
        for process in [*self.nodes, self.master]:
            process.kill()
            process.wait(10)
        for node in self.nodes:
            for pipe in (node.stdin, node.stdout):
                assert pipe is not None
                pipe.close()


@contextlib.contextmanager
def running(nodes: int) -> Iterator[Store]:
    made = Store()
    try:
        for _ in range(nodes):
            made.add_node()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[Store]:
    with running(1) as made:
        yield made


class Answering:
    """Mooncake's client, but for the codes that some of its calls return."""

    def __init__(self, client: Any, **codes: int) -> None:
        self._client, self._codes = client, codes

    def __getattr__(self, name: str) -> Any:
        if name in self._codes:
            return lambda names, *_: [self._codes[name]] + [0] * (len(names) - 1)
        return getattr(self._client, name)


def client_of(tier: MooncakeTier) -> Any:
    with tier._joined() as joined:
        return joined.client


CONTEXT = TierContext(10_000, 12_288, "contract")


class TestMooncake(PersistentTierContract):
    """A prefix for each test makes its tier empty."""

    @pytest.fixture(autouse=True)
    @classmethod
    def _store(cls, shared: Store) -> None:
        cls.address = shared.address

    def setup_method(self) -> None:
        """Not before the fixture has run."""

    @pytest.fixture(autouse=True)
    def _tier(self, _store: None) -> Iterator[None]:
        super().setup_method()
        yield
        super().teardown_method()

    def teardown_method(self) -> None:
        """The fixture's end does it."""

    def make(self, context: TierContext, chunks: int) -> Tier:
        self.options: dict[str, object] = {"master": self.address, "prefix": f"test/{next(NUMBERS)}", "transfers": 3}
        return self.reopen(context, chunks)

    def reopen(self, context: TierContext, chunks: int) -> Tier:
        return make_mooncake_tier(self.options, context)

    @pytest.mark.parametrize("code", [-703, -706, -714])
    def test_the_state_of_one_object_is_no_fault_of_the_store(self, code: int) -> None:
        """An object that was being written took the tier down, and its probe brought it back, again and again."""
        keys = key_chain(2)
        self.store(keys)
        assert isinstance(self.tier, MooncakeTier)
        client = client_of(self.tier)
        self.tier._current.client = Answering(client, batch_put_from=code, batch_get_into=code, batch_is_exist=code)
        try:
            assert self.tier.holds(keys[:1]) == [False]
            assert self.load(keys[:1]) == [Absent()]
            outcomes = self.tier.store(self.writes(keys))
        finally:
            self.tier._current.client = client
        assert [type(outcome) for outcome in outcomes] == [Unstorable, Stored]
        assert self.tier.usage().full == ""
        assert self.loaded(keys) == [True] * 2

    def spoil(self, key: ChunkKey, at: int) -> None:
        name = self.name_of(key)
        data = bytearray(self.client.get(name))
        data[HEADER_BYTES + at] ^= 1 << at % 8
        self.replace(key, bytes(data))

    @property
    def client(self) -> Any:
        """Mooncake's own, that of the tier."""
        assert isinstance(self.tier, MooncakeTier)
        return client_of(self.tier)

    def name_of(self, key: ChunkKey) -> str:
        assert isinstance(self.tier, MooncakeTier)
        return self.tier._name(key)

    def replace(self, key: ChunkKey, data: bytes) -> None:
        self.client.remove(self.name_of(key), True)
        assert self.client.put(self.name_of(key), data) == 0

    def test_an_object_of_another_size_is_damage_and_goes(self) -> None:
        keys = key_chain(3)
        self.store(keys)
        for key, data in zip(keys, (b"short", b"x" * 20_000, b"y" * HEADER_BYTES), strict=True):
            self.replace(key, data)
        assert [type(outcome) for outcome in self.load(keys)] == [Damaged] * 3
        assert self.client.batch_is_exist([self.name_of(key) for key in keys]) == [0] * 3
        self.store(keys)
        assert self.loaded(keys) == [True] * 3

    def test_clearing_leaves_others_alone(self) -> None:
        keys = key_chain(2)
        self.store(keys)
        with closing(make_mooncake_tier(self.options, TierContext(4096, 4096, "another"))) as other:
            other.clear()
        with closing(make_mooncake_tier(self.options | {"prefix": "another"}, self.context)) as other:
            other.clear()
        assert self.tier.holds(keys) == [True, True]


class Chunks(PersistentTierContract):
    """How the contract writes and reads chunks, for the tests below; not a class of tests."""

    __test__ = False

    def __init__(self, tier: Tier) -> None:
        self.context, self.tier = CONTEXT, tier


def test_a_node_that_dies_costs_its_own_chunks_and_one_wait() -> None:
    with running(2) as mooncake, closing(make_mooncake_tier({"master": mooncake.address}, CONTEXT)) as tier:
        chunks, keys = Chunks(tier), key_chain(24)
        assert isinstance(tier, MooncakeTier)
        chunks.store(keys)
        names = [tier._name(key) for key in keys]
        of_node = client_of(tier).batch_get_replica_desc(names)
        places = [
            of_node[name][0].get_memory_descriptor().buffer_descriptor.transport_endpoint.rpartition(":")[2]
            for name in names
        ]
        assert len(set(places)) == 2, "the store put everything on one node"
        mooncake.nodes[0].kill()
        mooncake.nodes[0].wait(10)
        first = chunks.load(keys)
        assert {type(outcome) for outcome in first} == {Loaded, Absent}
        alive = {place for place, outcome in zip(places, first, strict=True) if isinstance(outcome, Loaded)}
        assert len(alive) == 1
        expected = [place in alive for place in places]
        assert [isinstance(outcome, Loaded) for outcome in first] == expected
        # The master still lists them, and nobody waits for them again.
        assert tier.holds(keys) == expected
        asked: list[list[str]] = []
        client = client_of(tier)

        class Watched:
            def __getattr__(self, name: str) -> Any:
                return getattr(client, name)

            def batch_get_into(self, names: list[str], *rest: Any) -> Any:
                asked.append(names)
                return client.batch_get_into(names, *rest)

        tier._current.client = Watched()
        assert [isinstance(outcome, Loaded) for outcome in chunks.load(keys)] == expected
        tier._current.client = client
        assert sum(map(len, asked)) == sum(expected)


def test_a_store_without_a_node_has_no_room() -> None:
    with running(0) as mooncake, closing(make_mooncake_tier({"master": mooncake.address}, CONTEXT)) as tier:
        chunks, keys = Chunks(tier), key_chain(2)
        assert [type(outcome) for outcome in tier.store(chunks.writes(keys))] == [Refused] * 2
        assert tier.usage().full == "the store has no room"
        mooncake.add_node()
        assert tier.store(chunks.writes(keys)) == [Stored()] * 2
        assert tier.usage().full == ""


def test_a_master_that_dies_is_a_tier_that_is_down_until_another_is_there() -> None:
    with running(1) as mooncake, closing(make_mooncake_tier({"master": mooncake.address}, CONTEXT)) as tier:
        chunks, keys = Chunks(tier), key_chain(3)
        chunks.store(keys)
        mooncake.master.kill()
        mooncake.master.wait(10)
        with pytest.raises(TierDown):
            tier.load([chunks.read(keys[0])])
        with pytest.raises(TierDown, match="no master"):
            tier.probe()
        mooncake.start_master()
        mooncake.add_node()

        def works() -> bool:
            with contextlib.suppress(TierDown):
                tier.probe()
                return tier.store(chunks.writes(keys)) == [Stored()] * 3 and chunks.loaded(keys) == [True] * 3
            return False

        until(works, 60)


def test_no_master_is_known_at_once_and_the_tier_can_be_closed() -> None:
    with closing(make_mooncake_tier({"master": f"127.0.0.1:{free_port()}"}, CONTEXT)) as tier:
        with pytest.raises(TierDown, match="no master at"):
            tier.probe()
        with pytest.raises(TierDown, match="no master at"):
            tier.holds(key_chain(1))


def test_this_process_can_lend_memory_to_the_store() -> None:
    with running(0) as mooncake:
        options = {"master": mooncake.address}
        lender = make_mooncake_tier(options | {"contribute_bytes": "32MiB"}, CONTEXT)
        with closing(lender), closing(make_mooncake_tier(options, CONTEXT)) as other:
            keys = key_chain(4)
            Chunks(lender).store(keys)
            assert Chunks(other).loaded(keys) == [True] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`master` must be given"),
        ({"master": "nowhere"}, "write a host and a port"),
        ({"master": "h:1", "prefix": "a.*"}, "letters, digits"),
        ({"master": "h:1", "transfers": 0}, "transfers must be positive"),
        ({"master": "h:1", "protocol": "udp"}, "protocol"),
        ({"master": "h:1", "dead_nodes": 1}, "dead_node_s"),
    ],
)
def test_wrong_options_say_what_to_write(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tier_factory("mooncake").check(options)


def test_a_closed_tier_leaves_no_descriptor_open() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with running(1) as mooncake:
        counts = []
        for _ in range(4):
            with closing(make_mooncake_tier({"master": mooncake.address}, CONTEXT)) as tier:
                Chunks(tier).store(key_chain(1))
            counts.append(count())
        # What the library opens once for the process is open after the second.
        until(lambda: count() <= counts[1])
