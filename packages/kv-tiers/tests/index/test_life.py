"""The table of a chunk's life, every state with every event."""

import itertools

import pytest
from kv_core.errors import MisuseError
from kv_tiers.index.life import Event, Life, advance

# Said a second time and differently: what each state allows.
ALLOWED = {
    Life.ABSENT: {Event.RESERVE: Life.RESERVED, Event.ADOPT: Life.RESIDENT, Event.LEND: Life.LENT},
    Life.RESERVED: {Event.COMMIT: Life.RESIDENT, Event.ABORT: Life.ABSENT, Event.FORGET: Life.ORPHANED},
    Life.RESIDENT: {Event.EVICT: Life.ABSENT, Event.FORGET: Life.LEAVING},
    Life.LEAVING: {Event.GONE: Life.ABSENT},
    Life.ORPHANED: {Event.COMMIT: Life.ABSENT, Event.ABORT: Life.ABSENT},
    Life.LENT: {Event.RETURN: Life.ABSENT, Event.REPLACE: Life.REPLACED},
    Life.REPLACED: {Event.GONE: Life.ABSENT, Event.FORGET: Life.LEAVING},
}


@pytest.mark.parametrize(("now", "event"), list(itertools.product(Life, Event)), ids=lambda value: value.name)
def test_a_state_takes_its_events_and_no_others(now: Life, event: Event) -> None:
    life = [Life.RESIDENT, now, now]
    if event in ALLOWED[now]:
        advance(life, [1, 2], event)
        assert life == [Life.RESIDENT, ALLOWED[now][event], ALLOWED[now][event]]
    else:
        with pytest.raises(MisuseError, match=f"{now.name} cannot {event.name}"):
            advance(life, [1, 2], event)
        assert life == [Life.RESIDENT, now, now]


def test_a_chunk_is_found_only_after_a_commit_or_an_adoption() -> None:
    ways_in = {event for now in Life for event, then in ALLOWED[now].items() if then is Life.RESIDENT}
    assert ways_in == {Event.COMMIT, Event.ADOPT}


def test_every_life_can_end() -> None:
    for life in Life:
        reached = {life}
        for _ in Life:
            reached |= {then for now in reached for then in ALLOWED[now].values()}
        assert Life.ABSENT in reached
