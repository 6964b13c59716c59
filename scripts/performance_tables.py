"""Writes the tables of docs/performance.md and README.md from the raw output in benchmarks/results.

    python scripts/performance_tables.py [--write]

A page has each table between two marks, `<!-- table: NAME -->` and `<!-- end of NAME -->`. Without `--write` this says
which tables are not what the files say. After a benchmark has run again, change the file's name below.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
PAGES: Final = (ROOT / "docs" / "performance.md", ROOT / "README.md")

VLLM_H200: Final = "2026-11-28-vllm-h200.txt"
VLLM_H100: Final = "2026-11-27-vllm-h100.txt"
COPY_H200: Final = "2026-11-28-copy-h200.txt"
SERVE_VLLM: Final = "2026-11-26-serve-vllm-returning-zen4-two-cores.txt"
SERVE_SGLANG: Final = "2026-11-26-serve-sglang-zen4-two-cores.txt"
NEVER_SLOWER_VLLM: Final = "2026-11-22-never-slower-vllm-two-cores.txt"
NEVER_SLOWER_SGLANG: Final = "2026-11-22-never-slower-sglang-two-cores.txt"
THROTTLED_VLLM: Final = "2026-11-26-never-slower-throttled-vllm-zen4-two-cores.txt"
THROTTLED_SGLANG: Final = "2026-11-26-never-slower-throttled-sglang-beside-hicache-zen4-two-cores.txt"
TIERS: Final = "2026-11-22-tiers-two-cores.txt"
SERVER: Final = "2026-11-22-server-two-cores.txt"
PEERS: Final = "2026-11-22-peers-two-cores.txt"
CODECS: Final = "2026-11-28-codecs-zen4-two-cores.txt"
LMCACHE: Final = "2026-11-21-peer-two-cores.txt"
HANDOVER: Final = "2026-11-26-handover-nixl-quiet-zen4-two-cores.txt"
ROUTE: Final = "2026-11-26-route-engines-zen4-two-cores.txt"
SHIFT: Final = "2026-11-23-shift-two-cores.txt"
SHIFT_OFFLOADING: Final = "2026-11-25-shift-vllm-offloading.txt"
SHIFT_LMCACHE: Final = "2026-11-25-shift-lmcache-server.txt"


class Figure(NamedTuple):
    """One row of a benchmark: what was measured, and the reference of the same run."""

    value: float
    unit: str
    limit: float

    @property
    def ratio(self) -> str:
        return f"{self.value / self.limit:.2f}"


def parse_figures(text: str) -> dict[str, Figure]:
    """The rows of a benchmark's own table by name; of several runs in one file, the first."""
    found: dict[str, Figure] = {}
    for name, value, unit, limit in re.findall(r"^ *(\S.*?)  +([\d.e+-]+) (\S+) +([\d.]+) +[\d.]+  [≤≥]", text, re.M):
        found.setdefault(name, Figure(float(value), unit, float(limit)))
    return found


