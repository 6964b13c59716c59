"""Moves the scheduler half to a new key space when the engine's weights change."""

from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.identity.adapters import Adapters
from kv_connect.identity.identity import LiveKeySpace


class EngineWeights:
    """The weights of an engine, and of its adapters, in the process of its scheduler half.

    Code that notices an update of the engine's weights in place calls `identity.changed`.
    """

    def __init__(self, space: LiveKeySpace) -> None:
        self.space = space
        self.identity = space.weights
        self.adapters = Adapters()
        self._changes = 0

    def follow(self, scheduler: SchedulerHalf) -> bool:
        """Inform the scheduler half of weights that have become known or changed. Called before every use of it; costs
        two comparisons.

        Returns whether any did.
        """
        changes, now = self.identity.changes, self.space.now
        if changes != self._changes:
            self._changes = changes
            scheduler.weights_changed(now)
            return True
        if now is not scheduler.space and now is not None:
            scheduler.name_weights(now)
            return True
        return False

    @property
    def is_busy(self) -> bool:
        """Whether adapters' files are being looked at."""
        return self.adapters.is_busy

    def close(self) -> None:
        """Stop reading files."""
        self.identity.close()
        self.adapters.close()
