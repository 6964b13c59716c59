"""Builds the caches of one SGLang rank from settings, one for each format of pages, and the key spaces of the pages.

With one rank the caches are in SGLang's scheduler process. With several, the first rank starts a private server that
all of them join; a server named in the settings is joined by all. SGLang ends an engine by killing its processes and
their descendants, so a private server is not one of them, and spills waiting chunks once they are gone. With a tier of
`write: back`, whose chunks may wait as long as there is room, there is a private server even for one rank.

Pools whose pages have the same format share a cache, because a lower tier belongs to one cache of a format. Each pool's
pages have their own key space: their hashes are the same, so one pool's page would otherwise be taken for another's.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final

import msgspec
from kv_connect.identity import LiveKeySpace, LiveWeights, ServedModel
from kv_connect.neighbours import StoredFormat, warn_of_other_formats
from kv_connect.open_cache import Format, check_replicas, open_in_process, open_remote
from kv_core.errors import ConfigError
from kv_core.hashing import ChainScheme
from kv_core.log import limited_logger
from kv_core.plugins import extra_needed
from kv_core.sequence import digests_of
from kv_server.process import SupervisedServer
from kv_server.remote_cache import RemoteCache
from kv_server.wire import CHUNK_TOKENS, READS_TOGETHER, REPEATS_LOOKUPS
from kv_tiers import LocalCache
from kv_tiers.approximate import is_approximate, uses_calibration
from kv_tiers.build import refuse_gds
from kv_tiers.events.bus import EventBus
from kv_tiers.settings import Settings
from kv_tiers.verdict import demand

from kv_sglang import TESTED
from kv_sglang.metrics import NO_FIGURES, Figures
from kv_sglang.names import is_marked, mark_media, unmarked
from kv_sglang.pages import PageStore
from kv_sglang.pools import PoolPages
from kv_sglang.scheduler_calls import (
    PrefillSpeed,
    RequestPages,
    TurnEnds,
    follow_requests,
    follow_steps,
    follow_turns,
)
from kv_sglang.weights import WeightsWatch, before_loading

_log = limited_logger(__name__)

KV: Final = "kv"


@dataclass(frozen=True, slots=True)
class Rank:
    """The share of the engine that this process has.

    number: among the tensor-parallel ranks.
    replicated: every rank has the same KV, and one of them writes it (MLA).
    replica: of data parallelism, within attention.
    replicas: how many there are, of either kind.
    """

    number: int
    ranks: int
    replicated: bool
    stage: int
    stages: int
    replica: int
    replicas: int
    nodes: int

    @classmethod
    def here(cls, number: int, ranks: int, *, replicated: bool, stage: int = 0, stages: int = 1) -> "Rank":
        """This process's, with replicas and machines as SGLang counts them."""
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        # Not a storage config's `dp_rank`, which is that of attention: it is 0 in every replica of the whole engine.
        replica = parallel.dp_rank or 0
        return cls(number, ranks, replicated, stage, stages, replica, parallel.num_dp_ranks, parallel.nnodes)


@dataclass(slots=True)
class Attached:
    """Everything that `attach` opened.

    stores: by SGLang's name of the pool.
    server: the private one, in the process that started it.
    """

    stores: dict[str, PageStore] = field(default_factory=dict)
    caches: dict[Format, LocalCache | RemoteCache] = field(default_factory=dict)
    buses: list[EventBus] = field(default_factory=list)
    server: SupervisedServer | None = None
    watch: WeightsWatch | None = None
    requests: RequestPages | None = None
    prefill: PrefillSpeed | None = None
    turns: TurnEnds | None = None
    figures: Figures = NO_FIGURES

    def follow_scheduler(self) -> WeightsWatch:
        """Take from SGLang's scheduler what it does not tell its storage or linker. Raises whatever importing SGLang
        raises."""
        assert self.watch is not None and self.requests is not None and self.prefill is not None
        follow_requests(self.requests)
        follow_steps(self.prefill)
        self.turns = TurnEnds([store.turn_ended for store in self.stores.values()], self.figures)
        follow_turns(self.turns)
        return self.watch

    def close(self) -> None:
        """Spill waiting chunks and release everything. The caches' memory is freed with SGLang's last thread."""
        if self.watch is not None:
            self.watch.close()
        for store in self.stores.values():
            store.close()
        for cache in self.caches.values():
            try:
                cache.close()
            except BufferError as error:  # a copy is still in flight; the process is ending anyway
                _log.warning("a host pool stays mapped: %s", error)
        for bus in self.buses:
            bus.close()
        if self.server is not None:
            self.server.stop()
        if self.requests is not None:  # else it would hear of requests for as long as no garbage is collected
            self.requests.listeners.clear()
            self.requests.arrivals.clear()
        self.stores, self.caches, self.buses, self.server = {}, {}, [], None
        self.watch = self.requests = self.prefill = self.turns = None


