"""The plugin that vLLM runs in each of its processes, so that a user only has to name the connector."""

from kv_core.log import limited_logger

_log = limited_logger(__name__)

CONNECTOR_NAME = "KVTiersConnector"


def register() -> None:
    """Register `kv_connector="KVTiersConnector"` with vLLM. Idempotent: vLLM may call it more than once per process."""
    from kv_vllm.log import join_vllm_log
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
