"""Offers this host's chunks to another host, which fetches them like any hit: an offer carries no chunk bytes."""

from collections.abc import Sequence
from functools import partial

from kv_core.errors import InputError
from kv_core.keys import ChunkKey

from kv_tiers.messages import pack_keys
from kv_tiers.tier import Fate, Taken
from kv_tiers.tiers.peer_hosts import Peer
from kv_tiers.tiers.peers_wire import Offer, Offered, PeerStream


class PeerTaker:
    """One peer."""

    def __init__(self, peer: Peer, namespace: str, answer_s: float) -> None:
        self.name = str(peer)
        self._peer = peer
        self._namespace = namespace
        self._answer_s = answer_s

    def offer(self, chain: Sequence[ChunkKey], first: int) -> Taken:
        """
        Raises:
            OSError, InputError: it does not answer, or not as a peer does.
        """
        return self._peer.talk(partial(self._offer, chain, first), self._answer_s)

    def _offer(self, chain: Sequence[ChunkKey], first: int, stream: PeerStream, deadline: float) -> Taken:
        stream.send_message(Offer(self._namespace, pack_keys(chain), first), deadline)
        answer = stream.answer(Offered, deadline)
        if len(answer.fates) != len(chain) - first:
            raise ConnectionError(f"{len(answer.fates)} answers to an offer of {len(chain) - first} chunks")
        try:
            return Taken([Fate(fate) for fate in answer.fates], answer.room)
        except ValueError as error:
            raise InputError(f"no answer to an offer: {error}") from None
