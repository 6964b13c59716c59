"""Blending on vLLM. Its plugin runs in each of vLLM's processes, so that a user only has to name the connector."""

CONNECTOR_NAME = "KVBlendConnector"


def register() -> None:
    """Register `kv_connector="KVBlendConnector"` with vLLM. Idempotent: vLLM may call it more than once per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "kv_blend.vllm.connector", CONNECTOR_NAME)
