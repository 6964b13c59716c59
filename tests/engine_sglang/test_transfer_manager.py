"""What a rank's manager does with a hand-over: SGLang is told of every outcome, and nothing is held for longer than it
is needed."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kv_sglang import transfer
from kv_sglang.exchange import IncomingRoom
from kv_sglang.names import Names
from kv_sglang.transfer import (
    STATUS,
    DecodeAborted,
    DecodePeer,
    DecodeReady,
    KVManager,
    KVReceiver,
    KVSender,
    PagesStored,
)
from kv_testing.fake_device import FakeDevice, FakeStream
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.observability.trace import TraceNullContext

ROOM = 1
HASHES = ("ab" * 32, "cd" * 32)
OTHERS = ("12" * 32, "34" * 32)
FIRST, SECOND = b"attempt1", b"attempt2"
"""Of two requests with the same number."""


class Reached:
    """A point that the device has reached, or never will."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def synchronize(self) -> None:
        if self.failure is not None:
            raise self.failure


class RecordedEvent:
    """torch's event, of the fake device's streams."""

    def record(self, stream: FakeStream) -> None:
        self.synchronize = stream.record().wait


def prefilling(monkeypatch: pytest.MonkeyPatch) -> tuple[KVManager, list[Sequence[bytes]]]:
    """The manager of a rank that computes prompts, as far as it stores pages, and what it tells the decode engine."""
    ours, told = KVManager.__new__(KVManager), list[Sequence[bytes]]()
    ours._rooms, ours._outgoing, ours._incoming, ours._batch_pages = threading.Lock(), {}, {}, 8
    ours._attached = SimpleNamespace(stores={transfer.KV: SimpleNamespace(revision="ours")})
    ours.request_status, ours.transfer_infos, ours.req_to_decode_prefix_len = {}, {}, {}
    ours._deferred_ack_targets, ours._deferred_ack_poisoned_rooms, ours._staging_outstanding = {}, set(), {}
    ours.failure_lock, ours.failure_records = threading.Lock(), {}
    ours.attn_tp_rank = ours.pp_rank = ours.attn_cp_rank = 0
    ours.pp_size = ours.attn_cp_size = 1
    ours.kv_args = SimpleNamespace(page_size=4, aux_data_ptrs=[], aux_item_lens=[])
    ours._forward_stream = FakeDevice(1).engine
    monkeypatch.setattr(transfer, "get_device_module", lambda: SimpleNamespace(Event=RecordedEvent))
    monkeypatch.setattr(ours, "_send_multipart_locked", lambda _where, parts, **_named: told.append(parts))
    return ours, told


def decode_rank(attempt: bytes, port: int = 1, prefix_tokens: int = 0) -> DecodePeer:
    return DecodePeer("127.0.0.1", port, prefix_tokens, False, attempt)


def open_room(ours: KVManager, hashes: tuple[str, ...]) -> None:
    """A request for a prompt with these pages, for which the decode engine has blocks."""
    ours.add_outgoing(ROOM, Names(hashes, 0))
    ours.request_status[ROOM] = KVPoll.WaitingForInput
    peer = decode_rank(FIRST)
    ours.transfer_infos[ROOM] = {peer.address: peer}


def stored(metadata: Sequence[bytes], attempt: bytes = FIRST) -> PagesStored:
    """Both pages are in the cache."""
    return PagesStored(ROOM, attempt, 0, 2, HASHES[1], "theirs", metadata)


def sent(ours: KVManager, **named: Any) -> Callable[[Any], None]:
    """The job that stores the request's two pages, given an exchange."""
    jobs: list[Callable[[Any], None]] = []
    ours._lanes = SimpleNamespace(add=lambda _room, job: jobs.append(job))
    ours.add_transfer_request(ROOM, [0, 1], slice(0, 2), True, aux_index=0, **named)
    (job,) = jobs
    return job


