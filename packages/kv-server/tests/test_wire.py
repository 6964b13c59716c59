"""Messages: what was said is what is heard, however it is cut up, and nothing else is taken for a message."""

import contextlib
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.cost import Choice, Costs, Measured, Skipped
from kv_core.coverage import ChunkShape
from kv_core.errors import InputError, MisuseError
from kv_core.keys import KEY_BYTES, KEY_VERSION, ChunkKey
from kv_core.service import CacheCounts
from kv_core.testing import key_chain
from kv_observe.chunk_state import ChunkState, GroupState
from kv_server import wire
from kv_server.report import CacheReport, DrainState, PeersServed, Registration, ReloadReport, Report, TenantReport
from kv_tiers.tier import TierUsage
from kv_tiers.tier_state import Health, Held, LaneCounts, SpillCounts, TierState

COUNTS = CacheCounts(*range(18))
KEYS = wire.pack_keys(key_chain(3))
REQUESTS: list[wire.Request] = [
    wire.Hello("0.1.0"),
    wire.Register("engine", (4096, 512), "fingerprint", 2, {"space": "model"}, b"t" * 16, [1, 2], KEYS, True),
    wire.Unregister(),
    wire.Registered("engine"),
    wire.Ping(),
    wire.Status(),
    wire.Drain(True, 60.0, 1 << 30),
    wire.Drain(False, 60.0, None),
    wire.Freeze(True),
    wire.Reload(True),
    wire.TakeOver(1, "0.1.0"),
    wire.Explain(32, b"d" * 64, [bytes([1]) + bytes(29)]),
    wire.Lookup(KEYS, "holder", 16, ("all", "window:512"), 2, {"wait_for_promotion": True}),
    wire.Lookup(KEYS, "holder", 16, ("all",), 1, {"wait_for_promotion": True, "tiers": ["disk"]}),
    wire.Lookup(
        KEYS,
        "holder",
        16,
        ("all",),
        1,
        {"wait_for_promotion": True, "costs": Costs(512, (1e-4, 1e-9), (0.002, 1e-6), stores=False)},
    ),
    wire.MeasuredSamples([Measured("load", 0.5, 0.25)]),
    wire.Renew("holder"),
    wire.Load(KEYS, "holder", True),
    wire.BeginStore(KEYS, "holder", {}),
    wire.BeginStore(KEYS, "holder", {"hold_s": 1.5, "tiers": ["host", "disk"]}),
    wire.Allocated({"holder": 3}),
    wire.Commit(7),
    wire.Release(7),
    wire.Forget(KEYS),
    wire.Received(KEYS),
    wire.TurnEnded(KEYS),
    wire.Retainable(KEYS),
    wire.End("holder"),
    wire.Clear(),
    wire.Counts(),
    wire.ChangesSince(9),
]
REPORT = Report(
    pid=1,
    package="0.1.0",
    sessions=[Registration(1, 2, "engine", (4096, 512), "f", 1, {"a": "b"})],
    orphans=0,
    caches=[
        CacheReport(
            4096,
            (4096, 512),
            "f",
            "pool",
            1,
            COUNTS,
            Held(1, 4096, (1, 0)),
            [TierState("disk", Health.UP, "", TierUsage(None, 1, 2), LaneCounts(loaded=3), SpillCounts(4), (0.1, 0.2))],
            {},
            [TenantReport("a", "00" * 7, 1, 4096, None)],
            1,
            drain=DrainState("stopped", "the time is up", 9, 1, 2, 8192, 3, 0, 3),
        )
    ],
    peers=PeersServed(1, 2, 3, 4, 5, 6),
)
ANSWERS: list[wire.Answer] = [
    wire.Failed("misuse", "why"),
    wire.Welcome("0.1.0", 1),
    wire.Pool("pool", (4096, 512), 8, b"t" * 16, [1], True, ("host", "disk"), 300.0),
    wire.Done(),
    wire.Truth(True),
    wire.Planned(1, "INCOMPLETE", ("host",), 3, 1, None),
    wire.Planned(1, "ABSENT", ("host",), 1, -1, Choice(0, 0.5, None, Skipped(3, "disk", 4.0, 0.25))),
    wire.ReadLeased(2, [3, 4], wire.Keys(), ""),
    wire.WriteLeased(3, [0, 2], [5, 6], "no room"),
    wire.Fitting(3),
    wire.Counted(COUNTS),
    wire.Changed(9, True, [wire.KeyChange(True, KEYS), wire.KeyChange(False, wire.Keys())]),
    wire.Registrations(REPORT.sessions),
    wire.Stated(REPORT),
    wire.Reloaded(ReloadReport(["tenant a is new, with no quota"], {"peers.listen": "take-over"}, "")),
    wire.Explanations(
        1,
        1024,
        7.5,
        True,
        [
            wire.Explained(
                (4096, 512),
                "f",
                "00",
                "00",
                ["engine"],
                True,
                1,
                1,
                2,
                [GroupState(1, "window:512", (ChunkState(1, 1, ""),))],
                ["redis"],
                [
                    ChunkState(0, 1, "host"),
                    ChunkState(1, 2, "", "evicted", "host", "store", "lru", 3.0, 9.0, ("disk",)),
                ],
                False,
                Choice(2, 0.25, 0.5),
            )
        ],
    ),
]


