"""`kv top`, `kv drain`, `kv freeze`, `kv reload`, `kv explain`: commands to a server, which their options select."""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from kv_core.errors import ConfigError, InputError, TierDown
from kv_core.hashing import ChainScheme
from kv_core.keys import tenant_tag
from kv_core.log import on_one_line, say
from kv_core.plugins import load_plugin
from kv_core.sequence import KeySequence
from kv_core.tools.cli import (
    DEFAULT_CHUNK_TOKENS,
    PromptSpace,
    add_command,
    add_prompt_options,
    prompt_items,
    prompt_root,
    prompt_scheme,
    prompt_space,
    prompt_tags,
    prompt_tokens,
)

from kv_server import wire
from kv_server.connection import ask_server, ask_server_for
from kv_server.explained import chunks_text, explained_text, runs_text, why_unknown
from kv_server.report import DrainState, Report, chunk_tokens_of, nothing_moved

A = TypeVar("A", bound=wire.Answer)
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


def _add(commands: Any, run: Callable[[argparse.Namespace], int], *texts: str) -> argparse.ArgumentParser:
    """A command to a server. texts: its name, description, examples, and its line in `kv --help`."""
    *described, help_line = texts
    parser = add_command(commands, *described, help=help_line)
    parser.set_defaults(run=run)
    add_server_options(parser)
    return parser


def socket_of(options: argparse.Namespace) -> Path:
    """Raises `ConfigError`: the file of settings cannot be read."""
    from kv_server.config import default_socket  # too much to import for every command's --help

    socket, name = options.socket, options.name
    if options.server_config is not None and not socket and name is None:
        from kv_tiers.settings import Layer, read_file, resolve

        layer = Layer(f"file {options.server_config}", read_file(options.server_config))
        server = resolve([layer], {})[0].server
        socket, name = server.socket, server.name
    return Path(socket) if socket else default_socket(name or "default")


def ask(path: Path, request: wire.Request, wanted: type[A], refusal: str, *, timeout_s: float = _ANSWER_S) -> A:
    """The server's answer of this kind. refusal: what it does if it is another, in words.

    Raises:
        ConfigError: there is no server, or it refuses us.
        InputError: its answer is another.
    """
    try:
        answer = ask_server(path, request, timeout_s=timeout_s)
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
    about = "move what a server holds to its peers before it leaves"
    parser = _add(commands, _drain, "drain", _ABOUT_DRAIN, _EXAMPLES_OF_DRAIN, about)
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
        say(f"kv drain: {nothing_moved(report.keeps)}", file=sys.stderr)
        return 1
    if not states and not args.json:
        say("nothing is held: no engine has registered a format")
    return 0 if all(state.phase == "drained" and not state.refused for state in states) else 1


def _states(report: Report) -> Sequence[DrainState]:
    return [cache.drain for cache in report.caches if cache.drain is not None]


# `kv freeze`: have a server leave what it holds as it is.

_ABOUT_FREEZE: Final = """\
Have a kv-server store nothing new and evict nothing, in its pool and the tiers below it: for a benchmark, an incident,
or a set of prompts that is to stay as it is. Engines load what it holds as before and compute the rest. Stores that
have begun are completed; chunks of lower tiers are promoted as long as the pool has free room; clearing works.

It lasts until kv freeze --end, or until the server ends.
"""
_EXAMPLES_OF_FREEZE: Final = """\
examples:
  kv freeze --name llama && vllm bench serve … ; kv freeze --end --name llama

The exit status is 0, or 2 if no server was found.
"""


def register_freeze(commands: Any) -> None:
    """Add `kv freeze`; called by the `kv` command."""
    about = "have a server store and evict nothing for a while"
    parser = _add(commands, _freeze, "freeze", _ABOUT_FREEZE, _EXAMPLES_OF_FREEZE, about)
    parser.add_argument("--end", action="store_true", help="store and evict as before")


