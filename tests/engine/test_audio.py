"""Prompts with sounds on the real engine: a sound is part of the key from its place in the prompt on, no earlier."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Answer, Engine, started
from models import BY_NAME

TEXT = [3 + (7919 * i) % 1900 for i in range(700)]
RATE = 16_000
SOUND = 2047
"""The token that stands for a sound; the engine puts as many in its place as the sound is long, here 50."""


def sound(pitch: int, seconds: int = 2) -> np.ndarray:
    """A tone that wavers. Of two pitches, no second is alike."""
    time = np.arange(seconds * RATE) / RATE
    return np.asarray(np.sin(2 * np.pi * pitch * time * (1 + 0.1 * np.sin(5 * time))), dtype=np.float32)


Question = tuple[tuple[int | tuple[int, int], ...], int]
"""Places in the text with a sound each, by pitch; and how long the text is."""

QUESTIONS: dict[Question, tuple[int, int]] = {
    # what is found of it when it is asked first, after those above it; and once all have been asked
    (((300, 200),), 700): (0, 512),
    (((300, 900),), 700): (256, 512),  # the text in front of the sound, and nothing from its chunk on
    ((), 700): (256, 512),
    (((300, 200),), 600): (512, 512),
    (((300, 200), (500, 900)), 700): (512, 768),  # the second sound begins in the third chunk
    (((300, 200), (500, 200)), 700): (512, 768),
    (((300, 900), (500, 200)), 700): (512, 768),
    (((320, 200),), 700): (256, 512),  # the same sound, at another place in the second chunk
    (((240, 200),), 700): (0, 512),  # a sound across the end of the first chunk
    (((240, 900),), 700): (0, 512),
}


def ask(engine: Engine, question: Any) -> tuple[Answer, int]:
    """The answer, and how many tokens were found."""
    from vllm import SamplingParams

    places, length = question
    tokens, begin = [], 0
    for place, _ in places:
        tokens += [*TEXT[begin:place], SOUND]
        begin = place
    prompt: dict[str, Any] = {"prompt_token_ids": tokens + TEXT[begin:length]}
    if places:
        prompt["multi_modal_data"] = {"audio": [sound(pitch) for _, pitch in places]}
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    (output,) = engine.llm.generate([prompt], sampling, use_tqdm=False)
    assert len(output.prompt_token_ids) == length + 50 * len(places)
    return tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0


@pytest.mark.slow
def test_a_sound_is_part_of_the_prefix_from_its_place_on(tmp_path: Path) -> None:
    row = BY_NAME["Qwen2-Audio"]
    model = str(row.write(tmp_path / "model"))
    (tmp_path / "cache").mkdir()
    tier = {"type": "disk", "directory": str(tmp_path / "cache"), "capacity_bytes": "64MiB"}
    cache = {"host": {"capacity_bytes": "64MiB"}, "tiers": [tier], "cold": {"wait_s": 20}}
    with started(model, cache=None, **row.arguments) as plain:
        expected = [ask(plain, question)[0] for question in QUESTIONS]
    assert len(set(expected)) == len(expected), "sounds and places must show in the answers"
    first_hits, later_hits = zip(*QUESTIONS.values(), strict=True)
    with started(model, cache=cache, **row.arguments) as engine:
        assert [ask(engine, question) for question in QUESTIONS] == list(zip(expected, first_hits, strict=True))
        assert [ask(engine, question) for question in QUESTIONS] == list(zip(expected, later_hits, strict=True))
        engine.assert_at_rest()
        engine.inside("kv_corrupt")
        assert [ask(engine, question)[0] for question in QUESTIONS] != expected
    with started(model, cache=cache, **row.arguments) as restarted:
        assert [ask(restarted, question) for question in QUESTIONS] == list(zip(expected, later_hits, strict=True))
        restarted.assert_at_rest()
