"""Our figures in vLLM's own metrics, and where it says that cached tokens came from."""

import json
import re
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, Engine, empty_the_pool, started
from kv_connect.engine import engines
from kv_connect.figures import FIGURES, TIER_TOKENS
from kv_core.errors import CopyFailed
from kv_tiers.settings import load
from kv_vllm.stats import HitSources, Stats
from test_api_server import PROMPT, api_server, complete
from vllm.v1.metrics.cache_hit_source import CacheHitSource

PREFIX = "vllm:kv_tiers_"
DASHBOARD = set(
    re.findall(r":kv_tiers_(\w+)", (Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8"))
)
CHUNK_BYTES = 512 << 10
"""Of the tiny model: 256 tokens."""


def figures(engine: Engine) -> dict[str, float]:
    """By name, and by tier or source where there is one."""
    found = {}
    for metric in engine.llm.get_metrics():
        inner = metric.labels.get("tier") or metric.labels.get("source")
        if metric.name.startswith((PREFIX, "vllm:prompt_tokens_cached_by_source")):
            found[metric.name.removeprefix(PREFIX) + (f"[{inner}]" if inner else "")] = metric.value
    return found


class Since:
    """What has changed since it was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._before = engine, figures(engine)

    def __getitem__(self, name: str) -> float:
        return figures(self._engine).get(name, 0) - self._before.get(name, 0)


@pytest.fixture(scope="module")
def engine(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = str(tmp_path_factory.mktemp("tier") / "kv")
    tier = {"type": "disk", "name": "slow", "directory": directory, "capacity_bytes": "64MiB"}
    cache = {"host": {"capacity_bytes": "64MiB"}, "tiers": [tier], "cold": {"wait_s": 20.0}}
    with started(tiny_llama, cache=cache, disable_log_stats=False) as running:
        yield running


def test_every_figure_is_there_before_the_first_request(engine: Engine) -> None:
    assert set(figures(engine)) >= set(FIGURES)


def test_the_dashboard_shows_these_figures_and_no_others() -> None:
    assert {name + ("_total" if figure.kind == "counter" else "") for name, figure in FIGURES.items()} | {
        f"{TIER_TOKENS}_total"
    } == DASHBOARD


def test_what_a_request_does_is_in_the_metrics(engine: Engine) -> None:
    since = Since(engine)
    engine.ask_in_turn([PROMPTS[0], PROMPTS[0]])  # 602 tokens, two chunks of 256
    assert engine.hits == [0, 512]
    assert (since["lookups"], since["asked_tokens"], since["found_tokens"]) == (2, 2 * 601, 512)
    assert (since["loads"], since["loaded_tokens"], since["stored_tokens"]) == (1, 512, 512)
    assert since["stored_bytes"] == since["loaded_bytes"] == 2 * CHUNK_BYTES
    assert since["hit_tokens[host]"] == since["vllm:prompt_tokens_cached_by_source[host]"] == 512
    now = figures(engine)
    assert now["on"] == 1
    assert 2 * CHUNK_BYTES <= now["pool_used_bytes"] < now["pool_bytes"] <= 64 << 20


def test_hits_are_counted_by_the_tier_that_they_came_from(engine: Engine) -> None:
    engine.ask([PROMPTS[1]])
    engine.inside("kv_settle")
    empty_the_pool()
    since = Since(engine)
    engine.ask([PROMPTS[1]])
    assert engine.hits == [512]
    assert since["hit_tokens[slow]"] == since["vllm:prompt_tokens_cached_by_source[disk]"] == 512
    assert since["hit_tokens[host]"] == since["vllm:prompt_tokens_cached_by_source[host]"] == 0


def test_hand_overs_are_counted(engine: Engine) -> None:
    def ask(prompt: list[int], **params: object) -> None:
        engine.ask([prompt], 1, extra_args={"kv_transfer_params": params})

    since = Since(engine)
    ask(PROMPTS[5], do_remote_decode=True)
    assert (since["handovers_given"], since["handovers_received"]) == (1, 0)
    ask(PROMPTS[5], do_remote_prefill=True, remote_num_tokens=len(PROMPTS[5]))
    ask([7] * 300, do_remote_prefill=True, remote_num_tokens=300)
    assert (since["handovers_given"], since["handovers_received"], since["handovers_late"]) == (1, 2, 1)


def test_a_load_that_fails_is_counted_and_its_tokens_are_not(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (inner,) = engines().values()
    engine.ask([PROMPTS[0]])

    def fail(plan: object) -> None:
        raise CopyFailed("the bus is on fire")

    since = Since(engine)
    with monkeypatch.context() as patch:
        patch.setattr(inner.copiers[0], "load", fail)
        engine.ask([PROMPTS[0]])
    assert (since["loads"], since["loads_failed"], since["loaded_tokens"]) == (1, 1, 0)
    assert since["loaded_bytes"] == 0


def test_a_step_in_which_nothing_was_counted_says_nothing(engine: Engine) -> None:
    """So vLLM carries nothing, and the pool is not asked."""
    connector = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector
    connector.get_kv_connector_stats()
    assert connector.get_kv_connector_stats() is None


def test_a_cache_that_is_turned_off_says_so_once(engine: Engine) -> None:
    """The last of this engine's tests."""
    (inner,) = engines().values()
    inner.turn_off("a test")
    engine.ask([PROMPTS[0]])
    assert figures(engine)["on"] == 0
    connector = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector
    assert connector.get_kv_connector_stats() is None


def test_workers_and_scheduler_are_added_up_by_name() -> None:
    ranks = Stats({"stored_bytes": 5}).aggregate(Stats({"stored_bytes": 6, "pool_bytes": 1}))
    both = ranks.aggregate(Stats({"lookups": 1, "pool_bytes": 2, TIER_TOKENS: {"host": 3}}))
    both = both.aggregate(Stats({TIER_TOKENS: {"host": 1, "disk": 2}}))
    assert both.data == {"stored_bytes": 11, "pool_bytes": 2, "lookups": 1, TIER_TOKENS: {"host": 4, "disk": 2}}
    assert both.reduce() == {"stored_bytes": 11, "pool_bytes": 2, "lookups": 1} | {
        "hit_tokens[host]": 4,
        "hit_tokens[disk]": 2,
    }


def test_tiers_are_named_as_vllm_names_sources() -> None:
    tiers = [{"type": "dram"}, {"type": "disk", "name": "ssd"}, {"type": "s3"}, {"type": "disk"}]
    sources = HitSources(load({"tiers": tiers}, {})[0])
    by_tier = {"host": 1, "dram": 2, "ssd": 4, "disk": 8, "s3": 16, "of a server": 32}
    assert sources.of(by_tier, 63) == {
        CacheHitSource.HOST: 3,
        CacheHitSource.DISK: 12,
        CacheHitSource.EXTERNAL_UNSPECIFIED: 48,
    }
    assert sources.of(by_tier, 60) == {CacheHitSource.EXTERNAL_UNSPECIFIED: 60}  # not what was offered
    assert sources.of({}, 0) == {}


@pytest.mark.slow
def test_ranks_in_processes_of_their_own_are_added_up(tiny_llama: str) -> None:
    cache: dict[str, Any] = {"host": {"capacity_bytes": "64MiB"}}
    arguments: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with started(tiny_llama, cache=cache, own_process=True, disable_log_stats=False, **arguments) as engine:
        since = Since(engine)
        engine.ask_in_turn([PROMPTS[0], PROMPTS[0]])
        assert engine.hits == [0, 512]
        assert (since["lookups"], since["loaded_tokens"], since["stored_tokens"]) == (2, 512, 512)
        assert since["stored_bytes"] == since["loaded_bytes"] == 2 * CHUNK_BYTES  # two ranks with half of each
        assert since["hit_tokens[host]"] == 512
        assert figures(engine)["pool_used_bytes"] > 0


def scraped(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(rf"^{PREFIX}(\w+?)(?:\{{.*\}})? (\S+)$", text, re.M)}


@pytest.mark.slow
def test_the_api_servers_metrics_and_the_pages_examples_over_http(spelling_llama: str, tmp_path: Path) -> None:
    """`docs/requests.md` as it is but for the port, at a server whose worker and cache are in other processes."""
    page = (Path(__file__).parents[2] / "docs" / "requests.md").read_text()
    example = "".join(block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "localhost:8000" in block)
    (outcomes,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    cache = {"host": {"capacity_bytes": "64MiB"}}
    with (
        tempfile.TemporaryDirectory(prefix="kv") as runtime,
        api_server(spelling_llama, cache, tmp_path, Path(runtime), "--chat-template", template) as (_, url, log),
    ):
        pasted = example.replace("http://localhost:8000", url)
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", pasted], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.count('"choices"') == 3, (done.stdout, done.stderr)
        assert json.dumps(json.loads(outcomes), separators=(",", ":")) in done.stdout
        before = scraped(url)
        assert "is ignored;" not in log.read_text()  # what the page says is understood
        assert complete(url, PROMPT) == complete(url, PROMPT)
        now = scraped(url)
        changed = {name: now[name] - before.get(name, 0) for name in now}
        assert set(FIGURES) <= {name.removesuffix("_total") for name in now}
        assert (changed["lookups_total"], changed["loaded_tokens_total"], changed["stored_tokens_total"]) == (
            2,
            512,
            512,
        )
        assert now.keys() >= DASHBOARD
        assert now["pool_used_bytes"] > 0 and now["on"] == 1
        assert changed["hit_tokens_total"] == 512
