"""Four real servers for tests, each on a loopback address of its own, with certificates and a directory in Valkey."""

import contextlib
import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from kv_core.keys import ChunkKey, KeySpace, tenant_tag
from kv_core.testing import key_chain
from kv_core.tools.cli import main
from kv_remote.authority import Authority
from kv_server import ServerProcess, launch

from kv_testing.cache_servers import join_at, read, settings_for, store
from kv_testing.redis_servers import running
from kv_testing.servers import free_port
from kv_testing.wait import joined, until

TOKEN = "a-token-for-these-tests"  # opens nothing
HOSTS = [f"127.0.0.{number}" for number in range(11, 15)]
SLOTS = 256


def prompt(name: str, chunks: int, tenant: str = "acme") -> list[ChunkKey]:
    digests = [key.digest for key in key_chain(chunks, branch=name)]
    return list(KeySpace("m", "", "", "", 1, "c").keys(digests, tenant=tenant_tag(f"salt of {tenant}")))


class FourServers:
    """The servers and a client of each; `run` runs `kv cluster` with the settings of the first."""

    def __init__(self, home: Path) -> None:
        self.home, self.port, self.peers_port = home, free_port(*HOSTS), free_port(*HOSTS)
        self.token_file = home / "token"
        self.token_file.touch(0o600)
        self.token_file.write_text(TOKEN)
        authority = Authority(home / "ca", create=True)
        self.tls = [self._files(authority.issue([host], 1)) for host in HOSTS]
        self.url = f"redis://127.0.0.1:{running('directory').port}"
        with ThreadPoolExecutor(len(HOSTS)) as together:
            self.servers = list(together.map(self.start, range(len(HOSTS))))
        self.caches = [join_at(server.socket, timeout_s=30.0) for server in self.servers]
        self.config = self.write_config("kv.json", self.settings(0))
        until(lambda: len(self.run("health")[1]["servers"]) == len(HOSTS), 20)

    @staticmethod
    def _files(directory: Path) -> dict[str, str]:
        return {f"tls_{kind}_file": str(directory / f"{kind}.pem") for kind in ("ca", "cert", "key")}

    def settings(self, number: int) -> dict[str, Any]:
        """The second and fourth have a disk."""
        (self.home / str(number)).mkdir(exist_ok=True, mode=0o700)
        config = settings_for(self.home / str(number), SLOTS, disk=number % 2 == 1, disk_chunks=4000)
        directory = {
            "url": self.url,
            "interval_s": 0.02,
            "lease_s": 2.0,
            "address": f"{HOSTS[number]}:{self.peers_port}",
        }
        peers = {"type": "peers", "directory": directory, "connect_timeout_s": 5.0, "answer_timeout_s": 5.0}
        return {
            **config,
            "tiers": [*config.get("tiers", []), {**peers, **self.tls[number]}],  # type: ignore[misc]
            "tenants": [{"name": name, "salt": f"salt of {name}"} for name in ("acme", "globex")],
            "peers": {"listen": f"{HOSTS[number]}:{self.peers_port}", **self.tls[number]},
            "http": {
                "listen": f"{HOSTS[number]}:{self.port}",
                "token_file": str(self.token_file),
                "endpoints": ["cluster"],
            },
        }

    def start(self, number: int) -> ServerProcess:
        settings = self.settings(number)
        return launch(settings, socket=self.home / str(number) / "s")

    def write_config(self, name: str, settings: dict[str, Any]) -> Path:
        path = self.home / name
        path.touch(0o600)
        path.write_text(json.dumps(settings))
        return path

    def name(self, number: int) -> str:
        return f"{HOSTS[number]}:{self.peers_port}"

    def keys_file(self, keys: list[ChunkKey]) -> str:
        path = self.home / f"{keys[-1].digest.hex()}.keys"
        path.write_text(" ".join(key.hex() for key in keys))
        return str(path)

    def arguments(self, *words: str, keys: list[ChunkKey] | None = None, config: Path | None = None) -> list[str]:
        named = [] if keys is None else ["--keys", self.keys_file(keys)]
        return ["cluster", *words, *named, "--config", str(config or self.config), "--json"]

    def run(self, *words: str, keys: list[ChunkKey] | None = None, config: Path | None = None) -> tuple[int, Any]:
        """The exit status, and what it printed as JSON (or None)."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(self.arguments(*words, keys=keys, config=config))
        assert TOKEN not in out.getvalue() + err.getvalue()
        self.said = err.getvalue()
        return status, json.loads(out.getvalue()) if out.getvalue() else None

    def texts(self, *words: str, keys: list[ChunkKey] | None = None) -> dict[int, str]:
        """By server, what a verb said that all did."""
        status, answer = self.run(*words, keys=keys)
        assert status == 0, (answer, self.said)
        return self.by_number(answer)

    def by_number(self, answer: Any) -> dict[int, str]:
        numbers = {self.name(number): number for number in range(len(HOSTS))}
        return {numbers[one["server"]]: one["text"] for one in answer["servers"]}

    def held(self, keys: list[ChunkKey], *, of: int = len(HOSTS)) -> list[int]:
        """How many chunks each holds, as `where` says."""
        _, answer = self.run("where", keys=keys)
        return [one.get("chunks", -1) for one in answer["servers"]][:of]

    def post(self, number: int, path: str, body: object = None) -> None:
        headers = {"authorization": f"Bearer {TOKEN}"}
        httpx.post(f"{self.servers[number].url}{path}", json=body, headers=headers, timeout=30).raise_for_status()

    def ask_over_http(self, number: int, verb: str, body: object, token: str = TOKEN) -> httpx.Response:
        """Have this server carry out a verb on all."""
        url = f"{self.servers[number].url}endpoints/cluster/all/{verb}"
        return httpx.post(url, json=body, headers={"authorization": f"Bearer {token}"}, timeout=60)

    def is_draining(self, number: int) -> bool:
        drains = httpx.get(f"{self.servers[number].url}drain", timeout=30).json()["caches"]
        return any(drain["phase"] == "draining" for drain in drains)

    def pins(self, number: int) -> list[str]:
        found = httpx.get(f"{self.servers[number].url}prefixes", timeout=30).json()["pins"]
        return [pin["name"] for pin in found]

    @contextlib.contextmanager
    def stopped(self, number: int) -> Iterator[None]:
        """This server's process does nothing meanwhile."""
        os.kill(self.servers[number].pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.servers[number].pid, signal.SIGCONT)

    def evict(self, number: int, keys: list[ChunkKey]) -> None:
        """From the pool, so that only the disk has them."""
        action = {"action_id": "a", "action_type": "kv.demote", "action_version": "1.0", "payload": {}}
        hints = {"protocol_version": "1.0", "message_id": "m", "actions": [action]}
        until(lambda: self.run("where", keys=keys)[1]["servers"][number]["chunks"] == len(keys))
        self.post(number, "hints", {"tenant": "acme", "keys": [key.hex() for key in keys], "hints": hints})
        for flood in range(10):
            store(self.caches[number], prompt(f"flood {flood}", SLOTS // 8, "flood"), "flood")

    def close(self) -> None:
        for cache in self.caches:
            cache.close()
        with ThreadPoolExecutor(len(HOSTS)) as together:
            list(together.map(ServerProcess.stop, self.servers))


class Load:
    """Engines of all servers, which store, look up and load prompts of their own meanwhile, and compare every byte."""

    def __init__(self, fleet: FourServers) -> None:
        self._ended = threading.Event()
        self.rounds = [0] * len(HOSTS)
        self.failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number, server)) for number, server in enumerate(fleet.servers)
        ]
        for thread in self._threads:
            thread.start()
        until(lambda: min(self.rounds) > 0)

    def _run(self, number: int, server: ServerProcess) -> None:
        try:
            with contextlib.closing(join_at(server.socket, timeout_s=30.0)) as cache:
                while not self._ended.wait(0.02):
                    keys = prompt(f"load {number} {self.rounds[number] % 8}", 8, "globex")
                    store(cache, keys, "load")
                    cache.lookup(keys, "load")
                    read(cache, keys, "load")
                    cache.end("load")
                    self.rounds[number] += 1
        except BaseException as error:  # noqa: BLE001  # the test raises it
            self.failures.append(error)

    def close(self) -> None:
        self._ended.set()
        joined(*self._threads)
        assert not self.failures, self.failures
