"""Real SGLang engines for tests: started with and without us, asked, emptied, and shut down."""

import asyncio
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from kv_sglang.cli import engine_arguments
from kv_testing.wait import until
from kv_tiers.pool.directory import nbytes_for
from kv_tiers.pool.host_pool import pool_path
from nursery import nursery
from PIL import Image

PAGE = 16
NEW_TOKENS = 8
ON_A_CORE_EACH = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""Two ranks."""
SHARED = [3 + (7919 * i) % 2000 for i in range(1024)]
PROMPTS = [
    SHARED[:512] + [11 + i for i in range(90)],
    SHARED[:512] + [1200 + i for i in range(150)],
    SHARED[:1024],  # whole pages only: a full hit must leave something to compute
    SHARED[:1000],
    [5 + (31 * i) % 1900 for i in range(10)],  # shorter than a page: never stored
    SHARED[256:900],  # the same tokens at other positions are another prefix
]
COLD_HITS = [0, 512, 512, 992, 0, 0]
WARM_HITS = [(len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS]


@dataclass(frozen=True)
class Answer:
    """What was generated, and the logarithm of each token's probability. Equal up to the last digits of a float."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Answer)
            and self.tokens == other.tokens
            and bool(np.allclose(self.logprobs, other.logprobs, rtol=0, atol=2e-4))
        )

    def __hash__(self) -> int:
        return hash(self.tokens)


class Engine:
    """One `sglang.Engine`, asked in token ids. hits: how many tokens of each prompt came from our storage."""

    def __init__(self, inner: Any, ours: str) -> None:
        """ours: by what name SGLang counts what came from us."""
        self.inner = inner
        self._ours = ours
        self.hits: list[int] = []

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        custom_params: dict[str, Any] | None = None,
        new_tokens: int = NEW_TOKENS,
        **arguments: Any,
    ) -> list[Answer]:
        """Generate greedily for all prompts at once.

        custom_params: of the requests. arguments: more of them for `sglang.Engine.generate`.
        """
        return self._ask(custom_params, new_tokens, input_ids=[list(prompt) for prompt in prompts], **arguments)

    def ask_about(self, questions: Sequence[dict[str, Any]]) -> list[Answer]:
        """One after the other, the engine's own two caches emptied in between: `prompt`, a text in which
        `image`, a picture drawn from this number, has its place; and more for `sglang.Engine.generate`."""
        answers, hits = [], []
        for question in questions:
            self.flush()
            pixels = np.random.default_rng(question["image"]).integers(0, 255, (112, 112, 3), dtype=np.uint8)
            more = {name: [given] for name, given in question.items() if name not in ("image", "prompt")}
            answers += self._ask(
                None, NEW_TOKENS, prompt=[question["prompt"]], image_data=[Image.fromarray(pixels)], **more
            )
            hits += self.hits
        self.hits = hits
        return answers

    def _ask(
        self, custom_params: dict[str, Any] | None, new_tokens: int = NEW_TOKENS, **arguments: Any
    ) -> list[Answer]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, "custom_params": custom_params}
        outputs = self.inner.generate(sampling_params=sampling, return_logprob=True, **arguments)
        details = [output["meta_info"].get("cached_tokens_details") or {} for output in outputs]
        self.hits = [detail.get(self._ours, 0) for detail in details]
        return _answers(outputs)

    def blend(
        self, prompts: Sequence[Sequence[int]], fields: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Answer], list[Any]]:
        """Ask for all of these at once; `hits` are what SGLang had of each, from wherever.

        fields: those of `kv_blend.request_fields` for each, or none. Returns the answers, and what they say of their
        blending.
        """
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        outputs = self.inner.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=[{**sampling, "custom_params": each.get("custom_params")} for each in fields],
            cache_salt=[each.get("cache_salt", "") for each in fields],
            return_logprob=True,
        )
        self.hits = [output["meta_info"]["cached_tokens"] for output in outputs]
        return _answers(outputs), [output["meta_info"].get("kv_blend") for output in outputs]

    def refusal(self, prompt: Sequence[int], fields: dict[str, Any]) -> str:
        """Why this request is refused; empty if it is not."""
        try:
            self.blend([prompt], [fields])
        except ValueError as error:
            return str(error)
        return ""

    def leave_in_the_middle(self, prompt: Sequence[int], fields: dict[str, Any], requests: int) -> None:
        """Cancel a blended request once it has made so many requests of SGLang."""
        manager = self.inner.tokenizer_manager

        async def leave() -> None:
            asked = self.inner.async_generate(
                input_ids=list(prompt),
                sampling_params={"max_new_tokens": NEW_TOKENS, "custom_params": fields["custom_params"]},
                cache_salt=fields["cache_salt"],
            )
            task, seen = asyncio.ensure_future(asked), set[str]()
            while len(seen) < requests and not task.done():
                await asyncio.sleep(0)
                seen |= manager.rid_to_state.keys()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        self._run(leave())

    def ask_in_turn(self, prompts: Sequence[Sequence[int]], **arguments: Any) -> list[Answer]:
        """One after the other, the engine's own two caches emptied in between: what is found is found in ours."""
        answers, hits = [], []
        for prompt in prompts:
            self.flush()
            answers += self.ask([prompt], **arguments)
            hits += self.hits
        self.hits = hits
        return answers

    def update_weights(self, model: str, *, flush_cache: bool = True) -> None:
        """In place, from the files of another model of the same shape. flush_cache: SGLang empties its own caches."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        request = UpdateWeightFromDiskReqInput(model_path=model, flush_cache=flush_cache)
        manager = self.inner.tokenizer_manager
        success, message, _ = self._run(manager.update_weights_from_disk(request, None))
        assert success, message

    def update_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """One of the model's, in place."""
        steps = (
            self.inner.begin_weight_update,
            lambda: self.inner.update_weights_from_tensor([(name, tensor)]),
            self.inner.end_weight_update,
        )
        for step in steps:
            success, message = step()[:2]
            assert success, message

    def detach(self) -> None:
        """SGLang lets go of its storage, and goes on without, once it has nothing under way. What waits is stored
        first; `Engine.shutdown` kills the processes with it (docs/contracts/sglang.md)."""
        until(lambda: self._run(self.inner.tokenizer_manager.detach_hicache_storage()).success, within_s=30)

    def attach(self, cache: dict[str, Any], page: int = PAGE) -> None:
        """We become its storage while it runs, with this extra config."""
        settings = engine_arguments({"prefetch_threshold": page, **cache}, page_size=page)
        attached = self._run(
            self.inner.tokenizer_manager.attach_hicache_storage(
                hicache_storage_backend="dynamic",
                hicache_storage_backend_extra_config_json=settings["hicache_storage_backend_extra_config"],
                hicache_storage_prefetch_policy="wait_complete",
            )
        )
        assert attached.success, attached.message

    def _run(self, call: Any) -> Any:
        return self.inner.loop.run_until_complete(call)

    def flush(self) -> None:
        """Empty the engine's caches on device and host, once it has nothing under way. Storage keeps what it has."""
        until(lambda: self.inner.flush_cache().success, within_s=30)


