"""The codec `kvtc` where chunks have some of a model's layers, or of its heads: groups, pipeline stages and ranks.

The measure is the same tokens with all layers and heads in one chunk: what comes back of a share is, bit for bit, what
comes back of its numbers there, and all shares together take a few per cent more bytes.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_codecs.calibrated import Division, GroupLayers, divide, division_in, fingerprint_of
from kv_codecs.calibration import Calibration, read_calibration
from kv_codecs.kvtc import HEAD_BYTES, DividedKvtc, KvtcCodec, make_kvtc_codec
from kv_core.errors import ConfigError
from kv_core.format import ChunkFormat
from kv_core.keys import ChunkKey
from kv_core.outcome import Damaged, Loaded
from kv_testing.drawn_kv import (
    Drawn,
    as_numbers,
    as_stored,
    assert_within_the_bound,
    decoded,
    encoded,
    position_in,
)
from kv_tiers.chunk_header import Header, format_id, read_header
from kv_tiers.codec import Codec, CodesShards
from kv_tiers.lanes.jobs import Outgoing
from kv_tiers.lanes.moving import Payloads
from kv_tiers.tier import Read, TierContext

GEMMAS = (10_000.0, 10_000.0, 1_000_000.0)
"""Bases of rotation: two layers with a window, then one without, and again."""


def share_of(chunk: bytes, drawn: Drawn, layers: Sequence[int], heads: range) -> bytes:
    """The chunk that an engine would make of these layers and heads."""
    word = "<f4" if drawn.dtype == "float32" else "<u2"
    whole = np.frombuffer(chunk, word).reshape(2, drawn.layers, -1, drawn.heads, drawn.head_dim)
    return whole[:, list(layers), :, heads.start : heads.stop].tobytes()


def shares(drawn: Drawn, division: Division) -> list[tuple[int, int, list[int], range]]:
    """Of each group that is encoded, and each shard: its layers and heads."""
    found = []
    for group, layers in enumerate(division.groups):
        for shard in range(division.stages * division.shards if layers is not None else 0):
            stage, number = divmod(shard, division.shards)
            before = stage * drawn.layers // division.stages
            count = max(1, drawn.heads // division.shards)
            first = number * drawn.heads // division.shards
            found.append((group, shard, [before + layer for layer in layers or ()], range(first, first + count)))
    return found


def codec_of(codec: DividedKvtc, group: int, shard: int) -> KvtcCodec:
    found = codec.of_shard(group, shard)
    assert isinstance(found, KvtcCodec)
    return found


def assert_as_in_one_chunk(
    drawn: Drawn, calibration: Calibration, division: Division, first: int, tokens: int
) -> float:
    """How many times as many bytes all shares take."""
    whole, divided = KvtcCodec(calibration), DividedKvtc(calibration, division)
    chunk = drawn.chunk(first, tokens)
    payload = encoded(whole, chunk, first=first == 0)
    assert position_in(payload) == first
    back, sizes = decoded(whole, payload, len(chunk)), {}
    for group, shard, layers, heads in shares(drawn, division):
        codec = codec_of(divided, group, shard)
        mine = share_of(chunk, drawn, layers, heads)
        its = encoded(codec, mine, first=first == 0)
        assert position_in(its) == first
        assert decoded(codec, its, len(mine)) == share_of(back, drawn, layers, heads)
        assert_within_the_bound(codec.calibration, mine, decoded(codec, its, len(mine)))
        sizes[tuple(layers), heads] = len(its)
    return sum(sizes.values()) / len(payload)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("division", "ranks", "times"),
    [
        (Division(((0, 1, 3, 4), (2, 5))), 1, 1.02),  # a group of each kind
        (Division(((0, 1), (3, 4), (2, 5))), 1, 1.03),  # the larger one is cut by layers
        (Division(((0, 1), (2,)), stages=2), 1, 1.04),
        (Division(((0, 1, 2, 3, 4, 5),), shards=2), 2, 1.02),
        (Division(((0, 1), (2,)), stages=2, shards=4), 4, 1.12),  # 64 rows in a share: a header for each two
        (Division((None, (5, 2), None, (0, 1, 3, 4))), 1, 1.02),  # states beside them, and layers in another order
    ],
)
def test_a_share_comes_back_as_its_numbers_do_in_one_chunk_and_all_take_hardly_more(
    division: Division, ranks: int, times: float, dtype: str
) -> None:
    drawn = Drawn(layers=6, heads=4, head_dim=32, dtype=dtype, thetas=GEMMAS)
    calibration = drawn.calibration(ranks=ranks)
    for first in (0, 256, 7 * 256):
        assert 1 <= assert_as_in_one_chunk(drawn, calibration, division, first, 256) < times


@settings(max_examples=10, deadline=None)
@given(
    stages=st.sampled_from([1, 2, 3]),
    shards=st.sampled_from([1, 2, 4, 8]),
    of_stage=st.integers(1, 3),
    head_dim=st.sampled_from([16, 64]),
    number=st.integers(0, 20),
    data=st.data(),
)
def test_every_division_comes_back_as_one_chunk_does(
    stages: int, shards: int, of_stage: int, head_dim: int, number: int, data: st.DataObject
) -> None:
    drawn = Drawn(stages * of_stage, 4, head_dim, seed=number, thetas=GEMMAS[1:])
    places = data.draw(st.permutations(range(of_stage)))
    cut = data.draw(st.integers(0, of_stage))
    groups = tuple(tuple(part) for part in (places[:cut], places[cut:]) if part)
    assert_as_in_one_chunk(drawn, drawn.calibration(ranks=shards), Division(groups, stages, shards), 64 * number, 64)


def test_a_part_is_what_would_have_been_learnt_of_those_layers_alone() -> None:
    drawn = Drawn(layers=4, thetas=GEMMAS)
    contexts = [drawn.context(0, 512) for _ in range(2)]

    def learnt(layers: Sequence[int]) -> Calibration:
        learning = Drawn(len(layers)).learning()
        learning = type(learning)(
            model="drawn",
            dtype="bfloat16",
            heads=2,
            head_dim=32,
            max_tokens=8192,
            frequencies=[drawn.frequencies[layer] for layer in layers],
        )
        for context in contexts:
            learning.add([(context[0, layer], context[1, layer]) for layer in layers])
        return learning.learnt(0.4)

    whole = learnt(range(4))
    assert whole.part(range(4), range(2)) is whole
    for layers in ([2], [0, 1, 3], [3, 0]):
        assert whole.part(layers, range(2)).name == learnt(layers).name != whole.name


@given(
    groups=st.lists(
        st.none() | st.lists(st.integers(0, 1023), min_size=1, max_size=40).map(tuple), min_size=1, max_size=6
    ),
    stages=st.integers(1, 70),
    shards=st.integers(1, 70),
)
def test_a_fingerprint_says_the_division(groups: list[tuple[int, ...] | None], stages: int, shards: int) -> None:
    division = Division(tuple(groups), stages, shards)
    calibration = _small()
    said = fingerprint_of(calibration, "f", division)
    assert said.split()[:2] == ["f", calibration.name] and len(said.split()) == 3
    assert division_in(said) == division_in(f"{said} approximate") == division
    assert division_in(fingerprint_of(calibration, "f")) is None


def test_a_models_division_is_short_and_readable() -> None:
    windows = [tuple(layer for layer in range(62) if layer % 6 == kind) for kind in range(6)]
    text = Division(tuple(windows)).text
    assert text == "layers:1x1:0-60/6;1-61/6;2-56/6;3-57/6;4-58/6;5-59/6"
    assert Division((None, (5, 11), (0, 1, 2, 3, 4, 6)), 2, 4).text == "layers:2x4:-;5,11;0-4,6"


@pytest.mark.parametrize(
    "said",
    [
        "layers:",
        "layers:0x1:0",
        "layers:1x1:",
        "layers:1x1:0;",
        "layers:1x1:3-1",
        "layers:1x1:0-9999",
        "layers:1x1:0-4/0",
    ],
)
def test_a_fingerprint_that_says_no_division_is_refused(said: str) -> None:
    with pytest.raises(ConfigError, match="does not say which layers"):
        division_in(f"f kvtc-00 {said}")


def canonical(layers: int, heads: int = 4, head_dim: int = 32, dtype: str = "bfloat16") -> ChunkFormat:
    return ChunkFormat("canonical", ("k", "v"), layers, 256, heads, head_dim, dtype, 4 if dtype == "float32" else 2)


OPAQUE = ChunkFormat("blocks", ("blocks",), 6, 256, 1, 64, "uint8", 1, 16)
LATENT = ChunkFormat("canonical", ("kv",), 6, 256, 1, 32, "bfloat16", 2)
_MADE: dict[int, Calibration] = {}


def _small(ranks: int = 1) -> Calibration:
    """Of six layers of four heads of 32."""
    if ranks not in _MADE:
        _MADE[ranks] = Drawn(layers=6, heads=4, thetas=GEMMAS).calibration(ranks=ranks)
    return _MADE[ranks]


def test_an_engines_groups_are_divided_by_the_order_of_their_layers() -> None:
    """Numbers count layers without keys too, and a stage's begin anywhere."""
    whole = GroupLayers("whole", canonical(6), tuple(range(6)))
    unnamed = GroupLayers("whole", canonical(6), ())
    assert divide(_small(), [whole]) is divide(_small(), [unnamed]) is None
    assert divide(_small(), [whole, GroupLayers("states", OPAQUE, (), is_state=True)]) == Division(
        (tuple(range(6)), None)
    )
    hybrid = GroupLayers("every fourth", canonical(6), (3, 7, 11, 15, 19, 23))
    assert divide(_small(), [hybrid]) is None
    windows, full = GroupLayers("windows", canonical(4), (0, 1, 3, 4)), GroupLayers("full", canonical(2), (2, 5))
    assert divide(_small(), [windows, full]) == Division(((0, 1, 3, 4), (2, 5)))
    stage = [GroupLayers("windows", canonical(2, 1), (3, 4)), GroupLayers("full", canonical(1, 1), (5,))]
    assert divide(_small(4), stage, stages=2, shards=16) == Division(((0, 1), (2,)), 2, 8)


