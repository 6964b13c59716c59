"""What the linker knows of the pages that SGLang has on its device already, by SGLang's own match and lookup."""

from types import SimpleNamespace
from typing import Any

from kv_sglang.lanes import Chains
from kv_sglang.linker import KVLinker
from kv_sglang.scheduler_calls import PrefillSpeed, follow_matches
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.utils import get_storage_hash_str

PAGE = 4
PROMPT = list(range(100, 120))
HASHES = get_storage_hash_str(RadixKey(PROMPT, extra_key=None), None, page_size=PAGE)


class Seen:
    """What is looked up, in the place of loads."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def ready(self, _request: str, hashes: list[str]) -> int:
        self.pages = list(hashes)
        return 0


def engine(linker: KVLinker) -> UnifiedCacheLinkerWrapper:
    """SGLang's side of the linker, as far as it matches prompts."""
    wrapper = UnifiedCacheLinkerWrapper.__new__(UnifiedCacheLinkerWrapper)
    wrapper.cache_linker, wrapper.hit_markers = linker, {}
    wrapper.cache = SimpleNamespace(
        page_size=PAGE,
        tree_core=SimpleNamespace(is_eagle=False),
        get_last_hash_value=lambda pages: HASHES[pages - 1],
        _all_reduce_attn_groups=lambda *_arguments: None,
    )

    def build(_phase: Any, _node: Any, hashes: list[str]) -> PoolTransfer:
        return PoolTransfer(name=PoolName.KV, keys=list(hashes))

    wrapper._components = [SimpleNamespace(build_external_linker_transfer=build)]
    return wrapper


def match(wrapper: UnifiedCacheLinkerWrapper, pages: int) -> None:
    """Match the prompt where the device has its first pages."""
    result = SimpleNamespace(device_prefix_len=pages * PAGE, last_device_node=pages, best_match_node=pages)
    wrapper.match(RadixKey(PROMPT, extra_key=None), SimpleNamespace(rid="request"), result)


def test_a_lookup_after_pages_on_the_device_knows_how_many_and_which() -> None:
    """It knew only those that it was asked for. So computing them was estimated as if they were the prompt's first, and
    a store of them could evict the pages before them."""
    linker = KVLinker.__new__(KVLinker)
    linker.off, seen = "", Seen()
    prefill = PrefillSpeed(tokens_per_second=100.0)
    linker._attached, linker._loads = SimpleNamespace(prefill=prefill), seen
    linker._chains = Chains()
    follow_matches()
    wrapper = engine(linker)
    match(wrapper, 0)
    assert seen.pages == HASHES
    match(wrapper, 3)
    assert seen.pages == HASHES[3:]
    costs = prefill.costs(HASHES[3])
    assert costs is not None and costs.before_tokens == 3 * PAGE


def test_pages_that_are_offered_follow_those_on_the_device() -> None:
    linker = KVLinker.__new__(KVLinker)
    linker.off, linker._loads, linker._chains = "", Seen(), Chains()
    linker._attached = SimpleNamespace(prefill=None)
    linker._chains.tell(HASHES[:3])  # an earlier prompt, which is on the device by now
    follow_matches()
    match(engine(linker), 3)
    assert linker._chains.before(HASHES[3]) == HASHES[:3]
    assert linker._chains.before(HASHES[4]) == HASHES[:4]
