"""How near blended answers are to full prefill's, on real vLLM with a trained model.

    .venvs/vllm/bin/python benchmarks/blend_quality.py --model "$(scripts/setup.sh smollm2 | tail -n 1)" [--json]

Documents are texts of this repository with a fact each, in an order that no request had before. Questions are about one
of them (`inside`), about two (`across`), or ask for a summary (`open`). Full prefill answers each first. Then each way
of blending is given the same prompt and has to say the same tokens, so that the engine's own probabilities can be
compared at every token: KL is full prefill's divergence from the blended distribution over full prefill's twenty
likeliest tokens, and an answer is equal if each of its tokens is the likeliest. Of `inside` and `across` only what full
prefill answers rightly counts.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import json
import math
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import _engines
from benchmarks._child import progress
from benchmarks._report import parser

ROOT = Path(__file__).parents[1]
DOCUMENTS, DOCUMENT_TOKENS = 4, 256
SYSTEM = "You are an assistant. Answer from these documents.\n\n"
ANIMALS = ("fox", "otter", "heron", "badger", "lynx", "crane", "beaver", "falcon")
COLOURS = ("red", "green", "blue", "white", "black", "golden", "silver", "violet")


@dataclass(frozen=True)
class Way:
    """options: of the plan. is_moved: whether reused keys are. layer: by whose keys deviation is measured; None: it is
    drawn at random."""

    options: dict[str, Any]
    is_moved: bool = True
    layer: int | None = 1


WAYS = {
    "reused and not moved, alone": Way({"share": 0.0, "behind": "alone"}, is_moved=False),
    "reused, alone": Way({"share": 0.0, "behind": "alone"}),
    "reused, behind the system prompt": Way({"share": 0.0}),
    "first 4 tokens": Way({"share": 4 / 280, "select": "first"}),
    "first 16 tokens": Way({"share": 16 / 280, "select": "first"}),
    "first 15 %": Way({"share": 0.15, "select": "first"}),
    "first 30 %": Way({"share": 0.3, "select": "first"}),
    "deviation 5 %": Way({"share": 0.05, "select": "deviation"}),
    "deviation 15 %": Way({"share": 0.15, "select": "deviation"}),
    "deviation 30 %": Way({"share": 0.3, "select": "deviation"}),
    "deviation 30 %, of layer 12": Way({"share": 0.3, "select": "deviation"}, layer=12),
    "drawn 30 %": Way({"share": 0.3, "select": "deviation"}, layer=None),
    "everything": Way({"share": 1.0}),
}
TOKENS = {"inside": 5, "across": 14, "open": 24}
"""Of an answer, by the kind of its question."""
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

        self.llm = _engines.blending(model, skip_tokenizer_init=False, logits_processors=[Forced], **arguments)
        self.tokenizer = self.llm.get_tokenizer()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def ask(
        self, tokens: list[int], fields: dict[str, Any], new_tokens: int, forced: list[int] | None = None
    ) -> tuple[list[int], list[Distribution]]:
        """The answer, and each token's distribution as log-probabilities of the twenty likeliest."""
        from vllm import SamplingParams, TokensPrompt

        extra = {"kv_transfer_params": fields["kv_transfer_params"]} | ({"forced": forced} if forced else {})
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=20, extra_args=extra)
        salt = {"cache_salt": fields["cache_salt"]} if "cache_salt" in fields else {}
        (output,) = self.llm.generate([TokensPrompt(prompt_token_ids=tokens, **salt)], sampling, use_tqdm=False)
        said = output.outputs[0]
        report = (output.kv_transfer_params or {}).get("kv_blend", {})
        assert "refused" not in report, report
        return list(said.token_ids), [{each: chance.logprob for each, chance in at.items()} for at in said.logprobs]


@contextmanager
def patched(way: Way) -> Iterator[None]:
    """What no plan can ask for."""
    import torch
    from kv_blend.rotations import Rotation
    from kv_blend.selection import Selection
    from kv_blend.vllm.filling import Filler

    def drawn(self: Selection, deviation: torch.Tensor) -> list[int]:
        return deviating(self, torch.rand(deviation.shape, generator=torch.Generator().manual_seed(1)))

    moved, deviating, measured = Rotation.moved, Selection.deviating, Filler._measured_layer
    if not way.is_moved:
        Rotation.moved = lambda _self, keys, _distance: keys  # type: ignore[method-assign]
    if way.layer is None:
        Selection.deviating = drawn  # type: ignore[method-assign]
    else:
        Filler._measured_layer = property(lambda _self: way.layer)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Rotation.moved, Selection.deviating = moved, deviating  # type: ignore[method-assign]
        Filler._measured_layer = measured  # type: ignore[method-assign]


