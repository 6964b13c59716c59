"""Our lines in vLLM's log.

vLLM configures its own logger only, so our lines below WARNING would be lost. Unless logging has been configured
otherwise, our loggers write where vLLM's does, at its level. A process may load the plugin before vLLM configures its
log, and one that is forked never loads it again, so the connector joins it too.
"""

import logging
from typing import Final

_OUR_LOGGERS: Final = tuple(
    f"kv_{name}"
    for name in ("core", "eviction", "tiers", "remote", "observe", "codecs", "server", "connect", "cuda", "vllm")
)


def join_vllm_log() -> None:
    """Idempotent. Does nothing if the root logger or ours have handlers, or vLLM's has none."""
    vllm_logger = logging.getLogger("vllm")
    if logging.getLogger().handlers or not vllm_logger.handlers:
        return
    for name in _OUR_LOGGERS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.handlers = list(vllm_logger.handlers)
            logger.setLevel(vllm_logger.level)
            logger.propagate = False
