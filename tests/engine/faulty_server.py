"""`kv-server` whose tiers fail at random, for the soak: the server's arguments."""

import random
import sys
import threading
from typing import Any

from kv_server.cli import main
from kv_testing.faults import Fault, FaultyTier
from kv_tiers import build
from kv_tiers.tier import Tier

FAULTS: tuple[Fault, ...] = ("", "", "", "down", "flip", "truncate", "swap", "unreadable", "refuse", "delay")
CHANGES_S = 0.05


def fail(tiers: list[FaultyTier], real: Any) -> Any:
    def lane(tier: Tier, *args: Any, **named: Any) -> Any:
        tiers.append(FaultyTier(tier))
        return real(tiers[-1], *args, **named)

    return lane


def change(tiers: list[FaultyTier], chance: random.Random) -> None:
    pause = threading.Event()
    while not pause.wait(CHANGES_S):
        for tier in tiers:
            tier.fault = chance.choice(FAULTS)


if __name__ == "__main__":
    made: list[FaultyTier] = []
    build.Lane = fail(made, build.Lane)  # type: ignore[misc]
    threading.Thread(target=change, args=(made, random.Random(3)), daemon=True).start()
    sys.exit(main(sys.argv[1:]))
