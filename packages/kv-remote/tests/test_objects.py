"""The object store's tier against a server that speaks S3, and against some that only listen."""

import contextlib
import gc
import itertools
import mmap
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import boto3
import obstore
import pytest
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, Refused, Stored, Unstorable
from kv_core.testing import key_chain
from kv_remote.objects import ObjectsTier, make_objects_tier
from kv_testing.s3_server import s3_server
from kv_testing.servers import free_port
from kv_testing.wait import joined, until
from kv_tiers.build import tier_factory
from kv_tiers.chunk_header import HEADER_BYTES
from kv_tiers.testing.tier_contract import PersistentTierContract
from kv_tiers.tier import RemovalRefusedError, ShowsProgress, Tier, TierContext, Write

NUMBERS = itertools.count()
WHERE: dict[str, object] = {}


@pytest.fixture(scope="module", autouse=True)
def _store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with s3_server(tmp_path_factory.mktemp("secret")) as options:
        WHERE.update(options)
        yield


class TestObjects(PersistentTierContract):
    """A prefix for each test makes its tier empty."""

    def make(self, context: TierContext, chunks: int) -> Tier:
        self.options = WHERE | {"prefix": f"test/{next(NUMBERS)}"}
        return self.reopen(context, chunks)

    def reopen(self, context: TierContext, chunks: int) -> Tier:
        return make_objects_tier(self.options, context)

    def spoil(self, key: ChunkKey, at: int) -> None:
        assert isinstance(self.tier, ObjectsTier)
        path = self.tier._path(key)
        data = bytearray(obstore.get(self.tier._store, path).bytes())
        data[HEADER_BYTES + at] ^= 1 << at % 8
        obstore.put(self.tier._store, path, bytes(data))

    def archive(self, key: ChunkKey) -> None:
        """What a rule of the bucket does to old objects: they are listed, and reading one is forbidden."""
        assert isinstance(self.tier, ObjectsTier)
        bucket, path = str(WHERE["bucket"]), self.tier._path(key)
        client = boto3.client(
            "s3",
            endpoint_url=str(WHERE["endpoint"]),
            region_name="us-east-1",
            aws_access_key_id=str(WHERE["access_key_id"]),
            aws_secret_access_key=Path(str(WHERE["secret_access_key_file"])).read_text().strip(),
        )
        source = {"Bucket": bucket, "Key": path}
        client.copy_object(Bucket=bucket, Key=path, CopySource=source, StorageClass="GLACIER")

    def test_bytes_that_move_are_shown(self) -> None:
        """Its lane does not take a call for one that hangs while they do."""
        assert isinstance(self.tier, ShowsProgress)
        keys, moved = key_chain(3), list[int]()
        self.tier.on_progress = lambda: moved.append(1)
        self.store(keys)
        assert len(moved) == 3
        assert [type(outcome) for outcome in self.load(keys)] == [Loaded] * 3
        assert len(moved) >= 6

    def test_an_object_that_may_not_be_read_is_missing_until_it_is_stored_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        keys = key_chain(3)
        self.store(keys)
        self.archive(keys[1])
        assert self.tier.holds(keys) == [True] * 3
        assert [type(outcome) for outcome in self.load(keys)] == [Loaded, Absent, Loaded]
        assert "InvalidObjectState" in caplog.text
        assert self.tier.holds(keys) == [True, False, True]
        assert self.tier.store(self.writes(keys)) == [Stored()] * 3
        assert self.tier.holds(keys) == [True] * 3
        assert [type(outcome) for outcome in self.load(keys)] == [Loaded] * 3

    def test_a_rest_behind_the_end_of_what_was_stored_since_is_no_fault_of_the_store(self) -> None:
        self.use_prefixes()
        (key,) = key_chain(1)
        self.tier.store([self.write(key)])
        self.tier.discard([key])
        self.tier.store([self.write(key, stored_bytes=8192)])
        for start in (4096, 8192, 12_288):
            reads = [self.read(key, from_bytes=start)]
            assert self.tier.load_remainders(reads) == [Loaded(max(start, 8192))]  # type: ignore[attr-defined]

    def objects(self) -> tuple[ObjectsTier, list[str]]:
        assert isinstance(self.tier, ObjectsTier)
        found = [meta["path"] for batch in obstore.list(self.tier._store, self.tier._prefix) for meta in batch]
        return self.tier, found

    def test_an_object_of_another_length_is_damage_and_goes(self) -> None:
        keys = key_chain(3)
        self.store(keys)
        tier, paths = self.objects()
        assert len(paths) == 3
        for key, body in zip(keys, (b"short", b"x" * 20_000, b""), strict=True):
            obstore.put(tier._store, tier._path(key), body)
        assert self.tier.holds(keys) == [False] * 3
        assert [type(outcome) for outcome in self.load(keys)] == [Damaged] * 3
        assert self.objects()[1] == []
        self.store(keys)
        obstore.put(tier._store, tier._path(keys[0]), b"short")
        self.store(keys)  # what cannot be a chunk is replaced
        assert self.loaded(keys) == [True] * 3

    def test_the_lent_memory_can_be_unmapped_after_a_store(self) -> None:
        (key,) = key_chain(1)
        write = self.write(key)
        memory = mmap.mmap(-1, self.context.slot_bytes)
        memory[:] = bytes(write.pages)
        lent = memoryview(memory)
        assert self.tier.store([Write(key, None, write.header, lent, write.stored_bytes)]) == [Stored()]
        lent.release()
        memory.close()
        assert self.loaded([key]) == [True]

    def test_clearing_leaves_others_alone(self) -> None:
        keys = key_chain(2)
        self.store(keys)
        with closing(make_objects_tier(self.options, TierContext(4096, 4096, "another"))) as other:
            other.clear()
        assert self.tier.holds(keys) == [True, True]

    def test_a_bucket_that_is_not_there_is_a_tier_that_is_down(self) -> None:
        with closing(make_objects_tier(self.options | {"bucket": "no-such-bucket"}, self.context)) as tier:
            with pytest.raises(TierDown, match="bucket"):
                tier.probe()
            with pytest.raises(TierDown, match="bucket"):
                tier.store(self.writes(key_chain(2)))
            self.tier, mine = tier, self.tier
            assert self.load(key_chain(1)) == [Absent()]
            self.tier = mine


