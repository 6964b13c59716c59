"""Engines as users run them: HTTP servers with a trained model, driven by the engines' own clients.

Workloads over pages of this repository, one request at a time; prompts come back after the engine's own memory, of
5,120 tokens, has been filled by others:

    document    questions about documents, in turn
    multi-turn  conversations that grow, in turn
    agent       agents with the same long instructions and tools, each with observations of its own
    unique      documents that are asked about once, so that a cache can only cost
    restart     of what keeps prompts on a disk, and alone: the documents' first questions, to a server started anew

    alone       the engine with its own prefix cache, the limit of every row
    own host    the engine's own: vLLM's offloading to the CPU, with copies by memcpy; SGLang's HiCache in host memory
    own file    the engine's own with files below: vLLM's `fs` tier, and less memory than the prompts; HiCache's backend
    in process  ours, the cache in the engine's process
    private     ours, the cache in a private server, as vLLM has it by itself on a CPU
    shared      ours, the cache in `kv-server`
    disk        ours, a pool of less than the prompts with a disk below

Each client is the engine's: vLLM's `bench serve`, SGLang's `bench_serving`. One engine is alive at a time, with as many
threads as any other, and every configuration is started once a round, every other round in the reverse order, so that
the machine's drift meets all alike.

Figures are medians over the rounds, with the smallest and the largest where they are seconds. `first token` is the mean
of all prompts; `returning` is that of those whose beginning was asked before, `new` that of the others.

    make bench-serve [ENGINE=sglang] [PLOT=serve.svg] [QUICK=1] [JSON=1]
    python benchmarks/serve.py --model DIRECTORY --engine vllm sglang --starts 3
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path.append(str(Path(__file__).parent))

from _child import progress
from _engines import ENVIRON, own_offloading, threads_environ
from _report import parser

HOME = Path(__file__).parents[1]
DEVICE_TOKENS, BLOCK_TOKENS, PAGE_TOKENS = 5120, 128, 64
BEGINNING = 2000  # characters of a prompt; those of other documents, conversations and tasks differ in them
NEW_TOKENS = 8
READY_S = 240
POOL_BYTES, SMALL_POOL_BYTES = 1 << 30, 192 << 20  # a token takes 45 KiB
HICACHE_GB = "1"  # SGLang's own host memory, the same above every storage: by default it would be as large as our pool
SPLIT = (("returning", 6), ("new", 5))  # columns and their widths
RESTARTED = ("alone", "own file", "disk")
WAYS = {
    "vllm": ["alone", "own host", "own file", "in process", "private", "shared", "disk"],
    "sglang": ["alone", "own host", "own file", "in process", "shared", "disk"],
}
WORKS = ("document", "multi-turn", "agent", "unique", "restart")
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def workloads(share: float) -> dict[str, list[str]]:
    """The prompts of each, in order. share: of their full size."""
    text = "\n".join(page.read_text() for page in sorted((HOME / "docs").rglob("*.md")))
    documents = [text[number * 5000 :][:5000] for number in range(max(2, round(6 * share)))]
    document = [f"{page}\n\nQuestion {turn}: what is said about it?" for turn in range(3) for page in documents]
    conversations = [""] * max(2, round(6 * share))
    multi_turn = []
    for turn in range(max(2, round(4 * share))):
        for number in range(len(conversations)):
            said = text[40_000 + (number * 7 + turn) * 1000 :][: 1000 if turn else 2500]
            conversations[number] += f"User {number}: {said}\nAssistant: "
            multi_turn.append(conversations[number])
            conversations[number] += f"That is item {turn}.\n"
    agents = [text[90_000:][:3500]] * max(2, round(5 * share))
    agent = []
    for step in range(max(2, round(4 * share))):
        for number in range(len(agents)):
            agents[number] += f"\nAgent {number} reads: {text[100_000 + (number * 11 + step) * 1400 :][:1400]}"
            agent.append(agents[number])
    unique = [text[200_000 + number * 5000 :][:5000] for number in range(max(2, round(12 * share)))]
    made = {"document": document, "multi-turn": multi_turn, "agent": agent, "unique": unique}
    return made | {"restart": document[: len(documents)]}


def returning(prompts: Sequence[str], work: str) -> list[bool]:
    """Whether the beginning of each was asked before. All were, before a restart."""
    begun: set[str] = set()
    before = []
    for prompt in prompts:
        before.append(work == "restart" or prompt[:BEGINNING] in begun)
        begun.add(prompt[:BEGINNING])
    return before


# The client, in the engine's environment.


def first_tokens(seconds: Sequence[float], prompts: Path) -> dict[str, float]:
    """Mean times of the prompts that return and of those that do not, in milliseconds, where there are such."""
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    texts = [line["prompt"] if "prompt" in line else line["messages"][0]["content"] for line in lines]
    flags = returning(texts, prompts.stem)
    means = {}
    for name, flag in (("returning", True), ("new", False)):
        if of := [1000 * each for each, returns in zip(seconds, flags, strict=True) if returns is flag]:
            means[name] = statistics.mean(of)
    return means


def vllm_client(url: str, model: str, prompts: Path, out: Path) -> dict[str, float]:
    from vllm.benchmarks import serve

    given = argparse.ArgumentParser()
    serve.add_cli_args(given)
    words = ["--base-url", url, "--model", model, "--dataset-name", "custom", "--dataset-path", str(prompts)]
    words += ["--disable-shuffle", "--skip-chat-template", "--custom-output-len", str(NEW_TOKENS), "--ignore-eos"]
    words += [
        "--num-prompts",
        str(len(prompts.read_text().splitlines())),
        "--max-concurrency",
        "1",
        "--num-warmups",
        "0",
    ]
    before = cached_tokens(url)
    words += ["--save-detailed"]  # keeps the times of each request in what is returned; nothing is saved
    found = serve.main(given.parse_args([*words, "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl"]))
    after = cached_tokens(url)
    return {
        "first token, mean": found["mean_ttft_ms"],
        "first token, p99": found["p99_ttft_ms"],
        "between tokens": found["median_itl_ms"],
        "tokens a second": found["total_token_throughput"],
        "found": (after[0] - before[0]) / (after[1] - before[1]),
        "failed": len(prompts.read_text().splitlines()) - found["completed"],
    } | first_tokens(found["ttfts"], prompts)


def cached_tokens(url: str) -> tuple[float, float]:
    """Of vLLM: prompt tokens that it had itself or was given, and all."""
    values: dict[str, float] = {}
    for line in urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.partition("{")[0], *line.rpartition(" ")[1:]
            values[name] = values.get(name, 0.0) + float(value)
    own, given = values["vllm:prefix_cache_hits_total"], values.get("vllm:external_prefix_cache_hits_total", 0.0)
    return own + given, values["vllm:prefix_cache_queries_total"]


def sglang_client(url: str, model: str, prompts: Path, out: Path) -> dict[str, float]:
    from sglang.benchmark import serving

    words = ["--backend", "sglang-oai-chat", "--base-url", url, "--model", model, "--dataset-name", "openai"]
    words += ["--dataset-path", str(prompts), "--num-prompts", "0", "--sharegpt-output-len", str(NEW_TOKENS)]
    words += ["--max-concurrency", "1", "--warmup-requests", "0", "--cache-report", "--disable-tqdm"]
    words += ["--output-details"]
    sys.argv = ["bench_serving", *words, "--output-file", str(out)]
    serving.cli_main()
    found = json.loads(out.read_text().splitlines()[-1])
    return {
        "first token, mean": found["mean_ttft_ms"],
        "first token, p99": found["p99_ttft_ms"],
        "between tokens": found["median_itl_ms"],
        "tokens a second": found["total_throughput"],
        "found": found["cache_report"]["cache_hit_rate_pct"] / 100,
        "failed": len(prompts.read_text().splitlines()) - found["completed"],
    } | first_tokens(found["ttfts"], prompts)


def client(engine: str, url: str, model: str, directory: str, *works: str) -> None:
    """Print a line of JSON for each of these workloads. SGLang's client takes what is said in a chat, vLLM's a text."""
    ask = {"vllm": vllm_client, "sglang": sglang_client}[engine]
    for prompts in (Path(directory, f"{work}.jsonl") for work in sorted(works)):
        found = ask(url, model, prompts, prompts.with_suffix(f".{time.time_ns()}.out"))
        print("FOUND " + json.dumps([prompts.stem, found]), flush=True)


# The servers.


def settings(way: str, home: Path) -> dict[str, Any]:
    """Ours."""
    if way == "shared":
        return {"server": {"socket": str(home / "kv.sock")}}
    if way == "disk":
        disk = {"type": "disk", "directory": str(home / "disk"), "capacity_bytes": "4GiB"}
        return {"host": {"capacity_bytes": SMALL_POOL_BYTES}, "tiers": [disk]}
    return {"host": {"capacity_bytes": POOL_BYTES}}


def vllm_words(way: str, model: str, home: Path) -> list[str]:
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager", "--max-model-len", "4096"]
    words += ["--num-gpu-blocks-override", str(DEVICE_TOKENS // BLOCK_TOKENS), "--enable-prefix-caching"]
    if way in ("in process", "disk"):
        words += ["--distributed-executor-backend", ONE_PROCESS]
    if way.startswith("own"):
        below = str(home / "own") if way == "own file" else ""
        extra = own_offloading(SMALL_POOL_BYTES if below else POOL_BYTES, below)
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        words += ["--kv-transfer-config", json.dumps(transfer)]
    elif way != "alone":
        transfer = {
            "kv_connector": "KVTiersConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings(way, home),
        }
        words += ["--kv-transfer-config", json.dumps(transfer)]
    return words


def sglang_words(way: str, model: str, home: Path) -> list[str]:
    words = [
        "-m",
        "sglang.launch_server",
        "--model-path",
        model,
        "--device",
        "cpu",
        "--attention-backend",
        "torch_native",
    ]
    words += [
        "--sampling-backend",
        "pytorch",
        "--disable-cuda-graph",
        "--mem-fraction-static",
        "0.5",
        "--context-length",
        "4096",
    ]
    words += ["--max-total-tokens", str(DEVICE_TOKENS), "--chunked-prefill-size", "4096", "--enable-cache-report"]
    if way == "alone" or way.startswith("own"):
        words += ["--page-size", str(PAGE_TOKENS)]
    if way.startswith("own"):
        words += ["--enable-hierarchical-cache", "--hicache-size", HICACHE_GB]
    if way == "own file":
        words += ["--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"]
    elif way not in ("alone", "own host"):
        file = home / "kv.json"
        file.write_text(json.dumps(settings(way, home)))
        flags = [
            python("sglang"),
            "-m",
            "kv_sglang",
            "flags",
            "--config-file",
            str(file),
            "--page-size",
            str(PAGE_TOKENS),
            "--hicache-size",
            HICACHE_GB,
        ]
        words += shlex.split(subprocess.run(flags, check=True, capture_output=True, text=True).stdout)
        words += ["--hicache-storage-prefetch-policy", "wait_complete"]
    return words


def python(engine: str) -> str:
    return str(HOME / ".venvs" / engine / "bin" / "python")


@contextmanager
def process(command: Sequence[str], environ: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """With all that it starts in its group; nothing of it is left."""
    there_before = set(shared_memory())
    with log.open("wb") as stream:
        running = subprocess.Popen(command, stdout=stream, stderr=stream, env=environ, start_new_session=True)
    try:
        yield running
    finally:
        for number, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(patience_s)
        for left in set(shared_memory()) - there_before:
            with contextlib.suppress(OSError):
                left.unlink()


def shared_memory() -> Iterator[Path]:
    """What engines leave when they end by a signal: the pools of their own offloading, of a gigabyte each."""
    for pattern in ("vllm_offload_*", "psm_*"):
        yield from Path("/dev/shm").glob(pattern)


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(READY_S * 2):
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise SystemExit(f"the server does not answer; the end of its log:\n{log.read_text()[-3000:]}")


def one_start(engine: str, way: str, model: str, prompts: Path, threads: int) -> dict[str, dict[str, float]]:
    """What the client has measured of each workload, at a server that is started for it."""
    from kv_testing.servers import free_port

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environ = os.environ | ENVIRON | threads_environ(threads)
    environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if engine == "sglang":
        environ["PYTHONPATH"] = str(HOME / "tests" / "engine_sglang" / "standins")
    with tempfile.TemporaryDirectory(prefix="kv-serve-") as directory, contextlib.ExitStack() as stack:
        home = Path(directory)
        environ |= {"XDG_RUNTIME_DIR": directory, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(home / "own")}
        if way == "shared":
            command = [
                str(Path(sys.executable).parent / "kv-server"),
                "--socket",
                str(home / "kv.sock"),
                "--capacity",
                str(POOL_BYTES),
            ]
            stack.enter_context(process(command, environ, home / "kv-server.log"))
        words = {"vllm": vllm_words, "sglang": sglang_words}[engine](way, model, home)
        command = [python(engine), *words, "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
        log = home / "engine.log"
        measured: dict[str, dict[str, float]] = {}
        first = [file.stem for file in prompts.glob("*.jsonl") if file.stem != "restart"]
        again = [["restart"]] if way in RESTARTED and (prompts / "restart.jsonl").exists() else []
        for works in [first, *again]:
            with process(command, environ, log) as server:
                wait_until_ready(server, url, log)
                asking = [python(engine), __file__, "--client", engine, url, model, str(prompts), *works]
                measured |= measured_by(asking, environ, log)
        return measured


def measured_by(command: Sequence[str], environ: dict[str, str], log: Path) -> dict[str, dict[str, float]]:
    """What this client has measured, by workload. log: the server's."""
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
    if ran.returncode:
        raise SystemExit(f"the client failed:\n{ran.stderr[-2000:]}\n{log.read_text()[-2000:]}")
    lines = [line for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
    return dict(json.loads(line.removeprefix("FOUND ")) for line in lines)


# What is made of it.


def table(results: dict[tuple[str, str, str], list[dict[str, float]]], as_json: bool) -> int:
    """A row for each engine, workload and configuration; 1 if a request has failed."""
    if not as_json:
        print(
            f"{'':28}{'first token':>14} {'of alone':>9} {'(starts)':>15} {'returning':>9} {'new':>8} {'between':>9} "
            f"{'tokens/s':>9} {'found':>6}"
        )
    for (engine, work, way), starts in results.items():
        of = {name: statistics.median(start[name] for start in starts) for name in starts[0]}
        first = [start["first token, mean"] for start in starts]
        alone = statistics.median(start["first token, mean"] for start in results[engine, work, "alone"])
        ratio = of["first token, mean"] / alone
        if as_json:
            row = {"engine": engine, "workload": work, "way": way, "of alone": ratio, **of}
            print(json.dumps(row | {"starts": first, "returning of starts": [one.get("returning") for one in starts]}))
            continue
        print(
            f"{f'{engine} {work}: {way}':28}{of['first token, mean']:>11.0f} ms {ratio:>9.2f} "
            f"{f'({min(first):.0f}–{max(first):.0f})':>15} "
            + "".join(f"{of[name]:>{width}.0f} ms " if name in of else " " * (width + 4) for name, width in SPLIT)
            + f"{of['between tokens']:>6.1f} ms {of['tokens a second']:>9.0f} {of['found']:>6.2f}"
        )
    return int(any(start["failed"] for starts in results.values() for start in starts))


def plot(results: dict[tuple[str, str, str], list[dict[str, float]]], file: str) -> None:
    """Seconds to the first token by workload, a bar for each configuration, with the spread of its starts."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    engines = list(dict.fromkeys(engine for engine, _, _ in results))
    figure, panels = plt.subplots(1, len(engines), figsize=(6 * len(engines), 4), squeeze=False)
    for panel, engine in zip(panels[0], engines, strict=True):
        works = list(dict.fromkeys(work for of, work, _ in results if of == engine))
        ways = list(dict.fromkeys(way for of, _, way in results if of == engine))
        for number, way in enumerate(ways):
            here = [place for place, work in enumerate(works) if (engine, work, way) in results]
            first = [[start["first token, mean"] for start in results[engine, works[place], way]] for place in here]
            middle = [statistics.median(each) for each in first]
            spread = [[m - min(each) for m, each in zip(middle, first, strict=True)]]
            spread.append([max(each) - m for m, each in zip(middle, first, strict=True)])
            places = [place + number / (len(ways) + 1) for place in here]
            panel.bar(places, middle, 1 / (len(ways) + 1), yerr=spread, label=way)
        panel.set_xticks([place + (len(ways) - 1) / (len(ways) + 1) / 2 for place in range(len(works))], works)
        panel.set_title(engine)
        panel.set_ylabel("mean time to the first token, ms")
        panel.legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> int:
    if "--client" in sys.argv:
        client(*sys.argv[2:])
        return 0
    asked = parser(__doc__.split("\n\n")[0])
    asked.add_argument("--model", required=True, help="a model's folder, as `scripts/setup.sh smollm2` prints it")
    asked.add_argument("--engine", nargs="+", choices=sorted(WAYS), default=["vllm"])
    ways = sorted({way for ways in WAYS.values() for way in ways})
    asked.add_argument("--way", nargs="+", choices=ways, help="these configurations only, beside the engine alone")
    asked.add_argument("--work", nargs="+", choices=WORKS, help="these workloads only; restart needs document")
    asked.add_argument("--starts", type=int, default=2, help="how often each is started (default: 2)")
    asked.add_argument("--threads", type=int, default=1, help="that each engine computes with (default: 1)")
    asked.add_argument("--plot", metavar="FILE", help="draw the times; .svg, .png or .pdf")
    asked.add_argument("--quick", action="store_true", help="one start and short workloads, to see that it runs")
    chosen = asked.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what has been started is ended
    results: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="kv-prompts-") as directory:
        for engine in chosen.engine:
            prompts = Path(directory) / engine
            prompts.mkdir()
            for work, texts in workloads(0.4 if chosen.quick else 1.0).items():
                if chosen.work and work not in chosen.work:
                    continue
                lines = [{"prompt": text, "messages": [{"role": "user", "content": text}]} for text in texts]
                keep = "prompt" if engine == "vllm" else "messages"
                (prompts / f"{work}.jsonl").write_text("".join(json.dumps({keep: line[keep]}) + "\n" for line in lines))
        starts = 1 if chosen.quick else chosen.starts
        for start in range(starts):
            for engine in chosen.engine:
                for way in WAYS[engine][:: -1 if start % 2 else 1]:
                    if way != "alone" and chosen.way and way not in chosen.way:
                        continue
                    progress(f"start {start + 1} of {starts}: {engine}, {way}        ")
                    found = one_start(engine, way, chosen.model, Path(directory) / engine, chosen.threads)
                    for work, measured in found.items():
                        results.setdefault((engine, work, way), []).append(measured)
    if chosen.plot:
        plot(results, chosen.plot)
    return table(dict(sorted(results.items(), key=lambda entry: entry[0][:2])), chosen.json)


if __name__ == "__main__":
    raise SystemExit(main())
