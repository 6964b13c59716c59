"""The S3 tier: chunks in a bucket of S3 or a compatible store (MinIO, Ceph, R2), by obstore. One object per chunk:

    <prefix>/<namespace>/<the key's path>       the header, then the payload

An object is replaced as a whole or not at all, so no reader sees half of one, and its size determines its payload's. An
object store is slow but highly parallel: each call's chunks are transferred concurrently, on threads of this tier,
which wait in obstore without holding the interpreter's lock.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.request import getproxies, proxy_bypass

import msgspec
import numpy as np
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, Refused, Stored, StoreOutcome, Unstorable
from kv_tiers.chunk_header import HEADER_BYTES
from kv_tiers.config import Timeout
from kv_tiers.pool.machine import spelled
from kv_tiers.pool.private_files import read_secret
from kv_tiers.tier import Read, RemovalRefusedError, TierContext, TierUsage, Write, why_full

from kv_remote.factories import factory_of
from kv_remote.key_paths import keys_in_paths
from kv_remote.together import run_all

_log = limited_logger(__name__)

_ENDPOINT: Final = re.compile(
    r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?(?:/[A-Za-z0-9._~%/-]*)?"
)
_DELETED_AT_ONCE: Final = 1000
"""The most objects that one request of the protocol may name."""

_REASON: Final = re.compile(r"(?:<\?xml[^>]*> ?)?<Error> ?<Code>([^<]*)</Code>(?: ?<Message>([^<]*)</Message>)?")
"""The store's own words in an error, without the numbers, names and signatures that follow."""

_FULL: Final = ("507 Insufficient Storage", "QuotaExceeded")
"""Parts of an error if the store has no room, or the bucket its quota: MinIO's, and Ceph's."""

_REFUSES: Final = re.compile(r"status code: (?:4(?!08|29)|501)")
"""Matches the error if the store refuses the request for good. It may be because of the object, or of everything."""

_LOST: Final = re.compile("kind: Interrupted|IncompleteMessage|ConnectionReset|BrokenPipe")
"""Matches the details of an error if the connection was lost while the request was sent."""

_CAUSE: Final = re.compile(r'message: "([^"]*)"')
"""The system's words in an error's details."""

_BEHIND_THE_END: Final = "status code: 416"
"""Part of an error if an object ends before the requested range."""

_MAX_UNREADABLE: Final = 10_000
"""The most chunks that are remembered as ones that we may not read."""

_ENVIRONMENT: Final = threading.Lock()

_STREAM_BYTES: Final = 1 << 20
"""A reply is copied into the borrowed pages in pieces of about this size, so no more than that is in memory twice."""

T = TypeVar("T")
Item = TypeVar("Item")


class ObjectsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which bucket, and our credentials for it. Without keys, obstore finds them as other clients do: from the AWS_
    variables of the environment, then from the machine's or container's role. With keys, or `anonymous`, no AWS_
    variable counts."""

    bucket: str
    prefix: str = "kv"
    endpoint: str = ""
    """http:// or https:// and a host; empty: Amazon's."""
    region: str = "us-east-1"
    access_key_id: str = ""
    secret_access_key_file: str = ""
    """Read once at start. Must be closed to all others (0600)."""
    anonymous: bool = False
    """Do not sign requests."""
    unsigned_payload: bool = False
    """Do not hash bodies a second time for the signature. For https, and stores that allow it."""
    virtual_hosted: bool = False
    """The bucket is part of the host name instead of the path."""
    bulk_delete: bool = True
    """Off for stores without bulk deletion."""
    tls_ca_file: str = ""
    """An authority in addition to the system's."""
    requests: int = 32
    """In flight at once, over all calls."""
    connect_timeout_s: Timeout = 2.0
    timeout_s: Timeout = 10.0
    """For one request, including its body and retries."""
    retries: int = 2
    """Of requests that failed for a reason that may be temporary."""

    def __post_init__(self) -> None:
        if not self.bucket or "/" in self.bucket:
            raise ValueError("bucket must be the name of one bucket")
        if (
            not self.prefix
            or any(part in ("", ".", "..") for part in self.prefix.split("/"))
            or not self.prefix.isascii()
        ):
            raise ValueError("prefix must be a path of names, without a / at its ends")
        # Any other endpoint makes obstore panic at each request.
        endpoint = _ENDPOINT.fullmatch(self.endpoint)
        if self.endpoint and (endpoint is None or int(endpoint["port"] or 0) > 65535):
            raise ValueError("endpoint must begin with http:// or https://, followed by a host, a port and a path")
        if bool(self.access_key_id) != bool(self.secret_access_key_file):
            raise ValueError("access_key_id and secret_access_key_file go together")
        if self.requests < 1 or self.retries < 0:
            raise ValueError("requests must be positive, and retries not negative")


