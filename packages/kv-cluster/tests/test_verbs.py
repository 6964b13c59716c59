"""Every verb on four servers that engines use meanwhile: what it says of each is what that server then has."""

import re
import runpy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from kv_cluster import client, verbs
from kv_cluster.members import Member
from kv_cluster.requests import MAX_TIMEOUT_S, REQUESTS
from kv_cluster.verbs import open_fleet
from kv_core.keys import keys_in, tenant_tag
from kv_server.http.thread import REQUEST_S
from kv_testing.cache_servers import read, report_of, store
from kv_testing.fleet import TOKEN, FourServers, Load, prompt
from kv_testing.wait import until

pytestmark = pytest.mark.usefixtures("load")
ROUTER = Path(__file__).parents[3] / "examples" / "10_route.py"


def test_health_says_how_each_is(fleet: FourServers) -> None:
    status, answer = fleet.run("health")
    assert status == 0 and answer["done"] and len(answer["servers"]) == 4
    for one in answer["servers"]:
        assert one["text"].startswith("0.1.0, up ") and "pool" in one["text"] and not one["frozen"]
    assert "disk" in answer["servers"][1]["text"]
    keys = prompt("not while frozen", 2)
    store(fleet.caches[0], keys)
    fleet.post(2, "freeze")
    try:
        answers = fleet.run("health")[1]["servers"]
        _, refused = fleet.run("replicate", "--to", fleet.name(2), keys=keys)
    finally:
        fleet.post(2, "freeze/end")
    assert [one["frozen"] for one in answers] == [False, False, True, False]
    assert refused["servers"][0]["text"] == "it is frozen, and holds only 0 of 2 chunks"
    assert re.search(r"; frozen for [0-9]+ s$", answers[2]["text"])
    assert "frozen" not in fleet.texts("health", "--servers", fleet.name(2))[2]


def test_a_prefix_is_found_replicated_moved_and_cleared(fleet: FourServers) -> None:
    keys = prompt("whole life", 12)
    store(fleet.caches[0], keys)
    store(fleet.caches[1], keys[:5])
    assert fleet.held(keys) == [12, 5, 0, 0]
    texts = fleet.texts("where", keys=keys)
    assert texts[0] == "holds 12 of 12 chunks: 12 in host" and texts[2] == "holds 0 of 12 chunks"
    # To a named one, which fetches what it lacks only.
    assert fleet.texts("replicate", "--to", fleet.name(1), keys=keys) == {1: "has fetched 7 chunks, and holds 12"}
    assert fleet.texts("replicate", "--to", fleet.name(1), keys=keys) == {1: "holds 12 chunks already"}
    assert fleet.held(keys) == [12, 12, 0, 0]
    assert read(fleet.caches[1], keys)  # the bytes, too
    # To as many as are to have it.
    texts = fleet.texts("replicate", "--copies", "3", keys=keys)
    assert sorted(fleet.held(keys)) == [0, 12, 12, 12] and len(texts) == 3
    assert fleet.run("replicate", "--copies", "5", keys=keys)[0] == 1  # there are four, and they have it now
    assert fleet.held(keys) == [12, 12, 12, 12]
    # Away from one.
    moved = ("move", "--from", fleet.name(1), "--to", fleet.name(2))
    assert fleet.texts(*moved, keys=keys) == {2: "holds 12 chunks already", 1: "dropped 12 chunks"}
    assert fleet.held(keys) == [12, 0, 12, 12]
    assert fleet.texts(*moved, keys=keys) == {1: f"holds none of it, and {fleet.name(2)} holds 12 chunks"}
    assert fleet.texts("replicate", "--to", fleet.name(1), keys=keys) == {1: "has fetched 12 chunks, and holds 12"}
    # Everywhere.
    assert set(fleet.texts("clear", keys=keys).values()) == {"cleared 12 leading chunks"}
    assert fleet.held(keys) == [0, 0, 0, 0]
    assert fleet.run("replicate", "--to", fleet.name(1), keys=keys)[0] == 1
    status, answer = fleet.run("move", "--from", fleet.name(1), "--to", fleet.name(2), keys=keys)
    assert status == 1 and "holds none of it" in answer["servers"][0]["text"]


