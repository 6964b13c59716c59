"""Who keeps a format that an engine of another kind never finds is told so at the start, in one line."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from kv_connect.identity import ServedModel
from kv_connect.neighbours import StoredFormat, warn_of_other_formats
from kv_server.process import launch
from kv_server.remote_cache import RemoteCache
from kv_tiers.settings import Settings

NBYTES = 6000


def kept(engine: str, kind: str = "canonical", fingerprint: str = "one", model: str = "m") -> StoredFormat:
    return StoredFormat.of(ServedModel(engine, model, None, "bfloat16", dummy_seed=0), kind, fingerprint)


def settings(**given: Any) -> Settings:
    return msgspec.convert(given, Settings)


class Start:
    """Engines that start one after the other on one tier, as this user."""

    def __init__(self, notes: Path, caplog: pytest.LogCaptureFixture, path: Path) -> None:
        self._notes, self._caplog, self._path = notes, caplog, path
        self.now_s = 0.0

    def __call__(self, keeps: StoredFormat, path: str = "kv") -> list[str]:
        """What is said."""
        tier = {"type": "disk", "directory": str(self._path / path), "capacity_bytes": "1GiB"}
        self._caplog.clear()
        warn_of_other_formats(settings(tiers=[tier]), keeps, notes=self._notes, now_s=lambda: self.now_s)
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Start:
    return Start(tmp_path / "cache" / "engines.json", caplog, tmp_path)


def test_opaque_blocks_beside_an_engine_of_another_kind_are_told_to_whoever_starts_second(
    start: Start, tmp_path: Path
) -> None:
    assert start(kept("sglang")) == []
    (said,) = start(kept("vllm", "blocks", "two"))
    assert said.startswith(f"sglang uses this disk tier ({tmp_path}/kv) with the same model in another format")
    assert "(canonical there, blocks here)" in said and "vllm stores opaque blocks" in said
    (said,) = start(kept("sglang"))
    assert said.startswith("vllm uses") and "vllm stores opaque blocks" in said


def test_another_page_or_dtype_is_told_with_what_to_write(start: Start) -> None:
    start(kept("sglang"))
    (said,) = start(kept("vllm", "canonical", "two"))
    assert "the same chunk_tokens (SGLang's --page-size), dtype and format" in said


def test_nothing_is_said_where_they_find_each_other_or_have_nothing_to_find(start: Start) -> None:
    start(kept("sglang", fingerprint="before"))
    assert start(kept("sglang")) == []  # the same kind of engine
    assert start(kept("vllm")) == []  # the same format as the last
    start.now_s += 86400.0
    assert start(kept("vllm", "blocks", "two"), path="elsewhere") == []
    other = StoredFormat("vllm", "another model", "blocks", "two")
    assert start(other) == []
    start.now_s += 40 * 86400.0  # long ago
    assert start(kept("vllm", "blocks", "two")) == []


def test_no_secret_is_written_and_a_damaged_note_is_as_if_there_were_none(tmp_path: Path) -> None:
    notes = tmp_path / "engines.json"
    redis = settings(tiers=[{"type": "redis", "url": "rediss://kv:hush@cache:6379"}])
    warn_of_other_formats(redis, kept("vllm"), notes=notes)
    assert "hush" not in notes.read_text() and "cache:6379" not in notes.read_text()
    assert notes.stat().st_mode & 0o777 == 0o600
    notes.write_text("[" * 1000)
    warn_of_other_formats(redis, kept("vllm"), notes=notes)
    assert "vllm" in notes.read_text()


def test_at_a_server_it_is_who_is_registered_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = launch({"host": {"capacity_bytes": 1 << 20}}, socket=tmp_path / "private" / "s")
    joined = settings(server={"socket": str(server.socket)})
    try:
        sglang = RemoteCache(server.socket, group_bytes=(NBYTES,), fingerprint="one", facts=kept("sglang").facts())
        warn_of_other_formats(joined, kept("vllm", "blocks", "two"))
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage().startswith(f"sglang uses the server at {server.socket} with the same model")
        sglang.close()
        caplog.clear()
        warn_of_other_formats(joined, kept("vllm", "blocks", "two"))
        assert caplog.records == []
    finally:
        server.stop()
    warn_of_other_formats(joined, kept("vllm"))  # a server that is not there is no reason to say or do anything here
    assert caplog.records == []
