"""The directory's table of holders, names and sums, contents, and what is read of a stream: each against something
plain, and against what others may send.
"""

import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from kv_core.errors import InputError, TierDown
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_remote.redis_connection import RedisPool, _Resp3Parser
from kv_remote.redis_servers import RedisAccess
from kv_remote.resp import ErrorReply, ProtocolError
from kv_server.directory.contents import Contents, KeySource
from kv_server.directory.directory import AT_ONCE, BEGINNING, MAX_ENTRIES, Stream
from kv_server.directory.entries import (
    MAX_CHANGES,
    MAX_ENTRY_BYTES,
    VERSION,
    Entry,
    Names,
    decode,
    encode,
    names_of,
    no_sums,
    pack,
    root_of,
    shards_of,
    toggle,
    unpack,
)
from kv_server.directory.holders import NOBODY, HolderTable
from kv_testing.redis_servers import end_all, running
from kv_tiers.index.journal import Journal
from redis.exceptions import RedisError

NAMES = st.sets(st.integers(0, 300) | st.integers((1 << 64) - 30, (1 << 64) - 1), max_size=200)


def array_of(names: set[int]) -> Names:
    return np.array(sorted(names), np.uint64)


class Tables(RuleBasedStateMachine):
    """A table, and a set for each host. Few names, so that many hosts hold the same, and slots are used again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = HolderTable()
        self.model: dict[int, set[int]] = {host: set() for host in range(1, 12)}

    @rule(host=st.integers(1, 11), names=NAMES)
    def add(self, host: int, names: set[int]) -> None:
        is_new = self.table.add(array_of(names), host)
        assert {name for name, new in zip(sorted(names), is_new, strict=True) if new} == names - self.model[host]
        self.model[host] |= names

    @rule(host=st.integers(1, 11), names=NAMES)
    def remove(self, host: int, names: set[int]) -> None:
        was_held = self.table.remove(array_of(names), host)
        assert {name for name, was in zip(sorted(names), was_held, strict=True) if was} == names & self.model[host]
        self.model[host] -= names

    @rule(host=st.integers(1, 11))
    def drop(self, host: int) -> None:
        self.table.drop(host)
        self.model[host].clear()

    @rule(names=NAMES, most=st.integers(1, 12))
    def look_up(self, names: set[int], most: int) -> None:
        holders = self.table.holders(array_of(names), most)
        for name, row in zip(sorted(names), holders, strict=True):
            found = [int(host) for host in row if host != NOBODY]
            held = {host for host, held in self.model.items() if name in held}
            assert len(found) == len(set(found)) == min(most, len(held)) and set(found) <= held

    def teardown(self) -> None:
        assert self.table.entries == sum(map(len, self.model.values()))
        for host, names in self.model.items():
            assert set(map(int, self.table.names_of(host))) == names


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_pair_takes_less_than_thirty_bytes_at_any_size() -> None:
    table, rng = HolderTable(), np.random.default_rng(1)
    for _ in range(40):
        table.add(np.unique(rng.integers(0, 1 << 63, 5000, np.uint64)), int(rng.integers(1, 100)))
        assert table.nbytes < 30 * table.entries


@given(NAMES, NAMES)
def test_sums_follow_changes_in_any_order(first: set[int], second: set[int]) -> None:
    sums, others = no_sums(), no_sums()
    toggle(sums, array_of(first))
    toggle(sums, array_of(second))
    toggle(others, array_of(first ^ second))
    assert np.array_equal(sums, others) and root_of(sums) == root_of(others)
    assert all(0 <= shard < len(sums) for shard in shards_of(array_of(first)))
    assert np.array_equal(unpack(pack(array_of(first))), array_of(first))


class Index:
    """What a cache's index is to `Contents`."""

    def __init__(self) -> None:
        self.held: set[ChunkKey] = set()
        self.journal = Journal(max_keys=100)
        self.now_s = 0.0
        self.contents = Contents(
            lambda keys: [key in self.held for key in keys],
            [KeySource(self.journal, lambda: list(self.held))],
            scan_s=60,
            now_s=lambda: self.now_s,
        )

    def names(self) -> set[int]:
        return set(map(int, self.contents.names_in(range(4096), 1 << 17)[2]))


