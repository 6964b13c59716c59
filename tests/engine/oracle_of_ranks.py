"""The oracle with two tensor-parallel ranks whose processes are apart from the scheduler's, as far as we can tell.

Each rank has a connector, a cache at the server, and KV of its own, in which every value differs from the other's. The
scheduler's connector has a third cache. What they say to each other is pickled, and vLLM's own class aggregates what
the ranks put out.
"""

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kv_connect.engine import Engine as Attached
from kv_connect.nodes import share_of
from kv_server.remote_cache import RemoteCache
from kv_vllm import bind, connector
from kv_vllm.connector import KVTiersConnector
from oracle import KV_HEADS, LAYERS, Oracle, _layer
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import ModelRunnerOutput
from work import Work

RANKS = 2


@dataclass(slots=True)
class Rank:
    """What an `Oracle` has of its worker."""

    worker: KVTiersConnector
    engine: Attached
    caches: dict[str, torch.Tensor]
    layers: dict[str, Any]

    @property
    def cache(self) -> RemoteCache:
        assert isinstance(self.engine.cache, RemoteCache)
        return self.engine.cache


class OracleOfRanks(Oracle):
    """`engine` is the scheduler's. `_forward` is every rank's, one after the other."""

    def __init__(self, model: str, **options: Any) -> None:
        """options: as for `Oracle`; the server must be among them."""
        self.ranks: list[Rank] = []
        self._engines: list[Attached] = []
        self._aggregator = KVOutputAggregator(RANKS)

        def engine_of(engine_id: str) -> Attached:
            self._engines.append(Attached(engine_id))
            return self._engines[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connector, "engine_of", engine_of)
            for module in (connector, bind):
                patch.setattr(module, "in_one_process", lambda _config: False)
            patch.setattr(
                bind, "rank_share", lambda *_configs: share_of(len(self.ranks) % RANKS, RANKS, RANKS * KV_HEADS)
            )
            super().__init__(model, **options)

    @property
    def engine(self) -> Attached:
        return self._engines[-1]

    @property
    def cache(self) -> RemoteCache:
        """The scheduler's."""
        assert isinstance(self.engine.cache, RemoteCache)
        return self.engine.cache

    @property
    def loaded(self) -> int:
        """By every rank."""
        loaded = {rank.engine.worker.counts.loaded_tokens for rank in self.ranks if rank.engine.worker is not None}
        assert len(loaded) == 1
        return loaded.pop()

    @property
    def layerwise(self) -> int:
        assert self.engine.scheduler is not None
        return self.engine.scheduler.counts.loads_layerwise

    def make_ready(self) -> None:
        """Wait until the ranks have made ready what they were asked to, and said so."""
        for rank in self.ranks:
            assert rank.engine.pools is not None
            if rank.engine.pools._thread is not None:
                rank.engine.pools._thread.join()
        number = len(self.generated)
        self.submit(f"makes ready {number}", [5 + number % 40], 2)

    def assert_at_rest(self) -> None:
        assert [fault for engine in self._engines for fault in engine.faults] == []
        assert self.engine.scheduler is not None and self.engine.scheduler.tracked_phases() == {}
        counts = self.cache.counts()
        assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0
        assert not self.cache._lasting and not self.scheduler.connector._promised.are_under_way

    def close(self, *, drain: bool = True) -> None:
        super().close(drain=drain)
        for engine in self._engines:
            engine.release("WORKER")
            engine.release("SCHEDULER")

    def _start_worker(self) -> None:
        for number in range(RANKS):
            if number:
                blocks = len(next(iter(self.caches.values())))
                self.caches, self.layers = {}, {}
                with set_current_vllm_config(self.vllm_config):
                    for name in self.names[0]:
                        self.caches[name], self.layers[name] = _layer(blocks)
            super()._start_worker()
            assert self.worker is not None
            self.ranks.append(Rank(self.worker, self._engines[-1], self.caches, self.layers))

    def _forward(self, output: Any, works: list[Work], sampled: list[list[int]]) -> ModelRunnerOutput | None:
        results = []
        sent = pickle.dumps(output.kv_connector_metadata)
        for number, rank in enumerate(self.ranks):
            self.worker, self.caches, self.layers = rank.worker, rank.caches, rank.layers
            self._first_layer = number * 10 * LAYERS
            output.kv_connector_metadata = pickle.loads(sent)
            results.append(pickle.loads(pickle.dumps(super()._forward(output, works, sampled))))
        return self._aggregator.aggregate(results)