def _freeze(args: argparse.Namespace) -> int:
    ask(socket_of(args), wire.Freeze(not args.end), wire.Stated, "cannot be frozen")
    say("it stores and evicts as before" if args.end else "it stores nothing new and evicts nothing")
    return 0


# `kv reload`: have a server read its settings file again.

_ABOUT_RELOAD: Final = """\
Have a kv-server read its settings file again, and print what has changed. Tenants and quotas change at once, in all
caches or in none; engines notice nothing. Other settings stay as they are, and the output says what each needs: most,
such as tiers, need another process. With --take-over the server starts one with the same command line, which takes over
within milliseconds and has all settings, and the packages that are installed now. SIGHUP reads the file again too, and
writes the result to the log.
"""
_EXAMPLES_OF_RELOAD: Final = """\
examples:
  kv config kv.yaml && kv reload --config kv.yaml    # the file names the server
  kv reload --name llama --take-over                 # for tiers, and all but the pool's name

The exit status is 0 if all of the file is in force, 1 if some of it needs more, and 2 if the file is wrong, in which
case nothing has changed, or no server was found.
"""
_RELOAD_S: Final = 60.0
_TAKE_OVER_S: Final = 660.0
_TAKEN_OVER_S: Final = 30.0


def register_reload(commands: Any) -> None:
    """Add `kv reload`; called by the `kv` command."""
    about = "have a server read its settings file again"
    parser = _add(commands, _reload, "reload", _ABOUT_RELOAD, _EXAMPLES_OF_RELOAD, about)
    parser.add_argument(
        "--take-over", action="store_true", help="have another process take over, with all of the settings"
    )
    parser.add_argument("--json", action="store_true", help="the whole answer, as one JSON object")


def _reload(args: argparse.Namespace) -> int:
    path = socket_of(args)
    report = ask(path, wire.Reload(False), wire.Reloaded, "reads no settings again", timeout_s=_RELOAD_S).report
    failure = f"the settings of the server at {path} stay as they are: {report.why}" if report.why else ""
    if args.take_over and not failure:
        if why := _have_taken_over(path):
            failure = f"no other process has taken over from the server at {path}: {why}"
        else:
            unchanged = {setting: needed for setting, needed in report.refused.items() if needed == "restart"}
            settled = [f"{setting} is as in the file" for setting in report.refused if setting not in unchanged]
            changed = [*report.changed, *settled, "another process has taken over"]
            report = dataclasses.replace(report, changed=changed, refused=unchanged)
    if args.json:
        say(json.dumps(dataclasses.asdict(report)))
    else:
        for text in report.changed or ["nothing has changed"]:
            say(on_one_line(text))
        for refusal in report.refusals():
            say(f"kv reload: {refusal}", file=sys.stderr)
    if failure:
        raise ConfigError(failure)
    return 1 if report.refused else 0


def _have_taken_over(path: Path) -> str:
    """Have another process take over from this server; returns why none does. Empty: it serves."""
    pid = _report_of(path).pid
    try:
        answer = ask_server(path, wire.Reload(True), timeout_s=_TAKE_OVER_S)
    except TierDown:  # the server passes on no client that waits for this
        until_s = time.monotonic() + _TAKEN_OVER_S
        while time.monotonic() < until_s:
            with suppress(TierDown):
                if _report_of(path).pid != pid:
                    return ""
            time.sleep(_POLL_S)
        return "it is not known what has become of it"
    if isinstance(answer, wire.Reloaded):
        return answer.report.why
    return answer.text if isinstance(answer, wire.Failed) else "it does not answer"


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
    parser = _add(commands, _top, "top", _ABOUT_TOP, _EXAMPLES_OF_TOP, "a cache server, live in a terminal")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="how often to ask (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one snapshot and exit, as where none is drawn")
    parser.add_argument("--json", action="store_true", help="what the server reports, one object per line")


