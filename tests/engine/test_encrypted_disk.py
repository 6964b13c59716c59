"""Real vLLM over an encrypted disk: the key finds what an earlier engine stored, and no other key or none does."""

import secrets
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, WARM_HITS, Answer, started

pytestmark = pytest.mark.slow


def test_only_the_key_finds_what_was_stored_and_no_token_is_wrong(tiny_llama: str, tmp_path: Path) -> None:
    keys = [tmp_path / "key", tmp_path / "another"]
    for key in keys:
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
    with started(tiny_llama, cache=None) as plain:
        expected = plain.ask_in_turn(PROMPTS)

    def asked(**options: Any) -> tuple[list[Answer], list[int]]:
        disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB", **options}
        with started(tiny_llama, cache={"host": {"capacity_bytes": "64MiB"}, "tiers": [disk]}) as engine:
            answers = engine.ask_in_turn(PROMPTS)
            engine.assert_at_rest()
            return answers, list(engine.hits)

    answers, cold = asked(encryption_key_file=str(keys[0]))
    assert answers == expected and cold != WARM_HITS
    assert asked(encryption_key_file=str(keys[0])) == (expected, WARM_HITS)
    assert asked(encryption_key_file=str(keys[1])) == (expected, cold)
    assert asked() == (expected, cold)
    assert asked(encryption_key_file=str(keys[0])) == (expected, WARM_HITS)
