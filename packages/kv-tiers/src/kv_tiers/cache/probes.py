"""When to probe a tier that no request waits for: soon at first, then ever less often while it stays slow."""

from typing import Final

_FIRST_S: Final = 10.0
_MAX_S: Final = 300.0
_SOON_S: Final = 0.5


class Probes:
    """The probes of one tier. Not thread-safe."""

    def __init__(self) -> None:
        self._after_s = _FIRST_S
        self._due_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether to probe it now, if its lane is idle. If so, the next one is due after this one has ended, or in a
        while if there is no room for it."""
        if now_s < self._due_s:
            return False
        self._due_s = now_s + _FIRST_S
        return True

    def ended(self, now_s: float, *, was_right: bool) -> None:
        """was_right: the tier was about as slow as estimated; else another probe is due soon."""
        if was_right:
            self._due_s = now_s + self._after_s
            self._after_s = min(2 * self._after_s, _MAX_S)
        else:
            self._due_s = now_s + _SOON_S
            self._after_s = _FIRST_S
