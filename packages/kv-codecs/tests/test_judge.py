"""The judge's parts that need no model: keys and values through a format, and the verdict that settings demand."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from kv_codecs.calibration import Learning
from kv_codecs.judge import judge_cli
from kv_codecs.judge.calibrate import _is_same_turned_back, _turned_back, through_calibrated
from kv_codecs.judge.measure import CHUNK_TOKENS, FirstParts, Layers, RoundTrip
from kv_codecs.judge.rivals import Coder, Rival, _cachegen, _int8_by_channel, _kivi, _mantissa, _uniform
from kv_codecs.kvtc import make_kvtc_codec
from kv_core.errors import ConfigError, InputError
from kv_core.format import QUANTISED, ChunkFormat, QuantisedKind
from kv_core.tools.cli import main
from kv_testing.layouts import reach
from kv_tiers.verdict import FIRST_PARTS, FormatQuality, Verdict, demand, read_verdict, write_verdict

BOUND = {"int8": 1 / 254, "fp8": 1 / 16}
LAST_ROUNDING = 2.0**-8


def drawn(tokens: int, heads: int = 3, head_dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(tokens)
    keys, values = (torch.randn(tokens, heads, head_dim, generator=made).to(torch.bfloat16) for _ in range(2))
    return keys, values


def gone_through(trip: RoundTrip, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's, each [tokens, heads, head_dim], after a round trip."""
    ((keys, values),) = trip.layers([(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])])
    return keys[0].transpose(0, 1), values[0].transpose(0, 1)


@pytest.mark.parametrize("kind", QUANTISED)
def test_whole_chunks_change_within_the_bound_and_what_is_behind_them_not(kind: QuantisedKind) -> None:
    trip = RoundTrip(kind)
    keys, values = drawn(2 * CHUNK_TOKENS + 70)
    back = gone_through(trip, keys, values)
    whole = 2 * CHUNK_TOKENS
    for exact, decoded in zip((keys, values), back, strict=True):
        assert torch.equal(exact[whole:], decoded[whole:])
        assert not torch.equal(exact[:whole], decoded[:whole])
        for first in range(0, whole, CHUNK_TOKENS):
            one, its = (each[first : first + CHUNK_TOKENS].double().numpy() for each in (exact, decoded))
            assert (one[:4] == its[:4]).all()
            assert (np.abs(its - one) <= (BOUND[kind] + LAST_ROUNDING) * reach(one)).all()
    assert trip.cost.numbers == 2 * whole * 3 * 64
    assert trip.cost.exact_bytes == 2 * trip.cost.numbers
    # A float32 scale for each row, four tokens as they are, and a byte for each channel.
    assert trip.cost.stored_bytes == trip.cost.numbers * (64 + 4) // 64 + 2 * 2 * (4 * 3 * 64 * 2 + 3 * 64)
    assert 0 < trip.cost.worst <= 2 * (BOUND[kind] + LAST_ROUNDING)


def test_a_chunk_that_cannot_be_stored_stays_exact() -> None:
    keys, values = drawn(CHUNK_TOKENS)
    keys[3, 1, 5] = float("inf")
    trip = RoundTrip("int8")
    back = gone_through(trip, keys, values)
    assert torch.equal(back[0], keys) and torch.equal(back[1], values)
    assert trip.cost.stored_bytes == 0


def context(layers: int = 3, tokens: int = 2 * CHUNK_TOKENS + 70) -> Layers:
    drawn_layers = [drawn(tokens) for _ in range(layers)]
    return [(keys.transpose(0, 1)[None], values.transpose(0, 1)[None]) for keys, values in drawn_layers]


def test_first_parts_take_a_quarter_and_what_is_behind_whole_chunks_stays_exact() -> None:
    trip, exact = FirstParts(), context()
    back = trip.layers(exact)
    whole = 2 * CHUNK_TOKENS
    for pair, decoded in zip(exact, back, strict=True):
        for one, its in zip(pair, decoded, strict=True):
            assert torch.equal(one[:, :, whole:], its[:, :, whole:])
            error = (its - one)[:, :, :whole].float().pow(2).mean().sqrt()
            assert 0.02 < float(error) < 0.12
    assert 8 * trip.cost.stored_bytes / trip.cost.numbers == 4.0
    assert trip.cost.numbers == 3 * 2 * whole * 3 * 64
    with pytest.raises(ConfigError, match="for bfloat16"):
        trip.layers([(keys.float(), values.float()) for keys, values in exact])


