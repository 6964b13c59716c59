"""Fills one request's blocks up to its last segment.

In this order: segments that the cache lacks and that may be stored are computed behind their context, as batch entries
in the request's own blocks, which nobody reads yet, and stored. All segments are read from the pool, their keys moved
to where they stand in this request, and written to its blocks. Then everything else, and the tokens selected in
segments, are computed in their places. To select by the question, it is computed behind them first.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import compress
from typing import Any, cast

import torch
from kv_connect.engine import Engine
from kv_core.keys import ChunkKey, keys_in
from kv_core.service import LoadFailed, ReadLease
from kv_core.transfer import plan_transfer
from kv_cuda.canary import LayerGroup

from kv_blend.rotations import DISTANCE, PROBE_TOKENS, CannotMoveError, Rotation, proven_rotations
from kv_blend.selection import Selection, attention_of
from kv_blend.vllm.forward import BatchEntry, EngineForward, attended, keys_of_heads, latent_dims_of
from kv_blend.vllm.scheduler import BlendStep, Limits, SegmentStep
from kv_blend.vllm.worker import CannotBlendError, Filling, Ranks, Together


class Filler:
    """Of one rank."""

    def __init__(
        self, engine: Engine, group: LayerGroup, layers: Mapping[str, torch.nn.Module], limits: Limits, ranks: Ranks
    ) -> None:
        """group: the model's one group of layers. layers: its attention layers by name, in the group's order."""
        self._engine = engine
        self._group = group
        self._layers = dict(layers)
        self._limits = limits
        self._ranks = ranks
        self._latent_dims = latent_dims_of(next(iter(self._layers.values())))
        self._block_tokens = group.table_tokens or group.block_tokens
        self._forward: EngineForward | None = None
        self._rotations: list[Rotation] = []
        self._why_not = ""

    def fill(self, step: BlendStep) -> Filling:
        """Fill the request's blocks."""
        cache = self._engine.cache
        assert cache is not None
        holder = f"{self._engine.id}/blend/worker/{step.request_id}"
        try:
            yield from self._prepare(step)
            leases = [self._lease(step, segment, holder) if segment.is_held else None for segment in step.segments]
            leases = yield from self._leased_by_all(leases)
            pairs = enumerate(zip(step.segments, leases, strict=True))
            missing = [number for number, (segment, lease) in pairs if lease is None and segment.may_store]
            for numbers in self._fitting(step, missing):
                yield from self._compute_alone(step, [step.segments[number] for number in numbers], holder)
                for number in numbers:
                    leases[number] = self._lease(step, step.segments[number], holder)
            leases = yield from self._leased_by_all(leases)
            reused = [(segment, lease) for segment, lease in zip(step.segments, leases, strict=True) if lease]
            selection = Selection(step.plan, tuple(segment.place for segment, _ in reused), step.computed)
            keys = [self._place(step, segment, lease) for segment, lease in reused]
            if step.plan.select == "question" and any(step.plan.recomputed(each) for each in selection.reused):
                attention = yield from self._attention(step, selection, keys)
                selected = selection.attended(attention)
                for segment, lease in reused:
                    if segment.place.end > self._question(step).row:
                        self._place(step, segment, lease)
            else:
                selected = selection.first()
            are_good = [cache.release(lease) for _, lease in reused]  # each of them, whatever the first says
            if not all(are_good):
                raise CannotBlendError("segments left the cache while they were read")
            yield from self._batches(step, selection, selected)
        finally:
            cache.end(holder)

    def _batches(self, step: BlendStep, selection: Selection, selected: Sequence[int]) -> Iterator[Together]:
        """The passes that compute these tokens of segments, and what is around segments."""
        for batch in selection.batches(selected, self._limits.tokens, self._limits.entries):
            yield self._pass([BatchEntry(step.blocks, step.tokens[first:end], first, first) for first, end in batch])

    def _pass(
        self, entries: Sequence[BatchEntry], context: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Together:
        """A forward pass over these entries. Its result is what the context gives."""

        def act() -> Any:
            assert self._forward is not None
            with context() as result:
                self._forward.compute(entries)
            return result

        return Together(repr([(entry.row, entry.end) for entry in entries]).encode(), act, is_pass=True)

    def _prepare(self, step: BlendStep) -> Filling:
        """Reach the model, and prove how it rotates its keys, in blocks of this request that are not filled yet."""
        if self._why_not:
            raise CannotBlendError(self._why_not)
        if self._rotations:
            return
        blocks = self._scratch(step)
        if len(blocks) * self._block_tokens < PROBE_TOKENS:
            raise CannotBlendError(
                f"its {len(blocks)} blocks are too few to try how keys move; a later one will have more"
            )
        tokens = (list(step.tokens) * PROBE_TOKENS)[:PROBE_TOKENS]
        distance = min(DISTANCE, self._limits.max_position - PROBE_TOKENS)
        head_dim = self._group.row_shape[1] - self._latent_dims

        try:
            forward = EngineForward(self._block_tokens)
        except LookupError as error:
            self._why_not = str(error)
            raise CannotBlendError(self._why_not) from None

        def prove() -> None:
            try:
                proven = prove_rotations(forward, self._layers, head_dim, (blocks, tokens), distance=distance)
            except CannotMoveError as error:
                self._why_not = str(error)
                raise CannotBlendError(self._why_not) from None
            self._forward, self._rotations = forward, [proven[name] for name in self._layers]

        yield Together(b"prove rotations", prove, is_pass=True)

    def _scratch(self, step: BlendStep) -> Sequence[int]:
        """The request's blocks that are not filled yet. Those before them may be shared with other requests."""
        return step.blocks[-(-step.computed // self._block_tokens) :]

    # Segments in the cache.

    def _keys(self, step: BlendStep, segment: SegmentStep) -> list[ChunkKey]:
        return keys_in(step.space_id, segment.digests, shards=(self._engine.share.shard,), tenant=step.tenant)

    def _lease(self, step: BlendStep, segment: SegmentStep, holder: str) -> ReadLease | None:
        assert self._engine.cache is not None
        match self._engine.cache.load(self._keys(step, segment), holder, lasting=True):
            case LoadFailed():
                return None
            case lease:
                return lease

    def _leased_by_all(self, leases: Sequence[ReadLease | None]) -> Generator[Together, Any, list[ReadLease | None]]:
        """These leases, without those of segments of which another rank has none."""
        flags = [lease is not None for lease in leases]
        shared = yield Together(b"segments held", lambda: self._ranks.in_all(flags))
        return [lease if is_shared else None for lease, is_shared in zip(leases, shared, strict=True)]

    def _fitting(self, step: BlendStep, missing: Sequence[int]) -> Iterator[list[int]]:
        """Those of the missing segments, by number, that can be computed behind their context at the same time. One
        that has no room is left out: it is computed in its place, for this request only."""
        room = len(self._scratch(step))
        batch: list[int] = []
        blocks = tokens = 0
        for number in missing:
            place = step.segments[number].place
            needed = step.plan.context_tokens + place.end - place.first
            needed_blocks = -(-needed // self._block_tokens)
            if needed_blocks > room or needed > self._limits.tokens:
                continue
            is_full = blocks + needed_blocks > room or tokens + needed > self._limits.tokens
            if batch and (is_full or len(batch) == self._limits.entries):
                yield batch
                batch, blocks, tokens = [], 0, 0
            batch.append(number)
            blocks += needed_blocks
            tokens += needed
        if batch:
            yield batch

    def _compute_alone(self, step: BlendStep, segments: Sequence[SegmentStep], holder: str) -> Filling:
        """Compute these segments behind their context, in one forward pass, and store them."""
        context = list(step.tokens[: step.plan.context_tokens])
        scratch, used = self._scratch(step), 0
        entries = []
        for segment in segments:
            tokens = context + list(step.tokens[segment.place.first : segment.place.end])
            blocks = scratch[used : used + -(-len(tokens) // self._block_tokens)]
            used += len(blocks)
            entries.append(BatchEntry(blocks, tokens, 0, 0))
        yield self._pass(entries)
        for segment, entry in zip(segments, entries, strict=True):
            self._store(step, segment, entry, holder)
        yield Together(b"stored")  # where several ranks have the same shard, one of them stores it for all

    def _store(self, step: BlendStep, segment: SegmentStep, entry: BatchEntry, holder: str) -> None:
        """Store the chunks of a segment; what the pool has no room for is not stored."""
        cache, facts = self._engine.cache, self._engine.facts
        assert cache is not None and facts is not None
        chunk_tokens = facts.chunk_tokens
        first_chunk = segment.place.source // chunk_tokens
        keys = self._keys(step, segment)
        chunk_of = {key: number for number, key in enumerate(keys, first_chunk)}
        lease = cache.begin_store(keys, holder, **step.storing)
        events = []
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            chunk = chunk_of[key]
            plan = plan_transfer(
                [extent],
                entry.blocks,
                chunk_tokens=chunk_tokens,
                block_tokens=self._block_tokens,
                first_token=chunk * chunk_tokens,
                last_token=min((chunk + 1) * chunk_tokens, entry.end),
                extents_from_chunk=chunk,
            )
            is_whole = plan.tokens == chunk_tokens
            events.append(self._engine.copiers[0].store(plan if is_whole else plan.repeated()))
        for event in events:
            event.wait()
        cache.commit(lease)

    def _place(self, step: BlendStep, segment: SegmentStep, lease: ReadLease) -> list[torch.Tensor]:
        """Write a segment's KV to its place in the request. Returns the moved keys or latents of the layers whose
        attention selects, [tokens, heads, head_dim] each, from the first token that the engine lacks."""
        cache, facts = self._engine.cache, self._engine.facts
        assert cache is not None and facts is not None and self._forward is not None
        heads, head_dim = self._group.row_shape
        parts = ("kv",) if self._latent_dims else ("k", "v")
        shape = (len(parts), len(self._layers), facts.chunk_tokens, heads, head_dim)
        place = segment.place
        begin = max(place.first, step.computed)
        first_row = place.source % facts.chunk_tokens + begin - place.first
        rows = slice(first_row, first_row + place.end - begin)
        view, dtype = cache.pool.view, self._group.row_dtype
        chunks = [
            torch.frombuffer(view, dtype=dtype, count=extent.nbytes // dtype.itemsize, offset=extent.offset).view(shape)
            for extent in lease.extents
        ]
        slots = self._forward.slots(step.blocks, begin, place.end)
        selecting = []
        assert self._group.update is not None  # it proved the canonical format, which blending needs
        for number, rotation in enumerate(self._rotations):
            keys, *values = (
                torch.cat([chunk[part, number] for chunk in chunks])[rows].to(slots.device)
                for part in range(len(parts))
            )
            moved = rotation.moved(keys, place.distance, self._latent_dims)
            self._group.update(number, dict(zip(parts, (moved, *values), strict=True)), slots)
            if number in self._selecting:
                selecting.append(moved)
        return selecting

    # What is computed again.

    @cached_property
    def _selecting(self) -> list[int]:
        """The layers whose attention selects: two in the middle, of those that see the whole prompt."""
        whole = [n for n, layer in enumerate(self._layers.values()) if not getattr(layer, "sliding_window", None)]
        whole = whole or list(range(len(self._layers)))
        return sorted({whole[len(whole) // 3], whole[2 * len(whole) // 3]})

    def _question(self, step: BlendStep) -> BatchEntry:
        """The question, as at the prompt's end, but in the rows of segments' last tokens: it has no others yet."""
        tokens = step.plan.question[-(step.plan.end - step.computed) :][-self._limits.tokens :]
        return BatchEntry(step.blocks, tokens, step.plan.end - len(tokens), step.plan.tokens - len(tokens))

    def _attention(
        self, step: BlendStep, selection: Selection, keys: Sequence[Sequence[torch.Tensor]]
    ) -> Generator[Together, Any, torch.Tensor]:
        """The attention that the question gives to each token of segments; -1 to what is no segment's, or exact. keys:
        what `_place` returned of each reused segment."""
        yield from self._batches(step, selection, [])
        names = list(self._layers)
        layers = {names[number]: self._layers[names[number]] for number in self._selecting}
        question = self._question(step)
        found = yield self._pass([question], lambda: attended(layers))
        attention = torch.full((step.plan.end,), -1.0)
        approximate = [not step.plan.is_exact(each) for each in selection.reused]
        places = [range(max(each.first, step.computed), each.end) for each in compress(selection.reused, approximate)]
        tokens = torch.tensor([token for place in places for token in place], dtype=torch.int64)
        moved = list(compress(keys, approximate))
        total = torch.zeros(len(tokens))
        for number, (name, layer) in enumerate(layers.items()):
            try:
                its = keys_of_heads(layer, torch.cat([each[number] for each in moved]))
            except LookupError as error:
                raise CannotBlendError(str(error)) from None
            total += attention_of(found[name][0], its, cast(Any, layer.impl).scale).cpu()
        yield Together(b"add attention", lambda: self._ranks.add(total))  # each rank has its own heads
        attention[tokens] = total
        return attention


def prove_rotations(
    forward: EngineForward,
    layers: Mapping[str, torch.nn.Module],
    head_dim: int,
    probe: tuple[Sequence[int], Sequence[int]],
    *,
    distance: int = DISTANCE,
) -> dict[str, Rotation]:
    """The rotation of each of these attention layers.

    probe: blocks that may be overwritten, and PROBE_TOKENS tokens.
    distance: between the two positions.

    Raises:
        CannotMoveError: a layer's keys depend on positions in another way.
    """
    blocks, tokens = probe

    def keys_at(position: int) -> dict[str, torch.Tensor]:
        with attended(layers) as given:
            forward.compute([BatchEntry(blocks, tokens, 0, position)])
        return {name: keys.reshape(len(tokens), -1, head_dim).clone() for name, (_, keys) in given.items()}

    return proven_rotations(forward.model, layers, keys_at(0), keys_at(distance), distance)
