"""SGLang's external linker: the module that `--unified-cache-external-linker-config` names."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_sglang.linker.linker import KVLinker
else:
    from kv_core.lazy import exports

    __getattr__ = exports(__name__, {"kv_sglang.linker.linker": ("KVLinker",)})

__all__ = ["KVLinker"]