def test_a_device_that_fails_before_pages_can_be_read_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise SGLang waits for them until its own time is up, on both sides."""
    ours, told = prefilling(monkeypatch)
    open_room(ours, HASHES)
    job = sent(ours, wait_event=Reached(RuntimeError("the device failed")))
    job(SimpleNamespace())
    assert ours.request_status[ROOM] == KVPoll.Failed and "the device failed" in ours.failure_records[ROOM]
    ((tag, room, status, _rank, reason, attempt),) = told
    assert (tag, int(room), int(status)) == (b"KV_STATUS", ROOM, KVPoll.Failed) and b"the device failed" in reason
    assert attempt == FIRST


@pytest.mark.parametrize("seed", range(8))
def test_pages_are_read_after_the_forward_pass_that_computes_them_also_where_sglang_gives_no_event(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    ours, _ = prefilling(monkeypatch)
    device, computed = FakeDevice(seed), list[str]()
    stream = ours._forward_stream = device.make_stream()
    device.make_stream().enqueue(lambda: None)  # another stream's work, which says nothing about the forward's
    stream.enqueue(lambda: computed.append("pages"))
    open_room(ours, HASHES)
    job = sent(ours)
    stream.enqueue(lambda: computed.append("the next forward"))
    device.go_on(seed % 2)
    read: list[list[str]] = []

    def put(*_arguments: Any) -> str:
        read.append(computed[:1])
        return ""

    job(SimpleNamespace(put=put))
    assert read == [["pages"]]


@pytest.mark.parametrize("outcome", ["", "the request has ended"])
def test_a_store_that_ends_after_its_request_changes_nothing_of_another_with_its_number(
    monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """Neither engine would have the other request's pages, or both would end it for nothing."""
    ours, told = prefilling(monkeypatch)
    open_room(ours, HASHES)
    job = sent(ours)

    def put(*_arguments: Any) -> str:
        ours.close_room(ROOM)
        open_room(ours, HASHES)
        return outcome

    job(SimpleNamespace(put=put))
    assert ours.request_status == {ROOM: KVPoll.WaitingForInput}
    assert ours.failure_records == {} and told == []


def test_blocks_of_a_request_that_has_ended_are_not_stored_as_the_pages_of_another_with_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store may have to wait for those of other requests, and nobody knows what is in the blocks by then."""
    ours, _ = prefilling(monkeypatch)
    open_room(ours, HASHES)
    job = sent(ours)
    ours.close_room(ROOM)
    open_room(ours, OTHERS)
    stored: list[Sequence[str]] = []

    def put(names: Names, _first: int, _slots: Sequence[int], is_wanted: Callable[[], bool]) -> str:
        if not is_wanted():
            return "the request has ended"
        stored.append(names.hashes)
        return ""

    job(SimpleNamespace(put=put))
    assert stored == []
    assert ours.request_status == {ROOM: KVPoll.WaitingForInput}


def side(kind: type[KVSender | KVReceiver], ours: KVManager) -> Any:
    """A request's, as SGLang makes it; it polls and ends as SGLang's own."""
    made = kind.__new__(kind)
    made.kv_mgr, made.bootstrap_room, made.conclude_state, made._attempt = ours, ROOM, None, SECOND
    made._owns_bootstrap_room, made.trace_ctx, made._early_send_wait_event = True, TraceNullContext(), None
    return made


def test_a_request_whose_number_another_one_has_ends_alone_and_its_blocks_are_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one's blocks would have been stored as the second one's pages, and stayed open after its end."""
    ours, _ = prefilling(monkeypatch)
    ours.deferred_bootstrap = None
    first, second = side(KVSender, ours), side(KVSender, ours)
    open_room(ours, ())
    ours.close_room(ROOM)
    first.name_pages(Names(HASHES, 0))
    job = sent(ours)
    second.name_pages(Names(OTHERS, 0))
    assert (first.poll(), second.poll()) == (KVPoll.WaitingForInput, KVPoll.Failed)
    second.send([4, 5])
    with pytest.raises(KVTransferError, match="still has the same number"):
        second.failure_exception()
    stored: list[Sequence[str]] = []

    def put(names: Names, _first: int, _slots: Sequence[int], is_wanted: Callable[[], bool]) -> str:
        if is_wanted():
            stored.append(names.hashes)
        return ""

    job(SimpleNamespace(put=put))
    assert stored == [HASHES] and ours.request_status == {ROOM: KVPoll.Success}
    ours._maybe_ack_drained_abort, ours._staging_ctx = lambda _room: None, None
    first.clear()
    assert ours._outgoing == {} and ours.failure_records == {}
    second.name_pages(Names(OTHERS, 0))  # it has ended: whoever comes now is another one
    assert ours._outgoing == {}