def _top(args: argparse.Namespace) -> int:
    if not 0.05 <= args.every <= 3600:
        raise InputError(f"--every {args.every:g}: write 0.05 to 3600 seconds")
    path = socket_of(args)
    try:
        if args.json:
            return _print_json(path, args.every, once=args.once)
        if args.once or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            return _print_once(path, args.every)
        return _watch(path, args.every)
    except TierDown as why:
        raise ConfigError(f"{why}; start one with kv-server, or give --name or --socket") from None
    except KeyboardInterrupt:  # how it is ended
        return 0


def _report_of(path: Path) -> Report:
    """Raises `TierDown`: the server does not answer. Raises `ConfigError`: it refuses us."""
    return ask_server_for(path, wire.Status(), wire.Stated).report


def _print_json(path: Path, every_s: float, *, once: bool) -> int:
    """Poll the server. While it is away, one line on standard error for each new reason."""
    last_reason = ""
    while True:
        try:
            say(json.dumps(msgspec.json.decode(msgspec.json.encode(_report_of(path)))), flush=True)
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
    watch.take(_report_of(path))
    time.sleep(every_s)
    plain_console().print(draw(watch.take(_report_of(path)), str(path), ""))
    return 0


def _watch(path: Path, every_s: float) -> int:
    from kv_server.tools.top import Picture, Watch, draw, on_screen

    watch = Watch()
    picture: Picture | None = None
    with on_screen() as show:
        while True:
            away = ""
            try:
                picture = watch.take(_report_of(path))
            except (TierDown, ConfigError) as why:
                away = str(why)
            show(draw(picture, str(path), away))
            time.sleep(every_s)


# `kv explain`: why a prompt was missed, according to a running server.

_ABOUT_EXPLAIN = """\
Ask a running kv-server what it holds of a prompt, chunk by chunk, and what became of the rest.

The prompt is given as to `kv keys`. --json shows the key space of every answer (`space`), which kv keys needs to print
the keys of an engine's chunks.
"""
_EXAMPLES_OF_EXPLAIN = """\
examples:
  kv explain prompt.json --name default
  kv explain --text prompt.txt --tokenizer tokenizer.json --salt tenant-7 --also-salt tenant-8
  kv explain prompt.json --chunk-tokens 128 --json
  kv explain prompt.json --plan request.json

With --plan it explains what a request reuses by blending (kv-blend): request.json has its fields, as
kv_blend.request_fields makes them. The tenant's salt is in there.

The prompt is also looked for without a salt, and with every --also-salt. Chunks of other salts, chunk sizes or adapters
have other keys, and a key does not reveal what it stands for: only what is given here is found.

The exit status is 0 if all of the prompt is held, 1 if not, or 2 if an input or option is wrong.
"""


_Answers = dict[str | None, wire.Explanations]
"""The server's answers for the prompt, by its salt (None: without one), that of the prompt itself first."""


def register_explain(commands: Any) -> None:
    """Add `kv explain`; called by the `kv` command."""
    parser = add_command(commands, "explain", _ABOUT_EXPLAIN, _EXAMPLES_OF_EXPLAIN, help="why a prompt was missed")
    parser.set_defaults(run=_explain)
    add_prompt_options(
        parser,
        without_space="all models and formats of the server are searched",
        chunk_tokens=f"those of the server's engines, else {DEFAULT_CHUNK_TOKENS}",
    )
    server = parser.add_argument_group("server")
    add_server_options(server)
    parser.add_argument(
        "--also-salt",
        action="append",
        default=[],
        metavar="TEXT",
        help="look for the prompt with this salt too; repeatable",
    )
    parser.add_argument("--plan", metavar="FILE", help="fields of a request that blends; - for standard input")
    parser.add_argument("--json", action="store_true", help="the whole answer, as one JSON object")


