"""Prints the command-line arguments that make SGLang use this cache, ready to paste.

They are validated as the engine will validate them, as far as that is possible without a model: an engine runs for a
minute before it reports a misspelt option.
"""

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from kv_core.errors import ConfigError, InputError
from kv_core.log import say
from kv_tiers.build import check_settings, refuse_gds
from kv_tiers.settings import Setting, Settings, load

from kv_sglang import TESTED

CACHE_CONTROL: Final = "cache_control"
"""The entry of the extra config that puts `kv_connect.cache_control` in front of SGLang's server."""
SGLANG_TAKES: Final = frozenset(
    ("backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path", CACHE_CONTROL)
)
"""Entries of the extra config that are no settings: SGLang's, which adds `file_storage_path` for any backend, and that
of our plugin."""
_EXAMPLE: Final = """\
example, with eval because the arguments are quoted for a shell:
  eval python -m sglang.launch_server --model-path MODEL \\
    $(python -m kv_sglang flags --capacity 8GiB --tier disk:directory=/var/kv,capacity_bytes=200GiB)

All settings are in docs/settings.md; those without an option here go into --config-file or KV_… variables. The exit
status is 0, or 2 if the engine would refuse the settings; the text on standard error says what to do.
"""
_REFUSED: Final = "--kv-sglang-flags-has-refused-these-settings"
"""Printed in the place of arguments: a shell ignores the status of `$(…)`, and SGLang would start without the cache. It
refuses an argument that it does not know."""
_PAGE_TOKENS: Final = 64
_DIRECTORY: Final = "directory"
"""The option of tiers that names a directory; options that end in `_file` name files."""


def read_settings(extra: Mapping[str, Any], page_size: int, environ: Mapping[str, str]) -> Settings:
    """Read our settings from `--hicache-storage-backend-extra-config`, a file and the environment.

    Raises:
        ConfigError: a setting is wrong, or not possible for SGLang's pages.
    """
    cache_settings = {name: value for name, value in extra.items() if name not in SGLANG_TAKES}
    settings, in_force = load(cache_settings, environ)
    origins = {entry.path: entry for entry in in_force}
    _refuse_other(origins["chunk_tokens"], page_size, "a page of SGLang is a chunk: leave it out, or start with")
    _refuse_other(origins["algorithm"], "sha256", "SGLang names its pages itself, by sha256: leave it out;")
    if settings.format == "blocks":
        raise ConfigError('format is "blocks"; SGLang\'s pages are kept in the canonical format: leave it out')
    return msgspec.structs.replace(settings, chunk_tokens=page_size, algorithm="sha256")


def _refuse_other(given: Setting, wanted: object, why: str) -> None:
    if given.origin != "default" and given.value != wanted:
        flag = f" --page-size {given.value}" if given.path == "chunk_tokens" else ""
        raise ConfigError(f"{given.path} is {given.value} in {given.origin}, but {why}{flag}")


def main(
    arguments: Sequence[str] | None = None,
    *,
    package: str = "kv_sglang",
    make: Callable[..., dict[str, Any]] | None = None,
) -> int:
    """package: whose command this is. make: makes the engine's arguments; None: `engine_arguments`."""
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=f"KV-cache tiering for SGLang {TESTED}.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    flags = commands.add_parser(
        "flags",
        help="print the arguments of sglang.launch_server",
        description="Print the arguments that make `python -m sglang.launch_server` use this cache.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument(
        "--capacity", metavar="BYTES", help="host memory for chunks, beside SGLang's own host pool (default: 4GiB)"
    )
    flags.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="TYPE:OPTION=VALUE,…",
        help=(
            "a lower tier, hottest first; repeatable. With write=back, chunks still waiting are stored after the "
            "engine has ended, by a process that outlives it, for at most cold.drain_s (5 s)"
        ),
    )
    flags.add_argument(
        "--socket", metavar="PATH", help="join the kv-server that listens there; capacity and tiers are then its own"
    )
    flags.add_argument(
        "--page-size",
        type=int,
        metavar="TOKENS",
        help="tokens per page, which is a chunk (default: the settings' chunk_tokens, or 64); the same in all engines",
    )
    host = flags.add_mutually_exclusive_group()
    host.add_argument(
        "--hicache-size",
        type=int,
        metavar="GB",
        help=(
            "SGLang's own host memory per rank, in GB (default: our capacity). Without a size SGLang takes 80 "
            "percent of the machine's remaining memory, or does not start"
        ),
    )
    host.add_argument("--hicache-ratio", type=float, metavar="R", help="the same in multiples of its device memory")
    flags.add_argument(
        "--linker",
        action="store_true",
        help=(
            "use SGLang's external linker instead of HiCache: SGLang uses no host memory of its own, and chunks that "
            "only lower tiers have are a miss the first time; experimental"
        ),
    )
    flags.add_argument(
        "--cache-control", action="store_true", help="clients' marks retain prompts: Anthropic's cache_control"
    )
    flags.add_argument("--config-file", metavar="FILE", help="a file with the settings: YAML, TOML or JSON")
    flags.set_defaults(run=_flags, make=make or engine_arguments)
    args = parser.parse_args(arguments)
    return int(args.run(args))


