"""SGLang's part of the table of models, docs/models.md: of each kind, what the real engine shows, with us and without.

The judge is the engine without HiCache: in float32 its full prefill. What SGLang cannot run on this CPU is in the table
with SGLang's own words.
`KV_WRITE_MODELS=1` writes the page's rows; without it each row must be as the page says.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kv_tiers import HostPool
from models import BY_NAME
from models_page import SGLANG, Row, read_rows, write_row
from nursery import Nursery, Ran
from safetensors.torch import load_file, save_file
from transformers import WhisperFeatureExtractor

TOKENS = [3 + (7919 * i) % 1900 for i in range(1500)]
STEP = 128
"""Between two lengths of hits that are asked for."""


@dataclass(frozen=True)
class Sgl:
    """How SGLang is asked to run one of the models, and what of it is known.

    page: tokens of a page.
    pools: those of SGLang's host pools that are kept.
    scaled: weights that are multiplied, by name.
    changed: of what the model's own configuration says, as this SGLang reads it otherwise than transformers writes it.
    cannot: a part of what the engine says instead of running it; "" where it runs.
    left_alone: what the engine says, without asking us, where it is to run with HiCache; "" where it does.
    """

    page: int = 64
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)
    pools: tuple[str, ...] = ("kv",)
    scaled: Mapping[str, float] = field(default_factory=dict)
    cannot: str = ""
    left_alone: str = ""


STATES = {
    "mamba_radix_cache_strategy": "no_buffer",
    "disable_overlap_schedule": True,
    "max_mamba_cache_size": 64,
}
"""How SGLang keeps states where it has no GPU: at the ends of prompts, with pages of one token."""
FLOAT32 = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""Of convolutions; SGLang takes bfloat16 whatever the model's dtype."""

ROWS = {
    "Llama": Sgl(),
    "Qwen3": Sgl(),
    # SGLang ties its embeddings; as large as they are, each token would be the one before it, whatever is attended to.
    "Gemma 3": Sgl(scaled={"model.embed_tokens.weight": 0.1}),
    "gpt-oss": Sgl(
        cannot="GptOssForCausalLM requires one of ['triton', 'trtllm_mha', 'fa3', 'fa4', 'ascend', 'intel_amx', "
        "'intel_xpu', 'aiter'] attention backend"
    ),
    "DeepSeek-V2": Sgl(),
    "DeepSeek-V3.2": Sgl(changed={"num_experts_per_tok": 1}, cannot="Torch not compiled with CUDA enabled"),
    "DeepSeek-V4": Sgl(cannot="assert rope_scaling is not None"),
    "Qwen3-Next": Sgl(
        1,
        STATES | {"dtype": "bfloat16"},
        changed={"full_attention_interval": 4},
        cannot="sgl_kernel.mamba.causal_conv1d_fn_cpu is a stand-in and was called",
    ),
    "Mamba2": Sgl(
        1,
        STATES,
        FLOAT32,
        {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 512},
        cannot="name 'causal_conv1d_fn_triton' is not defined",
    ),
    "Jamba": Sgl(cannot="JambaForCausalLM has no SGlang implementation"),
    "Bamba": Sgl(cannot="BambaForCausalLM has no SGlang implementation"),
    "Granite 4": Sgl(1, STATES, FLOAT32, cannot="name 'causal_conv1d_fn_triton' is not defined"),
    "Falcon-H1": Sgl(1, STATES, FLOAT32, cannot="name 'causal_conv1d_fn' is not defined"),
    "Nemotron-H": Sgl(
        1,
        STATES,
        FLOAT32,
        {
            "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"],
            "mtp_layers_block_type": ["attention", "moe"],
            "mamba_n_groups": 2,
        },
        cannot="name 'causal_conv1d_fn_triton' is not defined",
    ),
    "LFM2": Sgl(1, STATES, FLOAT32, pools=("kv", "mamba")),
    "Llama 4": Sgl(cannot="expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float"),
    "BLIP-2": Sgl(
        cannot="No module or parameter named 'model.language_model.decoder' in TransformersMultiModalForCausalLM"
    ),
    "Qwen2-Audio": Sgl(),
    "Whisper": Sgl(left_alone="The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive"),
    "Qwen2-VL": Sgl(),
}


@dataclass(frozen=True)
class Prompts:
    """Prompts of up to 1,500 tokens; two for each boundary where a hit may end.

    A page of one token is what SGLang has for states, which it keeps where prompts end: those are the boundaries then.
    """

    page: int

    @property
    def boundaries(self) -> list[int]:
        return list(range(STEP, len(TOKENS), STEP))

    @property
    def just_behind(self) -> list[list[int]]:
        """One token more than the boundary; where it is the prompt's end, no more."""
        return [TOKENS[: boundary + (self.page > 1)] for boundary in self.boundaries]

    @property
    def all(self) -> list[list[int]]:
        """And the prompt up to each boundary, then other tokens to the same length."""
        return self.just_behind + [
            TOKENS[:boundary] + [5 + (31 * i + boundary) % 1900 for i in range(len(TOKENS) - boundary)]
            for boundary in self.boundaries
        ]

    @property
    def cold_hits(self) -> list[int]:
        """Each of the first finds what those before it left, and each of the others its boundary."""
        return [0, *self.boundaries[:-1], *self.boundaries]

    @property
    def warm_hits(self) -> list[int]:
        """The last token is never looked up, so a prompt does not find the state at its own end."""
        if self.page == 1:
            return self.cold_hits
        return self.boundaries + [(len(TOKENS) - 1) // self.page * self.page] * len(self.boundaries)


def written(name: str, directory: Path) -> str:
    BY_NAME[name].write(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(ROWS[name].changed)))
    if scaled := ROWS[name].scaled:
        weights = load_file(directory / "model.safetensors")
        assert scaled.keys() <= weights.keys()
        made = {key: weight * scaled.get(key, 1.0) for key, weight in weights.items()}
        save_file(made, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.cannot and not row.left_alone])
