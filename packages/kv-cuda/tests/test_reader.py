"""Reads on a thread: what they bring, what they report, and how they end."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_core.errors import CopyFailed
from kv_core.hashing import checksum_of
from kv_core.outcome import Damaged, Loaded, ReadFailed
from kv_core.transfer import FileExtent, HostExtent, plan_transfer
from kv_cuda import make_copier
from kv_cuda.files import host_files
from kv_cuda.files.direct import ThreadRead, ThreadReader
from kv_testing.layouts import TOKENS, small_caches
from kv_testing.threads import threads_left

CACHE = small_caches()["NHD, K‖V"]
CHUNK = 2 * TOKENS
FORMAT = CACHE.layout.canonical_format(CHUNK)
TABLE = [5, 0, 3, 6]


@pytest.fixture
def computed() -> list[torch.Tensor]:
    tensors = CACHE.make()
    generator = torch.Generator().manual_seed(5)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return tensors


@pytest.fixture
def files(computed: list[torch.Tensor], tmp_path: Path) -> list[FileExtent]:
    """Two chunks of these tensors."""
    copier, pool = make_copier(CACHE.layout, computed, FORMAT), bytearray(2 * FORMAT.nbytes)
    copier.attach("pool", memoryview(pool))
    extents = [HostExtent("pool", at * FORMAT.nbytes, FORMAT.nbytes) for at in range(2)]
    plan = plan_transfer(extents, TABLE, chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=0, last_token=2 * CHUNK)
    copier.store(plan).wait()
    copier.detach("pool")
    chunks = [bytes(pool[at * FORMAT.nbytes : (at + 1) * FORMAT.nbytes]) for at in range(2)]
    path = tmp_path / "slab-0000"
    path.write_bytes(b"".join(chunk.ljust(1 << 16, b"\0") for chunk in chunks))
    return [
        FileExtent(str(path), at << 16, FORMAT.nbytes, checksum_of(memoryview(chunk)))
        for at, chunk in enumerate(chunks)
    ]


class Readers:
    def __init__(self, directory: Path) -> None:
        self.blocks = CACHE.make()
        self.reader = ThreadReader(CACHE.layout, self.blocks, FORMAT, directory)

    def read(self, files: list[FileExtent], first_token: int = 0) -> ThreadRead:
        return self.reader.read(files, TABLE, block_tokens=TOKENS, first_token=first_token, last_token=2 * CHUNK)

    def has(self, computed: list[torch.Tensor], table: list[int]) -> bool:
        return all(torch.equal(mine[table], theirs[table]) for mine, theirs in zip(self.blocks, computed, strict=True))


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[Readers]:
    made = Readers(tmp_path)
    yield made
    made.reader.close()


def test_a_read_fills_its_blocks_without_the_caller(
    readers: Readers, files: list[FileExtent], computed: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, real = threading.Event(), host_files._read

    def waits(*arguments: Any) -> int:
        assert may_read.wait(60)
        return real(*arguments)

    monkeypatch.setattr(host_files, "_read", waits)
    read = readers.read(files)
    assert not read.done() and read.outcomes == ()
    may_read.set()
    read.wait()
    assert read.done()
    assert list(read.outcomes) == [Loaded(FORMAT.nbytes)] * 2
    assert read.seconds > 0
    assert readers.has(computed, TABLE)


def test_of_a_chunk_in_part_the_rest_of_its_blocks_is_left(
    readers: Readers, files: list[FileExtent], computed: list[torch.Tensor]
) -> None:
    read = readers.read(files[1:], CHUNK + TOKENS)
    read.wait()
    assert readers.has(computed, TABLE[3:])
    assert not any(layer[block].any() for layer in readers.blocks for block in TABLE[:3])


def test_outcomes_are_by_chunk(readers: Readers, files: list[FileExtent]) -> None:
    path = Path(files[0].path)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    read = readers.read(files)
    read.wait()
    assert [type(outcome) for outcome in read.outcomes] == [Damaged, Loaded]
    path.unlink()
    read = readers.read(files)
    read.wait()
    assert [type(outcome) for outcome in read.outcomes] == [ReadFailed] * 2


def test_what_raises_on_the_thread_is_a_copy_that_failed(readers: Readers, files: list[FileExtent]) -> None:
    read = readers.read(files[:1])  # for tokens of two chunks
    with pytest.raises(CopyFailed, match="1 files for tokens 0 to"):
        read.wait()
    with pytest.raises(CopyFailed):
        read.done()


def test_without_threads_a_read_fails_and_is_not_made_later(readers: Readers, files: list[FileExtent]) -> None:
    """By then its blocks are another request's."""
    with threads_left(), pytest.raises(CopyFailed):
        readers.read(files).wait()
    readers.read(files[1:], CHUNK).wait()
    assert all(layer[TABLE[2:]].any() for layer in readers.blocks)
    assert not any(layer[TABLE[:2]].any() for layer in readers.blocks)


def test_closing_waits_for_reads(tmp_path: Path, files: list[FileExtent], computed: list[torch.Tensor]) -> None:
    readers = Readers(tmp_path)
    reads = [readers.read(files) for _ in range(3)]
    readers.reader.close()
    assert all(read.done() for read in reads)
    assert readers.has(computed, TABLE)
