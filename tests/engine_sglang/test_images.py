"""Prompts with pictures on the real engine: what SGLang puts in the place of a picture's tokens is no name for its KV.

Those numbers are made of a hash, or of what a client says that it is (`mm_hashes`); two pictures that have them in
common must not have KV in common.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from engines import PAGE, Answer
from models import BY_NAME
from nursery import Nursery, Ran

BEFORE, AFTER = (" ".join(f"w{300 + (7919 * i) % 700}" for i in range(first, first + 100)) for first in (0, 100))
"""A hundred tokens each."""
PROMPT = f"{BEFORE} <|vision_start|><|image_pad|><|vision_end|> {AFTER}"
PICTURES = (1, 2)
TEXT_ALONE = 100 // PAGE * PAGE
"""Tokens of the whole pages before a picture. They may be stored."""
CALLED_THE_SAME = {"mm_hashes": ["0a" * 8]}
COLLIDING = {"give_all_media_the_same_numbers": []}
RULE_LEFT_OUT = {"name_media_by_their_numbers": []}


def about(*pictures: int, **more: Any) -> dict[str, Any]:
    """A step in which the same text is asked about each of these."""
    return {"ask_about": [{"prompt": PROMPT, "image": picture, **more} for picture in pictures]}


@dataclass
class World:
    """Engines of one model, with a disk of ours. plain: the answers about `PICTURES` of one without us."""

    engines: Nursery
    model: str
    cache: dict[str, Any]
    plain: list[Answer]

    def run(self, *steps: dict[str, Any], cached: bool = True, **faults: list[str]) -> Ran:
        ran = self.engines.run(
            self.model,
            [*steps, {"detach": None}] if cached else steps,
            cache=self.cache if cached else None,
            faults=faults,
            skip_tokenizer_init=False,
        )
        assert not ran.failed, f"{ran.error}: {ran.log[-4000:]}"
        return ran


@pytest.fixture(scope="module")
def without_us(engines: Nursery, tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(engines, str(BY_NAME["Qwen2-VL"].write(tmp_path_factory.mktemp("model"))), {}, [])
    made.plain = made.run(about(*PICTURES), cached=False).answered(0)
    assert made.plain[0] != made.plain[1]
    return made


@pytest.fixture
def world(without_us: World, tmp_path: Path) -> World:
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    cache = {"host": {"capacity_bytes": "32MiB"}, "tiers": [disk], "cold": {"wait_s": 10.0}}
    return replace(without_us, cache=cache)


@pytest.mark.slow
def test_two_pictures_with_the_same_numbers_each_have_the_answer_of_an_engine_without_us(world: World) -> None:
    """Cold, warm, after a restart from disk, and with what a client says that their hash is. Pages before a picture
    are found."""
    first = world.run(about(*PICTURES), about(*PICTURES), **COLLIDING)
    assert (first.answered(0), first.hits(0)) == (world.plain, [0, TEXT_ALONE])
    assert (first.answered(1), first.hits(1)) == (world.plain, [TEXT_ALONE] * 2)
    again = world.run(about(*reversed(PICTURES)), **COLLIDING)
    assert (again.answered(0), again.hits(0)) == (world.plain[::-1], [TEXT_ALONE] * 2)
    # An engine takes a client's word for a picture's embeddings while it lives, so each of these is asked about one.
    for picture, answer in zip(PICTURES, world.plain, strict=True):
        called = world.run(about(picture, **CALLED_THE_SAME))
        assert (called.answered(0), called.hits(0)) == ([answer], [TEXT_ALONE])


@pytest.mark.slow
def test_the_control_without_our_rule_answers_about_another_picture(world: World) -> None:
    """Without this the comparison above could not fail."""
    first = world.run(about(*PICTURES), **COLLIDING, **RULE_LEFT_OUT)
    assert first.hits(0)[1] > TEXT_ALONE
    assert first.answered(0)[0] == world.plain[0]
    assert first.answered(0)[1] != world.plain[1]
    again = world.run(about(PICTURES[1]), **COLLIDING, **RULE_LEFT_OUT)
    assert again.hits(0)[0] > TEXT_ALONE
    assert again.answered(0) == [world.plain[0]], "the first picture's, from disk"
    for picture in PICTURES:
        called = world.run(about(picture, **CALLED_THE_SAME), **RULE_LEFT_OUT)
        assert called.answered(0) == [world.plain[0]]
