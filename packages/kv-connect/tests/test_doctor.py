"""What `kv doctor` says of servers and the engines at them."""

from pathlib import Path

from kv_connect import doctor
from kv_connect.engine import EngineFacts
from kv_core.coverage import Coverage
from kv_core.shape import GroupShape
from kv_server.process import launch
from kv_testing.cache_servers import join_at, settings_for


def test_engines_at_a_server_are_listed_with_what_their_groups_need(tmp_path: Path) -> None:
    facts = EngineFacts(
        chunk_tokens=256,
        groups=(GroupShape(16), GroupShape(16, Coverage("window", 512), 1), GroupShape(16, Coverage("window", 512), 2)),
        shards=1,
        kv_dtype="float32",
        kv_scales="",
        formats=("canonical",) * 3,
        layouts=("NHD",) * 3,
    )
    server = launch(settings_for(tmp_path), socket=tmp_path / "x.sock")
    try:
        (found,) = doctor.servers(server.socket.parent)
        assert (found.state, found.what) == ("ok", f"server {server.socket.stem}")
        assert "no engine uses it" in found.found
        cache = join_at(server.socket, engine="gemma", facts={"rank": "0"} | facts.to_text())
        (found,) = doctor.servers(server.socket.parent)
        others = [
            join_at(server.socket, engine=name, facts=known)
            for name, known in (("pages", {"chunk_tokens": "64"}), ("other", {"groups": "as of another release"}))
        ]
        _, pages, other = doctor.servers(server.socket.parent)
        for joined in (cache, *others):
            joined.close()
    finally:
        server.stop()
    assert (pages.state, pages.found) == ("ok", "engine pages, chunks of 64 tokens")
    assert other.state == "note" and "engine other, described in another way" in other.found and other.advice
    assert found.found == (
        "engine gemma, chunks of 256 tokens: layout NHD, format canonical; "
        "2 groups of layout NHD, format canonical, window of 512 tokens"
    )
    server.socket.touch()  # as a process leaves it that was killed
    (found,) = doctor.servers(server.socket.parent)
    assert found.state == "note" and "does not answer" in found.found and found.advice
