"""A cache for each host pool, each with its part of the memory, and no page of one taken for another's."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kv_codecs.calibration import Calibration, Learning
from kv_connect.identity import ServedModel
from kv_core.errors import ConfigError
from kv_core.format import ChunkFormat
from kv_server.process import launch
from kv_sglang.attach import Attached, Rank, attach
from kv_sglang.pools import describe
from kv_testing.throttled import offer
from kv_tiers.config import ColdConfig, CostConfig, HostConfig
from kv_tiers.settings import Settings

MODEL = ServedModel("sglang", "m", None, "float32", dummy_seed=0)
ALONE = Rank(number=0, ranks=1, replicated=False, stage=0, stages=1, replica=0, replicas=1, nodes=1)
SETTINGS = Settings(chunk_tokens=4, host=HostConfig(capacity_bytes=1 << 20))
NAMES = ["ab" * 32, "cd" * 32]


def attached(make_pool: Callable[..., Any], *names: str, rank: Rank = ALONE, settings: Settings = SETTINGS) -> Attached:
    """With a pool of K and V for each name."""
    return attach(settings, MODEL, rank, {name: describe(make_pool("mha", "page_first"), name) for name in names})


def test_pools_of_one_engine_share_its_memory_and_no_page(make_pool: Callable[..., Any], tmp_path: Path) -> None:
    """A model's two kinds of layers may have pages of one format, under the same hashes, and a tier has one owner."""
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    made = attached(make_pool, "kv", "swa", settings=msgspec.structs.replace(SETTINGS, tiers=[disk]))
    assert made.stores["kv"].write(NAMES, [0, 4]) == [True, True]
    assert made.stores["kv"].held(NAMES) == 2
    assert made.stores["swa"].held(NAMES) == 0
    (cache,) = made.caches.values()
    assert cache.counts().slots_total == (1 << 20) // 4096
    spaces = {store.keys(NAMES)[0].space_id for store in made.stores.values()}
    assert len(spaces) == 2
    made.close()


def test_what_has_been_closed_hears_of_no_request_any_more(make_pool: Callable[..., Any]) -> None:
    """Another may be attached in its place, and an arrival or a hint would count twice."""
    made = attached(make_pool, "kv")
    assert made.requests is not None
    requests = weakref.ref(made.requests)
    gc.disable()
    try:
        made.close()
        assert requests() is None
    finally:
        gc.enable()


