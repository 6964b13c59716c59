"""`kv cluster`: an operator's verbs over all servers of a directory."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kv_core.coverage import Coverage
from kv_core.errors import InputError
from kv_core.keys import TENANT_BYTES, ChunkKey, keys_in, tenant_tag
from kv_core.log import say
from kv_core.sequence import KeySequence
from kv_core.tools.cli import (
    add_command,
    add_prompt_options,
    prompt_items,
    prompt_root,
    prompt_scheme,
    prompt_space,
    prompt_tokens,
)

if TYPE_CHECKING:  # too much to import for every command's --help
    from kv_cluster.verbs import Fleet

_ABOUT: Final = """\
Ask all servers that the settings of one of them lead to (a tier of type peers), or have them do something. Each
server's outcome is a line. A server that does not answer within 5 seconds is left out, and said to be.

The servers' HTTP has to be at the host of their address for peers, at one port everywhere, with one token. All
but health, unpin and drain need the endpoint of kv-cluster there: http: {endpoints: [cluster]}.
"""
_EXAMPLES: Final = """\
examples:
  kv cluster health --config kv.yaml
  kv cluster where --config kv.yaml prompt.json --space HEX --salt tenant-7
  kv cluster pin system --config kv.yaml --keys keys.json
  kv cluster replicate --config kv.yaml --keys keys.json --copies 2
  kv cluster move --config kv.yaml --keys keys.json --from kv-a.internal --to kv-b.internal
  kv cluster clear --config kv.yaml --tenant acme
  kv cluster drain kv-a.internal --config kv.yaml --timeout 300

