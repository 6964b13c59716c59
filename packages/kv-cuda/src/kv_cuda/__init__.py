"""Copies chunks between host memory and the blocks of an engine, as a plan says.

`PagedLayout` describes the engine's side as named axes and strides, `kv_core.format.ChunkFormat` ours.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_cuda.canary import pages_of, probe_rows, read_rows, write_rows
    from kv_cuda.choose import Copier, make_copier
    from kv_cuda.copy.cpu import CpuCopier
    from kv_cuda.layout import (
        PagedLayout,
        PartLayout,
        Tile,
        latent,
        split_parts,
        tiled_keys_and_values,
        transposed_keys,
    )
else:
    from kv_core.lazy import exports  # importing torch takes seconds, and `kv` loads commands from this package

    __getattr__ = exports(
        __name__,
        {
            "kv_cuda.choose": (
                "Copier",
                "make_copier",
            ),
            "kv_cuda.copy.cpu": ("CpuCopier",),
            "kv_cuda.layout": (
                "PagedLayout",
                "PartLayout",
                "Tile",
                "latent",
                "split_parts",
                "tiled_keys_and_values",
                "transposed_keys",
            ),
            "kv_cuda.canary": (
                "pages_of",
                "probe_rows",
                "read_rows",
                "write_rows",
            ),
        },
    )

__all__ = [
    "Copier",
    "CpuCopier",
    "PagedLayout",
    "PartLayout",
    "Tile",
    "latent",
    "make_copier",
    "pages_of",
    "probe_rows",
    "read_rows",
    "split_parts",
    "tiled_keys_and_values",
    "transposed_keys",
    "write_rows",
]
