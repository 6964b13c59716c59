"""Options are read strictly, and every refusal says what to write instead."""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from kv_core import plugins
from kv_core.errors import ConfigError, did_you_mean
from kv_tiers.build import TIERS, tier_factory
from kv_tiers.options import byte_count, read_options


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: str
    capacity_bytes: int = 0
    wait_s: float = 1.0
    mode: Literal["single", "cluster"] = "single"

    def __post_init__(self) -> None:
        if self.wait_s < 0:
            raise ValueError("wait_s is not negative")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("17B", 17),
        ("4MiB", 4 << 20),
        (" 1.5 GiB ", 3 << 29),
        ("2GB", 2 * 10**9),
        ("3kB", 3000),
        ("0.25KiB", 256),
        ("1TiB", 1 << 40),
        (4096, 4096),
    ],
)
def test_a_number_of_bytes_may_have_a_unit(text: int | str, nbytes: int) -> None:
    assert byte_count(text, "here") == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "4 mib", "4MB ib", "-1", "1e-9", "0.3B", "4,5GiB", "٤MiB", "1" * 30])
def test_what_is_no_number_of_bytes_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\].*4MiB|whole number"):
        byte_count(text, "tiers[0]")


def test_options_become_settings() -> None:
    read = read_options(Settings, {"path": "/x", "capacity_bytes": "1GiB", "wait_s": 3}, "here")
    assert read == Settings(path="/x", capacity_bytes=1 << 30, wait_s=3.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"path": "/x", "capacity": 1},
            "there is no option 'capacity'; did you mean 'capacity_bytes'",
        ),
        ({"path": "/x", "zzz": 1}, "there are capacity_bytes, mode, path, wait_s"),
        ({"path": "/x", "mode": "sharded"}, "here: .*'sharded' - at `mode`; write one of single, cluster"),
        ({"path": "/x", "mode": 3}, "at `mode`; write one of single, cluster"),
        ({}, "path"),
        ({"path": 3}, r"here: Expected `str`, got `int` - at `path`"),
        ({"path": "/x", "capacity_bytes": "many"}, "here: capacity_bytes is 'many'"),
        ({"path": "/x", "capacity_bytes": True}, "capacity_bytes"),
        ({"path": "/x", "wait_s": -1}, "here: wait_s is not negative"),
        ({"path": "/x", "wait_s": float("inf")}, "here: wait_s is inf; write a finite number"),
        ({"path": "/x", "wait_s": float("nan")}, "here: wait_s is nan; write a finite number"),
    ],
)
def test_what_cannot_be_honoured_names_the_option(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_options(Settings, options, "here")


def test_the_nearest_name_or_all() -> None:
    assert did_you_mean("reddis", ["redis", "disk"]) == "did you mean 'redis'?"
    assert did_you_mean("x", ["b", "a"]) == "there are a, b"


def test_a_type_offered_twice_or_that_cannot_be_imported_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kv_module_that_raises.py").write_text("raise RuntimeError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    offered = EntryPoints(
        EntryPoint(name, value, TIERS)
        for name, value in [
            ("twice", "one:make"),
            ("twice", "another:make"),
            ("broken", "no_such_module_at_all:make"),
            ("raising", "kv_module_that_raises:make"),
            ("lacking", "kv_tiers.tier:make_nothing"),
            ("number", "kv_tiers.chunk_header:VERSION"),
        ]
    )
    monkeypatch.setattr(plugins, "entry_points", lambda group: offered)
    for name, says in (
        ("twice", "several packages.*another:make, one:make"),
        ("broken", "no_such_module_at_all"),
        ("raising", "kv_module_that_raises:make: no such device"),
        ("lacking", "make_nothing"),
        ("number", "cannot be called"),
        ("brokn", "did you mean 'broken'"),
    ):
        with pytest.raises(ConfigError, match=says):
            tier_factory(name)
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints())
    with pytest.raises(
        ConfigError, match=r"'broken'; no installed package has any in its entry points kv_tiers\.tiers"
    ):
        tier_factory("broken")
    with pytest.raises(ConfigError, match=r"the .*'redis' is not installed: pip install kv-remote"):
        tier_factory("redis")