def test_what_cannot_be_encoded_is_refused_by_its_name() -> None:
    whole = GroupLayers("group 0", canonical(6), tuple(range(6)))
    states = GroupLayers("group 1", OPAQUE, (), is_state=True)
    refused: dict[str, tuple[list[GroupLayers], int, int]] = {
        "this model has only states": ([states], 1, 1),
        "the chunks of group 2 are blocks in format blocks": ([whole, GroupLayers("group 2", OPAQUE, (6,))], 1, 1),
        "the chunks of group 3 are kv in format canonical": ([GroupLayers("group 3", LATENT, tuple(range(6)))], 1, 1),
        "does not say which layers the chunks of group 4 have": (
            [whole, GroupLayers("group 4", canonical(6), ())],
            1,
            1,
        ),
        "have 6 layers of 2 heads of 32 in bfloat16": ([GroupLayers("g", canonical(6, 2), tuple(range(6)))], 1, 1),
        "of 4 heads of 32 in float32": ([GroupLayers("g", canonical(6, dtype="float32"), tuple(range(6)))], 1, 1),
        "this engine has 7 with keys": ([whole, GroupLayers("a draft", canonical(1), (6,))], 1, 1),
        "this engine has 6 with keys": ([GroupLayers("g", canonical(6), (0, 1, 2, 3, 4, 4))], 1, 1),
        "this engine has 12 with keys": ([whole], 2, 2),
        "4 heads, which 1 stages of 3 ranks cannot have": ([GroupLayers("g", canonical(6, 1), tuple(range(6)))], 1, 3),
        "--ranks 2": ([GroupLayers("g", canonical(6, 2), tuple(range(6)))], 1, 2),
    }
    for said, (groups, stages, shards) in refused.items():
        with pytest.raises(ConfigError, match=said):
            divide(_small(), groups, stages=stages, shards=shards)


