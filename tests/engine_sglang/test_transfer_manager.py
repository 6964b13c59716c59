"""What a rank's manager does with a hand-over: SGLang is told of every outcome, and nothing is held for longer than it
is needed."""

import ctypes
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kv_sglang.names import Names
from kv_sglang.transfer import manager
from kv_sglang.transfer.manager import KVManager
from kv_sglang.transfer.rooms import Coming, Leaving
from sglang.srt.disaggregation.base.conn import KVPoll

ROOM = 1
HASHES = ("ab" * 32, "cd" * 32)


class Reached:
    """A point that the device has reached, or never will."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def synchronize(self) -> None:
        if self.failure is not None:
            raise self.failure


def test_a_device_that_fails_before_pages_can_be_read_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise SGLang waits for them until its own time is up, on both sides."""
    ours, concluded = KVManager.__new__(KVManager), list[dict[str, Any]]()
    ours._rooms, ours._leaving = threading.Lock(), {ROOM: Leaving(Names(HASHES, 0))}
    ours.transfer_infos = {ROOM: {"decode": manager._Peer("127.0.0.1", 1, 0, False)}}
    ours.request_status = {ROOM: KVPoll.Transferring}
    monkeypatch.setattr(ours, "conclude_failure", lambda **said: concluded.append(said))
    failed = Reached(RuntimeError("the device failed"))
    ours._send(SimpleNamespace(), room=ROOM, start=0, slots=[0], aux_index=None, event=failed)
    (said,) = concluded
    assert said["bootstrap_room"] == ROOM and "the device failed" in said["failure_reason"]


def test_pages_that_the_decode_engine_has_are_let_go_once_it_has_the_others() -> None:
    """A store of the prefill engine holds all of the prompt's pages so far, so until then they may be held again."""
    calls: list[Sequence[str]] = []

    def get(names: Names, first: int, slots: Sequence[int], *_rest: Any, **_named: Any) -> str:
        calls.append(["get", *names.hashes[first : first + len(slots)]])
        return ""

    def need_not(hashes: Sequence[str], *, given_by: str) -> None:
        calls.append(["need not", *hashes, given_by])

    exchange = SimpleNamespace(get=get, need_not=need_not)
    ours, metadata = KVManager.__new__(KVManager), ctypes.create_string_buffer(1)
    ours._rooms, ours._coming, ours._batch_pages = threading.Lock(), {}, 8
    ours._lanes = SimpleNamespace(add=lambda _room, job: job(exchange))
    ours._watch = SimpleNamespace(filled=lambda: None)
    ours.kv_args = SimpleNamespace(aux_data_ptrs=[ctypes.addressof(metadata)], aux_item_lens=[1])
    coming = Coming(Names(HASHES, 0), 1, [4], aux_index=0, loaded=1, ready=Reached())
    ours.name_coming(ROOM, coming)
    assert ours._fetch(exchange, coming, manager._Said(2, HASHES[1], "theirs", [b"7"])) == ""
    assert calls == [["get", HASHES[1]], ["need not", HASHES[0], "theirs"]]
    assert metadata.raw == b"7"


def test_a_load_that_ends_after_its_request_leaves_nothing_behind() -> None:
    """A reason that nobody takes would stay for ever, or be another request's that gets the same number."""
    ours = KVManager.__new__(KVManager)
    ours._rooms, ours._coming, ours._leaving, ours._batch_pages = threading.Lock(), {}, {}, 8
    ours._watch = SimpleNamespace(filled=lambda: None)
    ours.request_status, ours.failure_lock, ours.failure_records = {ROOM: KVPoll.Transferring}, threading.Lock(), {}
    coming = Coming(Names(HASHES, 0), 0, [0, 4], aux_index=0, loaded=0, ready=Reached())
    ours.name_coming(ROOM, coming)

    def get(*_arguments: Any, **_named: Any) -> str:
        ours.close_room(ROOM)
        del ours.request_status[ROOM]
        return "the request has ended"

    ours._load(SimpleNamespace(get=get), room=ROOM, rank=0, said=manager._Said(2, HASHES[1], "theirs", []))
    assert ours.failure_records == {}
