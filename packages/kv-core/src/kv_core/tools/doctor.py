"""`kv doctor`: what this machine supports, and how to fix the rest.

Each package checks what it depends on, through the entry-point group `kv_core.doctor`: a function from `DoctorOptions`
to findings. A finding that is `wrong` keeps something from working; a `note` costs speed or a feature.
"""

import argparse
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kv_core.terminal import say

CHECKS = "kv_core.doctor"

State = Literal["ok", "note", "wrong"]
_MARKS: dict[State, str] = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}
_ABOUT = """\
Examine this machine: the GPU, its driver and the bus, pinned and shared memory, NUMA, the disk's file system, and which
engines and libraries are installed, in which versions. Every finding that is not ok says what to do.
The exit status is 1 if something is wrong.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `kv doctor`.

    what: the thing examined.
    found: its state.
    advice: what to do about it; empty only where all is well.
    """

    state: State
    what: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """The options of `kv doctor`.

    path: a directory that a disk tier might use.
    measure: whether to time copies, which takes some seconds.
    """

    path: str
    measure: bool


def findings(options: DoctorOptions) -> Iterator[Finding]:
    """The findings of all installed packages, in the order of their names. A check that fails is a finding too."""
    for entry in sorted(importlib.metadata.entry_points(group=CHECKS), key=lambda entry: entry.name):
        try:
            yield from entry.load()(options)
        except Exception as error:  # noqa: BLE001  # the other packages' findings are wanted in any case
            yield Finding(
                "wrong", entry.name, f"{entry.value} failed: {error!r}", "report this; the other findings stand"
            )


def version_of(distribution: str) -> str | None:
    """The installed version; None if the distribution is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def register(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what this machine can do, and what to do about it", description=_ABOUT)
    parser.add_argument("--path", default=".", metavar="DIR", help="where a disk tier would be (default: here)")
    parser.add_argument("--no-measure", action="store_true", help="look only; copy nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    worst = 0
    for finding in findings(DoctorOptions(args.path, not args.no_measure)):
        if args.json:
            say(json.dumps(asdict(finding)), flush=True)
        else:
            say(f"{_MARKS[finding.state]}  {finding.what}: {finding.found}", flush=True)
            if finding.advice:
                say(f"       → {finding.advice}")
        worst = max(worst, finding.state == "wrong")
    return worst
