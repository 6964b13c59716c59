"""`kv judge MODEL`: what each lossy format costs this model in quality, and a verdict that settings can demand."""

import argparse
import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_core.errors import InputError
from kv_core.format import QUANTISED, is_quantised_kind
from kv_core.log import say
from kv_core.tools.cli import add_command
from kv_tiers.verdict import FIRST_PARTS

STEP = 0.4
"""The default step of the codec `kvtc`, with which chunks become about six times smaller."""

if TYPE_CHECKING:
    from kv_tiers.verdict import Verdict

_ABOUT = """\
Run a model on text twice: with exact keys and values of the context, and with those that a lossy format returns. The
change in the next token's distribution is the cost of the format. Needs transformers (engines bring it) and the
model in memory once; a model of 135 million parameters takes a minute on two cores.

The codec `kvtc` of tiers is calibrated for a model: `--calibrate TEXT --calibration FILE` writes FILE, which the
settings name. With `--text` it is judged at once; use different text for that.

Give text like that which the model will see: --text FILE, repeated. With --out the findings go to a file;
`judge.verdict` and `judge.max_kl` in the settings then refuse, at start, a format that loses more than you allow.
"""


def register(subparsers: Any) -> None:
    parser = add_command(subparsers, "judge", _ABOUT, "", help="what lossy formats cost a model in quality")
    parser.add_argument("model", metavar="MODEL", help="a directory, or its name on the Hugging Face hub")
    parser.add_argument("--text", metavar="FILE", type=Path, action="append", default=[], help="UTF-8 text; repeatable")
    parser.add_argument(
        "--format",
        dest="formats",
        action="append",
        choices=[*sorted(QUANTISED), FIRST_PARTS],
        help=(
            "only this one; repeatable (default: those of one byte per number, or none with --calibration). "
            f"{FIRST_PARTS}: first parts of its chunks"
        ),
    )
    parser.add_argument("--compare", action="store_true", help="published formats too, for comparison")
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="judge the codec kvtc with this calibration; repeatable",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="write --calibration first, from this text",
    )
    parser.add_argument(
        "--step", type=float, default=STEP, help=f"of a calibration, in standard deviations (default: {STEP})"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="of a calibration: for engines of up to N tensor-parallel ranks, any number that divides N (default: 1)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="of keys and values, as the engine stores them (default: bfloat16)",
    )
    parser.add_argument("--device", default="cpu", help="where the model runs (default: cpu)")
    parser.add_argument(
        "--context", type=int, default=1024, metavar="TOKENS", help="stored before each continuation (default: 1024)"
    )
    parser.add_argument("--windows", type=int, default=8, metavar="N", help="of text, at most (default: 8)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the verdict there")
    parser.add_argument("--json", action="store_true", help="print the verdict instead of a table")
    parser.set_defaults(run=run)


def _check_model(name: str) -> None:
    """Refuse what is a directory by its form, and is none: nobody's hub is asked for a mistyped path.

    Raises:
        InputError: it is neither a directory nor a hub's name, `MODEL` or `OWNER/MODEL`.
    """
    if Path(name).is_dir():
        return
    owner, slash, _ = name.partition("/")
    is_hub_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith(".")
    if not is_hub_name or (slash and Path(owner).is_dir()):
        raise InputError(f"{name}: there is no such directory")


def run(args: argparse.Namespace) -> int:
    """
    Raises:
        InputError: a number is out of range.
        ConfigError: there is no such model or text, or it cannot be judged.
    """
    from kv_tiers.verdict import write_verdict

    from kv_codecs.calibration import Learning
    from kv_codecs.judge.calibrate import calibrate, through_calibrated
    from kv_codecs.judge.measure import FirstParts, Model, RoundTrip, Trip, Windows, judge
    from kv_codecs.judge.rivals import rivals

    if args.context < 257 or args.windows < 1:
        raise InputError("--context must be at least 257, one chunk and a token after it, and --windows at least 1")
    if not args.text and not args.calibrate:
        raise InputError("give --text, or --calibrate, or both")
    if args.calibrate and len(args.calibration) != 1:
        raise InputError("--calibrate writes one file: give --calibration FILE once")
    if args.ranks < 1:
        raise InputError(f"--ranks is {args.ranks}; write 1, or how many ranks an engine has")
    if args.calibrate:
        Learning.check_step(args.step)
    for path in [args.out, *(args.calibration if args.calibrate else ())]:
        _check_writable(path)
    _check_device(args.device)
    # A codec to be judged is named only by its calibration.
    names = args.formats or ([] if args.calibration else sorted(QUANTISED))
    trips: list[Trip] = [RoundTrip(name) for name in names if is_quantised_kind(name)]
    trips += [FirstParts()] if FIRST_PARTS in names else []
    trips += rivals() if args.compare else []
    text, calibration_text = _read(args.text), _read(args.calibrate)

    def report(what: str) -> None:
        say(f"kv judge: {what}", file=sys.stderr)

    _check_model(args.model)
    report(f"loading {args.model}")
    model = Model(args.model, dtype=args.dtype, device=args.device)
    if args.calibrate:
        (path,) = args.calibration
        calibration = calibrate(model, model.tokens(calibration_text), ranks=args.ranks).learnt(args.step)
        try:
            calibration.write(path)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error
        report(f"calibration {calibration.name} is in {path}")
    if not args.text:
        return 0
    trips += [through_calibrated(str(path)) for path in args.calibration]
    verdict = judge(model, text, trips, Windows(args.context, most=args.windows), report)
    if args.out is not None:
        write_verdict(args.out, verdict)
        report(f"the verdict is in {args.out}")
    say(*(json.dumps(asdict(verdict)) if args.json else _table(verdict)).split("\n"), sep="\n")
    return 0


def _check_writable(path: Path | None) -> None:
    """Before the work, which may take an hour and would be in vain."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written; name a file, in a directory that there is")


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch's, if it was built without CUDA, is the latter
        why = str(error).partition("\n")[0]
        raise InputError(f"--device {name}: {why}; write cpu, cuda, or cuda:1 for the second GPU") from None


def _read(paths: list[Path]) -> str:
    try:
        return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from error


def _table(verdict: "Verdict") -> str:
    titles = ("format", "bits", "KL", "top-1", "perplexity", "greedy", "worst", "encode", "decode")
    rows = [titles] + [
        (
            finding.format,
            f"{finding.bits:.2f}",
            f"{finding.kl:.5f}",
            f"{finding.top1:.1%}",
            f"{finding.perplexity:+.2%}",
            f"{finding.greedy:.1%}",
            f"{finding.worst:.2%}",
            f"{finding.encode_gbs:.2f} GB/s" if finding.encode_gbs else "",
            f"{finding.decode_gbs:.2f} GB/s" if finding.decode_gbs else "",
        )
        for finding in verdict.findings
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(
        [*lines, f"against exact {verdict.dtype} KV of {verdict.model}, {verdict.tokens} tokens predicted"]
    )