def _explain(args: argparse.Namespace) -> int:
    scheme = prompt_scheme(args)
    max_explained = _max_explained(prompt_space(args, scheme))  # refuse wrong options before any tokens are read
    socket = socket_of(args)
    if others := _other_chunk_tokens(socket, args.chunk_tokens):
        listed = " and ".join(map(str, others))
        if args.chunk_tokens is None and len(others) == 1:
            args.chunk_tokens = others[0]
            scheme = prompt_scheme(args)
        else:
            say(f"the engines of this server have chunks of {listed} tokens; give --chunk-tokens", file=sys.stderr)
    tokens = [token for part in prompt_tokens(args) for token in part]
    if args.plan is not None:
        return _explain_plan(socket, args, scheme, tokens, max_explained)
    chunks = len(tokens) // scheme.chunk_tokens
    if not chunks:
        raise InputError(
            f"{len(tokens)} tokens are no whole chunk of {scheme.chunk_tokens}, so nothing of them is stored; give a "
            "longer prompt, or the engine's --chunk-tokens"
        )
    salts = dict.fromkeys([args.salt, None, *args.also_salt])
    answers = {salt: _explanations(socket, args, scheme, tokens, salt, max_explained=max_explained) for salt in salts}
    expected = _expected_space(answers[args.salt], is_named=args.model is not None or args.space is not None)
    explained_chunks = min(chunks, max_explained)
    is_all_held = expected is not None and expected.held == chunks
    if args.json:
        say(json.dumps(_described(answers, expected, chunks, scheme.chunk_tokens)))
    else:
        _print(answers, expected, chunks, explained_chunks, scheme.chunk_tokens)
    return 0 if is_all_held else 1


def _explain_plan(
    socket: Path, args: argparse.Namespace, scheme: ChainScheme, tokens: Sequence[int], max_explained: int
) -> int:
    """What a request reuses by blending, segment by segment."""
    if args.salt is not None or args.also_salt or args.lora is not None or args.item:
        raise InputError(
            "with --plan the tenant's salt is the plan's, and adapters and items are not blended: leave out "
            "--salt, --also-salt, --lora and --item"
        )
    try:
        request = json.loads(sys.stdin.read() if args.plan == "-" else Path(args.plan).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"--plan {args.plan} is not JSON: {error}") from None
    read = load_plugin("kv_server.plans", "kind of plan", "kv_blend")
    tenant, segments = read(request, tokens, scheme, prompt_tags(args))
    described, is_all_held = [], True
    for segment in segments:
        place, digests = segment.place, segment.digests[:max_explained]
        answer = _ask_about(socket, args, scheme, digests, tenant or None) if digests else None
        is_named = args.model is not None or args.space is not None
        expected = None if answer is None else _expected_space(answer, is_named=is_named)
        held = segment.leading(0 if expected is None else expected.held, scheme.chunk_tokens).place
        held_tokens, segment_tokens = held.end - held.first, place.end - place.first
        is_all_held = is_all_held and held_tokens == segment_tokens
        states = [] if expected is None else [dataclasses.asdict(state) for state in expected.states]
        described.append({"first": place.first, "end": place.end, "held_tokens": held_tokens, "states": states})
        if args.json:
            continue
        say(f"tokens {place.first}–{place.end - 1}: {held_tokens} of {segment_tokens} are held")
        if answer is None:
            say("  in no whole chunk of the conversation, so never stored")
        elif expected is None:
            say(f"  {chunks_text(0, len(digests))}: {why_unknown(answer)}")
        else:
            say(*(f"  {text}" for text in runs_text(expected, answer)), sep="\n")
    if args.json:
        say(json.dumps({"chunk_tokens": scheme.chunk_tokens, "segments": described}))
    return 0 if is_all_held else 1


def _other_chunk_tokens(socket: Path, given: int | None) -> list[int]:
    """The numbers of tokens that chunks of the connected engines have, if none of them is what the user gave. Raises
    `ConfigError` and `InputError`: no server answers, or not with that."""
    answer = ask(socket, wire.Registered(""), wire.Registrations, "does not say which engines are connected")
    sizes = chunk_tokens_of(answer.sessions)
    return [] if given in sizes else sizes