def test_a_request_to_decode_whose_number_another_one_has_leaves_its_blocks_alone() -> None:
    ours, first = decoding(attempt=FIRST)
    second = side(KVReceiver, ours)
    second.name_pages(Names(HASHES, 0))
    ours.after_forward = Reached
    ours.kv_args = SimpleNamespace(page_size=4)
    second.send_metadata([7, 8], 0)
    assert second.poll() == KVPoll.Failed and ours._incoming == {ROOM: first}
    second.abort()
    assert first.is_open and ours.request_status == {ROOM: KVPoll.WaitingForInput}
    ours.close_room(ROOM)
    assert not first.is_open and ours._incoming == {}


def test_pages_that_the_decode_engine_has_are_let_go_once_it_has_the_others() -> None:
    """A store of the prefill engine holds all of the prompt's pages so far, so until then they may be held again."""
    calls: list[Sequence[str]] = []

    def get(names: Names, first: int, slots: Sequence[int], *_rest: Any, **_named: Any) -> str:
        calls.append(["get", *names.hashes[first : first + len(slots)]])
        return ""

    def release_pages(names: Names, pages: int, *, given_by: str) -> None:
        calls.append(["need not", *names.hashes[:pages], given_by])

    exchange = SimpleNamespace(get=get, release_pages=release_pages)
    ours, metadata = KVManager.__new__(KVManager), ctypes.create_string_buffer(1)
    ours._rooms, ours._incoming, ours._batch_pages = threading.Lock(), {}, 8
    ours._lanes = SimpleNamespace(add=lambda _room, job: job(exchange))
    ours._watch = SimpleNamespace(filled=lambda: None)
    ours.kv_args = SimpleNamespace(aux_data_ptrs=[ctypes.addressof(metadata)], aux_item_lens=[1])
    incoming = IncomingRoom(Names(HASHES, 0), 1, [4], aux_index=0, loaded=1, ready=Reached(), attempt=FIRST)
    ours.add_incoming(ROOM, incoming)
    assert ours._fetch(exchange, incoming, stored([b"7"])) == ""
    assert calls == [["get", HASHES[1]], ["need not", HASHES[0], "theirs"]]
    assert metadata.raw == b"7"


def test_a_load_that_ends_after_its_request_leaves_nothing_behind() -> None:
    """A reason that nobody takes would stay for ever, or be another request's that gets the same number."""
    ours = KVManager.__new__(KVManager)
    ours._rooms, ours._incoming, ours._outgoing, ours._batch_pages = threading.Lock(), {}, {}, 8
    ours._watch = SimpleNamespace(filled=lambda: None)
    ours.request_status, ours.failure_lock, ours.failure_records = {ROOM: KVPoll.Transferring}, threading.Lock(), {}
    incoming = IncomingRoom(Names(HASHES, 0), 0, [0, 4], aux_index=0, loaded=0, ready=Reached(), attempt=FIRST)
    ours.add_incoming(ROOM, incoming)

    def get(*_arguments: Any, **_named: Any) -> str:
        ours.close_room(ROOM)
        del ours.request_status[ROOM]
        return "the request has ended"

    ours._load(SimpleNamespace(get=get), stored=stored([]))
    assert ours.failure_records == {}