class ObjectsTier:
    """Safe to call from any thread."""

    name = "s3"
    holds_is_local = False

    def __init__(self, config: ObjectsConfig, context: TierContext) -> None:
        """Sends nothing to the store yet. Raises `ConfigError`."""
        try:
            import obstore
            import obstore.exceptions
            import obstore.store
        except ImportError as error:
            raise ConfigError("s3: an object store's tier needs obstore; pip install 'kv-remote[s3]'") from error
        self._obstore: Any = obstore
        self.name = context.name or self.name
        self._store = _open(obstore, config, self.name)
        self._proxy = _proxy_to(config)
        self._prefix = f"{config.prefix}/{context.namespace}"
        self._chunk_bytes = context.chunk_bytes
        self._full = ""
        self.on_progress: Callable[[], object] = lambda: None
        self._unreadable: dict[ChunkKey, None] = {}
        self._threads = ThreadPoolExecutor(config.requests, thread_name_prefix="kv-s3")

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._run_each(keys, self._is_held)

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        return self._run_each(reads, self._load)

    load_prefixes = load_remainders = load

    def some_keys(self, count: int) -> list[ChunkKey]:
        batches = self._obstore.list(self._store, self._prefix, chunk_size=_DELETED_AT_ONCE)
        try:
            batch = self._call(partial(next, batches, None)) or []
        except (_ForbiddenError, FileNotFoundError) as error:
            raise TierDown(f"its objects cannot be listed: {error}") from error
        paths = (entry["path"][len(self._prefix) + 1 :] for entry in batch if self._is_chunk(entry["size"]))
        return list(islice(keys_in_paths(paths), count))

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        outcomes = self._run_each(writes, self._store_one)
        if outcomes:
            self._full = why_full(outcomes)
        return outcomes

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        self._delete([self._path(key) for key in keys])

    def clear(self) -> None:
        self._delete_below(self._prefix)

    def clear_tenant(self, tenant: bytes) -> None:
        listing = self._call(lambda: self._obstore.list_with_delimiter(self._store, self._prefix))
        for space in listing["common_prefixes"]:
            self._delete_below(f"{space.rstrip('/')}/{tenant.hex()}")

    def probe(self) -> None:
        if self._size(f"{self._prefix}/probe") is None:
            # This is the answer whether the bucket exists or not; only a listing tells them apart.
            self._list_nothing()

    def usage(self) -> TierUsage:
        return TierUsage(full=self._full)

    def close(self) -> None:
        self._threads.shutdown()

    def _path(self, key: ChunkKey) -> str:
        return f"{self._prefix}/{key.path()}"

    def _is_held(self, key: ChunkKey) -> bool:
        return key not in self._unreadable and self._is_chunk(self._size(self._path(key)))

    def _size(self, path: str) -> int | None:
        """The size of this object; None: there is none, or only this one is forbidden to us."""
        try:
            return int(self._call(lambda: self._obstore.head(self._store, path))["size"])
        except FileNotFoundError:
            return None
        except _RefusedError:
            self._list_nothing()  # the reply to HEAD has no body, and the reply to a listing says why
            return None

    def _list_nothing(self) -> None:
        """After a request for one object has failed: raises if the store refuses others as well."""
        try:
            self._call(lambda: self._obstore.list_with_delimiter(self._store, f"{self._prefix}/probe"))
        except FileNotFoundError as error:
            raise TierDown(f"there is no such bucket: {_shortened(error)}") from error

    def _is_chunk(self, object_bytes: int | None) -> bool:
        return object_bytes is not None and 0 < object_bytes - HEADER_BYTES <= self._chunk_bytes

    def _load(self, read: Read) -> LoadOutcome:
        try:
            return self._call(lambda: self._receive(read))
        except FileNotFoundError:
            return Absent()
        except _RefusedError as error:
            if read.from_bytes and _BEHIND_THE_END in str(error):
                return Loaded(read.from_bytes)  # a shorter payload was stored since, and has nothing there
            self._list_nothing()
            self._pass_over(read.key, str(error))
            return Absent()
        except _WrongLengthError as error:
            with suppress(RemovalRefusedError):
                self._delete([self._path(read.key)])
            return Damaged(str(error))

    def _pass_over(self, key: ChunkKey, why: str) -> None:
        """Hide an object that is another's, encrypted with another's key, or moved to an archive. It is replaced when
        its chunk is stored again."""
        _log.warning("%s: a chunk that may be listed but not read counts as missing: %s", self.name, why)
        if len(self._unreadable) >= _MAX_UNREADABLE:
            self._unreadable.clear()  # they are tried once more
        self._unreadable[key] = None

    def _receive(self, read: Read) -> Loaded:
        wanted_bytes = HEADER_BYTES + read.wanted_bytes
        offset = HEADER_BYTES + read.from_bytes if read.from_bytes else 0
        options = {"range": (offset, wanted_bytes)} if offset or read.wanted_bytes < self._chunk_bytes else None
        reply = self._obstore.get(self._store, self._path(read.key), options=options)
        size = reply.meta["size"]
        if not self._is_chunk(size):
            raise _WrongLengthError(f"an object of {size} bytes")
        object_bytes = min(size, wanted_bytes)
        for piece in reply.stream(min_chunk_size=_STREAM_BYTES):
            self.on_progress()
            part = memoryview(piece)
            if offset + len(part) > object_bytes:
                raise _WrongLengthError(f"an object of more than {object_bytes} bytes")
            if offset < HEADER_BYTES:
                header_part = part[: HEADER_BYTES - offset]
                read.header[offset : offset + len(header_part)] = header_part
                offset += len(header_part)
                part = part[len(header_part) :]
            start = offset - HEADER_BYTES
            if len(part):  # not under the interpreter's lock, which assigning to a memoryview would hold
                np.copyto(np.frombuffer(read.room, np.uint8)[start : start + len(part)], np.frombuffer(part, np.uint8))
            offset += len(part)
        if offset != object_bytes:  # the object's size is right, so the reply was cut short
            raise TierDown(f"a reply ended after {offset} bytes of {object_bytes}")
        return Loaded(object_bytes - HEADER_BYTES)

    def _store_one(self, write: Write) -> StoreOutcome:
        if self._is_held(write.key):
            return Stored()
        # Two buffers and no multipart upload: one request, whose body obstore sends without copying it.
        body = [write.header, write.payload]
        put = self._obstore.put
        try:
            self._call(lambda: put(self._store, self._path(write.key), body, use_multipart=False))
        except FileNotFoundError as error:
            raise TierDown(f"there is no such bucket: {_shortened(error)}") from error
        except TierDown as error:
            if isinstance(error, _ForbiddenError) or any(sign in str(error) for sign in _FULL):
                return Refused(str(error))
            if not isinstance(error, _RefusedError | _LostError):
                raise
            self._list_nothing()
            object_bytes = spelled(HEADER_BYTES + write.stored_bytes)
            return Unstorable(f"{error} (an object of {object_bytes}: raise the limit of the store or its proxy)")
        self.on_progress()
        self._unreadable.pop(write.key, None)
        return Stored()

    def _delete_below(self, path: str) -> None:
        batches = self._obstore.list(self._store, path, chunk_size=_DELETED_AT_ONCE)
        while (batch := self._call(partial(next, batches, None))) is not None:
            self._delete([entry["path"] for entry in batch])

    def _delete(self, paths: Sequence[str]) -> None:
        try:
            self._delete_all(paths)
        except TierDown as error:
            if isinstance(error, _ForbiddenError) or "AccessDenied" in str(error):  # of one object in a bulk request
                raise RemovalRefusedError(str(error)) from error
            raise

    def _delete_all(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), _DELETED_AT_ONCE):
            batch = list(paths[start : start + _DELETED_AT_ONCE])
            try:
                self._call(partial(self._obstore.delete, self._store, batch))
            except FileNotFoundError:
                if len(batch) > 1:  # a store without bulk requests may stop at the first missing object
                    for path in batch:
                        self._delete_all([path])

    def _call(self, request: Callable[[], T]) -> T:
        """The result of `request`. A missing object's error passes through; all others are faults of the store."""
        errors = self._obstore.exceptions
        try:
            return request()
        except FileNotFoundError:
            raise
        except errors.PermissionDeniedError as error:
            raise _ForbiddenError(_shortened(error)) from error
        except (errors.BaseError, OSError, ValueError) as error:
            why = _shortened(error)
            if _REFUSES.search(why):
                raise _RefusedError(why) from error
            kind = _LostError if _LOST.search(str(error)) else TierDown
            raise kind(f"{why}, through the proxy {self._proxy}" if self._proxy else why) from error

    def _run_each(self, items: Sequence[Item], work: Callable[[Item], T]) -> list[T]:
        """When one of these calls finds the store down, the others are skipped."""
        down: list[TierDown] = []

        def work_unless_down(item: Item) -> T:
            if down:
                raise down[0]
            try:
                return work(item)
            except TierDown as error:
                down.append(error)
                raise

        try:
            return run_all(self._threads, [partial(work_unless_down, item) for item in items])
        finally:
            down.clear()  # otherwise a reference cycle would retain the borrowed memory until it is collected


