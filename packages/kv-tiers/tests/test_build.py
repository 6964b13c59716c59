"""Settings in, a cache out, and clear words where they cannot be honoured."""

import shutil
import threading
import uuid
from pathlib import Path

import msgspec
import pytest
from kv_core.errors import ConfigError, TierDown
from kv_core.testing import key_chain
from kv_tiers import HostConfig, HostPool, build_local_cache
from kv_tiers.build import build_lane, check_settings
from kv_tiers.tier import TierContext, Write


def test_settings_become_a_cache() -> None:
    cache = build_local_cache(HostConfig(capacity_bytes=50_000), group_bytes=(5000,), fingerprint="f")
    assert cache.counts().slots_total == 6  # whole pages
    other = build_local_cache(HostConfig(capacity_bytes=50_000), group_bytes=(5000,), fingerprint="f")
    assert cache.pool.name != other.pool.name
    cache.close()
    other.close()


def test_a_named_cache_finds_itself_again_by_its_fingerprint() -> None:
    config = HostConfig(capacity_bytes=50_000, name=f"test-{uuid.uuid4().hex}")
    try:
        for fingerprint, chunks in (("f", 0), ("f", 2), ("g", 0)):
            cache = build_local_cache(config, group_bytes=(5000,), fingerprint=fingerprint)
            assert cache.lookup(key_chain(2), "r").chunks == chunks
            cache.commit(cache.begin_store(key_chain(2), "w"))
            cache.close()
    finally:
        HostPool.unlink(config.name)


def test_a_capacity_below_one_chunk_names_the_smallest_that_works() -> None:
    with pytest.raises(ConfigError, match="at least 8192 bytes"):
        build_local_cache(HostConfig(capacity_bytes=8191), group_bytes=(5000,), fingerprint="f")
    build_local_cache(HostConfig(capacity_bytes=8192), group_bytes=(5000,), fingerprint="f").close()
    with pytest.raises(ConfigError, match="positive"):
        build_local_cache(HostConfig(capacity_bytes=8192), group_bytes=(0,), fingerprint="f")


@pytest.mark.parametrize(
    "given",
    [
        {"capacity_bytes": "4GiB"},
        {"capacity_bytes": 0},
        {"capacity_bytes": 1.5},
        {"capacity_bytes": 1, "capacity": 2},
        {"capacity_bytes": 1, "policy": 3},
        {"capacity_bytes": 1, "name": None},
    ],
)
def test_settings_are_strict(given: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(given, HostConfig)


def test_what_a_tier_says_names_it_as_the_settings_do(tmp_path: Path) -> None:
    """From its first line on, which it writes while it is made."""
    directory = tmp_path / "gone"
    options = {"type": "disk", "name": "nvme", "directory": str(directory), "capacity_bytes": 1 << 20}
    context = TierContext(4096, 4096, "f")
    lane, _ = build_lane(options, context, where="tiers[0]")
    shutil.rmtree(directory)
    (key,) = key_chain(1)
    with pytest.raises(TierDown, match="disk tier nvme at"):
        lane.tier.store([Write(key, None, bytes(4096), memoryview(bytearray(4096)), 4096)])
    lane.close()


def test_a_cache_that_cannot_be_made_leaves_its_pool_free() -> None:
    config = HostConfig(capacity_bytes=50_000, name=f"test-{uuid.uuid4().hex}", lease_s=0)
    try:
        for _ in range(2):
            with pytest.raises(ConfigError, match="lease_s"):
                build_local_cache(config, group_bytes=(5000,), fingerprint="f")
    finally:
        HostPool.unlink(config.name)


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ([{"path": "/kv"}], r"tiers\[0\]: say which type"),
        ([{"type": "dusk"}], "did you mean 'disk'"),
        ([{"type": "dram", "capacity_byte": "1MiB"}], "did you mean 'capacity_bytes'"),
        ([{"type": "dram", "capacity_bytes": "1MiB", "write": "sometimes"}], "sometimes"),
        ([{"type": "dram", "capacity_bytes": "1MiB", "policy": "lur"}], "did you mean 'lru'"),
        ([{"type": "dram", "capacity_bytes": "1MiB", "threads": 0}], ">= 1"),
        ([{"type": "dram", "capacity_bytes": "1MiB", "threads": 257}], "<= 256"),
        ([{"type": "dram", "capacity_bytes": 1}], "holds no chunk"),
        ([{"type": "dram", "capacity_bytes": "1MiB"}] * 2, "two tiers are called 'dram'"),
        ([{"type": "dram", "capacity_bytes": "1MiB", "name": "host"}], "called 'host', as the pool is"),
    ],
)
def test_a_tier_that_cannot_be_made_is_an_error_that_says_what_to_write(
    tiers: list[dict[str, object]], said: str
) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=said):
        check_settings(HostConfig(capacity_bytes=50_000), tiers)
    with pytest.raises(ConfigError, match=said):
        build_local_cache(HostConfig(capacity_bytes=50_000), group_bytes=(5000,), fingerprint="f", tiers=tiers)
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ({"type": "disk", "directory": [], "capacity_bytes": "1MiB"}, "one directory"),
        ({"type": "disk", "directory": "kv", "capacity_bytes": "1KiB"}, "no room"),
        ({"type": "disk", "directory": "kv", "capacity_bytes": "1MiB", "policy": "lur"}, "did you mean 'lru'"),
        ({"type": "disk", "directory": "kv"}, "capacity_bytes"),
        ({"type": "disk", "directory": "kv", "capacity_bytes": "900000TiB"}, "whose file system has"),
        ({"type": "disk", "directory": ["kv", "vk"], "capacity_bytes": "900000TiB"}, "whose file system has"),
        ({"type": "disk", "directory": "/proc/kv", "capacity_bytes": "1MiB"}, "/proc/kv cannot be"),
        ({"type": "redis", "url": "http://cache"}, "redis://"),
        ({"type": "redis", "url": "redis://[::1"}, "url: Invalid IPv6"),
        ({"type": "valkey", "url": "redis://cache", "password_env": "KV_NO_SUCH_VARIABLE"}, "KV_NO_SUCH_VARIABLE"),
        ({"type": "s3", "bucket": "a/b"}, "bucket"),
        ({"type": "s3", "bucket": "b", "tls_ca_file": "/nowhere/ca.pem"}, "nowhere|No such file"),
        ({"type": "shared_fs", "directory": ""}, "directory is empty"),
        ({"type": "peers", "hosts": ["h:1"], "unprotected": True, "write": "back"}, "leave out write"),
        ({"type": "peers", "hosts": ["h:1"], "unprotected": True, "stores": True, "codec": "zstd"}, "leave out codec"),
    ],
)
def test_wrong_options_are_found_and_leave_nothing(
    tier: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=said):
        check_settings(HostConfig(capacity_bytes=50_000), [tier])
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads


