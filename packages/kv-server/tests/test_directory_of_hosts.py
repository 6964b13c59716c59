"""Servers that know from a directory what each other holds: real servers, a real Valkey, and what breaks them."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import redis
from kv_core.errors import ConfigError, InputError
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Loaded
from kv_core.testing import key_chain
from kv_remote.messages import pack_keys
from kv_server import wire
from kv_server.config import read_config
from kv_server.connection import ask_server
from kv_server.directory import directory as tiers_directory
from kv_server.directory.directory import AT_ONCE
from kv_server.directory.entries import NAME_BYTES, SHARDS, SUMS_BYTES, VERSION, Entry, decode, encode, names_of, pack
from kv_server.peers import tier as peer_following
from kv_server.peers.tier import PeersTier, make_peers_tier
from kv_server.peers.wire import (
    NOT_HERE,
    SIZE,
    Answer,
    Fetch,
    Follow,
    Followed,
    Given,
    List,
    Listed,
    PeerHeld,
    PeerStream,
    Request,
    Sum,
    Summed,
    unpack_keys,
)
from kv_server.process import ServerProcess, launch
from kv_server.remote_cache import RemoteCache
from kv_server.report import DirectoryState
from kv_testing.cache_servers import (
    SLOT_BYTES,
    ThreadedServer,
    held,
    join_server,
    kill_server,
    read,
    report_of,
    settings_for,
    store,
)
from kv_testing.http import Served
from kv_testing.peers import PATIENT, FakePeer, is_whole, listening, reads_of, served_by, slow_lister
from kv_testing.redis_servers import AskedServer, running
from kv_testing.servers import Answering, Proxy, free_port
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import until
from kv_tiers.build import check_settings
from kv_tiers.config import HostConfig
from kv_tiers.tier import TierContext

pytestmark = pytest.mark.usefixtures("peers_in_process", "redis_servers_end")
CONTEXT = TierContext(CHUNK_BYTES, SLOT_BYTES, "f")
QUICK = {"interval_s": 0.02, "lease_s": 1.0, "timeout_s": 0.5}


@pytest.fixture
def valkey() -> AskedServer:
    server = running("directory")
    server.ask("FLUSHALL")
    return server


def listed(ending: ExitStack, url: str, slots: int = 64, **options: object) -> tuple[ThreadedServer, RemoteCache]:
    """A server on a thread that lists what it holds, and a client that stores there."""
    server = listening(slots, tiers=[{"type": "peers", "directory": {"url": url, **QUICK, **options}, **PATIENT}])
    ending.callback(server.close)
    cache = server.join("f")
    ending.callback(cache.close)
    return server, cache


def reader(ending: ExitStack, url: str, **options: object) -> PeersTier:
    """A tier that lists nothing."""
    tier = make_peers_tier({"directory": {"url": url, **QUICK, **options}, **PATIENT}, CONTEXT)
    assert isinstance(tier, PeersTier)
    ending.callback(tier.close)
    tier.holds(key_chain(1, branch="nobody's"))
    return tier


def state_of(tier: PeersTier) -> DirectoryState:
    state = tier.directory_state()
    assert state is not None
    return state


def finds(tier: PeersTier, keys: Sequence[ChunkKey]) -> bool:
    return all(tier.holds(keys))


def test_a_lookup_finds_what_another_host_holds_without_asking_it(ending: ExitStack, valkey: AskedServer) -> None:
    server, cache = listed(ending, valkey.url)
    tier, keys = reader(ending, valkey.url), key_chain(8)
    store(cache, keys[:6])
    until(lambda: finds(tier, keys[:6]))
    assert tier.holds(keys) == [True] * 6 + [False] * 2
    assert served_by(server).asked == 0
    reads = reads_of(CONTEXT, keys)
    outcomes = tier.load(reads)
    assert [isinstance(outcome, Loaded) for outcome in outcomes] == [True] * 6 + [False] * 2
    assert all(is_whole(CONTEXT, one) for one in reads[:6])
    assert served_by(server).asked == 0


def test_what_was_there_before_is_found_and_what_leaves_is_not(ending: ExitStack, valkey: AskedServer) -> None:
    _, cache = listed(ending, valkey.url, slots=8)
    first, second = key_chain(8, branch="first"), key_chain(8, branch="second")
    store(cache, first)
    tier = reader(ending, valkey.url)
    until(lambda: finds(tier, first))
    store(cache, second)  # evicts the others
    until(lambda: finds(tier, second) and not any(tier.holds(first)))
    cache.forget(second[3:])
    until(lambda: tier.holds(second) == [True] * 3 + [False] * 5)


def test_chunks_on_a_disk_are_listed_as_well(ending: ExitStack, valkey: AskedServer, home: Path) -> None:
    """A chunk that leaves the pool for the disk is still there, and is so after a restart with an empty pool."""
    (disk,) = settings_for(home, disk=True)["tiers"]  # type: ignore[misc]
    options = {"tiers": [disk, {"type": "peers", "directory": {"url": valkey.url, **QUICK}, **PATIENT}]}
    server = listening(4, **options)
    cache = server.join("f")
    prompts = [key_chain(4, branch=str(number)) for number in range(3)]
    tier = reader(ending, valkey.url)
    for number, keys in enumerate(prompts):
        store(cache, keys)
        until(lambda stored=4 * (number + 1): report_of(server.path).caches[0].tiers[0].usage.chunks == stored)  # type: ignore[misc]
    until(lambda: all(finds(tier, keys) for keys in prompts))
    cache.close()
    server.close()
    until(lambda: not any(any(tier.holds(keys)) for keys in prompts))  # it said goodbye
    server = listening(4, **options)
    ending.callback(server.close)
    cache = server.join("f")
    ending.callback(cache.close)
    until(lambda: all(finds(tier, keys) for keys in prompts))
    reads = reads_of(CONTEXT, prompts[0])
    assert all(isinstance(outcome, Loaded) for outcome in tier.load(reads))


def test_a_server_that_is_killed_is_forgotten_within_its_lease_and_found_again(
    ending: ExitStack, valkey: AskedServer, home: Path
) -> None:
    port = free_port()
    tier, keys = reader(ending, valkey.url), key_chain(6)

    def serve() -> ServerProcess:
        config = settings_for(home)
        directory = {"url": valkey.url, **QUICK}
        peers = {"listen": f"127.0.0.1:{port}", "unprotected": True}
        return launch(
            {**config, "tiers": [{"type": "peers", "directory": directory, **PATIENT}], "peers": peers},
            socket=home / "s",
        )

    server = serve()
    ending.callback(server.stop)
    with closing(join_server(home)) as cache:
        store(cache, keys)
        until(lambda: finds(tier, keys))
        kill_server(server)
    killed_s = time.monotonic()
    until(lambda: state_of(tier).hosts == 0)
    assert time.monotonic() - killed_s < 5.0  # a lease of one second, and what a busy machine adds
    assert not any(tier.holds(keys))
    server = serve()
    ending.callback(server.stop)
    with closing(join_server(home)) as cache:
        store(cache, keys[:2])
        until(lambda: tier.holds(keys) == [True] * 2 + [False] * 4)


def test_a_server_started_anew_at_the_same_address_replaces_the_one_before(
    ending: ExitStack, valkey: AskedServer, home: Path
) -> None:
    """Its chunks went with it, and nobody waits for a lease to end to know that."""
    port, tier, keys = free_port(), reader(ending, valkey.url, lease_s=3600), key_chain(6)
    directory = {"url": valkey.url, **QUICK, "lease_s": 3600}
    config = {**settings_for(home), "tiers": [{"type": "peers", "directory": directory, **PATIENT}]}
    config["peers"] = {"listen": f"127.0.0.1:{port}", "unprotected": True}
    server = launch(config, socket=home / "s")
    ending.callback(server.stop)
    with closing(join_server(home)) as cache:
        store(cache, keys)
        until(lambda: finds(tier, keys))
        kill_server(server)
    server = launch(config, socket=home / "s")
    ending.callback(server.stop)
    with closing(join_server(home)) as cache:
        store(cache, keys[:1])
        until(lambda: tier.holds(keys) == [True] + [False] * 5)
    assert state_of(tier).hosts == 1


@pytest.mark.parametrize("trouble", ["flushed", "restarted"])
def test_a_directory_that_lost_everything_costs_nothing_that_stays(
    ending: ExitStack, valkey: AskedServer, trouble: str
) -> None:
    _, cache = listed(ending, valkey.url, slots=64)
    tier = reader(ending, valkey.url)
    before, meanwhile, after = (key_chain(4, branch=name) for name in ("before", "meanwhile", "after"))
    store(cache, before)
    until(lambda: finds(tier, before))
    if trouble == "flushed":
        valkey.ask("FLUSHALL")
        store(cache, meanwhile)
    else:
        valkey.stop()
        until(lambda: state_of(tier).why)
        store(cache, meanwhile)
        assert finds(tier, before), "the mirror stays as it stands"
        assert all(isinstance(outcome, Loaded) for outcome in tier.load(reads_of(CONTEXT, before)))
        valkey.start()
        until(lambda: not state_of(tier).why)
    store(cache, after)
    cache.forget(before)
    until(lambda: finds(tier, [*meanwhile, *after]) and not any(tier.holds(before)))
    until(lambda: state_of(tier).exact == state_of(tier).hosts == 1)


def test_a_directory_whose_clock_was_set_back_is_read_again(ending: ExitStack, valkey: AskedServer) -> None:
    """Numbers of the stream are its server's time. A new one may begin with smaller ones."""
    tier, keys = reader(ending, valkey.url), key_chain(4)
    _, cache = listed(ending, valkey.url)
    until(lambda: state_of(tier).hosts == 1)
    (stream,) = valkey.ask("KEYS", "kv:directory:*")
    (last,) = valkey.ask("XREVRANGE", stream, "+", "-", "COUNT", "1")
    milliseconds = int(last[0].split(b"-")[0])
    ahead = f"{milliseconds + 3_600_000}-0"
    valkey.ask("XADD", stream, ahead, "e", "an hour ahead")
    until(lambda: directory_position(tier) >= (milliseconds + 3_600_000, 0))
    valkey.ask("DEL", stream)
    store(cache, keys)
    until(lambda: finds(tier, keys))
    assert directory_position(tier) < (milliseconds + 3_600_000, 0)


