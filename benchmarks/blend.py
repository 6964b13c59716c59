"""Blending on real vLLM with a trained model: the time to the first token, and how near answers are to full prefill's.

    .venvs/vllm/bin/python benchmarks/blend.py --model "$(scripts/setup.sh smollm2 | tail -n 1)" [--sets 25] [--json]

Documents are texts of this repository with a fact each, in an order that no request had before; the question is about
one of them. One engine answers each prompt whole (nothing is loaded for it), and blended in each way. Agreement is
counted only where full prefill answers rightly. KL is of the first answer token's distribution from full prefill's,
over its twenty likeliest tokens. Rows of time are judged against full prefill in the same run.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _engines
from benchmarks._child import progress
from benchmarks._report import Row, parser, report

ROOT = Path(__file__).parents[1]
WAYS: dict[str, dict[str, Any]] = {
    "reused as they are, computed alone": {"share": 0.0, "behind": "alone"},
    "reused as they are, behind the system prompt": {"share": 0.0},
    "first 5 %": {"share": 0.05, "select": "first"},
    "first 15 %": {"share": 0.15, "select": "first"},
    "first 30 %": {"share": 0.3, "select": "first"},
    "deviation 5 %": {"share": 0.05},
    "deviation 15 %": {"share": 0.15},
    "deviation 30 %": {"share": 0.3},
    "everything": {"share": 1.0},
}
DOCUMENTS, DOCUMENT_TOKENS, ANSWER_TOKENS = 4, 300, 5
SYSTEM = "You are an assistant. Answer from these documents.\n\n"
ANIMALS = ("fox", "otter", "heron", "badger", "lynx", "crane", "beaver", "falcon")
COLOURS = ("red", "green", "blue", "white", "black", "golden", "silver", "violet")
TIMED = {2048: 0.15, 6000: 0.08}
"""Tokens of a prompt of eight documents, and how much of full prefill's time its first token may take."""


@dataclass(frozen=True)
class Said:
    """tokens: the answer. likely: the first token's likeliest, with log-probabilities. seconds: to the first token."""

    tokens: tuple[int, ...]
    likely: dict[int, float]
    seconds: float


