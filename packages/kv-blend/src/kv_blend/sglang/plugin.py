"""The plugin that SGLang runs in each of its processes. It puts phases behind SGLang's entrance for requests, and plans
for clients that send text in front of its HTTP server."""

import json
import sys
from typing import Any, Final

from kv_core.errors import ConfigError

STORAGE: Final = ("kv_blend.sglang.storage", "KVBlendStorage")
"""Module and class."""
_EXTRA: Final = "hicache_storage_backend_extra_config"
_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def engine_arguments(settings: dict[str, Any], *, page_size: int, linker: bool = False) -> dict[str, Any]:
    """The arguments of `sglang.Engine` for our settings, which are those of kv-sglang.

    Raises:
        ConfigError: SGLang's linker does not blend.
    """
    from kv_sglang import cli

    if linker:
        raise ConfigError("blending is served by HiCache's storage, and not by the linker: leave out --linker")
    # SGLang looks for shorter runs of pages only if it is told to, and computes without waiting for them.
    made = cli.engine_arguments({"prefetch_threshold": page_size, **settings}, page_size=page_size)
    module, name = STORAGE
    extra = json.loads(made[_EXTRA]) | {"module_path": module, "class_name": name}
    return made | {_EXTRA: json.dumps(extra), "hicache_storage_prefetch_policy": "wait_complete"}


def blends(server_args: Any) -> bool:
    """Whether an engine with these arguments of SGLang's has our storage."""
    try:
        extra = json.loads(getattr(server_args, _EXTRA, None) or "{}")
    except ValueError:  # the name of a file
        return False
    return (extra.get("module_path"), extra.get("class_name")) == STORAGE


def register() -> None:
    """The entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MANAGER}.generate_request", _generate_request, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.__init__", _made, HookType.AFTER)


def _generate_request(*given: Any, **named: Any) -> Any:
    from kv_blend.sglang.phases import generate_request

    return generate_request(*given, **named)


def _made(_none: None, manager: Any, *_given: Any, **_named: Any) -> None:
    """SGLang's server is an application of its module, and has no option for more in front of it."""
    from kv_blend.middleware import SegmentsMiddleware

    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is not None and blends(manager.server_args) and server.app.middleware_stack is None:
        server.app.add_middleware(SegmentsMiddleware, engine="sglang")
