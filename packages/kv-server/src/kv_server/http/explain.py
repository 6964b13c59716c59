"""`POST /explain`: what became of a prompt, as `kv explain` says it."""

from functools import partial
from typing import Annotated

import msgspec
from kv_core.hashing import ChainScheme
from kv_core.sequence import KeySequence
from msgspec import UNSET, Meta, UnsetType

from kv_server import wire
from kv_server.explained import chunks_text, explained_text, why_unknown
from kv_server.http.operation import Operation, Problem
from kv_server.http.operations import Digest
from kv_server.http.relay import Relay
from kv_server.report import chunk_tokens_of
from kv_server.server import explainer

MAX_TOKENS = 1 << 20


class ExplainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The prompt: its tokens, or the digests of its whole chunks from the first, as `kv keys` prints them.

    chunk_tokens: tokens of a chunk; if omitted, as the connected engines say.
    salt: of the tenant.
    """

    tokens: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(max_length=MAX_TOKENS)] = []
    digests: Annotated[list[Digest], Meta(max_length=wire.MAX_EXPLAINED)] = []
    chunk_tokens: Annotated[int, Meta(gt=0, le=1 << 20)] | UnsetType = UNSET
    salt: Annotated[str, Meta(max_length=4096)] | UnsetType = UNSET


class ExplainedIn(msgspec.Struct, frozen=True):
    """A model, format and tenant of which something is held or remembered.

    tenant: its tag, hex.
    held: leading chunks that would hit.
    lines: what became of the chunks, in words.
    """

    fingerprint: str
    tenant: str
    engines: list[str]
    held: int
    lines: list[str]


class ExplainedPrompt(msgspec.Struct, frozen=True):
    """chunks: of the prompt that were looked for. explained: most of it first. why: empty, or why there is none."""

    chunks: int
    explained: list[ExplainedIn]
    why: str


def explain_operations(relay: Relay) -> list[Operation]:
    async def explain(body: ExplainRequest) -> ExplainedPrompt:
        if bool(body.tokens) == bool(body.digests):
            raise Problem(409, "give either the prompt's tokens or its digests")
        explain_it, sizes = await relay.on_server(
            lambda server: (explainer(server), chunk_tokens_of(server.registrations()))
        )
        digests = [bytes.fromhex(text) for text in body.digests]
        if body.tokens:
            digests = await relay.call(partial(_digests, body, sizes))
        if len({len(digest) for digest in digests}) != 1:
            raise Problem(409, "the digests are not all of one length")
        request = wire.Explain(16 if len(digests[0]) == 16 else 32, b"".join(digests), [])
        answer = await relay.call(partial(explain_it, request))
        explained = [
            ExplainedIn(one.fingerprint, one.tenant, one.engines, one.held, explained_text(one, answer))
            for one in sorted(answer.explained, key=lambda one: -one.held)
        ]
        why = "" if explained else f"{chunks_text(0, len(digests))}: {why_unknown(answer)}"
        return ExplainedPrompt(len(digests), explained, why)

    about = "What is held of a prompt, chunk by chunk, and what became of the rest"
    return [Operation("POST", "/explain", about, explain, ExplainedPrompt, ExplainRequest, failures=(409, 503))]


def _digests(body: ExplainRequest, sizes: list[int]) -> list[bytes]:
    """Raises `Problem`: it is not known how long chunks are, or the prompt has no whole one."""
    if body.chunk_tokens is UNSET and len(sizes) != 1:
        listed = " and ".join(map(str, sizes))
        said = f"the engines have chunks of {listed} tokens" if sizes else "no engine says how long its chunks are"
        raise Problem(409, f"{said}; give chunk_tokens")
    scheme = ChainScheme("sha256", sizes[0] if body.chunk_tokens is UNSET else body.chunk_tokens)
    root = scheme.root(salt=None if body.salt is UNSET else body.salt)
    digests = KeySequence(scheme, root=root).append(body.tokens[: wire.MAX_EXPLAINED * scheme.chunk_tokens])
    if not digests:
        why = f"{len(body.tokens)} tokens are no whole chunk of {scheme.chunk_tokens}, so nothing of them is stored"
        raise Problem(409, why)
    return digests
