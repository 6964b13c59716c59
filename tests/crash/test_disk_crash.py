"""The disk tier's promise, with the process killed and the power cut at any moment.

After it, every chunk is found whose store was acknowledged, unless it was evicted or discarded since; each verifies, as
far as it was not cut; and nothing else is found. What was being done at that moment may have happened or not, chunk by
chunk.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_tiers import chunk_header
from kv_tiers.testing.side_by_side import side_by_side
from kv_tiers.testing.tier_contract import aligned_pages, content
from kv_tiers.tier import Read, TierContext, Write
from kv_tiers.tiers import disk_files
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for
from kv_tiers.tiers.space import CUTS, cut_bytes

CONTEXT = TierContext(9000, 12288, "crash")
FORMAT = chunk_header.format_id("crash")
SLOTS = 40
CHAINS = [key_chain(6, branch=str(number)) for number in range(12)]
KEYS = [key for chain in CHAINS for key in chain]
"""All that is ever stored: nearly twice what there is room for."""


def open_tier(root: Path, directories: int, **settings: str) -> DiskTier:
    paths = [str(root / str(at)) for at in range(directories)]
    config = DiskConfig(directory=paths, capacity_bytes=bytes_for(CONTEXT, SLOTS, directories), **settings)  # type: ignore[arg-type]
    return DiskTier(config, CONTEXT, LruPolicy())


SIZES = (700, 4000, 8000, 2000, 6000, 9000)
"""Of the payloads of every second chain, as if a codec had made them: their chunks share slots, and lie in pieces."""


SHARE_OF = {cut_bytes(CONTEXT.chunk_bytes, share): share for share in CUTS[1:]}


def size_of(key: ChunkKey) -> int:
    chain, at = divmod(KEYS.index(key), 6)
    return SIZES[at] if chain % 2 else CONTEXT.chunk_bytes


def writes_of(chain: list[ChunkKey], first: int, last: int) -> list[Write]:
    made = []
    for at in range(first, last):
        parent, size = chain[at - 1] if at else None, size_of(chain[at])
        pages = aligned_pages(CONTEXT.slot_bytes)
        pages[:size] = content(chain[at], size)
        checksum, pieces = chunk_header.checksums_of(pages[:size], CONTEXT.chunk_bytes)
        codec = "" if size == CONTEXT.chunk_bytes else "test"
        header = chunk_header.Header(
            chain[at], parent, CONTEXT.chunk_bytes, size, FORMAT, codec, checksum, checksum, pieces
        )
        made.append(Write(chain[at], parent, chunk_header.make_header(header), pages, size))
    return made


@dataclass
class Known:
    """What is known of a tier from what was said before it ended.

    held: what it held when the last call had returned.
    storing, discarding: what a call was about that had not.
    """

    held: set[int] = field(default_factory=set)
    storing: set[int] = field(default_factory=set)
    discarding: set[int] = field(default_factory=set)

    def hear(self, said: str) -> None:
        """One line: `store 3 4 5`, `discard 7`, or `held …` after it."""
        verb, *numbers = said.split()
        if verb == "held":
            self.held, self.storing, self.discarding = set(map(int, numbers)), set(), set()
        elif verb == "store":
            self.storing = set(map(int, numbers))
        else:
            self.discarding = set(map(int, numbers))

    def check(self, tier: DiskTier) -> Counter[int]:
        """Raise unless what the tier holds is right; how many chunks of each share that is (`extents.CUTS`)."""
        found = {number for number, held in enumerate(tier.holds(KEYS)) if held}
        assert tier.usage().chunks == len(found), "chunks are found that nobody ever stored"
        assert found <= self.held | self.storing, "chunks are found that were not there"
        lost = self.held - found - self.discarding
        # A store under way may have made room for itself, and one ahead of the next, of chunks a quarter as large.
        assert len(lost) <= (4 * (len(self.storing) + 1) if self.storing else 0), "acknowledged chunks are lost"
        shares: Counter[int] = Counter()
        for number in found:
            read = Read(
                KEYS[number],
                bytearray(chunk_header.HEADER_BYTES),
                aligned_pages(CONTEXT.slot_bytes),
                CONTEXT.chunk_bytes,
            )
            (loaded,) = tier.load([read])
            assert isinstance(loaded, Loaded)
            shares[SHARE_OF[loaded.nbytes] if loaded.nbytes != size_of(read.key) else 1] += 1
            found_header = chunk_header.verify_prefix(
                read.header,
                read.pages[: loaded.nbytes],
                key=read.key,
                format_id=FORMAT,
                decoded_bytes=CONTEXT.chunk_bytes,
            )
            assert isinstance(found_header, chunk_header.Header)
        self.held, self.storing, self.discarding = found, set(), set()
        assert tier.usage().cut_chunks == shares.total() - shares[1]
        return shares


def live(tier: DiskTier, rng: random.Random, say: Callable[[str], object]) -> None:
    """One call after another, each said before it is made, and what is held after it."""
    while True:
        chain = rng.randrange(len(CHAINS))
        first = rng.choice([0, 0, 2, 4])
        last = rng.randint(first + 1, 6)
        numbers = [chain * 6 + at for at in range(first, last)]
        kind = rng.random()
        if kind < 0.7:
            writes = writes_of(CHAINS[chain], first, last)
            say(f"store {' '.join(map(str, numbers))}\n")
            tier.store(writes)
        elif kind < 0.85:
            say(f"discard {' '.join(map(str, numbers))}\n")
            tier.discard([KEYS[number] for number in numbers])
        else:
            pages = aligned_pages(CONTEXT.slot_bytes)
            tier.load(
                [
                    Read(KEYS[number], bytearray(chunk_header.HEADER_BYTES), pages, CONTEXT.chunk_bytes)
                    for number in numbers
                ]
            )
        held = [str(number) for number, is_held in enumerate(tier.holds(KEYS)) if is_held]
        say(f"held {' '.join(held)}\n")


# Killed.


def child_lives(root: Path, directories: int, settings: dict[str, str], seed: int, writer: int) -> NoReturn:
    try:
        tier = open_tier(root, directories, **settings)
        live(tier, random.Random(seed), lambda said: os.write(writer, said.encode()))
    finally:
        os._exit(1)  # not reached: it is killed


def kill_often(root: Path, kills: int, directories: int, settings: dict[str, str]) -> dict[str, int]:
    """Run in a process of its own without threads, as it forks."""
    rng = random.Random(f"{directories} {settings}")
    known, shares, interrupted = Known(), Counter[int](), 0
    for number in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            child_lives(root, directories, settings, number, writer)
        os.close(writer)
        # From its start on: some are killed while they open, and read what the one before has left. By lines, not by
        # seconds, as a call takes a hundred times as long on one disk as on another.
        with os.fdopen(reader, "rb") as pipe:
            for _ in range(int(rng.random() ** 2 * 60)):
                known.hear(pipe.readline().decode())
            time.sleep(rng.random() ** 2 * 0.003)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "the child ended by itself"
            for line in pipe.read().decode().splitlines():
                known.hear(line)
        interrupted += bool(known.storing)
        tier = open_tier(root, directories, **settings)
        shares += known.check(tier)
        tier.close()
    return {"kills": kills, "chunks": shares.total(), "cut": shares.total() - shares[1], "interrupted": interrupted}


@pytest.mark.parametrize(
    ("directories", "settings"),
    [
        (1, {}),
        pytest.param(1, {"when_full": "drop_parts"}, marks=pytest.mark.slow),
        pytest.param(2, {"when_full": "drop_parts", "direct": "never"}, marks=pytest.mark.slow),
        pytest.param(2, {"direct": "never"}, marks=pytest.mark.slow),
        pytest.param(1, {"durability": "process"}, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment(tmp_path: Path, directories: int, settings: dict[str, str]) -> None:
    job = json.dumps([str(tmp_path), 70, directories, settings])
    done = subprocess.run([sys.executable, __file__, job], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["interrupted"] > 10
    assert counted["chunks"] > counted["kills"] * 10
    assert (counted["cut"] > counted["kills"]) == ("when_full" in settings)


# Without power.


@dataclass
class Medium:
    """Everything that was written, in order, and when it was made durable."""

    events: list[tuple[object, ...]] = field(default_factory=list)

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        file, events = disk_files.File, self.events
        write, sync, allocate, truncate = file.write, file.sync, file.allocate, file.truncate

        def writing(self: disk_files.File, buffers: list[memoryview], offset: int) -> None:
            events.append(("write", self.path, offset, b"".join(map(bytes, buffers))))
            write(self, buffers, offset)

        def syncing(self: disk_files.File) -> None:
            sync(self)
            events.append(("sync", self.path))

        def allocating(self: disk_files.File, start: int, least: int, end: int) -> int:
            allocated = allocate(self, start, least, end)
            events.append(("resize", self.path, allocated))
            return allocated

        def truncating(self: disk_files.File, nbytes: int) -> None:
            events.append(("resize", self.path, nbytes))
            truncate(self, nbytes)

        monkeypatch.setattr(file, "write", writing)
        monkeypatch.setattr(file, "sync", syncing)
        monkeypatch.setattr(file, "allocate", allocating)
        monkeypatch.setattr(file, "truncate", truncating)

    def cut(self, at: int, rng: random.Random, source: Path, target: Path) -> list[str]:
        """Make the files as they may be if the power goes before event `at`, and tell what was said until then."""
        said: list[str] = []
        images: dict[Path, bytearray] = {}
        last_sync = {event[1]: number for number, event in enumerate(self.events[:at]) if event[0] == "sync"}
        for number, event in enumerate(self.events[:at]):
            if event[0] == "said":
                said.append(str(event[1]))
                continue
            path = event[1]
            assert isinstance(path, Path)
            image = images.setdefault(path, bytearray())
            durable = number < last_sync.get(path, -1)
            if event[0] == "resize" and (durable or rng.random() < 0.5):
                nbytes = event[2]
                assert isinstance(nbytes, int)
                del image[nbytes:]
                image.extend(bytes(nbytes - len(image)))
            elif event[0] == "write" and (durable or rng.random() < 0.5):
                _, _, offset, data = event
                assert isinstance(offset, int) and isinstance(data, bytes)
                image.extend(bytes(max(0, offset + len(data) - len(image))))
                torn = not durable and rng.random() < 0.5
                for sector in range(0, len(data), 512):
                    if not torn or rng.random() < 0.5:
                        piece = data[sector : sector + 512]
                        image[offset + sector : offset + sector + len(piece)] = piece
        for path, image in images.items():
            copy = target / path.relative_to(source)
            for directory in (copy.parent.parent, copy.parent):
                directory.mkdir(mode=0o700, exist_ok=True, parents=True)
            copy.touch(mode=0o600)
            copy.write_bytes(image)
        return said


@pytest.mark.parametrize(
    ("directories", "settings"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {}),
        pytest.param(1, {"when_full": "drop_parts"}, marks=pytest.mark.slow),
        pytest.param(2, {"when_full": "drop_parts"}, marks=pytest.mark.slow),
    ],
)
def test_power_lost_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directories: int, settings: dict[str, str]
) -> None:
    medium, rng = Medium(), random.Random(directories)
    source = tmp_path / "source"
    source.mkdir()
    with monkeypatch.context() as patched:
        medium.record(patched)
        tier = open_tier(source, directories, direct="never", **settings)

        def say(said: str) -> None:
            medium.events.append(("said", said))
            if len(medium.events) > 1500:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            live(tier, random.Random(7), say)
        tier.close()
    shares: Counter[int] = Counter()
    for number in range(150):
        target = tmp_path / f"after {number}"
        target.mkdir()
        known = Known()
        for line in medium.cut(rng.randrange(len(medium.events)), rng, source, target):
            known.hear(line)
        tier = open_tier(target, directories, direct="never", **settings)
        shares += known.check(tier)
        tier.close()
    assert shares.total() > 2000
    assert (shares.total() - shares[1] > 150) == bool(settings)


def test_power_lost_while_threads_store_and_discard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who evicted what is not known here; but all that is found verifies, and nothing that was discarded comes back."""
    medium, rng = Medium(), random.Random(0)
    source = tmp_path / "source"
    source.mkdir()
    with monkeypatch.context() as patched:
        medium.record(patched)
        tier = open_tier(source, 2, direct="never")

        def work(seed: int) -> None:
            choose = random.Random(seed)
            while len(medium.events) < 3000:
                chain, first = choose.randrange(len(CHAINS)), choose.choice([0, 0, 2, 4])
                numbers = list(range(chain * 6 + first, chain * 6 + 6))
                call = choose.choice(["store", "store", "store", "discard"])
                medium.events.append(("said", json.dumps([seed, call, numbers])))
                if call == "store":
                    tier.store(writes_of(CHAINS[chain], first, 6))
                else:
                    tier.discard([KEYS[number] for number in numbers])
                medium.events.append(("said", json.dumps([seed, f"{call} returned", numbers])))

        side_by_side(work, threads=3)
        tier.close()
    chunks = 0
    for number in range(100):
        target = tmp_path / f"after {number}"
        target.mkdir()
        said = medium.cut(rng.randrange(len(medium.events)), rng, source, target)
        possible: set[int] = set()
        storing: dict[int, list[int]] = {}
        discarding: dict[int, set[int]] = {}  # and what was stored meanwhile, which may be later than the discard
        for seed, what, numbers in map(json.loads, said):
            if what == "store":
                possible.update(numbers)
                storing[seed] = numbers
                for meanwhile in discarding.values():
                    meanwhile.update(numbers)
            elif what == "store returned":
                del storing[seed]
            elif what == "discard":
                discarding[seed] = set().union(*storing.values())
            else:
                possible -= set(numbers) - discarding.pop(seed)
        tier = open_tier(target, 2, direct="never")
        chunks += Known(storing=possible).check(tier).total()
        tier.close()
    assert chunks > 2000


if __name__ == "__main__":
    root, kills, directories, settings = json.loads(sys.argv[1])
    print(json.dumps(kill_often(Path(root), kills, directories, settings)))