def _answers(outputs: Sequence[Any]) -> list[Answer]:
    return [
        Answer(tuple(output["output_ids"]), tuple(entry[0] for entry in output["meta_info"]["output_token_logprobs"]))
        for output in outputs
    ]


def started(model: str, **given: Any) -> AbstractContextManager[Engine]:
    """A running engine in a process of its own, with what `in_this_process` is given."""
    return cast(AbstractContextManager[Engine], nursery().started(model, **given))


@contextmanager
def in_this_process(
    model: str,
    *,
    cache: dict[str, Any] | None = None,
    page: int = PAGE,
    linker: bool = False,
    blends: bool = False,
    environ: dict[str, str] | None = None,
    **arguments: Any,
) -> Iterator[Engine]:
    """A running engine; `cache` is our extra config, None for an engine without HiCache.

    linker: through SGLang's external linker in place of HiCache. blends: with the storage of kv-blend.
    """
    import sglang
    from kv_blend.sglang import plugin as blending

    chosen: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "dtype": "float32",
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "max_total_tokens": 4096,
        "page_size": page,
        "mem_fraction_static": 0.5,
        "sleep_on_idle": True,
        "log_level": "error",
    }
    if cache is not None and linker:
        chosen |= engine_arguments(cache, page_size=page, linker=True)
    elif cache is not None and blends:
        chosen |= blending.engine_arguments(cache, page_size=page)
    elif cache is not None:
        chosen["hicache_storage_prefetch_policy"] = "wait_complete"
        chosen |= engine_arguments({"prefetch_threshold": page, **cache}, page_size=page)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environ or {}).items():
            patch.setenv(name, value)
        inner = sglang.Engine(model_path=model, **chosen | arguments)
        try:
            yield Engine(inner, "host" if linker else "storage")
        finally:
            inner.shutdown()


def corrupt(pool: str, factor: float = 0.5) -> None:
    """Multiply every float32 in a named host pool, under the engine that is using it: what wrong bytes would do."""
    with pool_path(pool).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        # What is where lies in front of the chunks.
        slots = int.from_bytes(mapping[32:40], "little")
        values = np.frombuffer(mapping, dtype=np.float32, offset=nbytes_for(slots))
        values *= np.float32(factor)
        del values
