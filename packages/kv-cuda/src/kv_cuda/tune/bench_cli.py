"""`kv bench copy`: measures the paths between host and device, and saves the result for the copier."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_core.errors import ConfigError
from kv_core.log import say

if TYPE_CHECKING:
    import torch

    from kv_cuda.tune.measure import MeasuredCopy, MeasuredFile

_ABOUT = """\
Measure how fast chunks move between pinned host memory and the GPU on each path: by the kernel alone, by the copy
engine and a ring, and by the driver's batched copies. The fastest path for each length of run is saved in a file,
which the copier reads when an engine starts. Takes about a minute; nothing else should use the GPU meanwhile.

With --file: from the files of a directory to the GPU, directly (GPUDirect Storage) or through pinned memory. Name
the directory of your disk tier, or any on the same file system; a GiB is written there and removed.
"""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure this machine")
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    copy = what.add_parser("copy", help="host ↔ GPU, and save the result", description=_ABOUT)
    copy.add_argument("--device", default="cuda", help="which GPU (default: cuda)")
    copy.add_argument("--file", metavar="DIRECTORY", type=Path, help="measure files of this directory instead")
    copy.add_argument("--json", action="store_true", help="one JSON object per line for each figure")
    copy.add_argument("--dry-run", action="store_true", help="do not save the result")
    copy.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    Raises:
        ConfigError: there is no such GPU, or no Triton; or the directory cannot be used.
    """
    import torch

    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise ConfigError(f"--device {args.device}: write cuda, or cuda:1 for the second GPU") from None
    is_there = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    if device.type != "cuda" or not is_there:
        raise ConfigError(f"--device {args.device}: there is no such GPU; `kv doctor` says what is missing")
    name = torch.cuda.get_device_name(device)
    path = _copy_paths(device, name, args) if args.file is None else _file_copy_paths(device, name, args)
    if path is not None:
        say(f"saved in {path}", file=sys.stderr)
    return 0


def _copy_paths(device: "torch.device", name: str, args: argparse.Namespace) -> Path | None:
    from kv_cuda.copy.copy_paths import CopyPaths
    from kv_cuda.tune.measure import Sizes, copy_paths_from, measure_copy_paths

    measured = []
    for measurement in measure_copy_paths(device, Sizes()):
        measured.append(measurement)
        _print_measurement(measurement, measurement.layout, as_json=args.json)
    if args.dry_run:
        return None
    path = CopyPaths.file(name)
    copy_paths_from(measured).write(path)
    return path


def _file_copy_paths(device: "torch.device", name: str, args: argparse.Namespace) -> Path | None:
    from kv_cuda.copy.copy_paths import FileCopyPaths
    from kv_cuda.files.cufile import NoCuFile, find_cufile
    from kv_cuda.tune.measure import file_copy_paths_from, measure_files

    cufile = find_cufile(device, args.file)
    if isinstance(cufile, NoCuFile):
        say(f"no direct path: {cufile.why}. {cufile.advice}".rstrip(), file=sys.stderr)
    measured = []
    for measurement in measure_files(device, args.file, cufile):
        measured.append(measurement)
        _print_measurement(measurement, measurement.directory, as_json=args.json)
    copy_paths = file_copy_paths_from(measured)
    if args.dry_run or not copy_paths.measured:
        return None
    path = FileCopyPaths.file(name)
    FileCopyPaths({**FileCopyPaths.read(path).measured, **copy_paths.measured}).write(path)
    return path


def _print_measurement(measurement: "MeasuredCopy | MeasuredFile", label: str, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(asdict(measurement)), flush=True)
    else:
        gbps, limit_gbps = measurement.gbps, measurement.limit_gbps
        rate = f"{gbps:7.1f} GB/s of {limit_gbps:6.1f} ({gbps / limit_gbps:.2f})"
        say(f"{measurement.direction:<6} {measurement.copy_path:<7} {label:<26} {rate}", flush=True)