def directory_position(tier: PeersTier) -> tuple[int, int]:
    assert tier._directory is not None
    return tier._directory._position or (0, 0)


def test_a_line_to_the_directory_that_is_cut_costs_misses_only(ending: ExitStack, valkey: AskedServer) -> None:
    """Stalled: neither a lookup nor a load waits for it. Afterwards everything is found again, and nothing else."""
    proxy = Proxy(valkey.port)
    ending.callback(proxy.close)
    _, cache = listed(ending, valkey.url)
    tier = reader(ending, f"redis://127.0.0.1:{proxy.port}")
    before, meanwhile = key_chain(4, branch="before"), key_chain(4, branch="meanwhile")
    store(cache, before)
    until(lambda: finds(tier, before))
    proxy.stall()
    store(cache, meanwhile)
    until(lambda: state_of(tier).why)
    assert finds(tier, before) and not any(tier.holds(meanwhile))
    assert all(isinstance(outcome, Loaded) for outcome in tier.load(reads_of(CONTEXT, before)))
    proxy.flow()
    until(lambda: finds(tier, meanwhile))
    until(lambda: state_of(tier).exact == 1)


def added_to(valkey: AskedServer, stream: bytes) -> int:
    """How many names the entries in the stream added."""
    entries = valkey.ask("XRANGE", stream, "-", "+")
    return sum(len(decode(fields[b"e"]).added) // NAME_BYTES for _, fields in entries)


def test_entries_that_are_lost_are_made_up_for_by_the_host_itself(ending: ExitStack, valkey: AskedServer) -> None:
    """They were gone from the stream before they were read, which only the numbers and sums of later ones tell."""
    proxy = Proxy(valkey.port)
    ending.callback(proxy.close)
    _, cache = listed(ending, valkey.url)
    tier = reader(ending, f"redis://127.0.0.1:{proxy.port}", lease_s=60, timeout_s=10)
    kept, lost = key_chain(8, branch="kept"), key_chain(8, branch="lost")
    store(cache, kept)
    until(lambda: finds(tier, kept))
    proxy.stall()
    (stream,) = valkey.ask("KEYS", "kv:directory:*")
    cache.forget(kept[4:])
    store(cache, lost)
    until(lambda: added_to(valkey, stream) >= 16)
    valkey.ask("XTRIM", stream, "MAXLEN", 0)
    proxy.flow()
    until(lambda: finds(tier, [*kept[:4], *lost]) and not any(tier.holds(kept[4:])))
    until(lambda: state_of(tier).exact == 1)  # a repair is counted after the names it fetched are found
    assert state_of(tier).gaps > 0 and state_of(tier).shards_fetched > 0


def test_a_chunk_that_is_not_where_the_directory_says_costs_one_miss(ending: ExitStack, valkey: AskedServer) -> None:
    """The server notices it too, and says so to all."""
    server, cache = listed(ending, valkey.url)
    tier, keys = reader(ending, valkey.url), key_chain(4)
    store(cache, keys)
    until(lambda: finds(tier, keys))
    (local,) = server.server.caches.values()
    local._index.journal = None  # it notices nothing any more
    cache.forget(keys[2:])
    heard = state_of(tier).entries
    until(lambda: state_of(tier).entries > heard + 1)
    assert finds(tier, keys)
    outcomes = tier.load(reads_of(CONTEXT, keys))
    assert [isinstance(outcome, Absent) for outcome in outcomes] == [False, False, True, True]
    assert tier.holds(keys) == [True, True, False, False]
    assert state_of(tier).not_here == 2
    other = reader(ending, valkey.url)
    until(lambda: other.holds(keys) == [True, True, False, False])


def test_what_was_cleared_here_is_not_read_from_hosts_that_were_not(ending: ExitStack, valkey: AskedServer) -> None:
    server, cache = listed(ending, valkey.url)
    tier, keys = reader(ending, valkey.url), key_chain(4)
    store(cache, keys)
    until(lambda: finds(tier, keys))
    tier.clear()
    assert not any(tier.holds(keys))
    repairs = state_of(tier).repairs
    until(lambda: state_of(tier).repairs > repairs + 1)  # it was asked, and said that it was not cleared
    assert not any(tier.holds(keys)), "its chunks may be older than the clear"
    server.clock.advance(1.0)
    (local,) = server.server.caches.values()
    local.clear()
    store(cache, keys)
    until(lambda: finds(tier, keys))


def two_finds(server: ThreadedServer, keys: Sequence[ChunkKey]) -> bool:
    """Whether its own lookups would."""
    (cache,) = server.server.caches.values()
    return all(place == "peers" for place in cache.admin.where(keys))


def test_two_servers_serve_each_other_and_nothing_travels_on(ending: ExitStack, valkey: AskedServer) -> None:
    """A cache of real lookups: what one stored is a hit of the other, whose copy is then listed as well."""
    one, first = listed(ending, valkey.url)
    two, second = listed(ending, valkey.url)
    keys = key_chain(6)
    store(first, keys)
    until(lambda: held(second, keys) == 6)
    assert read(second, keys)
    until(lambda: served_by(one).sent == 6)
    assert served_by(one).asked == 0
    two_alone = make_peers_tier({"hosts": [str(two.server.peers_address)], **PATIENT}, CONTEXT)
    ending.callback(two_alone.close)
    others = key_chain(4, branch="others")
    store(first, others)
    until(lambda: two_finds(two, others))
    assert not any(two_alone.holds(others)), "it says what it has, and not what it knows of others"
    tier = reader(ending, valkey.url)
    until(lambda: state_of(tier).names == 16)
    one.close()
    until(lambda: state_of(tier).hosts == 1)
    until(lambda: finds(tier, keys))
    assert report_of(two.path).caches[0].tiers[0].name == "peers"


def test_a_user_who_may_do_no_more_than_is_documented_is_enough(
    ending: ExitStack, valkey: AskedServer, tmp_path: Path
) -> None:
    (password := tmp_path / "password").touch(0o600)
    password.write_text("a secret")
    allowed = ["+xadd", "+xread", "+xrevrange", "~kv:directory:*"]
    valkey.ask("ACL", "SETUSER", "user", "reset", "on", ">a secret", *allowed)
    valkey.ask("ACL", "SETUSER", "default", "resetpass", ">unknown")
    try:
        access = {"username": "user", "password_file": str(password)}
        _, cache = listed(ending, valkey.url, **access)
        tier, keys = reader(ending, valkey.url, **access), key_chain(4)
        store(cache, keys)
        until(lambda: finds(tier, keys))
        password.write_text("another")
        stranger = reader(ending, valkey.url, **access)
        until(lambda: "does not allow us to log in" in state_of(stranger).why)
    finally:
        with closing(redis.Redis(unix_socket_path=valkey.unix, password="unknown")) as client:  # a test's
            client.execute_command("ACL", "SETUSER", "default", "nopass")  # type: ignore[no-untyped-call]


LIES: dict[str, tuple[Callable[[Request], Answer], str]] = {
    "no such cache": (lambda _: Summed(b"", 0, b"", None), "dropped"),
    "another host": (lambda _: Summed(bytes(16), 0, bytes(SUMS_BYTES), None), "dropped"),
    "short sums": (lambda _: Summed(LIAR, 5, bytes(8), None), "failed"),
    "a held": (lambda _: PeerHeld(b"", None), "failed"),
    "no shards answered": (lambda request: sums_or(request, Listed(LIAR, 5, 0, b"")), "failed"),
    "more shards than asked for": (lambda request: sums_or(request, Listed(LIAR, 5, SHARDS, b"")), "failed"),
    "half a name": (lambda request: sums_or(request, Listed(LIAR, 5, 1, bytes(7))), "failed"),
    "another's names": (lambda request: sums_or(request, Listed(bytes(16), 5, 1, b"")), "failed"),
    "names of other shards": (lambda request: sums_or(request, Listed(LIAR, 5, 1, b"\xff" * 8000)), "repaired"),
}
"""What a host answers, and what becomes of it."""
LIAR = b"liar" * 4


def sums_or(request: Request, otherwise: Listed) -> Summed | Listed:
    """One sum of all is wrong."""
    return Summed(LIAR, 5, b"\1" + bytes(SUMS_BYTES - 1), None) if isinstance(request, Sum) else otherwise


@pytest.mark.parametrize("lie", LIES)
def test_a_host_that_lies_costs_itself_and_nobody_else(ending: ExitStack, valkey: AskedServer, lie: str) -> None:
    """Whatever it answers, others are found, and of what it says it has it delivers nothing."""
    says, becomes = LIES[lie]

    def answer(stream: PeerStream, request: Request) -> None:
        if not isinstance(request, Sum | List):
            raise InputError("and no chunk")
        stream.send_message(says(request), time.monotonic() + 5)

    liar = FakePeer(answer)
    ending.callback(liar.close)
    _, cache = listed(ending, valkey.url)
    tier, keys, invented = reader(ending, valkey.url, lease_s=60), key_chain(4), key_chain(4, branch="invented")
    store(cache, keys)
    until(lambda: finds(tier, keys))
    before = state_of(tier)
    (stream,) = valkey.ask("KEYS", "kv:directory:*")
    names = pack(names_of([*keys, *invented]))
    valkey.ask("XADD", stream, "*", "e", encode(Entry(VERSION, LIAR, liar.address, 1, 1 << 40, bytes(8), names)))
    until(lambda: any(isinstance(one, Sum) for one in liar.asked))
    until(
        lambda: {
            "dropped": state_of(tier).hosts == 1,
            "failed": state_of(tier).failed_repairs > before.failed_repairs,
            "repaired": state_of(tier).repairs > before.repairs,
        }[becomes]
    )
    assert finds(tier, keys)
    assert not any(isinstance(outcome, Loaded) for outcome in tier.load(reads_of(CONTEXT, invented)))
    until(lambda: all(isinstance(outcome, Loaded) for outcome in tier.load(reads_of(CONTEXT, keys))))


def test_what_a_host_handed_over_and_lost_since_is_read_from_the_host_that_lists_it(
    ending: ExitStack, valkey: AskedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_following, "_WAIT_S", 0.1)  # which closing may take
    keys = key_chain(4)

    def answer(stream: PeerStream, request: Request) -> None:
        until_s = time.monotonic() + 5
        match request:
            case Follow():
                time.sleep(0.01)
                given = [] if request.after else [Given(pack_keys(keys), 0, 60.0)]
                stream.send_message(Followed(bytes(16), 1, given, None), until_s)
            case Fetch():
                stream.send([SIZE.pack(NOT_HERE)] * len(unpack_keys(request)), until_s)
            case _:
                stream.send_message(Summed(LIAR, 0, bytes(SUMS_BYTES), None), until_s)

    forgetful = FakePeer(answer)
    ending.callback(forgetful.close)
    _, cache = listed(ending, valkey.url)
    options = {"directory": {"url": valkey.url, **QUICK, "lease_s": 60.0}, "follow": True, **PATIENT}
    tier = make_peers_tier(options, CONTEXT)
    assert isinstance(tier, PeersTier)
    ending.callback(tier.close)
    handed_over = threading.Event()
    tier.follow(lambda *_: handed_over.set())
    store(cache, keys)
    until(lambda: finds(tier, keys))
    (stream,) = valkey.ask("KEYS", "kv:directory:*")
    valkey.ask("XADD", stream, "*", "e", encode(Entry(VERSION, LIAR, forgetful.address, 0, 0, bytes(NAME_BYTES))))
    assert handed_over.wait(30)
    assert all(isinstance(outcome, Loaded) for outcome in tier.load(reads_of(CONTEXT, keys)))


def test_a_host_that_lists_its_names_one_shard_at_a_time_holds_up_nobody(
    ending: ExitStack, valkey: AskedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_directory, "_REPAIR_S", 0.1)

    slow = slow_lister(LIAR)
    ending.callback(slow.close)
    tier = reader(ending, valkey.url, lease_s=60.0)

    def is_asked() -> bool:
        stream, entry = f"kv:directory:{CONTEXT.namespace}", Entry(VERSION, LIAR, slow.address, 5, 0, bytes(NAME_BYTES))
        valkey.ask("XADD", stream, "*", "e", encode(entry))
        return any(isinstance(one, List) for one in slow.asked)

    until(is_asked)
    _, cache = listed(ending, valkey.url)
    keys = key_chain(4)
    store(cache, keys)
    until(lambda: finds(tier, keys))


def test_nobody_is_dropped_for_silence_while_nothing_could_be_heard(ending: ExitStack, valkey: AskedServer) -> None:
    """The directory was away for longer than a lease, and the host is not heard at once when it is back."""
    proxy = Proxy(valkey.port)
    ending.callback(proxy.close)
    _, cache = listed(ending, f"redis://127.0.0.1:{proxy.port}")
    tier, keys = reader(ending, valkey.url, lease_s=2.0), key_chain(4)
    store(cache, keys)
    until(lambda: finds(tier, keys))
    proxy.stall()
    valkey.stop()
    until(lambda: state_of(tier).lag_s > 2.5)
    valkey.start()
    until(lambda: not state_of(tier).why)
    assert state_of(tier).hosts == 1 and finds(tier, keys)
    until(lambda: state_of(tier).hosts == 0)  # but then it is


def test_what_is_no_entry_is_passed_over(ending: ExitStack, valkey: AskedServer) -> None:
    _, cache = listed(ending, valkey.url)
    tier, keys = reader(ending, valkey.url), key_chain(4)
    until(lambda: state_of(tier).hosts == 1)
    (stream,) = valkey.ask("KEYS", "kv:directory:*")
    for junk in (b"", b"junk", bytes(40_000), b"\x98" * 100, encode(Entry(1, LIAR, "h:9", 1, 0, bytes(8)))):
        valkey.ask("XADD", stream, "*", "e", junk)
    store(cache, keys)
    until(lambda: finds(tier, keys))
    assert state_of(tier).hosts == 1


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(["e", bytes(16 << 20)], id="16 MB"),
        pytest.param(["x", "y"] * 400_000, id="400,000 fields", marks=pytest.mark.slow),
    ],
)
def test_what_is_too_large_for_an_entry_is_passed_over(
    ending: ExitStack, valkey: AskedServer, caplog: pytest.LogCaptureFixture, fields: list[str | bytes]
) -> None:
    """Also as the last entry, at which a new host begins."""
    tier = reader(ending, valkey.url)
    _, cache = listed(ending, valkey.url)
    store(cache, key_chain(1))
    until(lambda: finds(tier, key_chain(1)))
    (stream,) = valkey.ask("KEYS", "kv:directory:*")
    for _ in range(3):
        valkey.ask("XADD", stream, "*", *fields)
    late = reader(ending, valkey.url)
    valkey.ask("XADD", stream, "*", *fields)
    store(cache, key_chain(4))
    until(lambda: finds(tier, key_chain(4)) and finds(late, key_chain(4)))
    assert "too large for an entry" in caplog.text
    until(lambda: state_of(tier).why == "" and state_of(tier).lag_s < QUICK["lease_s"])


