"""A router for OpenAI-compatible engines: each prompt goes where its first token is expected soonest.

It asks every host's kv-server (POST /route), which knows what is held there, how quickly each of its engines computes
and loads, and what they still have to compute; the verb `where` of `kv cluster` would say what lies where, and not what
that saves. With `http: {endpoints: [cluster]}` one server says which hosts are being drained (the verb `health`), and
these get prompts only if no other can. vLLM and SGLang turn text into tokens for it (POST /tokenize).

    python 10_route.py --listen 127.0.0.1:8080 --server http://host-a:9400=token-a --server http://host-b:9400=token-b \
        --engine engine-0=http://host-a:8000 --engine engine-1=http://host-b:8000

The name of an engine is what its host's server calls it: vLLM's engine_id (--kv-transfer-config), or sglang-PID-REPLICA
for SGLang, with the number of the process that started its schedulers; GET /status lists them. Without arguments it
shows what it does: two hosts with an engine each, both made up.
"""

import argparse
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Mapping
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from kv_core import ChainScheme, KeySpace, digests_of, tenant_tag
from kv_core.cost import Costs
from kv_core.coverage import ChunkShape
from kv_server import RemoteCache, launch

CHUNK_TOKENS = 256
"""What a server is asked for first. It says if the chunks of its engines have another number of tokens."""
AWAY_S = 10.0
"""For how long an engine that did not answer is asked after the others."""
HEALTH_EVERY_S = 5.0


def post(url: str, body: Any, token: str = "", timeout_s: float = 5) -> Any:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=timeout_s) as answer:
        return json.load(answer)


def token_in(path: str) -> str:
    return Path(path).read_text().strip()