class Lane:
    """What a lane makes of chunks with this codec."""

    def __init__(self, codec: Codec) -> None:
        self.payloads = Payloads(format_id("f"), codec)

    def stored(self, chunk: bytes, group: int, shard: int = 0) -> tuple[bytes, bytes]:
        """Header and payload."""
        pages = memoryview(bytearray(-(-len(chunk) // 4096) * 4096))
        pages[: len(chunk)] = chunk
        (write,) = self.payloads.writes([Outgoing(key_of(group, shard), key_of(group, shard), pages, len(chunk))])
        return bytes(write.header), bytes(write.payload)

    def loaded(self, header: bytes, payload: bytes, nbytes: int, group: int, shard: int = 0) -> tuple[object, bytes]:
        pages = memoryview(bytearray(-(-nbytes // 4096) * 4096))
        pages[: len(payload)] = payload
        read = Read(key_of(group, shard), bytearray(header), pages, len(pages), nbytes)
        return self.payloads.arrival(read, Loaded(len(payload)), "disk").outcome, bytes(pages[:nbytes])


def codec_named_in(header: bytes) -> str:
    read = read_header(header)
    assert isinstance(read, Header)
    return read.codec


def key_of(group: int, shard: int = 0) -> ChunkKey:
    return ChunkKey(bytes([1, *bytes(23)]) + struct.pack(">HHH", group, shard, 0xFFFF) + bytes(16))


def test_a_lane_encodes_each_group_by_its_own_layers_and_leaves_states_alone() -> None:
    drawn = Drawn(layers=6, heads=4, thetas=GEMMAS)
    division = Division(((0, 1, 3, 4), None, (2, 5)))
    codec = DividedKvtc(_small(), division)
    assert isinstance(codec, CodesShards)
    lane, chunk = Lane(codec), drawn.chunk(512, 256)
    states = np.random.default_rng(1).bytes(50_000)
    header, payload = lane.stored(states, 1)
    assert codec_named_in(header) == "" and payload[: len(states)] == states
    assert lane.loaded(header, payload, len(states), 1) == (Loaded(len(states)), states)
    for group, layers in ((0, (0, 1, 3, 4)), (2, (2, 5))):
        mine = share_of(chunk, drawn, layers, range(4))
        header, payload = lane.stored(mine, group)
        assert codec_named_in(header) == "kvtc" and len(payload) < len(mine) / 3
        outcome, back = lane.loaded(header, payload, len(mine), group)
        assert isinstance(outcome, Loaded)
        assert_within_the_bound(codec_of(codec, group, 0).calibration, mine, back)


def test_what_other_layers_encoded_is_damaged_and_never_decoded() -> None:
    """A payload names the calibration of its own layers, so one that comes under another group's key is found."""
    drawn = Drawn(layers=6, heads=4, thetas=GEMMAS)
    mine = share_of(drawn.chunk(512, 256), drawn, (0, 1, 2), range(4))
    one, other = (Lane(DividedKvtc(_small(), Division((layers,)))) for layers in ((0, 1, 2), (3, 4, 5)))
    header, payload = one.stored(mine, 0)
    assert isinstance(one.loaded(header, payload, len(mine), 0)[0], Loaded)
    outcome, _ = other.loaded(header, payload, len(mine), 0)
    assert isinstance(outcome, Damaged) and "encoded with calibration" in outcome.reason
    as_they_are = Lane(DividedKvtc(_small(), Division((None,))))
    outcome, _ = as_they_are.loaded(header, payload, len(mine), 0)
    assert isinstance(outcome, Damaged) and "no chunks of group 0" in outcome.reason


def test_layers_that_are_taken_for_others_cost_bytes() -> None:
    """The control: it matters which layers a group's chunks are taken to have."""
    drawn = Drawn(layers=6, heads=4, thetas=GEMMAS)
    calibration = drawn.calibration()
    mine = share_of(drawn.chunk(512, 256), drawn, (2, 5), range(4))
    right, wrong = (encoded(KvtcCodec(calibration.part(layers, range(4))), mine) for layers in ((2, 5), (0, 3)))
    assert len(wrong) > 1.3 * len(right)


def test_the_factory_takes_the_division_from_the_fingerprint(tmp_path: Path) -> None:
    path, calibration = tmp_path / "model.kvtc", _small(2)
    calibration.write(path)
    options = {"calibration": str(path)}

    def made(division: Division | None) -> Codec:
        return make_kvtc_codec(options, TierContext(1 << 20, 1 << 20, fingerprint_of(calibration, "f", division)))

    assert isinstance(made(None), KvtcCodec)
    divided = made(Division(((0, 1), None), stages=3, shards=2))
    assert isinstance(divided, DividedKvtc)
    assert codec_of(divided, 0, 5).calibration.name == calibration.part((4, 5), range(2, 4)).name
    assert divided.of_shard(1, 0) is divided.of_shard(0, 6) is divided.of_shard(2, 0) is None
    assert divided.of_shard(0, 5) is divided.of_shard(0, 5)  # none is made while an engine waits
    for wrong in (
        Division(((0, 6),)),
        Division(((0,),), stages=4),
        Division(((0,),), shards=3),
        Division(((0,),), shards=2048),
    ):
        with pytest.raises(ConfigError, match="codec kvtc: the calibration"):
            made(wrong)


def test_a_calibration_for_ranks_has_whole_blocks_of_each(tmp_path: Path) -> None:
    files = {}
    for ranks in (1, 2, 4, 8):
        calibration, path = _small(ranks), tmp_path / f"{ranks}.kvtc"
        calibration.write(path)
        read = read_calibration(path)
        assert read.name == calibration.name and read.shape == calibration.shape
        assert read.shape.block_channels == max(32, 128 // ranks)
        content = path.read_bytes()
        (text_bytes,) = struct.unpack_from("<I", content, 12)
        assert json.loads(content[16 : 16 + text_bytes])["block_channels"] == read.shape.block_channels
        files[ranks] = content
    assert files[4] == files[8]  # no head is divided
    assert HEAD_BYTES == 32
    for forged in (0, 128, 3, 256, 48, "32", 32.0, True):
        text = json.dumps(json.loads(files[4][16 : 16 + text_bytes]) | {"block_channels": forged}).encode()
        path.write_bytes(files[4][:12] + struct.pack("<I", len(text)) + text + files[4][16 + text_bytes :])
        with pytest.raises(ConfigError, match=r"not a file of `kv judge|bytes instead of"):
            read_calibration(path)


def test_smaller_blocks_cost_bytes_and_no_precision() -> None:
    drawn = Drawn(layers=2, heads=4, head_dim=32)
    chunk = drawn.chunk(512, 256)
    sizes, errors = [], []
    for ranks in (1, 2, 4):
        codec = KvtcCodec(drawn.calibration(ranks=ranks))
        payload = encoded(codec, chunk)
        back = decoded(codec, payload, len(chunk))
        sizes.append(len(payload))
        errors.append(float(np.square(as_numbers(chunk, "bfloat16") - as_numbers(back, "bfloat16")).mean()))
    assert sizes == sorted(sizes) and max(errors) < 1.5 * min(errors)


def test_heads_cannot_be_divided_among_any_number_of_ranks() -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot have equal parts of 4 heads"):
        Drawn(heads=4).learning(ranks=3)
    assert as_stored(np.zeros(1, np.float32), "bfloat16").itemsize == 2
