"""`kv bench copy`: measure the roads between host and device, and keep what was found for the copier to use."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from kv_core.errors import ConfigError

_ABOUT = """\
Measure how fast chunks move between pinned host memory and the GPU on each road: by the kernel alone, by the copy
engine and a ring, and by the driver's batched copies. What is fastest for which length of run is kept in a file,
which the copier reads when an engine starts. Takes about a minute; nothing else should use the GPU meanwhile.
"""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure this machine")
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    copy = what.add_parser("copy", help="host ↔ GPU, and keep the result", description=_ABOUT)
    copy.add_argument("--device", default="cuda", help="which GPU (default: cuda)")
    copy.add_argument("--json", action="store_true", help="one JSON object a line for each figure")
    copy.add_argument("--dry-run", action="store_true", help="do not keep the result")
    copy.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """
    Raises:
        ConfigError: there is no such GPU, or no Triton.
    """
    import torch

    try:
        device = torch.device(asked.device)
    except RuntimeError:
        raise ConfigError(f"--device {asked.device}: write cuda, or cuda:1 for the second GPU") from None
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(f"--device {asked.device}: there is no such GPU; `kv doctor` says what is missing")
    from kv_cuda.measure import Sizes, measure_roads, roads_from
    from kv_cuda.roads import roads_file, write_roads

    measured = []
    for one in measure_roads(device, Sizes()):
        measured.append(one)
        if asked.json:
            print(json.dumps(asdict(one)), flush=True)
        else:
            rate = f"{one.gbps:7.1f} GB/s of {one.limit_gbps:6.1f} ({one.gbps / one.limit_gbps:.2f})"
            print(f"{one.direction:<6} {one.road:<7} {one.layout:<26} {rate}", flush=True)
    roads = roads_from(measured)
    if not asked.dry_run:
        path = roads_file(torch.cuda.get_device_name(device))
        write_roads(path, roads)
        print(f"kept in {path}", file=sys.stderr)
    return 0
