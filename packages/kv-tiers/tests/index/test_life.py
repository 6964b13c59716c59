"""The table of a chunk's life, every state with every event."""

import itertools

import pytest
from kv_core.errors import MisuseError
from kv_tiers.index.life import Life, LifeEvent, advance

# Said a second time and differently: what each state allows.
ALLOWED = {
    Life.ABSENT: {LifeEvent.RESERVE: Life.RESERVED, LifeEvent.ADOPT: Life.RESIDENT, LifeEvent.TAKE_SPARE: Life.SPARE},
    Life.RESERVED: {LifeEvent.COMMIT: Life.RESIDENT, LifeEvent.ABORT: Life.ABSENT, LifeEvent.FORGET: Life.ORPHANED},
    Life.RESIDENT: {LifeEvent.EVICT: Life.ABSENT, LifeEvent.FORGET: Life.LEAVING},
    Life.LEAVING: {LifeEvent.GONE: Life.ABSENT},
    Life.ORPHANED: {LifeEvent.COMMIT: Life.ABSENT, LifeEvent.ABORT: Life.ABSENT},
    Life.SPARE: {LifeEvent.FREE_SPARE: Life.ABSENT, LifeEvent.REPLACE: Life.REPLACED},
    Life.REPLACED: {LifeEvent.GONE: Life.ABSENT, LifeEvent.FORGET: Life.LEAVING},
}


@pytest.mark.parametrize(("now", "event"), list(itertools.product(Life, LifeEvent)), ids=lambda value: value.name)
def test_a_state_takes_its_events_and_no_others(now: Life, event: LifeEvent) -> None:
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
    assert ways_in == {LifeEvent.COMMIT, LifeEvent.ADOPT}


def test_every_life_can_end() -> None:
    for life in Life:
        reached = {life}
        for _ in Life:
            reached |= {then for now in reached for then in ALLOWED[now].values()}
        assert Life.ABSENT in reached
