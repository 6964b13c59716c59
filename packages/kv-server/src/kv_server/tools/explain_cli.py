"""`kv explain`: why a prompt was missed, according to a running server."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kv_core.cost import Choice
from kv_core.errors import InputError
from kv_core.hashing import ChainScheme
from kv_core.keys import tenant_tag
from kv_core.sequence import KeySequence
from kv_core.terminal import say
from kv_core.tools.cli import (
    DEFAULT_CHUNK_TOKENS,
    PromptSpace,
    add_prompt_options,
    prompt_items,
    prompt_root,
    prompt_scheme,
    prompt_space,
    prompt_tokens,
)
from kv_observe.chunk_state import ChunkState
from kv_observe.explain import is_held
from kv_tiers.index.life import BEING_WRITTEN

from kv_server import wire
from kv_server.tools.server_cli import add_server_options, ask, socket_of

_ABOUT = """\
Ask a running kv-server what it holds of a prompt, chunk by chunk, and what became of the rest.

The prompt is given as to `kv keys`. --json shows the key space of every answer (`space`), which kv keys needs to print
the keys of an engine's chunks.
"""
_EXAMPLES = """\
examples:
  kv explain prompt.json --name default
  kv explain --text prompt.txt --tokenizer tokenizer.json --salt tenant-7 --also-salt tenant-8
  kv explain prompt.json --chunk-tokens 128 --json

The prompt is also looked for without a salt, and with every --also-salt. Chunks of other salts, chunk sizes or adapters
have other keys, and a key does not reveal what it stands for: only what is given here is found.

The exit status is 0 if all of the prompt is held, 1 if not, or 2 if an input or option is wrong.
"""
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
_CAUSES = {
    "store": "to make room for a prompt",
    "promotion": "to make room for chunks being promoted",
    "watermark": "to keep slots free",
    "quota": "to keep within its tenant's quota",
    "upgrade": "to make other chunks exact",
}

_GROUPS = {
    "window": "the sliding window of group {}",
    "local": "the chunked local attention of group {}",
    "state": "the state of group {}",
}


_Answers = dict[str | None, wire.Explanations]
"""The server's answers for the prompt, by its salt (None: without one), that of the prompt itself first."""