@contextlib.contextmanager
def listening(answer: bytes | Callable[[bytes], bytes] | None) -> Iterator[str]:
    """The address of a server that says this to everybody; None: nothing, for ever."""
    ended = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)

    def serve() -> None:
        open_ones = []
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = listener.accept()
                client.settimeout(0.2)
                if answer is None:
                    open_ones.append(client)
                    continue
                with client, contextlib.suppress(OSError):
                    asked = client.recv(1 << 16)
                    client.sendall(answer if isinstance(answer, bytes) else answer(asked))
                    while callable(answer) and client.recv(1 << 16):
                        pass
        for client in open_ones:
            client.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        joined(thread)
        listener.close()


OK = b"HTTP/1.1 200 OK\r\nLast-Modified: Sat, 21 Nov 2026 07:00:00 GMT\r\nETag: x\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
        b"no HTTP at all\r\n\r\n",
        OK + b"Content-Length: 10256\r\n\r\n" + b"x" * 5_000,
        OK + b"Content-Length: lots\r\n\r\n",
    ],
    ids=["silent", "closing", "503", "500", "403", "not-http", "cut-short", "no-number"],
)
def test_a_store_in_trouble_is_down_in_time(answer: bytes | None) -> None:
    contract = TestObjects()
    with listening(answer) as endpoint:
        trouble: dict[str, object] = {"endpoint": endpoint, "timeout_s": 0.4, "connect_timeout_s": 0.4, "retries": 1}
        contract.setup_method()
        contract.tier.close()
        contract.tier = make_objects_tier(contract.options | trouble, contract.context)
        start = time.monotonic()
        with pytest.raises(TierDown):
            contract.load(key_chain(40))
        if answer is None or not answer.startswith(OK):
            with pytest.raises(TierDown):
                contract.tier.probe()
        assert time.monotonic() - start < 4
        contract.teardown_method()