def check_hashes() -> None:
    """Check that SGLang's names of pages are the digests that we assume, and mark those with media (`media`).

    Raises:
        ConfigError: they are not.
    """
    from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE
    from sglang.srt.mem_cache.utils import get_hash_str

    tokens = [1, 2, 3, 2**31, 5, 6, 7, 8]
    sglang_hashes = [unmarked(each) for each in get_hash_str(tokens, None, page_size=4)]
    our_hashes = [digest.hex() for digest in digests_of(ChainScheme("sha256", 4), tokens)]
    if sglang_hashes != our_hashes:
        raise ConfigError(
            f"this SGLang names its pages differently from {TESTED}, with which kv-sglang is tested: use that "
            "version, or leave out --hicache-storage-backend"
        )
    mark_media()
    text, media = tokens[4:], [7, 8, 9, MM_PAD_SHIFT_VALUE + 7]
    pages = get_hash_str([*text, *media, *text], None, page_size=4)
    (last,) = get_hash_str(text, pages[1], page_size=4)
    if [is_marked(each) for each in (*pages, last)] != [False, True, True, True] or last != pages[2]:
        raise ConfigError(
            f"this SGLang names pages with media differently from {TESTED}, with which kv-sglang is tested: use that "
            "version, or leave out --hicache-storage-backend"
        )


def other_sglang(what: str, differences: Sequence[str], otherwise: str = "") -> ConfigError:
    """The error for an SGLang whose storage or linker interface differs from the one implemented here."""
    return ConfigError(
        f"SGLang {version('sglang')} has a different {what} interface from {TESTED}, with which kv-sglang is tested: "
        f"{'; '.join(differences)}; install sglang=={TESTED}" + (f", or {otherwise}" if otherwise else "")
    )


