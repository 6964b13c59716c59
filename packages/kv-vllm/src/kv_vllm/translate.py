"""Translates vLLM's requests and scheduler outputs for `kv_connect.halves`. Reads vLLM's objects, changes none."""

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from kv_connect.adapters import Unsure
from kv_connect.engine import Engine
from kv_connect.halves.engine_costs import MIN_PREFILL_TOKENS
from kv_connect.halves.request import RequestTokens, Scheduled
from kv_connect.halves.scheduler import QuietSteps, SchedulerHalf
from kv_connect.halves.step import StepPlan
from kv_connect.request_options import chosen
from kv_connect.turns import Turns
from kv_core.errors import InputError
from kv_core.hashing import Item
from kv_tiers.settings import Settings

from kv_vllm.handover import with_handover
from kv_vllm.layouts import keeps_prompts_only, settled_states
from kv_vllm.media_names import content_name
from kv_vllm.weights import adapter_identity


def request_reader(
    vllm_config: Any, kv_cache_config: Any, settings: Settings, engine: Engine
) -> Callable[[Any], RequestTokens | Unsure | None]:
    """Translates the `Request`s of one vLLM engine; a translation is valid for as long as its request lives. None if
    the request's content has no stable identity; `Unsure` if that is not known yet, and the engine has to ask again.

    The following have none: prompts given as embeddings, streaming sessions with media, media at impossible places,
    adapters that are reloaded in place or whose files have not been read yet, and names that are not Unicode.

    settings: the defaults of requests.
    engine: read anew at each call.
    """
    prompts_only = keeps_prompts_only(kv_cache_config)
    default_controls = chosen(settings, None, "")
    # If False, the model's pooler may give another result where only the last part of a prompt is computed.
    pools_parts = bool(vllm_config.model_config.is_prefix_caching_supported)
    engine_token = secrets.token_hex(8)  # a client's name for an image is valid only in this engine

    def read(request: Any) -> RequestTokens | Unsure | None:
        lora = request.lora_request
        if request.pooling_params is not None and not pools_parts:
            return None
        named_by_tokens = request.prompt_embeds is None and request.prompt_is_token_ids is None
        if not named_by_tokens or (request.resumable and request.mm_features):
            return None
        adapter = None
        if lora is not None:
            identity = adapter_identity(engine.weights)
            identity_or_unsure = None if lora.load_inplace or identity is None else identity(lora, request.request_id)
            if not isinstance(identity_or_unsure, str):
                return identity_or_unsure
            adapter = identity_or_unsure
        salt = request.cache_salt or None
        if not _are_unicode(salt, adapter):
            return None
        try:
            items = tuple(_items(request.mm_features, engine_token, trusts_clients=settings.trust_media_hashes))
        except InputError:  # a client may give them names and places
            return None
        params, controls = request.kv_transfer_params, default_controls
        if params is not None or request.kv_hints is not None:
            tiers = () if engine.cache is None else engine.cache.tiers
            controls = chosen(settings, params, request.request_id, tiers=tiers, hints=request.kv_hints)
        controls = with_handover(controls, params, request.num_prompt_tokens, settings)
        if request.skip_reading_prefix_cache:  # it wants every token computed, as for `prompt_logprobs`
            controls = msgspec.structs.replace(controls, load=False)
        return RequestTokens(
            request_id=request.request_id,
            tokens=request.all_token_ids,  # a live view: it grows as tokens are generated
            keep_tokens=sys.maxsize if controls.save_decode and not prompts_only else request.num_prompt_tokens,
            salt=salt,
            lora=adapter,
            items=items,
            controls=controls,
        )

    return read


def _are_unicode(*names: str | None) -> bool:
    """Whether these names are valid Unicode. A name that came from the system, such as a file's, need not be."""
    try:
        "".join(filter(None, names)).encode()
    except UnicodeEncodeError:
        return False
    return True


def _items(features: Any, engine_token: str, *, trusts_clients: bool) -> Iterator[Item]:
    for feature in features or ():
        # A client may give its own name to an item, and another client may later give the same name to a different
        # item, which neither another engine nor this one after a restart can detect.
        name = content_name(feature.identifier, feature.mm_hash, trusts_clients=trusts_clients)
        yield Item(
            name or f"{feature.identifier}@{engine_token}", feature.mm_position.offset, feature.mm_position.length
        )


