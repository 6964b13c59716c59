"""Blending on engines of other shapes: small pools, small steps, a disk, restarts, processes of their own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CACHE, Blending, exact_answers, interleave
from engines import NEW_TOKENS, Answer, started
from kv_blend import edited, request_fields
from kv_blend.plan import Moved
from kv_blend.vllm.connector import why_not_blended
from kv_blend.vllm.filling import Filler
from kv_blend.vllm.forward import BatchEntry, keys_of_heads
from kv_blend.vllm.scheduler import BlendScheduler, BlendStep, SegmentStep
from kv_blend.vllm.worker import BlendWorker
from kv_connect.engine import engines
from kv_server.process import launch
from kv_testing.documents import BEFORE, DOCUMENTS, FIRST, SECOND, SELECTIONS, SYSTEM, Prompt
from kv_testing.interleavings import live_through
from kv_testing.tiny import TinyLlama


@pytest.fixture(scope="module")
def exact(tiny_llama: str) -> dict[Prompt, Answer]:
    return exact_answers(tiny_llama)


@pytest.mark.parametrize("rounds", [pytest.param(5), pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_exact_requests_never_see_approximate_kv_through_tiers_servers_and_restarts(
    tiny_llama: str, exact: dict[Prompt, Answer], tmp_path: Path, rounds: int
) -> None:
    @contextmanager
    def start(cache: dict[str, Any]) -> Iterator[Blending]:
        with started(tiny_llama, cache=cache, connector="KVBlendConnector", enable_prefix_caching=True) as inner:
            yield Blending(inner.llm)

    live_through(
        tmp_path,
        rounds,
        start,
        lambda engine, seed, disturb: interleave(engine, exact, rounds, seed=seed, disturb=disturb),
        Blending.assert_at_rest,
    )


@pytest.mark.slow
def test_segments_for_which_the_pool_has_no_room_are_computed_in_their_places(
    tiny_llama: str, exact: dict[Prompt, Answer]
) -> None:
    """Then nothing of them is approximate."""
    small = {"host": {"capacity_bytes": "1MiB"}}  # two of the seven chunks that the documents need
    with started(tiny_llama, cache=small, connector="KVBlendConnector") as inner:
        engine = Blending(inner.llm)
        assert engine.blend([Prompt((3, 2, 1))], share=0.0) != [exact[Prompt((3, 2, 1))]]  # some are reused
        for selection in SELECTIONS.values():
            assert engine.blend([SECOND], share=1.0, **selection) == [exact[SECOND]]
        engine.assert_at_rest()


def test_a_long_plan_takes_several_steps_and_others_go_on(tiny_llama: str, exact: dict[Prompt, Answer]) -> None:
    """No step waits for more than one forward pass of `max_num_batched_tokens`."""
    arguments = {"max_num_batched_tokens": 512, "enable_prefix_caching": True}
    with started(tiny_llama, cache=CACHE, connector="KVBlendConnector", **arguments) as inner:
        engine = Blending(inner.llm)
        for selection in SELECTIONS.values():
            assert engine.blend([FIRST, SECOND], share=1.0, **selection) == [exact[FIRST], exact[SECOND]]
        assert engine.blend([Prompt((0,))], share=0.0) == [exact[Prompt((0,))]]
        long = request_fields([(40, 600)], tokens=len(FIRST.tokens))
        engine.blend([FIRST], fields=long)
        assert "a segment is 600 tokens long with its context" in engine.reports[0]["refused"]
        engine.assert_at_rest()


@pytest.mark.slow
def test_requests_that_are_preempted_answer_as_alone(
    tiny_llama: str, exact: dict[Prompt, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a KV space for two of these prompts, and not for their answers."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, preempted = Scheduler._preempt_request, []

    def counted(self: Any, request: Any, *arguments: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *arguments, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    tight: dict[str, Any] = {"num_gpu_blocks_override": 22, "max_model_len": 1536}
    with started(tiny_llama, cache=CACHE, connector="KVBlendConnector", **tight) as inner:
        engine = Blending(inner.llm)
        prompts = [FIRST, SECOND, Prompt((3, 2, 1)), SECOND]
        fields = [request_fields(each.segments, tokens=len(each.tokens), share=0.0) for each in prompts[:-1]] + [{}]
        engine.blend([FIRST])  # all are held
        alone = [
            engine.ask_each([each], [its], max_tokens=150)[0][0] for each, its in zip(prompts, fields, strict=True)
        ]
        assert alone[-1][:NEW_TOKENS] == exact[SECOND] != alone[1][:NEW_TOKENS]
        assert not preempted
        for _ in range(2):
            answers, reports = engine.ask_each(prompts, fields, max_tokens=150)
            assert answers == alone
            assert [report["held_tokens"] for report in reports[:-1]] == [
                each.documents_tokens for each in prompts[:-1]
            ]
        assert preempted
        engine.assert_at_rest()
        assert engine.llm.reset_prefix_cache()  # no block is left with a request


def test_segments_of_another_model_are_not_found(tiny_llama: str, exact: dict[Prompt, Answer], tmp_path: Path) -> None:
    """On the same server, of the same shape and under the same salt."""
    server = launch({"host": {"capacity_bytes": "64MiB"}}, socket=tmp_path / "s" / "s", detached=True)
    joined = {"server": {"socket": str(server.socket)}}
    other = str(TinyLlama(seed=1).write(tmp_path / "other"))
    alone = Prompt((1,))
    try:
        for model, expected in ((other, None), (tiny_llama, exact[alone])):
            with started(model, cache=joined, connector="KVBlendConnector") as inner:
                engine = Blending(inner.llm)
                answers = engine.blend([alone], share=0.0)
                assert engine.reports[0]["held_tokens"] == 0
                assert expected in (None, *answers)
                assert engine.blend([alone], share=0.0) == answers
                assert engine.reports[0]["held_tokens"] == alone.documents_tokens
                engine.assert_at_rest()
    finally:
        server.stop()


@pytest.mark.slow
def test_scheduler_and_worker_in_a_process_of_their_own(tiny_llama: str, exact: dict[Prompt, Answer]) -> None:
    with started(
        tiny_llama, cache=CACHE, connector="KVBlendConnector", own_process=True, enable_prefix_caching=True
    ) as inner:
        engine = Blending(inner.llm)
        assert engine.blend([FIRST, SECOND], share=1.0) == [exact[FIRST], exact[SECOND]]
        assert engine.blend([Prompt((2,))], share=0.0) == [exact[Prompt((2,))]]
        engine.blend([SECOND])
        assert engine.reports[0]["held_tokens"] == 1171
        assert engine.ask([SECOND.tokens]) == [exact[SECOND]]


def test_an_engine_that_cannot_blend_says_why_and_is_exact(
    tiny_llama: str, exact: dict[Prompt, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CACHE | {"format": "blocks"}
    with started(tiny_llama, cache=cache, connector="KVBlendConnector") as inner:
        engine = Blending(inner.llm)
        assert engine.blend([SECOND]) == [exact[SECOND]]
        assert engine.reports == [
            {"refused": "kv_blend: this engine does not blend: its chunks have the format blocks, not canonical"}
        ]
        engine.assert_at_rest()
        (ours,) = engines().values()
        config = engine.llm.llm_engine.vllm_config
        assert why_not_blended(config, ours) in engine.reports[0]["refused"]  # nothing else
        for dtype, why in (("fp8", "its KV cache has not the model's dtype"), ("float32", "")):
            monkeypatch.setattr(config.cache_config, "cache_dtype", dtype)
            assert why in why_not_blended(config, ours) and ("dtype" in why_not_blended(config, ours)) == bool(why)
        # With the runner that GPUs have by default its workers would find no model.
        monkeypatch.setattr(type(config), "use_v2_model_runner", True)
        assert "start it with VLLM_USE_V2_MODEL_RUNNER=0" in why_not_blended(config, ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Gemma 3", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt-oss", "Llama 4"))]
)
def test_windows_and_chunked_attention_without_vllms_hybrid_manager(
    name: str, spelling_model: Callable[[str], str]
) -> None:
    """With it the engine drops what is behind a window, so that nothing can be computed there; that is refused."""
    model = spelling_model(name)
    exact = exact_answers(model)
    with started(model, cache=CACHE, connector="KVBlendConnector", disable_hybrid_kv_cache_manager=True) as inner:
        engine = Blending(inner.llm)
        for selection in SELECTIONS.values():
            assert engine.blend([FIRST, SECOND], share=1.0, **selection) == [exact[FIRST], exact[SECOND]]
        assert engine.blend([Prompt((1,))], share=0.0) == [exact[Prompt((1,))]]
        engine.blend([SECOND], share=0.0)
        assert engine.reports == [{"segment_tokens": 1171, "held_tokens": 1171, "recomputed_tokens": 0}]
        assert engine.ask([SECOND.tokens]) == [exact[SECOND]]
        engine.assert_at_rest()
    with started(model, cache=CACHE, connector="KVBlendConnector") as inner:
        engine = Blending(inner.llm)
        assert engine.blend([SECOND]) == [exact[SECOND]]
        assert "start it with --disable-hybrid-kv-cache-manager" in engine.reports[0]["refused"]


@pytest.mark.slow
def test_of_latents_the_rotated_part_is_moved(tiny_deepseek: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To what the engine computes where positions are as far on as the segment was moved."""
    placed, place = [], Filler._place

    def kept(self: Filler, step: BlendStep, segment: SegmentStep, lease: Any) -> Any:
        moved = place(self, step, segment, lease)
        assert self._forward is not None
        placed.append((self, segment.place, rows_of(self, self._forward.slots(step.blocks, *span(segment.place)))))
        return moved

    def span(place: Moved) -> tuple[int, int]:
        return place.first, place.end

    def rows_of(filler: Filler, slots: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.view(-1, tensor.shape[-1])[slots].clone() for tensor in filler._group.tensors]

    reference = {"attention_config": {"backend": "CPU_MLA"}}
    exact = exact_answers(tiny_deepseek, **reference)
    with started(tiny_deepseek, cache=CACHE, connector="KVBlendConnector", **reference) as inner:
        engine = Blending(inner.llm)
        for selection in SELECTIONS.values():
            assert engine.blend([FIRST, SECOND], share=1.0, **selection) == [exact[FIRST], exact[SECOND]]
        assert engine.blend([Prompt((1,))], share=0.0) == [exact[Prompt((1,))]]
        assert engine.blend([SECOND], **SELECTIONS["question"]) != [exact[SECOND]]
        assert engine.reports == [{"segment_tokens": 1171, "held_tokens": 1171, "recomputed_tokens": 157}]
        assert engine.ask([SECOND.tokens]) == [exact[SECOND]]
        engine.ask([BEFORE.tokens])
        everything = request_fields(**edited(BEFORE.tokens, SECOND.tokens), share=1.0)
        assert engine.blend([SECOND], fields=everything) == [exact[SECOND]]
        monkeypatch.setattr(Filler, "_place", kept)
        engine.blend([SECOND], share=0.0)
        assert len(placed) == 4
        for (filler, place_, rows), at in zip(placed, SECOND.order, strict=True):
            tokens, blocks = [*SYSTEM, *DOCUMENTS[at]], range(1, 64)
            assert filler._forward is not None
            filler._forward.compute([BatchEntry(blocks, tokens, 0, place_.distance)])
            further = rows_of(filler, filler._forward.slots(blocks, len(SYSTEM), len(tokens)))
            for ours, engines_ in zip(rows, further, strict=True):
                torch.testing.assert_close(ours, engines_, rtol=1e-3, atol=1e-3)
        # What the question is compared with are the keys that vLLM's decoding absorbs in its queries.
        layer: Any = next(iter(filler._layers.values()))
        query = torch.randn(layer.num_heads, layer.qk_nope_head_dim + layer.qk_rope_head_dim)
        unrotated, rotated = query.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
        absorbed = torch.cat((torch.bmm(unrotated[:, None], layer.W_UK_T)[:, 0], rotated), -1)
        scores = torch.einsum("hd,thd->th", query, keys_of_heads(layer, rows[0][:, None]))
        torch.testing.assert_close(scores, rows[0] @ absorbed.T, rtol=1e-3, atol=1e-3)
        # The AMX backend of vLLM's releases the weights by which they are computed.
        monkeypatch.setattr(layer.kv_b_proj, "weight", torch.nn.Parameter(torch.empty(0)))
        with pytest.raises(LookupError, match="start it with CPU_MLA"):
            keys_of_heads(layer, rows[0][:, None])
        monkeypatch.undo()
        engine.assert_at_rest()


