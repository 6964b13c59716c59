"""The plugin that vLLM runs in each of its processes, so that a user only has to name the connector."""

import logging
from typing import Final

from kv_core.log import limited_logger

_OUR_LOGGERS: Final = tuple(
    f"kv_{name}"
    for name in ("core", "eviction", "tiers", "remote", "observe", "codecs", "server", "connect", "cuda", "vllm")
)

_log = limited_logger(__name__)

CONNECTOR_NAME = "KVTiersConnector"


def join_vllm_log() -> None:
    """Idempotent. Does nothing if the root logger or ours have handlers, or vLLM's has none.

    vLLM configures its own logger only, so our lines below WARNING would be lost. Unless logging has been configured
    otherwise, our loggers write where vLLM's does, at its level. A process may load the plugin before vLLM configures
    its log, and one that is forked never loads it again, so the connector joins it too.
    """
    vllm_logger = logging.getLogger("vllm")
    if logging.getLogger().handlers or not vllm_logger.handlers:
        return
    for name in _OUR_LOGGERS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.handlers = list(vllm_logger.handlers)
            logger.setLevel(vllm_logger.level)
            logger.propagate = False


def register() -> None:
    """Register `kv_connector="KVTiersConnector"` with vLLM. Idempotent: vLLM may call it more than once per process."""
    from kv_vllm.media_names import watch_media_names
    from kv_vllm.weights import watch_for_loading

    join_vllm_log()
    for watch in (watch_media_names, watch_for_loading):
        try:
            watch()
        except Exception as error:  # noqa: BLE001  # vLLM calls this in every process, also without our connector
            _log.warning("%s fails with this vLLM, so names hold for one engine only: %r", watch.__name__, error)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "kv_vllm.connector", CONNECTOR_NAME)