def register(commands: Any) -> None:
    """Add `kv explain`; called by the `kv` command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="why a prompt was missed",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    chunks = len(tokens) // scheme.chunk_tokens
    if not chunks:
        raise InputError(
            f"{len(tokens)} tokens are no whole chunk of {scheme.chunk_tokens}, so nothing of them is stored; give a "
            "longer prompt, or the engine's --chunk-tokens"
        )
    salts = dict.fromkeys([args.salt, None, *args.also_salt])
    answers = {salt: _ask(socket, args, scheme, tokens, salt, max_explained=max_explained) for salt in salts}
    expected = _expected_space(answers[args.salt], is_named=args.model is not None or args.space is not None)
    explained_chunks = min(chunks, max_explained)
    is_all_held = expected is not None and expected.held == chunks
    if args.json:
        say(json.dumps(_described(answers, expected, chunks, scheme.chunk_tokens)))
    else:
        _print(answers, expected, chunks, explained_chunks, scheme.chunk_tokens)
    return 0 if is_all_held else 1


def _other_chunk_tokens(socket: Path, given: int | None) -> list[int]:
    """The numbers of tokens that chunks of the connected engines have, if none of them is what the user gave.

    Raises:
        ConfigError, InputError: no server answers, or not with that.
    """
    answer = ask(socket, wire.Registered(""), wire.Registrations, "does not say which engines are connected")
    stated = {session.facts.get("chunk_tokens", "") for session in answer.sessions}
    sizes = {int(size) for size in stated if size.isascii() and size.isdigit() and len(size) < 10}
    return [] if given in sizes else sorted(sizes)


def _max_explained(space: PromptSpace | None) -> int:
    """How many chunks a server explains at a time.

    Raises:
        InputError: none of so many shards.
    """
    shards = 1 if space is None else space.shards
    if shards > wire.MAX_EXPLAINED_PREFIXES:
        raise InputError(f"--world {shards}: a server explains chunks of at most {wire.MAX_EXPLAINED_PREFIXES} shards")
    return min(wire.MAX_EXPLAINED, wire.MAX_EXPLAINED_KEYS // shards)


def _ask(
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
    if salt is None:
        return "none"
    return f"also {number}" if number else "given"


def _print(answers: _Answers, expected: wire.Explained | None, chunks: int, limit: int, chunk_tokens: int) -> None:
    (_, first), *others = answers.items()
    held = 0 if expected is None else expected.held
    say(f"{held} of {chunks} chunks of {chunk_tokens} tokens are held")
    if expected is None:
        say(_chunks(0, chunks) + f": {_why_unknown(first)}")
        say("chunks that lower tiers hold from before are found with --space, or once an engine has looked them up")
    else:
        _print_states(expected, first)
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


def _print_states(expected: wire.Explained, answer: wire.Explanations) -> None:
    has_gap = False
    for state in expected.states:
        text = f"in {state.where}" if is_held(state) else _why_missing(state, answer)
        if is_held(state) and has_gap:
            text += ", but of no use: an earlier chunk is missing"
        say(f"{_chunks(state.first, state.chunks)}: {text}")
        has_gap = has_gap or not is_held(state)
    if expected.is_cut:
        say("and more, which the server left out")
    if expected.held < expected.prefix:
        say(f"the hit ends at chunk {expected.held}: for a longer one, some layers lack what they need")
    for lacking in expected.lacking:
        name = _GROUPS[lacking.coverage.partition(":")[0]].format(lacking.group)
        for state in lacking.states:
            say(f"{_chunks(state.first, state.chunks)} of {name}: {_why_missing(state, answer)}")
    if expected.choice is not None and expected.held:
        say(_choice_text(expected.choice))
    if (has_gap or expected.lacking) and expected.remote_tiers_skipped:
        say(f"skipped, because querying them takes a network: {', '.join(expected.remote_tiers_skipped)}")
    for name, directory in expected.directories.items():
        say(f"the directory of {name}: {directory.spelled()}")


def _choice_text(choice: Choice) -> str:
    """What a request would get now, with both estimates."""
    load, compute = _seconds_text(choice.load_s), _seconds_text(choice.compute_s)
    parts = []
    if choice.chunks:
        parts.append(f"{choice.chunks} chunks loaded, estimated at {load}: computing them takes {compute}")
    elif choice.load_s != 0.0:
        parts.append(f"computed, estimated at {compute}: loading takes {load}")
    if (skipped := choice.skipped) is not None:
        load, compute = _seconds_text(skipped.load_s), _seconds_text(skipped.compute_s)
        parts.append(
            f"{skipped.chunks} chunks in {skipped.tier} computed, estimated at {compute}: loading them takes {load}"
        )
    return f"if it were requested now: {'; '.join(parts)}"


def _seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "a time not known yet"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _chunks(first: int, chunks: int) -> str:
    return f"chunk {first}" if chunks == 1 else f"chunks {first}–{first + chunks - 1}"


def _why_missing(state: ChunkState, answer: wire.Explanations) -> str:
    ago = "" if state.seconds_ago is None else f" {_span(state.seconds_ago)} ago"
    remote = {tier for explained in answer.explained for tier in explained.remote_tiers_skipped}
    below = ""
    if gone := [tier for tier in state.below if tier not in remote]:
        below += f"; stored in {', '.join(gone)} since, and not there now"
    if not_queried := [tier for tier in state.below if tier in remote]:
        below += f"; stored in {', '.join(not_queried)} since, which was not queried: a request will query it"
    if state.where == BEING_WRITTEN:
        return "being written just now"
    if state.diverges and not state.what:
        return "where this prompt diverges from what was stored: other prompts went on differently here"
    match state.what:
        case "":
            return _why_unknown(answer)
        case "evicted":
            cause = _CAUSES.get(state.cause, state.cause)
            return f"evicted{ago} from {state.tier} by {state.policy} {cause}{below}"
        case "damaged":
            return f"discarded{ago}, as its bytes in {state.tier} were wrong: {state.cause}"
        case "refused":
            return f"found no room{ago}: {state.cause}"
        case "aborted":
            return f"begun{ago} and never finished: its writer gave up or ended"
        case "forgotten":
            return f"forgotten{ago} on request"
        case _:
            return f"stored{ago}, and left a moment ago{below}"


def _why_unknown(answer: wire.Explanations) -> str:
    if not answer.history_keys:
        return "not held; this server remembers nothing (history_keys = 0), so it cannot say more"
    if answer.is_whole:
        return f"not stored here since the server started, {_span(answer.remembered_s)} ago"
    return f"not held, and not among the last {answer.history_keys} keys that the server remembers"


def _span(seconds: float) -> str:
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
