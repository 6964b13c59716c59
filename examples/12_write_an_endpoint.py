"""An HTTP endpoint of your own, with a parameter: which tiers are fuller than so many percent, for an alert. In a
package of yours, this in its pyproject.toml makes it known wherever the package is installed:

    [project.entry-points."kv_server.endpoints"]
    full = "your_package.your_module:make_full"

and settings say `http: {listen: …, endpoints: [{name: full, default_percent: 90}]}`. It is at /endpoints/full/tiers.
"""

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import msgspec
from kv_core.errors import ConfigError
from kv_server import RemoteCache, launch
from kv_server.http.endpoints import ServerView
from kv_server.http.operation import Operation, Problem
from kv_tiers.options import read_options


class FullConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    default_percent: int = 90


class FullTiers(msgspec.Struct, frozen=True):
    """In the OpenAPI document. tiers: by name, the percentage in use."""

    tiers: dict[str, int]


def make_full(parameters: Mapping[str, object]) -> Sequence[Operation]:
    config = read_options(FullConfig, parameters, "endpoint full")
    if not 0 <= config.default_percent <= 100:
        raise ConfigError(f"endpoint full: default_percent is {config.default_percent}; write 0 to 100")
    above = "Tiers fuller than so many percent"
    default = partial(full_tiers, percent=str(config.default_percent))
    return [
        Operation("GET", "/tiers", f"{above}: {config.default_percent}", default, FullTiers),
        Operation("GET", "/tiers/{percent}", above, full_tiers, FullTiers, failures=(404,)),
    ]


def full_tiers(view: ServerView, percent: str) -> FullTiers:
    """On a thread of its own, so it may take its time: no engine waits. Any method but GET would need the token."""
    if not percent.isdecimal() or len(percent) > 3:
        raise Problem(404, "percent is a number")
    full = {}
    for cache in view.report().caches:
        uses = {"pool": (cache.counts.slots_used, cache.counts.slots_total)}
        uses |= {tier.name: (tier.usage.used_bytes or 0, tier.usage.capacity_bytes or 0) for tier in cache.tiers}
        for name, (used, capacity) in uses.items():
            if capacity and 100 * used >= int(percent) * capacity:
                full[name] = max(full.get(name, 0), 100 * used // capacity)
    return FullTiers(full)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        install(Path(home))
        server = launch(
            {
                "host": {"capacity_bytes": "1MiB"},
                "http": {"listen": "127.0.0.1:0", "endpoints": [{"name": "full", "default_percent": 50}]},
            }
        )
        RemoteCache(server.socket, group_bytes=(4096,), fingerprint="made-up").close()
        for path in ("tiers", "tiers/0"):
            with urlopen(f"{server.url}endpoints/full/{path}") as answer:
                print(path, answer.read().decode())
        server.stop()


def install(home: Path) -> None:
    """What pip does with your package, for this process and the servers that it starts."""
    shutil.copy(__file__, home / "full_tiers.py")
    info = home / "full_tiers-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: full-tiers\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kv_server.endpoints]\nfull = full_tiers:make_full\n")
    sys.path.append(str(home))


if __name__ == "__main__":
    main()
