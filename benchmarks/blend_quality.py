"""How near blended answers are to full prefill's, on real vLLM with a trained model.

    .venvs/vllm/bin/python benchmarks/blend_quality.py --model "$(scripts/setup.sh smollm2 | tail -n 1)" [--json]

Documents are texts of this repository with a fact each, in an order that no request had before. Questions are about one
of them (`inside`), about facts in two of them (`across`; the words between the facts are given), ask for a summary
(`open`), or are about one of what is left of a conversation from which another document was dropped (`edited`). Full
prefill answers each first. Then each way of blending is given the same prompt and has to say the same tokens, so that
the engine's own probabilities can be compared at every token: KL is full prefill's divergence from the blended
distribution over full prefill's twenty likeliest tokens, and an answer is equal if each of its tokens is the likeliest.
Except of `open` only what full prefill answers rightly counts.

Documents end where a block of vLLM's does, so that all questions about them share their KV in vLLM's own prefix cache.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import itertools
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import _engines
from benchmarks._child import progress
from benchmarks._report import parser

ROOT = Path(__file__).parents[1]
DOCUMENTS, DOCUMENTS_TOKENS = 4, 1152
"""How many are in a prompt, and how many tokens that is with the system prompt."""
SYSTEM = "You are an assistant. Answer from these documents.\n\n"
ANIMALS = ("fox", "otter", "heron", "badger", "lynx", "crane", "beaver", "falcon")
COLOURS = ("red", "green", "blue", "white", "black", "golden", "silver", "violet")


@dataclass(frozen=True)
class Way:
    """options: of the plan. is_moved: whether reused keys are. is_drawn: whether the selection is drawn at random."""

    options: dict[str, Any]
    is_moved: bool = True
    is_drawn: bool = False

    @property
    def tenant(self) -> str:
        """Apart from those whose plans are equal."""
        return f"{self.is_moved} {self.is_drawn}"


WAYS = {
    "reused and not moved, alone": Way({"share": 0.0, "behind": "alone"}, is_moved=False),
    "reused, alone": Way({"share": 0.0, "behind": "alone"}),
    "reused, behind the system prompt": Way({"share": 0.0}),
    "first 4 tokens": Way({"share": 4 / 280, "select": "first"}),
    "first 16 tokens": Way({"share": 16 / 280, "select": "first"}),
    "first 15 %": Way({"share": 0.15, "select": "first"}),
    "first 30 %": Way({"share": 0.3, "select": "first"}),
    "question 5 %": Way({"share": 0.05, "select": "question"}),
    "question 15 %": Way({"share": 0.15, "select": "question"}),
    "question 30 %": Way({"share": 0.3, "select": "question"}),
    "drawn 15 %": Way({"share": 0.15, "select": "question"}, is_drawn=True),
    "everything": Way({"share": 1.0}),
}
TOKENS = {"inside": 5, "across": 5, "open": 24, "edited": 5}
"""Of an answer, or of each of its facts, by the kind of its question."""
EDITED = "edited"
"""The tenant whose conversations are."""
WHOLE = {"kv_transfer_params": {"kv_tiers": {"load": False, "store": False}}}
Distribution = dict[int, float]


@dataclass
class Cell:
    """Of one way and one kind of question. agree, kl: of each answer token."""

    equal: list[bool] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        return {
            "questions": len(self.equal),
            "equal": sum(self.equal) / max(1, len(self.equal)),
            "top-1": sum(self.agree) / max(1, len(self.agree)),
            "KL": statistics.mean(self.kl or [0.0]),
        }


class Asked:
    """The engine, and its tokenizer."""

    def __init__(self, model: str, **arguments: Any) -> None:
        from benchmarks._forced import Forced

        self.llm = _engines.blending(
            model, skip_tokenizer_init=False, logits_processors=[Forced], enable_prefix_caching=True, **arguments
        )
        assert DOCUMENTS_TOKENS % self.llm.llm_engine.vllm_config.cache_config.block_size == 0
        self.tokenizer = self.llm.get_tokenizer()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def ask(
        self,
        prompts: "list[Asking]",
        fields: Callable[[list[int]], dict[str, Any]],
        forced: list[list[int]] | None = None,
    ) -> list[tuple[list[int], list[Distribution]]]:
        """The answer to each, and each token's distribution as log-probabilities of the twenty likeliest. fields: of a
        request with these tokens."""
        from vllm import SamplingParams, TokensPrompt

        inputs, samplings = [], []
        for number, each in enumerate(prompts):
            its = fields(each.tokens)
            extra = {"kv_transfer_params": its["kv_transfer_params"]} | ({"forced": forced[number]} if forced else {})
            samplings.append(
                SamplingParams(temperature=0, max_tokens=each.answer, ignore_eos=True, logprobs=20, extra_args=extra)
            )
            salt = {"cache_salt": its["cache_salt"]} if "cache_salt" in its else {}
            inputs.append(TokensPrompt(prompt_token_ids=each.tokens, **salt))
        answers = []
        for output in self.llm.generate(inputs, samplings, use_tqdm=False):
            report = (output.kv_transfer_params or {}).get("kv_blend", {})
            assert "refused" not in report, report
            said = output.outputs[0]
            distributions = [{token: chance.logprob for token, chance in at.items()} for at in said.logprobs]
            answers.append((list(said.token_ids), distributions))
        return answers


@contextmanager
def patched(way: Way) -> Iterator[None]:
    """What no plan can ask for."""
    import torch
    from kv_blend.rotations import Rotation
    from kv_blend.selection import Selection

    def drawn(self: Selection, attention: torch.Tensor) -> list[int]:
        chances = torch.rand(attention.shape, generator=torch.Generator().manual_seed(1))
        return attended(self, chances.where(attention >= 0, attention))

    moved, attended = Rotation.moved, Selection.attended
    if not way.is_moved:
        Rotation.moved = lambda _self, keys, _distance: keys  # type: ignore[method-assign]
    if way.is_drawn:
        Selection.attended = drawn  # type: ignore[method-assign]
    try:
        yield
    finally:
        Rotation.moved, Selection.attended = moved, attended  # type: ignore[method-assign]


def divergence(whole: Distribution, blended: Distribution) -> float:
    """KL over full prefill's likeliest tokens; one that is missing in the other counts with its least likely."""
    floor = min(blended.values())
    return max(0.0, sum(math.exp(chance) * (chance - blended.get(token, floor)) for token, chance in whole.items()))


