"""The demo's output: one row per request, the answers, and the time saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One request.

    request: its name, or the question.
    phase: when it was sent, to which `engine`.
    prompt_tokens: length of its prompt.
    hit_tokens: tokens found, as the engine reports.
    first_s: seconds until the first token.
    tokens: the generated tokens.
    text: their text, if there is a tokenizer.
    """

    engine: str
    request: str
    phase: str
    prompt_tokens: int
    hit_tokens: int
    first_s: float
    tokens: list[int]
    text: str = ""


def table(rows: Sequence[Row], without_us: Mapping[tuple[str, str], Row]) -> str:
    """without_us: by engine and request."""
    requests = list(dict.fromkeys(row.request for row in rows))
    has_two_engines = len({row.engine for row in rows}) > 1
    has_text = any(row.text for row in rows)
    label = "question" if has_text else "prompt"
    header = (
        f"{'request':<10} {'phase':<22} {'prompt':>6} {'found':>6} {'first token':>12} {'without us':>11}  tokens equal"
    )
    lines = ["", header]
    for row in rows:
        reference = without_us[row.engine, row.request]
        phase = f"{row.phase}, {row.engine}" if has_two_engines else row.phase
        lines.append(
            f"{label} {requests.index(row.request) + 1:<{9 - len(label)}} {phase:<22} {row.prompt_tokens:>6} "
            f"{row.hit_tokens:>6} {row.first_s * 1e3:>9.0f} ms {reference.first_s * 1e3:>8.0f} ms  "
            f"{'yes' if row.tokens == reference.tokens else 'NO'}"
        )
    if has_text:
        for number, request in enumerate(requests, 1):
            lines += ["", f"question {number}: {request}"]
            for answer, engines in _answers(rows, request).items():
                lines.append(f"{' and '.join(engines) if has_two_engines else 'answer'}: {answer}")
    if any(row.tokens != without_us[row.engine, row.request].tokens for row in rows):
        lines += [
            "",
            "Tokens differ. In float32 that is a bug; in bfloat16 a different split of the prefill rounds differently.",
        ]
    prompts, hits = sum(row.prompt_tokens for row in rows), sum(row.hit_tokens for row in rows)
    with_s = sum(row.first_s for row in rows)
    without_s = sum(without_us[row.engine, row.request].first_s for row in rows)
    saved = f"Of {prompts:,} tokens asked, {hits:,} were found and not computed: {with_s:.1f} s until the first tokens"
    return "\n".join([*lines, "", f"{saved} of all, {without_s:.1f} s without us."])


def _answers(rows: Sequence[Row], request: str) -> dict[str, list[str]]:
    """Each answer once, and which engines gave it."""
    answers: dict[str, list[str]] = {}
    for row in rows:
        if row.request == request:
            engines = answers.setdefault(" ".join(row.text.split()), [])
            if row.engine not in engines:
                engines.append(row.engine)
    return answers