def test_who_may_only_read_is_refused_what_it_stores() -> None:
    def answer(asked: bytes) -> bytes:
        status = b"403 Forbidden" if asked.startswith(b"PUT") else b"404 Not Found"
        return b"HTTP/1.1 %b\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status

    contract = TestObjects()
    contract.setup_method()
    contract.tier.close()
    with listening(answer) as endpoint:
        contract.tier = make_objects_tier(contract.options | {"endpoint": endpoint}, contract.context)
        (outcome,) = contract.tier.store(contract.writes(key_chain(1)))
        assert isinstance(outcome, Refused)
        assert contract.tier.holds(key_chain(1)) == [False]
        contract.teardown_method()


@pytest.mark.parametrize(
    ("status", "code"),
    [(b"507 Insufficient Storage", b"XMinioStorageFull"), (b"400 Bad Request", b"XMinioAdminBucketQuotaExceeded")],
)
def test_a_full_store_refuses_and_goes_on_serving(status: bytes, code: bytes) -> None:
    body = b"<Error><Code>%b</Code><Message>no room</Message></Error>" % code

    def answer(asked: bytes) -> bytes:
        if asked.startswith(b"PUT"):
            return b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body)
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    contract = TestObjects()
    contract.setup_method()
    contract.tier.close()
    with listening(answer) as endpoint:
        contract.tier = make_objects_tier(contract.options | {"endpoint": endpoint, "retries": 0}, contract.context)
        (outcome,) = contract.tier.store(contract.writes(key_chain(1)))
        assert isinstance(outcome, Refused)
        assert contract.tier.usage().full.endswith("no room")
        assert contract.tier.holds(key_chain(1)) == [False]
        contract.teardown_method()


NO_OBJECT = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
NOTHING_LISTED = b"<ListBucketResult><Name>chunks</Name><IsTruncated>false</IsTruncated></ListBucketResult>"


def refusing(status: bytes, code: bytes = b"") -> bytes:
    body = b"<Error><Code>%b</Code><Message>no</Message></Error>" % code if code else b""
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body)


def listed() -> bytes:
    size = len(NOTHING_LISTED)
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (size, NOTHING_LISTED)


@pytest.mark.parametrize(
    "refusal",
    [
        refusing(b"400 Bad Request", b"EntityTooLarge"),
        refusing(b"413 Payload Too Large"),  # a proxy's
        refusing(b"501 Not Implemented", b"NotImplemented"),
        b"",  # a proxy that closes the connection
    ],
    ids=["too-large", "proxy", "not-implemented", "closing"],
)
def test_an_object_that_the_store_does_not_take_is_refused_and_the_tier_stays_up(refusal: bytes) -> None:
    """The tier was down, its probe succeeded, and so on for ever."""

    def answer(asked: bytes) -> bytes:
        return refusal if asked.startswith(b"PUT") else NO_OBJECT if asked.startswith(b"HEAD") else listed()

    contract = TestObjects()
    contract.setup_method()
    contract.tier.close()
    with listening(answer) as endpoint:
        contract.tier = make_objects_tier(contract.options | {"endpoint": endpoint, "retries": 0}, contract.context)
        outcomes = contract.tier.store(contract.writes(key_chain(2)))
        assert [type(outcome) for outcome in outcomes] == [Unstorable] * 2
        assert isinstance(outcomes[0], Unstorable) and "raise the limit" in outcomes[0].reason
        assert contract.tier.usage().full == ""
        assert contract.tier.holds(key_chain(2)) == [False] * 2
        contract.teardown_method()


def test_an_object_encrypted_with_anothers_key_is_missing_and_the_tier_stays_up() -> None:
    """S3 answers 400 to whoever does not send the key, to HEAD as well."""

    def answer(asked: bytes) -> bytes:
        return listed() if asked.startswith(b"GET /chunks?") else refusing(b"400 Bad Request", b"InvalidRequest")

    contract = TestObjects()
    contract.setup_method()
    contract.tier.close()
    with listening(answer) as endpoint:
        contract.tier = make_objects_tier(contract.options | {"endpoint": endpoint, "retries": 0}, contract.context)
        assert contract.tier.holds(key_chain(2)) == [False] * 2
        assert contract.load(key_chain(2)) == [Absent()] * 2
        contract.teardown_method()


