"""What SGLang has of a prompt on its device when it looks up the rest, which it does not tell its linker.

Its tree matches a prompt first (`UnifiedCacheLinkerWrapper.match`), and calls `lookup` from there with the pages that
the device lacks.
"""

import functools
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from kv_core.log import limited_logger

from kv_sglang.scheduler_calls import observe

_log = limited_logger(__name__)

_OTHERWISE: Final = (
    "computing what is looked up is estimated as if nothing came before it, and a store may evict the beginning of its "
    "own prompt"
)


@dataclass(frozen=True, slots=True)
class Matched:
    """The pages on the device.

    tokens: how many they are.
    last_page: the hash of the last of them; empty if there is none.
    """

    tokens: int = 0
    last_page: str = ""


_NOTHING: Final = Matched()
_MATCHED: "WeakKeyDictionary[Any, Matched]" = WeakKeyDictionary()


def follow_matches() -> None:
    """Note every match of this process; raises whatever importing SGLang raises."""
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper

    observe("match", _around, otherwise=_OTHERWISE, of=UnifiedCacheLinkerWrapper)


def matched_by(linker: Any) -> Matched:
    """What was matched before the lookup that SGLang makes of this linker now. Call this from `lookup`."""
    return _MATCHED.get(linker, _NOTHING)


def _around(call: Any) -> Any:
    @functools.wraps(call)
    def called(self: Any, key: Any, req: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            tokens = int(result.device_prefix_len)
            last_page = self.cache.get_last_hash_value(result.last_device_node) if tokens else ""
            _MATCHED[self.cache_linker] = Matched(tokens, last_page or "")
        except Exception:  # noqa: BLE001  # any error would end the engine
            _log.exception("what SGLang has of a prompt cannot be read: %s", _OTHERWISE)
        return call(self, key, req, result, *args, **kwargs)

    return called
