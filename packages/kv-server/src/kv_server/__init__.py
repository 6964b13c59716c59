"""The same cache in a process of its own, shared by the engines of a host.

No storage logic is here.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_server.config import ServerConfig
    from kv_server.process import ServerProcess, launch
    from kv_server.remote_cache import RemoteCache
else:
    # A client imports neither the server's settings nor its serving code. (No module here may have one of these names.)
    from kv_core.lazy import exports

    __getattr__ = exports(
        __name__,
        {
            "kv_server.config": ("ServerConfig",),
            "kv_server.process": ("ServerProcess", "launch"),
            "kv_server.remote_cache": ("RemoteCache",),
        },
    )

__all__ = ["RemoteCache", "ServerConfig", "ServerProcess", "launch"]
