"""Names attention state: tokens become keys, keys become plans.

Pure decisions: no I/O, no threads, no clock.

    LOAD   tokens ─▶ keys ─▶ lookup plan ─▶ lease ─▶ transfer plan ─▶ bytes in the engine's blocks
           └─────── kv_core ───────────┘  kv_tiers   └────── kv_cuda ──────┘

    STORE  blocks ─▶ keys not yet held ─▶ lease ─▶ transfer plan ─▶ host pool ─▶ commit ─▶ lower tiers
           └ engine ┘ └── kv_core ────┘  kv_tiers  └─ kv_cuda ─┘                └──── kv_tiers ────┘

`kv_core.service` is the interface an engine's connector calls; `kv_connect.halves` is the engine-neutral connector.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_core.errors import ConfigError, CopyFailed, InputError, KVError, MisuseError, TierDown
    from kv_core.format import ChunkFormat
    from kv_core.hashing import ChainScheme, Item
    from kv_core.keys import ChunkKey, KeySpace, tenant_tag
    from kv_core.sequence import KeySequence, digests_of
    from kv_core.service import CacheService, Ended, LookupPlan
    from kv_core.tokens import Tokens
    from kv_core.transfer import Copy, HostExtent, TransferPlan, plan_transfer
else:
    from kv_core.lazy import exports

    __getattr__ = exports(
        __name__,
        {
            "kv_core.errors": (
                "ConfigError",
                "CopyFailed",
                "InputError",
                "KVError",
                "MisuseError",
                "TierDown",
            ),
            "kv_core.format": ("ChunkFormat",),
            "kv_core.hashing": (
                "ChainScheme",
                "Item",
            ),
            "kv_core.keys": (
                "ChunkKey",
                "KeySpace",
                "tenant_tag",
            ),
            "kv_core.sequence": (
                "KeySequence",
                "digests_of",
            ),
            "kv_core.service": ("CacheService", "Ended", "LookupPlan"),
            "kv_core.tokens": ("Tokens",),
            "kv_core.transfer": (
                "Copy",
                "HostExtent",
                "TransferPlan",
                "plan_transfer",
            ),
        },
    )

__all__ = [
    "CacheService",
    "ChainScheme",
    "ChunkFormat",
    "ChunkKey",
    "ConfigError",
    "Copy",
    "CopyFailed",
    "Ended",
    "HostExtent",
    "InputError",
    "Item",
    "KVError",
    "KeySequence",
    "KeySpace",
    "LookupPlan",
    "MisuseError",
    "TierDown",
    "Tokens",
    "TransferPlan",
    "digests_of",
    "plan_transfer",
    "tenant_tag",
]
