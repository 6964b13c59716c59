"""The demo of blending: six documents of this repository in two orders, on real vLLM. Needs no GPU.

    make demo BLEND=1

Each order is answered whole, as an engine without a cache would, and then blended: first with no document in the cache,
then in the other order with all of them there.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kv_blend import request_fields
from kv_core.log import say

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
DOCUMENTS: Final = ("tenants.md", "cost.md", "peers.md", "faults.md", "http.md", "cpu.md")
DOCUMENT_TOKENS: Final = 400
ORDERS: Final = ((0, 1, 2, 3, 4, 5), (4, 2, 0, 5, 1, 3))
SYSTEM: Final = "Answer from the documents below.\n\n"
QUESTION: Final = "\n\nQuestion: In one sentence, what is a tenant?\nAnswer:"
NEW_TOKENS: Final = 24
WHOLE: Final[dict[str, Any]] = {"kv_transfer_params": {"kv_tiers": {"load": False, "store": False}}}


@dataclass(frozen=True, slots=True)
class Row:
    """One request. report: what the engine says of its segments."""

    name: str
    prompt_tokens: int
    first_s: float
    report: dict[str, Any]
    text: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python demo/blend.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a trained model that vLLM can load")
    model = parser.parse_args().model
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig

    say("starting vLLM")
    transfer = KVTransferConfig(
        kv_connector="KVBlendConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"host": {"capacity_bytes": "512MiB"}},
    )
    engine = LLM(
        model,
        dtype="float32",
        max_model_len=4096,
        max_num_batched_tokens=4096,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_transfer_config=transfer,
    )
    tokenizer = engine.get_tokenizer()
    texts = [(DOCS / name).read_text(encoding="utf-8") for name in DOCUMENTS]
    documents = [tokenizer.encode(text)[:DOCUMENT_TOKENS] for text in texts]

    def ask(name: str, order: tuple[int, ...], share: float | None) -> Row:
        say(name)
        prompt, segments = tokenizer.encode(SYSTEM), []
        for at in order:
            segments.append((len(prompt), len(prompt) + len(documents[at])))
            prompt += documents[at]
        prompt += tokenizer.encode(QUESTION)
        fields = WHOLE if share is None else request_fields(segments, tokens=len(prompt), share=share)
        salt = {} if share is None else {"cache_salt": fields["cache_salt"]}
        extra = {"kv_transfer_params": fields["kv_transfer_params"]}
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, extra_args=extra)
        core = engine.llm_engine
        began_s, first_s, outputs = time.perf_counter(), 0.0, []
        core.add_request(name, TokensPrompt(prompt_token_ids=prompt, **salt), sampling)
        while core.has_unfinished_requests():
            if step := core.step():
                outputs, first_s = step, first_s or time.perf_counter() - began_s
        report = (outputs[0].kv_transfer_params or {}).get("kv_blend", {})
        return Row(name, len(prompt), first_s, report, outputs[0].outputs[0].text.strip())

    ask("to warm up", ORDERS[0][:1], None)
    rows = [
        ask("one order, whole", ORDERS[0], None),
        ask("one order, blended, no document in the cache", ORDERS[0], 0.15),
        ask("another order, whole", ORDERS[1], None),
        ask("another order, blended, 15 % computed again", ORDERS[1], 0.15),
        ask("another order, blended, nothing computed again", ORDERS[1], 0.0),
    ]
    print(f"\n{'request':<48} {'prompt':>6} {'found':>6} {'again':>6} {'first token':>12}")
    for row in rows:
        found, again = row.report.get("held_tokens", 0), row.report.get("recomputed_tokens", 0)
        print(f"{row.name:<48} {row.prompt_tokens:>6} {found:>6} {again:>6} {row.first_s:>10.2f} s")
        print(f"    {' '.join(row.text.split())}")
    whole, blended = rows[2].first_s, rows[3].first_s
    print(f"\nAnother order of known documents: {blended / whole:.2f} of the time of a full prefill.")
    return int(any("refused" in row.report for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