def body_of(message: wire.Request | wire.Answer) -> bytes:
    return wire.frame(message)[wire.HEADER.size :]


def test_every_message_is_heard_as_it_was_said() -> None:
    assert {type(request) for request in REQUESTS} == set(wire.Request.__args__)  # type: ignore[attr-defined]
    assert {type(answer) for answer in ANSWERS} == set(wire.Answer.__args__)  # type: ignore[attr-defined]
    for request in REQUESTS:
        assert wire.read_request(body_of(request)) == request
    for answer in ANSWERS:
        assert wire.read_answer(body_of(answer)) == answer


@given(st.lists(st.sampled_from(REQUESTS), max_size=8), st.lists(st.integers(1, 300), max_size=30))
def test_messages_may_arrive_in_any_pieces(requests: list[wire.Request], cuts: list[int]) -> None:
    sent, heard = b"".join(map(wire.frame, requests)), []
    frames = wire.Frames(wire.MAX_REQUEST_BYTES)
    for cut in [*cuts, len(sent)]:
        frames.feed(sent[:cut])
        sent = sent[cut:]
        while (body := frames.next()) is not None:
            heard.append(wire.read_request(body))
    assert heard == requests


@pytest.mark.parametrize("length", [16, 32])
def test_keys_are_one_run_of_bytes(length: int) -> None:
    keys = [ChunkKey(key[:30] + key.digest[:length]) for key in key_chain(5)]
    packed = wire.pack_keys(keys)
    assert (packed.key_bytes, packed.joined) == (30 + length, b"".join(keys))
    assert packed.unpack() == keys
    assert all(type(key) is ChunkKey for key in packed.unpack())
    assert wire.pack_keys([]).unpack() == []


OF_EVERY_LENGTH = [
    ChunkKey(bytes([KEY_VERSION]) + bytes([fill]) * (nbytes - 1)) for nbytes in KEY_BYTES for fill in range(3)
]


@given(st.lists(st.sampled_from(OF_EVERY_LENGTH), max_size=6))
def test_keys_of_different_lengths_are_a_bug_of_the_caller(keys: list[ChunkKey]) -> None:
    if len(set(map(len, keys))) <= 1:
        assert wire.pack_keys(keys).unpack() == keys
    else:
        with pytest.raises(MisuseError):
            wire.pack_keys(keys)


@pytest.mark.parametrize(
    "wrong",
    [
        wire.Keys(0, b"x"),
        wire.Keys(46, b"\x01" * 45),
        wire.Keys(40, b"\x01" * 40),
        wire.Keys(46, b"\x02" * 46),
        wire.Keys(46, b"\x01" * 46 + b"\x02" * 46),
        wire.Keys(46, b"\x01" * 46 * (wire.MAX_KEYS + 1)),
    ],
)
def test_what_are_no_keys_is_refused(wrong: wire.Keys) -> None:
    with pytest.raises(InputError):
        wrong.unpack()


@settings(max_examples=300)
@given(st.sampled_from(REQUESTS), st.data())
def test_a_bent_request_is_refused_or_is_another_one(request: wire.Request, data: st.DataObject) -> None:
    body = bytearray(body_of(request))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InputError):
        assert type(wire.read_request(bytes(body))) in {type(known) for known in REQUESTS}


@given(st.sampled_from(REQUESTS), st.integers(0, 200))
def test_a_cut_request_is_refused(request: wire.Request, cut: int) -> None:
    body = body_of(request)
    if cut < len(body):
        with pytest.raises(InputError):
            wire.read_request(body[:cut])


