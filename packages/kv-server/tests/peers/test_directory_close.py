"""The end of a server's part in a directory: no other host delays it."""

import threading
import time
from contextlib import ExitStack

import pytest
from kv_server.directory.entries import NAME_BYTES, VERSION, Entry
from kv_server.peers.tier import PeersTier, make_peers_tier
from kv_server.peers.wire import List
from kv_testing.cache_servers import SLOT_BYTES
from kv_testing.peers import PATIENT, own_nobody, slow_lister
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import joined, until
from kv_tiers.tier import TierContext

HOST = b"slow" * 4


def test_a_host_that_takes_long_to_list_its_chunks_is_not_waited_for(
    ending: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_nobody(monkeypatch)

    slow = slow_lister(HOST)
    ending.callback(slow.close)
    options = {"directory": {"url": "redis://127.0.0.1:1", "lease_s": 60.0}, **PATIENT}
    tier = make_peers_tier(options, TierContext(CHUNK_BYTES, SLOT_BYTES, "f"))
    assert isinstance(tier, PeersTier) and tier._directory is not None
    entry = Entry(VERSION, HOST, slow.address, 5, 0, bytes(NAME_BYTES))
    tier._directory._mirror.take(entry, time.monotonic())
    tier._hosts.set_hosts([entry.host_port()])
    until(lambda: tier._hosts.at(entry.host_port()))
    tier._directory.start()
    tier._directory._repair_due.set()
    until(lambda: any(isinstance(one, List) for one in slow.asked))
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    joined(closing, within_s=10.0)
