"""Reads traces: the prompts of requests in order, as chains of chunk keys. Two formats, either of them gzipped or not.

Mooncake's (FAST 2025): one JSON object per line with `hash_ids`, chained ids of the prompt's blocks, and `timestamp` in
milliseconds. `observe.record` writes the same, after a line that states how many tokens and bytes a chunk has:

    {"kv_trace": 1, "chunk_tokens": 256, "chunk_bytes": 33554432, "keys_per_chunk": 1}

There a line may be half written: the last one while it is being recorded, and others where the recording process was
killed or the disk was full. It is left out and counted, unless it states sizes and requests follow that may be of
others: that, and elsewhere any line that cannot be read, is an error.

Plain: one request per line, its chunk ids with spaces between, perhaps after `@SECONDS`; `#` begins a comment. In both,
equal ids mean equal prefixes: an id stands for its chunk and everything before it.
"""

import gzip
import hashlib
import json
import math
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

from kv_core.errors import InputError
from kv_core.keys import ChunkKey

TRACE_VERSION: Final = 1
"""Version of the format of `observe.record`. The meaning of a version never changes."""
_FORMAT: Final = '{"kv_trace"'
_UTF8: Final = "utf-8-sig"  # without the mark that some editors put first, which would be taken for a chunk
_ID: Final = re.compile(r"[\w-]+")
_LATEST: Final = sys.float_info.max
"""JSON has integers that no float can hold, and Python reads NaN and Infinity there and in plain traces."""


@dataclass(frozen=True, slots=True)
class Trace:
    """prompts: the chunk keys of each request, first to last.
    span_s: from the first to the last, if known.
    chunk_tokens, chunk_bytes: as stated by the trace; 0 if not.
    half_lines: how many lines were left out because they are incomplete.
    """

    name: str
    prompts: list[list[ChunkKey]]
    chunks_unique: int
    span_s: float | None
    chunk_tokens: int = 0
    chunk_bytes: int = 0
    half_lines: int = 0


def read_trace(path: str) -> Trace:
    """Read a whole trace.

    Raises:
        InputError: a line makes no sense; the text names its file and number.
        OSError: the file cannot be read.
    """
    key_of: dict[str, ChunkKey] = {}
    parent_of: dict[ChunkKey, ChunkKey | None] = {}
    prompts: list[list[ChunkKey]] = []
    first_s = last_s = None
    sizes: tuple[int, int] | None = None
    half_lines = 0
    half_format: tuple[str, str] | None = None  # and where it is
    for number, text in _lines(path):
        where, line = f"{path}:{number}", text
        if sizes is not None or text.startswith(_FORMAT) or _FORMAT.startswith(text):
            line = _whole_record(text)
            if line != text:
                half_lines += 1
                if text.startswith(_FORMAT[:3]):
                    half_format = text, where
            if not line:
                continue
        if line.startswith(_FORMAT):
            sizes, half_format = _merged_sizes(sizes, _sizes(line, where), where), None
            continue
        if half_format is not None:
            _sizes(*half_format)  # which is an error: what follows may be of another format
        ids, at_s = _mooncake(line, where) if line.startswith("{") else _plain(line, where)
        if not ids:
            raise InputError(f"{where}: a request without chunks; delete the line")
        if len(set(ids)) < len(ids):
            raise InputError(f"{where}: a chunk id appears twice; chained ids all differ along a prompt")
        prompt = [key_of.setdefault(id_, trace_key(id_)) for id_ in ids]
        parent = None
        for id_, key in zip(ids, prompt, strict=True):
            if parent_of.setdefault(key, parent) != parent:
                raise InputError(
                    f"{where}: chunk {id_} follows a different chunk than before; an id must stand for its "
                    "whole prefix: chain the ids, so that chunks after different prefixes have different ones"
                )
            parent = key
        if at_s is not None:
            first_s, last_s = at_s if first_s is None else first_s, at_s
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"{path}: it has no requests; write one per line, its chunk ids separated by spaces")
    span_s = last_s - first_s if first_s is not None and last_s is not None else None
    return Trace(Path(path).name, prompts, len(key_of), span_s, *(sizes or (0, 0)), half_lines)


