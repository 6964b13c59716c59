"""The `kv` command. `kv keys` is here; other packages add commands through the entry-point group `kv_core.commands`.

An entry point loads a function `register(subparsers)` that adds one parser and sets its default `run` to a function
from the parsed arguments to an exit status. A user's mistake ends in one line on stderr and status 2.
"""

import argparse
import difflib
import errno
import importlib.metadata
import io
import json
import re
import stat
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

from kv_core.errors import ConfigError, InputError
from kv_core.hashing import Algorithm, ChainScheme, Item
from kv_core.keys import ALL_LAYERS, NO_TENANT, SPACE_ID_BYTES, ChunkKey, KeySpace, keys_in, tenant_tag
from kv_core.log import say
from kv_core.sequence import KeySequence
from kv_core.tokens import pack_tokens
from kv_core.tools import doctor

COMMANDS = "kv_core.commands"
DEFAULT_CHUNK_TOKENS = ChainScheme().chunk_tokens
_READ_CHARS = 1 << 20
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PLAIN = re.compile(r"[0-9\s,]*", re.ASCII)
_BETWEEN = re.compile(r"\s*,\s*|\s+", re.ASCII)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status: 0, or 2 where the user must change something."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="kv",
        description="Inspect a tiered KV cache.",
        epilog="from kv-server: config, drain, explain, freeze, peers, reload, top; kv-cluster: cluster; "
        "kv-cuda: bench; kv-codecs: judge; kv-observe: sim",
    )
    parser.add_argument("--version", action="version", version=f"kv {importlib.metadata.version('kv-core')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _register_keys(commands)
    doctor.register(commands)
    if words[:1] != ["keys"]:  # other packages' commands may import much, and `kv keys` need not wait for that
        _register_others(commands)
    try:
        if words and not words[0].startswith("-") and words[0] not in commands.choices:
            return _report_error(_unknown(words[0], commands.choices))
        args = parser.parse_args(words)
        run: Callable[[argparse.Namespace], int] = args.run
        status = run(args)
        sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    except (InputError, ConfigError) as error:
        return _report_error(str(error))
    except BrokenPipeError:
        sys.stdout = io.StringIO()  # the reader is gone; keep the interpreter from flushing into it at exit
        return 0
    except OSError as error:
        if error.filename is None and error.errno in _NO_ROOM:
            sys.stdout = io.StringIO()  # as above
            return _report_error(f"the output cannot be written: {error.strerror}")
        return _report_error(f"{error.filename or 'input'}: {error.strerror or error}")
    except UnicodeDecodeError:
        return _report_error("the input is not UTF-8 text; give token ids as numbers")
    except KeyboardInterrupt:
        return 130
    return status


def _unknown(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word[:100], list(known), n=1)
    return f"there is no command {word[:100]!r}; " + (f"did you mean {close[0]}?" if close else "see kv --help")


def _report_error(text: str) -> int:
    say(f"kv: error: {text}", file=sys.stderr)
    return 2


def _register_others(commands: Any) -> None:
    for entry in sorted(importlib.metadata.entry_points(group=COMMANDS), key=lambda entry: entry.name):
        try:
            entry.load()(commands)
        except Exception as error:  # noqa: BLE001  # another package's fault must not break `kv`
            say(f"kv: the command {entry.name!r} of {entry.value} cannot be used: {error}", file=sys.stderr)


_KEYS_ABOUT = """\
Print the keys of a prompt's chunks: what a cache is queried for.

Tokens are read from FILE (or - for standard input) as whole numbers with spaces, newlines or commas between them, or as
a JSON list; or they are made from --text with a --tokenizer.
"""
_KEYS_EXAMPLES = """\
examples:
  seq 0 999 | kv keys -
  kv keys prompt.json --model meta-llama/Llama-3.1-8B --dtype bfloat16 --world 2 --output json
  kv keys --text prompt.txt --tokenizer tokenizer.json --salt tenant-7

The exit status is 0, or 2 if an input or option is wrong; the text on standard error says what to do.
"""


def add_command(commands: Any, name: str, about: str, examples: str, *, help: str) -> argparse.ArgumentParser:
    """A parser for a command of `kv`, whose texts are shown as they are written. help: its line in `kv --help`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _register_keys(commands: Any) -> None:
    parser = add_command(commands, "keys", _KEYS_ABOUT, _KEYS_EXAMPLES, help="tokens to chunk keys")
    parser.set_defaults(run=_keys)
    add_prompt_options(parser, without_space="digests are printed instead of keys")
    parser.add_argument("--partial", action="store_true", help="give the last partial chunk a key as well")
    parser.add_argument("--output", choices=("table", "json"), default="table", help="json: one object per line")


def add_prompt_options(
    parser: argparse.ArgumentParser, *, without_space: str, chunk_tokens: str = str(DEFAULT_CHUNK_TOKENS)
) -> None:
    """Add the options that define a prompt and the keys of its chunks, for any command about a prompt. Read them with
    `prompt_scheme`, `prompt_space`, `prompt_root`, `prompt_items` and `prompt_tokens`.

    without_space: what happens if the user gives no key space.
    chunk_tokens: how many tokens a chunk has if the user does not say, in words.
    """
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument("file", nargs="?", metavar="FILE", help="token ids; - for standard input")
    tokens.add_argument("--text", metavar="FILE", help="a text to tokenize instead; - for standard input")
    tokens.add_argument("--tokenizer", metavar="FILE", help="the tokenizer.json for --text")
    tokens.add_argument("--no-special-tokens", action="store_true", help="do not let the tokenizer add its BOS or EOS")
    chain = parser.add_argument_group("chain")
    chain.add_argument("--chunk-tokens", type=int, metavar="N", help=f"tokens per chunk (default: {chunk_tokens})")
    chain.add_argument("--algorithm", choices=get_args(Algorithm), default="sha256", help="(default: sha256)")
    chain.add_argument(
        "--secret-file", metavar="FILE", help="the secret for blake2b: 16 to 64 bytes, not counting a trailing newline"
    )
    chain.add_argument("--salt", metavar="TEXT", help="salt that separates this tenant's prompts")
    chain.add_argument("--lora", metavar="NAME", help="the adapter's identity")
    chain.add_argument(
        "--tag", action="append", default=[], metavar="K=V", help="anything else that separates prompts; repeatable"
    )
    chain.add_argument(
        "--item",
        action="append",
        default=[],
        metavar="HASH:FIRST:TOKENS",
        help="an image or the like that fills TOKENS tokens from FIRST on; repeatable",
    )
    space = parser.add_argument_group(
        "key space",
        f"Without --space and --model, {without_space}.\nThe key space of an engine also contains the model's "
        "configuration and options of the engine, so name it by\n--space, which `kv explain --json` shows.",
    )
    space.add_argument("--space", metavar="HEX", help="its fingerprint, 32 hex digits; needs only --world and --group")
    space.add_argument("--model", metavar="NAME", help="the model's name")
    space.add_argument("--revision", default="", metavar="TEXT", help="of the model, or a fingerprint of its weights")
    space.add_argument("--dtype", default="", metavar="NAME", help="of the stored KV, such as bfloat16")
    space.add_argument("--format-fingerprint", default="", metavar="HEX", help="of the chunk format")
    space.add_argument("--world", type=int, default=1, metavar="N", help="shards of every chunk; one key each")
    space.add_argument("--group", type=int, default=0, metavar="N", help="the group of layers (default: 0)")


def prompt_scheme(args: argparse.Namespace) -> ChainScheme:
    """How the prompt's tokens become digests."""
    chunk_tokens = DEFAULT_CHUNK_TOKENS if args.chunk_tokens is None else args.chunk_tokens
    return ChainScheme(args.algorithm, chunk_tokens, _secret(args.secret_file, args.algorithm))


@dataclass(frozen=True, slots=True)
class PromptSpace:
    """The key space and group of the options.

    fingerprint: the fingerprint of the key space.
    shards: the number of shards of each chunk.
    described: everything that the fingerprint represents; None if the user gave the fingerprint alone.
    """

    fingerprint: bytes
    shards: int
    group: int
    described: KeySpace | None

    def keys(self, digest: bytes, tenant: bytes) -> list[ChunkKey]:
        """A key for each shard."""
        shards = range(self.shards)
        return keys_in(self.fingerprint, [digest], groups=(self.group,), shards=shards, tenant=tenant)


def prompt_space(args: argparse.Namespace, scheme: ChainScheme) -> PromptSpace | None:
    """The key space; None if the options name none.

    Raises:
        InputError: a part of a space without the rest, a part of one that is given as a whole, or an invalid number.
    """
    parts = bool(args.revision or args.dtype or args.format_fingerprint)
    if args.space is not None:
        if args.model is not None or parts:
            raise InputError("--space stands for --model, --revision, --dtype and --format-fingerprint: leave them out")
        if not re.fullmatch(rf"[0-9a-f]{{{2 * SPACE_ID_BYTES}}}", args.space, re.ASCII):
            raise InputError(f"--space {args.space[:80]}: write {2 * SPACE_ID_BYTES} lower-case hex digits")
        if not 1 <= args.world <= ALL_LAYERS:
            raise InputError(f"--world {args.world}: write the number of shards, 1 to {ALL_LAYERS}")
        space = PromptSpace(bytes.fromhex(args.space), args.world, args.group, None)
    elif args.model is not None:
        key_space = KeySpace(args.model, args.revision, args.dtype, args.format_fingerprint, args.world, scheme.name)
        space = PromptSpace(key_space.fingerprint, args.world, args.group, key_space)
    elif parts or args.world != 1 or args.group:
        raise InputError("--revision, --dtype, --format-fingerprint, --world and --group need --model or --space")
    else:
        return None
    keys_in(space.fingerprint, [], groups=(args.group,))  # refuse a bad group before any tokens are read
    return space


def prompt_root(args: argparse.Namespace, scheme: ChainScheme, salt: str | None) -> bytes:
    """The root of the prompt's chain for this salt, with the adapter and tags of the options."""
    return scheme.root(salt=salt, lora=args.lora, tags=prompt_tags(args))


def prompt_items(args: argparse.Namespace) -> list[Item]:
    """The prompt's images and the like."""
    return [_item(text) for text in args.item]


def _keys(args: argparse.Namespace) -> int:
    scheme = prompt_scheme(args)
    space = prompt_space(args, scheme)
    tenant = NO_TENANT if space is None else tenant_tag(args.salt)
    sequence = KeySequence(scheme, root=prompt_root(args, scheme, args.salt), items=prompt_items(args))
    write = _write_json if args.output == "json" else _write_table
    if args.output == "table":
        say(f"{'chunk':>8}  {'tokens':>17}  {'digest' if space is None else 'key'}")
    chunk = 0
    for tokens in prompt_tokens(args):
        for digest in sequence.append(tokens):
            write(_Printed(chunk, chunk * scheme.chunk_tokens, scheme.chunk_tokens, digest), space, tenant)
            chunk += 1
    whole_tokens = chunk * scheme.chunk_tokens
    tail = sequence.tokens - whole_tokens
    if args.partial and (tail_digest := sequence.tail_digest()) is not None:
        write(_Printed(chunk, whole_tokens, tail, tail_digest), space, tenant)
    elif tail and args.output == "table":
        say(f"{tail} tokens after the last whole chunk of {scheme.chunk_tokens} have no key (--partial gives them one)")
    return 0


@dataclass(frozen=True, slots=True)
class _Printed:
    chunk: int
    first_token: int
    tokens: int
    digest: bytes


def _write_table(row: _Printed, space: PromptSpace | None, tenant: bytes) -> None:
    for name in [row.digest] if space is None else space.keys(row.digest, tenant):
        say(f"{row.chunk:>8}  {row.first_token:>8}-{row.first_token + row.tokens - 1:<8}  {name.hex()}")


def _write_json(row: _Printed, space: PromptSpace | None, tenant: bytes) -> None:
    row_fields: dict[str, object] = {**asdict(row), "digest": row.digest.hex()}
    if space is not None:
        row_fields["keys"] = [_notations(key, space.described) for key in space.keys(row.digest, tenant)]
    say(json.dumps(row_fields))


def _notations(key: ChunkKey, space: KeySpace | None) -> dict[str, object]:
    """A key in all notations. Its text needs more than the fingerprint of its space."""
    text = {} if space is None else {"spelling": space.spell(key)}
    return {"group": key.group, "shard": key.shard, "key": key.hex(), "path": key.path(), **text}


def _secret(path: str | None, algorithm: Algorithm) -> bytes:
    if path is None:
        return b""
    if algorithm != "blake2b":
        raise InputError(f"{algorithm} takes no secret; choose blake2b, or leave the secret out")
    file = Path(path)
    status = file.stat()  # before opening, because opening a pipe would block
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"--secret-file {path} is not a file")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise InputError(f"--secret-file {path} is open to others: run chmod 600 {path}")
    return file.read_bytes().removesuffix(b"\n").removesuffix(b"\r")