def parse_served(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What `serve.py --json` wrote, by workload and way; of several runs, the last."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            found[row["workload"], row["way"]] = row
    return found


@cache
def figures(name: str) -> Mapping[str, Figure]:
    return parse_figures((RESULTS / name).read_text(encoding="utf-8"))


@cache
def served(name: str) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    return parse_served((RESULTS / name).read_text(encoding="utf-8"))


def ms(figure: Figure) -> str:
    """In milliseconds, with three digits."""
    scale = {"s": 1e3, "ms": 1.0, "us": 1e-3, "µs": 1e-3}[figure.unit]
    return digits(figure.value * scale)


def digits(value: float) -> str:
    """Three of them, at most."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.split(" | ")
    lines = [f"| {head} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def on_a_gpu() -> str:
    def rows() -> Iterator[list[str]]:
        for card, name, prompts in (
            ("H200", VLLM_H200, ("4,096 tokens", "16,384 tokens", "8 at once of 4,096 tokens")),
            ("H100", VLLM_H100, ("4,096 tokens", "16,384 tokens")),
        ):
            for prompt in prompts:
                timed = {
                    (way, kind): figures(name)[f"{way}, {prompt}, {kind}"]
                    for way in ("alone", "own offloading", "between steps")
                    for kind in ("new", "found")
                }
                own, ours = (
                    f"{ms(timed[way, 'new'])} ({timed[way, 'new'].ratio}) / {ms(timed[way, 'found'])}"
                    for way in ("own offloading", "between steps")
                )
                yield [f"{card}, {prompt}", ms(timed["alone", "new"]), own, ours]

    return table("a prompt | no cache | vLLM's offloading: new (of no cache) / found | ours: new / found", rows())


def copies() -> str:
    def best(way: str, size: str) -> Figure:
        """By the fastest of the copier's paths, which `kv bench copy` chooses."""
        rows = [
            figures(COPY_H200)[f"{way} {path}, apart, 16-token blocks, {size}"]
            for path in ("direct", "staged", "driver")
        ]
        return max(rows, key=lambda row: row.value)

    def rows() -> Iterator[list[str]]:
        for size in ("32 MiB", "4 MiB"):
            load, store = best("load", size), best("store", size)
            moved = f"{digits(load.value)} / {digits(store.value)} GB/s"
            yield [f"chunks of {size}, blocks of 16 tokens", moved, f"{load.ratio} / {store.ratio}"]

    return table("H200, four chunks | to the device / from it | of a plain copy", rows())


def over_http() -> str:
    """Mean time to the first token of prompts whose beginning was asked before."""

    def rows() -> Iterator[list[str]]:
        workloads = (("agents", "agent"), ("documents", "document"), ("conversations", "multi-turn"))
        for engine, name in (("vLLM", SERVE_VLLM), ("SGLang", SERVE_SGLANG)):
            for label, workload in (*workloads, ("after a restart", "restart")):
                row = [f"{engine}, {label}"]
                for way in ("alone", "own host", "in process", "own file", "disk"):
                    found = served(name).get((workload, way))
                    row.append(digits(found["returning"]) if found else "")
                yield row

    head = "ms | no cache | engine's own, memory | ours, pool | engine's own, files | ours, disk"
    return table(head, rows())


def nothing_found() -> str:
    vllm, sglang = figures(NEVER_SLOWER_VLLM), figures(NEVER_SLOWER_SGLANG)
    slow_vllm, slow_sglang = figures(THROTTLED_VLLM), figures(THROTTLED_SGLANG)
    rows = [
        ["prompts that never return", vllm["unique, mean"].ratio, sglang["unique, mean"].ratio],
        [
            "working set 1.8 × the pool, asked in turn: nothing is found",
            vllm["1.8 × the host tier, mean"].ratio,
            sglang["1.8 × the host tier, mean"].ratio,
        ],
        [
            "the same with a disk tier",
            vllm["1.8 ×, on disk too, mean"].ratio,
            sglang["1.8 ×, on disk too, mean"].ratio,
        ],
        [
            "over a disk of 10 MB/s, beside the better of computing and loading",
            slow_vllm["a tier of 10 MB/s, mean"].ratio,
            slow_sglang["a tier of 10 MB/s, mean"].ratio,
        ],
    ]
    return table("mean time with us / without | vLLM | SGLang", rows)


def tiers_and_server() -> str:
    tiers, server, peers, codecs = figures(TIERS), figures(SERVER), figures(PEERS), figures(CODECS)

    def pair(rows: Mapping[str, Figure], first: str, second: str) -> list[str]:
        one, two = rows[first], rows[second]
        return [f"{digits(one.value)} / {digits(two.value)} {one.unit}", f"{one.ratio} / {two.ratio}"]

    compiled = "floats, bfloat16, compiled"
    rows = [
        [
            "disk, 4 MiB chunks with checksums, durable: store / cold load; of O_DIRECT into one file",
            *pair(
                tiers,
                "disk store, 8 chunks of 4 MiB a call, with checksums",
                "disk cold load, 8 chunks of 4 MiB a call, with checksums",
            ),
        ],
        [
            "Valkey over TCP, 4 MiB chunks: store / load; of bare RESP",
            *pair(tiers, "redis store, 8 chunks of 4 MiB a call, tcp", "redis load, 8 chunks of 4 MiB a call, tcp"),
        ],
        [
            "a peer's pool over 1 Gb/s: TCP / TLS; of a bare socket",
            *pair(
                peers,
                "chunks of 4 MiB from a peer's pool over TCP, against a bare socket",
                "chunks of 4 MiB from a peer's pool over TLS, against a bare socket",
            ),
        ],
        [
            "codec `floats`, one core: encode / decode; times smaller",
            pair(codecs, f"{compiled}: encode", f"{compiled}: decode")[0],
            f"{codecs[f'{compiled}: times smaller'].value:.2f}",
        ],
        [
            "lookup with lease of 512 chunks through `kv-server`: median / 99 %",
            f"{ms(server['lookup with lease of 512 chunks'])} / {ms(server['99th percentile'])} ms",
            "",
        ],
        [
            "`kv-server`, start to ready; memory with 65,536 chunks known",
            f"{digits(server['start to ready'].value)} s; {digits(server['its memory, 65536 chunks known'].value)} MiB",
            "",
        ],
    ]
    return table("what | measured | ratio", rows)


def beside_lmcache() -> str:
    names = {
        "keys": "keys of 131,072 tokens (SHA-256; its BLAKE3)",
        "lookup": "lookup of 512 resident chunks, leased and released",
        "store": "eight chunks of 4 MiB to disk, durable",
        "load": "eight of them from disk",
        "full": "a chunk into a full disk tier of 10,000",
    }
    measured = figures(LMCACHE)
    rows = [
        [label, ms(row), ms(Figure(row.limit, row.unit, 1.0)), row.ratio]
        for name, label in names.items()
        for row in [measured[name]]
    ]
    return table("ms | ours | LMCache 0.5.6 | ratio", rows)


def several_engines() -> str:
    handover, route = figures(HANDOVER), figures(ROUTE)

    def rows() -> Iterator[list[str]]:
        for tokens in ("2048", "6000"):
            nixl = handover[f"{tokens} tokens, ours: first token, of nixl"]
            alone = handover[f"{tokens} tokens, ours: first token, of alone"]
            yield [
                f"disaggregated prefill of {int(tokens):,} tokens, one server",
                f"{nixl.value:.2f} s",
                f"{nixl.limit:.2f} s: NixlConnector; {alone.limit:.2f} s: one engine that does both",
            ]
        turn, session = route["/route beside in turn"], route["/route beside by session"]
        yield [
            "240 requests of coding agents on four engines, by `POST /route`",
            f"{turn.value:.2f} s",
            f"{turn.limit:.2f} s: in turn; {session.limit:.2f} s: by session",
        ]

    return table("mean time to the first token | ours | reference", rows())


def hits_of_64(name: str, way: str) -> str:
    """Of prompts that share 800 tokens, as `shift.py` wrote them; "does not start" where it does not."""
    said, *_ = re.findall(rf"^\| {re.escape(way)} \| ([^|]+) \|", (RESULTS / name).read_text(encoding="utf-8"), re.M)
    return "does not start" if said.startswith("does not start") else said.strip()


def beside() -> str:
    """The README's: one row a reason."""
    h200, lmcache = figures(VLLM_H200), figures(LMCACHE)
    vllm, sglang = served(SERVE_VLLM), served(SERVE_SGLANG)

    def restarted(rows: Mapping[tuple[str, str], Mapping[str, Any]], way: str) -> str:
        return f"{rows['restart', way]['of alone']:.2f}"

    full = lmcache["full"]
    found, computed = "16,384 tokens, found", ms(h200["alone, 16,384 tokens, new"])
    rows = [
        [
            f"first token of 16,384 tokens found in host memory (H200, 8B; computed: {computed} ms)",
            f"{ms(h200[f'between steps, {found}'])} ms",
            f"{ms(h200[f'own offloading, {found}'])} ms",
            "–",
            "–",
        ],
        [
            "hits among 64 prompts with 800 tokens in common, layers with states (Qwen3-Next)",
            hits_of_64(SHIFT, "kv-vllm"),
            hits_of_64(SHIFT_OFFLOADING, "vLLM's offloading"),
            "–",
            hits_of_64(SHIFT_LMCACHE, "LMCache's server"),
        ],
        [
            "first token after a restart, from disk, relative to computing it (CPU): vLLM; SGLang",
            f"{restarted(vllm, 'disk')}; {restarted(sglang, 'disk')}",
            restarted(vllm, "own file"),
            restarted(sglang, "own file"),
            "–",
        ],
        [
            "time to put a chunk into a full disk tier of 10,000 (CPU)",
            f"{ms(full)} ms",
            "–",
            "–",
            f"{ms(Figure(full.limit, full.unit, 1.0))} ms",
        ],
    ]
    return table("what | this cache | vLLM's offloading | HiCache | LMCache", rows)


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "on a GPU": on_a_gpu,
    "copies": copies,
    "over HTTP": over_http,
    "nothing found": nothing_found,
    "tiers and server": tiers_and_server,
    "LMCache": beside_lmcache,
    "several engines": several_engines,
    "beside": beside,
}


def written(text: str) -> str:
    """A page with its tables as they should be.

    Raises:
        KeyError: it has a mark of a table that is not here.
    """

    def made(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- table: {name} -->\n{TABLES[name]()}<!-- end of {name} -->"

    return re.sub(r"<!-- table: ([^>]+?) -->\n.*?<!-- end of \1 -->", made, text, flags=re.DOTALL)


def main() -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    made.add_argument("--write", action="store_true", help="write the pages")
    options = made.parse_args()
    status = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        now = written(text)
        if options.write:
            page.write_text(now, encoding="utf-8")
        elif now != text:
            print(f"{page.relative_to(ROOT)} is out of date: python scripts/performance_tables.py --write")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