def named(keys: Sequence[ChunkKey] | set[ChunkKey]) -> set[int]:
    return set(map(int, names_of(list(keys))))


def test_contents_are_what_peers_would_be_told() -> None:
    index, keys = Index(), key_chain(30)
    index.held.update(keys[:10])  # before the journal was there
    first = index.contents.update("h:1")
    assert index.names() == named(keys[:10]) and first.sequence == 1
    index.held -= set(keys[:3])
    index.held |= set(keys[10:12])
    index.journal.note([*keys[:3], *keys[10:12], *keys[20:25]])
    second = index.contents.update("h:1")
    assert set(map(int, unpack(second.added))) == named(keys[10:12])
    assert set(map(int, unpack(second.removed))) == named(keys[:3])
    assert second.sequence == 2 and second.count == 9
    entry = index.contents.update("h:1")
    assert not (entry.added or entry.removed)


def test_more_changes_than_the_journal_keeps_are_found_by_looking_at_all() -> None:
    index, keys = Index(), key_chain(300)
    index.contents.update("h:1")
    index.held.update(keys)
    index.journal.note(keys)
    assert index.journal._keys is None
    index.contents.update("h:1")
    assert index.names() == named(keys)


def test_what_no_journal_noticed_is_found_when_a_peer_asks_in_vain_and_after_a_while() -> None:
    index, keys = Index(), key_chain(30)
    index.held.update(keys)
    index.contents.update("h:1")
    index.held.clear()
    index.contents.doubt(keys[:5])
    index.contents.update("h:1")
    assert index.names() == named(keys[5:])
    index.now_s = 59.0
    index.contents.update("h:1")
    assert index.names() == named(keys[5:])
    index.now_s = 60.0
    index.contents.update("h:1")
    assert index.names() == set()


def test_an_answer_about_shards_has_a_bound() -> None:
    index, keys = Index(), key_chain(100)
    index.held.update(keys)
    index.contents.update("h:1")
    shards = sorted({int(shard) for shard in shards_of(names_of(keys))})
    _, taken, names = index.contents.names_in(shards, 10)
    assert 1 <= taken < len(shards) and len(names) <= 10
    assert set(map(int, shards_of(names))) == set(shards[:taken])


@given(st.binary(max_size=200))
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    try:
        entry = decode(data)
    except InputError:
        return
    assert decode(encode(entry)) == entry


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": VERSION + 1},
        {"host": b"short"},
        {"address": "nowhere"},
        {"address": ""},
        {"address": "h:99999"},
        {"sequence": -1},
        {"count": 1 << 63},
        {"root": b""},
        {"added": bytes(9)},
        {"added": bytes(8 * MAX_CHANGES + 8)},
        {"removed": bytes(7)},
    ],
)
def test_an_entry_with_a_wrong_part_is_refused(wrong: dict[str, object]) -> None:
    right: dict[str, object] = {
        "version": VERSION, "host": bytes(16), "address": "h:1", "sequence": 1, "count": 1, "root": bytes(8),
        "added": bytes(8), "removed": b"",
    }  # fmt: skip
    assert decode(encode(Entry(**right)))  # type: ignore[arg-type]
    with pytest.raises(InputError):
        decode(encode(Entry(**(right | wrong))))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="bytes"):
        decode(bytes(MAX_ENTRY_BYTES + 1))


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"*1\r\n*2\r\n$1\r\nk\r\n*1\r\n*2\r\n$3\r\n1-2\r\n*2\r\n$1\r\ne\r\n$2\r\nhi\r\n",
         [[b"k", [[b"1-2", [b"e", b"hi"]]]]]),
        (b"*-1\r\n", None),
        (b"$-1\r\n", None),
        (b"*2\r\n:7\r\n-ERR no\r\n", [7, ErrorReply("ERR", "ERR no")]),
        (b"+OK\r\n", b"OK"),
        (b"_\r\n", None),
        (b"%1\r\n$1\r\nk\r\n*2\r\n:1\r\n_\r\n", {b"k": [1, None]}),
        (b">2\r\n$10\r\ninvalidate\r\n*0\r\n+OK\r\n", b"OK"),
    ],
)  # fmt: skip
def test_replies_of_any_shape_are_read(sent: bytes, answer: object, tmp_path: Path) -> None:
    assert reply_to(sent, tmp_path) == answer


