"""Identifies LoRA adapters by content, on a thread of its own, so that an engine's scheduler never reads a file.

An engine reads an adapter's files when the adapter is first used, and again after it was unloaded. If the files change
while the adapter is in use, it is unknown which version the engine computes with. The adapter then has no identity and
its requests are not cached, until it is loaded under another path or number. So an identity holds only shortly after a
look at the files: a later request, for which the engine may read them again, waits for another look.
"""

import math
import queue
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kv_core.clock import Clock
from kv_core.log import limited_logger
from kv_tiers.clock import MonotonicClock
from kv_tiers.threads import start_thread

from kv_connect.file_digests import (
    DigestMemory,
    FilesChangedError,
    FileState,
    HashingStoppedError,
    content_files,
    default_memory,
)
from kv_connect.identity import content_of

_log = limited_logger(__name__)

_MAX_ADAPTERS: Final = 4096
"""How many adapters are known, the most recently used ones; more than an engine has in its memory. An older one is not
in the engine's memory either, so the engine reads its files again, and so do we."""
_FRESH_S: Final = 1.0
"""How long an identity holds after a look at the files. An adapter that was used within this time is still in the
engine's memory, unless the engine has loaded as many others meanwhile as that holds."""
_PATIENCE_S: Final = 1.0
"""How long a request waits for a look. Then it is not cached."""
_MAX_WAITING: Final = 4096
"""Requests whose waits are remembered, the latest ones. Those that were aborted meanwhile are among them."""
_WAITED_S: Final = 600.0
"""A wait that began longer ago was of another request with the same id. No step of an engine takes so long."""


@dataclass(frozen=True, slots=True)
class Unsure:
    """The adapter's files are being looked at: ask again in the next step, for about a second at most."""


@dataclass(slots=True)
class _Adapter:
    """An adapter that was seen.

    name, path: as the engine has them.
    seen_ns: when it was seen first, since the epoch.
    content: the identity of its content; None until it is known.
    states: of its files, when they were read.
    commit: its content, if that is a commit of the hub and not in files of its own.
    looked_s: when the last look at its files began that found them unchanged.
    """

    name: str
    path: str
    seen_ns: int
    content: str | None = None
    states: tuple[FileState, ...] = ()
    commit: str = ""
    is_void: bool = False
    is_queued: bool = False
    looked_s: float = -math.inf