def test_a_load_that_is_done_after_its_request_is_not_the_success_of_another_with_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would decode from blocks to which nothing was loaded."""
    ours = KVManager.__new__(KVManager)
    ours._rooms, ours._outgoing, ours._incoming = threading.Lock(), {}, {}
    ours.request_status, ours.enable_staging = {ROOM: KVPoll.WaitingForInput}, False
    ours.prefill_response_tracker, ours.required_prefill_response_num_table = {ROOM: set()}, {ROOM: 1}

    def request() -> None:
        ours.add_incoming(
            ROOM, IncomingRoom(Names(HASHES, 0), 0, [0, 4], aux_index=0, loaded=0, ready=Reached(), attempt=FIRST)
        )

    def fetch(*_arguments: Any) -> str:
        ours.close_room(ROOM)
        request()
        return ""

    monkeypatch.setattr(ours, "_fetch", fetch)
    request()
    ours._load(SimpleNamespace(), stored=stored([b"7"]))
    assert ours.request_status == {ROOM: KVPoll.WaitingForInput}


def decoding(*, attempt: bytes) -> tuple[KVManager, IncomingRoom]:
    """The manager of a rank that decodes, which waits for a request, as far as it hears of others."""
    ours = KVManager.__new__(KVManager)
    ours._rooms, ours._incoming, ours._outgoing, ours._batch_pages = threading.Lock(), {}, {}, 8
    ours._watch = SimpleNamespace(filled=lambda: None)
    ours.request_status, ours.failure_lock, ours.failure_records = {ROOM: KVPoll.WaitingForInput}, threading.Lock(), {}
    ours.enable_deferred_decode_kv_release = ours.enable_staging = False
    ours.kv_args = SimpleNamespace(aux_data_ptrs=[], aux_item_lens=[])
    incoming = IncomingRoom(Names(HASHES, 0), 0, [0, 4], aux_index=0, loaded=0, ready=Reached(), attempt=attempt)
    ours.add_incoming(ROOM, incoming)
    return ours, incoming


def test_what_is_said_late_of_an_earlier_request_changes_nothing_of_one_that_has_its_number() -> None:
    """Its failure, or its pages with their own first token, would have been the later request's."""
    ours, incoming = decoding(attempt=SECOND)
    ours._lanes = SimpleNamespace(add=lambda _room, job: job(SimpleNamespace()))
    status = [STATUS, b"%d" % ROOM, b"%d" % KVPoll.Failed, b"0", b"its prefill engine had no room"]
    ours._on_prefill_message([*status, FIRST])
    ours._on_prefill_message(stored([b"7"], FIRST).frames())
    assert ours.request_status == {ROOM: KVPoll.WaitingForInput} and ours.failure_records == {}
    assert incoming.loaded == 0
    ours._on_prefill_message([*status, SECOND])
    assert ours.request_status == {ROOM: KVPoll.Failed} and "no room" in ours.failure_records[ROOM]


@pytest.mark.parametrize("given_up", [decode_rank(FIRST), decode_rank(FIRST, port=2)], ids=["same", "another"])
def test_a_decode_engine_that_gives_up_late_does_not_end_another_request_with_the_number(
    monkeypatch: pytest.MonkeyPatch, given_up: DecodePeer
) -> None:
    """A router may repeat a request with its number, also with another decode engine."""
    ours, _ = prefilling(monkeypatch)
    open_room(ours, HASHES)
    rank = decode_rank(SECOND)
    ours.transfer_infos[ROOM] = {rank.address: rank}
    ours._on_decode_message(DecodeAborted(ROOM, given_up.address, given_up.attempt).frames())
    assert ours.request_status == {ROOM: KVPoll.WaitingForInput} and ours.failure_records == {}
    ours._on_decode_message(DecodeAborted(ROOM, rank.address, SECOND).frames())
    assert ours.request_status == {ROOM: KVPoll.Failed} and ROOM in ours.failure_records


