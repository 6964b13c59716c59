"""Processes of one engine that all read what was handed over to it."""

from collections.abc import Iterator

import pytest
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_server.remote_cache import RemoteCache
from kv_server.wire import READS_TOGETHER
from kv_testing.cache_servers import ThreadedServer
from kv_testing.wait import until

KEYS = key_chain(3)


@pytest.fixture
def served() -> Iterator[ThreadedServer]:
    server = ThreadedServer()
    yield server
    server.close()


def read(cache: RemoteCache) -> None:
    lease = cache.load(KEYS, "r")
    assert isinstance(lease, ReadLease)
    assert cache.release(lease)


def test_what_several_read_is_held_until_one_of_them_says_that_all_have(served: ThreadedServer) -> None:
    """The read of the first ended the hold. The others, which come a little later, found the chunks gone from a full
    pool, and SGLang aborts a request of which one rank lacks a page."""

    def held() -> int:
        (report,) = served.report().caches
        return report.handed_over

    writer, other = served.join(), served.join()
    ranks = [served.join(facts={READS_TOGETHER: "true"}) for _ in range(2)]
    writer.commit(writer.begin_store(KEYS, "w", hold_s=30.0))
    for rank in ranks:
        read(rank)
        assert held() == 3
    ranks[0].received(KEYS)
    until(lambda: held() == 0, 10)

    writer.commit(writer.begin_store(longer := key_chain(3, branch="another"), "w", hold_s=30.0))
    assert held() == 3
    lease = other.load(longer, "r")  # of an engine that is one process
    assert isinstance(lease, ReadLease) and other.release(lease)
    assert held() == 0
    for client in (writer, other, *ranks):
        client.close()