make_objects_tier = factory_of(ObjectsTier, ObjectsConfig, "s3")
"""The factory of the tier type `s3`."""


class _WrongLengthError(Exception):
    """An object that cannot be a chunk."""


class _RefusedError(TierDown):
    """The store refuses the request, which may be because of the object that it is about (`_list_nothing`)."""


class _ForbiddenError(_RefusedError):
    """Our identity is not permitted to do this."""


class _LostError(TierDown):
    """The connection was lost while a request was sent. A proxy that thinks a body too large may do this."""


def _open(obstore: Any, config: ObjectsConfig, where: str) -> Any:
    options: dict[str, Any] = {
        "region": config.region,
        "skip_signature": config.anonymous,
        "unsigned_payload": config.unsigned_payload,
        "virtual_hosted_style_request": config.virtual_hosted,
        "disable_bulk_delete": not config.bulk_delete,
    }
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=config.timeout_s),
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
        "allow_http": config.endpoint.startswith("http://"),
    }
    retries = {
        "max_retries": config.retries,
        "retry_timeout": timedelta(seconds=config.timeout_s),
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
    }
    if config.endpoint:
        options["endpoint"] = config.endpoint
    if config.access_key_id:
        secret = read_secret(Path(config.secret_access_key_file), f"{where}: secret_access_key_file")
        options["access_key_id"] = config.access_key_id
        options["secret_access_key"] = secret.decode("utf-8", "replace").strip()  # a header takes no spaces
    try:
        if config.tls_ca_file:
            client["root_certificate"] = Path(config.tls_ca_file).read_bytes()
        with _aws_variables_hidden() if config.access_key_id or config.anonymous else nullcontext():
            return obstore.store.S3Store(config.bucket, config=options, client_options=client, retry_config=retries)
    except (OSError, ValueError, obstore.exceptions.BaseError) as error:
        raise ConfigError(f"{where}: {_shortened(error)}") from error


