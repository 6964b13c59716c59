"""Translates vLLM's connector interface into calls of the two halves.

Importing this does not import vLLM; that happens when vLLM loads the connector.
"""

from kv_vllm.plugin import CONNECTOR_NAME

__all__ = ["CONNECTOR_NAME"]
