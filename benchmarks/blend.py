"""What blending costs on a real engine: the time to the first token, and on vLLM many requests at once, and how long
others wait.

    .venvs/vllm/bin/python benchmarks/blend.py --model "$(scripts/setup.sh smollm2 | tail -n 1)" [--json]
    PYTHONPATH=tests/engine_sglang/standins .venvs/sglang/bin/python benchmarks/blend.py --engine sglang --model …

A prompt is eight documents of drawn tokens, in an order that no request had before, and a question; or a conversation
of which a part was dropped. One engine computes each prompt whole (nothing is loaded for it), and blended. Every row is
judged against full prefill in the same run.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import os
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import _engines
from benchmarks._child import progress
from benchmarks._report import Row, parser, report

WAYS: dict[str, dict[str, Any]] = {
    "reused as they are, behind the system prompt": {"share": 0.0},
    "first 5 %": {"share": 0.05, "select": "first"},
    "first 15 %": {"share": 0.15, "select": "first"},
    "question 15 %": {"share": 0.15, "select": "question"},
}
TIMED = {"vllm": {2048: 0.15, 6000: 0.08}, "sglang": {2048: 0.3, 6000: 0.2}}
"""Tokens of a prompt of eight documents, and how much of full prefill's time its first token may take."""


class Asked:
    """vLLM."""

    engine = "vllm"

    def __init__(self, model: str) -> None:
        longest = max(TIMED[self.engine])
        self.llm = _engines.blending(model, max_model_len=longest + 512, max_num_batched_tokens=2048)

    def ask(self, prompts: "list[Prompt]") -> float:
        """Seconds until all of these, asked at once, have their first token."""
        from vllm import SamplingParams, TokensPrompt

        began_s = time.perf_counter()
        self.llm.generate(
            [TokensPrompt(prompt_token_ids=each.tokens, **each.salt) for each in prompts],
            [SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=each.extra) for each in prompts],
            use_tqdm=False,
        )
        return time.perf_counter() - began_s

    def longest_pause(self, prompts: "list[Prompt]") -> float:
        """The longest step, in seconds, of a running request while these are computed."""
        from vllm import SamplingParams, TokensPrompt

        core = self.llm.llm_engine
        running = SamplingParams(temperature=0, max_tokens=4096, ignore_eos=True, detokenize=False)
        core.add_request("running", TokensPrompt(prompt_token_ids=[5, 6, 7]), running)
        for _ in range(5):
            core.step()
        for number, each in enumerate(prompts):
            sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=each.extra)
            core.add_request(f"r{number}", TokensPrompt(prompt_token_ids=each.tokens, **each.salt), sampling)
        longest_s, left = 0.0, len(prompts)
        while left:
            began_s = time.perf_counter()
            left -= sum(output.finished for output in core.step())
            longest_s = max(longest_s, time.perf_counter() - began_s)
        core.abort_request(["running"])
        while core.has_unfinished_requests():
            core.step()
        return longest_s


class AskedSGLang:
    """SGLang."""

    engine = "sglang"

    def __init__(self, model: str) -> None:
        tokens = {"max_total_tokens": 1 << 15, "chunked_prefill_size": 2048}
        cache = {"host": {"capacity_bytes": "4GiB"}}
        self.llm = _engines.sglang(model, cache, page_tokens=16, blends=True, hicache_size=2, **tokens)

    def ask(self, prompts: "list[Prompt]") -> float:
        """Seconds until all of these, asked at once, have their first token."""
        sampling = {"temperature": 0, "max_new_tokens": 1}
        began_s = time.perf_counter()
        self.llm.generate(
            input_ids=[each.tokens for each in prompts],
            sampling_params=[{**sampling, "custom_params": each.fields["custom_params"]} for each in prompts],
            cache_salt=[each.fields.get("cache_salt", "") for each in prompts],
        )
        return time.perf_counter() - began_s


@dataclass(frozen=True)
class Prompt:
    """fields: of the request; those of `WHOLE` for full prefill."""

    tokens: list[int]
    fields: dict[str, Any]

    @property
    def salt(self) -> dict[str, str]:
        return {"cache_salt": self.fields["cache_salt"]} if "cache_salt" in self.fields else {}

    @property
    def extra(self) -> dict[str, Any]:
        return {"kv_transfer_params": self.fields["kv_transfer_params"]}


WHOLE = {"kv_tiers": {"load": False, "store": False}}


