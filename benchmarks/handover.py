"""Disaggregated prefill over HTTP: the time to the first token through us, through vLLM's NixlConnector, and alone.

Two vLLM servers, one for prompts and one for answers, and the flow of vLLM's proxies, in turn with our connector at one
kv-server, with ours at two servers of which one reads from the other over loopback, and with NixlConnector where `nixl`
is installed beside vLLM (scripts/setup.sh nixl). And one server alone, which computes and decodes. Prompts are new each
time, so nothing is found but what was handed over.

`exposed` is the time between the prefill server's answer and the first token, less what the same decode server takes
for the same prompt when its blocks still hold it: what a hand-over adds. Its limit is the last chunk at the speed of a
copy of memory (over loopback: of a bare socket) and 10 ms. All engines compute 2,048 tokens in a step, as
vLLM does by itself. With two servers the prefill engine computes `--step-tokens`: the decode engine's server follows
the other, and chunks become visible at a step's end, so that only the last step's are still to come. Every engine has
its worker in the scheduler's process, as vLLM has it by itself on one GPU, and ours stores layers as they are computed
and loads chunks in the step that uses them, as docs/disaggregated.md advises.

    python benchmarks/handover.py [--json] [--model DIRECTORY] [--tokens 2048 6000] [--prompts 5] [--quick]
        [--step-tokens 256] [--ways alone ours …]
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]
sys.path.append(__file__.rpartition("/")[0])

import contextlib
import importlib.util
import json
import os
import random
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kv_server import launch
from kv_server.process import ServerProcess
from kv_testing.servers import free_port

from benchmarks._engines import threads_environ
from benchmarks._report import Row, parser, report
from benchmarks.serve import ONE_PROCESS, process, wait_until_ready

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
COMPUTE = {"kv_tiers": {"use": "never"}}
"""With what the engine's own blocks hold."""
CHUNK_TOKENS, STEP_TOKENS, BLOCK_TOKENS = 256, 2048, 128
WARM_UP = 2
STREAMED = 24
SLACK_S = 0.010
MAX_OF_NIXL = 0.9
WORDS = range(3, 2000)
WAYS = ["alone", "ours", "ours, two servers", "nixl"]


def write_model(directory: Path) -> str:
    """A Llama that takes long enough to compute, with a tokenizer, without which vLLM's server does not start."""
    from kv_testing.tiny import TinyLlama
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    TinyLlama(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate=1024).write(directory)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(2048)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(directory)
    return str(directory)


def transfer_of(way: str, role: str, server: ServerProcess | None) -> dict[str, Any]:
    if way == "nixl":
        return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    assert server is not None
    return {
        "kv_connector": "KVTiersConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "chunk_tokens": CHUNK_TOKENS,
            "use": "always",
            "load": "layerwise",
            "store": "layerwise",
            "server": {"socket": str(server.socket)},
        },
    }


@contextmanager
def engines(way: str, model: str, home: Path, max_tokens: int, step_tokens: int) -> Iterator[list[str]]:
    """The URLs of the prefill and the decode server, which are one where it is alone."""
    with ExitStack() as ending:
        servers: list[ServerProcess | None] = [None, None]
        if way.startswith("ours"):
            config: dict[str, Any] = {
                "host": {"capacity_bytes": "2GiB"},
                "peers": {"listen": "127.0.0.1:0", "unprotected": True},
            }
            servers[0] = servers[1] = first = launch(config, socket=home / "1" / "s")
            ending.callback(first.stop)
            if way == "ours, two servers":
                tiers = [{"type": "peers", "hosts": [first.peers], "threads": 2, "follow": True, "unprotected": True}]
                servers[1] = second = launch({**config, "tiers": tiers}, socket=home / "2" / "s")
                ending.callback(second.stop)
        urls = []
        for number, role in enumerate(["kv_both"] if way == "alone" else ["kv_producer", "kv_consumer"]):
            port, log = free_port(), home / f"{number}.log"
            words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
            words += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
            tokens = step_tokens if way == "ours, two servers" and role == "kv_producer" else STEP_TOKENS
            words += ["--max-model-len", str(max_tokens), "--max-num-batched-tokens", str(tokens)]
            words += ["--distributed-executor-backend", ONE_PROCESS, "--block-size", str(BLOCK_TOKENS)]
            if way != "alone":
                words += ["--kv-transfer-config", json.dumps(transfer_of(way, role, servers[number]))]
            environ = os.environ | threads_environ(1) | {"XDG_RUNTIME_DIR": str(home), "HF_HUB_OFFLINE": "1"}
            environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            environ |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            server = ending.enter_context(process(words, environ, log))
            urls.append(f"http://127.0.0.1:{port}")
            wait_until_ready(server, urls[-1], log)
        yield urls * 2 if way == "alone" else urls


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=600)


def first_token_s(url: str, body: dict[str, Any]) -> float:
    began_s = time.perf_counter()
    with post(url, body | {"stream": True, "max_tokens": STREAMED}) as answer:
        line = b""
        while not line.startswith(b"data:"):
            line = answer.readline()
            assert line, "the stream ended before its first token"
        first_s = time.perf_counter() - began_s
        answer.read()
    return first_s


