"""The command line that makes SGLang use this cache, printed so that it can be pasted."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from kv_core.errors import ConfigError
from kv_tiers.attach.settings import load

from kv_sglang import TESTED


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kv_sglang", description=f"KV-cache tiering for SGLang {TESTED}.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    flags = commands.add_parser(
        "flags",
        help="print the arguments of sglang.launch_server",
        description="Print the arguments that make `python -m sglang.launch_server` use this cache.",
        epilog="example: python -m kv_sglang flags --capacity 8GiB --tier disk:path=/var/kv,capacity_bytes=200GiB",
    )
    flags.add_argument("--capacity", help="host memory for chunks, beside SGLang's own host pool (default: 4GiB)")
    flags.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="TYPE:OPTION=VALUE,…",
        help="what is below, hottest first; repeat it for more. With write=back, what waits is stored once the engine "
        "has ended, by a process that outlasts it, for cold.drain_s (5 s) at most",
    )
    flags.add_argument("--socket", help="join the kv-server that listens there; capacity and tiers are then its own")
    flags.add_argument(
        "--page-size",
        type=int,
        default=64,
        help="tokens a page, which is a chunk (default: 64); as other engines have it",
    )
    flags.add_argument(
        "--linker",
        action="store_true",
        help="use SGLang's external linker in place of HiCache: no host memory of SGLang's own, and what only slower "
        "tiers have is a miss the first time; experimental",
    )
    flags.add_argument("--config-file", help="a YAML file with the settings that both engines read")
    flags.set_defaults(run=_flags)
    chosen = parser.parse_args(arguments)
    return int(chosen.run(chosen))


def _flags(chosen: argparse.Namespace) -> int:
    settings: dict[str, Any] = {}
    try:
        if chosen.config_file:
            settings["config_file"] = chosen.config_file
        if chosen.capacity:
            settings["host"] = {"capacity": chosen.capacity}
        if chosen.tier:
            settings["tiers"] = [read_tier(text) for text in chosen.tier]
        if chosen.socket:
            settings["server"] = {"socket": chosen.socket}
        load(settings, {})
        if chosen.page_size < 1:
            raise ConfigError(f"--page-size is {chosen.page_size}; a page has at least one token")
    except ConfigError as error:
        print(f"kv_sglang flags: {error}", file=sys.stderr)
        return 2
    print(shlex.join(arguments_for(settings, page_size=chosen.page_size, linker=chosen.linker)))
    return 0


def read_tier(text: str) -> dict[str, Any]:
    """`disk:path=/kv,capacity_bytes=1GiB` as the settings have it. A value that is JSON (a number, true) is that.

    Raises:
        ConfigError: not of this form.
    """
    kind, _, rest = text.partition(":")
    tier: dict[str, Any] = {"type": kind}
    for option in filter(None, rest.split(",")):
        name, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"--tier {text}: {option!r} is not OPTION=VALUE")
        try:
            tier[name] = json.loads(value)
        except json.JSONDecodeError:
            tier[name] = value
    return tier


def engine_arguments(settings: dict[str, Any], *, page_size: int, linker: bool = False) -> dict[str, Any]:
    """The arguments of `sglang.Engine` for these settings of ours."""
    if linker:
        config = {"linker": "KVLinker", "linker_module_path": "kv_sglang.linker", "linker_extra_config": settings}
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "page_size": page_size,
            "unified_cache_external_linker_config": config,
        }
    extra = {
        "backend_name": "kv-sglang",
        "module_path": "kv_sglang.storage",
        "class_name": "KVStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        **settings,
    }
    return {
        "enable_hierarchical_cache": True,
        "page_size": page_size,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def arguments_for(settings: dict[str, Any], *, page_size: int, linker: bool = False) -> list[str]:
    """The same as SGLang's command line has them."""
    named = engine_arguments(settings, page_size=page_size, linker=linker)
    flags = {f"--{name.replace('_', '-')}": value for name, value in named.items()}
    plain = {flag: json.dumps(value) if isinstance(value, dict) else value for flag, value in flags.items()}
    return [flag if value is True else f"{flag}={value}" for flag, value in plain.items()]
