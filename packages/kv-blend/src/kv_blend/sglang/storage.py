"""`KVBlendStorage`: what `KVStorage` does for exact requests, and segments' pages for those with a plan.

An exact request passes through unchanged. Pages of a blended one are never written to the store, and read from it only
as they are made of segments' pages.
"""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import torch
from kv_connect.guard import always, guarded
from kv_connect.halves.copies import await_copies
from kv_connect.request_options import KEY as OPTIONS
from kv_core.errors import InputError
from kv_core.log import limited_logger
from kv_core.transfer import HostExtent
from kv_sglang.attach import KV
from kv_sglang.names import hashes_of, page_hashes
from kv_sglang.pages import PageStore, lies_in
from kv_sglang.pools import first_slots
from kv_sglang.scheduler_calls import MAX_PAGES, RequestPages
from kv_sglang.storage import KVStorage, none_of
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from kv_blend.plan import alone, given_pages, is_marked, read_plan, segment_salt
from kv_blend.rotations import DISTANCE, PROBE_TOKENS, CannotMoveError, Rotation, proven_rotations

_log = limited_logger(__name__)

WRITTEN_WITHIN_S: Final = 5.0
"""How long pages of a segment that has just been computed are waited for. SGLang writes them behind the answer."""
_STAGED: Final = "kv-blend"
"""The name of moved pages' memory for the copier."""


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A segment of one prompt.

    hashes: of the pages of "context, then segment".
    distance: between a token's place in the prompt and in these pages.
    """

    hashes: tuple[str, ...]
    distance: int


@dataclass(frozen=True, slots=True)
class _GivenPage:
    """first: its first token in the blended prompt."""

    source: _Source
    first: int


class SegmentPages:
    """Of one engine. Thread-safe.

    A segment's pages are ordinary pages of the store, of the prompt "context, then segment" under the salt of the
    tenant's segments, or of a conversation before its edits. A page of a blended prompt that lies in a segment is made
    of two of them, with keys moved. It is written to SGLang's host memory and never to the store.
    """

    def __init__(self, store: PageStore, requests: RequestPages) -> None:
        """store: of canonical pages of keys and values."""
        self._store = store
        self._requests = requests
        self._page_tokens = store.pages.page_slots
        self._pages: OrderedDict[str, _GivenPage] = OrderedDict()
        self._are_written: OrderedDict[str, bool] = OrderedDict()  # pages of segments that were asked for
        self._changed = threading.Condition()
        self._rotations: list[Rotation] = []
        self._why_not = ""
        self._mine = threading.local()

    def arrived(self, scheduler: Any, req: Any) -> None:
        """A request, before SGLang looks up its pages. Raises only for bugs of ours."""
        tree = scheduler.tree_cache
        if (req.cache_salt or "").endswith(segment_salt("")):
            self._expect(hashes_of(req, tree))
            return
        tokens, params = req.origin_input_ids, req.sampling_params.custom_params
        own = hashes_of(req, tree) if is_marked(req.cache_salt) else []
        if own:  # whatever else it says, neither its prompt nor its answer is stored
            self._requests.note(str(req.rid), {OPTIONS: {"store": False}}, len(tokens), lambda: own)
        try:
            read = read_plan(params, req.cache_salt, None)
        except InputError as error:  # the same has been said to the client, unless it has gone around us
            _log.warning("request %s is computed as if it had no plan: %s", req.rid, error)
            return
        if read is None:
            return
        plan, tenant = read
        whole = sum(len(tokens) >= each.end for each in plan.moved)
        if not whole or not self._can_move(scheduler):
            return
        found: dict[str, _GivenPage] = {}

        def hashes_in(prompt: Sequence[int], salt: str | None) -> tuple[str, ...]:
            hashes = tuple(page_hashes(_like(tokens, prompt), tree, req.extra_key, salt))
            options = {OPTIONS: params[OPTIONS]} if OPTIONS in params else None
            self._requests.note(str(req.rid), options, len(prompt), lambda: hashes, salt=salt)
            return hashes

        conversation = hashes_in(plan.conversation(tokens), tenant or None) if plan.edits else ()
        for given in given_pages(plan, self._page_tokens):
            if given.number < whole:
                hashes = conversation
                if not plan.edits:
                    hashes = hashes_in(alone(plan, tokens, given.number, self._page_tokens), segment_salt(tenant))
                source = _Source(hashes, given.distance)
                for first in range(given.first, given.end, self._page_tokens):
                    found[own[first // self._page_tokens]] = _GivenPage(source, first)
        with self._changed:
            self._pages.update(found)
            while len(self._pages) > MAX_PAGES:
                self._pages.popitem(last=False)

    def knows(self, hashes: Sequence[str]) -> bool:
        """Whether the first of these pages is given from a segment."""
        return bool(hashes) and hashes[0] in self._pages

    def held(self, hashes: Sequence[str]) -> int:
        """How many leading pages can be given now. They stay until they are."""
        count = 0
        for source, firsts in self._runs(hashes):
            begin, wanted = self._wanted(source, firsts)
            self._await(wanted)
            end = (begin + self._store.held(wanted)) * self._page_tokens + source.distance
            good = sum(first + self._page_tokens <= end for first in firsts)
            count += good
            if good < len(firsts):
                break
        return count

    def read(self, hashes: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Write pages to `slots` (the first slot of each), as far as they are held. False: the bytes are
        unspecified."""
        done = 0
        for source, firsts in self._runs(hashes):
            if not self._place(source, firsts, slots[done : done + len(firsts)]):
                break
            done += len(firsts)
        return [number < done for number in range(len(hashes))]

    def written(self, hashes: Sequence[str]) -> None:
        """The store holds these pages, or will not."""
        with self._changed:
            for each in hashes:
                if each in self._are_written:
                    self._are_written[each] = True
            self._changed.notify_all()

    def _expect(self, hashes: Sequence[str]) -> None:
        with self._changed:
            for each in hashes:
                self._are_written.setdefault(each, False)
                self._are_written.move_to_end(each)
            while len(self._are_written) > MAX_PAGES:
                self._are_written.popitem(last=False)

    def _await(self, hashes: Sequence[str]) -> None:
        """Wait for pages that SGLang is about to write."""
        with self._changed:
            written = self._are_written
            if not self._changed.wait_for(lambda: all(written.get(each, True) for each in hashes), WRITTEN_WITHIN_S):
                for each in hashes:  # once
                    written.pop(each, None)

    def _runs(self, hashes: Sequence[str]) -> Iterator[tuple[_Source, list[int]]]:
        """The leading pages that are given, by segment: the first token of each."""
        with self._changed:
            pages = [self._pages.get(each) for each in hashes]
        for source, run in groupby(pages, key=lambda page: None if page is None else page.source):
            if source is None:
                return
            yield source, [page.first for page in run if page is not None]

    def _wanted(self, source: _Source, firsts: Sequence[int]) -> tuple[int, tuple[str, ...]]:
        """The segment's pages that these pages of the prompt are made of, and the number of the first."""
        begin = (firsts[0] - source.distance) // self._page_tokens
        end = -(-(firsts[-1] + self._page_tokens - source.distance) // self._page_tokens)
        return begin, source.hashes[begin:end]

    def _place(self, source: _Source, firsts: Sequence[int], slots: Sequence[int]) -> bool:
        """Whether these pages were written, all of them."""
        store, page = self._store, self._page_tokens
        begin, wanted = self._wanted(source, firsts)
        keys, pool = store.keys(wanted), store.cache.pool
        lease = store.lease(keys, f"{store.name}-blend-{threading.get_ident()}")
        if lease is None:
            return False
        try:
            described = store.pages.format
            dtype: torch.dtype = getattr(torch, store.pages.dtype)
            shape = (2, described.layers, page, described.heads, described.head_dim)
            if not lies_in(lease, pool):
                return False
            chunks = [
                torch.frombuffer(
                    pool.view, dtype=dtype, count=extent.nbytes // dtype.itemsize, offset=extent.offset
                ).view(shape)
                for extent in lease.extents
            ]
            first_row = firsts[0] - source.distance - begin * page
            rows = torch.cat(chunks, 2)[:, :, first_row : first_row + len(firsts) * page]
        finally:
            is_good = store.cache.release(lease)
            store.end_promises(keys)
        store.count_loaded(lease, {}, is_good=is_good)
        if is_good:
            for number, rotation in enumerate(self._rotations):
                rows[0, number] = rotation.moved(rows[0, number], source.distance)
            self._write(
                rows.reshape(*rows.shape[:2], len(firsts), page, *rows.shape[3:]).movedim(2, 0).contiguous(), slots
            )
        return is_good

    def _write(self, pages: torch.Tensor, slots: Sequence[int]) -> None:
        """pages: [pages, 2, layers, tokens, heads, head_dim], to SGLang's host memory."""
        if not hasattr(self._mine, "copier"):  # a copier is for one thread
            self._mine.copier = self._store.pages.copier()
        copier, nbytes = self._mine.copier, self._store.pages.format.nbytes
        copier.attach(_STAGED, pages.view(torch.uint8).reshape(-1).numpy().data)
        try:
            pairs = [(HostExtent(_STAGED, number * nbytes, nbytes), slot) for number, slot in enumerate(slots)]
            await_copies([copier.load(self._store.plan(pairs))])
        finally:
            copier.detach(_STAGED)

    def _can_move(self, scheduler: Any) -> bool:
        """Prove at the first plan how the model's keys move."""
        if not self._rotations and not self._why_not:
            model = scheduler.model_config
            try:
                self._rotations = [
                    Rotation(each.pairing, each.frequencies.cpu())
                    for each in prove_rotations(
                        scheduler.tp_worker.model_runner.model,
                        hidden_size=model.hidden_size,
                        max_position=model.context_len,
                    )
                ]
                if len(self._rotations) != self._store.pages.format.layers:
                    raise CannotMoveError("not every attention layer of the model has pages of its own")
            except CannotMoveError as error:
                self._why_not, self._rotations = str(error), []
                _log.warning("this engine does not blend: %s", error)
        return bool(self._rotations)


def _like(tokens: Any, values: Sequence[int]) -> Any:
    """These tokens in the type in which SGLang has a prompt's."""
    return type(tokens)(tokens.typecode, values) if hasattr(tokens, "typecode") else list(values)


class KVBlendStorage(KVStorage):
    """The backend of HiCache for an engine that blends."""

    _segments: SegmentPages | None = None

    def on_host_pools_registered(self) -> None:
        super().on_host_pools_registered()
        reasons = {
            "not all layers of its model keep the whole prefix in one pool": set(self._pages) != {KV},
            "its pages have a format other than canonical": self._pages[KV].format.kind != "canonical",
            "its KV cache is quantised": self._pages[KV].dtype not in ("bfloat16", "float16", "float32"),
            "its model has latent attention (MLA)": self._pages[KV].format.parts != ("k", "v"),
        }
        if why := [reason for reason, holds in reasons.items() if holds]:
            _log.warning("this engine does not blend: %s", "; ".join(why))
            return
        requests = self._attached.requests
        assert requests is not None
        self._segments = SegmentPages(self._kv, requests)
        requests.arrivals.append(self._segments.arrived)

    @guarded(always(0))
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        if self._segments is not None and self._segments.knows(keys):
            return self._segments.held(keys)
        pages = super().batch_exists(keys, extra_info)
        if self._segments is not None:
            self._segments.written(keys[:pages])
        return int(pages)

    @guarded(none_of)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        if self._segments is None or not self._segments.knows(keys):
            return list(super().batch_get_v1(keys, host_indices, extra_info))
        slots = first_slots(host_indices, len(keys), self._kv.pages.page_slots)
        return [False] * len(keys) if slots is None else self._segments.read(keys, slots)

    @guarded(none_of)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        answers = list(super().batch_set_v1(keys, host_indices, extra_info))
        if self._segments is not None:
            self._segments.written(keys)
        return answers


class _KeysSeenError(Exception):
    """The keys are there."""


@torch.inference_mode()
def prove_rotations(model: torch.nn.Module, *, hidden_size: int, max_position: int) -> list[Rotation]:
    """The rotation of each attention layer, in the order of the layers.

    Each attention layer's own module computes keys of the same drawn hidden states at two positions, and is stopped
    where it hands them to SGLang's attention. So no request, no block and no other rank takes part.

    Raises:
        CannotMoveError: a layer's keys depend on positions in another way, or cannot be computed by themselves.
    """
    layers: dict[str, RadixAttention] = {}
    parents: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            if isinstance(child, RadixAttention):
                layers[f"{name}.{child_name}"], parents[f"{name}.{child_name}"] = child, module
    if not layers:
        raise CannotMoveError("the model has no attention layer of SGLang's ordinary kind")
    weights = next(model.parameters())
    probe = torch.randn(PROBE_TOKENS, hidden_size, generator=torch.Generator().manual_seed(0))
    probe = probe.to(weights.device, next(p.dtype for p in model.parameters() if p.is_floating_point()))
    distance = min(DISTANCE, max_position - PROBE_TOKENS)

    def keys_at(position: int) -> dict[str, torch.Tensor]:
        positions = torch.arange(position, position + PROBE_TOKENS, device=weights.device)
        return {name: _keys(parents[name], layer, positions, probe) for name, layer in layers.items()}

    found = proven_rotations(model, layers, keys_at(0), keys_at(distance), distance)
    return [found[name] for name in sorted(layers, key=lambda name: layers[name].layer_id)]


def _keys(parent: torch.nn.Module, layer: Any, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    given = {"positions": positions, "hidden_states": hidden.clone(), "forward_batch": None}
    with _stopped_at(layer) as found:
        if "positions" not in _parameters(parent):  # the model may have added them before
            raise CannotMoveError(f"{type(parent).__name__} is not given positions")
        try:
            parent(**{name: value for name, value in given.items() if name in _parameters(parent)})
        except _KeysSeenError:
            pass
        except Exception as error:  # the model's own code, which may raise anything
            raise CannotMoveError(f"{type(parent).__name__} does not compute its keys by itself: {error}") from error
    if not found:
        raise CannotMoveError(f"{type(parent).__name__} gives its attention no keys")
    return found[0].reshape(len(positions), -1, layer.qk_head_dim).clone()


def _parameters(module: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


@contextmanager
def _stopped_at(layer: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Stop what computes in the body where it calls this layer. Gives the keys that it was given."""
    found: list[torch.Tensor] = []

    def record(_layer: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[1])
        raise _KeysSeenError

    hook = layer.register_forward_pre_hook(record)
    try:
        yield found
    finally:
        hook.remove()
