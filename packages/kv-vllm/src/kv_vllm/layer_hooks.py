"""The two hooks that vLLM calls before and after every attention layer."""

from collections.abc import Mapping
from typing import NamedTuple

from kv_connect.engine import Engine
from kv_connect.guard import PartOf, always, guarded
from kv_connect.halves.step import StepPlan


class LayerPlace(NamedTuple):
    """The number of one of our groups, and of a layer in it."""

    group: int
    layer: int


class LayerHooks(PartOf):
    """A worker's hooks. Layers not known here hold none of our chunks, or cannot be told apart."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._engine = engine
        self._places: Mapping[str, LayerPlace] = {}
        self._computes: dict[str, LayerPlace] = {}

    def bound(self, places: Mapping[str, LayerPlace]) -> None:
        """Set the place of each layer, by vLLM's names, layers that compute KV before layers that share it."""
        self._places = places
        first_names = {place: name for name, place in reversed(list(places.items()))}
        self._computes = {name: place for place, name in first_names.items()}

    @guarded(always(None))
    def wait_for(self, layer_name: str) -> None:
        """The forward pass reads this layer next."""
        if self._engine.worker is not None:
            place = self._places.get(layer_name)
            self._engine.worker.layers.wait_for(None if place is None else place.layer)

    @guarded(always(None))
    def computed(self, layer_name: str, step: StepPlan) -> None:
        """The forward pass has computed this layer, in a step that stores something."""
        place = self._computes.get(layer_name)
        if place is not None and self._engine.worker is not None:
            self._engine.worker.layer_computed(step, place.group, place.layer)