def prompt_tags(args: argparse.Namespace) -> dict[str, str]:
    """What else separates the prompt from others."""
    tags: dict[str, str] = {}
    for text in args.tag:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InputError(f"--tag {text}: write it as NAME=VALUE")
        if name in tags:
            raise InputError(f"--tag {name} is given twice")
        tags[name] = value
    return tags


def _item(text: str) -> Item:
    match = re.fullmatch(r"(.+):([0-9]{1,18}):([0-9]{1,18})", text, re.ASCII)
    if match is None:
        raise InputError(f"--item {text}: write it as HASH:FIRST:TOKENS, such as 9f2c…:12:576")
    return Item(match[1], int(match[2]), int(match[3]))


def prompt_tokens(args: argparse.Namespace) -> Iterator[list[int]]:
    """The prompt's tokens, a part at a time.

    Raises:
        InputError: there is no prompt, or something in it is not a token.
    """
    if (args.file is None) == (args.text is None):
        raise InputError("give either FILE with token ids (- for standard input) or --text FILE")
    if args.text is None:
        if args.tokenizer is not None or args.no_special_tokens:
            raise InputError("--tokenizer and --no-special-tokens go with --text")
        with _open_text(args.file) as stream:
            yield from read_tokens(stream)
        return
    if args.tokenizer is None:
        raise InputError("--text needs --tokenizer, the model's tokenizer.json")
    with _open_text(args.text) as stream:
        yield _tokenized(stream.read(), args.tokenizer, special=not args.no_special_tokens)


