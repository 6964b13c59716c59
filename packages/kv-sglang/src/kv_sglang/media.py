"""Keeps pages with media, and all pages after them, out of the cache.

SGLang puts numbers beyond the vocabulary in the place of an image's, a sound's or a video's tokens, made from a hash of
at most 64 bits of what its processor returned, or from what the client says that the hash is (`mm_hashes`, `hash`,
`pad_value`). That may do for one engine's memory. It is no name under which KV can lie on a disk: whoever names an item
as another decides whose KV is found.

A storage is told only the hashes of pages. So the function that computes all of them marks those of such pages, and of
each page that follows one: SGLang passes hashes on as they are, so a mark stays with what is generated, too.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

_DIGEST_BYTES: Final = 32
_MARK: Final = "00"
"""After the hex digits of a page's hash."""


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
    """Mark hashes in this process, for its life. Raises whatever importing SGLang raises."""
    from sglang.srt.mem_cache import utils
    from sglang.srt.mem_cache.cpp_utils.native_hash import _native_hash_input

    compute = utils.get_native_hash
    if getattr(compute, "_kv_marks", False):
        return

    @functools.wraps(compute)
    def get_native_hash(token_ids: Any, prior_digest: bytes | None = None, page_size: int | None = None) -> Any:
        follows = prior_digest is not None and len(prior_digest) > _DIGEST_BYTES
        hashes = compute(token_ids, None if prior_digest is None else prior_digest[:_DIGEST_BYTES], page_size)
        tokens, units, width, is_bigram = _native_hash_input(token_ids)
        first = 0 if follows else _first_unit(tokens, units, width, is_bigram)
        if isinstance(hashes, str):
            return marked(hashes) if first < units else hashes
        page = units if first >= units or not page_size else first // page_size
        return [marked(each) if number >= page else each for number, each in enumerate(hashes)]

    get_native_hash._kv_marks = True  # type: ignore[attr-defined]
    utils.get_native_hash = get_native_hash


def _first_unit(tokens: Any, units: int, width: int, is_bigram: bool) -> int:
    """The first of the hashed units that has a token of media; `units` if none has."""
    places = media_places(tokens)
    if not places:
        return units
    first = places[0]
    return min(units, max(0, first - 1) if is_bigram else first // width)
