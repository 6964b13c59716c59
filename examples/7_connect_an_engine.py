"""Connect an engine of your own: describe its memory, let the canary prove it, and follow requests through both halves.

The engine here is a toy: it "computes" KV from the tokens alone. A real one calls the same methods from its hooks; what
each of them means is at the top of `kv_connect/halves/scheduler.py` and `worker.py`.
"""

import itertools

import torch
from kv_connect.engine import EngineFacts, engine_of, release
from kv_connect.guard import always, guarded
from kv_connect.halves.request import RequestTokens, Scheduled
from kv_connect.identity import ServedModel
from kv_connect.neighbours import StoredFormat
from kv_connect.nodes import ALONE
from kv_connect.open_cache import Format
from kv_cuda import split_parts
from kv_cuda.bind import BoundGroups, bind_groups
from kv_cuda.canary import LayerGroup
from kv_tiers.settings import load

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, DIM = 2, 32, 16, 2, 8


class ToyEngine:
    """Paged memory of [layers, blocks, K and V, tokens, heads, dims], and nothing else."""

    def __init__(self) -> None:
        self.memory = torch.zeros(LAYERS, BLOCKS, 2, BLOCK_TOKENS, HEADS, DIM)
        self.free = itertools.count()

    def update(self, layer: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        """The engine's own cache update, by which the canary finds out where rows really lie."""
        for part, name in enumerate(("k", "v")):
            self.memory[layer, slots // BLOCK_TOKENS, part, slots % BLOCK_TOKENS] = rows[name]

    def compute(self, tokens: list[int], first: int, blocks: list[int]) -> None:
        """The KV of tokens[first:], into their slots."""
        for position in range(first, len(tokens)):
            block, offset = blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            self.memory[:, block, :, offset] = float(hash(tuple(tokens[: position + 1])) % 1000)


class Connector:
    """What the toy calls around each request. A bug of ours in it turns the cache off, and the toy goes on."""

    def __init__(self, toy: ToyEngine, name: str) -> None:
        self.toy, self.engine = toy, engine_of(name)
        settings, _ = load({"chunk_tokens": 32, "host": {"capacity_bytes": "1MiB"}}, {})
        model = ServedModel("toy", "toy-model", None, "float32", dummy_seed=0)
        bound = bind_groups([self.describe()], settings.format, settings.chunk_tokens)
        assert isinstance(bound, BoundGroups), bound.reason
        facts = EngineFacts(
            chunk_tokens=settings.chunk_tokens,
            groups=bound.shapes,
            shards=ALONE.shards,
            kv_dtype=bound.kv_dtype,
            kv_scales=bound.kv_scales,
            formats=tuple(chunk_format.kind for chunk_format in bound.formats),
            layouts=tuple(layout.name for layout in bound.layouts),
        )
        chunks = Format(bound.group_bytes, bound.fingerprint)
        kept = StoredFormat.of(model, bound.kind, bound.fingerprint)
        self.engine.bind_worker(settings, facts, chunks, kept, bound.copiers, share=ALONE, in_process=True)
        self.worker = self.engine.start_worker()
        self.scheduler = self.engine.start_scheduler(lambda _kv_scales: model)

    def describe(self) -> LayerGroup:
        """The layouts that this memory could have. The canary picks the one that is shown to be right."""
        token, part = HEADS * DIM, BLOCK_TOKENS * HEADS * DIM
        sizes: dict[str, int | str] = {
            "dtype": "float32",
            "itemsize": 4,
            "layers": LAYERS,
            "blocks": BLOCKS,
            "block_tokens": BLOCK_TOKENS,
            "heads": HEADS,
            "head_dim": DIM,
        }
        k_then_v = split_parts("K‖V", block=2 * part, token=token, head=DIM, dim=1, value_offset=part, **sizes)
        return LayerGroup(
            tensors=tuple(self.toy.memory),
            block_tokens=BLOCK_TOKENS,
            blocks=BLOCKS,
            candidates=(k_then_v,),
            opaque=k_then_v,
            origin="toy 1",
            row_dtype=torch.float32,
            row_shape=(HEADS, DIM),
            update=self.toy.update,
        )

    @property
    def off(self) -> str:
        return self.engine.off

    def turn_off(self, why: str, error: BaseException | None = None) -> None:
        self.engine.turn_off(why, error)

    @guarded(always(0))
    def load(self, request: RequestTokens, blocks: list[int]) -> int:
        """How many leading tokens are in the blocks now."""
        assert self.engine.weights is not None
        self.engine.weights.follow(self.scheduler)  # which weights are served may be known only now, or have changed
        found = self.scheduler.match(request, 0) or 0
        self.scheduler.allocated(request.request_id, found, (blocks,))
        self.worker.start_loads(self.scheduler.build_step([]))
        while found:
            report = self.worker.poll()
            self.scheduler.loads_ended(report.finished, report.failed)
            if request.request_id in report.finished:
                return 0 if request.request_id in report.failed else found
        return 0

    @guarded(always(None))
    def store(self, request: RequestTokens, blocks: list[int]) -> None:
        """After a step that computed the whole prompt."""
        self.worker.stores.start(self.scheduler.build_step([Scheduled(request, len(request.tokens), (blocks,))]))
        self.worker.stores.finish()
        self.scheduler.finished(request.request_id)

    def close(self) -> None:
        for role in ("WORKER", "SCHEDULER"):
            release(self.engine.id, role)


toy = ToyEngine()
connector = Connector(toy, "toy-engine")
shared = list(range(100, 170))
for number, prompt in enumerate(([*shared, 1, 2], [*shared, 3, 4, 5])):
    request = RequestTokens(f"request {number}", prompt, keep_tokens=len(prompt))
    blocks = [next(toy.free) for _ in range(-(-len(prompt) // BLOCK_TOKENS))]
    found = connector.load(request, blocks)
    loaded = toy.memory[:, blocks].clone()
    toy.compute(prompt, 0, blocks)  # all of it, only to compare; a real engine goes on behind what was found
    whole = found // BLOCK_TOKENS
    assert torch.equal(loaded[:, :whole], toy.memory[:, blocks[:whole]])
    connector.store(request, blocks)
    print(f"{request.request_id}: {found} of {len(prompt)} tokens loaded, {len(prompt) - found} computed")
assert found == 64 and not connector.off
connector.close()
