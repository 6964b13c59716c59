"""The judge's verdict, as a file that settings can require: `kv judge --out FILE`, then `judge.verdict: FILE`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kv_core.errors import ConfigError
from kv_core.format import ChunkFormat

VERSION: Final = 2
"""Changes whenever the bytes of a judged format do, because findings on the old ones do not apply to the new. Version 1
judged `int8` and `fp8` with only scales of rows."""


@dataclass(frozen=True, slots=True)
class FormatQuality:
    """One format on one model.

    format: its name in the settings.
    bits: stored bits per number of KV, everything included.
    kl: mean Kullback-Leibler divergence of the next token's distribution from exact KV's, in nats.
    top1: how often the likeliest next token is the same, from 0 to 1.
    perplexity: change of the continuations' perplexity relative to exact KV's: 0.01 is one per cent worse.
    greedy: fraction of the greedily generated tokens, up to the first difference, that equal those from exact KV, from
        0 to 1.
    worst: the largest error of a number, relative to the largest number of its head and token.
    encode_gbs, decode_gbs: GB of exact KV per second, on the device of the measurement; 0: not measured.
    """

    format: str
    bits: float
    kl: float
    top1: float
    perplexity: float
    greedy: float
    worst: float
    encode_gbs: float
    decode_gbs: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one model with some text.

    model: its name as given to `kv judge`.
    heads: for each layer, the number of KV heads and the dimension of each, which are compared at start.
    dtype: the dtype of the KV.
    tokens: number of tokens predicted for the figures.
    """

    model: str
    heads: tuple[tuple[int, int], ...]
    dtype: str
    tokens: int
    findings: tuple[FormatQuality, ...]

    def of(self, name: str) -> FormatQuality | None:
        """The findings on this format, if it was measured."""
        return next((finding for finding in self.findings if finding.format == name), None)


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Raises `OSError`: the file cannot be written."""
    path.write_text(json.dumps({"version": VERSION, **asdict(verdict)}, indent=2) + "\n", encoding="utf-8")


def read_verdict(path: Path) -> Verdict:
    """Raises `ConfigError`: there is no such file, or `kv judge` did not write it."""
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"judge.verdict {path}: {error}; `kv judge MODEL --out {path}` writes one") from error
    try:
        if fields.pop("version") != VERSION:
            raise ConfigError(
                f"judge.verdict {path} was written for other versions of the formats; write it again with `kv judge`"
            )
        findings = tuple(
            FormatQuality(finding.pop("format"), **{name: float(number) for name, number in finding.items()})
            for finding in fields.pop("findings")
        )
        heads = tuple((int(count), int(dim)) for count, dim in fields.pop("heads"))
        return Verdict(heads=heads, findings=findings, **fields)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"judge.verdict {path} is not a file of `kv judge`: {error!r}") from error


FIRST_PARTS: Final = "progressive"
"""The codec whose first parts may be read alone: its name as an entry point in `kv_tiers.codecs`, and in findings."""


def demand(
    path: str, max_kl: float, formats: Sequence[ChunkFormat], *, approximate: bool = False, codec: str = ""
) -> None:
    """Refuse formats that lose more than the operator allows, or that were not measured. Raises `ConfigError`: a lossy
    format was not measured, or not on such a model, or loses more; or chunks of these formats have no first parts.

    path: the verdict's path; "" if only a bound was given.
    max_kl: the bound in nats; 0: no bound.
    formats: the proved formats of the engine's groups, with all heads or a rank's. Exact ones are always allowed.
    approximate: whether first parts of chunks are read alone.
    codec: the name in findings of the lossy codec of the engine's tiers; "" without one.
    """
    if approximate:
        _check_approximable(formats)
    if codec:
        _demand(path, max_kl, codec, formats)
    lossy = list(formats) if approximate else [chunk_format for chunk_format in formats if chunk_format.is_quantised]
    if lossy:
        _demand(path, max_kl, FIRST_PARTS if approximate else lossy[0].kind, lossy)


def check(path: str, max_kl: float, kinds: Sequence[str]) -> None:
    """As far as settings alone can be checked, without an engine's layers: for `kv config`. Raises `ConfigError`: the
    verdict cannot be read, or an engine with these settings would refuse to start.

    kinds: the lossy formats that they choose, by their names in findings.
    """
    if path:
        read_verdict(Path(path))
    for kind in kinds:
        _demand(path, max_kl, kind, ())


def _demand(path: str, max_kl: float, kind: str, lossy: Sequence[ChunkFormat]) -> None:
    if not max_kl:
        return
    if not path:
        raise ConfigError(
            f"judge.max_kl is {max_kl:g} and format {kind} is lossy: measure it with `kv judge MODEL --out FILE` and "
            "set judge.verdict to the file"
        )
    verdict = read_verdict(Path(path))
    for chunk_format in lossy:
        if not any(dim == chunk_format.head_dim and count % chunk_format.heads == 0 for count, dim in verdict.heads):
            raise ConfigError(
                f"judge.verdict {path} is of {verdict.model}, which has no layers with {chunk_format.heads} heads of "
                f"{chunk_format.head_dim}, as this engine has: write one for its model with `kv judge`"
            )
    finding = verdict.of(kind)
    if finding is None:
        raise ConfigError(f"judge.verdict {path} does not cover format {kind}; measure it with `kv judge`")
    if not finding.kl <= max_kl:
        raise ConfigError(
            f"format {kind} has a KL divergence of {finding.kl:.2g} on {verdict.model}, and judge.max_kl allows "
            f"{max_kl:g}: choose another format, such as auto, or a bound of at least {finding.kl:.2g}"
        )


def _check_approximable(formats: Sequence[ChunkFormat]) -> None:
    for chunk_format in formats:
        if chunk_format.kind != "canonical" or chunk_format.dtype != "bfloat16":
            raise ConfigError(
                "tiers: approximate needs chunks of bfloat16 in format canonical, and these are "
                f"{chunk_format.dtype} in format {chunk_format.kind}: leave out approximate"
            )