@contextmanager
def _aws_variables_hidden() -> Iterator[None]:
    """Hide the AWS_ variables of the environment from obstore, which takes from them whatever its options leave open: a
    session token, that the requester pays, encryption, checksums, an address. Most cannot be set to nothing.

    Only the process's own table changes; `os.environ` keeps them, for whoever reads them there meanwhile."""
    with _ENVIRONMENT:
        hidden = {name: value for name, value in os.environb.items() if name.startswith(b"AWS_")}
        for name in hidden:
            os.unsetenv(name)
        try:
            yield
        finally:
            for name, value in hidden.items():
                os.putenv(name, value)


def _proxy_to(config: ObjectsConfig) -> str:
    """The proxy of the environment through which obstore reaches the store, without a password; empty: none."""
    scheme, _, host = (config.endpoint or "https://amazonaws.com").partition("://")
    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all", "")
    if not proxy or proxy_bypass(host.partition("/")[0], proxies):
        return ""
    return proxy.rpartition("@")[2] if "@" in proxy else proxy


def _shortened(error: BaseException) -> str:
    """Without the details that obstore adds for programmers. The store's own message, the most useful part, is at the
    end."""
    text, _, details = str(error).partition("Debug source:")
    text = " ".join(text.split())
    if (cause := _CAUSE.search(details)) is not None and cause[1] not in text:
        text += f": {cause[1]}"
    if (reason := _REASON.search(text)) is not None:
        text = text[: reason.start()] + ": ".join(filter(None, reason.groups()))
    return text if len(text) <= 400 else f"{text[:150]} … {text[-247:]}"