def likeliest(distribution: Distribution) -> int:
    return max(distribution, key=lambda token: distribution[token])


@dataclass(frozen=True)
class Question:
    """facts: for each fact of the answer what stands before it, behind the documents, and the fact; empty if anything
    is right."""

    kind: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Asking:
    """A prompt for one fact. answer: how many tokens it may have. question: its number."""

    tokens: list[int]
    answer: int = 1
    question: int = 0
    fact: str = ""


class Texts:
    """Documents with facts, and questions about them."""

    def __init__(self, asked: Asked, seed: int) -> None:
        self._draw = random.Random(seed)
        self._encode = asked.encode
        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
        self._pieces = asked.encode(text)
        self.system = asked.encode(SYSTEM)

    def documents(self) -> tuple[list[list[int]], list[Question]]:
        draw = self._draw
        documents, facts = [], []
        for at in range(DOCUMENTS):
            name = f"{COLOURS[draw.randrange(8)]} {ANIMALS[at * 2 + draw.randrange(2)]}"
            code = str(draw.randint(100, 999))
            fact = self._encode(
                f"\n\nImportant: the access code of the {name} is {code}. Remember: {name} = {code}.\n\n"
            )
            length, more = divmod(DOCUMENTS_TOKENS - len(self.system), DOCUMENTS)
            length += (0 if at else more) - len(fact)
            begin = draw.randrange(len(self._pieces) - length)
            split = begin + draw.randrange(40, length - 40)
            documents.append(self._pieces[begin:split] + fact + self._pieces[split : begin + length])
            facts.append((name, code))
        questions = []
        for name, code in facts:
            text = f"\nQuestion: What is the access code of the {name}?\nAnswer: the access code of the {name} is"
            questions += [Question(kind, ((text, code),)) for kind in ("inside", "edited")]
        for (one, first), (other, second) in zip(facts, [*facts[1:], facts[0]], strict=True):
            text = f"\nQuestion: What is the access code of the {one}? And of the {other}?\n"
            text += f"Answer: the access code of the {one} is"
            then = f"{text} {first}. The access code of the {other} is"
            questions.append(Question("across", ((text, first), (then, second))))
        questions.append(Question("open", (("\nIn short, these documents say that", ""),)))
        return documents, questions

    def prompt(self, documents: list[list[int]]) -> tuple[list[int], list[tuple[int, int]]]:
        """The documents behind the system prompt, in any order."""
        tokens, segments = list(self.system), []
        for document in self._draw.sample(documents, DOCUMENTS):
            segments.append((len(tokens), len(tokens) + len(document)))
            tokens += document
        return tokens, segments

    def longer(self, base: list[int]) -> list[int]:
        """A conversation of which this prompt is left when a part of it is dropped."""
        begin = self._draw.randrange(len(self._pieces) - 280)
        at = len(self.system)
        return [*base[:at], *self._pieces[begin : begin + 280], *base[at:]]


