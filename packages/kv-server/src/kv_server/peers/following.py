"""Follows the hand-overs of other hosts' engines while they compute, and notifies those hosts of chunks no longer
needed.

Each peer is queried by long polling on its own thread: its server answers as soon as there is an announcement, or after
`_WAIT_S`. Chunks are fetched as soon as they can be read there, so that only the last chunk is still to come when the
prompt is computed (docs/adr/0011). A peer that fails is queried again after its back-off, from where it left off.
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

from kv_server.peers.hosts import Peer, PeerHosts
from kv_server.peers.wire import MAX_ASKED, MAX_FOLLOWED_BYTES, Follow, Followed, PeerHeld, PeerTaken

_log = limited_logger(__name__)

_WAIT_S: Final = 1.0
"""How long one long poll may wait, which is also how long closing may take."""
_POLL_S: Final = 0.5
"""How often the list of peers is checked."""
_RETRY_S: Final = 0.1
_MIN_INTERVAL_S: Final = 0.01
"""Between two queries of one peer, so that one which always answers at once keeps no core busy; `_RETRY_S` after an
answer that reports nothing, for which it should have waited."""
_MAX_UNSENT: Final = 256

OnAnswer = Callable[[Peer, float, Followed], None]
"""Arguments: the peer that answered, when the query was sent (`time.monotonic`), and the answer."""


class Following:
    """The followed peers of one tier. Thread-safe."""

    def __init__(self, hosts: PeerHosts, namespace: str, *, answer_s: float, on_answer: OnAnswer) -> None:
        """Sends no query yet.

        answer_s: how long an answer may take beyond the time of the long poll.
        on_answer: called on the peer's thread; it raises `InputError` if an answer is malformed.
        """
        self._hosts = hosts
        self._namespace = namespace
        self._answer_s = answer_s
        self._on_answer = on_answer
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._unsent: queue.Queue[Sequence[ChunkKey] | None] = queue.Queue(_MAX_UNSENT)
        self._is_sending = False

    def start(self) -> None:
        """Follow all peers from now on."""
        self._run(self._follow_all, "kv-peers-follow")

    def taken(self, keys: Sequence[ChunkKey]) -> None:
        """Notify all peers that are up. If too many messages are waiting, this one is dropped, and the holds there
        expire.
        """
        with self._lock:
            if not self._is_sending and not self._closed.is_set():
                try:
                    self._run(self._send_all, "kv-peers-taken")
                    self._is_sending = True
                except RuntimeError as error:
                    _log.warning("peers are not told for now which chunks they need no longer hold: %s", error)
        for start in range(0, len(keys), MAX_ASKED):
            try:
                self._unsent.put_nowait(keys[start : start + MAX_ASKED])
            except queue.Full:
                return

    def close(self) -> None:
        """Stop. Threads that wait for an answer end within their deadline."""
        self._closed.set()
        with suppress(queue.Full):  # if it is full, the thread checks `_closed` before the next message
            self._unsent.put_nowait(None)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(2 * (_WAIT_S + self._answer_s))

    def _run(self, work: Callable[[], None], name: str) -> None:
        """
        Raises:
            RuntimeError: the system has no more threads for us.
        """
        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:
            thread.start()
            self._threads = [*(running for running in self._threads if running.is_alive()), thread]

    def _follow_all(self) -> None:
        """Run a thread for each peer."""
        followed: set[Peer] = set()
        while not self._closed.is_set():
            peers = set(self._hosts.peers())
            for peer in peers - followed:
                try:
                    self._run(partial(self._follow, peer), "kv-peer-follow")
                except RuntimeError as error:
                    _log.warning("peer %s is not followed for now: %s", peer, error)
                    peers.remove(peer)  # try again the next time
            followed = peers
            self._closed.wait(_POLL_S)

    def _follow(self, peer: Peer) -> None:
        feed, after = b"", 0
        while not self._closed.is_set() and peer in self._hosts.peers():
            if not peer.is_up():
                self._closed.wait(_POLL_S)
                continue
            sent_s = time.monotonic()
            try:
                question = Follow(self._namespace, feed, after, _WAIT_S)
                answer = peer.ask(question, Followed, _WAIT_S + self._answer_s, max_bytes=MAX_FOLLOWED_BYTES)
                feed, after = answer.feed, answer.upto
                self._on_answer(peer, sent_s, answer)
                interval_s = _MIN_INTERVAL_S if answer.given else _RETRY_S
                self._closed.wait(max(0.0, sent_s + interval_s - time.monotonic()))
            except (OSError, InputError) as error:
                _log.debug("peer %s is not followed for now: %s", peer, error)
                self._closed.wait(_RETRY_S)
            except Exception:  # noqa: BLE001  # a bug costs only this hand-over, and a lookup may still find its chunks
                _log.exception("following peer %s hit a bug", peer)
                self._closed.wait(_RETRY_S)

    def _send_all(self) -> None:
        while not self._closed.is_set():
            keys = self._unsent.get()
            if keys is None:
                return
            peers = [peer for peer in self._hosts.peers() if peer.is_up()]
            message = PeerTaken(self._namespace, pack_keys(keys))

            def send(peer: Peer, message: PeerTaken = message) -> None:
                peer.ask(message, PeerHeld, self._answer_s)

            self._hosts.each(peers, send, in_background=True)
