"""A cache's side towards other hosts: what they read, what they are told, and what they take."""

from collections.abc import Sequence

from kv_core.keys import ChunkKey
from kv_tiers.cache.extension import CacheParts
from kv_tiers.cache.local import LocalCache
from kv_tiers.chunk_header import format_id
from kv_tiers.host_port import HostPort

from kv_server.directory.state import DirectoryState
from kv_server.drain.drain import CacheDrain
from kv_server.drain.offers import Offers
from kv_server.peers.hand_over_feed import HandOverFeed
from kv_server.peers.reads import PeerReads
from kv_server.peers.tier import PeersTier


class PeerSide:
    """An extension of one cache. Safe to use from any thread once the cache is made."""

    drain: CacheDrain
    """Passes this host's chunks on before it leaves."""
    offers: Offers
    """Takes what other hosts offer before they leave."""
    handed_over: HandOverFeed
    """The chunks that engines of this cache hand over, for servers of other hosts."""

    def attach(self, parts: CacheParts) -> None:
        self._parts = parts
        self.handed_over = HandOverFeed(parts.clock)
        self.offers = Offers(parts.host, parts.index, parts.lower)
        self.drain = CacheDrain(parts.host, parts.index, parts.lower, on_change=self._set_leaving)

    def held(self, chain: Sequence[ChunkKey], first: int, until_s: float) -> None:
        self.handed_over.announce(chain, first, until_s)

    def taken(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing to do: the tier of the other hosts tells them."""

    def detach(self) -> None:
        self.drain.close()

    def reads(self, fingerprint: str) -> PeerReads:
        """What other hosts may read of the cache. fingerprint: of its chunks' format."""
        parts = self._parts
        lanes = parts.lower.local_lanes()
        return PeerReads(parts.host, parts.index, lanes, format_id(fingerprint), parts.holds, verify=parts.verify)

    def publish(self, reads: PeerReads, address: HostPort) -> None:
        """Announce these chunks to other hosts, through tiers that are configured for it. address: where peers read
        from this host."""
        for _, tier in self._parts.lower.tiers_that(PeersTier):
            if tier.lists_holders:
                tier.publish(reads.track(), address)

    def _set_leaving(self, is_leaving: bool) -> None:
        self._parts.refuse_new("this host is being drained, and takes no new chunks" if is_leaving else "")
        self.offers.is_refused = is_leaving


def peer_side(cache: LocalCache) -> PeerSide:
    """The extension of this cache that is its side towards other hosts. Every cache of a server has one."""
    return next(extension for extension in cache.extensions if isinstance(extension, PeerSide))


def directories_of(cache: LocalCache) -> dict[str, DirectoryState]:
    """What tiers with a directory know of other hosts, by the tier's name."""
    tiers = [tier for _, tier in cache.lower.tiers_that(PeersTier)]
    return {tier.name: state for tier in tiers if (state := tier.directory_state()) is not None}
