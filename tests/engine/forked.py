"""vLLM's processes, and servers of engines, forked instead of started (`kv_testing.forked`).

On a CPU vLLM starts each of its processes as a new interpreter, and the tests start such interpreters too.
"""

import importlib
import importlib.util
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kv_testing.forked import Kind, be_nursery
from kv_testing.forked_servers import begin_server, import_server, runs_server

_SPAWNED: Final = "from multiprocessing.spawn import spawn_main"
_DEMO: Final = Path(__file__).parents[2] / "demo"
_SCRIPTS: Final = {str(Path(__file__).with_name(f"{name}.py")) for name in (
    "killed", "killed_handover", "one_model", "second_node",
)} | {str(_DEMO / name) for name in ("blend.py", "on_vllm.py")}  # fmt: skip
_IMPORTED: Final = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def import_vllm() -> None:
    """What of it the tests' processes use."""
    for name in _IMPORTED:
        importlib.import_module(name)


def prepare_engines() -> None:
    """Do once what each engine on a CPU does anew as it starts, for 1 to 3 s: vLLM looks through all that has been
    imported for kernels that it replaces, and writes zeros over a GiB of KV cache, of which a test uses some blocks."""
    import torch
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    register, zeros = dispatcher.register_kernels, torch.zeros

    def register_new(overrides: Mapping[str, Callable[..., Any]]) -> None:
        known = {name: its for name, (_, its) in dispatcher._registry.items()}
        if any(known.get(name) is not its for name, its in overrides.items()):
            register(overrides)

    def zeros_as_touched(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.int8 and len(size) == 1 and isinstance(size[0], int) and size[0] >= 1 << 20:
            return torch.frombuffer(mmap.mmap(-1, size[0]), dtype=torch.int8)
        return zeros(*size, **options)

    dispatcher.register_kernels, torch.zeros = register_new, zeros_as_touched
    current_platform.register_triton_kernel_overrides()


def _prepare() -> None:
    import_vllm()
    import_server()
    prepare_engines()


def _imports_vllm(arguments: list[str]) -> bool:
    match arguments:
        case ["-c", code, *_]:
            return code.startswith(_SPAWNED)
        case ["-m", module, *_]:
            return module.startswith("vllm.")
        case [script, *_]:
            return script in _SCRIPTS
    return False


def _preloaded() -> list[Path]:
    """What vLLM has the processes preload that it starts: its malloc, and torch's OpenMP."""
    return [*_of("vllm").glob("libs/libtcmalloc*.so*"), *_of("torch").glob("lib/libgomp*.so*")]


def _of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


VLLM: Final = Kind(
    __file__, lambda arguments: _imports_vllm(arguments) or runs_server(arguments), _prepare, begin_server, _preloaded
)

if __name__ == "__main__":
    be_nursery(VLLM)
