"""Records requests into a file for `kv sim` to replay: Mooncake's JSON lines, one for each completed lookup.

The first line describes a chunk: the version of this format, tokens and bytes of a chunk (with all its shards and
groups, each in whole pages as in the pool), and its number of keys. It is repeated when a file is appended to or when
one of these changes; a reader refuses a trace of several formats.

An id is a shortened hash of a chunk's key. Keys are hashes of tokens and salts themselves, so neither can be read from
the file. Anyone who knows a prompt and the key space can tell whether it was requested, so the file is readable by its
owner only.

A file has a size limit. When it is reached nothing more is written, and the last line, a comment, states how many
requests were left out. The beginning of a trace can be replayed; a trace without its beginning cannot.

A process that was killed while it wrote leaves half a line. Nothing is cut off, as the file may be another's too: the
next line begins on its own, and a reader leaves out the half one.
"""

import json
import os
import stat
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.service import Holder
from kv_tiers.events.bus import EventBus, Occurred, Source, Subscriber
from kv_tiers.events.events import HolderEnded, LookedUp
from kv_tiers.pool.host_pool import slot_bytes_for

from kv_observe.trace_file import TRACE_VERSION

_log = limited_logger(__name__)

_MAX_HOLDERS: Final = 1 << 16
_FORMAT_STARTS: Final = b'{"kv_trace"'
_ID_BITS: Final = 52
"""Every JSON reader represents integers of this size exactly."""


class Recorder(Subscriber):
    """A file for each cache on the bus."""

    def __init__(self, bus: EventBus, path: str, max_bytes: int) -> None:
        """
        Raises:
            ConfigError: no file can be created there.
        """
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
    """Check the settings of a `Recorder`.

    Raises:
        ConfigError: no file can be created there.
    """
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
            self._left_out += sum(not line.startswith(_FORMAT_STARTS) for line in lines)
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
        """
        Raises:
            OSError: not all of it could be written; if possible, none of it was.
        """
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