class Texts:
    """Documents of drawn tokens for prompts of one length."""

    def __init__(self, length: int, engine: str) -> None:
        self._engine = engine
        self._draw = random.Random(length)
        self._documents = [self._tokens(length // 8) for _ in range(16)]
        self._system, self._question = self._tokens(20), self._tokens(20)

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(1000, 40000) for _ in range(count)]

    def prompts(self, count: int, way: str) -> list[Prompt]:
        """Eight documents each, in an order of its own. way: of `WAYS`; empty: full prefill."""
        return [self._prompt(self._draw.sample(self._documents, 8), way) for _ in range(count)]

    def all_documents(self) -> list[Prompt]:
        """Two prompts, blended, after which every document is held."""
        way = next(iter(WAYS))
        return [self._prompt(self._documents[first : first + 8], way) for first in (0, 8)]

    def _prompt(self, documents: list[list[int]], way: str) -> Prompt:
        from kv_blend import request_fields
        from kv_blend.plan import FIELDS

        tokens, segments = list(self._system), []
        for document in documents:
            segments.append((len(tokens), len(tokens) + len(document)))
            tokens += document
        tokens += self._question
        if not way:
            return Prompt(tokens, {FIELDS[self._engine]: WHOLE})
        options = WAYS[way] | ({"question": self._question} if WAYS[way].get("select") == "question" else {})
        return Prompt(tokens, request_fields(segments, tokens=len(tokens), engine=self._engine, **options))


def measure_first_tokens(asked: Asked | AskedSGLang, rounds: int) -> list[Row]:
    rows = []
    ways = [way for way in WAYS if asked.engine == "vllm" or "question" not in way]
    for length, target in TIMED[asked.engine].items():
        texts = Texts(length, asked.engine)
        asked.ask(texts.all_documents())
        seconds: dict[str, list[float]] = {way: [] for way in ("", *ways)}
        for number in range(rounds):
            progress(f"{length} tokens, round {number + 1} of {rounds}")
            for way, taken in seconds.items():
                taken.append(asked.ask(texts.prompts(1, way)))
        whole = statistics.median(seconds[""])
        for way in ways:
            blended = statistics.median(seconds[way])
            is_judged = way.startswith("reused")
            name = f"first token of {length} tokens, 8 documents, {way}"
            rows.append(Row(name, blended, "s", whole, blended / whole, target if is_judged else None, True))
    return rows


def measure_edits(asked: Asked | AskedSGLang, rounds: int) -> list[Row]:
    """A conversation of which a quarter, behind the system prompt, was dropped."""
    from kv_blend import edited, request_fields
    from kv_blend.plan import FIELDS

    rows = []
    for length in TIMED[asked.engine]:
        draw = random.Random(length)
        whole, blended = [], []
        for number in range(rounds):
            progress(f"an edit of {length} tokens, round {number + 1} of {rounds}")
            system, dropped, kept, question = (
                [draw.randrange(1000, 40000) for _ in range(count)]
                for count in (length // 8, length // 4, length * 5 // 8, 20)
            )
            before, now = system + dropped + kept, system + kept + question
            asked.ask([Prompt(before, {FIELDS[asked.engine]: {}})])
            whole.append(asked.ask([Prompt(now, {FIELDS[asked.engine]: WHOLE})]))
            blended.append(asked.ask([Prompt(now, request_fields(**edited(before, now), engine=asked.engine))]))
        full, taken = statistics.median(whole), statistics.median(blended)
        name = f"first token of a conversation of {length} tokens without a quarter of them, first 15 %"
        rows.append(Row(name, taken, "s", full, taken / full, None, True))
    return rows


def measure_many(asked: Asked) -> list[Row]:
    rows = []
    texts = Texts(2048, asked.engine)
    for way in WAYS:
        progress(f"eight at once, {way}")
        at_once = {each: asked.ask(texts.prompts(8, each)) for each in ("", way)}
        pauses = {each: asked.longest_pause(texts.prompts(4, each)) for each in ("", way)}
        times = at_once[""] / at_once[way]
        rows.append(
            Row(f"eight requests of 2048 tokens at once, {way}", times, "times as many", 1.0, times, 3.0, False)
        )
        pause = pauses[way] / pauses[""]
        name = f"longest pause of a running request beside four such, {way}"
        rows.append(Row(name, pauses[way], "s", pauses[""], pause, 1.5, True))
    return rows


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", required=True, help="a trained model's directory")
    arguments.add_argument("--engine", choices=TIMED, default="vllm", help="the one of this environment")
    arguments.add_argument("--rounds", type=int, default=3, help="of each length")
    chosen = arguments.parse_args()
    quiet = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.update(_engines.ENVIRON | _engines.threads_environ(1) | quiet)
    if chosen.engine == "sglang":
        os.environ["KV_BENCHMARKS_ATTEND_ONLY_TO_QUERIES"] = "1"  # as attention does where there is a GPU
        on_sglang = AskedSGLang(chosen.model)
        rows = measure_first_tokens(on_sglang, chosen.rounds) + measure_edits(on_sglang, chosen.rounds)
        return report(rows, as_json=chosen.json)
    asked = Asked(chosen.model)
    rows = measure_first_tokens(asked, chosen.rounds) + measure_edits(asked, chosen.rounds) + measure_many(asked)
    return report(rows, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
