"""What one engine can show by itself, whichever of SGLang's surfaces we are behind."""

from typing import ClassVar

import pytest
import torch
from engines import COLD_HITS, PROMPTS, WARM_HITS, Answer, Engine, corrupt
from kv_testing.tiny import TinyLlama


class OneEngine:
    """In this order, as each test leaves pages for the next. pool: the name of `engine`'s host pool."""

    pool: ClassVar[str]

    def test_cold_then_warm_answers_are_equal_and_hits_are_whole_pages(
        self, engine: Engine, reference: list[Answer]
    ) -> None:
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == COLD_HITS
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == WARM_HITS

    def test_all_prompts_at_once(self, engine: Engine, reference: list[Answer]) -> None:
        engine.flush()
        assert engine.ask(PROMPTS) == reference
        assert sum(engine.hits) > 0

    def test_the_control_that_halves_what_is_kept_changes_the_answers(
        self, engine: Engine, reference: list[Answer]
    ) -> None:
        """Without this the comparisons above could not fail."""
        corrupt(self.pool)
        answers = engine.ask_in_turn(PROMPTS)
        assert engine.hits == WARM_HITS
        for number in (0, 1, 2, 3, 5):
            assert answers[number] != reference[number]

    def test_weights_updated_in_place_find_nothing_of_before(
        self, engine: Engine, reference: list[Answer], tiny_llama: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """What was computed with others is never found; what is kept from here on is, by this engine."""
        other = str(TinyLlama(seed=1).write(tmp_path_factory.mktemp("other")))
        engine.flush()
        engine.update_weights(other)
        answers = engine.ask_in_turn(PROMPTS)
        assert engine.hits == COLD_HITS
        assert all(answer != before for answer, before in zip(answers, reference, strict=True))
        assert engine.ask_in_turn(PROMPTS) == answers
        assert engine.hits == WARM_HITS

    def test_what_the_engine_holds_of_before_is_not_stored_under_a_new_name(
        self, engine: Engine, reference: list[Answer], tiny_llama: str
    ) -> None:
        """SGLang may be told to keep its own caches, which are then of other weights than it has."""
        engine.flush()
        engine.ask(PROMPTS[:1])
        engine.update_weights(tiny_llama, flush_cache=False)
        engine.ask(PROMPTS[:2])
        assert engine.ask_in_turn(PROMPTS[:2]) == reference[:2]
        assert engine.hits == COLD_HITS[:2]

    def test_one_tensor_updated_in_place_is_another_model(self, engine: Engine, reference: list[Answer]) -> None:
        """As a trainer sends it: a norm of one layer, negated, and put back."""
        for sign in (-1.0, 1.0):
            engine.flush()
            engine.update_tensor("model.layers.1.input_layernorm.weight", sign * torch.ones(TinyLlama().hidden))
            answers = engine.ask_in_turn(PROMPTS[:2])
            assert engine.hits == COLD_HITS[:2]
            assert [answer == before for answer, before in zip(answers, reference, strict=False)] == [sign > 0] * 2

    def test_what_is_computed_after_an_update_is_stored_without_another_flush(self, engine: Engine) -> None:
        """The update has emptied SGLang's caches, and its end, which does not, follows with nothing in between."""
        engine.flush()
        engine.update_tensor("model.layers.1.input_layernorm.weight", torch.full((TinyLlama().hidden,), 1.5))
        engine.ask(PROMPTS[:1])
        engine.flush()
        engine.ask(PROMPTS[:1])
        assert engine.hits == WARM_HITS[:1]
