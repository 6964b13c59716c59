"""What a request says for itself on real SGLang, in `custom_params`: what is loaded, and where its pages go.

The cache is at a server, whose successor shows what is on disk.
"""

from pathlib import Path
from typing import Any

import pytest
from engines import PAGE, PROMPTS, SHARED, WARM_HITS, Answer, Engine, started
from kv_server.process import ServerProcess, launch
from kv_testing.cache_servers import report_of
from kv_testing.wait import until
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

KEPT_OUT, WRITTEN, NOT_STORED = PROMPTS[0], PROMPTS[5], SHARED[300:400]


def serve(directory: Path) -> ServerProcess:
    disk = {"type": "disk", "directory": str(directory / "kv"), "capacity_bytes": "64MiB"}
    settings = {"host": {"capacity_bytes": "32MiB"}, "tiers": [disk], "cold": {"wait_s": 10.0}}
    return launch(settings, socket=directory / "private" / "s", detached=True)


@pytest.mark.slow
@pytest.mark.parametrize("linker", [False, pytest.param(True, marks=pytest.mark.long)], ids=["storage", "linker"])
def test_nothing_but_its_tiers_is_read_or_written_for_a_request(
    tiny_llama: str, reference: list[Answer], tmp_path: Path, linker: bool
) -> None:
    def ask(engine: Engine, prompt: list[int], answer: Answer | None, **kv_tiers: Any) -> int:
        """How many tokens were found. What is on disk alone is a miss of the linker's, the first time."""
        (answered,) = engine.ask_in_turn([prompt], custom_params={"kv_tiers": kv_tiers})
        assert answer in (None, answered)
        return engine.hits[0]

    server = serve(tmp_path)
    cache = {"server": {"socket": str(server.socket)}, "cold": {"wait_s": 10.0}}
    try:
        with started(tiny_llama, cache=cache, linker=linker) as engine:
            assert ask(engine, KEPT_OUT, reference[0], tiers=["host", "nvme9"]) == 0
            assert ask(engine, WRITTEN, reference[5], tiers=["host", "disk"]) == 0
            assert ask(engine, NOT_STORED, None, store=False) == 0
            assert ask(engine, KEPT_OUT, reference[0], tiers=[]) == WARM_HITS[0]  # from the pool
            assert ask(engine, KEPT_OUT, reference[0], load=False, tiers=[]) == 0
            assert ask(engine, KEPT_OUT, reference[0], use="never", tiers=[]) == 0
            assert ask(engine, NOT_STORED, None, store=False) == 0
            server.stop()
            server = serve(tmp_path)
            engine.ask_in_turn([SHARED[700 : 700 + PAGE + 1]])
            until(lambda: report_of(server.socket).sessions, 30)  # it has joined the successor
            silent = {"store": False}
            assert ask(engine, WRITTEN, reference[5], tiers=["host"], **silent) == 0
            assert ask(engine, WRITTEN, reference[5], tiers=["host"], **silent) == 0
            found = [ask(engine, WRITTEN, reference[5], tiers=["disk"], **silent) for _ in range(2)]
            assert found[1 if linker else 0] == WARM_HITS[5]
            assert [ask(engine, KEPT_OUT, reference[0], **silent) for _ in range(2)] == [0, 0]
    finally:
        server.stop()


def hints(kind: str, **payload: Any) -> dict[str, Any]:
    """As SGLang's own classes read them."""
    action = {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload}
    decode_kv_hints_envelope(envelope := {"protocol_version": "0.1", "message_id": "m", "actions": [action]})
    return envelope


@pytest.mark.slow
def test_a_hint_in_sglangs_own_field_retains_and_demotes(tiny_llama: str) -> None:
    """In a pool of 128 pages, of which each prompt has 19 with what it generates."""
    numbers = iter(range(100))

    def prompt() -> list[int]:
        return [3 + next(numbers), *SHARED[:300]]

    cache = {"host": {"capacity_bytes": "4MiB", "policy": "lru"}}
    with started(tiny_llama, cache=cache, hicache_size=1) as engine:

        def ask(prompt: list[int], **arguments: Any) -> tuple[Answer, int]:
            (answer,) = engine.ask_in_turn([prompt], **arguments)
            return answer, engine.hits[0]

        rejected, retained = prompt(), prompt()
        answer, _ = ask(rejected, kv_hints=hints("kv.fetch"))
        answer_retained, _ = ask(retained, kv_hints=hints("kv.retain", ttl_seconds=600))
        for _ in range(7):
            ask(prompt())
        assert ask(rejected, custom_params={"kv_tiers": {"store": False}}) == (answer, 0)
        assert ask(retained) == (answer_retained, 288)
        older, demoted = prompt(), prompt()
        ask(older)
        ask(demoted, kv_hints=hints("kv.demote"))
        for _ in range(4):
            ask(prompt())
        assert ask(older, custom_params={"kv_tiers": {"store": False}})[1] == 288
        assert ask(demoted)[1] < 288


@pytest.mark.parametrize(
    ("config", "warns"),
    [
        (None, False),
        ('{"interface_v1": 1, "hicache_storage_pass_prefix_keys": true}', False),
        ('{"interface_v1": 1}', True),
    ],
)
def test_a_start_without_the_pages_before_those_that_are_written_says_what_is_lost(
    config: str | None, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generated pages have the options of the page before them."""
    from kv_sglang import storage

    said: list[str] = []  # an engine in this process has set up logging by now
    monkeypatch.setattr(storage._log, "warning", said.append)
    storage.warn_without_prefixes(config)
    assert ["hicache_storage_pass_prefix_keys" in line for line in said] == [True] * warns
