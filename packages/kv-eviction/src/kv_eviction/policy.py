"""The contract of an eviction policy: rank the chunks of one tier by how soon they should be evicted.

Bytes, tiers and leases are not its concern. It takes no lock (its caller does) and is notified of every arrival, use
and departure. A chunk is named by its key, which stays the same if the chunk leaves and returns, and by its slot, a
small number that belongs to the chunk while it is resident. Slots of chunks stored together are adjacent, so with a
million chunks an order kept by slot is several times cheaper to update than one kept by key.

Sequences of keys and slots are parallel and in the order of the prompt: chunk n is worthless without 0…n-1.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kv_core.keys import ChunkKey


class EvictionPolicy(Protocol):
    """Constant time per chunk in every call."""

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """These chunks have become resident."""

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """A request looked up `keys`, of which the leading ones are held, in `slots`: perhaps none. Excluded chunks may
        be among them. Neither list changes later.
        """

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """A request stores more of its prompt; these chunks of it are resident, including those just `added`.

        Its head must not be evicted before the chunks just added. This is not a sign of reuse: a prompt that is stored
        in many pieces causes many calls. Excluded chunks may be among them.
        """

    def turn_ended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """The request with this prompt, of which the leading chunks are held in `slots`, was answered without a call of
        a tool: its user reads, who may take minutes or never come back. Requests that are not reported may have ended
        either way.
        """
        return

    def removed(self, slot: int) -> None:
        """The chunk has left, by eviction or otherwise. It may have been excluded."""

    def victim(self) -> int | None:
        """The slot to empty first; the same one until it is removed or excluded. None: nothing can be offered."""

    def victims(self, at_most: int) -> Iterable[int]:
        """The victim, and those that would be the next ones, as far as that is known already, to be looked at before
        any other call. Empty: nothing can be offered."""
        victim = self.victim()
        return () if victim is None else (victim,)

    def evicted(self, slots: Sequence[int]) -> None:
        """The first of the `victims` offered last have left, by eviction."""
        for slot in slots:
            self.removed(slot)

    def refuses(self, key: ChunkKey, *, is_last: bool) -> bool:
        """Whether this chunk is worth less than the victim, whose place it would take: then it is not stored.

        Asked by a tier that may refuse, for chunks that the latest request lacked. is_last: it is the last of these.
        """
        return False

    def exclude(self, slot: int) -> None:
        """The chunk offered last is leased: do not offer it again until it is reinserted.

        So a leased chunk costs nothing until it is offered, and is offered only once.
        """

    def reinsert(self, slots: Sequence[int]) -> None:
        """Excluded chunks may be offered again. They are in the prompt's order, and were in use until just now."""


def policy_name(policy: EvictionPolicy) -> str:
    """Its display name: its class's name in lower case, without `Policy`."""
    return type(policy).__name__.removesuffix("Policy").lower()