def test_first_parts_of_what_cannot_be_cut_stay_exact_and_count_whole() -> None:
    chance = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 15), 1 << 15, (2, 1, 3, CHUNK_TOKENS, 64), generator=chance).to(torch.int16)
    keys, values = bits.view(torch.bfloat16)
    trip = FirstParts()
    ((back, _),) = trip.layers([(keys, values)])
    assert torch.equal(back.view(torch.int16), keys.view(torch.int16))
    assert 8 * trip.cost.stored_bytes / trip.cost.numbers == 16.0


@pytest.mark.parametrize(
    ("coder", "bits", "error"),
    [
        (_int8_by_channel, (8.2, 8.5), 0.012),
        (partial(_kivi, bits=4), (4.4, 4.6), 0.12),
        (partial(_kivi, bits=2), (2.4, 2.6), 0.5),
        (partial(_mantissa, bits=3), (6, 7.5), 0.03),
        (partial(_uniform, step=0.25), (3.9, 4.4), 0.08),
        (_cachegen, (2.5, 4.5), 0.6),
    ],
)
def test_rivals_take_the_bytes_and_make_the_errors_that_their_papers_say(
    coder: Coder, bits: tuple[float, float], error: float
) -> None:
    rival, exact = Rival("rival", coder), context(layers=1, tokens=CHUNK_TOKENS + 5)
    ((keys, _),) = rival.layers(exact)
    before = exact[0][0]
    assert torch.equal(keys[:, :, :4], before[:, :, :4])  # the sinks
    assert torch.equal(keys[:, :, CHUNK_TOKENS:], before[:, :, CHUNK_TOKENS:])
    off = (keys - before)[:, :, 4:CHUNK_TOKENS].float().pow(2).mean().sqrt()
    assert 0 < float(off) < error
    sinks = 16 * 4 / CHUNK_TOKENS
    assert bits[0] < 8 * rival.cost.stored_bytes / rival.cost.numbers - sinks < bits[1]


def finding(kl: float, name: str = "int8") -> FormatQuality:
    return FormatQuality(name, 8.5, kl, 0.98, 0.001, 0.9, 0.004, 1.0, 2.0)


def verdict(*findings: FormatQuality) -> Verdict:
    return Verdict("a model", ((3, 64), (3, 64)), "bfloat16", 512, findings)


def stored(kind: QuantisedKind, heads: int = 3, head_dim: int = 64) -> ChunkFormat:
    return ChunkFormat(kind, ("k", "v"), 30, 256, heads, head_dim, QUANTISED[kind], 1, exact_itemsize=2)


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    written = verdict(finding(0.002), finding(0.004, "fp8"))
    write_verdict(path, written)
    assert read_verdict(path) == written
    assert written.of("fp8") == finding(0.004, "fp8") and written.of("int4") is None


