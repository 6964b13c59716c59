"""How much a worker may be storing while its engine goes on: by itself enough for everything that a step computes."""

import uuid
from typing import Any

import pytest
from kv_connect.engine import Engine, EngineFacts
from kv_connect.neighbours import StoredFormat
from kv_connect.nodes import ALONE
from kv_connect.open_cache import Format
from kv_core.shape import GroupShape
from kv_tiers.settings import load

FACTS = EngineFacts(256, (GroupShape(16), GroupShape(16)), 1, "float32", "", ("canonical",) * 2, ("paged",) * 2)
CHUNKS = Format((4096, 8192), "f")


class Copier:
    """Of an engine whose memory is of no interest here."""

    is_queued = False
    stores_behind = False

    def attach(self, *_: Any) -> None: ...

    def detach(self, *_: Any) -> None: ...


@pytest.mark.parametrize(("chosen", "limit"), [(None, (2 << 30) + 16 * 12288), ("1MiB", 1 << 20), (0, 0)])
def test_what_nobody_chose_is_a_steps_kv_and_two_gibibytes_of_earlier_ones(chosen: object, limit: int) -> None:
    given = {"stores_in_flight_bytes": chosen} if chosen is not None else {}
    settings, _ = load({"host": {"capacity_bytes": "1MiB"}, **given}, {})
    engine = Engine(uuid.uuid4().hex)
    stored = StoredFormat("vllm", "m", "canonical", CHUNKS.fingerprint)
    copiers: Any = [Copier(), Copier()]
    engine.bind_worker(settings, FACTS, CHUNKS, stored, copiers, share=ALONE, in_process=True)
    assert engine.off == ""
    half = engine.start_worker(step_tokens=15 * 256 + 1)
    assert half.stores._max_in_flight_bytes == limit
    engine.release("WORKER")