Whatever interrupts a verb, run it again: it does what is left. The exit status is 0 if all servers did it, 1 if one did
not, or 2 if an option is wrong or the directory cannot be read.
"""
_MAX_FILE_CHARS: Final = 8 << 20
_MAX_KEYS: Final = 1 << 15


def register(commands: Any) -> None:
    """Add `kv cluster`; called by the `kv` command."""
    parser = add_command(commands, "cluster", _ABOUT, _EXAMPLES, help="see and operate all servers of a directory")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add(name: str, run: Callable[..., Any], help: str, *positional: str, prompt: bool = False) -> Any:
        verb = verbs.add_parser(name, help=help, description=help)
        verb.set_defaults(run=_run, verb=name, request=name, read=run)
        for word in positional:
            verb.add_argument(word.lower(), metavar=word)
        if prompt:
            add_prompt_options(verb, without_space="give --keys")
            verb.add_argument(
                "--keys", metavar="FILE", help="the keys instead of a prompt: hex, or as kv keys prints JSON"
            )
            verb.add_argument("--coverages", default="all", metavar="LIST", help="by group, with commas (default: all)")
        _add_options(verb, chooses=name in ("health", "where", "pin", "unpin", "clear"))
        return verb

    add("health", _of_servers, "which servers answer, and how they are")
    add("where", _where, "which server holds how much of a prefix, and in which tier", prompt=True)
    add("pin", _pin, "keep a prefix in the pools of the servers that hold it", "NAME", prompt=True)
    unpin = add("unpin", _unpin, "end a pin", "NAME")
    unpin.add_argument("--salt", metavar="TEXT", help="of the tenant whose prefix was pinned")
    replicate = add("replicate", _replicate, "have more servers hold a prefix", prompt=True)
    replicate.add_argument("--to", metavar="SERVER", help="these, with commas; or:")
    replicate.add_argument(
        "--copies", type=int, metavar="N", help="so many in all, those that hold it and the emptiest"
    )
    move = add("move", _move, "have another server hold a prefix, and then one drop it", prompt=True)
    move.add_argument("--from", dest="source", required=True, metavar="SERVER")
    move.add_argument("--to", required=True, metavar="SERVER")
    clear = add("clear", _clear, "remove a prefix, a tenant's chunks, or all", prompt=True)
    clear.add_argument("--tenant", metavar="NAME", help="as in the servers' settings, or its tag")
    clear.add_argument("--everything", action="store_true")
    drain = add("drain", _drain, "move what a server holds to others before it leaves", "SERVER")
    drain.add_argument("--max-bytes", metavar="BYTES", help="move at most this much of each format, such as 20GiB")
    drain.add_argument("--end", action="store_true", help="stop offering, and store as before")


def _add_options(verb: Any, *, chooses: bool) -> None:
    """chooses: it is for all servers, or some."""
    fleet = verb.add_argument_group("servers")
    fleet.add_argument("--config", metavar="FILE", dest="server_config", help="the settings of one of the servers")
    if chooses:
        fleet.add_argument(
            "--servers", metavar="LIST", help="only these, with commas: names or hosts as health shows them"
        )
    fleet.add_argument(
        "--seed", metavar="URL", help="HTTP of a server that says which formats there are (default: this host's)"
    )
    fleet.add_argument(
        "--url",
        metavar="URL",
        help="of every server's HTTP: https://{host}:9443 (default: http, and the port of http.listen)",
    )
    fleet.add_argument("--token-file", metavar="FILE", help="the servers' token (default: http.token_file)")
    fleet.add_argument(
        "--unprotected",
        action="store_true",
        help="send the token unencrypted to other hosts, and where unsigned entries of the directory lead",
    )
    fleet.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="of the verb (default: 60)")
    fleet.add_argument("--json", action="store_true", help="the outcomes as one JSON object")


def _run(args: argparse.Namespace) -> int:
    from kv_tiers.settings import Layer, read_file, resolve

    from kv_cluster.client import NotDone
    from kv_cluster.requests import REQUESTS

    if not 0.1 <= args.timeout <= 86400:
        raise InputError(f"--timeout {args.timeout:g}: write 0.1 to 86400 seconds")
    file = args.server_config or os.environ.get("KV_CONFIG_FILE")
    args.settings, _ = resolve([Layer(f"file {file}", read_file(file))] if file else [], os.environ)
    parameters = args.read(args)
    try:
        outcomes = REQUESTS[args.request](**parameters).do(_fleet(args))
    except NotDone as why:
        say(
            json.dumps({"verb": args.verb, "done": False, "why": str(why), "servers": []})
            if args.json
            else f"kv cluster: {why}",
            file=sys.stdout if args.json else sys.stderr,
        )
        return 1
    done = bool(outcomes) and all(outcome.done for outcome in outcomes)
    if args.json:
        servers = [{"server": one.server, "done": one.done, "text": one.text, **one.facts} for one in outcomes]
        say(json.dumps({"verb": args.verb, "done": done, "servers": servers}))
    else:
        for one in outcomes:
            say(f"{one.server}: {'' if one.done else 'NOT DONE: '}{one.text}")
    if not outcomes:
        say("kv cluster: there is no server: none has written into the directory lately", file=sys.stderr)
    return 0 if done else 1


def _fleet(args: argparse.Namespace) -> "Fleet":
    from kv_server.http.start import check_token, read_token

    from kv_cluster.verbs import open_fleet

    token, token_file = "", args.token_file or args.settings.http.token_file
    if token_file and Path(token_file).exists():
        check_token(Path(token_file))
        token = read_token(Path(token_file))
    elif args.token_file:
        raise InputError(f"--token-file {args.token_file} does not exist")
    fleet = open_fleet(
        args.settings.tiers,
        args.settings.http.listen,
        token,
        peers_listen=args.settings.peers.listen,
        url=args.url or "",
        seed=args.seed or "",
        is_unprotected=args.unprotected,
        timeout_s=args.timeout,
    )
    if fleet.finder.invalid:
        say(f"kv cluster: {fleet.finder.invalid} entries of the directory are invalid, and not used", file=sys.stderr)
    return fleet


# The parameters of each verb's request.


def _of_servers(args: argparse.Namespace) -> dict[str, Any]:
    return {"servers": _names(args.servers)}


def _where(args: argparse.Namespace) -> dict[str, Any]:
    return {**_of_servers(args), **_prefix(args)}


def _pin(args: argparse.Namespace) -> dict[str, Any]:
    return {"name": _name(args.name), **_where(args)}


def _unpin(args: argparse.Namespace) -> dict[str, Any]:
    return {"name": _name(args.name), "tenant": tenant_tag(args.salt).hex(), **_of_servers(args)}


def _replicate(args: argparse.Namespace) -> dict[str, Any]:
    if (args.to is None) == (args.copies is None):
        raise InputError("give either --to SERVER or --copies N")
    if args.copies is not None and args.copies < 1:
        raise InputError(f"--copies {args.copies}: write 1 or more")
    return {"to": _names(args.to), "copies": args.copies or 0, **_prefix(args)}


def _move(args: argparse.Namespace) -> dict[str, Any]:
    return {"source": args.source, "target": args.to, **_prefix(args)}


def _clear(args: argparse.Namespace) -> dict[str, Any]:
    has_prompt = any(given is not None for given in (args.file, args.text, args.keys))
    if (args.tenant is not None) + args.everything + has_prompt != 1:
        raise InputError("give one of --tenant NAME, --everything, or a prefix (FILE, --text or --keys)")
    if has_prompt:
        args.request = "clear-prefix"
        return _where(args)
    return {"everything": args.everything, "tenant": None if args.everything else _tag(args), **_of_servers(args)}


def _tag(args: argparse.Namespace) -> str:
    """Of the tenant that has this name in the settings, or this tag."""
    from kv_tiers.tenants import read_tenants

    settings = args.settings
    named = read_tenants(settings.tenants, capacity_bytes=settings.host.capacity_bytes)
    tags = {tenant.name: tenant.tag.hex() for tenant in named}
    tag: str = tags.get(args.tenant, args.tenant)
    if not re.fullmatch(rf"[0-9a-f]{{{2 * TENANT_BYTES}}}", tag):
        raise InputError(
            f"--tenant {tag[:100]!r}: the settings list {', '.join(sorted(tags)) or 'none'}; or write a tag, "
            f"{2 * TENANT_BYTES} hex digits"
        )
    return tag


def _drain(args: argparse.Namespace) -> dict[str, Any]:
    from kv_tiers.options import byte_count

    max_bytes = None if args.max_bytes is None else byte_count(args.max_bytes, "--max-bytes")
    return {"server": args.server, "max_bytes": max_bytes, "end": args.end}


def _names(text: str | None) -> list[str]:
    return [] if text is None else text.split(",")


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise InputError(f"NAME {text[:80]!r}: write up to 64 letters, digits, dots, dashes and underscores")
    return text


def _prefix(args: argparse.Namespace) -> dict[str, Any]:
    """What a request about a prefix says of it."""
    coverages = tuple(args.coverages.split(","))
    for coverage in coverages:
        Coverage.parse(coverage)
    scheme = prompt_scheme(args)
    keys = _prompt_keys(args, len(coverages)) if args.keys is None else _read_keys(args.keys)
    if not 0 < len(keys) <= _MAX_KEYS:
        raise InputError(f"{len(keys)} keys: give those of 1 to {_MAX_KEYS}, of whole chunks")
    shape = {"chunk_tokens": scheme.chunk_tokens, "coverages": coverages, "shards": args.world}
    return {"keys": [key.hex() for key in keys], **shape}


def _prompt_keys(args: argparse.Namespace, groups: int) -> list[ChunkKey]:
    scheme = prompt_scheme(args)
    space = prompt_space(args, scheme)
    if space is None:
        raise InputError("give --space, as kv explain --json shows it (or --model …), or the keys by --keys")
    sequence = KeySequence(scheme, root=prompt_root(args, scheme, args.salt), items=prompt_items(args))
    digests = [digest for tokens in prompt_tokens(args) for digest in sequence.append(tokens)]
    shards, tenant = range(space.shards), tenant_tag(args.salt)
    return keys_in(space.fingerprint, digests, groups=range(groups), shards=shards, tenant=tenant)


def _read_keys(path: str) -> list[ChunkKey]:
    """Hex keys in a file of words, or as `kv keys --output json` prints them."""
    if path == "-":
        text = sys.stdin.read(_MAX_FILE_CHARS + 1)
    else:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_MAX_FILE_CHARS + 1)
    if len(text) > _MAX_FILE_CHARS:
        raise InputError(f"--keys {path}: more than {_MAX_FILE_CHARS} characters")
    words: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("{"):
            try:
                words += [str(one["key"]) for one in json.loads(line)["keys"]]
            except (ValueError, RecursionError, KeyError, TypeError):
                raise InputError(
                    f"--keys {path}: a line is not what kv keys --output json prints with a key space"
                ) from None
        else:
            words += re.findall(r'[^\s,"\[\]]+', line)
    return [_key(word, path) for word in words]


def _key(word: str, path: str) -> ChunkKey:
    try:
        return ChunkKey.from_hex(word)
    except InputError as error:
        raise InputError(f"--keys {path}: {error}") from None
