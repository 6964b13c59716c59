"""The gate at which a forward pass waits, layer by layer, for pages that are being loaded."""

import threading
from dataclasses import dataclass, field

from kv_core.device import CopyEvent


@dataclass(slots=True)
class _LoadBatch:
    """Loads that started together.

    layers: copies in flight, by layer.
    over: no more will follow.
    landed: all have arrived, and every forward pass has waited for them.
    missed: a forward pass could not wait for a layer.
    """

    layers: list[CopyEvent] = field(default_factory=list)
    over: bool = False
    landed: bool = False
    missed: bool = False


class LayerGate:
    """SGLang's `layer_done_counter`: it numbers batches of loads, and lets a forward pass through layer by layer.

    A layer that never arrives blocks nothing: the pass continues with whatever the slots contain, and `finish` reports
    it before any result is used. One side opens and fills batches, another thread waits for them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: dict[int, _LoadBatch] = {}
        self._opened = -1
        self.consumer_index = -1

    def open(self) -> int:
        """Open a batch; returns its number."""
        with self._changed:
            self._opened += 1
            self._batches[self._opened] = _LoadBatch()
            return self._opened

    def let_through(self, number: int, event: CopyEvent) -> None:
        """The batch's next layer has been copied once `event` is done."""
        with self._changed:
            self._batches[number].layers.append(event)
            self._changed.notify_all()

    def end(self, number: int, *, landed: bool) -> None:
        """End this batch: nothing more is written for it."""
        with self._changed:
            batch = self._batches[number]
            batch.over, batch.landed = True, landed
            self._changed.notify_all()

    def set_consumer(self, index: int) -> None:
        """Set the batch that the next forward pass reads; -1: none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """The forward pass is about to read this layer; layers are counted from this rank's first."""
        with self._changed:
            batch = self._batches.get(self.consumer_index)
            if batch is None:
                return
            self._changed.wait_for(lambda: len(batch.layers) > layer or batch.over)
            event = batch.layers[layer] if len(batch.layers) > layer else None
        if event is not None:
            try:
                event.hold_engine()
            except Exception:  # noqa: BLE001  # whatever it is: the pass goes on without this layer, and is not used
                batch.missed = True

    def finish(self, number: int) -> bool:
        """Wait until nothing is written for this batch, and forget it. True if all of it arrived, or there is none."""
        with self._changed:
            batch = self._batches.get(number)
            if batch is None:
                return True
            self._changed.wait_for(lambda: batch.over)
            del self._batches[number]
            return batch.landed and not batch.missed

    def finish_all(self) -> None:
        """The same for every batch."""
        for number in list(self._batches):
            self.finish(number)
        self.consumer_index = -1
