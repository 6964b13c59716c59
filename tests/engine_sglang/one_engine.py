"""What one engine can show by itself, whichever of SGLang's surfaces we are behind."""

from typing import ClassVar

from engines import COLD_HITS, PROMPTS, WARM_HITS, Answer, Engine, corrupt


class OneEngine:
    """In this order, as each test leaves pages for the next. pool: the name of `engine`'s host pool, of 32 MiB."""

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
        corrupt(self.pool, 32 << 20)
        answers = engine.ask_in_turn(PROMPTS)
        assert engine.hits == WARM_HITS
        for number in (0, 1, 2, 3, 5):
            assert answers[number] != reference[number]