BRIEF = {"lease_s": 0.3}


def after_leases() -> None:
    end = time.monotonic() + 3 * BRIEF["lease_s"]
    until(lambda: time.monotonic() > end)


def hosts_each_other(ending: ExitStack, url: str) -> tuple[RemoteCache, Callable[[], list[DirectoryState]]]:
    """Two servers that have each other's chunks in their directories, and one that only reads: a cache of the first,
    and the states of all three."""
    one, cache = listed(ending, url, **BRIEF)
    two, other = listed(ending, url, **BRIEF)
    store(cache, key_chain(2))
    store(other, key_chain(2, branch="other"))
    tier = reader(ending, url, **BRIEF)

    def states() -> list[DirectoryState]:
        reported = [report_of(server.path).caches[0].directories["peers"] for server in (one, two)]
        return [*(state for state in reported if state is not None), state_of(tier)]

    until(lambda: [state.names for state in states()] == [2, 2, 4])
    return cache, states


def test_a_directory_with_the_last_possible_entry_costs_no_host_and_says_what_to_do(
    ending: ExitStack, valkey: AskedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can write any more, so nobody's silence means anything."""
    cache, states = hosts_each_other(ending, valkey.url)
    (stream,) = valkey.ask("KEYS", "kv:directory:*")
    last = (1 << 64) - 1
    valkey.ask("XADD", stream, f"{last}-{last}", "e", "the end")
    until(lambda: all(f"DEL {stream.decode()}" in state.why for state in states()))
    after_leases()
    assert [state.names for state in states()] == [2, 2, 4]
    assert caplog.text.count("DEL kv:directory:") == 3, "once by each"
    valkey.ask("DEL", stream)
    store(cache, key_chain(4))
    until(lambda: [state.names for state in states()] == [2, 4, 6] and not any(state.why for state in states()))


@pytest.mark.parametrize("taken_by", [("SET", "1"), ("RPUSH", "1", "2")], ids=["text", "list"])
def test_a_directory_whose_key_is_something_else_costs_no_host_and_says_what_to_do(
    ending: ExitStack, valkey: AskedServer, taken_by: tuple[str, ...]
) -> None:
    cache, states = hosts_each_other(ending, valkey.url)
    (stream,) = valkey.ask("KEYS", "kv:directory:*")
    valkey.ask(
        "EVAL", "redis.call('DEL', KEYS[1]) redis.call(unpack(ARGV))", 1, stream, taken_by[0], stream, *taken_by[1:]
    )
    until(lambda: all(f"DEL {stream.decode()}" in state.why for state in states()))
    after_leases()
    assert [state.names for state in states()] == [2, 2, 4]
    valkey.ask("DEL", stream)
    store(cache, key_chain(4))
    until(lambda: [state.names for state in states()] == [2, 4, 6] and not any(state.why for state in states()))


def test_a_directory_that_refuses_all_entries_costs_no_host(ending: ExitStack, valkey: AskedServer) -> None:
    """A host that does not see its own entries does not take others' silence for their end."""
    _, states = hosts_each_other(ending, valkey.url)
    valkey.ask("CONFIG", "SET", "maxmemory", "1")
    ending.callback(valkey.ask, "CONFIG", "SET", "maxmemory", "0")
    until(lambda: all("OOM" in state.why for state in states()[:2]))
    after_leases()
    assert [state.names for state in states()][:2] == [2, 2]


class EndlessRedis:
    """A directory in which there is always more to read, and in which it counts what is written."""

    def __init__(self, ending: ExitStack, *, moves: bool) -> None:
        """moves: whether the positions of the entries increase."""
        self.written = self.asked = 0
        self._moves = moves
        server = Answering(self._serve)
        ending.callback(server.close)
        self.url = f"redis://127.0.0.1:{server.port}"

    def _serve(self, sock: socket.socket) -> None:
        while command := sock.recv(1 << 16):
            sock.sendall(self._answer(command))

    def _answer(self, command: bytes) -> bytes:
        if b"XADD" in command:
            self.written += 1
            return b"$3\r\n1-1\r\n"
        if b"XREVRANGE" in command:
            return b"*0\r\n"
        first = self.asked * AT_ONCE if self._moves else 1
        self.asked += 1
        ids = (b"%d-1" % (first + number) for number in range(AT_ONCE))
        entries = b"".join(b"*2\r\n$%d\r\n%b\r\n*2\r\n$1\r\ne\r\n$1\r\nx\r\n" % (len(one), one) for one in ids)
        return b"*1\r\n*2\r\n$1\r\nk\r\n*%d\r\n" % AT_ONCE + entries


@pytest.mark.parametrize("moves", [True, False])
def test_a_directory_that_always_has_more_to_read_delays_no_entry_of_ours(ending: ExitStack, moves: bool) -> None:
    """One that answers with the same entries again and again, as they are or under ever new positions."""
    endless = EndlessRedis(ending, moves=moves)
    listed(ending, endless.url)
    until(lambda: endless.written > 3)
    if not moves:
        asked, began_s = endless.asked, time.monotonic()
        until(lambda: endless.asked > asked + 10)
        assert time.monotonic() - began_s > 8 * QUICK["interval_s"], "asked no more often than the settings say"


def test_a_server_that_listens_everywhere_must_say_where_it_is_reached() -> None:
    tier = {"type": "peers", "directory": {"url": "redis://h"}, "unprotected": True}
    peers = {"listen": "0.0.0.0:9500", "unprotected": True}
    with pytest.raises(ConfigError, match="write address"):
        read_config({"tiers": [tier], "peers": peers})
    told = {**tier, "directory": {"url": "redis://h", "address": "kv-a:9500"}}
    assert read_config({"tiers": [told], "peers": peers}).tiers == [told]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": ["127.0.0.1:1"], "directory": {"url": "redis://h"}}, "leave out hosts"),
        ({"directory": {"url": "redis://h", "intervall_s": 1}}, "interval_s"),
        ({"directory": {}}, "url"),
        ({"directory": {"url": "http://h"}}, "http:// is not one of"),
        ({"directory": {"url": "redis://u:p@h"}}, "user or password"),
        ({"directory": {"url": "redis://h", "interval_s": 1, "lease_s": 2}}, "lease_s at least three times"),
        ({"directory": {"url": "redis://h", "address": "nowhere"}}, "address"),
        ({"directory": {"url": "redis://h", "password_file": "/nowhere"}}, "password_file"),
        ({"directory": {"url": "redis://h", "piece_bytes": 4096}}, "piece_bytes"),
    ],
)
def test_a_directory_that_cannot_be_honoured_ends_a_servers_start(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(HostConfig(), [{"type": "peers", "unprotected": True, **options}])


def test_the_state_of_the_directory_is_shown_to_operators(ending: ExitStack, valkey: AskedServer) -> None:
    """In the report, metrics, `kv top` and `kv explain`: hosts, chunks, and when Valkey is away, that it is."""
    _, first = listed(ending, valkey.url)
    served = Served(tiers=[{"type": "peers", "directory": {"url": valkey.url, **QUICK}, **PATIENT}])
    ending.callback(served.close)
    second = served.join("f")
    ending.callback(second.close)
    keys = key_chain(6)
    store(first, keys)

    def known() -> DirectoryState:
        state = report_of(served.path).caches[0].directories["peers"]
        assert state is not None
        return state

    until(lambda: known().names == 6 and known().exact == 1)
    assert report_of(served.path).caches[0].tiers[0].usage.chunks == 6
    assert 'kv_directory_chunks{cache="' in (text := served.get("/metrics").text) and "kv_directory_up{" in text
    assert "1 other hosts, 1 of them known exactly, with 6 chunks" in known().spelled()
    digests = b"".join(key.digest for key in keys)
    asked = wire.Explain(len(keys[0].digest), digests, [bytes(keys[0][: -len(keys[0].digest)])])
    explained = ask_server(served.path, asked)
    assert isinstance(explained, wire.Explanations)
    (one,) = explained.explained
    assert one.held == 6 and one.directories["peers"].names == 6 and one.remote_tiers_skipped == []
    valkey.stop()
    until(lambda: known().why)
    assert "fails (" in known().spelled()
    valkey.start()
    until(lambda: not known().why)
