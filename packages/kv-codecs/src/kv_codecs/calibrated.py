"""What an engine whose tiers use the codec `kvtc` has to agree on with its calibration: layers, heads, rotations.

What it loads from such a tier is an approximation, and so is what it computes from that. So the calibration's name is
part of the fingerprint of the engine's chunks, as the kind of a format is: keys, headers, pools and namespaces of tiers
differ from those of exact caches and of other calibrations (docs/adr/0010).

A calibration is of the whole model. An engine with sliding windows besides full attention has a group of layers for
each kind; one with several ranks has a shard for each rank's heads, and for each pipeline stage's layers. Engines
report this as numbers (`GroupLayers`); `divide` compares them with a calibration, and raises if the codec cannot be
used. They report how they rotate keys, too (`EngineRotation`), for `check_rotations`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from kv_core.errors import ConfigError
from kv_core.format import ChunkFormat
from kv_tiers.approximate import CALIBRATED
from numpy.typing import NDArray

from kv_codecs.calibration import Calibration, ChannelOrder, Shape, read_calibration

_MARK: Final = "layers:"
_STORED_AS_IT_IS: Final = "-"
_TEXT: Final = re.compile(rf"{_MARK}(\d{{1,5}})x(\d{{1,5}}):([0-9,/;-]{{1,4096}})")
_MOST_LAYERS: Final = 1024
_MOST_SHARDS: Final = 1024
_RUN: Final = re.compile(r"(\d{1,4})(?:-(\d{1,4})(?:/(\d{1,4}))?)?")


@dataclass(frozen=True, slots=True)
class GroupLayers:
    """A group of an engine's layers, as this process's rank has it.

    name: the group's name in errors, such as "group 0 (window:512)".
    format: the format of its chunks.
    layers: the numbers of its layers in the model, in the order of the chunk. They may begin above 0 and have gaps:
        only their order counts. (): the engine does not report them; a model's only group has all layers in order.
    is_state: whether its chunks are states, which no codec of keys and values can encode.
    """

    name: str
    format: ChunkFormat
    layers: tuple[int, ...]
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a model's layers and heads between chunks: which of them the chunks of each group and shard have.

    It is part of the chunks' fingerprint, because the layers in a payload are part of what its bytes mean. So private
    servers, other nodes and peers receive it too, and chunks that were divided differently are not found.

    groups: for each group of the keys, which layers chunks of the first stage have, counted among all layers that have
        keys. None: chunks of this group are stored unencoded.
    stages: the number of pipeline stages. All have equally many layers, each those after the previous stage's.
    shards: the number of shards in each stage. All have equally many adjacent heads. With more shards than heads,
        several shards have the same head.
    """

    groups: tuple[tuple[int, ...] | None, ...]
    stages: int = 1
    shards: int = 1

    @property
    def text(self) -> str:
        """One word, for fingerprints."""
        return f"{_MARK}{self.stages}x{self.shards}:" + ";".join(map(_to_text, self.groups))

    def check(self, shape: Shape) -> None:
        """
        Raises:
            ConfigError: the model of a calibration of this shape cannot be divided this way.
        """
        is_even = shape.heads % self.shards == 0 or self.shards % shape.heads == 0
        if shape.layers % self.stages or not is_even or self.shards > _MOST_SHARDS:
            raise ConfigError(
                f"codec kvtc: the calibration is of {shape.layers} layers of {shape.heads} heads, which {self.stages} "
                f"stages of {self.shards} ranks cannot have equal parts of"
            )
        if any(max(layers, default=0) >= shape.layers // self.stages for layers in self.groups if layers is not None):
            raise ConfigError(f"codec kvtc: the calibration has {shape.layers} layers, and chunks have others")
        count = self._heads(shape)
        if count < shape.heads and count * shape.head_dim % shape.block_channels:
            raise ConfigError(
                f"codec kvtc: the calibration transforms {shape.block_channels} channels together, and a rank's "
                f"{count} heads of {shape.head_dim} are not a whole number of those: write it again with `kv judge "
                f"--calibrate --ranks {self.shards}`"
            )

    @property
    def shares(self) -> list[tuple[int, int]]:
        """Group and shard of all chunks that are encoded."""
        coded = [group for group, layers in enumerate(self.groups) if layers is not None]
        return [(group, shard) for group in coded for shard in range(self.stages * self.shards)]

    def part(self, calibration: Calibration, group: int, shard: int) -> Calibration:
        """The part of a calibration, which was checked before, for chunks of one of `shares`."""
        layers = self.groups[group]
        assert layers is not None
        stage, shard_of_stage = divmod(shard, self.shards)
        shape = calibration.shape
        first_layer, first_head = stage * (shape.layers // self.stages), shard_of_stage * shape.heads // self.shards
        return calibration.part(
            [first_layer + layer for layer in layers], range(first_head, first_head + self._heads(shape))
        )

    def _heads(self, shape: Shape) -> int:
        """The number of heads in each shard."""
        return max(1, shape.heads // self.shards)


def division_in(fingerprint: str) -> Division | None:
    """The division in a fingerprint, unchecked; None: there is none, and chunks have all layers and heads.

    Raises:
        ConfigError: the division is malformed.
    """
    word = next((word for word in fingerprint.split() if word.startswith(_MARK)), None)
    if word is None:
        return None
    match = _TEXT.fullmatch(word)
    if match is None or not int(match[1]) or not int(match[2]):
        raise ConfigError(f"codec kvtc: {word!r} does not say which layers chunks have")
    return Division(tuple(map(_from_text, match[3].split(";"))), int(match[1]), int(match[2]))


def divide(
    calibration: Calibration, groups: Sequence[GroupLayers], *, stages: int = 1, shards: int = 1
) -> Division | None:
    """How this engine divides the calibration's model; None: not at all, its chunks have all layers and heads.

    groups: the groups in the order of the keys, from any rank: they are the same for all ranks, except for the layers'
        numbers if there are stages.
    shards: the number of shards of each chunk, of all stages together.

    Raises:
        ConfigError: a group's chunks cannot be encoded, or the calibration is not of this model.
    """
    shape, shards_per_stage = calibration.shape, shards // stages
    coded = [group for group in groups if not group.is_state]
    if not coded:
        raise ConfigError("codec kvtc is for keys and values, and this model has only states: leave it out")
    if len(coded) == 1 and not coded[0].layers:
        coded = [replace(coded[0], layers=tuple(range(coded[0].format.layers)))]
    for group in coded:
        fmt = group.format
        if fmt.kind != "canonical" or fmt.parts != ("k", "v"):
            raise ConfigError(
                f"codec kvtc needs keys and values in format canonical; the chunks of {group.name} are "
                f"{'+'.join(fmt.parts)} in format {fmt.kind}"
            )
        if len(group.layers) != fmt.layers:
            raise ConfigError(f"codec kvtc: the engine does not say which layers the chunks of {group.name} have")
        if (fmt.heads, fmt.head_dim, fmt.dtype) != (
            max(1, shape.heads // shards_per_stage),
            shape.head_dim,
            shape.dtype,
        ):
            raise _another_model(
                shape,
                f"the chunks of {group.name} have {fmt.layers} layers of {fmt.heads} heads of {fmt.head_dim} in "
                f"{fmt.dtype}",
                shards_per_stage,
            )
    numbers = sorted(number for group in coded for number in group.layers)
    if len(numbers) * stages != shape.layers or len(set(numbers)) < len(numbers):
        raise _another_model(shape, f"this engine has {len(numbers) * stages} with keys", shards_per_stage)
    indexes = {number: index for index, number in enumerate(numbers)}
    layers_of_groups = iter(tuple(indexes[number] for number in group.layers) for group in coded)
    division = Division(
        tuple(None if group.is_state else next(layers_of_groups) for group in groups), stages, shards_per_stage
    )
    division.check(shape)
    return None if division == Division((tuple(range(shape.layers)),)) else division


def _another_model(shape: Shape, engine_has: str, ranks: int) -> ConfigError:
    of_ranks = f" among {ranks} ranks" if ranks > 1 else ""
    return ConfigError(
        f"codec kvtc: the calibration is of {shape.model}, with {shape.layers} layers of {shape.heads} heads of "
        f"{shape.head_dim} in {shape.dtype}{of_ranks}; {engine_has}. Write one for the engine's model with `kv judge`; "
        "a draft's layers beside the model's are not supported"
    )


def _to_text(layers: tuple[int, ...] | None) -> str:
    """Layers as text, in runs of equal distances: 0-4,6-10 or 0-54/6."""
    if layers is None:
        return _STORED_AS_IT_IS
    runs, start = [], 0
    while start < len(layers):
        step = layers[start + 1] - layers[start] if start + 1 < len(layers) else 0
        end = start + 1
        while step > 0 and end < len(layers) and layers[end] - layers[end - 1] == step:
            end += 1
        if end - start < 3 and step != 1:
            end = start + 1
        first, last = layers[start], layers[end - 1]
        runs.append(str(first) if first == last else f"{first}-{last}" + (f"/{step}" if step > 1 else ""))
        start = end
    return ",".join(runs)


def _from_text(text: str) -> tuple[int, ...] | None:
    if text == _STORED_AS_IT_IS:
        return None
    layers: list[int] = []
    for run in text.split(","):
        match = _RUN.fullmatch(run)
        if match is None or match[3] == "0":
            raise ConfigError(f"codec kvtc: {text!r} does not say which layers chunks have")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        layers += range(first, last + 1, step)
    if not 0 < len(layers) <= _MOST_LAYERS:
        raise ConfigError(f"codec kvtc: {text!r} does not say which layers chunks have")
    return tuple(layers)


def calibration_of(tiers: Sequence[Mapping[str, object]]) -> Calibration:
    """The calibration with which these tiers encode, of which one or more use the codec.

    Raises:
        ConfigError: the file cannot be used, or two tiers name different ones.
    """
    by_id = {calibration.id: calibration for calibration in map(read_calibration, dict.fromkeys(_paths(tiers)))}
    if len(by_id) != 1:
        raise ConfigError("tiers: all that use codec kvtc must name the same calibration")
    return next(iter(by_id.values()))


def fingerprint_of(calibration: Calibration, fingerprint: str, division: Division | None = None) -> str:
    """The fingerprint of chunks that may have been through tiers with this calibration.

    fingerprint: the fingerprint of their format.
    division: how they divide the calibration's model.
    """
    words = [calibration.name, *([] if division is None else [division.text])]
    return " ".join([fingerprint, *words])


def _paths(tiers: Sequence[Mapping[str, object]]) -> Iterator[str]:
    for tier in tiers:
        codec = tier.get("codec")
        if isinstance(codec, Mapping) and codec.get("type") == CALIBRATED:
            yield str(codec.get("calibration", ""))
        elif codec == CALIBRATED:
            raise ConfigError("codec kvtc needs a calibration: write codec: {type: kvtc, calibration: FILE}")


_TOLERANCE: Final = 0.01
"""Relative, of a frequency: some engines hold cosines and sines in bfloat16."""
_SLOWEST: Final = 1e-7
"""Radians per token that make no difference in any prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineRotation(ChannelOrder):
    """One of the rotary embeddings that an engine has created.

    frequencies: radians per token, [rotated / 2]; None: the engine does not reveal them.
    """

    frequencies: NDArray[np.float64] | None = None


def check_rotations(
    calibration: Calibration, rotations: Iterable[EngineRotation], *, stage: int = 0, stages: int = 1
) -> None:
    """Compare how a model rotates its keys according to a calibration with how the engine does.

    `kv judge --calibrate` sees the keys that transformers computes. An engine may store the same keys with their
    elements in another order: vLLM permutes Llama 4's weights so that halves turn together instead of neighbours. It
    may also be configured with other frequencies. Components that were learnt on other keys would make no larger errors
    but much larger payloads, and the verdict would not apply to what is stored. So such an engine does not start.

    rotations: all of the engine's. Unrelated ones may be among them, of a vision tower for example.
    stage: the pipeline stage whose layers are checked.

    Raises:
        ConfigError: a layer's keys are rotated in a way that none of the engine's rotations does.
    """
    shape = calibration.shape
    stage_layers = shape.layers // stages
    tables = sorted(set(shape.tables[stage * stage_layers : (stage + 1) * stage_layers]))
    rotating = [table for table in map(calibration.frequencies.__getitem__, tables) if table.any()]
    candidates = [rotation for rotation in rotations if rotation.head_dim == shape.head_dim]
    matching = [rotation for rotation in candidates if _pairs(rotation) == _pairs(shape.order)]
    for table in rotating:
        if not matching:
            others = "; ".join(sorted({_spelled(rotation) for rotation in candidates})) or "nothing that it reports"
            raise ConfigError(
                f"codec kvtc: the calibration of {shape.model} is for keys of which the model rotates "
                f"{_spelled(shape.order)}, and this engine rotates {others}: it stores keys in a different order from "
                "the one that `kv judge` saw, so the codec cannot be used with it"
            )
        if not any(_is_alike(table, rotation.frequencies) for rotation in matching):
            raise ConfigError(
                "codec kvtc: this engine rotates keys with different frequencies from those in the calibration of "
                f"{shape.model}: write one for the model as the engine is configured"
            )


def _pairs(order: ChannelOrder) -> tuple[int, bool]:
    """Equal for orders in which the same elements turn together: one pair is halves and neighbours alike."""
    return order.rotated, order.neighbours and order.rotated > 2


def _is_alike(table: NDArray[np.float64], frequencies: NDArray[np.float64] | None) -> bool:
    if frequencies is None:
        return True
    return bool(np.allclose(table[: len(frequencies)], frequencies, _TOLERANCE, _SLOWEST))


def _spelled(order: ChannelOrder) -> str:
    pairs = "neighbours" if order.neighbours else "halves"
    return f"{order.rotated} of {order.head_dim} elements, {pairs} together"