def attach(
    settings: Settings,
    model: ServedModel,
    rank: Rank,
    pools: Mapping[str, PoolPages],
    *,
    engine_name: str = "",
    figures: Figures = NO_FIGURES,
    reads_together: bool = False,
) -> Attached:
    """Open the store of each pool's pages.

    engine_name: common to the engine's ranks, and unique to them.
    reads_together: whether pages stay held for the engine's other ranks when this one has read them, until one of the
        ranks says that they are taken.

    Raises:
        ConfigError: the settings are not possible on this machine, or with this engine.
    """
    refuse_gds(settings.tiers, "is for vLLM")
    if rank.replicas > 1:
        check_replicas(settings)
    codec, judged = "", [pages.format for pages in pools.values()]
    prints = {name: pages.format.fingerprint for name, pages in pools.items()}
    if uses_calibration(settings.tiers):
        with extra_needed("codec kvtc", "kv-sglang[codecs]"):
            from kv_sglang.calibrated import bind_calibration
        codec, prints = bind_calibration(settings.tiers, rank, {name: pages.format for name, pages in pools.items()})
        judged = [pools[KV].format]
    approximate = is_approximate(settings.tiers)
    demand(settings.judge.verdict, settings.judge.max_kl, judged, approximate=approximate, codec=codec)
    alone = rank.ranks == rank.stages == 1 and not settings.server.socket and not _would_lose_what_waits(settings)
    if not alone and not settings.server.socket and rank.nodes > 1:
        raise ConfigError(
            f"the engine's ranks are on {rank.nodes} machines, and no private server can reach them all: start "
            "kv-server on each and give its server.socket"
        )
    # The parent is the same for all ranks of an engine, and no other engine's while it lives.
    engine = f"sglang-{os.getppid()}-{rank.replica}"
    formats = {name: Format((pages.format.nbytes,), prints[name]) for name, pages in pools.items()}
    page_bytes = sum(max(chunks.group_bytes) for chunks in formats.values())
    # Replicas are updated one by one, so the weights of one may differ from the others'.
    own_name = f"{engine_name}-{rank.replica}" if engine_name else ""
    watch = WeightsWatch(LiveWeights(model, before=before_loading(), engine=own_name))
    attached = Attached(watch=watch, figures=figures)
    keeps = StoredFormat.of(model, pools[KV].format.kind, prints[KV])
    if rank.number == rank.stage == rank.replica == 0:
        warn_of_other_formats(settings, keeps)
    try:
        for chunks in dict.fromkeys(formats.values()):
            names = [name for name, its in formats.items() if its == chunks]
            if alone:
                part = _part_of(settings, names[0], len(names) * max(chunks.group_bytes) / page_bytes)
                attached.caches[chunks], bus = open_in_process(part, chunks)
                attached.buses.append(bus)
            else:
                first = rank.number == rank.stage == len(attached.caches) == 0
                attached.caches[chunks], server = open_remote(
                    settings,
                    chunks,
                    engine_id=engine,
                    is_first=first,
                    facts={
                        "pool": ", ".join(names),
                        CHUNK_TOKENS: str(settings.chunk_tokens),
                        **(keeps.facts() if KV in names else {}),
                        **({REPEATS_LOOKUPS: "true"} if rank.number else {}),
                        **({READS_TOGETHER: "true"} if reads_together else {}),
                    },
                )
                attached.server = attached.server or server
        cache = attached.caches[formats[KV]]
        figures = figures if rank.number == rank.stage == 0 else figures.of_bytes
        requests = attached.requests = RequestPages(settings.use, settings.chunk_tokens, lambda: cache.tiers, figures)
        prefill = attached.prefill = PrefillSpeed(tokens_per_second=settings.cost.prefill_tokens_per_second)
        for name, pages in pools.items():
            # Where all ranks have the same KV, there is one share. States of linear attention are never the same.
            whole = rank.replicated and name != "mamba"
            space = LiveKeySpace(
                watch.weights,
                kv_dtype=pages.dtype,
                format_fingerprint=prints[name],
                world=1 if whole else rank.ranks,
                chain=settings.scheme().name,
                tags=() if name == KV else (("pool", name),),
            )
            attached.stores[name] = PageStore(
                attached.caches[formats[name]],
                space,
                pages,
                shard=0 if whole else rank.number,
                wait_s=settings.cold.wait_s,
                holds_old_pages=watch.holds_old_pages,
                use=settings.use,
                page_tokens=settings.chunk_tokens,
                # Without a few pages of another pool the engine computes the whole prompt, not only those.
                prefill=prefill if name == KV else None,
                requests=requests,
                figures=figures if name == KV else figures.of_bytes,
            )
    except BaseException:
        attached.close()
        raise
    return attached


def _would_lose_what_waits(settings: Settings) -> bool:
    """Whether waiting chunks would be lost if the process with the pool is killed. A named pool survives intact."""
    return not settings.host.name and any(tier.get("write") == "back" for tier in settings.tiers)


def _part_of(settings: Settings, pool: str, part: float) -> Settings:
    """The settings with the memory and the name of one cache among several."""
    if part == 1:
        return settings
    name = f"{settings.host.name}-{pool}" if settings.host.name else ""
    host = msgspec.structs.replace(settings.host, capacity_bytes=int(settings.host.capacity_bytes * part), name=name)
    return msgspec.structs.replace(settings, host=host)
