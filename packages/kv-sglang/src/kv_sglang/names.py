"""The names of a prompt's pages: SGLang's own hashes, and the digest of the tokens after the last whole page.

Both engines of a hand-over, and every cache, compute them from the same tokens, so no name has to be trusted.

A request may give embeddings in place of tokens. SGLang then shares none of its KV: it accepts `input_embeds` only
without a prefix cache, and keeps prompts with `positional_embed_overrides` out of it. A hand-over still has to name
the pages, so their names contain the embeddings too. What stands for media in a prompt does not name them either
(`media`), so the names of these pages contain the number of this hand-over, and no other finds them.
"""

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from kv_connect.interface import observe
from kv_core.errors import InputError
from kv_core.hashing import ChainScheme
from kv_core.keys import NO_TENANT, tenant_tag

_DIGEST_BYTES: Final = 32
_MARK: Final = "00"
"""After the hex digits of a page's hash."""
_EMBEDDED: Final = b"kv-sglang: pages of embeddings"
"""Before what is hashed, so that no prompt of tokens has such a name."""
_MEDIA: Final = b"kv-sglang: pages with media"
"""Likewise."""


def is_marked(page_hash: str) -> bool:
    """Whether this page has media, or follows one that has."""
    return len(page_hash) == 2 * _DIGEST_BYTES + len(_MARK)


def unmarked(page_hash: str) -> str:
    """The hash as SGLang computes it."""
    return page_hash[: 2 * _DIGEST_BYTES]


def named_pages(hashes: Sequence[str]) -> Sequence[str]:
    """The leading pages whose hashes name their KV."""
    return list(itertools.takewhile(lambda each: not is_marked(each), hashes))


def marked(digest: str) -> str:
    """For a hash that does not name its KV."""
    return digest + _MARK


def media_places(tokens: Any) -> list[int]:
    """Where these tokens stand for media."""
    from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE

    return np.flatnonzero(np.asarray(tokens) >= MM_PAD_SHIFT_VALUE).tolist()


def mark_media() -> None:
    """Mark hashes in this process, for its life. Raises whatever importing SGLang raises.

    SGLang puts numbers beyond the vocabulary in the place of an image's, a sound's or a video's tokens, made from a
    hash of at most 64 bits of what its processor returned, or from what the client says that the hash is (`mm_hashes`,
    `hash`, `pad_value`). That may do for one engine's memory. It is no name under which KV can lie on a disk: whoever
    names an item as another decides whose KV is found.

    A storage is told only the hashes of pages. So the function that computes all of them marks those of such pages, and
    of each page that follows one: SGLang passes hashes on as they are, so a mark stays with what is generated, too.
    """
    from sglang.srt.mem_cache import utils
    from sglang.srt.mem_cache.cpp_utils.native_hash import _native_hash_input

    def around(compute: Any) -> Any:
        def get_native_hash(token_ids: Any, prior_digest: bytes | None = None, page_size: int | None = None) -> Any:
            follows = prior_digest is not None and len(prior_digest) > _DIGEST_BYTES
            hashes = compute(token_ids, None if prior_digest is None else prior_digest[:_DIGEST_BYTES], page_size)
            tokens, units, width, is_bigram = _native_hash_input(token_ids)
            first = 0 if follows else _first_unit(tokens, units, width, is_bigram)
            if isinstance(hashes, str):
                return marked(hashes) if first < units else hashes
            page = units if first >= units or not page_size else first // page_size
            return [marked(each) if number >= page else each for number, each in enumerate(hashes)]

        return get_native_hash

    observe(utils, "get_native_hash", around)


