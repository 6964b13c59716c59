"""The state of a prompt's chunk as `kv explain` reports it: a record that needs no cache."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkState:
    """The state of adjacent chunks that are alike, which is that of the first of them.

    first: its place in the prompt.
    chunks: how many there are.
    where: the tier that holds it, the fastest if several; `BEING_WRITTEN`; or empty for nowhere.
    what, tier, cause, policy: as in `ChunkFate`; `what` is empty if nothing is known.
    seconds_ago: since that happened.
    stored_seconds_ago: since it was last stored in the pool.
    below: the lower tiers where it was stored at some time.
    diverges: the chunk is unknown, and other prompts continued differently after the previous one.
    """

    first: int
    chunks: int
    where: str
    what: str = ""
    tier: str = ""
    cause: str = ""
    policy: str = ""
    seconds_ago: float | None = None
    stored_seconds_ago: float | None = None
    below: tuple[str, ...] = ()
    diverges: bool = False


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group of layers that lacks something that a hit would need.

    group: its number.
    coverage: what it needs of a prefix, as the text of a `Coverage`.
    states: of the chunks that it needs and no tier holds.
    """

    group: int
    coverage: str
    states: tuple[ChunkState, ...]
