"""`kv doctor`: what this machine supports, and how to fix the rest.

Each package checks what it depends on, through the entry-point group `kv_core.doctor`: a function from `DoctorOptions`
to findings. A finding that is `wrong` keeps something from working; a `note` costs speed or a feature.
"""

import argparse
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kv_core.log import say

CHECKS = "kv_core.doctor"

State = Literal["ok", "note", "wrong"]
_MARKS: dict[State, str] = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}
_ABOUT = """\
Examine this machine: the GPU, its driver and the bus, pinned and shared memory, NUMA, the disk's file system, and which
engines and libraries are installed, in which versions. Every finding that is not ok says what to do.
The exit status is 1 if something is wrong.

--bundle writes what a bug report needs into one archive that only its owner can read: these findings, versions, the
settings in force without secrets, and what a running server reports. Look through it before you send it.
"""
_COMMAND_S = 30.0


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
    parser.add_argument("--bundle", metavar="FILE", help="write all of it into this .tar.gz for a bug report")
    parser.add_argument("--config", metavar="FILE", help="for --bundle: the file with the settings")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.bundle:
        return _write_bundle(args)
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


def _write_bundle(args: argparse.Namespace) -> int:
    """
    Raises:
        OSError: the file exists or cannot be written.
    """
    descriptor = os.open(args.bundle, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    config = [args.config] if args.config else []
    doctor = ["doctor", "--path", args.path, *(["--no-measure"] if args.no_measure else [])]
    versions = {
        "python": sys.version,
        "platform": platform.platform(),
        "packages": {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()},
    }
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        _add(archive, "versions.json", json.dumps(versions, indent=1, sort_keys=True, default=str))
        _add(archive, "doctor.txt", _output_of(*doctor))
        _add(archive, "settings.txt", _output_of("config", *config))
        _add(
            archive,
            "server.txt",
            _output_of("top", "--once", "--json", *(["--config", args.config] if args.config else [])),
        )
    say(f"{args.bundle} is written. Look through it before you send it: it names paths, hosts and tenants")
    return 0


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    member = tarfile.TarInfo(f"kv-bundle/{name}")
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _output_of(*words: str) -> str:
    """What another command of `kv` prints, in a process of its own: nothing that it does can spoil the rest."""
    program = "from kv_core.tools.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-P", "-c", program, *words]  # no module of the current directory hides ours
    try:
        done = subprocess.run(  # noqa: S603  # this interpreter, with words of ours and two paths
            command, capture_output=True, text=True, errors="replace", timeout=_COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"kv {words[0]}: not done within {_COMMAND_S:g} s\n"
    return f"{done.stdout}{done.stderr}kv {words[0]}: exit status {done.returncode}\n"
