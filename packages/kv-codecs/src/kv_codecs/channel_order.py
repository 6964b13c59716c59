"""Which elements of a head are turned together, as an order of its channels that puts them where kernels expect them.

Kernels turn element j with element j + head_dim / 2, as Llama does. Some models rotate only the first elements of a key
(a *part*), and some turn neighbours. For these the channels of keys are reordered: the first elements of the pairs that
are turned, half of the elements that are not turned, the second elements of the pairs, the other half. Elements that
are not turned have the frequency 0.
"""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ChannelOrder:
    """The order of a head's channels.

    rotated: how many of a head's first elements are turned; even.
    neighbours: whether element 2 j is turned with 2 j + 1, and not j with j + rotated / 2.
    """

    head_dim: int
    rotated: int
    neighbours: bool

    @property
    def is_usual(self) -> bool:
        """Whether kernels take such keys without reordering."""
        return self.rotated == self.head_dim and not self.neighbours

    def ordered(self, stored: NDArray[Any], out: NDArray[Any]) -> None:
        """Copy channels from the model's order to that of kernels. Both [..., head_dim]."""
        for kernel, model in self._channel_runs():
            out[..., kernel] = stored[..., model]

    def restored(self, ordered: NDArray[Any], out: NDArray[Any]) -> None:
        """The reverse of `ordered`."""
        for kernel, model in self._channel_runs():
            out[..., model] = ordered[..., kernel]

    def _channel_runs(self) -> list[tuple[slice, slice]]:
        """Where runs of channels are in the order of kernels, and where in the model's order."""
        half, turned, end = self.head_dim // 2, self.rotated // 2, self.head_dim
        middle = self.rotated + half - turned
        first_elements, second_elements = slice(0, turned), slice(turned, self.rotated)
        if self.neighbours:
            first_elements, second_elements = slice(0, self.rotated, 2), slice(1, self.rotated, 2)
        return [
            (slice(0, turned), first_elements),
            (slice(turned, half), slice(self.rotated, middle)),
            (slice(half, half + turned), second_elements),
            (slice(half + turned, end), slice(middle, end)),
        ]
