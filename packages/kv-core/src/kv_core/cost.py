"""The cost model: whether a request should load the chunks held for it, or compute them.

Both times are estimated in seconds by plain arithmetic. `compute_s` of tokens `a … b` is `token_s · (b - a) + pair_s ·
(b² - a²) / 2`, because attention reads all earlier tokens for each token. `load_s` is `fixed_s + token_s · tokens` for
the copy from the pool, minus what is computed while layers are copied, plus the wait for chunks that are not in the
pool yet. The coefficients are learnt elsewhere (`kv_core.estimate`): the engine's by its scheduler half, the tiers' by
their lanes. A lookup combines them. While one is unknown it decides nothing: everything that is held is then used, and
waited for as configured.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Use = Literal["auto", "always", "never"]
"""When held chunks are used: if it pays, always, or never."""

MeasuredWhat = Literal["compute", "load"]

REACH = 2
"""How many times as much work as was measured is believed to take the time that is extrapolated."""
_FULL_STEP_TOKENS = 1024
"""From about this many tokens on, a step takes time in proportion to them on any device."""


@dataclass(frozen=True, slots=True)
class Costs:
    """An engine's own costs, which it sends with a lookup.

    computed_tokens: how many of the prompt's tokens the engine has in its own blocks.
    compute: seconds per token, and per pair of tokens, to compute them; None: not known yet.
    load: seconds per load, and per token of it, from the pool to its blocks; None: not known yet.
    stores: whether the engine stores what it computes of this request.
    layerwise_tokens: the prompt's tokens, if the load is copied while the rest of them is computed; 0: it is copied
        before.
    before_tokens: how many of the prompt's tokens come before the lookup's first chunk, where all other counts begin.
        The engine has them, and computing what follows attends to them.
    measured_tokens: how many tokens the longest recent step that `compute` was measured on had; 0: it holds for any
        number. See `won_by`.
    """

    computed_tokens: int = 0
    compute: tuple[float, float] | None = None
    load: tuple[float, float] | None = None
    stores: bool = True
    layerwise_tokens: int = 0
    before_tokens: int = 0
    measured_tokens: int = 0

    def of_prompt(self, tokens: int) -> "Costs":
        """The same engine's for another prompt, of which it has nothing."""
        layerwise_tokens = tokens if self.layerwise_tokens else 0
        return replace(self, computed_tokens=0, before_tokens=0, layerwise_tokens=layerwise_tokens)

    def compute_s(self, first_token: int, last_token: int) -> float | None:
        """Seconds to compute these tokens, the last excluded; None: not known."""
        if self.compute is None:
            return None
        first_token = max(first_token, self.computed_tokens)
        if last_token <= first_token:
            return 0.0
        token_s, pair_s = self.compute
        mean_position = self.before_tokens + 0.5 * (first_token + last_token)
        return (last_token - first_token) * (token_s + pair_s * mean_position)

    def load_s(self, first_token: int, last_token: int) -> float | None:
        """Seconds to load these tokens from the pool, beyond the computation that overlaps it; None: not known."""
        if self.load is None:
            return None
        tokens = last_token - max(first_token, self.computed_tokens)
        copy_s = self.load[0] + tokens * self.load[1] if tokens > 0 else 0.0
        return max(0.0, copy_s - (self.compute_s(last_token, self.layerwise_tokens) or 0.0))


@dataclass(frozen=True, slots=True)
class Skipped:
    """Chunks that lower tiers hold beyond those in the pool, computed because waiting for them does not pay.

    chunks: the number of these chunks.
    tier: the slowest tier among those that hold them.
    load_s, compute_s: the estimates, in seconds.
    """

    chunks: int
    tier: str
    load_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What a lookup advises, and why.

    chunks: number of the promised leading chunks to load: all or none of them.
    load_s, compute_s: the estimates for all promised chunks, beyond what the engine has itself; None: not known.
    skipped: chunks that lower tiers hold beyond them and that are not waited for.
    """

    chunks: int
    load_s: float | None
    compute_s: float | None
    skipped: Skipped | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """An estimate and its measurement.

    what: a prefill step, or a load from the pool to the engine's blocks.
    """

    what: MeasuredWhat
    estimated_s: float
    took_s: float


def choose(costs: Costs, chunk_tokens: int, chunks: int, skipped: Skipped | None = None) -> Choice:
    """Decide about a number of promised chunks. Constant time.

    All or none: what a chunk saves grows along the prompt, because attention does, while its cost does not.
    """
    last_token = chunks * chunk_tokens
    load_s, compute_s = costs.load_s(0, last_token), costs.compute_s(0, last_token)
    pays = load_s is None or compute_s is None or load_s <= compute_s
    return Choice(chunks if pays else 0, load_s, compute_s, skipped)


@dataclass(frozen=True, slots=True)
class Wait:
    """chunks: a boundary that lower tiers can extend the hit to. seconds: until all chunks that it needs are in the
    pool."""

    chunks: int
    seconds: float


def choose_wait(costs: Costs, chunk_tokens: int, have: int, waits: Iterable[Wait], max_wait_s: float) -> Wait | None:
    """The boundary that is worth waiting for; None: none is, so compute. Call it only when `compute` is known.

    have: the number of chunks already in the pool; gains are counted beyond them. A boundary that takes longer than
    `max_wait_s` is not considered.
    """
    best: Wait | None = None
    best_gain_s = 0.0
    for wait in waits:
        gain_s = won_by(costs, chunk_tokens, have, wait)
        if wait.seconds <= max_wait_s and gain_s > 0.0 and gain_s >= best_gain_s:
            best, best_gain_s = wait, gain_s
    return best


def won_by(costs: Costs, chunk_tokens: int, have: int, wait: Wait) -> float:
    """Seconds by which the first token comes sooner with this wait than if all beyond `have` chunks is computed.

    For this, computing is not believed to take longer than twice the longest step that was measured: after a restart,
    where every prompt is found, steps compute only short remainders, of which most time is a step's fixed part, so that
    a prompt seems to take many times as long as it does. A tier that does not pay even then is not waited for, and the
    step that computes the prompt instead is measured.
    """
    first_token, last_token = have * chunk_tokens, wait.chunks * chunk_tokens
    compute_s = costs.compute_s(first_token, last_token) or 0.0
    tokens = min(last_token - max(first_token, costs.computed_tokens), _FULL_STEP_TOKENS)
    if tokens > (reach := REACH * costs.measured_tokens) > 0:
        compute_s *= reach / tokens
    load_s = (costs.load_s(0, last_token) or 0.0) - (costs.load_s(0, first_token) or 0.0)
    return compute_s - load_s - wait.seconds
