"""The same cache in a process of its own: a relay, and the client that engines hold. No storage logic is here."""

from kv_tiers.server.config import ServerConfig
from kv_tiers.server.launch import ServerProcess, launch
from kv_tiers.server.remote_cache import RemoteCache

__all__ = ["RemoteCache", "ServerConfig", "ServerProcess", "launch"]