def test_what_only_a_disk_holds_is_found_and_pinned_and_moved(fleet: FourServers) -> None:
    keys = prompt("on disk", 6)
    store(fleet.caches[1], keys)
    fleet.evict(1, keys)
    assert fleet.texts("where", keys=keys)[1] == "holds 6 of 6 chunks: 6 in disk"
    assert fleet.texts("move", "--from", fleet.name(1), "--to", fleet.name(2), keys=keys)[1] == "dropped 6 chunks"
    assert fleet.held(keys) == [0, 0, 6, 0]


def test_a_model_with_windows_and_shards_needs_less_of_a_prefix(fleet: FourServers) -> None:
    digests = [key.digest for key in prompt("hybrid", 8)]
    keys = keys_in(bytes(16), digests, groups=range(2), shards=range(2), tenant=tenant_tag("salt of acme"))
    shape = ("--coverages", "all,window:9", "--chunk-tokens", "4", "--world", "2")
    # A window of nine tokens reaches two chunks back: of the first six, its group is not needed.
    needed = [key for number, key in enumerate(keys) if key.group == 0 or number >= 4 * 6]
    store(fleet.caches[0], needed)
    assert fleet.texts("where", *shape, keys=keys)[0] == "holds 8 of 8 chunks: 8 in host"
    moved = fleet.texts("move", "--from", fleet.name(0), "--to", fleet.name(1), *shape, keys=keys)
    assert moved == {1: "has fetched 8 chunks, and holds 8", 0: "dropped 8 chunks"}
    assert read(fleet.caches[1], needed)
    assert [text.split()[1] for text in fleet.texts("where", *shape, keys=keys).values()] == ["0", "8", "0", "0"]


def test_a_pin_is_of_its_tenant_and_on_those_that_hold_it(fleet: FourServers) -> None:
    ours, theirs = prompt("pinned", 4), prompt("pinned", 4, "globex")
    store(fleet.caches[0], ours)
    store(fleet.caches[3], ours[:2])
    store(fleet.caches[0], theirs)
    texts = fleet.texts("pin", "system", keys=ours)
    assert texts[0] == "pinned 4 of the 4 chunks that it holds" and texts[1] == "holds none of it"
    assert texts[3] == "pinned 2 of the 2 chunks that it holds"
    assert fleet.texts("pin", "system", "--servers", fleet.name(0), keys=theirs)[0].startswith("pinned 4")
    assert len(fleet.pins(0)) == 2 and len(fleet.pins(3)) == 1
    status, answer = fleet.run("move", "--from", fleet.name(0), "--to", fleet.name(2), keys=ours)
    assert status == 1 and "pinned as 'system': unpin it" in answer["servers"][1]["text"]
    assert fleet.held(ours) == [4, 0, 4, 2] and len(fleet.pins(0)) == 2
    again = fleet.texts("pin", "system", "--servers", f"{fleet.name(0)}, 127.0.0.11", "--timeout", "7200", keys=ours)
    assert list(again) == [0]  # asked once, and for no longer than a server promotes
    assert fleet.run("pin", "system", "--servers", fleet.name(1), keys=ours)[0] == 1
    assert fleet.run("pin", "other", keys=prompt("nobody's", 3))[0] == 1
    for text in ("unpinned", "has no such pin"):
        assert fleet.texts("unpin", "system", "--salt", "salt of acme")[0] == text
    assert len(fleet.pins(0)) == 1 and not fleet.pins(3)
    fleet.texts("unpin", "system", "--salt", "salt of globex")
    assert not fleet.pins(0)