def test_a_format_is_refused_with_its_figure(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    write_verdict(path, verdict(finding(0.002)))
    demand(str(path), 0.002, [stored("int8")])
    demand(str(path), 0.01, [stored("int8", heads=1)])  # a rank's share of three
    with pytest.raises(ConfigError, match=r"divergence of 0.002 on a model, and judge.max_kl allows 0.001"):
        demand(str(path), 0.001, [stored("int8")])
    with pytest.raises(ConfigError, match="does not cover format fp8"):
        demand(str(path), 0.01, [stored("fp8")])
    with pytest.raises(ConfigError, match="no layers with 2 heads of 64"):
        demand(str(path), 0.01, [stored("int8", heads=2)])
    with pytest.raises(ConfigError, match="no layers with 3 heads of 128"):
        demand(str(path), 0.01, [stored("int8"), stored("int8", head_dim=128)])
    with pytest.raises(ConfigError, match=r"set judge\.verdict"):
        demand("", 0.01, [stored("int8")])


def test_approximations_need_numbers_that_have_first_parts_and_a_verdict_if_one_is_demanded(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    exact = ChunkFormat("canonical", ("k", "v"), 30, 256, 3, 64, "bfloat16", 2)
    write_verdict(path, verdict(finding(0.004, FIRST_PARTS)))
    demand("", 0, [exact], approximate=True)
    demand(str(path), 0.004, [exact], approximate=True)
    with pytest.raises(ConfigError, match=r"format progressive has a KL divergence of 0.004"):
        demand(str(path), 0.003, [exact], approximate=True)
    with pytest.raises(ConfigError, match="bfloat16 in format canonical, and these are float32"):
        demand("", 0, [replace(exact, dtype="float32", itemsize=4)], approximate=True)
    with pytest.raises(ConfigError, match="in format int8"):
        demand("", 0, [stored("int8")], approximate=True)


def test_a_codec_of_tiers_needs_a_verdict_of_its_own_calibration(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    exact = ChunkFormat("canonical", ("k", "v"), 30, 256, 3, 64, "bfloat16", 2)
    write_verdict(path, verdict(finding(0.004, "kvtc-00aa")))
    demand("", 0, [exact], codec="kvtc-00aa")
    demand(str(path), 0.004, [exact], codec="kvtc-00aa")
    with pytest.raises(ConfigError, match=r"format kvtc-00aa has a KL divergence of 0.004"):
        demand(str(path), 0.003, [exact], codec="kvtc-00aa")
    with pytest.raises(ConfigError, match="does not cover format kvtc-00bb"):
        demand(str(path), 0.004, [exact], codec="kvtc-00bb")
    with pytest.raises(ConfigError, match="does not cover format int8"):
        demand(str(path), 0.004, [stored("int8")], codec="kvtc-00aa")
    with pytest.raises(ConfigError, match=r"set judge\.verdict"):
        demand("", 0.004, [exact], codec="kvtc-00aa")


def test_what_is_judged_is_what_the_codec_stores(tmp_path: Path) -> None:
    """Byte for byte, with the first tokens of a prompt as they are, and with the sizes that a tier would have."""
    frequencies = [1e-5 ** (j / 32) for j in range(32)]
    learning = Learning(
        model="drawn", dtype="bfloat16", heads=3, head_dim=64, max_tokens=4096, frequencies=[frequencies] * 3
    )
    exact = context()
    learning.add([tuple(one[0].transpose(0, 1).float().numpy() for one in layer) for layer in exact])
    path = tmp_path / "drawn.kvtc"
    learning.learnt(0.4).write(path)
    trip = through_calibrated(str(path))
    back = trip.layers(exact)
    codec = make_kvtc_codec({"calibration": str(path)}, None)
    assert trip.name == codec.calibration.name
    stored_bytes = 0
    for number in range(2):
        some = slice(number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
        chunk, judged = (
            torch.stack([torch.stack([layer[part][0, :, some].transpose(0, 1) for layer in layers]) for part in (0, 1)])
            for layers in (exact, back)
        )
        source = chunk.view(torch.uint8).reshape(-1).numpy()
        payload, decoded = memoryview(bytearray(source.nbytes)), np.empty_like(source)
        size = (codec.encode if number else codec.encode_first)(source.data, payload)
        codec.decode(payload[:size], decoded.data)
        assert (judged.view(torch.uint8).reshape(-1).numpy() == decoded).all()
        assert torch.equal(judged[:, :, :4], chunk[:, :, :4]) == (not number)
        stored_bytes += size
    assert trip.cost.stored_bytes == stored_bytes
    assert trip.cost.numbers == 2 * 3 * 2 * CHUNK_TOKENS * 3 * 64


def test_a_divergence_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    write_verdict(path, verdict(finding(float("nan"))))
    with pytest.raises(ConfigError, match="divergence of nan"):
        demand(str(path), 1.0, [stored("int8")])


def test_exact_formats_need_no_verdict() -> None:
    demand("", 0.001, [ChunkFormat("canonical", ("k", "v"), 30, 256, 3, 64, "bfloat16", 2)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "is not a file of `kv judge`"),
        ('{"version": 1}', "other versions of the formats"),
        ('{"version": 2, "findings": [{"kl": 1}]}', "is not a file of `kv judge`"),
        (json.dumps({"version": 2, "findings": [], "heads": [[1]]}), "is not a file of `kv judge`"),
        ('{"version": 2, "findings": [], "heads": [[Infinity, 1]]}', "is not a file of `kv judge`"),
        (json.dumps({"version": 2, **asdict(verdict(finding(0.25)))}).replace("0.25", '"low"'), "could not convert"),
        (json.dumps({"version": 2, **asdict(verdict(finding(0.25)))}).replace("0.25", "null"), "must be a string or a"),
        pytest.param("[" * 100_000, "recursion", id="deep"),
    ],
)
def test_what_is_no_verdict_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_verdict(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_verdict(tmp_path / "other.json")


@pytest.mark.parametrize("neighbours", [False, True])
def test_a_rotation_is_shown_of_every_pair_however_small(neighbours: bool) -> None:
    """A part of a hundredth of a key's size turns otherwise than is said: the rest of the key does not hide it."""
    still = np.random.default_rng(1).standard_normal((2, 64, 32)) + 3
    still[..., :8] /= 100
    still[..., 8:12] = 0
    frequencies = 1e4 ** -(np.arange(4) / 4)
    turned = [_turned_back(still, first, -frequencies, neighbours) for first in (0, 1000)]
    here, there = (np.empty_like(still) for _ in turned)
    firsts, seconds = (slice(0, 8, 2), slice(1, 8, 2)) if neighbours else (slice(0, 4), slice(4, 8))
    for out, points in zip((here, there), turned, strict=True):
        out[..., firsts], out[..., seconds], out[..., 8:] = points[..., :4].real, points[..., :4].imag, still[..., 8:]
    assert _is_same_turned_back(here, there, frequencies, neighbours)
    for wrong, order in (
        (frequencies, not neighbours),
        (frequencies * 1.01, neighbours),
        (frequencies[:3], neighbours),
        (np.zeros(0), False),
    ):
        assert not _is_same_turned_back(here, there, wrong, order)


@pytest.mark.parametrize("device", ["tape", "cuda:99"])
def test_a_device_that_is_not_there_is_said_before_the_model_is_loaded(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("some text")
    assert main(["judge", str(tmp_path / "no-model"), "--text", str(text), "--device", device]) == 2
    said = capsys.readouterr().err
    assert f"--device {device}: " in said and "write cpu, cuda, or cuda:1" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--step", "7"), "a step of 7 standard deviations; choose one of 0.01 to 4"),
        (("--step", "nan"), "a step of nan standard deviations"),
        (("--ranks", "0"), "--ranks is 0; write 1"),
    ],
)
def test_a_calibration_that_cannot_be_is_said_before_the_model_is_loaded(
    options: tuple[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("some words")
    judge = ["judge", str(tmp_path / "no-model"), "--calibrate", str(text), "--calibration", str(tmp_path / "made")]
    assert main([*judge, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing/verdict.json", "text/verdict.json", "."])
def test_a_file_that_cannot_be_written_is_said_before_the_model_is_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said at the end, and what had been measured was not printed either."""
    text = tmp_path / "text"
    text.write_text("some words")
    judge = ["judge", str(tmp_path / "no-model"), "--text", str(text)]
    for options in (["--out"], ["--calibrate", str(text), "--calibration"]):
        assert main([*judge, *options, str(tmp_path / name)]) == 2
        assert f"kv: error: {tmp_path / name} cannot be written; name a file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["./modle", "/models/lama", "models/lama", "a/b/c", "~/x"])
def test_a_mistyped_directory_is_asked_of_no_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(InputError, match="no such directory"):
        judge_cli._check_model(name)
    judge_cli._check_model("models")
    judge_cli._check_model("meta-llama/Llama-3.1-8B")
