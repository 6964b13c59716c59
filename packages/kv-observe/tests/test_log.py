"""An operator gets one line for what matters, and not a thousand."""

import json
import logging
from typing import Any

import pytest
from kv_core.clock import HandClock
from kv_core.testing import key_chain
from kv_observe.history import History
from kv_observe.log import LogLines, log_json, log_text
from kv_testing.tower import Tower
from kv_tiers.events import events
from kv_tiers.events.bus import EventBus


class Lines:
    """A bus with a log on it, and what was said."""

    def __init__(self) -> None:
        self.clock = HandClock(1000.0)
        self.bus = EventBus(interval_s=0.001, clock=self.clock)
        self.said: list[tuple[int, str, dict[str, Any]]] = []
        self.bus.subscribe(LogLines(self.bus, lambda *said: self.said.append(said), every_s=60.0, refused_for_s=10.0))
        self.source = self.bus.source("c")

    def tell(self, event: events.Event) -> list[str]:
        """What is said because of it."""
        before = len(self.said)
        self.source.publish(event)
        assert self.bus.flush()
        return [text for _, text, _ in self.said[before:]]


def refusal() -> events.StoreBegun:
    keys = key_chain(2)
    return events.StoreBegun("w", 1, keys, (), keys, "no room for 2 of 2 chunks")


def test_a_tier_that_fails_and_one_that_is_back_are_always_told() -> None:
    lines = Lines()
    for _ in range(3):
        assert lines.tell(events.TierHealth("disk", "UP", "DOWN", "no disk")) == ["cache c: tier disk is down: no disk"]
        assert lines.tell(events.TierHealth("disk", "DOWN", "UP", "")) == ["cache c: tier disk is back"]
    assert [level for level, _, _ in lines.said[:2]] == [logging.WARNING] * 2  # commands show no less
    lines.bus.close()


def test_damage_is_told_once_a_minute_with_what_was_kept_back() -> None:
    lines = Lines()
    damaged = events.DamageFound("disk", key_chain(3), "a wrong checksum")
    assert lines.tell(damaged) == ["cache c: 3 damaged chunks were discarded in disk: a wrong checksum"]
    for _ in range(100):
        assert lines.tell(damaged) == []
    assert len(lines.tell(events.DamageFound("redis", key_chain(1), "x"))) == 1  # another tier's is another matter
    lines.clock.advance(61)
    (text,) = lines.tell(damaged)
    assert text.endswith("(100 more like this before)")
    lines.tell(damaged)
    lines.bus.close()
    assert lines.said[-1][1] == "1 more of kind damaged of cache c in disk"


def test_stores_that_find_no_room_are_told_when_it_lasts() -> None:
    lines = Lines()
    assert lines.tell(refusal()) == []
    lines.clock.advance(9)
    assert lines.tell(refusal()) == []
    lines.clock.advance(2)
    assert lines.tell(refusal()) == ["cache c: stores have found no room for 11 s: no room for 2 of 2 chunks"]
    keys = key_chain(1)
    assert lines.tell(events.StoreBegun("w", 2, keys, keys, (), "")) == []  # one finds room again
    lines.clock.advance(100)
    assert lines.tell(refusal()) == []
    lines.bus.close()


def test_json_is_one_object_a_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    clock = HandClock()
    bus = EventBus(interval_s=0.001, clock=clock)
    bus.subscribe(LogLines(bus, log_json))
    bus.source("c").publish(events.TierHealth("disk", "UP", "STUCK", "a call has not come back"))
    bus.close()
    told = json.loads(capsys.readouterr().err)
    assert (told["level"], told["event"], told["cache"], told["tier"]) == ("WARNING", "tier_health", "c", "disk")
    assert (told["was"], told["now"]) == ("UP", "STUCK") and told["time"] > 1.7e9


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_damaged_chunk_and_a_tier_that_is_down_are_one_line_each(
    is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bus = EventBus(interval_s=0.001)
    tower = Tower("through", events=bus.source())
    bus.subscribe(LogLines(bus, log_text) if is_logged else History(10, 0.0))
    keys = key_chain(2)
    tower.store_below(keys)
    with caplog.at_level(logging.INFO):
        tower.tiers[0].fault = "flip"
        tower.fetch(keys[:1])
        assert bus.flush()
        (damaged,) = caplog.messages
        assert "discarded" in damaged and "checksum" in damaged and (keys[0].hex() in damaged) != is_logged
        caplog.clear()
        tower.tiers[0].fault = "down"
        tower.store(key_chain(2, branch="more"))
        tower.lanes[0].step()
        assert bus.flush()
        (down,) = caplog.messages
        assert "tier0 is down: told to" in down
    tower.tiers[0].fault = ""
    tower.close()
    bus.close()


def test_text_goes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kv_observe.log"):
        log_text(logging.WARNING, "100% of it", {})
        log_text(logging.WARNING, "tier peers is down: a peer says\nwhat it likes", {})
    assert caplog.messages == ["100% of it", "tier peers is down: a peer says\\nwhat it likes"]


def test_a_tier_that_does_nothing_but_fail_and_come_back_is_told_once_a_minute() -> None:
    lines = Lines()
    down, up = events.TierHealth("disk", "UP", "DOWN", "no disk"), events.TierHealth("disk", "DOWN", "UP", "")
    said = [text for _ in range(500) for event in (down, up) for text in lines.tell(event)]
    assert len(said) == 10
    assert lines.tell(events.TierHealth("redis", "UP", "DOWN", "x"))  # another tier's is another matter
    lines.clock.advance(60)
    (text,) = lines.tell(down)
    assert text == "cache c: tier disk is down: no disk (990 changes were suppressed before)"
    lines.bus.close()
