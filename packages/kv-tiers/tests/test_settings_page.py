"""docs/settings.md and the records of the settings agree: every name, every default."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from kv_core.errors import ConfigError
from kv_remote.mooncake import MooncakeConfig
from kv_remote.objects import ObjectsConfig
from kv_remote.redis import RedisConfig
from kv_remote.shared_fs import SharedFsConfig
from kv_server.directory.directory import DirectoryConfig
from kv_server.peers.tier import PeersTierConfig
from kv_tiers.config import LaneConfig, TenantConfig
from kv_tiers.options import read_options
from kv_tiers.settings import Settings, load
from kv_tiers.tiers.disk import DiskConfig
from kv_tiers.tiers.dram import DramConfig

PAGE = (Path(__file__).parents[3] / "docs" / "settings.md").read_text()
ROW = re.compile(r"^- ((?:`[\w.]+`(?:, )?)+) \((?:`([^`]*)`|required)\): .+$", re.MULTILINE)
REQUIRED: dict[str, object] = {
    "directory": "/d",
    "capacity_bytes": 1 << 30,
    "url": "redis://h",
    "bucket": "b",
    "name": "n",
    "master": "h:1",
}
RECORDS: dict[str, type[msgspec.Struct]] = {
    "Common to all:": LaneConfig,
    "`type: disk`:": DiskConfig,
    "`type: redis` and `type: valkey`:": RedisConfig,
    "`type: s3`:": ObjectsConfig,
    "`type: shared_fs`:": SharedFsConfig,
    "`type: peers` ([other hosts' servers](peers.md)):": PeersTierConfig,
    "`directory` of `type: peers` ([hundreds of hosts](peers.md#hundreds-of-hosts)):": DirectoryConfig,
    "`type: mooncake`:": MooncakeConfig,
    "`type: dram`:": DramConfig,
    "Of each:": TenantConfig,
}


def rows(text: str) -> Iterator[tuple[str, str | None]]:
    """Each name with its default. Names with the same one may share a row."""
    for names, default in ROW.findall(text):
        for name in re.findall(r"`([\w.]+)`", names):
            yield name, default or None


def test_every_setting_is_there_with_its_default() -> None:
    named = {entry.path for entry in load({}, {})[1]}
    shown = {name: default for name, default in rows(PAGE) if name in named}
    assert shown.keys() == named
    for name, default in shown.items():
        assert default is not None and load({name: yaml.safe_load(default)}, {})[0] == Settings(), name


@pytest.mark.parametrize("heading", RECORDS)
def test_every_option_of_a_list_is_there_with_its_default(heading: str) -> None:
    record = RECORDS[heading]
    table = PAGE.split(f"\n{heading}\n", 1)[1].strip().split("\n\n", 1)[0]
    shown = dict(rows(table))
    fields = {field.name: field for field in msgspec.structs.fields(record)}
    assert shown.keys() == fields.keys()
    required = {name: REQUIRED[name] for name, field in fields.items() if field.required}
    assert {name for name, default in shown.items() if default is None} == required.keys()
    plain = read_options(record, required, "here")
    for name, default in shown.items():
        given = {name: yaml.safe_load(default)} if default is not None else {}
        assert read_options(record, required | given, "here") == plain, name


@pytest.mark.parametrize("heading", [heading for heading in RECORDS if "disk" not in heading])  # its bound is its own
def test_no_tier_waits_longer_than_the_page_says_or_for_no_time(heading: str) -> None:
    record = RECORDS[heading]
    required = {field.name: REQUIRED[field.name] for field in msgspec.structs.fields(record) if field.required}
    given = read_options(record, required, "here")
    names = [field for field in record.__struct_fields__ if isinstance(getattr(given, field), float)]
    assert all(name.endswith("_s") for name in names)
    for name in names:
        for value in (float("nan"), float("inf"), -1.0, 0.0, 1e300, 1_000_001.0):
            with pytest.raises(ConfigError, match=f"here: .*{name}"):
                read_options(record, required | {name: value}, "here")