def measure(
    asked: Asked, ways: list[str], kinds: list[str], questions: int, minutes: float, seed: int
) -> dict[str, dict[str, Cell]]:
    """By kind of question and way, for up to so many questions that full prefill answers rightly, or so long."""
    from kv_blend import edited, request_fields

    texts = Texts(asked, seed)
    cells = {kind: {name: Cell() for name in ways} for kind in kinds}
    tried = dict.fromkeys(kinds, 0)
    until_s = time.monotonic() + 60 * minutes

    def blended(segments: list[tuple[int, int]], before: list[int], way: Way, tokens: list[int]) -> dict[str, Any]:
        """before: the conversation that was edited, behind which its KV was computed; empty: none."""
        plan = way.options | {"segments": segments, "tokens": len(tokens)}
        if before:
            plan |= edited(before, tokens) | {"behind": "prefix"}
        if plan.get("select") == "question":
            plan["question"] = tokens[segments[-1][1] :]
        return request_fields(**plan, tenant=EDITED if before else way.tenant)

    def done(kind: str) -> int:
        return len(cells[kind][ways[-1]].equal)

    base, segments = texts.prompt(texts.documents()[0])
    # This proves how keys move, before they do not.
    asked.ask([Asking([*base, base[-1]])], partial(blended, segments, [], Way({})))
    while time.monotonic() < until_s and any(done(kind) < questions for kind in kinds):
        documents, about = texts.documents()
        base, segments = texts.prompt(documents)
        before = texts.longer(base)
        leaves_base = Asking([*base, base[-1]])
        prompts = [
            Asking(base + asked.encode(text), TOKENS[question.kind], number, fact)
            for number, question in enumerate(about)
            if question.kind in kinds and done(question.kind) < questions
            for text, fact in question.facts
        ]
        asked.ask([leaves_base], lambda _tokens: WHOLE)
        answers = asked.ask(prompts, lambda _tokens: WHOLE)
        wrong = {
            prompt.question
            for prompt, (answer, _) in zip(prompts, answers, strict=True)
            if prompt.fact not in asked.tokenizer.decode(answer)
        }
        right = [pair for pair in zip(prompts, answers, strict=True) if pair[0].question not in wrong]
        if "edited" in kinds:
            asked.ask([Asking(before)], lambda _tokens: {"kv_transfer_params": {}, "cache_salt": EDITED})
        for name, is_edited in itertools.product(ways, (False, True)):
            these = [pair for pair in right if (about[pair[0].question].kind == "edited") is is_edited]
            if not these:
                continue
            fields = partial(blended, segments, before if is_edited else [], WAYS[name])
            with patched(WAYS[name]):
                if "question" not in WAYS[name].options.values():  # else no two of them share their KV
                    asked.ask([leaves_base], fields)
                found = asked.ask([prompt for prompt, _ in these], fields, [answer for _, (answer, _) in these])
            are_equal: dict[int, bool] = {}
            for (prompt, (answer, expected)), (_, got) in zip(these, found, strict=True):
                agree = [likeliest(at) == token for at, token in zip(got, answer, strict=True)]
                are_equal[prompt.question] = are_equal.get(prompt.question, True) and all(agree)
                cell = cells[about[prompt.question].kind][name]
                cell.agree += agree
                cell.kl += [divergence(*pair) for pair in zip(expected, got, strict=True)]
            for number, is_equal in are_equal.items():
                cells[about[number].kind][name].equal.append(is_equal)
        for number in {prompt.question for prompt in prompts}:
            tried[about[number].kind] += 1
        progress(", ".join(f"{kind} {done(kind)} of {tried[kind]}" for kind in kinds))
    return cells


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", required=True, help="a trained model's directory")
    arguments.add_argument("--questions", type=int, default=100, help="of each kind, that full prefill answers rightly")
    arguments.add_argument("--minutes", type=float, default=600, help="stop after so long with what there is")
    arguments.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="of blending")
    arguments.add_argument("--kinds", nargs="+", choices=TOKENS, default=list(TOKENS), help="of questions")
    arguments.add_argument("--seed", type=int, default=7, help="of the documents and questions")
    chosen = arguments.parse_args()
    quiet = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.update(_engines.ENVIRON | _engines.threads_environ(1) | quiet)
    asked = Asked(chosen.model, disable_hybrid_kv_cache_manager=True)
    cells = measure(asked, chosen.ways, chosen.kinds, chosen.questions, chosen.minutes, chosen.seed)
    for kind, ways in cells.items():
        if not chosen.json:
            print(f"{kind:<40}{'questions':>10}{'equal':>8}{'top-1':>8}{'KL':>9}")
        for way, cell in ways.items():
            row = cell.row()
            if chosen.json:
                print(json.dumps({"kind": kind, "way": way} | row))
            else:
                print(f"  {way:<38}{row['questions']:>10.0f}{row['equal']:>8.2f}{row['top-1']:>8.2f}{row['KL']:>9.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
