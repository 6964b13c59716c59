"""A connector beside ours under vLLM's MultiConnector: keeps whole blocks in a dictionary, and fails when told to.

It works where scheduler and worker are in one process. Blocks that it fails to fill hold noise, as they would after
another request, and it reports them as vLLM asks for.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class Behaviour:
    """What all connectors of this process do.

    offers: whether it answers lookups.
    is_async: whether its loads run between steps.
    fails: which of the blocks of a load it does not fill: "first", "middle", "last", or "" for none.
    whole_requests: an asynchronous load fails as a request, not by its blocks.
    chance: whether it offers what it holds, at this lookup.
    late: a failure of a synchronous load is reported with the output of the step after it.
    """

    offers: bool = True
    is_async: bool = False
    fails: str = ""
    whole_requests: bool = False
    chance: Callable[[], bool] = lambda: True
    late: bool = False
    failed_requests: set[str] = field(default_factory=set)
    loaded_blocks: int = 0
    held: dict[tuple[int, ...], list[torch.Tensor]] = field(default_factory=dict)


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]  # the engine's classes are untyped here
    """loads, saves: by request, its tokens, its blocks, and the tokens that the engine had or has itself."""

    loads: dict[str, tuple[list[int], list[int], int, int]]
    saves: dict[str, tuple[list[int], list[int]]]


class Unreliable(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # the engine's classes are untyped here
    now: ClassVar[Behaviour] = Behaviour()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._requests: dict[str, Any] = {}
        self._own_tokens: dict[str, int] = {}
        self._accepted: dict[str, tuple[list[int], list[int], int, int]] = {}
        self._failed_blocks: set[int] = set()
        self._late_blocks: set[int] = set()
        self._finished: set[str] = set()
        self._failed: set[str] = set()

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._requests[request.request_id] = request
        self._own_tokens[request.request_id] = num_computed_tokens
        tokens, size = list(request.all_token_ids), self._block_tokens
        blocks = 0
        while (blocks + 1) * size < len(tokens) and tuple(tokens[: (blocks + 1) * size]) in self.now.held:
            blocks += 1
        found = blocks * size - num_computed_tokens
        does_offer = self.now.offers and request.request_id not in self.now.failed_requests
        return (found, self.now.is_async) if does_offer and found > 0 and self.now.chance() else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = self._own_tokens[request.request_id] // self._block_tokens
            last = first + num_external_tokens // self._block_tokens
            self._accepted[request.request_id] = (list(request.all_token_ids), blocks.get_block_ids()[0], first, last)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        loads, self._accepted = self._accepted, {}
        saves = {}
        for request_id, new_tokens in scheduler_output.num_scheduled_tokens.items():
            if (request := self._requests.get(request_id)) is not None:
                whole = (request.num_computed_tokens + new_tokens) // self._block_tokens
                table = scheduler_output.kv_connector_block_state.get_block_ids(request_id)[0]
                saves[request_id] = (list(request.all_token_ids), table[:whole])
        return Metadata(loads, saves)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        return False, None

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, (tokens, table, first, last) in self._get_connector_metadata().loads.items():
            places = {"first": first, "middle": (first + last) // 2, "last": last - 1}
            bad = {places[self.now.fails]} if self.now.fails else set()
            for number in range(first, last):
                for layer, kept in zip(
                    self._layers, self.now.held[tuple(tokens[: (number + 1) * self._block_tokens])], strict=True
                ):
                    layer[table[number]] = torch.randn_like(kept) if number in bad else kept
            if bad:
                self.now.failed_requests.add(request_id)  # else vLLM would ask again for ever
            self.now.loaded_blocks += last - first
            if self.now.is_async:
                self._finished.add(request_id)
            if bad and self.now.is_async and self.now.whole_requests:
                self._failed.add(request_id)
            else:
                self._failed_blocks |= {table[number] for number in bad}

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        for tokens, table in self._get_connector_metadata().saves.values() if self.now.offers is False else ():
            for number, block in enumerate(table):
                key = tuple(tokens[: (number + 1) * self._block_tokens])
                self.now.held.setdefault(key, [layer[block].clone() for layer in self._layers])

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, failed, self._finished, self._failed = self._finished, self._failed, set(), set()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        if self.now.late:
            failed, self._late_blocks = self._late_blocks, failed
        return failed


def beside(cache: dict[str, Any]) -> dict[str, Any]:
    """Options of `engines.started` for this connector and, after it, ours with these settings."""
    both = [
        {"kv_connector": "Unreliable", "kv_role": "kv_both", "kv_connector_module_path": "unreliable"},
        {"kv_connector": "KVTiersConnector", "kv_role": "kv_both", "kv_connector_extra_config": cache},
    ]
    return {"connector": "MultiConnector", "cache": {"connectors": both}, "chunk_tokens": None}
