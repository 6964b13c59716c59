"""SGLang's servers, each with its scheduler and detokenizer, its router, and our own, forked instead of started
(`kv_testing.forked`). Engines without HTTP are forked by `nursery`."""

import importlib
import sys
from pathlib import Path
from typing import Final

from kv_testing.forked import Kind, be_nursery
from kv_testing.forked_servers import begin_server, runs_server

_SPAWNED: Final = "from multiprocessing.spawn import spawn_main"
_COMMAND: Final = str(Path(sys.executable).with_name("sglang"))
_IMPORTED: Final = (
    "sglang.cli.main",
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)


def _prepare() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    sys.modules["sglang.srt.models.registry"].ModelRegistry.get_supported_archs()
    assert "prometheus_client" not in sys.modules, "SGLang says how it counts before it imports this"


def _imports_sglang(arguments: list[str]) -> bool:
    match arguments:
        case ["-c", code, *_]:
            return code.startswith(_SPAWNED)
        case ["-m", module, *_]:
            return module in ("sglang.launch_server", "sglang_router.launch_router")
        case [script, *_]:
            return script == _COMMAND
    return False


SGLANG: Final = Kind(
    __file__,
    lambda arguments: _imports_sglang(arguments) or runs_server(arguments),
    _prepare,
    begin_server,
    commands=frozenset({_COMMAND}),
)

if __name__ == "__main__":
    be_nursery(SGLANG)
