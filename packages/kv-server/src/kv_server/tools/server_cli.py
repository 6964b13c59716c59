"""`kv top` and `kv drain`: commands that question a running server, which their options select."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from kv_core.errors import ConfigError, InputError, TierDown
from kv_core.terminal import say

if TYPE_CHECKING:
    from kv_server import wire
    from kv_server.report import DrainState, Report


A = TypeVar("A", bound="wire.Answer")
_ANSWER_S: Final = 5.0


def add_server_options(parser: Any) -> None:
    """Add `--name`, `--socket` and `--config`. parser: a parser, or a group of one."""
    parser.add_argument("--name", help="of the server, as kv-server's --name (default: default)")
    parser.add_argument("--socket", metavar="PATH", help="where it listens, instead of the place that the name gives")
    parser.add_argument(
        "--config",
        "--file",
        metavar="FILE",
        dest="server_config",
        help="the settings of the server or its engines, which name it",
    )


def socket_of(options: argparse.Namespace) -> Path:
    """
    Raises:
        ConfigError: the file of settings cannot be read.
    """
    from kv_server.config import default_socket  # too much to import for every command's --help

    socket, name = options.socket, options.name
    if options.server_config is not None and not socket and name is None:
        from kv_tiers.settings import load

        server = load({"config_file": options.server_config}, {})[0].server
        socket, name = server.socket, server.name
    return Path(socket) if socket else default_socket(name or "default")


def ask(path: Path, request: "wire.Request", wanted: type[A], refusal: str) -> A:
    """The server's answer of this kind. refusal: what it does if it is another, in words.

    Raises:
        ConfigError: there is no server, or it refuses us.
        InputError: its answer is another.
    """
    from kv_server import wire
    from kv_server.connection import ask_server

    try:
        answer = ask_server(path, request, timeout_s=_ANSWER_S)
    except TierDown as why:
        raise ConfigError(f"{why}; give --name or --socket") from None
    if not isinstance(answer, wanted):
        response = answer.text if isinstance(answer, wire.Failed) else type(answer).__name__
        raise InputError(f"the server at {path} {refusal}: {response}")
    return answer


# `kv drain`: have a server's peers fetch what is worth keeping before its host leaves.

_ABOUT_DRAIN: Final = """\
Prepare a kv-server's host to leave: it stores nothing new from now on and offers its peers (a tier of type peers) what
its pool holds and no other host has, most valuable first, and then what only its disk and dram tiers hold. They read it
as they read any hit, into half of their pools at most. Engines of this host still load what it has.

The command waits until that is done. Then stop the server, or end the drain with --end.
"""
_EXAMPLES_OF_DRAIN: Final = """\
examples:
  kv drain                               # for a minute at most
  kv drain --timeout 300 --max-bytes 20GiB --name llama
  kv drain --end                         # it stays after all
  kv drain --no-wait && kv top           # kv top shows how far it is

The exit status is 0 if all of it is on other hosts, 1 if something is or may be left, or 2 if no server was found, it
has no peers, or an option is wrong.
"""
_POLL_S: Final = 0.2
_PRINT_S: Final = 1.0
_REFUSAL: Final = "cannot be drained"


def register_drain(commands: Any) -> None:
    """Add `kv drain`; called by the `kv` command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "drain",
        help="move what a server holds to its peers before it leaves",
        description=_ABOUT_DRAIN,
        epilog=_EXAMPLES_OF_DRAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_drain)
    add_server_options(parser)
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="wait at most so long (default: 60)"
    )
    parser.add_argument("--max-bytes", metavar="BYTES", help="move at most this much of each format, such as 20GiB")
    parser.add_argument("--no-wait", action="store_true", help="begin, and do not wait")
    parser.add_argument("--end", action="store_true", help="stop offering, and store as before")
    parser.add_argument(
        "--json", action="store_true", help="how a drain ended, as one JSON object per format, and nothing else"
    )


def _drain(args: argparse.Namespace) -> int:
    from kv_tiers.options import byte_count

    from kv_server import wire

    if not 0.1 <= args.timeout <= 86400:
        raise InputError(f"--timeout {args.timeout:g}: write 0.1 to 86400 seconds")
    max_bytes = None if args.max_bytes is None else byte_count(args.max_bytes, "--max-bytes")
    path = socket_of(args)
    report = ask(path, wire.Drain(not args.end, args.timeout, max_bytes), wire.Stated, _REFUSAL).report
    if args.end:
        say("it stores as before", file=sys.stderr if args.json else sys.stdout)
        return 0
    if args.no_wait:
        return 0
    states, has_begun = _states(report), bool(_states(report))
    printed_s = time.monotonic()
    until_s = printed_s + args.timeout
    # A cache that is being opened is drained once it is open.
    while any(state.phase == "draining" for state in states) or (report.opening and time.monotonic() < until_s):
        time.sleep(_POLL_S)
        report = ask(path, wire.Status(), wire.Stated, _REFUSAL).report
        states = _states(report)
        has_begun = has_begun or bool(states)
        if time.monotonic() - printed_s >= _PRINT_S:
            printed_s = time.monotonic()
            for state in states:
                say(state.spelled(), file=sys.stderr, flush=True)
    for state in states:
        say(json.dumps(msgspec.json.decode(msgspec.json.encode(state))) if args.json else state.spelled())
    if report.opening:
        say(f"kv drain: {report.opening} caches are still being opened", file=sys.stderr)
        return 1
    if has_begun and not states:
        say("kv drain: another command has ended it, or the server was started again", file=sys.stderr)
        return 1
    if not states and report.keeps:
        say(
            "kv drain: nothing was moved: no engine has registered since this server started, so it does not know what "
            f"{' and '.join(report.keeps)} may hold. Drain it before it is stopped, or start an engine first",
            file=sys.stderr,
        )
        return 1
    if not states and not args.json:
        say("nothing is held: no engine has registered a format")
    return 0 if all(state.phase == "drained" and not state.refused for state in states) else 1


def _states(report: "Report") -> "Sequence[DrainState]":
    return [cache.drain for cache in report.caches if cache.drain is not None]


# `kv top`: shows a server in a terminal, queried every second over its socket.

_ABOUT_TOP: Final = """\
Show what a kv-server keeps and moves: each format's hit ratio, the pool and the tiers below it with what flows in and
out per second, its sessions and tenants. It asks the server's socket and changes nothing.
"""
_EXAMPLES_OF_TOP: Final = """\
examples:
  kv top                          # the server that kv-server starts by default
  kv top --name llama --every 5
  kv top --once                   # two queries, a second apart, and one plain snapshot
  kv top --json | jq .caches      # what the server reports, one object per line

It says so while the server does not answer, and continues; end it with Ctrl-C. The exit status is 0, or 2 if --once or
--json --once found no server, or an option is wrong.
"""


def register_top(commands: Any) -> None:
    """Add `kv top`; called by the `kv` command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "top",
        help="a cache server, live in a terminal",
        description=_ABOUT_TOP,
        epilog=_EXAMPLES_OF_TOP,
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