class Adapters:
    """The adapters of one engine. `identity` never waits; one thread reads files, and ends with `close`."""

    def __init__(self, memory: DigestMemory | None = None, *, clock: Clock | None = None) -> None:
        """memory: of digests of files; None for the user's own."""
        self._memory = default_memory() if memory is None else memory
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._waiting_since_s: OrderedDict[str, float] = OrderedDict()  # by request that waits for a look at the files
        self._process = secrets.token_hex(8)
        self._known: OrderedDict[tuple[int, str, str], _Adapter] = OrderedDict()  # those used last at the end
        self._queue: queue.SimpleQueue[_Adapter | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._idle = threading.Condition()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def identity(self, number: int, name: str, path: str, request_id: str = "") -> str | Unsure | None:
        """The adapter's name in keys; None: it is not known yet or cannot be, and the request must not be cached.

        number: the engine's own number of this adapter. Each call has the files checked again, in the background.
        request_id: of the request that can ask again; empty: none can.
        """
        adapter = self._known.get((number, name, path))
        if adapter is None:
            if len(self._known) >= _MAX_ADAPTERS:
                self._known.popitem(last=False)
            adapter = self._known[number, name, path] = _Adapter(name, path, time.time_ns())
            for (known_number, _, _), known in list(self._known.items()):
                if known_number == number and known is not adapter and not known.is_void:
                    adapter.is_void = True
                    self._void(known, f"adapter {name} at {path!r} has the same number, so either may be in its place")
        self._known.move_to_end((number, name, path))
        answer = self._answer(adapter, request_id)
        if not adapter.is_void and not adapter.is_queued:
            self._submit(adapter)
        return answer

    def loaded_again(self, number: int, name: str, path: str) -> None:
        """The engine is about to read its files again, whatever they hold now. Of all adapters that have had this
        number it serves this one alone, also to requests for another."""
        for (known_number, _, _), adapter in self._known.items():
            adapter.is_void = adapter.is_void or known_number == number
        self._known.pop((number, name, path), None)
        self.identity(number, name, path)

    @property
    def is_busy(self) -> bool:
        """Whether files are being looked at, or are about to be."""
        return self._waiting > 0

    def wait(self, timeout_s: float) -> bool:
        """Wait until the thread has processed everything that was queued."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._waiting, timeout_s)

    def close(self) -> None:
        """End the thread. No further adapter becomes known."""
        self._stopped.set()
        self._queue.put(None)

    def _answer(self, adapter: _Adapter, request_id: str) -> str | Unsure | None:
        if adapter.content is None or adapter.is_void:
            return None
        now_s, since_s = self._clock.now_s(), self._waiting_since_s.get(request_id)
        if since_s is not None and now_s - since_s > _WAITED_S:
            since_s = None
        if now_s - adapter.looked_s < _FRESH_S or (since_s is not None and adapter.looked_s >= since_s):
            self._waiting_since_s.pop(request_id, None)
            return f"{adapter.name}@{adapter.content}"
        if since_s is None and request_id:
            since_s = self._waiting_since_s[request_id] = now_s
            if len(self._waiting_since_s) > _MAX_WAITING:
                self._waiting_since_s.popitem(last=False)
        return Unsure() if since_s is not None and now_s - since_s < _PATIENCE_S else None

    def _submit(self, adapter: _Adapter) -> None:
        if self._stopped.is_set():
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kv-adapters", daemon=True)
            if why := start_thread(thread):  # the next request tries again
                _log.warning("requests for adapters are not cached for now: %s", why)
                return
            self._thread = thread
        with self._idle:
            self._waiting += 1
        adapter.is_queued = True
        self._queue.put(adapter)

    def _run(self) -> None:
        while (adapter := self._queue.get()) is not None:
            try:
                self._look_at(adapter)
            except HashingStoppedError:
                pass
            except (OSError, FilesChangedError) as error:
                self._void(adapter, str(error))
            except Exception as error:  # noqa: BLE001  # our thread: whatever the error, the adapter has no identity
                self._void(adapter, f"{type(error).__name__}: {error}")
            finally:
                adapter.is_queued = False
                with self._idle:
                    self._waiting -= 1
                    self._idle.notify_all()

    def _look_at(self, adapter: _Adapter) -> None:
        began_s = self._clock.now_s()
        directory = Path(adapter.path)
        files = content_files(directory) if adapter.path and directory.is_dir() else []
        states = tuple(FileState.of(path) for _, path in files)
        if adapter.content is None:
            content = content_of(adapter.path, self._memory, stopped=self._stopped)
            if content is None:
                _log.warning(
                    "adapter %s has neither files nor a commit at %r on this machine: chunks stored for its requests "
                    "live no longer than this engine",
                    adapter.name,
                    adapter.path,
                )
                content = f"{adapter.path}@engine-{self._process}"
            elif states and max(max(state.mtime_ns, state.ctime_ns) for state in states) > adapter.seen_ns:
                raise FilesChangedError("its files changed while it was loaded")
            elif not states:
                adapter.commit = content
            adapter.states = states
            adapter.content = content
        elif states != adapter.states:
            raise FilesChangedError("its files changed while it was served")
        elif adapter.commit and content_of(adapter.path, self._memory, stopped=self._stopped) != adapter.commit:
            raise FilesChangedError("the hub's cache got another commit of it while it was served")
        adapter.looked_s = began_s

    def _void(self, adapter: _Adapter, why: str) -> None:
        adapter.is_void = True
        _log.warning(
            "requests for adapter %s at %r are not cached: %s; load it under another number to have them cached",
            adapter.name,
            adapter.path,
            why,
        )
