"""What the running example says: a row a request, each answer once, and a difference that nobody can miss."""

from pathlib import Path

import pytest
from table import Row, table

import demo

QUESTIONS = ("What is it?", "Why?")


def row(engine: str, number: int, phase: str, found: int, *tokens: int, text: str = "") -> Row:
    return Row(engine, QUESTIONS[number], phase, 1000, found, 0.25 if found else 1.0, list(tokens), text)


def reference(*engines: str) -> dict[tuple[str, str], Row]:
    rows = [row(engine, number, "without us", 0, number, 7) for engine in engines for number in (0, 1)]
    return {(one.engine, one.request): one for one in rows}


def test_equal_rows_say_what_was_saved() -> None:
    rows = [row("vLLM", 0, "A", 0, 0, 7, text="A  cache."), row("vLLM", 1, "A", 768, 1, 7, text="Speed.")]
    said = table(rows, reference("vLLM"))
    assert "NO" not in said and "differ" not in said
    assert "answer: A cache." in said and "answer: Speed." in said
    assert "Of 2,000 tokens asked, 768 were found" in said
    assert "1.2 s until the first tokens of all, 2.0 s without us" in said


def test_one_wrong_token_is_seen() -> None:
    said = table([row("vLLM", 0, "A", 0, 0, 7), row("vLLM", 1, "A", 768, 1, 8)], reference("vLLM"))
    lines = said.splitlines()
    assert [line.rsplit(None, 1)[1] for line in lines if line.startswith("prompt ")] == ["yes", "NO"]
    assert "Tokens differ" in said


def test_rows_of_two_engines_are_each_compared_with_their_own() -> None:
    without_us = reference("vLLM", "SGLang")
    without_us["SGLang", QUESTIONS[1]].tokens[:] = [9, 9]
    rows = [row("vLLM", 1, "A", 0, 1, 7, text="Yes."), row("SGLang", 1, "from disk", 960, 9, 9, text="No.")]
    said = table(rows, without_us)
    assert "from disk, SGLang" in said and "differ" not in said
    assert "vLLM: Yes." in said and "SGLang: No." in said


def test_prompts_of_numbers_share_their_beginning_alone() -> None:
    first, second = demo._numbers(1000)
    assert first[: demo.SHARED_TOKENS] == second[: demo.SHARED_TOKENS]
    assert first[demo.SHARED_TOKENS] != second[demo.SHARED_TOKENS]
    assert max(*first, *second) < 1000


def test_a_document_goes_with_two_questions(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = demo.Demo(Path("kv.py"), "an engine", {}, start=None, write_tiny=None)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        demo.run(wanted, ["--document", "README.md", "--question", "one?"])
    assert "two questions" in capsys.readouterr().err


def test_a_document_that_is_not_there_is_said_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And not by the last lines of a process that read it after its imports."""
    wanted = demo.Demo(Path("kv.py"), "an engine", {}, start=None, write_tiny=None)  # type: ignore[arg-type]
    for path in (tmp_path / "none.md", tmp_path):
        with pytest.raises(SystemExit) as stop:
            demo.run(wanted, ["--model", "m", "--document", str(path), "--question", "one?", "--question", "two?"])
        assert stop.value.code == 2
        assert f"--document {path} is not a file" in capsys.readouterr().err
