"""`kv drain`: have a server's peers fetch what is worth keeping before its host leaves."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from kv_core.errors import InputError
from kv_core.log import say

from kv_server.tools.which_server import add_server_options, ask, socket_of

if TYPE_CHECKING:
    from kv_server.drain.state import DrainState
    from kv_server.report import Report

_ABOUT: Final = """\
Prepare a kv-server's host to leave: it stores nothing new from now on and offers its peers (a tier of type peers) what
its pool holds and no other host has, most valuable first, and then what only its disk and dram tiers hold. They read it
as they read any hit, into half of their pools at most. Engines of this host still load what it has.

The command waits until that is done. Then stop the server, or end the drain with --end.
"""
_EXAMPLES: Final = """\
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


def register(commands: Any) -> None:
    """Add `kv drain`; called by the `kv` command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "drain",
        help="move what a server holds to its peers before it leaves",
        description=_ABOUT,
        epilog=_EXAMPLES,
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
