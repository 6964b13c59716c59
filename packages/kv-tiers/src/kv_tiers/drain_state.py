"""What a server reports of a drain."""

from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class DrainState:
    """A drain of one cache, at this moment. Counts are of chunks, every group and shard by itself.

    phase: `drained`: nothing is left to offer. `stopped`: before that, as `why` says.
    why: it stopped, or left something.
    chunks: what the pool held, and of what the host's own tiers hold besides, those whose turn has come.
    elsewhere: of these, on another host without our doing.
    moved, moved_bytes: fetched by another host since.
    refused: no host took it, or none that took it had it in time.
    gone: not here any more, so that it could not be offered.
    left: not offered or not fetched when it stopped. While it goes on: still to do.
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
        """In a line, for people."""
        parts = [
            f"{self.moved:,} chunks ({self.moved_bytes:,} bytes) moved",
            f"{self.elsewhere:,} on other hosts already",
        ]
        counts = ((self.refused, "refused"), (self.gone, "gone"), (self.left, "left"))
        parts += [f"{count:,} {what}" for count, what in counts if count]
        why = f" ({self.why})" if self.why else ""
        return f"{self.phase}{why}: of {self.chunks:,} chunks {', '.join(parts)}"
