"""A subscriber of events of your own, with a parameter: which prompts' chunks leave the pool before they were ever hit.
In a package of yours, this in its pyproject.toml makes it known wherever the package is installed:

    [project.entry-points."kv_tiers.subscribers"]
    wasted = "your_package.your_module:make_wasted"

and settings say `observe: {subscribers: [{name: wasted, at_least: 2}]}`.
"""

from collections.abc import Mapping

import msgspec
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_eviction import LruPolicy
from kv_tiers import HostPool, LocalCache
from kv_tiers.events.bus import EventBus, Occurred, Subscriber
from kv_tiers.events.events import Committed, Evicted, LookedUp
from kv_tiers.options import read_options


class WastedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    at_least: int = 1
    """How many chunks must leave unused before it says so."""


def make_wasted(parameters: Mapping[str, object], bus: EventBus) -> Subscriber:
    config = read_options(WastedConfig, parameters, "subscriber wasted")
    if config.at_least < 1:
        raise ConfigError(f"subscriber wasted: at_least is {config.at_least}; write 1 or more")
    return Wasted(config.at_least)


class Wasted(Subscriber):
    """Called by the bus's thread alone, a moment after things happened, so it may take its time: no request waits."""

    def __init__(self, at_least: int) -> None:
        self._at_least = at_least
        self._unused: set[ChunkKey] = set()
        self.wasted = 0

    def take(self, occurred: Occurred) -> None:
        match occurred.event:
            case Committed(keys=keys):
                self._unused.update(keys)
            case LookedUp(keys=keys, chunks_hit=chunks):
                self._unused.difference_update(keys[:chunks])
            case Evicted(tier="host", keys=keys):
                self.wasted += len(self._unused.intersection(keys))
                self._unused.difference_update(keys)
            case _:
                pass  # an event of a later release: what is not known is left alone

    def close(self) -> None:
        if self.wasted >= self._at_least:
            print(f"{self.wasted} chunks were stored and never used")


def main() -> None:
    bus = EventBus()
    subscriber = make_wasted({"at_least": 2}, bus)
    bus.subscribe(subscriber)  # settings do this, for what they name
    pool = HostPool.anonymous("example", 4096, 4)
    cache = LocalCache(pool, policy=LruPolicy(), events=bus.source("example", (4096,)))
    for prompt in range(3):  # of three chunks each, in a pool of four
        cache.commit(cache.begin_store(key_chain(3, branch=str(prompt)), f"prompt {prompt}"))
        cache.end(f"prompt {prompt}")
    cache.close()
    bus.close()
    try:
        make_wasted({"at_leats": 2}, bus)
    except ConfigError as error:
        print(error)


if __name__ == "__main__":
    main()
