"""Disaggregated prefill: what a hand-over adds to a request on the prefill side and on the decode side.

A hand-over is a hit in a shared cache (docs/adr/0011), so there is little to add. The prefill engine also stores the
last, partial chunk, under the digest of exactly those tokens, and has all chunks held in the pool until they are read.
The decode engine knows how many tokens to expect. While some of them are still being written it repeats its lookup, for
a bounded time, and then computes what has not arrived.
"""

from math import inf
from typing import Final

from kv_core.clock import Clock
from kv_core.hashing import Digest
from kv_core.shape import ConnectShape

from kv_connect.halves.engine_costs import EngineCosts
from kv_connect.halves.inputs import RequestTokens
from kv_connect.halves.tracked import Awaited, Tracked

MIN_TAIL_TOKENS: Final = 16
"""A last chunk of fewer tokens is not stored: computing them takes no longer than a step does anyway."""
_FIRST_RETRY_S: Final = 0.002
_MAX_RETRY_S: Final = 0.008
"""An otherwise idle engine asks in every step, so this is how late the last chunk may be noticed."""


class HandOvers:
    """The hand-overs of one engine. Used on the scheduler's thread; per-request state is in `Tracked`."""

    def __init__(self, shape: ConnectShape, clock: Clock, *, wait_s: float = 0.0, hold_s: float = 0.0) -> None:
        """wait_s: how long a request may wait for the chunks that it expects. hold_s: how long chunks that are handed
        over stay in the pool unless they are read earlier."""
        self._shape = shape
        self._clock = clock
        self._wait_s = wait_s
        self._hold_ms = round(hold_s * 1000)

    # On the prefill side.

    def hold_ms(self, request: RequestTokens) -> int:
        """How long this request's chunks are held in the pool for another engine; 0: they are not held."""
        return self._hold_ms if request.controls.hands_over_tokens else 0

    def tail_to_store(self, request: RequestTokens, tracked: Tracked | None, computed_tokens: int) -> int:
        """The number of tokens of the last, partial chunk if this step completes it and it is to be stored; else 0.

        A hit is a whole number of chunks for windows and states, so only models without them have such chunks.
        """
        tokens = request.controls.hands_over_tokens
        if not tokens or computed_tokens != tokens or not self._cuts or not self._shape.stores:
            return 0
        if tracked is not None and (tracked.stored_tail_tokens or tracked.mixed):
            return 0
        tail = tokens % self._shape.chunk_tokens
        return tail if tail >= MIN_TAIL_TOKENS and request.controls.storable(tokens) == tokens else 0

    # On the decode side.

    def tail_to_load(self, request: RequestTokens, tracked: Tracked) -> Digest:
        """The digest of the last, partial chunk that this request expects; empty: it expects none. All of the
        request's tokens have been hashed."""
        keys, tokens = tracked.keys, request.controls.awaits_tokens
        is_whole_prompt = tokens == keys.tokens and tokens % self._shape.chunk_tokens >= MIN_TAIL_TOKENS
        return (keys.tail_digest() or b"") if self._cuts and is_whole_prompt else b""

    def is_early(self, tracked: Tracked) -> bool:
        """Whether it is too soon to ask the cache again."""
        awaited = tracked.awaited
        return awaited is not None and self._clock.now_s() < min(awaited.retry_at_s, awaited.until_s)

    def lacks(self, request: RequestTokens, tracked: Tracked) -> bool:
        """Whether chunks that the request expects are missing.

        The request does not name the states that are stored, so the groups that need the whole prefix stand for all.
        """
        chunk_tokens, tokens = self._shape.chunk_tokens, request.controls.awaits_tokens
        if self._shape.chunk.is_plain:
            return tracked.promised_chunks < tokens // chunk_tokens + bool(tracked.tail)
        wanted_chunks = min(tokens, tracked.keys.tokens - 1) // chunk_tokens
        held_chunks = max(tracked.promised_chunks, tracked.junction // chunk_tokens)
        return bool(self._shape.chunk.whole_groups) and held_chunks < wanted_chunks

    def awaits(self, request: RequestTokens, tracked: Tracked, costs: EngineCosts | None) -> bool:
        """Whether to ask the cache again before the request is computed or loaded. It waits once, and never for longer
        than computing what is missing would take, where that is known."""
        if tracked.has_awaited or not request.controls.awaits_tokens:
            return False
        awaited, tracked.awaited = tracked.awaited, None
        now_s = self._clock.now_s()
        if awaited is None:
            learnt = None if costs is None else costs.of(0)
            missing_from = tracked.promised_chunks * self._shape.chunk_tokens
            compute_s = None if learnt is None else learnt.compute_s(missing_from, request.controls.awaits_tokens)
            awaited = Awaited(now_s + min(self._wait_s, inf if compute_s is None else compute_s), 0.0, _FIRST_RETRY_S)
        if now_s >= awaited.until_s or not self.lacks(request, tracked):
            tracked.has_awaited = True
            return False
        awaited.retry_at_s = now_s + awaited.retry_s
        awaited.retry_s = min(2 * awaited.retry_s, _MAX_RETRY_S)
        tracked.awaited = awaited
        return True

    def is_taken(self, request: RequestTokens, tracked: Tracked) -> bool:
        """Whether the holds on chunks handed over to this request can now end, because it has its own lease on those
        that it loads. Notes that it was asked: True at most once per request."""
        is_first = request.controls.awaits_tokens > 0 and not tracked.has_taken
        tracked.has_taken = tracked.has_taken or is_first
        return is_first

    @property
    def _cuts(self) -> bool:
        return self._shape.cuts_chunks and self._shape.chunk.is_plain
