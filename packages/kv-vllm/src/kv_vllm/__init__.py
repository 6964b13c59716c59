"""KV-cache tiering for vLLM. Importing this needs no vLLM: what does is loaded when vLLM loads the connector."""

from kv_vllm.plugin import CONNECTOR_NAME

__all__ = ["CONNECTOR_NAME"]
