"""A directory in every kind of Redis and Valkey that the redis tier knows: behind TLS, a cluster, sentinels."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_server.peers.tier import PeersTier, make_peers_tier
from kv_server.remote_cache import RemoteCache
from kv_testing.cache_servers import SLOT_BYTES, ThreadedServer, join_at, store
from kv_testing.certificates import Authority
from kv_testing.peers import PATIENT, listening
from kv_testing.redis_servers import RUNNING, TlsFront, certificate, cluster, running, sentinel
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import until
from kv_tiers.tier import TierContext

pytestmark = pytest.mark.usefixtures("peers_in_process", "redis_servers_end")
CONTEXT = TierContext(CHUNK_BYTES, SLOT_BYTES, "f")
QUICK = {"interval_s": 0.02, "lease_s": 1.0, "timeout_s": 0.5}


def listed(ending: ExitStack, **options: object) -> tuple[ThreadedServer, RemoteCache]:
    """A server that lists what it holds, and a client that stores there."""
    server = listening(64, tiers=[{"type": "peers", "directory": {**QUICK, **options}, **PATIENT}])
    ending.callback(server.close)
    cache = join_at(server.path)
    ending.callback(cache.close)
    return server, cache


def reader(ending: ExitStack, **options: object) -> PeersTier:
    """A tier that lists nothing."""
    tier = make_peers_tier({"directory": {**QUICK, **options}, **PATIENT}, CONTEXT)
    assert isinstance(tier, PeersTier)
    ending.callback(tier.close)
    tier.holds(key_chain(1, branch="nobody's"))
    return tier


def finds(tier: PeersTier, keys: Sequence[ChunkKey]) -> bool:
    return all(tier.holds(keys))


def why(tier: PeersTier) -> str:
    state = tier.directory_state()
    assert state is not None
    return state.why


# TLS.


@pytest.fixture
def front(ending: ExitStack) -> TlsFront:
    """It ends after those who talk through it."""
    made = TlsFront(running("directory").port)
    ending.callback(made.close)
    return made


def test_a_directory_behind_tls_is_read_and_written(ending: ExitStack, front: TlsFront) -> None:
    tls = {"url": f"rediss://localhost:{front.port}", "tls_ca_file": certificate()}
    _, cache = listed(ending, **tls)
    tier, keys = reader(ending, **tls), key_chain(4)
    store(cache, keys)
    until(lambda: finds(tier, keys))
    assert why(tier) == ""


def test_a_directory_without_the_right_certificate_is_not_believed(
    ending: ExitStack, front: TlsFront, tmp_path: Path
) -> None:
    _, cache = listed(ending, url=f"rediss://localhost:{front.port}", tls_ca_file=certificate())
    store(cache, keys := key_chain(4, branch="secret"))
    others = Authority(tmp_path).ca_file
    stranger = reader(ending, url=f"rediss://localhost:{front.port}", tls_ca_file=others)
    misnamed = reader(ending, url=f"rediss://127.0.0.1:{front.port}", tls_ca_file=certificate())
    plain = reader(ending, url=f"redis://127.0.0.1:{front.port}")
    for tier in (stranger, misnamed, plain):
        until(lambda tier=tier: why(tier))  # type: ignore[misc]
        assert not any(tier.holds(keys))
    assert "certificate" in why(stranger).lower() and "certificate" in why(misnamed).lower()


# A cluster of three.


def in_cluster(node: int) -> dict[str, object]:
    return {"url": f"redis://127.0.0.1:{cluster()[node].port}", "mode": "cluster"}


def stream_slot() -> int:
    slot = cluster()[0].ask("CLUSTER", "KEYSLOT", f"kv:directory:{CONTEXT.namespace}")
    assert isinstance(slot, int)
    return slot


def test_a_directory_in_a_cluster_is_found_from_any_of_its_servers_and_followed_to_another(ending: ExitStack) -> None:
    nodes = cluster()
    _, cache = listed(ending, **in_cluster(0))
    tier, keys = reader(ending, **in_cluster(2)), key_chain(4)
    store(cache, keys)
    until(lambda: finds(tier, keys))
    name, slot = f"kv:directory:{CONTEXT.namespace}", stream_slot()
    owner = next(number for number, node in enumerate(nodes) if node.ask("CLUSTER", "COUNTKEYSINSLOT", slot))
    source, target = nodes[owner], nodes[(owner + 1) % 3]
    names = (source.ask("CLUSTER", "MYID").decode(), target.ask("CLUSTER", "MYID").decode())
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
    source.ask("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
    assert finds(tier, keys)  # between two servers: what is known stays
    for node in (target, source, nodes[(owner + 2) % 3]):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", names[1])
    store(cache, later := key_chain(4, branch="later"))
    until(lambda: finds(tier, later))
    until(lambda: why(tier) == "")
    assert target.ask("XLEN", name) > 0 and finds(tier, keys)


def test_a_directory_in_a_cluster_outlives_the_server_that_kept_it(ending: ExitStack) -> None:
    """It comes back empty, as it keeps no files, and the hosts make up for it."""
    nodes = cluster()
    slot = stream_slot()
    _, cache = listed(ending, **in_cluster(0))
    tier, keys = reader(ending, **in_cluster(1)), key_chain(4, branch="kept")
    store(cache, keys)
    until(lambda: finds(tier, keys))
    lost = next(node for node in nodes if node.ask("CLUSTER", "COUNTKEYSINSLOT", slot))
    lost.stop()
    until(lambda: why(tier) != "")
    assert finds(tier, keys)
    lost.start()
    until(lambda: all(b"cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in nodes), 20)
    store(cache, later := key_chain(4, branch="after"))
    until(lambda: finds(tier, later) and finds(tier, keys), 20)
    until(lambda: why(tier) == "")


def test_a_directory_that_takes_a_cluster_for_one_server_is_told(ending: ExitStack) -> None:
    slot = stream_slot()
    found = cluster()[0].ask("CLUSTER", "SLOTS")
    port = next(of[2][1] for of in found if not of[0] <= slot <= of[1])
    tier = reader(ending, url=f"redis://127.0.0.1:{port}")
    until(lambda: 'mode = "cluster"' in why(tier))


# Sentinels.


@pytest.mark.slow
def test_a_directory_is_followed_to_a_new_master(ending: ExitStack) -> None:
    options = {"url": f"redis://127.0.0.1:1,127.0.0.1:{sentinel().port}"}
    watched = {**options, "mode": "sentinel", "sentinel_master": "kv-master"}
    _, cache = listed(ending, **watched)
    tier, keys = reader(ending, **watched), key_chain(4)
    store(cache, keys)
    until(lambda: finds(tier, keys))
    old = next(RUNNING[name] for name in ("one", "two") if RUNNING[name].ask("ROLE")[0] == b"master")
    new = next(RUNNING[name] for name in ("one", "two") if RUNNING[name] is not old)
    sentinel().ask("SENTINEL", "FAILOVER", "kv-master")
    address = [b"127.0.0.1", str(new.port).encode()]
    until(lambda: sentinel().ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kv-master") == address, 20)
    until(lambda: new.ask("ROLE")[0] == b"master")
    old.ask("REPLICAOF", "127.0.0.1", new.port)  # as the sentinel will in ten seconds
    store(cache, later := key_chain(4, branch="later"))
    until(lambda: finds(tier, later), 20)
    assert finds(tier, keys)
    until(lambda: why(tier) == "")
