"""Somebody else's subscriber, by its entry point: it gets the events of a cache that settings made, and what is wrong
with it is said at start."""

import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from kv_core import plugins
from kv_core.errors import ConfigError
from kv_core.testing import key_chain
from kv_observe.build import build_bus
from kv_testing.service_contract import CHUNK_BYTES
from kv_tiers.build import build_local_cache
from kv_tiers.config import HostConfig
from kv_tiers.events.bus import EventBus, Occurred, Subscriber
from kv_tiers.events.events import Committed
from kv_tiers.settings import load

HEARD: list[tuple[str, Occurred]] = []
CLOSED: list[str] = []


class Mine(Subscriber):
    def __init__(self, label: str) -> None:
        self._label = label

    def take(self, occurred: Occurred) -> None:
        HEARD.append((self._label, occurred))
        if self._label == "raises":
            raise ValueError("a bug of somebody else")

    def close(self) -> None:
        CLOSED.append(self._label)


def make_mine(parameters: Mapping[str, object], bus: EventBus) -> Subscriber:
    if set(parameters) - {"label"}:
        raise ConfigError(f"subscriber mine takes a label, not {sorted(parameters)}")
    return Mine(str(parameters.get("label", "none")))


def make_nothing(parameters: Mapping[str, object], bus: EventBus) -> object:
    return "not a subscriber"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "somebody_else", sys.modules[__name__])
    offered = EntryPoints(
        EntryPoint(name, f"somebody_else:make_{name}", "kv_tiers.subscribers") for name in ("mine", "nothing")
    )
    monkeypatch.setattr(plugins, "entry_points", lambda group: offered.select(group=group))
    HEARD.clear()
    CLOSED.clear()


def test_settings_name_them_and_they_hear_of_what_the_cache_does() -> None:
    wanted = ["mine", {"name": "mine", "label": "raises"}, {"name": "mine", "label": "last"}]
    settings, _ = load({"observe": {"subscribers": wanted}}, {})
    bus, _ = build_bus(settings.observe)
    source = bus.source("c", (CHUNK_BYTES,))
    config = HostConfig(capacity_bytes=1 << 20)
    cache = build_local_cache(config, group_bytes=(CHUNK_BYTES,), fingerprint="f", events=source)
    keys = key_chain(3)
    cache.commit(cache.begin_store(keys, "a"))
    cache.end("a")
    assert bus.flush()
    for label in ("none", "raises", "last"):
        stored = [one for who, one in HEARD if who == label and isinstance(one.event, Committed)]
        assert [list(one.event.keys) for one in stored] == [keys]  # type: ignore[attr-defined]
        assert stored[0].source.name == "c"
    assert bus.failures > 0
    cache.close()
    bus.close()
    assert CLOSED == ["none", "raises", "last"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("mien", "there is no subscriber 'mien'; did you mean 'mine'"),
        ({"label": "x"}, "say which"),
        ({"name": "mine", "lable": "x"}, "takes a label, not"),
        ("nothing", "made a str, which is not a subscriber"),
    ],
)
def test_what_cannot_be_used_is_said_at_start(wanted: object, said: str) -> None:
    settings, _ = load({"observe": {"subscribers": [wanted]}}, {})
    with pytest.raises(ConfigError, match=said):
        build_bus(settings.observe)
