"""The OpenAPI document, the docs and the command agree with what is served."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from kv_server import RemoteCache, launch
from kv_server.http import relay
from kv_server.http.app import make_app
from kv_server.http.relay import Relay
from kv_server.http.thread import Guard
from kv_testing.http import SLOT_BYTES, TOKEN, Served, store
from kv_testing.service_contract import CHUNK_BYTES
from kv_tiers.config import HttpConfig
from schemathesis import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import ignored_auth
from starlette.types import ASGIApp


def make_asgi(served: Served) -> ASGIApp:
    archive = Path(served.home.name) / "archive"
    archive.mkdir(exist_ok=True)
    app = make_app(
        Relay(served.server),
        token=TOKEN,
        archive_directory=str(archive),
    )
    return Guard(app, frozenset({"localhost", "testserver"}))


@pytest.fixture(scope="module")
def described() -> Iterator[Served]:
    """A server with a little in it, whose document is tried. On a busy machine it may be late, and 503 is an error to
    schemathesis."""
    served = Served()
    cache = served.join()
    store(cache, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "ANSWER_S", 60.0)
        yield served
    cache.close()
    served.close()


def check_against_document(schema: BaseSchema, token: str, mode: GenerationMode, examples: int) -> int:
    """Ask for every operation in all ways that the document says are right, or wrong; how many operations those are."""
    operations = [found.ok() for found in schema.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:  # nothing can be wrong about a request for /healthz
        operations = [operation for operation in operations if operation.body]
    for operation in operations:

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            # That a token is needed is tried above, and by that check in a way that keeps our header.
            headers = {"authorization": f"Bearer {token}", "host": "localhost"}
            case.call_and_validate(headers=headers, excluded_checks=[ignored_auth])

        ask()
    return len(operations)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_as_the_document_says(described: Served, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_asgi(described))
    assert check_against_document(schema, TOKEN, mode, 4) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_of_a_real_server_is_as_the_document_says(tmp_path: Path, mode: GenerationMode) -> None:
    http = {"listen": "127.0.0.1:0", "token_file": str(tmp_path / "token"), "archive_directory": str(tmp_path)}
    server = launch({"host": {"capacity_bytes": 16 * SLOT_BYTES}, "http": http})
    cache = RemoteCache(server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="f")
    store(cache, 3)
    try:
        schema = schemathesis.openapi.from_url(f"{server.url}openapi.json")
        assert check_against_document(schema, (tmp_path / "token").read_text().strip(), mode, 25) >= 6
        assert server.is_running()
    finally:
        cache.close()
        server.stop()


DOCS = Path(__file__).parents[4] / "docs" / "http.md"


def test_the_docs_tell_of_every_path_and_every_setting(described: Served) -> None:
    text = DOCS.read_text()
    for path, methods in described.get("/openapi.json").json()["paths"].items():
        assert path in text, path
        for method in methods:
            assert method.upper() in text
    for setting in HttpConfig.__struct_fields__:
        assert setting in text


def run(*arguments: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    code = f"import sys\n{before}\nfrom kv_server.cli import main\nsys.exit(main({list(arguments)!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    for missing in ("starlette", "uvicorn"):
        done = run(
            "--socket", str(tmp_path / "s"), "--capacity", "1MiB", "--http", "127.0.0.1:0",
            before=f"sys.modules[{missing!r}] = None",
        )  # fmt: skip
        assert done.returncode == 2
        assert "pip install 'kv-server[http]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_server_without_http_does_not_import_its_packages() -> None:
    code = (
        "import sys, kv_server.cli\n"
        "from kv_server.config import read_config\n"
        "from kv_server.http.start import open_http\n"
        "assert open_http(read_config({'host': {'capacity_bytes': 4096}}).http) is None\n"
        "print(sorted({'starlette', 'uvicorn', 'asyncio', 'prometheus_client', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_tells_where_it_serves_http(tmp_path: Path) -> None:
    server = launch({"host": {"capacity_bytes": 16 * SLOT_BYTES}, "http": {"listen": "127.0.0.1:0"}})
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", server.url)
    assert httpx.get(f"{server.url}status").json()["pid"] == server.pid
    server.stop()
    plain = launch({"host": {"capacity_bytes": 16 * SLOT_BYTES}})
    assert plain.url == ""
    plain.stop()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"http": {"listen": "0.0.0.0:0"}}, "token_file"),
        ({"http": {"lisen": "127.0.0.1:0"}}, "did you mean 'http.listen'"),
        ({"http": {"listen": "127.0.0.1:0", "token_file": "/nowhere/token"}}, "cannot be made"),
        ({"tiers": [{"type": "dsik"}]}, "did you mean 'disk'"),
        ({"tiers": [{"type": "redis", "ur": "redis://h"}]}, "did you mean 'url'"),
    ],
)
def test_wrong_settings_end_the_command_with_status_2(tmp_path: Path, wrong: dict[str, object], says: str) -> None:
    settings = tmp_path / "kv.json"
    settings.write_text(json.dumps({"server": {"socket": str(tmp_path / "s")}, **wrong}))
    done = run("--config", str(settings))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["kv.json"]
