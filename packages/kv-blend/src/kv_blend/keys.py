"""The keys of a plan's KV: which chunks of the cache have what it reuses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kv_core.errors import InputError
from kv_core.hashing import ChainScheme, Digest
from kv_core.sequence import KeySequence

from kv_blend.plan import FIELDS, KEY, BlendPlan, Engine, Moved, alone, read_plan, segment_salt


@dataclass(frozen=True, slots=True)
class SegmentKeys:
    """Of one segment.

    place: its tokens in the request, and in the text that its KV was computed in.
    digests: of the chunks of that text that have its KV. The first chunk may begin with tokens that stand before it,
        and the last may be partial.
    """

    place: Moved
    digests: tuple[Digest, ...]

    def leading(self, chunks: int, chunk_tokens: int) -> "SegmentKeys":
        """What of it is in so many of its chunks."""
        end = self.place.first - self.place.source % chunk_tokens + chunks * chunk_tokens
        place = Moved(self.place.first, max(self.place.first, min(self.place.end, end)), self.place.source)
        return SegmentKeys(place, self.digests[:chunks])


def keys_of_plan(
    plan: BlendPlan,
    tokens: Sequence[int],
    tenant: str,
    scheme: ChainScheme,
    tags: Mapping[str, str],
    *,
    engine: Engine = "vllm",
) -> list[SegmentKeys]:
    """Of all that it reuses, in order. tokens: at least those up to the last segment's end. tags: of the request."""
    step = scheme.chunk_tokens
    if plan.edits:  # what exact requests stored: whole chunks
        sequence = KeySequence(scheme, root=scheme.root(salt=tenant or None, tags=tags))
        sequence.append(plan.conversation(tokens))
        sources = [sequence.digests] * len(plan.moved)
    else:
        sources = []
        for number in range(len(plan.moved)):
            sequence = KeySequence(scheme, root=scheme.root(salt=segment_salt(tenant), tags=tags))
            sequence.append(
                alone(plan, tokens, number, step if engine == "sglang" else 1)
            )  # SGLang has whole pages only
            tail = sequence.tail_digest()
            sources.append(sequence.digests if tail is None else [*sequence.digests, tail])
    found = []
    for moved, digests in zip(plan.moved, sources, strict=True):
        found.append(SegmentKeys(moved, tuple(digests[moved.source // step : -(-moved.source_end // step)])))
    return found


def keys_of_request(
    request: object, tokens: Sequence[int], scheme: ChainScheme, tags: Mapping[str, str]
) -> tuple[str, list[SegmentKeys]]:
    """The tenant's salt, and what a request reuses; for `kv explain`. request: an object with the fields that
    `request_fields` makes. tokens: of its prompt.

    Raises:
        InputError: it has no plan, or one that an engine would refuse.
    """
    fields = request if isinstance(request, Mapping) else {}
    sampling = fields.get("sampling_params")
    places: dict[Engine, Mapping[str, Any]] = {
        "vllm": fields,
        "sglang": sampling if isinstance(sampling, Mapping) else fields,
    }
    salt = fields.get("cache_salt")
    for engine, place in places.items():
        read = read_plan(place.get(FIELDS[engine]), salt if isinstance(salt, str) else "", len(tokens))
        if read is not None:
            plan, tenant = read
            return tenant, keys_of_plan(plan, tokens, tenant, scheme, tags, engine=engine)
    raise InputError(f"the request has no plan: it needs {KEY} in {' or '.join(FIELDS.values())}, and its cache_salt")