class Router:
    """servers: the kv-servers' URLs and tokens. engines: their names and URLs."""

    def __init__(self, servers: Mapping[str, str], engines: Mapping[str, str]) -> None:
        self.servers, self.engines = servers, engines
        self._chunk_tokens = {server: [CHUNK_TOKENS] for server in servers}  # of the engines there
        self._turns = itertools.cycle(engines)
        self._away_until: dict[str, float] = {}  # of engines that did not answer
        self.leaving: set[str] = set()  # hosts that are being drained

    def tokens_of(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return prompt
        wanted = {name: body[name] for name in ("model", "prompt", "messages") if name in body}
        for engine in self.in_order():
            try:
                tokens = post(f"{self.engines[engine]}/tokenize", wanted)["tokens"]
            except HTTPError as refused:  # the engine that gets the request tells the client what is wrong with it
                refused.close()
                return []
            except OSError as error:
                self.is_away(engine, error)
            else:
                assert isinstance(tokens, list)
                return tokens
        return []

    def in_order(self, first: str = "") -> list[str]:
        """The engine `first` and then the others, those that did not answer lately at the end."""
        now = time.monotonic()
        return sorted(self.engines, key=lambda name: (name != first, self._away_until.get(name, now) > now))

    def is_away(self, engine: str, error: OSError) -> None:
        print(f"{engine} does not answer: {error}", flush=True)
        self._away_until[engine] = time.monotonic() + AWAY_S

    def choose(self, tokens: list[int], salt: str | None = None) -> str:
        """The name of the engine. One that nobody has measured yet gets its turn, or it would never be measured."""
        expected: dict[str, float] = {}
        leaving: set[str] = set()
        for server in self.servers:
            try:
                of_engines = self._expected(server, tokens, salt)
            except OSError as error:  # a server that is away: its engines take their turn
                print(f"{server} does not answer: {error}")
                continue
            expected |= of_engines
            if urlsplit(server).hostname in self.leaving:
                leaving |= of_engines.keys()
        now = time.monotonic()
        here = [name for name in self.engines if self._away_until.get(name, now) <= now] or list(self.engines)
        here = [name for name in here if name not in leaving] or here
        for engine in itertools.islice(self._turns, len(self.engines)):
            if engine in here and engine not in expected:
                return engine
        return min(here, key=expected.__getitem__)

    def _expected(self, server: str, tokens: list[int], salt: str | None) -> dict[str, float]:
        """Seconds until the first token of each of its engines that has been measured."""
        expected: dict[str, float] = {}
        sizes = list(self._chunk_tokens[server])
        for chunk_tokens in sizes:
            scheme = ChainScheme(chunk_tokens=chunk_tokens)
            digests = digests_of(scheme, tokens, root=scheme.root(salt=salt))
            if not digests:
                continue
            question = {"digests": [digest.hex() for digest in digests], "tokens": len(tokens)}
            answer = post(f"{server}/route", question | {"tenant": tenant_tag(salt).hex()}, self.servers[server])
            for one in answer["engines"] + answer["other_chunks"]:
                if one["chunk_tokens"] not in sizes:
                    sizes.append(one["chunk_tokens"])  # the loop comes to it
                if one["chunk_tokens"] == chunk_tokens and one.get("ttft_s") is not None:
                    expected[one["engine"]] = one["ttft_s"]
        self._chunk_tokens[server] = sizes
        return expected

    def look_around(self) -> None:
        """See which hosts are being drained: the first server that answers asks all."""
        for server, token in self.servers.items():
            try:
                health = post(f"{server}/endpoints/cluster/all/health", {}, token, timeout_s=60)
            except (OSError, HTTPException, ValueError):  # it is away, or does not serve the verbs
                continue
            up = [one for one in health["servers"] if one["done"]]
            drained = [one["server"] for one in up if any(cache["drain"] for cache in one["facts"]["caches"])]
            self.leaving = {address.rpartition(":")[0] for address in drained}
            return

    def watch(self) -> None:
        while True:
            self.look_around()
            time.sleep(HEALTH_EVERY_S)

    def listen(self, host: str, port: int) -> ThreadingHTTPServer:
        """A server that is listening; `serve_forever` is the caller's to call."""
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                body = json.loads(data)
                chosen = router.choose(router.tokens_of(body), body.get("cache_salt"))
                for engine in router.in_order(chosen):
                    forwarded = Request(router.engines[engine] + self.path, data, {"content-type": "application/json"})
                    try:
                        answer = urlopen(forwarded, timeout=600)
                        break
                    except HTTPError as refused:  # the engine's own answer, an error
                        answer = refused
                        break
                    except OSError as error:
                        router.is_away(engine, error)
                else:
                    self.send_error(502, "no engine answers")
                    return
                with answer:
                    self.send_response(answer.status)
                    self.send_header("content-type", answer.headers["content-type"])
                    self.send_header("x-engine", engine)
                    self.end_headers()
                    while part := answer.read1():  # as it comes: the answer may be a stream
                        self.wfile.write(part)

        return ThreadingHTTPServer((host, port), Handler)


def demonstrate() -> None:
    """Two hosts. A prompt is held on the first, so it goes there, until the engine there has much to compute."""
    with tempfile.TemporaryDirectory() as home:
        hosts = [
            launch(
                {
                    "host": {"capacity_bytes": "8MiB"},
                    "http": {"listen": "127.0.0.1:0", "token_file": f"{home}/token-{number}"},
                }
            )
            for number in range(2)
        ]
        servers = {host.url.rstrip("/"): token_in(f"{home}/token-{at}") for at, host in enumerate(hosts)}
        router = Router(servers, {"engine-0": "", "engine-1": ""})
        scheme = ChainScheme(chunk_tokens=512)
        space = KeySpace("made-up/model", "", "bfloat16", "made-up", 1, scheme.name)
        caches = [
            RemoteCache(host.socket, group_bytes=(256 << 10,), fingerprint="made-up", engine=f"engine-{number}")
            for number, host in enumerate(hosts)
        ]

        def look_up(number: int, tokens: list[int]) -> None:
            """What an engine does with a request: it computes 10,000 tokens a second, and loads a million."""
            keys = space.keys(digests_of(scheme, tokens))
            shape, costs = ChunkShape(scheme.chunk_tokens), Costs(0, (1e-4, 0.0), (0.001, 1e-6))
            caches[number].lookup(keys, "request", shape=shape, costs=costs)
            caches[number].end("request")

        document, other = [7] * 2048, [8] * 16384
        for number in range(2):
            look_up(number, [number] * 512)  # so that both are measured
        lease = caches[0].begin_store(space.keys(digests_of(scheme, document)), "request")
        caches[0].commit(lease)
        print(f"a document that host 0 holds goes to {router.choose(document)}")
        look_up(0, other)
        print(f"the same while that engine computes something long goes to {router.choose(document)}")
        for cache, host in zip(caches, hosts, strict=True):
            cache.close()
            host.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="default: 127.0.0.1:8080")
    parser.add_argument("--server", action="append", default=[], metavar="URL=TOKEN_FILE", help="of a host; repeat")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=URL", help="repeat")
    args = parser.parse_args()
    if not args.engine:
        demonstrate()
        return
    tokens = {url.rstrip("/"): token_in(path) for url, _, path in (one.rpartition("=") for one in args.server)}
    host, _, port = args.listen.rpartition(":")
    engines = {name: url.rstrip("/") for name, _, url in (one.partition("=") for one in args.engine)}
    router = Router(tokens, engines)
    threading.Thread(target=router.watch, daemon=True).start()
    router.listen(host, int(port)).serve_forever()


if __name__ == "__main__":
    main()