def test_a_tenant_is_cleared_everywhere_and_no_other_is(fleet: FourServers) -> None:
    keys, others = prompt("of a tenant", 4), prompt("of a tenant", 4, "initech")
    for cache in fleet.caches:
        store(cache, keys)
        store(cache, others)
    assert len(fleet.texts("clear", "--tenant", "acme")) == 4
    assert fleet.held(keys) == [0, 0, 0, 0] and fleet.held(others) == [4, 4, 4, 4]
    assert fleet.run("clear", "--tenant", "unknown")[0] == 2 and "acme, globex" in fleet.said
    assert fleet.run("clear")[0] == 2 and fleet.run("clear", "--everything", "--tenant", "acme")[0] == 2
    assert list(fleet.texts("clear", "--everything", "--servers", f"{fleet.name(0)}")) == [0]
    assert fleet.held(others) == [0, 4, 4, 4]


def test_servers_that_were_all_cleared_read_each_other(fleet: FourServers) -> None:
    """One that was cleared alone does not: what others have may be older."""
    keys = prompt("after all was cleared", 4)
    assert len(fleet.texts("clear", "--everything")) == 4
    assert len(fleet.texts("clear", "--tenant", "acme")) == 4
    assert len(fleet.texts("clear", keys=keys)) == 4
    store(fleet.caches[1], keys)
    for number in (0, 2, 3):
        assert fleet.texts("replicate", "--to", fleet.name(number), keys=keys)[number].startswith("has fetched 4")
    fleet.texts("clear", "--servers", fleet.name(0), keys=keys)
    status, answer = fleet.run("replicate", "--to", fleet.name(0), "--timeout", "1", keys=keys)
    assert status == 1 and answer["servers"][0]["text"].startswith("holds 0 of 4 chunks, and can fetch no more")
    fleet.texts("clear", "--everything")


def assert_no_prompt_goes_there(fleet: FourServers, number: int) -> None:
    """By the example of a router, although an engine there would be quickest."""
    servers = [server.url.rstrip("/") for server in fleet.servers]
    router = runpy.run_path(str(ROUTER))["Router"](dict.fromkeys(servers, TOKEN), dict.fromkeys(servers, ""))
    router._expected = lambda server, *_: {server: float(server != servers[number])}
    assert router.choose([1]) == servers[number]
    router.look_around()
    assert router.choose([1]) != servers[number]


def test_a_drained_server_takes_nothing_until_that_ends(fleet: FourServers, load: Load) -> None:
    keys = prompt("leaves", 6)
    store(fleet.caches[3], keys)
    text = fleet.texts("drain", fleet.name(3), "--timeout", "20")[3]
    assert text.startswith("drained: of ") and "refused" not in text
    assert sum(fleet.held(keys)[:3]) >= 6
    assert 3 not in fleet.texts("replicate", "--copies", "2", keys=keys)  # its copy leaves with it
    assert fleet.held(keys)[:3].count(6) == 2
    assert "; drained: of " in (text := fleet.texts("health")[3]) and "; leaving for " in text
    assert_no_prompt_goes_there(fleet, 3)
    other = prompt("comes late", 3)
    store(fleet.caches[0], other)
    status, answer = fleet.run("replicate", "--to", fleet.name(3), keys=other)
    assert status == 1 and answer["servers"][0]["text"] == "it is being drained, and takes nothing new"
    assert fleet.texts("drain", fleet.name(3), "--end") == {3: "stores as before"}
    assert fleet.texts("replicate", "--to", fleet.name(3), keys=other)[3].startswith("has fetched 3")
    rounds = list(load.rounds)
    assert min(rounds) > 1 and report_of(fleet.servers[0].socket).frozen is False


