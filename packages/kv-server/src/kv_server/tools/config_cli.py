"""`kv config`: the settings that an engine's package would use, where each value came from, and what is wrong with
them."""

import argparse
import json
import os
import re
import sys
from pathlib import Path

from kv_core.errors import ConfigError, InputError
from kv_core.format import is_quantised_kind
from kv_core.log import say
from kv_tiers.settings import Layer, Settings, load, read_file, resolve

_PASSWORD_IN_URL = re.compile(r"(://[^:@/]*:).*@")  # which may have any character in it
_SECRET = re.compile(r"(password|passphrase|secret|token|salt|credential|authorization|api_key)(?!.*_file$)", re.I)
_SECRET_IN_QUERY = re.compile(r"([?&][^=&]*(?:password|secret|token|key)[^=&]*=)[^&]*", re.I)


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add this package's subcommands to `kv`."""
    parser = subparsers.add_parser(
        "config",
        help="print the settings in force and where each came from",
        description="Read the settings as kv-vllm and kv-sglang do, and print each with its value and origin. "
        "Precedence: --extra, then the file, then KV_… environment variables. Under SGLang, --page-size decides "
        "chunk_tokens, and algorithm is sha256. The secret, the host pool, the tiers and observe are checked as when "
        "an engine starts on this machine; if server.socket is set, only the secret, as the engine joins that server. "
        "What only kv-server uses is checked as when it starts, except whether addresses are free. A file with "
        "peers.listen or http.listen is taken for kv-server's, which reads no environment variables. The exit status "
        "is 0, or 2 if something is wrong; the text on standard error says what to do.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="YAML, TOML or JSON file to read, as the setting config_file or KV_CONFIG_FILE would name it",
    )
    parser.add_argument("--file", "--config", dest="named_file", help=argparse.SUPPRESS)  # as other commands have it
    parser.add_argument(
        "--extra",
        default="{}",
        metavar="JSON",
        help="our settings as the engine has them: vLLM's kv_connector_extra_config, or SGLang's "
        "--hicache-storage-backend-extra-config without the keys that are SGLang's own",
    )
    parser.add_argument("--output", choices=("table", "json"), default="table", help="how to print (default: table)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        _print_and_check(args)
    except (ConfigError, InputError) as error:
        say(f"kv config: {error}", file=sys.stderr)
        return 2
    return 0


def _print_and_check(args: argparse.Namespace) -> None:
    try:
        extra = json.loads(args.extra)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--extra is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise InputError("--extra must be a JSON object")
    settings = None
    if file := args.file or args.named_file:
        settings, in_force = resolve([Layer("extra config", extra), Layer(f"file {file}", read_file(file))], {})
        extra["config_file"] = file
    if settings is None or not _is_for_server(settings):
        settings, in_force = load(extra, os.environ)
    if args.output == "json":
        values = {entry.path: {"value": _shown(entry.value), "origin": entry.origin} for entry in in_force}
        say(*json.dumps(values, indent=1, default=str).split("\n"), sep="\n")
    else:
        width = max(len(entry.path) for entry in in_force)
        for entry in in_force:
            value = json.dumps(_shown(entry.value), ensure_ascii=False, default=str)
            say(f"{entry.path:{width}}  {value:<12}  {entry.origin}")
    if settings.server.socket:
        from kv_server.address import check_directory

        directory = Path(settings.server.socket).parent
        if not check_directory(directory):
            say(f"kv config: {directory} does not exist yet; kv-server makes it, for this user alone", file=sys.stderr)
    settings.scheme()
    # Too much to import for every command's --help.
    from kv_observe.build import check_observe
    from kv_tiers.build import check_settings

    is_for_server = _is_for_server(settings)
    if is_for_server or not settings.server.socket:  # otherwise the engine joins a server that has all of this
        check_settings(settings.host, settings.tiers)
        check_observe(settings.observe)
        _check_verdict(settings)
    if is_for_server or not (settings.host.name or settings.server.url):  # otherwise they are an engine's
        _check_server(settings)


def _is_for_server(settings: Settings) -> bool:
    return bool(settings.http.listen or settings.peers.listen)


def _check_server(settings: Settings) -> None:
    """Check what only `kv-server` uses, without listening, writing or sending anything. Whether an address is free
    shows when it is bound. Raises `ConfigError`: a server would refuse to start with these settings."""
    from kv_server.config import server_config
    from kv_server.http.start import check_http

    config = server_config(settings)
    check_http(config.http)
    if config.peers.listen:
        from kv_server.peers.server import read_peers

        read_peers(config.peers)


def _check_verdict(settings: Settings) -> None:
    """Whether the judge's verdict covers what these settings lose. Raises `ConfigError`: it does not, or cannot be
    read."""
    from kv_core.plugins import load_plugin
    from kv_tiers.approximate import CALIBRATED, is_approximate, uses_calibration
    from kv_tiers.verdict import check

    kinds: list[str] = [settings.format] if is_quantised_kind(settings.format) else []
    if is_approximate(settings.tiers):
        kinds.append("progressive")
    if uses_calibration(settings.tiers):
        kinds.append(load_plugin("kv_tiers.calibrated", "codec", CALIBRATED)(settings.tiers).name)
    check(settings.judge.verdict, settings.judge.max_kl, kinds)


def _shown(value: object) -> object:
    """The value without the secrets that tiers' options may hold, and with names as JSON has them."""
    if isinstance(value, str):
        return _SECRET_IN_QUERY.sub(r"\1***", _PASSWORD_IN_URL.sub(r"\1***@", value))
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, dict):
        return {str(name): "***" if _SECRET.search(str(name)) else _shown(item) for name, item in value.items()}
    return value