def trace_key(id_: str) -> ChunkKey:
    """A key as evenly spread as the cache's own, of which policies take a sample."""
    return ChunkKey(hashlib.blake2b(id_.encode(), digest_size=16).digest())


def _whole_record(line: str) -> str:
    """The record that a recorded line ends in; empty: it ends in none. A record that was written behind half a line, as
    by earlier releases, is not lost with it."""
    if not line.startswith("{") or (line.endswith("}") and line.count("{") == 1):
        return line
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line[line.rindex("{") :] if line.endswith("}") else ""
    return line


def _sizes(line: str, where: str) -> tuple[int, int]:
    header = _json_object(line, where)
    if header.get("kv_trace") != TRACE_VERSION:
        raise InputError(f"{where}: a trace of version {header.get('kv_trace')}; this release reads {TRACE_VERSION}")
    tokens, nbytes = header.get("chunk_tokens"), header.get("chunk_bytes")
    if type(tokens) is not int or type(nbytes) is not int or tokens < 0 or nbytes < 1:
        raise InputError(f"{where}: chunk_tokens and chunk_bytes must be whole numbers; repair the line")
    return tokens, nbytes


def _merged_sizes(before: tuple[int, int] | None, now: tuple[int, int], where: str) -> tuple[int, int]:
    if before is None or before == now:
        return now
    if before[1] == now[1] and 0 in (before[0], now[0]):
        return max(before, now)  # an engine has registered since, so the tokens of a chunk are known
    raise InputError(
        f"{where}: from here chunks have {now[0]} tokens and {now[1]} bytes, and {before[0]} and {before[1]} before; "
        "cut the trace in two at this line"
    )


def _lines(path: str) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        # Opened once: what has been read of a pipe, such as <(zcat trace.gz), cannot be read again.
        with Path(path).open("rb") as raw:
            gzipped = raw.peek(2)[:2] == b"\x1f\x8b"
            with gzip.open(raw, "rt", encoding=_UTF8) if gzipped else TextIOWrapper(raw, encoding=_UTF8) as lines:
                for number, line in enumerate(lines, 1):
                    text = line.partition("#")[0].strip() if not line.startswith("{") else line.strip()
                    if text:
                        yield number, text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}:{number + 1}: the gzip file is damaged ({error}); fetch it again") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}:{number + 1}: not UTF-8 text; give a trace as JSON lines or plain text") from None


def _mooncake(line: str, where: str) -> tuple[list[str], float | None]:
    request = _json_object(line, where)
    ids = request.get("hash_ids")
    if not isinstance(ids, list) or any(type(chunk) is not int for chunk in ids):
        raise InputError(f"{where}: hash_ids must be a list of whole numbers, such as [0, 1, 2]")
    at_ms = request.get("timestamp")
    if at_ms is not None and not (type(at_ms) in (int, float) and abs(at_ms) <= _LATEST):
        raise InputError(f"{where}: timestamp must be a number of milliseconds, such as 1500")
    return list(map(str, ids)), None if at_ms is None else at_ms / 1000


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: begins like a JSON object but is not one ({error}); repair or delete the line"
        ) from None
    assert isinstance(parsed, dict)  # it begins with a brace
    return parsed


def _plain(line: str, where: str) -> tuple[list[str], float | None]:
    first, *rest = ids = line.split()
    if bad := next((id_ for id_ in (rest if first.startswith("@") else ids) if not _ID.fullmatch(id_)), None):
        raise InputError(
            f"{where}: {bad!r} is no chunk id, which is of letters, digits, - and _; is this a trace of requests, and "
            "no file of settings?"
        )
    if not first.startswith("@"):
        return ids, None
    try:
        at_s = float(ids[0][1:])
    except ValueError:
        at_s = math.nan
    if not abs(at_s) <= _LATEST:
        raise InputError(f"{where}: {ids[0]!r} is not a time; write seconds, such as @12.5")
    return ids[1:], at_s