AWS = {
    "AWS_SESSION_TOKEN": "of-a-role",
    "AWS_REQUEST_PAYER": "true",
    "AWS_CHECKSUM_ALGORITHM": "sha256",
    "AWS_SERVER_SIDE_ENCRYPTION": "aws:kms",
    "AWS_SSE_KMS_KEY_ID": "a-key",
    "AWS_ACCESS_KEY_ID": "anothers",
    "AWS_SECRET_ACCESS_KEY": "anothers",
    "AWS_PROXY_URL": "http://127.0.0.1:9",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
}


@pytest.mark.parametrize("credentials", ["keys", "anonymous", "environment"])
def test_settings_with_keys_are_the_whole_credential(credentials: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of the pod's role, sent with our keys, makes every request fail; the others change who pays, or fail."""
    sent: list[bytes] = []

    def answer(asked: bytes) -> bytes:
        sent.append(asked.lower())
        return NO_OBJECT if asked.startswith(b"HEAD") else OK + b"Content-Length: 0\r\nConnection: close\r\n\r\n"

    names = AWS if credentials != "environment" else dict(list(AWS.items())[:7])
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    contract = TestObjects()
    contract.setup_method()
    contract.tier.close()
    without_keys: dict[str, object] = {"access_key_id": "", "secret_access_key_file": ""}
    options = contract.options | ({} if credentials == "keys" else without_keys)
    with listening(answer) as endpoint:
        # The server closes each connection, and a request on one that is being closed is made again.
        options |= {"endpoint": endpoint, "anonymous": credentials == "anonymous", "retries": 3}
        contract.tier = make_objects_tier(options, contract.context)
        assert contract.tier.store(contract.writes(key_chain(1))) == [Stored()]
        contract.teardown_method()
    asked = b"".join(sent)
    for header in (b"security-token", b"request-payer", b"checksum-sha256", b"server-side-encryption"):
        assert (header in asked) == (credentials == "environment"), header
    assert (b"credential=someone/" in asked) == (credentials == "keys")
    assert (b"credential=anothers/" in asked) == (credentials == "environment")
    in_c = subprocess.run(
        ["env"], capture_output=True, text=True, check=True, timeout=60
    ).stdout  # what others inherit is unchanged
    assert all(f"{name}={value}" in in_c for name, value in names.items())


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_a_proxy_that_does_not_answer_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, f"http://me:s3cret@127.0.0.1:{free_port()}")
    contract = TestObjects()
    contract.setup_method()
    contract.tier.close()
    options = contract.options | {"endpoint": "http://minio.example:9000", "retries": 0}
    contract.tier = make_objects_tier(options, contract.context)
    with pytest.raises(TierDown, match=r"Connection refused, through the proxy 127\.0\.0\.1:\d+$") as raised:
        contract.tier.probe()
    assert "s3cret" not in str(raised.value)
    monkeypatch.setenv("no_proxy", "minio.example")
    contract.teardown_method()
    contract.tier = make_objects_tier(options | {"connect_timeout_s": 0.2, "timeout_s": 0.2}, contract.context)
    with pytest.raises(TierDown) as raised:
        contract.tier.probe()
    assert "proxy" not in str(raised.value)
    contract.teardown_method()


@pytest.mark.parametrize("in_bulk", [True, False])
def test_who_may_not_delete_is_told_and_goes_on_reading(in_bulk: bool) -> None:
    contract = TestObjects()
    contract.setup_method()
    contract.tier.close()
    (key,) = key_chain(1)

    def answer(asked: bytes) -> bytes:
        if asked.startswith(b"GET"):
            return OK + b"Content-Length: 3\r\n\r\nabc"
        if not in_bulk:
            return b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
        assert isinstance(contract.tier, ObjectsTier)
        error = b"<Key>%b</Key><Code>AccessDenied</Code><Message>no</Message>" % contract.tier._path(key).encode()
        body = b"<DeleteResult><Error>%b</Error></DeleteResult>" % error
        return OK + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)

    with listening(answer) as endpoint:
        contract.tier = make_objects_tier(contract.options | {"endpoint": endpoint}, contract.context)
        assert isinstance(contract.load([key])[0], Damaged)
        with pytest.raises(RemovalRefusedError):
            contract.tier.discard([key])
        contract.teardown_method()