class Asked:
    """The engine, and its tokenizer."""

    def __init__(self, model: str) -> None:
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector="KVBlendConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"host": {"capacity_bytes": "4GiB"}, "chunk_tokens": 128},
        )
        longest = max(TIMED) + 512
        self.llm = _engines.vllm(
            model,
            None,
            kv_transfer_config=transfer,
            skip_tokenizer_init=False,
            max_model_len=longest,
            max_num_batched_tokens=longest,
            gpu_memory_utilization=0.2,
        )
        self.encode = self.llm.get_tokenizer().encode

    def ask(self, tokens: list[int], fields: dict[str, Any], new_tokens: int) -> Said:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(
            temperature=0,
            max_tokens=new_tokens,
            logprobs=20,
            extra_args={"kv_transfer_params": fields["kv_transfer_params"]},
        )
        salt = {"cache_salt": fields["cache_salt"]} if "cache_salt" in fields else {}
        began_s = time.perf_counter()
        (output,) = self.llm.generate([TokensPrompt(prompt_token_ids=tokens, **salt)], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        said = output.outputs[0]
        likely = {token: chance.logprob for token, chance in said.logprobs[0].items()}
        return Said(tuple(said.token_ids), likely, seconds)


WHOLE = {"kv_transfer_params": {"kv_tiers": {"load": False, "store": False}}}


def joined(parts: list[list[int]], system: list[int], question: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    tokens, segments = list(system), []
    for part in parts:
        segments.append((len(tokens), len(tokens) + len(part)))
        tokens += part
    return [*tokens, *question], segments


def divergence(whole: dict[int, float], blended: dict[int, float]) -> float:
    """KL over full prefill's likeliest tokens; one that is missing in the other counts with its least likely."""
    floor = min(blended.values())
    return sum(math.exp(chance) * (chance - blended.get(token, floor)) for token, chance in whole.items())


def quality(asked: Asked, sets: int) -> dict[str, dict[str, float]]:
    from kv_blend import request_fields

    draw = random.Random(7)
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    pieces = asked.encode(text)
    system = asked.encode(SYSTEM)
    found: dict[str, list[tuple[bool, bool, float]]] = {way: [] for way in WAYS}
    right = 0
    for number in range(sets):
        progress(f"set {number + 1} of {sets}")
        documents, facts = [], []
        for at in range(DOCUMENTS):
            name = f"{COLOURS[draw.randrange(8)]} {ANIMALS[at * 2 + draw.randrange(2)]}"
            code = str(draw.randint(100, 999))
            fact = asked.encode(f"\nThe access code of the {name} is {code}.\n")
            begin = draw.randrange(len(pieces) - DOCUMENT_TOKENS)
            split = draw.randrange(40, DOCUMENT_TOKENS - 40)
            documents.append(pieces[begin : begin + split] + fact + pieces[begin + split : begin + DOCUMENT_TOKENS])
            facts.append((name, code))
        for options in WAYS.values():  # so that all segments are held, from other orders
            tokens, segments = joined(documents, system, [system[0]])
            asked.ask(tokens, request_fields(segments, tokens=len(tokens), **options), 1)
        for about in range(DOCUMENTS):
            name, code = facts[about]
            question = asked.encode(f"\nThe access code of the {name} is")
            order = draw.sample(documents, DOCUMENTS)
            tokens, segments = joined(order, system, question)
            whole = asked.ask(tokens, WHOLE, ANSWER_TOKENS)
            answer = asked.llm.get_tokenizer().decode(whole.tokens)
            is_right = code in answer
            right += is_right
            for way, options in WAYS.items():
                said = asked.ask(tokens, request_fields(segments, tokens=len(tokens), **options), ANSWER_TOKENS)
                found[way].append((is_right, said.tokens == whole.tokens, divergence(whole.likely, said.likely)))
    progress(f"full prefill answers {right} of {sets * DOCUMENTS} rightly")
    return {
        way: {
            "questions": sum(is_right for is_right, _, _ in each),
            "equal": sum(is_right and equal for is_right, equal, _ in each) / max(1, right),
            "kl": statistics.mean(kl for _, _, kl in each),
            "equal of all": sum(equal for _, equal, _ in each) / len(each),
        }
        for way, each in found.items()
    }


def times(asked: Asked) -> list[Row]:
    from kv_blend import request_fields

    draw, rows = random.Random(11), []
    for length, target in TIMED.items():
        documents = [[draw.randrange(1000, 40000) for _ in range(length // 8)] for _ in range(8)]
        system, question = (
            [draw.randrange(1000, 40000) for _ in range(20)],
            [draw.randrange(1000, 40000) for _ in range(20)],
        )
        tokens, segments = joined(documents, system, question)
        asked.ask(tokens, request_fields(segments, tokens=len(tokens)), 1)
        ways = ("reused as they are, behind the system prompt", "first 15 %", "deviation 15 %")
        seconds: dict[str, list[float]] = {way: [] for way in ("", *ways)}
        for _ in range(3):
            tokens, segments = joined(draw.sample(documents, 8), system, question)
            seconds[""].append(asked.ask(tokens, WHOLE, 1).seconds)
            for way in ways:
                fields = request_fields(segments, tokens=len(tokens), **WAYS[way])
                seconds[way].append(asked.ask(tokens, fields, 1).seconds)
        whole = statistics.median(seconds[""])
        for way in ways:
            blended = statistics.median(seconds[way])
            name = f"first token of {length} tokens, 8 documents, {way}"
            is_judged = way.startswith("reused")
            rows.append(Row(name, blended, "s", whole, blended / whole, target if is_judged else None, True))
    return rows


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", required=True, help="a trained model's directory")
    arguments.add_argument("--sets", type=int, default=25, help="sets of four documents, each with four questions")
    chosen = arguments.parse_args()
    quiet = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.update(_engines.ENVIRON | _engines.threads_environ(1) | quiet)
    asked = Asked(chosen.model)
    rows = times(asked)
    for way, found in quality(asked, chosen.sets).items():
        text = f"answers equal to full prefill's, {way} (KL {found['kl']:.3f}, {found['questions']:.0f} questions)"
        rows.append(Row(text, found["equal"], "of those it answers rightly", 1.0, found["equal"], None, False))
        print(json.dumps({"way": way} | found), file=sys.stderr)
    return report(rows, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