def _first_unit(tokens: Any, units: int, width: int, is_bigram: bool) -> int:
    """The first of the hashed units that has a token of media; `units` if none has."""
    places = media_places(tokens)
    if not places:
        return units
    first = places[0]
    return min(units, max(0, first - 1) if is_bigram else first // width)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of all pages of a prompt.

    hashes: hex digits, from the first page on; the last of them names the tail if there is one.
    tail_tokens: how many tokens the last, partial page has; 0: there is none.
    tenant: the tag of the request's tenant.
    """

    hashes: tuple[str, ...]
    tail_tokens: int
    tenant: bytes = NO_TENANT


def page_hashes(tokens: Any, tree: Any, extra_key: Any, cache_salt: Any, last_hash: Any = None) -> list[str]:
    """The hashes of the whole pages of these tokens, which follow the page of `last_hash`, as SGLang computes them."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    mark_media()
    core = getattr(tree, "tree_core", None)  # a decode engine without a tree lacks it
    is_eagle = core is not None and core.is_eagle
    key = RadixKey(tokens, extra_key=extra_key, is_bigram=is_eagle, cache_salt=cache_salt)
    return list(get_storage_hash_str(key.page_aligned(tree.page_size), last_hash, page_size=tree.page_size))


def hashes_of(req: Any, tree: Any) -> list[str]:
    """The hashes of the whole pages of a request's prompt."""
    return page_hashes(_prompt_of(req), tree, req.extra_key, req.cache_salt)


def tail_of(req: Any, page_tokens: int, last_page: str) -> str:
    """The digest of the tokens after the last whole page, as stored on vLLM. last_page: empty if there is none."""
    tokens = list(_prompt_of(req))
    tail = tokens[len(tokens) // page_tokens * page_tokens :]
    if is_marked(last_page) or media_places(tail):
        before = bytes.fromhex(unmarked(last_page))
        return marked(hashlib.sha256(_MEDIA + before + array("q", tail).tobytes()).hexdigest())
    return ChainScheme("sha256", page_tokens).extend_tail(bytes.fromhex(last_page), tail).hex()


def _prompt_of(req: Any) -> "array[int]":
    """The tokens whose KV is handed over. A decode engine that gave up a request in the middle
    (`pause_generation(mode="retract")`) has its prompt and its answer so far computed again as a prompt."""
    if getattr(req, "pd_rebootstrap_in_progress", False):
        return array("q", [*req.origin_input_ids, *req.output_ids])
    tokens: array[int] = req.origin_input_ids
    return tokens


def names_of(req: Any, tree: Any) -> Names:
    """The names of all pages with KV of a request's prompt.

    Raises:
        InputError: the prompt has media, and the request no number.
    """
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    tail_tokens = len(_prompt_of(req)) % tree.page_size
    hashes = hashes_of(req, tree)
    if tail_tokens:
        root = storage_namespace_seed(req.extra_key, req.cache_salt) or ""
        hashes.append(tail_of(req, tree.page_size, hashes[-1] if hashes else root))
    hashes = [_in_this_hand_over(each, req) if is_marked(each) else each for each in hashes]
    if embeddings := _embeddings_of(req):
        hashes = [hashlib.sha256(_EMBEDDED + embeddings + bytes.fromhex(each)).hexdigest() for each in hashes]
    return Names(tuple(hashes), tail_tokens, tenant_tag(req.cache_salt))


def _in_this_hand_over(page_hash: str, req: Any) -> str:
    if req.bootstrap_room is None:
        raise InputError("a hand-over of media needs a bootstrap_room")
    room = str(req.bootstrap_room).encode()
    return hashlib.sha256(_MEDIA + bytes.fromhex(unmarked(page_hash)) + room).hexdigest()


def why_names_do_not_suffice(model: Any) -> str:
    """Why the KV of a page depends on more than the tokens up to its end, which are all that its name has; empty if it
    does not. For these models SGLang turns its prefix cache off.

    model: SGLang's configuration of it (`ModelConfig`).
    """
    config = model.hf_config
    if model.is_encoder_decoder:
        return "an encoder, whose output is in no page's name"
    is_prefix_lm = config.model_type == "hrm_text" and getattr(config, "prefix_lm", True)
    # SGLang sets `is_causal` for decision checkpoints, too.
    if is_prefix_lm or getattr(model.hf_text_config, "is_causal", True) is False:
        return "attention to the whole prompt, of which a page's name has only the tokens up to its end"
    return ""


def _embeddings_of(req: Any) -> bytes:
    """The digest of the embeddings that a request gives in place of tokens; empty if it gives none."""
    whole, some = req.input_embeds, req.positional_embed_overrides
    if whole is None and some is None:
        return b""
    digest = hashlib.sha256()
    for row in whole or ():
        digest.update(array("d", row))
    if some is not None:
        digest.update(array("q", some.positions))
        digest.update(some.embeds.cpu().contiguous().view(torch.uint8).numpy())
    return digest.digest()