def test_a_decode_engine_that_gives_up_before_it_has_blocks_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = prefilling(monkeypatch)
    ours.request_status[ROOM] = KVPoll.Bootstrapping
    ours._on_decode_message(DecodeAborted(ROOM, "127.0.0.1:1", FIRST).frames())
    assert ours.request_status == {ROOM: KVPoll.Failed}


@pytest.mark.parametrize("required", [1, 2])
def test_a_request_that_is_given_up_before_it_comes_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, required: int
) -> None:
    """Where the prefill engine refuses a request, only the decode engine has it. Its number failed every request that
    repeated it, and what was known of it stayed for ever."""
    ours, _ = prefilling(monkeypatch)
    rank = decode_rank(FIRST)
    ours._on_decode_message(DecodeReady(ROOM, required, rank).frames())
    assert ROOM in ours.transfer_infos
    ours._on_decode_message(DecodeAborted(ROOM, rank.address, FIRST).frames())
    assert ours.request_status == ours.transfer_infos == ours.req_to_decode_prefix_len == ours.failure_records == {}


def test_a_request_that_finds_an_earlier_one_under_its_number_hears_of_the_pages_or_that_it_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was not listened to, and waited until its time was up."""
    ours, told = prefilling(monkeypatch)
    ours._on_decode_message(DecodeReady(ROOM, 1, decode_rank(b"attempt0", prefix_tokens=4)).frames())
    ours._on_decode_message(DecodeReady(ROOM, 1, decode_rank(FIRST)).frames())  # nobody waits for these any more
    assert ours.req_to_decode_prefix_len == {ROOM: 0}
    ours.add_outgoing(ROOM, Names(HASHES, 0))
    job = sent(ours)
    ours._on_decode_message(DecodeReady(ROOM, 1, decode_rank(SECOND)).frames())
    job(SimpleNamespace(put=lambda *_arguments: ""))
    attempts = [msgspec.msgpack.decode(message[1], type=PagesStored).attempt for message in told]
    assert attempts == [SECOND, SECOND] and ours.request_status == {ROOM: KVPoll.Success}
    told.clear()
    ours._on_decode_message(DecodeReady(ROOM, 1, decode_rank(b"attempt3")).frames())
    ((tag, _room, status, _rank, reason, attempt),) = told
    assert (tag, int(status), attempt) == (STATUS, KVPoll.Failed, b"attempt3") and b"earlier request" in reason


@pytest.mark.parametrize(
    ("ends", "reads_together", "says_taken", "is_let_go"),
    [
        ("clear", False, False, False),  # reading the pages has ended their holds
        ("abort", False, False, True),
        ("clear", True, True, True),
        ("clear", True, False, False),
        ("abort", True, True, True),
        ("abort", True, False, False),
    ],
)
def test_pages_that_nobody_will_read_are_let_go(
    monkeypatch: pytest.MonkeyPatch, ends: str, reads_together: bool, says_taken: bool, is_let_go: bool
) -> None:
    """Those of a request that was given up stayed held until their time was over, and at most half of a pool is held.
    Where all ranks read the same pages, one says so: SGLang clears a request that has succeeded once every rank has."""
    ours, incoming = decoding(attempt=FIRST)
    ours._reads_together, ours._releases_holds, incoming.given_by = reads_together, says_taken, "theirs"
    let_go: list[tuple[Sequence[str], str]] = []
    exchange = SimpleNamespace(release_pages=lambda names, *, given_by: let_go.append((names.hashes, given_by)))
    ours._lanes = SimpleNamespace(add=lambda _room, job: job(exchange))
    monkeypatch.setattr(transfer.CommonKVReceiver, ends, lambda _receiver: None)
    receiver = transfer.KVReceiver.__new__(transfer.KVReceiver)
    receiver.kv_mgr, receiver.bootstrap_room = ours, ROOM
    if ends == "clear":
        ours.request_status[ROOM] = KVPoll.Success
    for _ in range(2):  # SGLang clears a failed request again
        getattr(receiver, ends)()
    assert let_go == [(HASHES, "theirs")] * is_let_go
    assert not incoming.is_open
