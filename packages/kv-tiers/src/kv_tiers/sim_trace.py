"""Traces: which prompts were asked for, one after the other, as chains of chunk keys. Two formats, either gzipped.

Mooncake's (FAST 2025): one JSON object a line with `hash_ids`, chained ids of the prompt's blocks, and `timestamp` in
milliseconds. Plain: one request a line, its chunk ids with spaces between, perhaps after `@SECONDS`; `#` begins a
comment. In both, equal ids mean equal prefixes: an id stands for its chunk and all that is before it.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kv_core.errors import InputError
from kv_core.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class Trace:
    """prompts: the chunk keys of each request, first to last. span_s: from the first to the last, if it is known."""

    name: str
    prompts: list[list[ChunkKey]]
    chunks_unique: int
    span_s: float | None


def read_trace(path: str) -> Trace:
    """Read a trace whole.

    Raises:
        InputError: a line that cannot be meant, named by file and number.
        OSError: the file cannot be read.
    """
    key_of: dict[str, ChunkKey] = {}
    parent_of: dict[ChunkKey, ChunkKey | None] = {}
    prompts: list[list[ChunkKey]] = []
    first_s = last_s = None
    for number, line in _lines(path):
        where = f"{path}:{number}"
        ids, at_s = _mooncake(line, where) if line.startswith("{") else _plain(line, where)
        prompt = [key_of.setdefault(name, ChunkKey(name.encode())) for name in ids]
        parent = None
        for key in prompt:
            if parent_of.setdefault(key, parent) != parent:
                raise InputError(
                    f"{where}: chunk {key.decode()} follows another chunk than before; an id must stand for its whole "
                    "prefix: chain the ids, so that chunks after different prefixes have different ones"
                )
            parent = key
        if at_s is not None:
            first_s, last_s = at_s if first_s is None else first_s, at_s
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"{path}: no request in it; write one a line, its chunk ids with spaces between")
    span_s = last_s - first_s if first_s is not None and last_s is not None else None
    return Trace(Path(path).name, prompts, len(key_of), span_s)


def _lines(path: str) -> Iterator[tuple[int, str]]:
    with Path(path).open("rb") as raw:
        gzipped = raw.read(2) == b"\x1f\x8b"
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if gzipped else Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                text = line.partition("#")[0].strip() if not line.startswith("{") else line.strip()
                if text:
                    yield number, text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}:{number + 1}: the gzip file is damaged ({error}); fetch it again") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}:{number + 1}: not UTF-8 text; give a trace as JSON lines or plain text") from None


def _mooncake(line: str, where: str) -> tuple[list[str], float | None]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: begins like a JSON object and is none ({error}); repair or delete the line"
        ) from None
    ids = request.get("hash_ids")
    if not isinstance(ids, list) or any(type(chunk) is not int for chunk in ids):
        raise InputError(f"{where}: hash_ids must be a list of whole numbers, such as [0, 1, 2]")
    at_ms = request.get("timestamp")
    if at_ms is not None and type(at_ms) not in (int, float):
        raise InputError(f"{where}: timestamp must be a number of milliseconds")
    return _checked(list(map(str, ids)), where), None if at_ms is None else at_ms / 1000


def _plain(line: str, where: str) -> tuple[list[str], float | None]:
    ids = line.split()
    if not ids[0].startswith("@"):
        return _checked(ids, where), None
    try:
        at_s = float(ids[0][1:])
    except ValueError:
        raise InputError(f"{where}: {ids[0]!r} is no time; write seconds, such as @12.5") from None
    return _checked(ids[1:], where), at_s


def _checked(ids: list[str], where: str) -> list[str]:
    if not ids:
        raise InputError(f"{where}: a request without chunks; delete the line")
    if len(set(ids)) < len(ids):
        raise InputError(f"{where}: a chunk id is there twice; chained ids are different all along a prompt")
    return ids
