"""A slot that one engine may still write to must not become another engine's: not when a store of the first one fails
while another is under way, and not when their server has lost it."""

import time
from pathlib import Path
from typing import Any

import pytest
from engines import SHARED, started
from kv_connect.engine import engines
from kv_server.process import launch
from kv_server.remote_cache import RemoteCache
from kv_testing.cache_servers import lose
from kv_testing.connect import QueuedCopy
from kv_testing.wait import until
from server_apart import server_apart
from slow_device import slow_device

FIRST, SECOND = SHARED[:300], SHARED[300:600]
OTHERS = [SHARED[600:900], SHARED[700:1000]]
TWO_CHUNKS = {"host": {"capacity_bytes": "1MiB", "lease_s": 0.5}}


@pytest.mark.slow
def test_an_engine_that_the_server_has_lost_overwrites_nobody(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not see its clients' processes, as in a container of its own."""
    with started(tiny_llama, cache=None) as plain:
        expected = plain.ask_in_turn(OTHERS)

    def wait(copy: QueuedCopy) -> None:
        if not copy.has_ended:
            raise RuntimeError("the device does not answer")

    with (
        server_apart(tmp_path, TWO_CHUNKS) as joined,
        slow_device() as device,
        started(tiny_llama, cache=joined) as one,
        started(tiny_llama, cache=joined, own_process=True) as two,
    ):
        monkeypatch.setattr(QueuedCopy, "wait", wait)
        one.ask([FIRST, SECOND])
        assert len(device.queue.pending) == 2
        inner = next(each for each in engines().values() if each.worker is not None)
        assert isinstance(inner.cache, RemoteCache)
        lose(inner.cache)
        lost_at = time.monotonic()
        until(lambda: time.monotonic() > lost_at + 2.0)  # leases are over
        two.ask_in_turn(OTHERS)
        device.queue.run(2)
        assert two.ask_in_turn(OTHERS) == expected
        monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("family", [RuntimeError, MemoryError])
@pytest.mark.parametrize("is_freed_early", [False, True], ids=["", "control"])
def test_another_engines_chunks_are_not_overwritten(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: type[Exception], is_freed_early: bool
) -> None:
    with started(tiny_llama, cache=None) as plain:
        expected = plain.ask_in_turn(OTHERS)
    pool = {"host": {"capacity_bytes": "1MiB"}}  # of two chunks
    server = launch(pool, socket=tmp_path / "private" / "s")
    joined: dict[str, Any] = {"server": {"socket": str(server.socket)}}
    asked: list[QueuedCopy] = []
    look = QueuedCopy.done

    def done(copy: QueuedCopy) -> bool:
        asked.append(copy)
        if len(asked) == 1:
            raise family("raised by the test")
        return look(copy)

    def wait(copy: QueuedCopy) -> None:
        """The device does not answer. An engine in its caller's process asks when its last request ends."""
        if not look(copy):
            raise family("raised by the test")

    try:
        with (
            slow_device() as device,
            started(tiny_llama, cache=joined) as one,
            started(tiny_llama, cache=joined, own_process=True) as two,
        ):
            monkeypatch.setattr(QueuedCopy, "done", done)
            monkeypatch.setattr(QueuedCopy, "wait", wait)
            one.ask([FIRST, SECOND])
            assert len(device.queue.pending) == 2
            if is_freed_early:
                inner = next(each for each in engines().values() if each.worker is not None)
                assert inner.worker is not None and inner.cache is not None
                inner.cache.end(inner.worker._holder)
            two.ask_in_turn(OTHERS)
            device.queue.run(2)
            assert two.ask_in_turn(OTHERS) == expected or is_freed_early
            if is_freed_early:
                assert sum(two.hits) > 0
                assert two.ask_in_turn(OTHERS) != expected
    finally:
        server.stop()
