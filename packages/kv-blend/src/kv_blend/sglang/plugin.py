"""The plugin that SGLang runs in each of its processes. It puts phases behind SGLang's entrance for requests, and plans
for clients that send text in front of its HTTP server."""

import sys
from typing import Any, Final

_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


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
    from kv_blend.sglang.arguments import blends

    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is not None and blends(manager.server_args) and server.app.middleware_stack is None:
        server.app.add_middleware(SegmentsMiddleware, engine="sglang")