def measured(
    way: str, model: str, home: Path, lengths: list[int], prompts: int, step_tokens: int
) -> dict[int, tuple[float, float]]:
    """By length of prompt the medians of the time to the first token and of what is exposed of the hand-over."""
    found = {}
    draw = random.Random(way)
    with engines(way, model, home, max(lengths) + 64, step_tokens) as (prefill, decode):
        body: dict[str, Any] = {"model": model, "temperature": 0, "ignore_eos": True}
        for length in lengths:
            first, exposed = [], []
            for number in range(WARM_UP + prompts):
                words = [draw.choice(WORDS) for _ in range(length)]
                prompt = body | {"prompt": words}
                began_s = time.perf_counter()
                params = {}
                if way != "alone":
                    with post(prefill, prompt | {"max_tokens": 1, "kv_transfer_params": PREFILL}) as answer:
                        params = {"kv_transfer_params": json.load(answer)["kv_transfer_params"]}
                    assert params["kv_transfer_params"], f"{way}: nothing was handed over"
                computed_s = time.perf_counter()
                waited_s = first_token_s(decode, prompt | params)
                whole = length // BLOCK_TOKENS * BLOCK_TOKENS  # and one token, as of the other prompt, is computed
                held = body | {"prompt": [*words[:whole], draw.choice(WORDS)], "kv_transfer_params": COMPUTE}
                held_s = first_token_s(decode, held)
                if number >= WARM_UP:
                    first.append(computed_s - began_s + waited_s)
                    exposed.append(waited_s - held_s)
            found[length] = statistics.median(first), statistics.median(exposed)
    return found


def memory_s(nbytes: int) -> float:
    """To copy so many bytes."""
    source, target = bytearray(os.urandom(nbytes)), memoryview(bytearray(nbytes))
    samples = []
    for _ in range(9):
        began_s = time.perf_counter()
        target[:] = source
        samples.append(time.perf_counter() - began_s)
    return statistics.median(samples)


def loopback_s(nbytes: int) -> float:
    """To bring so many bytes over a bare socket."""
    samples = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(9):
            sender = socket.create_connection(listener.getsockname())
            taker, _ = listener.accept()
            with sender, taker:
                thread = threading.Thread(target=sender.sendall, args=(bytes(nbytes),))
                room = memoryview(bytearray(nbytes))
                began_s = time.perf_counter()
                thread.start()
                at = 0
                while at < nbytes:
                    at += taker.recv_into(room[at:])
                samples.append(time.perf_counter() - began_s)
                thread.join()
    return statistics.median(samples)


def chunk_bytes(model: str) -> int:
    config = json.loads((Path(model) / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * 4 * config["num_hidden_layers"] * heads * head_dim * CHUNK_TOKENS)


def main() -> int:
    given = parser(__doc__.splitlines()[0])
    given.add_argument("--model", default="", help="a directory; a small Llama with random weights if not said")
    given.add_argument("--tokens", type=int, nargs="+", default=[2048, 6000], help="lengths of prompts")
    given.add_argument("--prompts", type=int, default=5, help="of each length")
    given.add_argument(
        "--step-tokens", type=int, default=CHUNK_TOKENS, help="of the prefill engine's steps with two servers"
    )
    given.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="of handing over")
    given.add_argument("--quick", action="store_true", help="one prompt of 600 tokens, to see that it runs")
    args = given.parse_args()
    if args.quick:
        args.tokens, args.prompts = [600], 1
    ways = list(args.ways)
    if "nixl" in ways and importlib.util.find_spec("nixl") is None:
        ways.remove("nixl")
        print("NixlConnector is left out: nixl is not installed beside vLLM (scripts/setup.sh nixl)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kv-handover-") as directory:
        home = Path(directory)
        model = args.model or write_model(home / "model")
        found: dict[str, dict[int, tuple[float, float]]] = {}
        for number, way in enumerate(ways):
            (home / str(number)).mkdir(mode=0o700)
            try:
                found[way] = measured(way, model, home / str(number), args.tokens, args.prompts, args.step_tokens)
                for length, (first_s, exposed_s) in found[way].items():  # said at once: the next way takes minutes
                    print(
                        f"{length} tokens, {way}: first token after {first_s:.3f} s, {exposed_s * 1e3:.1f} ms exposed",
                        file=sys.stderr,
                    )
            except (SystemExit, OSError) as error:
                if way != "nixl":
                    raise
                print(f"NixlConnector is left out: {error}", file=sys.stderr)
        nbytes = chunk_bytes(model)
        link_s = {"ours": memory_s(nbytes), "ours, two servers": loopback_s(nbytes)}
        link_s = {way: seconds for way, seconds in link_s.items() if way in found}
    return report(list(rows(found, args.tokens, link_s)), args.json)


def rows(
    found: dict[str, dict[int, tuple[float, float]]], lengths: list[int], link_s: dict[str, float]
) -> Iterator[Row]:
    for length in lengths:
        for way, chunk_s in link_s.items():
            first_s, exposed_s = found[way][length]
            limit_s = chunk_s + SLACK_S
            name = f"{length} tokens, {way}"
            yield Row(f"{name}: exposed", exposed_s * 1e3, "ms", limit_s * 1e3, exposed_s / limit_s, 1.0, at_most=True)
            if "alone" in found:
                alone_s = found["alone"][length][0]
                yield Row(f"{name}: first token, of alone", first_s, "s", alone_s, first_s / alone_s, 1.1, at_most=True)
            if "nixl" in found:
                nixl_s, nixl_exposed_s = found["nixl"][length]
                ratio = first_s / nixl_s
                yield Row(f"{name}: first token, of nixl", first_s, "s", nixl_s, ratio, MAX_OF_NIXL, at_most=True)
                ratio, limit = exposed_s / nixl_exposed_s, nixl_exposed_s * 1e3
                yield Row(f"{name}: exposed, of nixl's", exposed_s * 1e3, "ms", limit, ratio, 1.0, at_most=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main())