class Sessions:
    """The sessions of one scheduler, with the length of their prompts when they were last examined.

    Streaming sessions are requests whose prompt grows while they live. When a turn has ended, vLLM keeps the computed
    tokens, drops the last sampled one, and appends the next input; all of that is the prompt from then on. No stored
    chunk becomes wrong: only computed tokens are stored, and the prompt of a lookup is computed before the turn ends.
    The exception is a session that lost its blocks before its next input arrived: vLLM then restarts it, and so do we.
    """

    def __init__(self) -> None:
        self._prompt_tokens: dict[str, int] = {}

    def is_another(self, request: Any) -> bool:
        """Whether vLLM restarts the session with a different prompt. Called when vLLM looks the request up, which it
        does only if the request has no blocks.
        """
        return request.resumable and self._update(request) not in (None, request.num_prompt_tokens)

    def follow(self, output: Any, requests: dict[str, tuple[Any, RequestTokens]]) -> list[str]:
        """Give the sessions that continue in this step their longer prompts. Returns those that can no longer be named,
        because media came with their input.

        output: vLLM's `SchedulerOutput`.
        requests: vLLM's and our requests, by id.
        """
        dropped = []
        for scheduled in output.scheduled_new_reqs:
            request, tokens = requests.get(scheduled.req_id, (None, None))
            if request is None or tokens is None or not request.resumable:
                continue
            previous_tokens = self._update(request)
            if request.mm_features:
                dropped.append(scheduled.req_id)
            elif tokens.keep_tokens == previous_tokens:  # else generated tokens are stored as well
                requests[scheduled.req_id] = (request, replace(tokens, keep_tokens=request.num_prompt_tokens))
        return dropped

    def forget(self, request_id: str) -> None:
        self._prompt_tokens.pop(request_id, None)

    def _update(self, request: Any) -> int | None:
        """Note the length of the session's prompt; returns the length noted before."""
        previous_tokens = self._prompt_tokens.get(request.request_id)
        self._prompt_tokens[request.request_id] = request.num_prompt_tokens
        return previous_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """A step. scheduled: the requests that may have something to store.

    tokens: the number of tokens that the step computes, over all requests.
    most_tokens: the largest number of tokens of one request.
    pairs: the number of pairs of a token and one that it attends to, over our requests; 0 if no prompt is computed.
    """

    scheduled: list[Scheduled]
    tokens: int
    most_tokens: int
    pairs: float


class StepReader:
    """Reads the steps of one scheduler."""

    def __init__(self, vllm_config: Any, half: SchedulerHalf) -> None:
        self._vllm_config = vllm_config
        self._half = half
        self._quiet = QuietSteps(half.shape)
        self._running: set[str] = set()

    def look_again(self) -> None:
        """Examine every request in the next step, because some may have to be stored again."""
        self._quiet.end()

    def read(self, output: Any, requests: Mapping[str, tuple[Any, RequestTokens]]) -> Step:
        """
        output: vLLM's `SchedulerOutput`. requests: vLLM's and our requests, by id.
        """
        counts, block_state = output.num_scheduled_tokens, output.kv_connector_block_state
        tokens = output.total_num_scheduled_tokens
        most = 1 if tokens == len(counts) else max(counts.values(), default=0)  # each has at least one
        handed_over = {} if block_state is None else block_state.boundary_state_offloads
        has_arrivals = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        if self._quiet.passes(most) and most < MIN_PREFILL_TOKENS and not (has_arrivals or handed_over):
            return Step([], tokens, most, 0.0)
        self._quiet.begin()
        scheduled, pairs = [], 0.0
        # A state is offered once, even if its request was completed by an earlier step and is not in this one.
        for request_id, new_tokens in (dict.fromkeys(handed_over, 0) | counts).items():
            if request_id not in requests:
                continue
            request, request_tokens = requests[request_id]
            computed_tokens = request.num_computed_tokens + new_tokens
            pairs += new_tokens * (computed_tokens - new_tokens / 2)
            # vLLM copies the whole table on request, and most steps of most requests complete no chunk.
            if request_id in handed_over or self._half.completes_chunk(request_tokens, computed_tokens):
                states = settled_states(self._vllm_config, output, request)
                scheduled.append(
                    Scheduled(request_tokens, computed_tokens, block_state.get_block_ids(request_id), states)
                )
            self._quiet.looked_at(request_tokens, computed_tokens)
        self._examine_absent(counts, requests)
        return Step(scheduled, tokens, most, pairs)

    def planned(self, step: Step, plan: StepPlan) -> None:
        """The step was sent to the workers with this plan."""
        if (costs := self._half.costs) is not None:
            counts = step.most_tokens >= MIN_PREFILL_TOKENS and not plan.loads
            costs.step_scheduled(step.tokens, step.pairs, counts=counts)

    def _examine_absent(
        self, scheduled_tokens: Mapping[str, int], requests: Mapping[str, tuple[Any, RequestTokens]]
    ) -> None:
        """Examine requests that are running but not in this step: they may be in the next one."""
        self._running.update(scheduled_tokens)
        self._running &= requests.keys()
        for request_id in self._running - scheduled_tokens.keys():
            request, request_tokens = requests[request_id]
            self._quiet.looked_at(request_tokens, request.num_computed_tokens)


def turns_of(model_config: Any) -> Turns:
    def tokenizer() -> Any:
        from vllm.tokenizers import cached_tokenizer_from_config

        return None if model_config.skip_tokenizer_init else cached_tokenizer_from_config(model_config)

    return Turns.of(tokenizer)


def has_ended_turn(request: Any, turns: Turns) -> bool:
    """Whether this request, which has finished, ended its user's turn."""
    structure = None if request.sampling_params is None else request.sampling_params.structured_outputs
    return turns.has_ended(
        request.output_token_ids,
        has_stopped=request.status.name == "FINISHED_STOPPED",
        is_json=structure is not None and structure.json is not None,
    )
