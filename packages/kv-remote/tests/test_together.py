"""The parts of a call that run on other threads end before the call does, also where there can be no more threads."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
from kv_core.errors import MisuseError
from kv_remote.objects import ObjectsTier, make_objects_tier
from kv_remote.redis import RedisTier, make_redis_tier
from kv_remote.redis_servers import Address
from kv_remote.together import begin
from kv_server.peers.hosts import Peer, PeerHosts
from kv_testing.threads import threads_left
from kv_testing.wait import until
from kv_tiers.tier import TierContext

CONTEXT = TierContext(4096, 4096, "together")


class Parts:
    """The parts of a call: those on other threads go on only once it is known that there can be no more threads."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.running = 0
        self.go_on = threading.Event()
        self._caller = threading.get_ident()
        self._lock = threading.Lock()

    def do(self, number: int) -> int:
        with self._lock:
            self.begun.append(number)
            self.running += 1
        if threading.get_ident() != self._caller:
            assert self.go_on.wait(30)
        with self._lock:
            self.running -= 1
        return number


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.go_on.set()


def hosts_of(ending: ExitStack) -> PeerHosts:
    hosts = PeerHosts([], token=b"", tls=None, resolve_s=30.0, connect_s=1.0)
    ending.callback(hosts.close)
    return hosts


def peer_at(port: int) -> Peer:
    return Peer("a", ("127.0.0.1", port), token=b"", tls=None, connect_s=1.0)


def test_without_more_threads_the_caller_does_what_is_left_and_nobody_does_it_again(parts: Parts) -> None:
    threads = ThreadPoolExecutor(4)
    first = begin(threads, partial(parts.do, 0))
    until(lambda: parts.begun == [0])
    with threads_left(on_refusal=parts.go_on.set):
        assert begin(threads, partial(parts.do, 1)).result(30) == 1
    assert first.result(30) == 0
    threads.shutdown()  # after everything that was queued
    assert parts.begun == [0, 1]


def test_what_a_part_raises_is_its_futures_wherever_it_ran(parts: Parts) -> None:
    def fail() -> None:
        raise OSError("gone")

    threads = ThreadPoolExecutor(1)
    assert isinstance(begin(threads, fail).exception(30), OSError)
    threads.shutdown()
    others = ThreadPoolExecutor(1)
    with threads_left(on_refusal=parts.go_on.set):
        assert isinstance(begin(others, fail).exception(0), OSError)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_call_to_peers_ends_after_all_of_its_parts(ending: ExitStack, parts: Parts, count: int) -> None:
    """Its memory is lent for the length of the call, and is another chunk's afterwards."""
    hosts, peers = hosts_of(ending), [peer_at(port) for port in range(1, 5)]
    number_of = {peer: number for number, peer in enumerate(peers)}
    with threads_left(count, on_refusal=parts.go_on.set):
        assert hosts.each(peers, lambda peer: parts.do(number_of[peer])) == number_of
        assert parts.running == 0 and sorted(parts.begun) == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_call_to_an_object_store_ends_after_all_of_its_parts(ending: ExitStack, parts: Parts, count: int) -> None:
    tier = make_objects_tier({"bucket": "b", "endpoint": "http://127.0.0.1:1", "anonymous": True}, CONTEXT)
    assert isinstance(tier, ObjectsTier)
    ending.callback(tier.close)
    with threads_left(count, on_refusal=parts.go_on.set):
        assert tier._run_each(range(4), parts.do) == [0, 1, 2, 3]
        assert parts.running == 0 and sorted(parts.begun) == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_call_to_a_cluster_ends_after_all_of_its_parts(
    ending: ExitStack, parts: Parts, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_redis_tier({"url": "redis://127.0.0.1:1", "mode": "cluster"}, CONTEXT)
    assert isinstance(tier, RedisTier)
    ending.callback(tier.close)
    monkeypatch.setattr(tier._servers, "talk", lambda _, work: work(None))
    groups = {(Address("a", number + 1), False): [number] for number in range(4)}
    with threads_left(count, on_refusal=parts.go_on.set):
        talked = tier._converse(groups, lambda _connection, mine, _asking: [parts.do(mine[0])])
        assert [answers for _, _, answers in talked] == [[0], [1], [2], [3]]
        assert parts.running == 0 and sorted(parts.begun) == [0, 1, 2, 3]


def test_a_bug_in_one_part_is_raised_once_the_others_have_ended(ending: ExitStack) -> None:
    hosts, peers = hosts_of(ending), [peer_at(port) for port in (1, 2)]
    has_begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def work(peer: Peer) -> None:
        if peer is peers[0]:
            assert has_begun.wait(30)
            threading.Timer(0.05, may_end.set).start()
            raise MisuseError("a bug")
        has_begun.set()
        assert may_end.wait(30)
        has_ended.set()

    with pytest.raises(MisuseError):
        hosts.each(peers, work)
    assert has_ended.is_set()


def test_a_call_to_peers_that_comes_after_the_end_starts_no_thread(ending: ExitStack) -> None:
    """A thread of a lane or of a drain may outlast the tier that it works for, and nobody would end more of them."""
    hosts = hosts_of(ending)
    hosts.close()
    before = set(threading.enumerate())
    asked = hosts.each([peer_at(port) for port in (1, 2)], lambda peer: True)
    assert set(threading.enumerate()) <= before
    assert asked == {}
