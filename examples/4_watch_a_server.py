"""A server with a disk below its pool, two engines that share prompts, and a page to watch them on.

Run it with --seconds 600 and open the address that it prints; `kv top --socket …` shows the same in a terminal. The
engines are made up: they look chunks up, store those that are not held, and compute nothing.
"""

import argparse
import itertools
import json
import random
import tempfile
import threading
import time
from pathlib import Path
from urllib.request import urlopen

from kv_core import ChainScheme, ChunkKey, KeySequence, KeySpace, tenant_tag
from kv_core.coverage import ChunkShape
from kv_server import RemoteCache, launch

CHUNK_TOKENS = 256
CHUNK_BYTES = 256 << 10
PROMPT_CHUNKS = 12
SHARED_CHUNKS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long the engines run")
    parser.add_argument("--http", default="127.0.0.1:0", metavar="HOST:PORT", help="where the page is (default: any)")
    parser.add_argument("--home", metavar="DIR", help="for token, disk and exported prefixes (default: removed)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-") as scratch:
        home = Path(args.home or scratch)
        (home / "prefixes").mkdir(parents=True, exist_ok=True)
        server = launch(
            {
                "host": {"capacity_bytes": "64MiB"},
                "tiers": [{"type": "disk", "name": "nvme", "directory": f"{home}/kv", "capacity_bytes": "256MiB"}],
                "tenants": [
                    {"name": "acme", "salt": "acme", "quota_bytes": "40MiB"},
                    {"name": "globex", "salt": "globex"},
                ],
                "http": {
                    "listen": args.http,
                    "token_file": f"{home}/token",
                    "archive_directory": f"{home}/prefixes",
                },
            }
        )
        print(f"the page: {server.url}   in a terminal: kv top --socket {server.socket}", flush=True)
        until = time.monotonic() + args.seconds
        engines = [threading.Thread(target=engine, args=(server.socket, number, until)) for number in range(2)]
        for one in engines:
            one.start()
        for one in engines:
            one.join()
        with urlopen(f"{server.url}status") as answer:
            counts = json.load(answer)["caches"][0]["counts"]
        print(f"{counts['chunks_hit']} of {counts['chunks_asked']} chunks were held when they were asked for")
        server.stop()


def engine(socket: Path, number: int, until: float) -> None:
    """Serve made-up prompts, most of which begin as others did."""
    cache = RemoteCache(
        socket,
        group_bytes=(CHUNK_BYTES,),
        fingerprint="made-up",
        engine=f"engine-{number}",
        facts={"chunk_tokens": str(CHUNK_TOKENS)},
    )
    rng = random.Random(number)
    for turn in itertools.count():
        if time.monotonic() >= until:
            break
        # Every fourth is about topic 1: the prompt that everybody has.
        topic = min(int(rng.expovariate(0.05)), 99) if turn % 4 else 1
        keys = keys_of(topic, rng.randrange(3), "acme" if topic % 3 else "globex")
        plan = cache.lookup(keys, "request", shape=ChunkShape(CHUNK_TOKENS), wait_for_promotion=True)
        while plan.ended.name == "PENDING":  # a tier below has more
            time.sleep(0.005)
            plan = cache.lookup(keys, "request", shape=ChunkShape(CHUNK_TOKENS), wait_for_promotion=True)
        lease = cache.begin_store(keys, "request")
        for extent in lease.extents:  # here an engine copies what it computed
            cache.pool.view[extent.offset : extent.offset + extent.nbytes] = bytes(extent.nbytes)
        cache.commit(lease)
        cache.end("request")
        time.sleep(0.02)
    cache.close()


def keys_of(topic: int, ending: int, tenant: str) -> list[ChunkKey]:
    """Of a prompt whose first chunks all prompts of the topic share."""
    scheme = ChainScheme("sha256", CHUNK_TOKENS)
    space = KeySpace("made-up/model", "", "bfloat16", "made-up", 1, scheme.name)
    tokens = [topic] * CHUNK_TOKENS * SHARED_CHUNKS + [1000 + ending] * CHUNK_TOKENS * (PROMPT_CHUNKS - SHARED_CHUNKS)
    return space.keys(KeySequence(scheme, root=scheme.root(salt=tenant)).append(tokens), tenant=tenant_tag(tenant))


if __name__ == "__main__":
    main()
