"""What the version before this one wrote (commit 835c71b, chunk headers and disk directories of version 1) is a miss
that is said, and stays as it is. The files beside this one are its own."""

import base64
import json
import shutil
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import redis
from kv_core.outcome import Absent, Damaged, Loaded, Stored
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_remote.redis import make_redis_tier
from kv_testing.servers import ValkeyServer
from kv_tiers import chunk_header
from kv_tiers.testing.tier_contract import aligned_pages
from kv_tiers.tier import Read, Tier, TierContext, Write
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for

WRITTEN = Path(__file__).with_name("written_by_v1")
NAMESPACE = "f819a013ce2b560a9a32046689645921"
CONTEXT = TierContext(1000, 4096, "written by version 1")
KEYS = key_chain(3)


def assert_missed_and_of_use(tier: Tier) -> None:
    form = chunk_header.format_id(CONTEXT.fingerprint)
    pages = aligned_pages(4096)
    read = Read(KEYS[0], bytearray(chunk_header.HEADER_BYTES), aligned_pages(4096), 1000)
    assert tier.holds(KEYS) == [False] * 3
    assert tier.load([read]) == [Absent()]
    header = chunk_header.pack_header(KEYS[0], None, pages[:1000], form)
    assert tier.store([Write(KEYS[0], None, header, pages, 1000)]) == [Stored()]
    assert tier.load([read]) == [Loaded(1000)]
    tier.clear()


def opened(root: Path) -> DiskTier:
    return DiskTier(DiskConfig(directory=str(root), capacity_bytes=bytes_for(CONTEXT, 3)), CONTEXT, LruPolicy())


def test_a_disks_directory_is_left_alone_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(WRITTEN / "disk", tmp_path / "disk")
    with closing(opened(tmp_path / "disk")) as tier:
        assert_missed_and_of_use(tier)
    assert "chunks that another release stored take" in caplog.text
    assert f"this one neither reads nor removes them: remove {NAMESPACE}" in caplog.text
    for file in (WRITTEN / "disk" / NAMESPACE).iterdir():
        assert (tmp_path / "disk" / NAMESPACE / file.name).read_bytes() == file.read_bytes()


def test_a_directory_of_it_in_the_place_of_ours_is_never_misread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody puts it there; if somebody did, it is emptied, and that is said."""
    shutil.copytree(WRITTEN / "disk" / NAMESPACE, tmp_path / CONTEXT.namespace)
    (tmp_path / CONTEXT.namespace).chmod(0o700)
    for file in (tmp_path / CONTEXT.namespace).iterdir():
        file.chmod(0o600)
    with closing(opened(tmp_path)) as tier:
        assert "starts empty" in caplog.text
        assert_missed_and_of_use(tier)


def test_values_in_redis_are_not_found_and_not_touched() -> None:
    values = {name: base64.b64decode(value) for name, value in json.loads((WRITTEN / "redis.json").read_text()).items()}
    server = ValkeyServer()
    with ExitStack() as ends:
        ends.callback(server.stop)
        client = ends.enter_context(closing(redis.Redis(port=server.port)))
        client.mset(values)
        with closing(make_redis_tier({"url": f"redis://127.0.0.1:{server.port}"}, CONTEXT)) as tier:
            assert_missed_and_of_use(tier)
            # Under our own names they are damage, whatever their length says.
            read = Read(KEYS[0], bytearray(chunk_header.HEADER_BYTES), aligned_pages(4096), 1000)
            client.set(tier._head(KEYS[0]), next(iter(values.values())))  # type: ignore[attr-defined]
            (outcome,) = tier.load([read])
            assert isinstance(outcome, Damaged) or isinstance(chunk_header.read_header(read.header), Damaged)
        assert {name: client.get(name) for name in values} == values


@pytest.mark.parametrize("key", range(3))
def test_its_headers_are_refused_by_their_version(key: int) -> None:
    values = [base64.b64decode(value) for value in json.loads((WRITTEN / "redis.json").read_text()).values()]
    found = chunk_header.read_header(values[key][: chunk_header.HEADER_BYTES])
    assert isinstance(found, Damaged)
    assert found.reason == "a chunk of version 1; this release reads version 2"