@pytest.mark.slow
def test_any_server_carries_out_every_verb_over_http(fleet: FourServers) -> None:
    keys = prompt("over http", 6)
    named = {"keys": [key.hex() for key in keys]}
    fleet.caches[0].forget(keys)
    store(fleet.caches[0], keys)

    def did(verb: str, **body: Any) -> dict[int, str]:
        answer = fleet.ask_over_http(2, verb, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["done"], answer.text
        return fleet.by_number(answer.json())

    assert list(did("health")) == [0, 1, 2, 3]
    assert did("where", **named)[0] == "holds 6 of 6 chunks: 6 in host"
    assert did("replicate", to=["127.0.0.12"], **named) == {1: "has fetched 6 chunks, and holds 6"}
    assert did("move", source=fleet.name(0), target=fleet.name(2), **named)[0] == "dropped 6 chunks"
    assert fleet.held(keys) == [0, 6, 6, 0] and read(fleet.caches[2], keys)
    assert did("pin", name="http", servers=[fleet.name(2)], **named)[2].startswith("pinned 6")
    assert fleet.pins(2) == [f"{keys[0].tenant.hex()}.http"]
    assert did("unpin", name="http", tenant=keys[0].tenant.hex())[2] == "unpinned"
    assert did("clear-prefix", **named)[1] == "cleared 6 leading chunks"
    assert did("clear", tenant=keys[0].tenant.hex(), servers=[fleet.name(1)])[1].startswith("cleared ")
    assert did("drain", server=fleet.name(3), timeout_s=30)[3].startswith("drained: of ")
    assert did("drain", server=fleet.name(3), end=True) == {3: "stores as before"}
    # What is refused, and what is not known.
    assert fleet.ask_over_http(2, "clear", {"everything": True}, token="another").status_code == 401
    refusals = {
        "where": ({"keys": named["keys"], "coverages": ["all", "all"], "shards": 4}, 400, "not whole chunks"),
        "replicate": ({**named, "to": ["kv-z"]}, 409, "no server is called 'kv-z'"),
        "clear": ({}, 400, "give either a tenant, or everything"),
        "drain": ({"server": fleet.name(3), "timeout_s": 1e6}, 400, "timeout_s"),
        "pin": ({**named, "name": "a/b"}, 400, "up to 64 letters"),
    }
    for verb, (body, status, said) in refusals.items():
        answer = fleet.ask_over_http(2, verb, body)
        assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text
    fleet.token_file.rename(fleet.home / "away")
    answer = fleet.ask_over_http(2, "health", {})
    assert answer.status_code == 409 and "token_file" in answer.text and not fleet.token_file.exists()
    (fleet.home / "away").rename(fleet.token_file)
    document = httpx.get(f"{fleet.servers[0].url}openapi.json", timeout=30).json()
    assert {path.rpartition("/")[2] for path in document["paths"] if "/cluster/all/" in path} == set(REQUESTS)


def test_a_verb_over_http_ends_before_the_server_gives_its_request_up() -> None:
    """As many as are asked at a time may hang: before the verb and after it, and the verb of a drain has two more."""
    assert MAX_TIMEOUT_S + 4 * (client.ANSWER_S + verbs._GRACE_S) < REQUEST_S


@pytest.mark.slow
def test_as_many_verbs_at_once_as_leave_room_for_what_they_ask_of_their_own_server(fleet: FourServers) -> None:
    with fleet.stopped(3), ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda _: fleet.ask_over_http(0, "health", {}), range(12)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503} and 4 <= statuses.count(200) < 12
    for answer in answers:
        if answer.status_code == 200:
            assert [one["done"] for one in answer.json()["servers"]] == [True, True, True, False]
    until(lambda: fleet.run("health")[0] == 0)