def test_a_model_that_is_cached(name: str, engines: Nursery, tmp_path: Path) -> None:
    """Cold, warm at every boundary, all at once, from disk in another engine, and where calls fail: the answers of an
    engine without us; and each cache's bytes matter."""
    row, model, prompts = ROWS[name], written(name, tmp_path / "model"), Prompts(ROWS[name].page)
    pool = f"sglang-models-{os.getpid()}"
    tier = {"type": "disk", "directory": str(tmp_path / "disk"), "capacity_bytes": "128MiB"}
    cache = {"host": {"capacity_bytes": "128MiB", "name": pool}, "tiers": [tier], "cold": {"wait_s": 20.0}}
    # One host pool, or one for each format of pages.
    pools = [pool] if len(row.pools) == 1 else [f"{pool}-{each}" for each in row.pools]
    ask, control = {"ask": prompts.all}, {"ask": prompts.just_behind}

    def run(*steps: dict[str, Any], cached: bool = True, **environ: str) -> Ran:
        ran = engines.run(
            model,
            steps,
            cache=cache if cached else None,
            page=row.page,
            log_level="info",
            environ={**row.environ, **environ},
            **row.arguments,
        )
        for each in pools:
            HostPool.unlink(each)
        assert not ran.failed, f"{ran.error}: {ran.log[-4000:]}"
        return ran

    expected = run(ask, cached=False).answered(0)
    changes = [({"scale": [each, 0.5]}, control, {"scale": [each, 2.0]}) for each in pools]
    first = run(ask, ask, {"ask_at_once": prompts.all}, *(step for change in changes for step in change))
    assert first.hits(0) == prompts.cold_hits
    assert first.hits(1) == prompts.warm_hits
    second = run(ask)
    assert second.hits(0) == prompts.warm_hits
    # A call is of 128 pages at most, so there are more of them where pages are small.
    rate = "0.3" if row.page > 1 else "0.05"
    failing = run(control, SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE=rate)
    assert 0 < sum(failing.hits(0)) < sum(prompts.warm_hits[: len(prompts.boundaries)])
    for number, each in enumerate(pools):
        changed, step = first.answered(4 + 3 * number), 4 + 3 * number
        found = [at for at, tokens in enumerate(first.hits(step)) if tokens]
        assert len(found) >= len(prompts.just_behind) - 1
        assert not [at for at in found if changed[at] == expected[at]], f"{each} is halved, and answers are as before"
    (kept,) = set(re.findall(r"kv-sglang keeps pages of \d+ tokens? \((.*)\)", first.log))
    assert [each.partition(":")[0] for each in kept.split(", ")] == list(row.pools)
    shown = {"pools": kept, "page": str(row.page), "control": "differs for each"}
    for way, ran, step in (
        ("cold", first, 0),
        ("warm", first, 1),
        ("at once", first, 2),
        ("restart", second, 0),
        ("calls fail", failing, 0),
    ):
        same = sum(answer == right for answer, right in zip(ran.answered(step), expected, strict=False))
        asked = len(ran.answers[step])
        shown[way] = "equal" if same == asked else f"{same} of {asked} equal"
    _hold(Row(name, "float32", shown))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.cannot])
def test_a_model_that_sglang_does_not_run_here(name: str, engines: Nursery, tmp_path: Path) -> None:
    """Without us. A row that runs one day belongs among those above."""
    row = ROWS[name]
    model = written(name, tmp_path / "model")
    ran = engines.run(
        model, [{"ask": [TOKENS[:300]]}], page=row.page, log_level="info", environ=dict(row.environ), **row.arguments
    )
    assert ran.failed and row.cannot in ran.log, f"{ran.error}: {ran.log[-4000:]}"
    _hold(Row(name, "float32", {"cannot": row.cannot}))


@pytest.mark.long
def test_a_model_that_sglang_itself_does_not_cache(engines: Nursery, tmp_path: Path) -> None:
    """Whisper: what its decoder keeps depends on the audio, which no page's hash has. SGLang turns its own prefix cache
    off for it and then refuses HiCache, so nothing of it ever reaches us."""
    row, model = ROWS["Whisper"], written("Whisper", tmp_path / "model")
    WhisperFeatureExtractor(feature_size=80).save_pretrained(model)
    steps = [{"ask": [TOKENS[:300]]}]
    assert not engines.run(model, steps, page=row.page).failed
    refused = engines.run(model, steps, page=row.page, cache={"host": {"capacity_bytes": "32MiB"}})
    assert refused.failed and row.left_alone in refused.log, refused.log[-4000:]
    _hold(Row("Whisper", "float32", {"left alone": row.left_alone}))


def test_the_page_has_each_model() -> None:
    assert list(read_rows(SGLANG)) == [name for name in BY_NAME if name in ROWS]
    assert set(ROWS) == set(BY_NAME)
    for name, row in read_rows(SGLANG).items():
        assert row.shown.get("cannot", "") == ROWS[name].cannot
        assert row.shown.get("left alone", "") == ROWS[name].left_alone


def _hold(row: Row) -> None:
    if os.environ.get("KV_WRITE_MODELS"):
        write_row(row, SGLANG)
    assert row == read_rows(SGLANG)[row.name]