def _max_explained(space: PromptSpace | None) -> int:
    """How many chunks a server explains at a time. Raises `InputError`: none of so many shards."""
    shards = 1 if space is None else space.shards
    if shards > wire.MAX_EXPLAINED_PREFIXES:
        raise InputError(f"--world {shards}: a server explains chunks of at most {wire.MAX_EXPLAINED_PREFIXES} shards")
    return min(wire.MAX_EXPLAINED, wire.MAX_EXPLAINED_KEYS // shards)


def _explanations(
    socket: Path,
    args: argparse.Namespace,
    scheme: ChainScheme,
    tokens: Sequence[int],
    salt: str | None,
    *,
    max_explained: int,
) -> wire.Explanations:
    root = prompt_root(args, scheme, salt)
    digests = KeySequence(scheme, root=root, items=prompt_items(args)).append(tokens)[:max_explained]
    return _ask_about(socket, args, scheme, digests, salt)


def _ask_about(
    socket: Path, args: argparse.Namespace, scheme: ChainScheme, digests: Sequence[bytes], salt: str | None
) -> wire.Explanations:
    """What the server says of the chunks with these digests, which follow each other. salt: their tenant's."""
    space = prompt_space(args, scheme)
    key_prefixes = []
    if space is not None:
        keys = space.keys(digests[0], tenant_tag(salt))
        key_prefixes = [bytes(key[: len(key) - len(key.digest)]) for key in keys]
    nbytes = len(digests[0])
    request = wire.Explain(16 if nbytes == 16 else 32, b"".join(digests), key_prefixes)
    return ask(socket, request, wire.Explanations, "does not explain")


def _expected_space(answer: wire.Explanations, *, is_named: bool) -> wire.Explained | None:
    """Where the prompt is expected: in the key space that was named, or else where most of it is."""
    candidates = [explained for explained in answer.explained if explained.was_asked or not is_named]
    return max(candidates, key=lambda explained: explained.held, default=None)


def _described(answers: _Answers, expected: wire.Explained | None, chunks: int, chunk_tokens: int) -> dict[str, object]:
    first, *_ = answers.values()
    return {
        "chunks": chunks,
        "chunk_tokens": chunk_tokens,
        "chunks_held": 0 if expected is None else expected.held,
        "history_keys": first.history_keys,
        "remembered_s": first.remembered_s,
        "is_whole": first.is_whole,
        # A salt may be a secret, and JSON is often kept in a file: salts are named by their place on the command line.
        "salts": [
            {
                "salt": _salt_name(number, salt),
                "explained": [dataclasses.asdict(explained) for explained in answer.explained],
            }
            for number, (salt, answer) in enumerate(answers.items())
        ],
    }


def _salt_name(number: int, salt: str | None) -> str:
    return "none" if salt is None else f"also {number}" if number else "given"


def _print(answers: _Answers, expected: wire.Explained | None, chunks: int, limit: int, chunk_tokens: int) -> None:
    (_, first), *others = answers.items()
    held = 0 if expected is None else expected.held
    say(f"{held} of {chunks} chunks of {chunk_tokens} tokens are held")
    if expected is None:
        say(f"{chunks_text(0, chunks)}: {why_unknown(first)}")
        say("chunks that lower tiers hold from before are found with --space, or once an engine has looked them up")
    else:
        say(*explained_text(expected, first), sep="\n")
    if limit < chunks:
        say(f"chunks {limit}–{chunks - 1} were left out: a server explains {limit} at a time")
    for other in first.explained:
        if other is not expected and other.held:
            model = f"key space {other.space[:12]}" + (f" ({', '.join(other.engines)})" if other.engines else "")
            say(f"the first {other.held} chunks are held under another model or format: {model}")
    for salt, answer in others:
        best = max((explained.held for explained in answer.explained), default=0)
        if best:
            where = "without a salt" if salt is None else f"under the salt {salt!r}"
            say(f"the first {best} chunks are held {where}")