def test_of_hundreds_of_servers_some_are_queried_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a descriptor and a thread. As many as are queried at a time hang, and keep no other from its turn."""
    for module in (client, verbs):
        monkeypatch.setattr(module, "ANSWER_S", 0.3)
    hanging, lock, now = verbs._MEMBERS_AT_ONCE, threading.Lock(), [0]
    healthy = msgspec.json.encode({"package": "1", "uptime_s": 1.0, "caches": []})

    def exchange(_: client.Client, url: str, path: str, body: object, until_s: float) -> tuple[int, bytes]:
        with lock:
            now.append(now[-1] + 1)
        time.sleep(max(0.0, until_s - time.monotonic()) if int(url[10:13]) < hanging else 0.001)
        with lock:
            now.append(now[-1] - 1)
        if int(url[10:13]) < hanging:
            raise TimeoutError
        return 200, healthy

    monkeypatch.setattr(client.Client, "_exchange", exchange)
    peers = {"type": "peers", "hosts": [f"kv-{number:03}:95" for number in range(300)], "unprotected": True}
    outcomes = open_fleet([peers], "127.0.0.1:94", "", timeout_s=1.0).health()
    assert [outcome.done for outcome in outcomes] == [number >= hanging for number in range(300)]
    assert max(now) == hanging


@pytest.mark.parametrize("keeps", [["disk"], []])
def test_a_drain_of_no_cache_is_done_only_if_nothing_may_be_held(
    monkeypatch: pytest.MonkeyPatch, keeps: list[str]
) -> None:
    """As at a restarted server whose disk has chunks, and while the cache of a format is being opened."""
    states = iter([0, 1, 0])  # as it is found, and then after each look at its drain
    asked = []

    def exchange(_: client.Client, url: str, path: str, body: object, until_s: float) -> tuple[int, bytes]:
        asked.append(path)
        state = {"package": "1", "uptime_s": 1.0, "keeps": keeps, "opening": next(states) if path == "/status" else 0}
        return 200, msgspec.json.encode({**state, "caches": []})

    monkeypatch.setattr(client.Client, "_exchange", exchange)
    peers = {"type": "peers", "hosts": ["127.0.0.1:95"], "unprotected": True}
    fleet = open_fleet([peers], "127.0.0.1:94", TOKEN, timeout_s=5.0)
    (outcome,) = fleet.drain(fleet.member("127.0.0.1"), max_bytes=None)
    assert outcome.done == (not keeps) and asked == ["/status", "/drain", "/status", "/drain", "/status"]
    assert ("it does not know what disk may hold" if keeps else "holds nothing") in outcome.text


def test_those_behind_servers_that_never_answer_are_not_queried_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "_MEMBERS_AT_ONCE", 2)
    answered = threading.Event()
    members = [Member(name, "") for name in "abcd"]
    outcomes = verbs._together(members, lambda _: answered.wait(30), 0.2)
    answered.set()
    assert ["not known" in str(outcomes[member]) for member in members] == [True, True, False, False]
    assert all("not queried" in str(outcomes[member]) for member in members[2:])


def test_what_is_wrong_on_the_command_line_is_said(fleet: FourServers) -> None:
    keys = prompt("options", 2)
    assert fleet.run("where")[0] == 2 and "--keys" in fleet.said
    assert fleet.run("health", "--servers", "kv-z")[0] == 1 and "no server is called 'kv-z'" in str(
        fleet.run("health", "--servers", "kv-z")
    )
    assert fleet.run("health", "--url", "http://elsewhere:1")[0] == 2 and "{host}" in fleet.said
    assert fleet.run("replicate", keys=keys)[0] == 2
    assert fleet.run("replicate", "--copies", "2", "--servers", fleet.name(0), keys=keys)[0] == 2
    assert "unrecognized arguments: --servers" in fleet.said  # rather than ignored
    assert fleet.run("where", keys=[*keys, *prompt("options", 1, "globex")])[0] == 2 and "several tenants" in fleet.said
    assert fleet.run("where", "--coverages", "all,all", keys=keys[:1])[0] == 2 and "whole chunks" in fleet.said
    assert fleet.run("where", "--coverages", "most", keys=keys)[0] == 2
    assert fleet.run("health", "--timeout", "0")[0] == 2


def test_a_server_that_hangs_delays_no_other_and_is_named(fleet: FourServers, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = prompt("with one that hangs", 4)
    for cache in fleet.caches:
        store(cache, keys)
    monkeypatch.setattr(client, "ANSWER_S", 1.0)
    began_s = time.monotonic()
    with fleet.stopped(3):
        status, answer = fleet.run("clear", keys=keys)
        assert time.monotonic() - began_s < 10
        texts = fleet.by_number(answer)
        assert status == 1 and [one["done"] for one in answer["servers"]] == [True, True, True, False]
        assert texts[0] == "cleared 4 leading chunks" and texts[3].startswith("no answer from http://127.0.0.14")
        assert fleet.held(keys) == [0, 0, 0, -1]
    until(lambda: fleet.run("health")[0] == 0)
    assert fleet.held(keys) == [0, 0, 0, 4]
    assert fleet.texts("clear", keys=keys)[3] == "cleared 4 leading chunks"
    assert fleet.held(keys) == [0, 0, 0, 0]
