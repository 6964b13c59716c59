"""Requests that say which tiers may be read and written for them, on real vLLM, wherever the cache runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, Answer, Engine, started
from kv_server.process import launch

KEPT_OUT, WRITTEN = PROMPTS[0], PROMPTS[5]
SERVERS = [pytest.param(f"{whose} server", marks=pytest.mark.long) for whose in ("private", "shared")]


@contextmanager
def engine_over_disk(model: str, directory: Path, where: str) -> Iterator[Engine]:
    """With an empty pool; what is on disk is from the engine before."""
    disk = {"type": "disk", "directory": str(directory / "kv"), "capacity_bytes": "64MiB"}
    tiers: dict[str, Any] = {"tiers": [disk], "cold": {"wait_s": 10.0}}
    if where != "shared server":
        cache = {"host": {"capacity_bytes": "64MiB"}, **tiers}
        with started(model, cache=cache, own_process=where == "private server") as engine:
            yield engine
        return
    server = launch({"host": {"capacity_bytes": 64 << 20}, **tiers}, socket=directory / "private" / "s")
    try:
        with started(model, cache={"server": {"socket": str(server.socket)}}) as engine:
            yield engine
    finally:
        server.stop()


def saying(**kv_tiers: Any) -> dict[str, Any]:
    return {"extra_args": {"kv_transfer_params": {"kv_tiers": kv_tiers}}}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in process", *SERVERS])
def test_nothing_but_its_tiers_is_read_or_written_for_a_request(
    tiny_llama: str, reference: list[Answer], tmp_path: Path, where: str
) -> None:
    """An engine that starts anew shows what is on disk. A tier that is none is no failed request."""
    kept_out, written = [reference[0]], [reference[5]]
    with engine_over_disk(tiny_llama, tmp_path, where) as first:
        assert first.ask([KEPT_OUT], **saying(tiers=["host", "nvme9"])) == kept_out
        assert first.ask([WRITTEN], **saying(tiers=["host", "disk"])) == written
        assert first.ask([KEPT_OUT], **saying(tiers=[])) == kept_out
        assert first.hits == [512]  # from the pool
        first.assert_at_rest()
    with engine_over_disk(tiny_llama, tmp_path, where) as second:
        assert second.ask([KEPT_OUT], **saying(store=False)) == kept_out
        assert second.hits == [0]
        assert second.ask([WRITTEN], **saying(tiers=["host"], store=False)) == written
        assert second.hits == [0]
        assert second.ask([WRITTEN], **saying(tiers=["disk"])) == written
        assert second.hits == [512]
        # A request forbids nothing to the next one with the same prompt.
        assert second.ask([KEPT_OUT], **saying(tiers=["host"])) == kept_out
        assert second.ask([KEPT_OUT]) == kept_out
        second.assert_at_rest()
    with engine_over_disk(tiny_llama, tmp_path, where) as third:
        assert third.ask([KEPT_OUT]) == kept_out
        assert third.hits == [512]