def _flags(args: argparse.Namespace) -> int:
    settings: dict[str, Any] = {}
    try:
        if args.config_file:
            settings["config_file"] = os.path.abspath(args.config_file)
        if args.capacity:
            settings["host"] = {"capacity_bytes": args.capacity}
        if args.tier:
            settings["tiers"] = [_absolute(read_tier(text)) for text in args.tier]
        if args.socket:
            settings["server"] = {"socket": os.path.abspath(args.socket)}
        page_size = _page_size(args, settings)
        in_force = read_settings(settings, page_size, os.environ)
        _check(in_force)
        host = {} if args.linker else _host_memory(args, in_force)
    except (ConfigError, InputError) as error:
        say(f"kv_sglang flags: {error}", file=sys.stderr)
        print(_REFUSED)  # noqa: T201  # for a shell, which needs it exactly
        return 2
    if args.cache_control:
        settings[CACHE_CONTROL] = True
    named = args.make(settings, page_size=page_size, linker=args.linker) | host
    print(shlex.join(_as_flags(named)))  # noqa: T201  # for a shell, which needs it exactly
    return 0


def _page_size(args: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    """The given page size, else the chunk size of the settings."""
    if args.page_size is None:
        _, in_force = load(settings, os.environ)
        (said,) = [entry for entry in in_force if entry.path == "chunk_tokens"]
        return _PAGE_TOKENS if said.origin == "default" else int(str(said.value))
    if args.page_size < 1:
        raise ConfigError(f"--page-size is {args.page_size}; a page has at least one token")
    return int(args.page_size)


def _host_memory(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """The size of SGLang's own host memory; by default the size of ours."""
    if args.hicache_ratio is not None:
        if not 0 < args.hicache_ratio < math.inf:
            raise ConfigError(f"--hicache-ratio is {args.hicache_ratio}; write a number above 0, such as 1.5")
        return {"hicache_ratio": args.hicache_ratio}
    size = args.hicache_size
    if size is None:
        size = math.ceil(settings.host.capacity_bytes / 1e9)
    if size < 1:
        raise ConfigError(f"--hicache-size is {size}; write a whole number of GB, such as 4")
    return {"hicache_size": size}


def _check(settings: Settings) -> None:
    """Check for settings that the engine would refuse at start, as far as possible without its model.

    Raises:
        ConfigError: the settings would be refused.
    """
    settings.scheme()
    _refuse_relative("server.socket", settings.server.socket)
    _refuse_relative("judge.verdict", settings.judge.verdict)
    if settings.server.socket:
        return  # host, tiers, tenants and what observes them are the server's own
    _refuse_relative("observe.record", settings.observe.record)
    for number, options in enumerate(settings.tenants):
        for option, path in _paths(options):
            _refuse_relative(f"tenants[{number}]: {option}", path)
    for number, tier in enumerate(settings.tiers):
        for option, path in _paths(tier):
            _refuse_relative(f"tiers[{number}] ({tier['type']}): {option}", path)
    check_settings(settings.host, settings.tiers)
    refuse_gds(settings.tiers, "is for vLLM")


def _refuse_relative(name: str, path: str) -> None:
    if path and not os.path.isabs(path):
        raise ConfigError(f"{name} {path} is relative, and SGLang may start elsewhere: write {os.path.abspath(path)}")


def _paths(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The options of a tier that name files or directories, with one path each time, also those of a table among them:
    the `directory` of peers is one. What is no text is for the tier to check."""
    for option, value in options.items():
        if isinstance(value, dict):
            yield from ((f"{option}.{inner}", path) for inner, path in _paths(value))
        elif option == _DIRECTORY or option.endswith("_file"):
            paths = value if isinstance(value, list) else [value]
            yield from ((option, path) for path in paths if isinstance(path, str) and path)


def _absolute(tier: dict[str, Any]) -> dict[str, Any]:
    """The same tier with absolute paths, wherever SGLang is started. `--tier` has no way to write a table's files."""
    settings = dict(tier)
    for option in {option for option, _ in _paths(tier)} & tier.keys():
        value = tier[option]
        settings[option] = (
            [os.path.abspath(each) for each in value] if isinstance(value, list) else os.path.abspath(value)
        )
    return settings


def read_tier(text: str) -> dict[str, Any]:
    """Convert `disk:directory=/kv,capacity_bytes=1GiB` to settings. A value that is JSON (a number, true) is parsed.

    Raises:
        ConfigError: the text is not of this form.
    """
    kind, _, rest = text.partition(":")
    tier: dict[str, Any] = {"type": kind}
    for option in filter(None, rest.split(",")):
        name, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"--tier {text}: {option!r} is not OPTION=VALUE")
        try:
            tier[name] = json.loads(value)
        except (ValueError, RecursionError):  # text, or what only looks like JSON
            tier[name] = value
    return tier


def engine_arguments(settings: dict[str, Any], *, page_size: int, linker: bool = False) -> dict[str, Any]:
    """The arguments of `sglang.Engine` for our settings."""
    if linker:
        config = {
            "linker": "KVLinker",
            "linker_module_path": "kv_sglang.linker",
            "linker_extra_config": settings,
        }
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


def _as_flags(named: Mapping[str, Any]) -> list[str]:
    flags = {f"--{name.replace('_', '-')}": value for name, value in named.items()}
    plain = {flag: json.dumps(value) if isinstance(value, dict) else value for flag, value in flags.items()}
    return [flag if value is True else f"{flag}={value}" for flag, value in plain.items()]