def test_two_tiers_of_one_directory_are_refused(tmp_path: Path) -> None:
    """The second could not have it once chunks come."""
    disk = {"type": "disk", "directory": str(tmp_path), "capacity_bytes": "1MiB"}
    another = {"type": "disk", "directory": [f"{tmp_path}/other", f"{tmp_path}/."], "name": "another"}
    for tiers in ([disk, disk | {"name": "b"}], [disk, another | {"capacity_bytes": "1MiB"}]):
        with pytest.raises(ConfigError, match=r"tiers\[1\]: .* is tiers\[0\]'s"):
            check_settings(HostConfig(capacity_bytes=50_000), tiers)


def test_right_options_are_checked_without_making_or_asking_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens at these addresses, and the directories are not there."""
    monkeypatch.chdir(tmp_path)
    tiers: list[dict[str, object]] = [
        {"type": "dram", "capacity_bytes": "1MiB"},
        {"type": "disk", "directory": "kv", "capacity_bytes": "1MiB", "threads": 4},
        {"type": "redis", "url": "redis://127.0.0.1:9"},
        {"type": "s3", "bucket": "b", "endpoint": "http://127.0.0.1:9"},
        {"type": "shared_fs", "directory": "elsewhere", "write": "back"},
    ]
    threads = threading.active_count()
    check_settings(HostConfig(capacity_bytes=50_000), tiers)
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("host", "said"),
    [(HostConfig(capacity_bytes=1, policy="lur"), "lru"), (HostConfig(capacity_bytes=1, lease_s=0), "lease_s")],
)
def test_wrong_settings_of_the_pool_are_found_as_early(host: HostConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_settings(host, [])


def test_tiers_are_made_in_their_order_and_under_their_names(tmp_path: Path) -> None:
    tiers: list[dict[str, object]] = [
        {"type": "dram", "capacity_bytes": "1MiB", "write": "back", "threads": 1},
        {"type": "disk", "name": "nvme", "directory": str(tmp_path / "kv"), "capacity_bytes": "4MiB"},
    ]
    cache = build_local_cache(HostConfig(capacity_bytes=50_000), group_bytes=(5000,), fingerprint="f", tiers=tiers)
    assert [state.name for state in cache.lower.states()] == ["dram", "nvme"]
    cache.close()
    assert not (tmp_path / "kv").stat().st_mode & 0o077