@pytest.mark.parametrize(
    "wrong",
    [
        ["ping", 1],
        ["pong"],
        ["renew", "h" * 257],
        ["renew"],
        ["renew", 5],
        ["commit", -1],
        ["commit", 1 << 40],
        ["lookup", [62, b""], "h", 0, False],
        ["lookup", [63, b""], "h", 1, False],
        ["lookup", [62, "text"], "h", 1, False],
        ["register", "e", 0, "f", 1, {}, b"", [], [0, b""], False],
        ["register", "e", 1, "f", 0, {}, b"", [], [0, b""], False],
        ["register", "e", 1, "f", 1, {str(n): "" for n in range(33)}, b"", [], [0, b""], False],
        ["register", "e", 1, "f", 1, {"a": "b" * 4097}, b"", [], [0, b""], False],
        ["register", "e", 1, "f", 1, {}, b"t" * 17, [], [0, b""], False],
        ["welcome", "0.1.0", 1],
        {"ping": 1},
        [],
        7,
    ],
)
def test_every_field_has_its_bounds(wrong: object) -> None:
    with pytest.raises(InputError):
        wire.read_request(msgspec.msgpack.encode(wrong))
    with pytest.raises(InputError):
        wire.read_answer(b"\xc1")


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(InputError):
        wire.read_request(b"\x91" * 100_000)


@given(st.integers(0, 2**32 - 1), st.integers(0, 255))
def test_a_header_is_judged_before_its_message_comes(nbytes: int, version: int) -> None:
    frames = wire.Frames(1000)
    frames.feed(struct.pack("<IB", nbytes, version))
    if version == wire.VERSION and 0 < nbytes <= 1000:
        assert frames.next() is None
    elif version == wire.VERSION and nbytes == 0:
        assert frames.next() == b""
    else:
        with pytest.raises(InputError, match="version" if version != wire.VERSION else "at most"):
            frames.next()


@pytest.mark.parametrize("coverage", ["", "window", "window:0", "window:-1", "window:1e3", "ALL", "state:1", "all:1"])
def test_a_coverage_that_there_is_not_is_refused_on_arrival(coverage: str) -> None:
    said = wire.read_request(body_of(wire.Lookup(KEYS, "h", 16, ("all", coverage), 1, {})))
    assert isinstance(said, wire.Lookup)
    with pytest.raises(InputError, match="there is no coverage"):
        said.shape()


@pytest.mark.parametrize(
    "lookup",
    [
        wire.Lookup(KEYS, "h", 0, ("all",), 1, {}),
        wire.Lookup(KEYS, "h", 16, (), 1, {}),
        wire.Lookup(KEYS, "h", 16, ("all",), 0, {}),
        wire.Lookup(KEYS, "h", 16, ("all",) * 1025, 1, {}),
        wire.Lookup(KEYS, "h", 16, ("window:" + "1" * 100,), 1, {}),
        wire.Lookup(KEYS, "h", 16, ("all",), 1, {"wait_for_promotion": 1}),  # type: ignore[typeddict-item]
        wire.Register("e", (), "f", 1, {}, b"", [], wire.Keys(), False),
        wire.Register("e", (4096, 0), "f", 1, {}, b"", [], wire.Keys(), False),
        wire.Register("e", (1,) * 1025, "f", 1, {}, b"", [], wire.Keys(), False),
    ],
)
def test_shapes_and_sizes_out_of_bounds_are_no_requests(lookup: wire.Lookup | wire.Register) -> None:
    with pytest.raises(InputError, match="not a request"):
        wire.read_request(body_of(lookup))


def test_the_examples_on_the_formats_page_are_true() -> None:
    """Whoever writes a client in another language checks it against these."""
    page = (Path(__file__).parents[3] / "docs" / "formats" / "wire.md").read_text()
    blocks = page.split("```")[1].strip().split("\n\n")
    hello, lookup, planned = (bytes.fromhex(block.replace("\n", " ")) for block in blocks)
    assert hello == wire.frame(wire.Hello("0.1.0"))
    said = wire.read_request(lookup[wire.HEADER.size :])
    assert isinstance(said, wire.Lookup)
    assert (len(said.keys.unpack()), said.holder, said.options) == (1, "request-1", {})
    assert said.shape() == ChunkShape(256)
    assert wire.frame(said) == lookup
    assert planned == wire.frame(wire.Planned(0, "ABSENT", (), 0, -1, None))
    for message in [*REQUESTS, *ANSWERS]:
        assert f"`{type(message).__struct_config__.tag}`" in page


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (wire.Explain(32, b"d" * 33, []), "no digests of 32 bytes"),
        (wire.Explain(32, b"d" * 32, [b"head"]), "a chunk key has"),
        (wire.Explain(32, b"d" * 32, [bytes(30)]), "version 0"),
    ],
)
def test_an_explanation_is_asked_for_with_digests_and_heads_of_keys(request_: wire.Explain, why: str) -> None:
    with pytest.raises(InputError, match=why):
        request_.unpack()


def test_more_chunks_than_are_explained_at_a_time_are_no_request() -> None:
    with pytest.raises(InputError):
        wire.read_request(body_of(wire.Explain(32, bytes(32 * (wire.MAX_EXPLAINED + 1)), [])))
