"""Real vLLM on a server that is upgraded while it answers."""

import threading
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, WARM_HITS, Answer, started
from kv_testing.upgrades import UpgradedServers
from kv_testing.wait import joined


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("upgrades", [3, pytest.param(200, marks=pytest.mark.long)])
def test_a_server_is_upgraded_under_two_engines(
    upgrades: int, tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    """Every answer is that of an engine without us, and whatever was stored before is found, in every round."""
    tmp_path.chmod(0o700)
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    servers = UpgradedServers(tmp_path, {"host": {"capacity_bytes": 64 << 20}, "tiers": [disk]})
    cache: dict[str, Any] = {"server": {"socket": str(servers.socket), "answer_s": 20}}  # a busy machine's may be late
    has_ended = threading.Event()
    failures: list[BaseException] = []

    def upgrade() -> None:
        try:
            while not has_ended.is_set():
                servers.upgrade()
        except BaseException as error:  # noqa: BLE001  # carried to the test's own thread
            failures.append(error)

    thread = threading.Thread(target=upgrade)
    try:
        with started(tiny_llama, cache=cache) as one, started(tiny_llama, cache=cache, own_process=True) as two:
            assert one.ask_in_turn(PROMPTS) == reference
            thread.start()
            while len(servers.pauses_ms()) < upgrades and not failures:
                for engine in (one, two):
                    assert engine.ask_in_turn(PROMPTS) == reference
                    assert engine.hits == WARM_HITS
                assert one.ask(PROMPTS * 2) == reference * 2
            has_ended.set()
            joined(thread)
            two.assert_at_rest()
        assert not failures
    finally:
        has_ended.set()
        if thread.ident is not None:
            joined(thread)
        servers.close()
