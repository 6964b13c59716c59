"""What the scheduler half sends to the workers: the blended requests whose blocks were allocated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kv_blend.plan import BlendPlan


@dataclass(frozen=True, slots=True)
class SegmentStep:
    """One segment of a request.

    first, end: its tokens in the request.
    digests: of the chunks that have its KV, as it is behind the plan's context. The first chunk may begin with tokens
        of that context, and the last may be partial.
    is_held: whether the cache had all of them.
    """

    first: int
    end: int
    digests: tuple[bytes, ...]
    is_held: bool


@dataclass(frozen=True, slots=True)
class BlendStep:
    """One request.

    tokens: up to the last segment's end.
    blocks: its block table.
    computed: this many tokens at its start are in its blocks already.
    space_id, tenant: of the segments' keys.
    """

    request_id: str
    plan: BlendPlan
    tokens: Sequence[int]
    blocks: Sequence[int]
    computed: int
    segments: tuple[SegmentStep, ...]
    space_id: bytes
    tenant: bytes


@dataclass(eq=False)
class BlendMetadata(KVConnectorMetadata):  # type: ignore[misc]  # the engine's classes are untyped here
    """A step's messages: the exact half's, and blended requests'.

    space_id: of the weights that the engine has now; empty if that is not known. Requests that were begun with others
        are not blended.
    """

    exact: Any
    steps: tuple[BlendStep, ...]
    space_id: bytes