def divergence(whole: Distribution, blended: Distribution) -> float:
    """KL over full prefill's likeliest tokens; one that is missing in the other counts with its least likely."""
    floor = min(blended.values())
    return max(0.0, sum(math.exp(chance) * (chance - blended.get(token, floor)) for token, chance in whole.items()))


def likeliest(distribution: Distribution) -> int:
    return max(distribution, key=lambda token: distribution[token])


@dataclass(frozen=True)
class Question:
    """codes: what a right answer contains, in this order."""

    kind: str
    text: str
    codes: tuple[str, ...] = ()

    def is_answered_by(self, answer: str) -> bool:
        at = 0
        for code in self.codes:
            at = answer.find(code, at) + 1
            if not at:
                return False
        return True


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
            begin = draw.randrange(len(self._pieces) - DOCUMENT_TOKENS)
            split = begin + draw.randrange(40, DOCUMENT_TOKENS - 40)
            documents.append(self._pieces[begin:split] + fact + self._pieces[split : begin + DOCUMENT_TOKENS])
            facts.append((name, code))
        form = "\nQuestion: What {verb} the access {noun}?\nAnswer: the access {noun} {verb}"
        questions = []
        for name, code in facts:
            text = form.format(verb="is", noun=f"code of the {name}")
            questions.append(Question("inside", text, (code,)))
        for _ in range(2):
            (one, first), (other, second) = draw.sample(facts, 2)
            text = form.format(verb="are", noun=f"codes of the {one} and of the {other}")
            questions.append(Question("across", text, (first, second)))
        questions.append(Question("open", "\nIn short, these documents say that"))
        return documents, questions

    def prompt(self, documents: list[list[int]], question: str) -> tuple[list[int], list[tuple[int, int]]]:
        tokens, segments = list(self.system), []
        for document in self._draw.sample(documents, DOCUMENTS):
            segments.append((len(tokens), len(tokens) + len(document)))
            tokens += document
        return tokens + self._encode(question), segments


def measure(asked: Asked, questions: int, minutes: float, seed: int) -> dict[str, dict[str, Cell]]:
    """By kind of question and way, for up to so many questions that full prefill answers rightly, or so long."""
    from kv_blend import request_fields

    texts = Texts(asked, seed)
    cells = {kind: {name: Cell() for name in WAYS} for kind in TOKENS}
    tried = dict.fromkeys(TOKENS, 0)
    until_s = time.monotonic() + 60 * minutes
    tokens, segments = texts.prompt(texts.documents()[0], "\n")
    asked.ask(tokens, request_fields(segments, tokens=len(tokens)), 1)  # proves how keys move, before they do not

    def done(kind: str) -> int:
        return len(cells[kind]["everything"].equal)

    while time.monotonic() < until_s and any(done(kind) < questions for kind in TOKENS):
        documents, asks = texts.documents()
        for ask in asks:
            if done(ask.kind) >= questions:
                continue
            tokens, segments = texts.prompt(documents, ask.text)
            answer, whole = asked.ask(tokens, WHOLE, TOKENS[ask.kind])
            tried[ask.kind] += 1
            if not ask.is_answered_by(asked.tokenizer.decode(answer)):
                continue
            for name, way in WAYS.items():
                fields = request_fields(segments, tokens=len(tokens), **way.options)
                with patched(way):
                    _, blended = asked.ask(tokens, fields, len(answer), answer)
                agree = [likeliest(at) == token for at, token in zip(blended, answer, strict=True)]
                cell = cells[ask.kind][name]
                cell.equal.append(all(agree))
                cell.agree += agree
                cell.kl += [divergence(*pair) for pair in zip(whole, blended, strict=True)]
        progress(", ".join(f"{kind} {done(kind)} of {tried[kind]}" for kind in TOKENS))
    return cells


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", required=True, help="a trained model's directory")
    arguments.add_argument("--questions", type=int, default=100, help="of each kind, that full prefill answers rightly")
    arguments.add_argument("--minutes", type=float, default=600, help="stop after so long with what there is")
    arguments.add_argument("--seed", type=int, default=7, help="of the documents and questions")
    chosen = arguments.parse_args()
    quiet = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.update(_engines.ENVIRON | _engines.threads_environ(1) | quiet)
    asked = Asked(chosen.model, disable_hybrid_kv_cache_manager=True)
    for kind, ways in measure(asked, chosen.questions, chosen.minutes, chosen.seed).items():
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
