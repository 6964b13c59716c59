"""What a rank's manager does with a hand-over: SGLang is told of every outcome."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from kv_sglang.names import Names
from kv_sglang.transfer import manager
from kv_sglang.transfer.manager import KVManager
from kv_sglang.transfer.rooms import Leaving
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
