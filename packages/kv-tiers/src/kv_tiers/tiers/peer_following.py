"""What engines of other hosts hand over, heard of while they still compute it; and what of it is needed no longer.

Each peer is asked what it has to say, on a thread of its own: its server answers as soon as there is something, and
after `_WAIT_S` in any case. Chunks are fetched as soon as they can be read there, so when the prompt is computed only
its last chunk is still to come (docs/adr/0028). A peer that fails is asked again after its rest, from where it ended.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from kv_core.errors import InputError
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger

from kv_tiers.messages import pack_keys
from kv_tiers.tiers.peer_hosts import Peer, PeerHosts
from kv_tiers.tiers.peers_wire import (
    MAX_ASKED,
    MAX_FOLLOWED_BYTES,
    Follow,
    Followed,
    Held,
    PeerStream,
    Taken,
)

_log = limited_logger(__name__)

_WAIT_S: Final = 1.0
"""How long one question may wait, and so how long closing may take."""
_LOOK_S: Final = 0.5
"""How often it is looked whether there are other peers now."""
_RETRY_S: Final = 0.1
_MAX_UNSAID: Final = 256

OnAnswer = Callable[[Peer, float, Followed], None]
"""Which peer answered, when it was asked (`time.monotonic`), and what."""


class Following:
    """Of one tier. Safe to call from any thread."""

    def __init__(self, hosts: PeerHosts, namespace: str, *, answer_s: float, on_answer: OnAnswer) -> None:
        """Asks nobody yet. answer_s: how long an answer may take beyond what it waits for. on_answer: called on the
        peer's thread; what is malformed in an answer it raises as `InputError`."""
        self._hosts = hosts
        self._namespace = namespace
        self._answer_s = answer_s
        self._on_answer = on_answer
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unsaid: queue.Queue[Sequence[ChunkKey] | None] = queue.Queue(_MAX_UNSAID)
        self._says = False

    def start(self) -> None:
        """Follow all peers from now on."""
        self._run(self._follow_all, "kv-peers-follow")

    def taken(self, keys: Sequence[ChunkKey]) -> None:
        """Tell all peers that are up. Where too much waits to be said it is not: the chunks' time will be over."""
        with self._lock:
            if not self._says and not self._closed.is_set():
                self._says = True
                self._start(self._say_all, "kv-peers-taken")
        for at in range(0, len(keys), MAX_ASKED):
            try:
                self._unsaid.put_nowait(keys[at : at + MAX_ASKED])
            except queue.Full:
                return

    def close(self) -> None:
        """Ask nothing any more. Whoever waits for an answer has it, or gives up, within its deadline."""
        self._closed.set()
        with suppress(queue.Full):  # or it will look before it says the next
            self._unsaid.put_nowait(None)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(2 * (_WAIT_S + self._answer_s))

    def _run(self, work: Callable[[], None], name: str) -> None:
        with self._lock:
            self._start(work, name)

    def _start(self, work: Callable[[], None], name: str) -> None:
        """Under the lock."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(thread := threading.Thread(target=work, name=name, daemon=True))
        thread.start()

    def _follow_all(self) -> None:
        """Have a thread for each peer there is."""
        followed: set[Peer] = set()
        while not self._closed.is_set():
            peers = set(self._hosts.peers())
            for peer in peers - followed:
                self._run(partial(self._follow, peer), "kv-peer-follow")
            followed = peers
            self._closed.wait(_LOOK_S)

    def _follow(self, peer: Peer) -> None:
        feed, after = b"", 0

        def ask(stream: PeerStream, deadline: float) -> Followed:
            stream.send_message(Follow(self._namespace, feed, after, _WAIT_S), deadline)
            return stream.answer(Followed, deadline, max_bytes=MAX_FOLLOWED_BYTES)

        while not self._closed.is_set() and peer in self._hosts.peers():
            if not peer.is_up():
                self._closed.wait(_LOOK_S)
                continue
            asked_s = time.monotonic()
            try:
                answer = peer.talk(ask, _WAIT_S + self._answer_s)
                feed, after = answer.feed, answer.upto
                self._on_answer(peer, asked_s, answer)
            except (OSError, InputError) as error:
                _log.debug("peer %s is not followed for a moment: %s", peer, error)
                self._closed.wait(_RETRY_S)
            except Exception:  # noqa: BLE001  # a bug costs what was handed over, and a lookup may still find that
                _log.exception("following peer %s met a bug", peer)
                self._closed.wait(_RETRY_S)

    def _say_all(self) -> None:
        while not self._closed.is_set():
            keys = self._unsaid.get(timeout=None)
            if keys is None:
                return
            peers = [peer for peer in self._hosts.peers() if peer.is_up()]
            self._hosts.each(peers, lambda peer, keys=keys: peer.talk(partial(self._say, keys), self._answer_s))  # type: ignore[misc]

    def _say(self, keys: Sequence[ChunkKey], stream: PeerStream, deadline: float) -> None:
        stream.send_message(Taken(self._namespace, pack_keys(keys)), deadline)
        stream.answer(Held, deadline)
