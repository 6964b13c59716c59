"""The peer's side of `benchmarks/peer.py`: LMCache, by its own classes, in a process and an environment of its own.

Reads a measurement's name a line, answers with its median seconds as JSON. Its in-process engine is measured: the
server mode does more for the same question (the tokens travel and are hashed again).
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._report import median_s

if __name__ == "__main__":
    os.environ |= {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_USE_EXPERIMENTAL": "true"}
    answers, sys.stdout = sys.stdout, sys.stderr  # what it prints is no answer
    import torch
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

PROMPT_TOKENS, CHUNK_TOKENS, BATCH, REPEATS, DISK_REPEATS = 131_072, 256, 8, 31, 9
SHAPE = (2, 8, 256, 512)
"""Of a chunk in bfloat16: 4 MiB."""


class Peer:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        chance = random.Random(7)
        self._prompt = [chance.randrange(128_256) for _ in range(PROMPT_TOKENS)]
        self._numbers = iter(range(1 << 60))

    def engine(self, name: str, **settings: object) -> Any:
        config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK_TOKENS, **settings)
        shape = (SHAPE[1], 2, CHUNK_TOKENS, 4, SHAPE[3] // 4)
        metadata = LMCacheMetadata("a-model", 1, 1, 0, 0, torch.bfloat16, shape)
        made = LMCacheEngineBuilder.get_or_create(name, config, metadata, None, lambda *_: None, lambda what, _: what)
        made.post_init()
        return made

    def keys(self) -> float:
        """As its server makes them: BLAKE3."""
        hasher = TokenHasher(CHUNK_TOKENS)
        return median_s(lambda: hasher.compute_chunk_hashes(self._prompt), REPEATS)

    def short_keys(self) -> float:
        """Its default in process: Python's own hash, of 64 bits."""
        database = self.engine("short_keys", max_local_cpu_size=0.1).token_database
        return median_s(lambda: list(database.process_tokens(tokens=self._prompt)), REPEATS)

    def lookup(self) -> float:
        """Of 512 resident chunks from their tokens on, pinned and given back."""
        engine = self.engine("lookup", local_cpu=True, max_local_cpu_size=0.5)
        keys = [key for *_, key in engine.token_database.process_tokens(tokens=self._prompt)]
        small = torch.Size((2, 1, 256, 64))
        engine.storage_manager.batched_put(keys, [engine.storage_manager.allocate(small, torch.bfloat16) for _ in keys])

        def once() -> None:
            number = str(next(self._numbers))
            assert engine.lookup(tokens=self._prompt, lookup_id=number, pin=True) == PROMPT_TOKENS
            engine.lookup_unpin(number)

        return median_s(once, REPEATS)

    def allocate(self) -> float:
        """A chunk of 4 MiB allocated and freed."""
        engine = self.engine("allocate", local_cpu=True, max_local_cpu_size=1.0)
        (backend,) = engine.storage_manager.storage_backends.values()
        shape = torch.Size(SHAPE)

        def many() -> None:
            for _ in range(1000):
                backend.allocate(shape, torch.bfloat16).ref_count_down()

        return median_s(many, REPEATS) / 1000

    def store(self) -> float:
        """Eight chunks of 4 MiB, until they are durable."""
        disk, put = self._disk("store", 2.0, SHAPE)

        def once() -> None:
            for key in put(BATCH):
                descriptor = os.open(disk.dict[key].path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

        return median_s(once, DISK_REPEATS)

    def load(self) -> float:
        """Eight of them, cold."""
        disk, put = self._disk("load", 2.0, SHAPE)
        stored = [put(BATCH) for _ in range(DISK_REPEATS + 2)]

        def once() -> None:
            objects = [disk.get_blocking(key) for key in stored.pop()]
            assert all(each is not None for each in objects)
            for each in objects:
                each.ref_count_down()

        return median_s(once, DISK_REPEATS)

    def full(self) -> float:
        """One chunk of 64 KiB put into a full tier of 10,000."""
        gigabytes = 10_000 * (1 << 16) / (1 << 30)
        _, put = self._disk("full", gigabytes, (2, 1, 256, 64))
        for _ in range(101):
            put(100)
        return median_s(lambda: put(1), DISK_REPEATS)

    def _disk(self, name: str, gigabytes: float, shape: tuple[int, ...]) -> tuple[Any, Callable[[int], list[Any]]]:
        """The disk backend, past the page cache; and what stores so many new chunks there and waits for it."""
        engine = self.engine(
            name,
            local_cpu=False,
            max_local_cpu_size=1.0,
            local_disk=f"file://{self._directory}/{name}/",
            max_local_disk_size=gigabytes,
            extra_config={"use_odirect": True},
        )
        manager = engine.storage_manager
        disk = manager.storage_backends["LocalDiskBackend"]
        (pattern,) = [key for *_, key in engine.token_database.process_tokens(tokens=self._prompt[:CHUNK_TOKENS])]
        memory = [manager.allocate(torch.Size(shape), torch.bfloat16) for _ in range(BATCH)]
        for each in memory:
            each.tensor.random_(0, 100)

        def put(count: int) -> list[Any]:
            keys = [type(pattern)(**_fields(pattern, next(self._numbers))) for _ in range(count)]
            for number, key in enumerate(keys):
                disk.submit_put_task(key, memory[number % BATCH])
            for key in keys:
                while disk.exists_in_put_tasks(key):
                    time.sleep(0)
            return keys

        return disk, put


def _fields(key: Any, number: int) -> dict[str, object]:
    names = ("model_name", "world_size", "worker_id", "dtype")
    return {name: getattr(key, name) for name in names} | {"chunk_hash": number}


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as directory:
        peer = Peer(Path(directory))
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            seconds = getattr(peer, line.strip())()
            LMCacheEngineBuilder.destroy(line.strip())
            print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main()
