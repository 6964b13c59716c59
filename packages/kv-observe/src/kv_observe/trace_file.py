"""Traces: the prompts of requests in order, as chains of chunk keys. Two formats, either of them gzipped or not.

Mooncake's (FAST 2025): one JSON object per line with `hash_ids`, chained ids of the prompt's blocks, and `timestamp` in
milliseconds; perhaps with `stop`, Anthropic's reason why the answer ended. `observe.record` writes the same, after a
line that states how many tokens and bytes a chunk has:

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
import os
import re
import stat
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

import xxhash
from kv_core.errors import ConfigError, InputError
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.service import Holder
from kv_tiers.events.bus import EventBus, Occurred, Source, Subscriber
from kv_tiers.events.events import HolderEnded, LookedUp
from kv_tiers.pool.host_pool import slot_bytes_for

_log = limited_logger(__name__)

TRACE_VERSION: Final = 1
"""Version of the format of `observe.record`. The meaning of a version never changes."""
_FORMAT: Final = '{"kv_trace"'
_UTF8: Final = "utf-8-sig"  # without the mark that some editors put first, which would be taken for a chunk
_TURN_ENDED: Final = "end_turn"
"""The `stop` of a request whose answer calls no tool; of others, such as `tool_use`, nothing is told."""
_ID: Final = re.compile(r"[\w-]+")
_LATEST: Final = sys.float_info.max
"""JSON has integers that no float can hold, and Python reads NaN and Infinity there and in plain traces."""


@dataclass(frozen=True, slots=True)
class Trace:
    """prompts: the chunk keys of each request, first to last.
    span_s: from the first to the last, if known.
    chunk_tokens, chunk_bytes: as stated by the trace; 0 if not.
    half_lines: how many lines were left out because they are incomplete.
    turn_ends: of each request, whether its answer ended its user's turn; empty if the trace does not say.
    times_s: of each request, when it arrived; empty if the trace does not say so of all.
    """

    name: str
    prompts: list[list[ChunkKey]]
    chunks_unique: int
    span_s: float | None
    chunk_tokens: int = 0
    chunk_bytes: int = 0
    half_lines: int = 0
    turn_ends: list[bool] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


def read_trace(path: str) -> Trace:
    """Read a whole trace.

    Raises:
        InputError: a line makes no sense; the text names its file and number.
        OSError: the file cannot be read.
    """
    key_of: dict[str, ChunkKey] = {}
    parent_of: dict[ChunkKey, ChunkKey | None] = {}
    prompts: list[list[ChunkKey]] = []
    stops: list[object] = []
    times: list[float | None] = []
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
        ids, at_s, stop = _mooncake(line, where) if line.startswith("{") else (*_plain(line, where), None)
        if not ids:
            raise InputError(f"{where}: a request without chunks; delete the line")
        if len(set(ids)) < len(ids):
            raise InputError(f"{where}: a chunk id appears twice; chained ids all differ along a prompt")
        prompt = [key_of.setdefault(id_, trace_key(id_)) for id_ in ids]
        parent = None
        for id_, key in zip(ids, prompt, strict=True):
            if sizes is not None and None in (parent, parent_of.get(key)):
                # A cache records a lookup, which begins behind the chunks that the engine has itself.
                parent_of[key] = parent or parent_of.get(key)
            elif parent_of.setdefault(key, parent) != parent:
                raise InputError(
                    f"{where}: chunk {id_} follows a different chunk than before; an id must stand for its "
                    "whole prefix: chain the ids, so that chunks after different prefixes have different ones"
                )
            parent = key
        prompts.append(prompt)
        stops.append(stop)
        times.append(at_s)
    if not prompts:
        raise InputError(f"{path}: it has no requests; write one per line, its chunk ids separated by spaces")
    known_s = [at_s for at_s in times if at_s is not None]
    span_s = known_s[-1] - known_s[0] if known_s else None
    times_s = known_s if len(known_s) == len(prompts) else []
    turn_ends = [stop == _TURN_ENDED for stop in stops] if any(stops) else []
    return Trace(Path(path).name, prompts, len(key_of), span_s, *(sizes or (0, 0)), half_lines, turn_ends, times_s)


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


def _mooncake(line: str, where: str) -> tuple[list[str], float | None, object]:
    request = _json_object(line, where)
    ids = request.get("hash_ids")
    if not isinstance(ids, list) or any(type(chunk) is not int for chunk in ids):
        raise InputError(f"{where}: hash_ids must be a list of whole numbers, such as [0, 1, 2]")
    at_ms = request.get("timestamp")
    if at_ms is not None and not (type(at_ms) in (int, float) and abs(at_ms) <= _LATEST):
        raise InputError(f"{where}: timestamp must be a number of milliseconds, such as 1500")
    return list(map(str, ids)), None if at_ms is None else at_ms / 1000, request.get("stop")


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


_MAX_HOLDERS: Final = 1 << 16
_ID_BITS: Final = 52
"""Every JSON reader represents integers of this size exactly."""


class Recorder(Subscriber):
    """Records requests for `kv sim` to replay, one for each completed lookup, in a file for each cache on the bus.

    The first line describes a chunk: the version of this format, tokens and bytes of a chunk (with all its shards and
    groups, each in whole pages as in the pool), and its number of keys. It is repeated when a file is appended to or
    when one of these changes; a reader refuses a trace of several formats.

    An id is a shortened hash of a chunk's key. Keys are hashes of tokens and salts themselves, so neither can be read
    from the file. Anyone who knows a prompt and the key space can tell whether it was requested, so the file is
    readable by its owner only.

    A file has a size limit. When it is reached nothing more is written, and the last line, a comment, states how many
    requests were left out. The beginning of a trace can be replayed; a trace without its beginning cannot.

    A process that was killed while it wrote leaves half a line. Nothing is cut off, as the file may be another's too:
    the next line begins on its own, and a reader leaves out the half one.
    """

    def __init__(self, bus: EventBus, path: str, max_bytes: int) -> None:
        """Raises `ConfigError`: no file can be created there."""
        self._bus = bus
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._files: dict[str, _TraceFile] = {}
        self._last_lookups: OrderedDict[tuple[str, Holder], tuple[int, ChunkKey]] = OrderedDict()
        check_record(path, max_bytes)

    def take(self, occurred: Occurred) -> None:
        cache = occurred.source.name
        match occurred.event:
            case LookedUp(ended="PENDING") | LookedUp(keys=[]):
                pass  # the same holder will look up again; an empty lookup is no request
            case LookedUp() as lookup:
                # A holder that repeats its lookup, as for a request that has to wait, is still one request.
                prompt = (len(lookup.keys), lookup.keys[-1])
                if self._last_lookups.get((cache, lookup.holder)) == prompt:
                    return
                self._last_lookups[cache, lookup.holder] = prompt
                if len(self._last_lookups) > _MAX_HOLDERS:
                    self._last_lookups.popitem(last=False)
                ids = [_short_id(key) for key in lookup.keys[:: lookup.shape.keys_per_chunk]]
                at_ms = round(self._bus.wall_s(occurred.at_s) * 1000)
                file = self._file(occurred.source)
                file.set_format(_format_of(occurred.source, lookup.shape.keys_per_chunk))
                file.add({"timestamp": at_ms, "hash_ids": ids})
            case HolderEnded(holder):
                self._last_lookups.pop((cache, holder), None)

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, source: Source) -> "_TraceFile":
        if source.name not in self._files:
            stem = f"{self._path.stem}-{source.name}" if source.name else self._path.stem
            self._files[source.name] = _TraceFile(self._path.with_stem(stem), self._max_bytes)
        return self._files[source.name]


def check_record(path: str, max_bytes: int) -> None:
    """Check the settings of a `Recorder`. Raises `ConfigError`: no file can be created there."""
    if max_bytes < 1:
        raise ConfigError(f"observe: record_bytes is {max_bytes}; a trace needs room, such as 64MiB")
    if not os.access(Path(path).parent, os.W_OK | os.X_OK):
        raise ConfigError(f"observe: no trace can be recorded in {Path(path).parent}; name a directory of your own")
    if Path(path).is_dir():
        raise ConfigError(f"observe: record {path} is a directory; name a file in it, such as requests.jsonl")


class _TraceFile:
    """One trace, appended to; of mode 0600."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._left_out = 0
        self._is_full = False
        self._format: dict[str, object] = {}
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)  # a file that others may read is closed to them below
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            os.close(self._file)
            raise OSError(f"{path} is not a plain file of this user, so no trace is recorded there")
        os.fchmod(self._file, 0o600)
        self._bytes = status.st_size
        self._ends_mid_line = bool(status.st_size) and os.pread(self._file, 1, status.st_size - 1) != b"\n"

    def set_format(self, chunk_format: dict[str, object]) -> None:
        """Describe the chunks of the requests from here on."""
        if chunk_format != self._format and not self._is_full:
            self._format = chunk_format
            line = _line(chunk_format)
            self._lines.append(line)
            self._waiting_bytes += len(line)

    def add(self, request: dict[str, object]) -> None:
        line = _line(request)
        if self._is_full or self._bytes + self._waiting_bytes + len(line) > self._max_bytes:
            if not self._is_full:
                _log.warning("the trace %s is full (record_bytes); further requests are left out", self._path)
            self._is_full = True
            self._left_out += 1
            return
        self._lines.append(line)
        self._waiting_bytes += len(line)

    def flush(self) -> None:
        if not self._lines:
            return
        lines, self._lines, self._waiting_bytes = self._lines, [], 0
        try:
            self._write(b"".join(lines))
        except OSError as error:
            self._is_full = True
            self._left_out += sum(not line.startswith(_FORMAT.encode()) for line in lines)
            _log.warning("the trace %s ends here: %s", self._path, error.strerror)

    def close(self) -> None:
        self.flush()
        try:
            if self._left_out:
                self._write(f"# {self._left_out} requests were left out\n".encode())
        except OSError as error:
            _log.warning("%d requests were left out of %s: %s", self._left_out, self._path, error.strerror)
        finally:
            os.close(self._file)

    def _write(self, data: bytes) -> None:
        """Raises `OSError`: not all of it could be written; if possible, none of it was."""
        if self._ends_mid_line:
            data = b"\n" + data
        start, written = os.fstat(self._file).st_size, 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            self._truncate(start)
            raise
        self._bytes += written
        self._ends_mid_line = False

    def _truncate(self, size_before: int) -> None:
        """Remove lines that were written in part because there is no more room. size_before: the file's, bytes."""
        with suppress(OSError):
            size = os.fstat(self._file).st_size
            if size == size_before:
                return
            if size == os.lseek(self._file, 0, os.SEEK_CUR):  # else another process has appended to it since
                os.ftruncate(self._file, size_before)
                return
        self._ends_mid_line = True


def _format_of(source: Source, keys_per_chunk: int) -> dict[str, object]:
    slot_bytes = slot_bytes_for(source.sizes.largest)
    return {
        "kv_trace": TRACE_VERSION,
        "chunk_tokens": source.chunk_tokens,
        "chunk_bytes": keys_per_chunk * slot_bytes,
        "keys_per_chunk": keys_per_chunk,
    }


def _line(entry: dict[str, object]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _short_id(key: ChunkKey) -> int:
    return xxhash.xxh3_64_intdigest(key) >> (64 - _ID_BITS)