ROTATIONS: dict[str, dict[str, object]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 1024},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama3", *(pytest.param(name, marks=pytest.mark.long) for name in ("linear", "dynamic", "yarn"))]
)
def test_keys_of_every_rotation_are_moved(name: str, tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proven on the model at its first plan. The control: without the scaling, the proof fails and the plan with it."""
    from kv_blend import rotations

    overrides = {"hf_overrides": {"rope_parameters": {"rope_theta": 10000.0, **ROTATIONS[name]}}}
    alone = Prompt((1,))
    with started(tiny_llama, cache=None, **overrides) as plain:
        expected = plain.ask([alone.tokens])
    with started(tiny_llama, cache=CACHE, connector="KVBlendConnector", **overrides) as inner:
        engine = Blending(inner.llm)
        assert engine.blend([alone], share=0.0) == expected
        assert "refused" not in engine.reports[0]
        engine.blend([SECOND], share=0.0)
        assert engine.reports[0]["held_tokens"] == len(DOCUMENTS[1])
    monkeypatch.setattr(rotations, "_frequencies", lambda _rotary: 10000.0 ** -(torch.arange(16) / 16))
    with started(tiny_llama, cache=CACHE, connector="KVBlendConnector", **overrides) as inner:
        engine = Blending(inner.llm)
        assert engine.blend([alone], share=0.0) == expected
        assert "computed whole" in engine.reports[0]["refused"]


FUNCTIONS = [
    *((BlendScheduler, name) for name in ("read", "match", "allocated", "take_steps", "ended", "finished")),
    *((BlendWorker, name) for name in ("add", "advance")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "name"), FUNCTIONS, ids=lambda one: getattr(one, "__name__", one))
def test_whatever_raises_below_a_hook_the_engine_goes_on(
    part: type, name: str, tiny_llama: str, exact: dict[Prompt, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is off from then on; no request waits for ever, and tokens are right."""

    def fails(*_arguments: object, **_named: object) -> object:
        raise KeyError("a bug of ours")

    with started(tiny_llama, cache=CACHE, connector="KVBlendConnector") as inner:
        engine = Blending(inner.llm)
        monkeypatch.setattr(part, name, fails)
        for _ in range(2):
            assert engine.blend([FIRST, SECOND], share=1.0) == [exact[FIRST], exact[SECOND]]
            assert engine.ask([SECOND.tokens]) == [exact[SECOND]]
        assert "a bug of ours" in engine.inside("kv_snapshot")["off"]