@pytest.mark.parametrize(
    "sent",
    [
        b"$2000\r\n",
        b"*1000000000\r\n",
        b"*2\r\n$600\r\n" + bytes(600) + b"\r\n$600\r\n",
        b"*1\r\n" * 300,
        b"*2\r\n" + (b"+" + bytes(600) + b"\r\n") * 2,
        b"*2\r\n" + (b"-" + bytes(600) + b"\r\n") * 2,
        b"*900\r\n" + b":1\r\n" * 900,
        b"!\r\n",
        b"$-7\r\n",
        b"$99999999999999999999999\r\n",
        b"%1\r\n*0\r\n:1\r\n",
        b"%1000000000\r\n",
        b">0\r\n",
    ],
)
def test_replies_beyond_their_bounds_are_refused(sent: bytes, tmp_path: Path) -> None:
    with pytest.raises((ProtocolError, RedisError)):  # it does not wait for all of what was announced
        reply_to(sent, tmp_path)


def reply_to(sent: bytes, directory: Path) -> object:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/socket")
        listener.listen()
        listener.settimeout(30)
        with closing(RedisPool(f"{directory}/socket", 0, keep=1, timeout_s=0.2, tls=None, protocol=2)) as pool:
            connection = pool.get_connection()
            if sent[:1] in b"_%>":
                connection.set_parser(_Resp3Parser)
                connection._parser.on_connect(connection)
            with listener.accept()[0] as theirs:
                theirs.sendall(sent)
                try:
                    return connection.read_reply(1000)
                finally:
                    pool.release(connection)


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_stream_is_read_in_order_from_where_one_stopped(protocol: int) -> None:
    server = running("stream")
    try:
        stream = Stream(RedisAccess(url=f"{server.url}?protocol={protocol}", timeout_s=5.0), "n", "here")
        assert stream.last() == BEGINNING and stream.read(BEGINNING).written == []
        sent = [b"%d" % number for number in range(AT_ONCE + 44)]
        assert stream.append(sent) == ""
        first = stream.read(BEGINNING)
        rest = stream.read(first.upto)
        assert first.written + rest.written == sent and len(first.written) == AT_ONCE
        assert stream.last() == rest.upto
        for _ in range(MAX_ENTRIES // 1000 + 2):
            assert stream.append([b"x"] * 1000) == ""
        assert MAX_ENTRIES <= server.ask("XLEN", "kv:directory:n") < MAX_ENTRIES + 200
        server.ask("SET", "kv:directory:n", "no stream")
        assert "WRONGTYPE" in stream.append([b"x"])
        with pytest.raises(TierDown, match="WRONGTYPE"):
            stream.read(BEGINNING)
        stream.close()
    finally:
        end_all()


def test_a_user_who_may_not_write_reads() -> None:
    server = running("acl")
    try:
        server.ask("ACL", "SETUSER", "default", "-xadd")
        stream = Stream(RedisAccess(url=server.url, timeout_s=5.0), "n", "here")
        assert "NOPERM" in stream.append([b"x"])
        assert stream.read(BEGINNING).written == []
        stream.close()
    finally:
        end_all()
