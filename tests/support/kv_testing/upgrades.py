"""Servers that take over from each other at one socket, each a process of its own, and clients that load them."""

import json
import random
import re
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kv_core.service import LoadFailed
from kv_core.testing import key_chain
from kv_server import RemoteCache
from kv_server.peers.wire import PeerStream
from kv_server.process import environment, module_command
from kv_tiers.testing.tier_contract import content

from kv_testing.cache_servers import fill, join_at
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import joined, line

_CALL_S = 30.0

KILLED = """
import os, runpy, signal, sys
import kv_server.succession.channel as channel

method, count, when = sys.argv[1], int(sys.argv[2]), sys.argv[3]
del sys.argv[1:4]
real = getattr(channel.Channel, method)
calls = 0


def killed(self, *args, **options):
    global calls
    calls += 1
    if calls == count and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        return real(self, *args, **options)
    finally:
        if calls == count and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)


setattr(channel.Channel, method, killed)
runpy.run_module("kv_server", run_name="__main__", alter_sys=True)
"""
"""`kv-server` that kills itself before or after a call of its channel: the method, which call of it, and when."""

ENDS_SLOWLY = """
import gc, os, runpy, time
from kv_server.succession.channel import Channel

real = os._exit


def slowly(status):
    for one in gc.get_objects():
        if isinstance(one, Channel):
            one.close()
    time.sleep(1)
    real(status)


os._exit = slowly
runpy.run_module("kv_server", run_name="__main__", alter_sys=True)
"""
"""`kv-server` whose end of the channel is closed before its other descriptors are."""


class UpgradedServers:
    """One server after another at `home`'s socket. `close` ends the one that runs."""

    def __init__(self, home: Path, config: Mapping[str, object]) -> None:
        self.home, self.socket = home, home / "s"
        self.config = home / "server.json"
        self.config.write_text(json.dumps(config))
        self.log = home / "server.log"
        self.process = self.start()
        self.ready = line(self.process.stdout)
        """What the one that runs said when it served."""
        assert self.ready.startswith("READY")

    def start(self, *options: str, program: Sequence[str] = ()) -> "subprocess.Popen[str]":
        """program: run instead of `kv-server`, with these arguments before the server's."""
        command = module_command("kv_server")
        if program:
            command = [*command[: command.index("-c")], "-c", *program]
        command += ["--config", str(self.config), "--socket", str(self.socket), "--log-level", "info", *options]
        with self.log.open("a") as log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment())

    def upgrade(self, *options: str) -> None:
        """Another one takes over, and the old one ends."""
        old, self.process = self.process, self.start("--take-over", *options)
        self.ready = line(self.process.stdout)
        assert self.ready.startswith("READY"), self.log.read_text()
        assert old.wait(30) == 0
        assert old.stdout is not None
        old.stdout.close()

    def ports(self) -> tuple[int, int]:
        """Of HTTP and of peers, of the server that runs."""
        _, _, _, url, peers = self.ready.split()
        return int(url.strip("/").rpartition(":")[2]), int(peers.rpartition(":")[2])

    def pauses_ms(self) -> list[float]:
        """For how long clients waited in each upgrade."""
        return [float(found) for found in re.findall(r"have waited for ([\d.]+) ms", self.log.read_text())]

    def close(self) -> None:
        end(self.process)


def end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    process.wait(60)
    if process.stdout is not None:
        process.stdout.close()


class Callers:
    """Clients of HTTP and a peer that connect anew without pause until `stop`. answered: in order HTTP's and peers'.

    failures: whatever was not answered as it should be.
    """

    def __init__(self, http: int, peers: int) -> None:
        self.failures: list[object] = []
        self.answered = [0, 0]
        self._stopped = threading.Event()
        calls = (partial(self._request, http), partial(self._introduce, peers))
        self._threads = [
            threading.Thread(target=self._run, args=(number, call), daemon=True) for number, call in enumerate(calls)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        joined(*self._threads)

    def _run(self, number: int, call: Callable[[], None]) -> None:
        while not self._stopped.is_set():
            try:
                call()
                self.answered[number] += 1
            except Exception as error:  # noqa: BLE001  # carried to the test's own thread
                self.failures.append(error)

    def _request(self, port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_CALL_S) as answer:
            answer.read()

    def _introduce(self, port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), _CALL_S) as connection:
            PeerStream(connection).introduce(b"", time.monotonic() + _CALL_S)


class Loads:
    """Clients that store and read until `stop`, each on a thread with a connection of its own.

    failures: loads that failed, wrong bytes, releases that found their lease void. rounds: by client.
    """

    def __init__(self, socket: Path, clients: int = 2, prompts: int = 20) -> None:
        self.failures: list[object] = []
        self.rounds = [0] * clients
        self._prompts = prompts
        self._stopped = threading.Event()
        self.caches = [join_at(socket) for _ in range(clients)]
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        joined(*self._threads)
        for cache in self.caches:
            cache.close()

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        try:
            while not self._stopped.is_set():
                self._walk(self.caches[number], rng, f"{number}")
                self.rounds[number] += 1
        except BaseException as error:  # noqa: BLE001  # carried to the test's own thread
            self.failures.append(error)

    def _walk(self, cache: RemoteCache, rng: random.Random, holder: str) -> None:
        keys = key_chain(rng.randrange(1, 5), branch=f"prompt {rng.randrange(self._prompts)}")
        found = cache.lookup(keys, holder, wait_for_promotion=rng.random() < 0.5).chunks
        if found:
            lease = cache.load(keys[:found], holder, lasting=rng.random() < 0.3)
            if isinstance(lease, LoadFailed):
                self.failures.append(lease)
                return
            time.sleep(rng.random() * 0.002)  # a copy takes time
            for key, extent in zip(lease.keys, lease.extents, strict=True):
                if bytes(cache.pool.view[extent.offset : extent.offset + extent.nbytes]) != content(key, CHUNK_BYTES):
                    self.failures.append(f"wrong bytes of {key!r}")
            if not cache.release(lease):
                self.failures.append("a lease was void")
        if found < len(keys):
            writing = cache.begin_store(keys, holder)
            fill(cache, writing)
            cache.commit(writing)
        cache.end(holder)