def _open_text(path: str) -> AbstractContextManager[TextIO]:
    if path == "-" and sys.stdin is None:
        raise InputError("standard input is closed; name a file instead of -")
    return nullcontext(sys.stdin) if path == "-" else Path(path).open(encoding="utf-8")


def _tokenized(text: str, tokenizer_path: str, *, special: bool) -> list[int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError("--text needs the package tokenizers: pip install 'kv-core[tokenizer]'") from None
    raw = Path(tokenizer_path).read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(raw)
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception
        raise InputError(f"{tokenizer_path} is not a tokenizer.json: {error}") from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


def read_tokens(stream: TextIO) -> Iterator[list[int]]:
    """Token ids from text, a part at a time: numbers separated by spaces or single commas, or one JSON list.

    Raises:
        InputError: names the word that is not a token, and its position.
    """
    text = stream.read(_READ_CHARS)
    if text.lstrip()[:1] == "[":
        yield _json_tokens(text + stream.read())
        return
    position = 0
    while text:
        following = stream.read(_READ_CHARS)
        # The last number may continue in the next part, and so may the comma after it: hold both back.
        cut = len(text.rstrip(string.whitespace + ",").rstrip(string.digits)) if following else len(text)
        numbers = _numbers(text[:cut], position, whole=not following)
        position += len(numbers)
        yield numbers
        text = text[cut:] + following


def _json_tokens(text: str) -> list[int]:
    try:
        tokens = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the input begins like a JSON list but is not one: {error}") from None
    pack_tokens(tokens)
    if any(isinstance(token, bool) for token in tokens):
        raise InputError("a token is true or false; tokens are whole numbers")
    return list(tokens)


def _numbers(text: str, position: int, *, whole: bool) -> list[int]:
    text = text.strip()
    if not whole:
        text = text.removesuffix(",").rstrip()  # a number follows in the next part
    if not text:
        return []
    words = _BETWEEN.split(text)
    if _PLAIN.fullmatch(text) is None or not all(words) or max(map(len, words)) > 20:
        for index, word in enumerate(words, position):
            if not re.fullmatch(r"[0-9]{1,20}", word):
                problem = "is missing: there is one comma too many" if not word else f"is {word[:40]!r}"
                raise InputError(f"token {index} {problem}; tokens are whole numbers with spaces or commas between")
    return list(map(int, words))
