"""The names of a prompt's pages: SGLang's own hashes, and the digest of the tokens after the last whole page.

Both engines of a hand-over, and every cache, compute them from the same tokens, so no name has to be trusted.
"""

from dataclasses import dataclass
from typing import Any

from kv_core.hashing import ChainScheme


@dataclass(frozen=True, slots=True)
class Names:
    """The names of all pages of a prompt.

    hashes: hex digits, from the first page on; the last of them names the tail if there is one.
    tail_tokens: how many tokens the last, partial page has; 0: there is none.
    """

    hashes: tuple[str, ...]
    tail_tokens: int


def hashes_of(req: Any, tree: Any) -> list[str]:
    """The hashes of the whole pages of a request's prompt, as SGLang itself computes them."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    core = getattr(tree, "tree_core", None)  # a decode engine without a tree lacks it
    is_eagle = core is not None and core.is_eagle
    key = RadixKey(req.origin_input_ids, extra_key=req.extra_key, is_bigram=is_eagle, cache_salt=req.cache_salt)
    return list(get_storage_hash_str(key.page_aligned(tree.page_size), page_size=tree.page_size))


def tail_of(req: Any, page_tokens: int, last_page: str) -> str:
    """The digest of the tokens after the last whole page, as stored on vLLM. last_page: empty if there is none."""
    tokens = list(req.origin_input_ids)
    tail = tokens[len(tokens) // page_tokens * page_tokens :]
    return ChainScheme("sha256", page_tokens).extend_tail(bytes.fromhex(last_page), tail).hex()


def names_of(req: Any, tree: Any) -> Names:
    """The names of all pages with KV of a request's prompt."""
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    tail_tokens = len(req.origin_input_ids) % tree.page_size
    hashes = hashes_of(req, tree)
    if tail_tokens:
        root = storage_namespace_seed(req.extra_key, req.cache_salt) or ""
        hashes.append(tail_of(req, tree.page_size, hashes[-1] if hashes else root))
    return Names(tuple(hashes), tail_tokens)
