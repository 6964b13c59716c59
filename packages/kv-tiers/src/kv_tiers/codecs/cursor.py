"""Reads a payload from its start, a piece at a time."""

from kv_tiers.codec import CodecError


class Cursor:
    """Over one part of a payload."""

    def __init__(self, part: memoryview) -> None:
        self._part, self._at = part, 0

    @property
    def left(self) -> int:
        return len(self._part) - self._at

    @property
    def rest(self) -> memoryview:
        """What is left, without taking it."""
        return self._part[self._at :]

    def take(self, nbytes: int) -> memoryview:
        """
        Raises:
            CodecError: there are fewer bytes left.
        """
        taken = self._part[self._at : self._at + nbytes]
        if len(taken) < nbytes:
            raise CodecError(f"a part ends {nbytes - len(taken)} bytes too early")
        self._at += nbytes
        return taken