def test_why_the_store_refuses_is_in_the_message() -> None:
    """The path of a chunk is long, and comes before the reason; a signature may come after it, and be longer. The reply
    to a lookup's request has no body at all."""
    body = (
        b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>RequestTimeTooSkewed</Code>'
        b"<Message>The difference is too large.</Message><HostId>%b</HostId></Error>" % (b"x" * 1000)
    )

    def answer(asked: bytes) -> bytes:
        return b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (
            (0, b"") if asked.startswith(b"HEAD") else (len(body), body)
        )

    contract = TestObjects()
    contract.setup_method()
    contract.tier.close()
    keys = key_chain(1)
    with listening(answer) as endpoint:
        contract.tier = make_objects_tier(contract.options | {"endpoint": endpoint}, contract.context)
        for call in (
            lambda: contract.load(keys),
            lambda: contract.tier.holds(keys),
            lambda: contract.tier.store(contract.writes(keys)),
            contract.tier.probe,
        ):
            with pytest.raises(TierDown, match=r"403 Forbidden: RequestTimeTooSkewed: The difference is too large\.$"):
                call()
        contract.teardown_method()


def test_the_lent_memory_can_be_unmapped_after_a_store_that_failed() -> None:
    def answer(asked: bytes) -> bytes:
        return b"" if asked.startswith(b"PUT") else b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"

    contract = TestObjects()
    contract.setup_method()
    contract.tier.close()
    with listening(answer) as endpoint:
        trouble: dict[str, object] = {"endpoint": endpoint, "timeout_s": 0.3, "retries": 0}
        contract.tier = make_objects_tier(contract.options | trouble, contract.context)
        (key,) = key_chain(1)
        memory = mmap.mmap(-1, contract.context.slot_bytes)
        lent = memoryview(memory)
        gc.disable()
        try:
            with contextlib.suppress(TierDown):
                contract.tier.store([Write(key, None, bytes(256), lent, contract.context.chunk_bytes)])
            until(lambda: is_released(lent), within_s=2)
        finally:
            gc.enable()
        memory.close()
        contract.teardown_method()


def is_released(lent: memoryview) -> bool:
    """False: somebody still has its memory."""
    with contextlib.suppress(BufferError):
        lent.release()
        return True
    return False


def test_an_object_that_lies_about_its_length_costs_no_memory_and_is_not_loaded() -> None:
    contract = TestObjects()
    contract.setup_method()
    contract.tier.close()
    with listening(OK + b"Content-Length: 999999999999\r\n\r\nabc") as endpoint:
        contract.tier = make_objects_tier(
            contract.options | {"endpoint": endpoint, "timeout_s": 0.4, "retries": 0}, contract.context
        )
        with contextlib.suppress(TierDown):  # it cannot be deleted from such a server either
            assert isinstance(contract.load(key_chain(1))[0], Damaged)
        contract.teardown_method()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "bucket"),
        ({"bucket": "b", "buckets": 1}, "did you mean 'bucket'"),
        ({"bucket": "b", "endpoint": "ftp://h"}, "https"),
        *(
            ({"bucket": "b", "endpoint": endpoint}, "endpoint must begin with")
            for endpoint in ("http://", "http://[", "http://a b", "http://h:-1", "http://h:65536", "http://me:it@h")
        ),
        ({"bucket": "b", "access_key_id": "me"}, "secret_access_key_file"),
        ({"bucket": "b", "access_key_id": "me", "secret_access_key_file": "/not/there"}, "/not/there"),
        ({"bucket": "b", "prefix": "../up"}, "prefix"),
        ({"bucket": "b", "requests": 0}, "positive"),
        ({"bucket": "b", "timeout_s": 1e15}, r"<= 1000000\.0 - at `timeout_s`"),
        ({"bucket": "b", "tls_ca_file": "/not/there"}, "/not/there"),
    ],
)
def test_options_that_cannot_be_honoured_say_what_to_write(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tier_factory("s3")(options, TierContext(4096, 4096, "options"))


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'kv-remote\[s3\]'"):
        make_objects_tier({"bucket": "b"}, TierContext(4096, 4096, "options"))
