"""With overlap scheduling a request that has ended has one redundant forward pass in flight, which writes its last
token to a block that is free by then, or another request's. So nothing is loaded before that pass is over."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from kv_sglang import transfer
from kv_sglang.linker import KVLinker
from kv_sglang.names import Names
from kv_sglang.transfer import KVManager, KVReceiver, PagesStored
from sglang.srt.mem_cache.unified_cache import unified_cache_linker

FORWARD = "the stream of forward passes"
HASHES = ("ab" * 32, "cd" * 32)


class Recorded:
    """An event of a device, which remembers its stream; None: the current one."""

    def __init__(self) -> None:
        self.stream: object = "never recorded"
        self.waited_for = False

    def record(self, stream: object = None) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.waited_for = True


DEVICE = SimpleNamespace(Event=Recorded)


def test_a_load_of_the_linker_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own HiCache makes its loads wait for that stream, too."""
    monkeypatch.setattr(unified_cache_linker, "device_module", DEVICE)
    linker, points = KVLinker.__new__(KVLinker), []

    def start(ready: list[Recorded]) -> int:
        points.extend(ready)
        return 0

    linker.forward_stream, linker._loads = FORWARD, SimpleNamespace(start=start)
    assert linker.start_layer_wise_loading() == 0
    assert [point.stream for point in points] == [None, FORWARD]


def test_what_is_handed_over_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment at which the request is given its blocks."""
    monkeypatch.setattr(transfer, "get_device_module", lambda: DEVICE)
    monkeypatch.setattr(transfer.CommonKVReceiver, "send_metadata", lambda *_given, **_named: None)
    ours = KVManager.__new__(KVManager)
    ours._rooms, ours._incoming = threading.Lock(), {}
    ours.kv_args, ours._batch_pages, ours._forward_stream = SimpleNamespace(page_size=4), 8, FORWARD
    ours._watch = SimpleNamespace(filled=lambda: None)
    receiver = KVReceiver.__new__(KVReceiver)
    receiver.kv_mgr, receiver.bootstrap_room, receiver._attempt = ours, 1, b"attempt1"
    receiver.name_pages(Names(HASHES, 0))
    receiver.send_metadata([5, 6], 0)
    (request,) = ours._incoming.values()
    assert request.ready.stream == FORWARD

    def get(*_given: Any, **_named: Any) -> str:
        assert request.ready.waited_for
        return ""

    stored = PagesStored(1, b"attempt1", 0, 2, HASHES[1], "", [])
    assert ours._fetch(SimpleNamespace(get=get), request, stored) == ""
    assert request.loaded == 2
