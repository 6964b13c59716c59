"""The state of a drain, as a server reports it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class DrainState:
    """The current state of one cache's drain. Counts are of chunks, counting every group and shard separately.

    phase: `drained`: nothing is left to offer. `stopped`: it ended before that, for the reason in `why`.
    why: the reason why it stopped, or left chunks behind.
    chunks: those that the pool held, and those held only by the host's own tiers whose turn has come.
    elsewhere: of these, already on another host.
    moved, moved_bytes: fetched by another host since.
    refused: no host took them, or none that took them had them in time.
    gone: no longer here, so they could not be offered.
    left: not offered or not fetched when it stopped. While it runs: still to do.
    """

    phase: Literal["draining", "drained", "stopped"]
    why: str = ""
    chunks: int = 0
    elsewhere: int = 0
    moved: int = 0
    moved_bytes: int = 0
    refused: int = 0
    gone: int = 0
    left: int = 0

    def spelled(self) -> str:
        """In one line, for people."""
        parts = [
            f"{self.moved:,} chunks ({self.moved_bytes:,} bytes) moved",
            f"{self.elsewhere:,} on other hosts already",
        ]
        counts = ((self.refused, "refused"), (self.gone, "gone"), (self.left, "left"))
        parts += [f"{count:,} {what}" for count, what in counts if count]
        why = f" ({self.why})" if self.why else ""
        return f"{self.phase}{why}: of {self.chunks:,} chunks {', '.join(parts)}"
