"""`kv top`: shows a server in a terminal, queried every second over its socket."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from kv_core.errors import ConfigError, InputError, TierDown
from kv_core.log import say

from kv_server.tools.which_server import add_server_options, socket_of

if TYPE_CHECKING:
    from kv_server.report import Report

_ABOUT: Final = """\
Show what a kv-server keeps and moves: each format's hit ratio, the pool and the tiers below it with what flows in and
out per second, its sessions and tenants. It asks the server's socket and changes nothing.
"""
_EXAMPLES: Final = """\
examples:
  kv top                          # the server that kv-server starts by default
  kv top --name llama --every 5
  kv top --once                   # two queries, a second apart, and one plain snapshot
  kv top --json | jq .caches      # what the server reports, one object per line

It says so while the server does not answer, and continues; end it with Ctrl-C. The exit status is 0, or 2 if --once or
--json --once found no server, or an option is wrong.
"""


def register(commands: Any) -> None:
    """Add `kv top`; called by the `kv` command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "top",
        help="a cache server, live in a terminal",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_top)
    add_server_options(parser)
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="how often to ask (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one snapshot and exit, as without a terminal")
    parser.add_argument("--json", action="store_true", help="what the server reports, one object per line")


def _top(args: argparse.Namespace) -> int:
    if not 0.05 <= args.every <= 3600:
        raise InputError(f"--every {args.every:g}: write 0.05 to 3600 seconds")
    path = socket_of(args)
    try:
        if args.json:
            return _print_json(path, args.every, once=args.once)
        if args.once or not sys.stdout.isatty():
            return _print_once(path, args.every)
        return _watch(path, args.every)
    except TierDown as why:
        raise ConfigError(f"{why}; start one with kv-server, or give --name or --socket") from None
    except KeyboardInterrupt:  # how it is ended
        return 0


def _ask(path: Path) -> "Report":
    """
    Raises:
        TierDown: the server does not answer.
        ConfigError: it refuses us.
    """
    from kv_server.connection import ask_server_for
    from kv_server.wire import Stated, Status

    return ask_server_for(path, Status(), Stated).report


def _print_json(path: Path, every_s: float, *, once: bool) -> int:
    """Poll the server. While it is away, one line on standard error for each new reason."""
    last_reason = ""
    while True:
        try:
            say(json.dumps(msgspec.json.decode(msgspec.json.encode(_ask(path)))), flush=True)
            last_reason = ""
        except TierDown as why:
            if once:
                raise
            if last_reason != str(why):
                last_reason = str(why)
                say(f"kv top: away: {last_reason}", file=sys.stderr, flush=True)
        if once:
            return 0
        time.sleep(every_s)


def _print_once(path: Path, every_s: float) -> int:
    from kv_server.tools.top import Watch, draw, plain_console

    watch = Watch()
    watch.take(_ask(path))
    time.sleep(every_s)
    plain_console().print(draw(watch.take(_ask(path)), str(path), ""))
    return 0


def _watch(path: Path, every_s: float) -> int:
    from kv_server.tools.top import Picture, Watch, draw, on_screen

    watch = Watch()
    picture: Picture | None = None
    with on_screen() as show:
        while True:
            away = ""
            try:
                picture = watch.take(_ask(path))
            except (TierDown, ConfigError) as why:
                away = str(why)
            show(draw(picture, str(path), away))
            time.sleep(every_s)