def test_how_fast_the_engine_computes_decides_about_keys_and_values_alone(
    make_pool: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the last pages of a window, the engine computes the whole prompt, not only those."""
    offer(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    slow = {"type": "throttled", "load_bytes_per_s": 10_000.0, "tier": disk}  # a page takes 0.4 s
    settings = msgspec.structs.replace(
        SETTINGS, tiers=[slow], cost=CostConfig(prefill_tokens_per_second=1e12), cold=ColdConfig(wait_s=30.0)
    )
    stored = attached(make_pool, "kv", "swa", settings=settings)
    assert all(store.write(NAMES, [0, 4]) == [True, True] for store in stored.stores.values())
    stored.close()
    made = attached(make_pool, "kv", "swa", settings=settings)
    assert made.stores["kv"].held(NAMES) == 0
    assert made.stores["swa"].held(NAMES) == 2
    made.close()


def test_pools_of_two_formats_have_a_part_of_the_memory_each(make_pool: Callable[..., Any]) -> None:
    pools = {
        "kv": describe(make_pool("mha", "page_first"), "kv"),
        "swa": describe(make_pool("mla", "page_first"), "swa"),
    }
    made = attach(SETTINGS, MODEL, ALONE, pools)
    slots = [cache.counts().slots_total for cache in made.caches.values()]
    assert len(slots) == 2 and sum(slots) * 4096 <= 1 << 20 < (sum(slots) + 2) * 4096
    assert all(store.write(NAMES, [0, 4]) == [True, True] for store in made.stores.values())
    made.close()


def calibrated(
    pages: ChunkFormat, path: Path, *, heads: int, step: float = 0.4, ranks: int = 1, neighbours: bool = False
) -> Calibration:
    """Of a model with pages like these, but for the number of heads."""
    learning = Learning(
        model="m",
        dtype=pages.dtype,
        heads=heads,
        head_dim=pages.head_dim,
        max_tokens=4096,
        frequencies=[[0.5**j for j in range(pages.head_dim // 2)]] * pages.layers,
        ranks=ranks,
        neighbours=neighbours,
    )
    drawn = np.random.default_rng(1).normal(0, 1, (4 * heads * pages.head_dim, heads, pages.head_dim))
    learning.add([(drawn, drawn)] * pages.layers)
    made: Calibration = learning.learnt(step)
    made.write(path)
    return made


def test_pages_of_a_calibrated_codec_are_kept_apart_and_another_models_calibration_is_refused(
    make_pool: Callable[..., Any], tmp_path: Path
) -> None:
    pages = describe(make_pool("mha", "page_first"), "kv").format
    spaces, directory = set(), tmp_path / "kv"
    for heads, step in ((pages.heads, 0.4), (pages.heads, 0.5), (pages.heads + 1, 0.4)):
        path = tmp_path / f"{heads}-{step}.kvtc"
        calibration = calibrated(pages, path, heads=heads, step=step)
        codec = {"type": "kvtc", "calibration": str(path)}
        disk = {"type": "disk", "directory": str(directory), "capacity_bytes": "64MiB", "codec": codec}
        settings = msgspec.structs.replace(SETTINGS, tiers=[disk])
        if heads != pages.heads:
            with pytest.raises(ConfigError, match=f"with {pages.layers} layers of {heads} heads"):
                attached(make_pool, "kv", settings=settings)
            continue
        made = attached(make_pool, "kv", settings=settings)
        assert made.stores["kv"].write(NAMES, [0, 4]) == [True, True]
        spaces.add(made.stores["kv"].keys(NAMES)[0].space_id)
        (chunks,) = made.caches
        assert chunks.fingerprint == f"{pages.fingerprint} {calibration.name}"
        made.close()
    exact = attached(make_pool, "kv")
    spaces.add(exact.stores["kv"].keys(NAMES)[0].space_id)
    exact.close()
    assert len(spaces) == 3


def test_a_calibration_for_keys_of_which_the_order_is_not_known_is_refused(
    make_pool: Callable[..., Any], tmp_path: Path
) -> None:
    pages, path = describe(make_pool("mha", "page_first"), "kv").format, tmp_path / "model.kvtc"
    calibrated(pages, path, heads=pages.heads, neighbours=True)
    codec = {"type": "kvtc", "calibration": str(path)}
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB", "codec": codec}
    with pytest.raises(ConfigError, match="nothing shows that SGLang stores such keys in the order"):
        attached(make_pool, "kv", settings=msgspec.structs.replace(SETTINGS, tiers=[disk]))


def test_ranks_keep_their_own_share_and_latents_are_shared(make_pool: Callable[..., Any], tmp_path: Path) -> None:
    server = launch({"host": {"capacity_bytes": 1 << 20}}, socket=tmp_path / "private" / "s")
    joined = msgspec.convert({"chunk_tokens": 4, "server": {"socket": str(server.socket)}}, Settings)
    two = [replace(ALONE, number=number, ranks=2) for number in range(2)]
    try:
        own = [attached(make_pool, "kv", rank=rank, settings=joined) for rank in two]
        assert own[0].stores["kv"].write(NAMES, [0, 4]) == [True, True]
        assert own[1].stores["kv"].held(NAMES) == 0
        latent = [replace(rank, replicated=True) for rank in two]
        same = [attached(make_pool, "kv", rank=rank, settings=joined) for rank in latent]
        assert same[0].stores["kv"].held(NAMES) == 0  # another number of shares is another key space
        assert same[0].stores["kv"].write(NAMES, [0, 4]) == [True, True]
        assert same[1].stores["kv"].held(NAMES) == 2
        states = [
            attached(make_pool, "kv", "mamba", rank=replace(rank, replicated=True), settings=joined) for rank in two
        ]
        assert states[0].stores["mamba"].write(NAMES, [0, 4]) == [True, True]
        assert states[1].stores["mamba"].held(NAMES) == 0  # never the same on two ranks
        for each in (*own, *same, *states):
            each.close()
    finally:
        server.stop()


def test_a_calibration_is_divided_among_ranks_and_leaves_states_as_they_are(
    make_pool: Callable[..., Any], tmp_path: Path
) -> None:
    pages, path = describe(make_pool("mha", "page_first"), "kv").format, tmp_path / "model.kvtc"
    calibration = calibrated(pages, path, heads=2 * pages.heads, ranks=2)
    codec = {"type": "kvtc", "calibration": str(path)}
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB", "codec": codec}
    server = launch({"host": {"capacity_bytes": 1 << 20}, "tiers": [disk]}, socket=tmp_path / "private" / "s")
    named: dict[str, Any] = {"chunk_tokens": 4, "server": {"socket": str(server.socket)}, "tiers": [disk]}
    joined = msgspec.convert(named, Settings)
    try:
        for number in range(2):
            rank = replace(ALONE, number=number, ranks=2)
            pools = {
                "kv": describe(make_pool("mha", "page_first"), "kv"),
                "mamba": describe(make_pool("mamba"), "mamba"),
            }
            made = attach(joined, MODEL, rank, pools)
            layers = f"0-{pages.layers - 1}"
            assert [chunks.fingerprint for chunks in made.caches] == [
                f"{pages.fingerprint} {calibration.name} layers:1x2:{layers}",
                f"{pools['mamba'].format.fingerprint} {calibration.name} layers:1x2:-",
            ]
            assert made.stores["kv"].write(NAMES, [0, 4]) == [True, True]
            made.close()
    finally:
        server.stop()
    refused: dict[str, tuple[tuple[str, ...], Rank]] = {
        "pools kv and swa": (("kv", "swa"), replace(ALONE, ranks=2)),
        "2 pipeline stages": (("kv",), replace(ALONE, stages=2)),
        "with 3 layers of 4 heads": (("kv",), ALONE),
    }
    for said, (names, rank) in refused.items():
        with pytest.raises(ConfigError, match=said):
            attached(make_pool, *names, rank=rank, settings=joined)


@pytest.mark.parametrize(
    ("rank", "settings", "said"),
    [
        (replace(ALONE, ranks=2, nodes=2), SETTINGS, "on 2 machines"),
        (
            replace(ALONE, replicas=2),
            msgspec.structs.replace(SETTINGS, tiers=[{"type": "disk", "directory": "/kv", "capacity_bytes": "1GiB"}]),
            "replicas, which cannot each own tiers",
        ),
    ],
)
def test_what_no_process_of_the_engine_could_own_is_refused(
    make_pool: Callable[..., Any], rank: Rank, settings: Settings, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        attached(make_pool, "kv", rank=rank, settings=settings)
