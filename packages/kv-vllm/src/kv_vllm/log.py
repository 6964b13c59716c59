"""Our lines in vLLM's log.

vLLM configures its own logger only, so in its API server our lines below WARNING would be lost. Unless logging has been
configured otherwise, our loggers write where vLLM's does, at its level.
"""

import logging
from typing import Final

_OURS: Final = ("kv_core", "kv_cuda", "kv_tiers", "kv_vllm")


def join_vllm_log() -> None:
    """Idempotent. Does nothing if the root logger or ours have handlers, or vLLM's has none."""
    theirs = logging.getLogger("vllm")
    if logging.getLogger().handlers or not theirs.handlers:
        return
    for name in _OURS:
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level)
            ours.propagate = False
