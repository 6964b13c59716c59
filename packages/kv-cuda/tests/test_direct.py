"""Chunks between files and blocks by two paths: the same bytes, and what the direct one does wrong ends in the other.

The direct path is tested with real files and real reads past the cache: cuFile's part is taken by the host's own files,
whose memory is the "device's" here, and which fail as they are told to.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kv_core.errors import CopyFailed, InputError
from kv_core.format import ChunkFormat
from kv_core.hashing import checksum_of
from kv_core.outcome import Damaged, Loaded, ReadFailed
from kv_core.transfer import FileExtent, HostExtent, TransferPlan, plan_transfer
from kv_cuda import make_copier
from kv_cuda.copy.copy_paths import FileCopyPaths
from kv_cuda.copy.gpu import GpuCopier
from kv_cuda.files.cufile import CuFiles, NoCuFile, find_cufile
from kv_cuda.files.direct import Carried, DirectCopier, make_direct_copier
from kv_cuda.files.host_files import Files, HostFiles, OpenFile, Transfer
from kv_testing.layouts import BLOCKS, TOKENS, small_caches
from kv_testing.threads import threads_left

CACHE = small_caches()["NHD, K‖V"]
CHUNK = 2 * TOKENS
FORMAT = CACHE.layout.canonical_format(CHUNK)
SLOT = 4096 * (1 + -(-FORMAT.nbytes // 4096))
"""As the disk tier has them: a page, then the chunk's."""
CPU = torch.device("cpu")
TABLE = [5, 0, 3, 6, 1, 2]
"""Three chunks."""
MISSING = NoCuFile("no GPU in a test", "")


class Broken:
    """The host's files, until they are told to fail."""

    def __init__(self) -> None:
        self.real = HostFiles()
        self.reads = 0
        self.registered: list[int] = []
        self.on_open: Callable[[], None] = lambda: None
        self.on_begin: Callable[[], None] = lambda: None
        self.on_end: Callable[[int, torch.Tensor], int] = lambda moved, memory: moved

    def open(self, path: str) -> OpenFile:
        self.on_open()
        return _BrokenFile(self, self.real.open(path))

    def register(self, memory: torch.Tensor) -> None:
        self.registered.append(memory.data_ptr())

    def unregister(self, memory: torch.Tensor) -> None:
        self.registered.remove(memory.data_ptr())

    def close(self) -> None:
        self.real.close()


class _BrokenFile:
    def __init__(self, files: Broken, real: OpenFile) -> None:
        self.files, self.real = files, real

    def read(self, memory: torch.Tensor, offset: int) -> Transfer:
        self.files.reads += 1
        self.files.on_begin()
        return _BrokenTransfer(self.files, self.real.read(memory, offset), memory)

    def close(self) -> None:
        self.real.close()


class _BrokenTransfer:
    def __init__(self, files: Broken, real: Transfer, memory: torch.Tensor) -> None:
        self.files, self.real, self.memory = files, real, memory

    def wait(self) -> int:
        return self.files.on_end(self.real.wait(), self.memory)


def eio() -> None:
    raise OSError(errno.EIO, "Input/output error")


def spoil(moved: int, memory: torch.Tensor) -> int:
    memory[17] ^= 1
    return moved


def filled(seed: int = 1) -> list[torch.Tensor]:
    tensors = CACHE.make()
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return tensors


class Slab:
    """A file with room for three chunks, as a tier's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(3 * SLOT))

    def flip(self, at: int) -> None:
        data = bytearray(self.path.read_bytes())
        data[at * SLOT + 4096 + 33] ^= 8
        self.path.write_bytes(data)


@pytest.fixture
def slab(tmp_path: Path) -> Slab:
    return Slab(tmp_path / "slab-0000")


@pytest.fixture
def files() -> Broken:
    return Broken()


class Copiers:
    """Copiers by the name of their path, closed in the end."""

    def __init__(self) -> None:
        self.made: list[DirectCopier] = []

    def __call__(
        self, tensors: list[torch.Tensor], cufile: Files | NoCuFile, **settings: FileCopyPaths
    ) -> DirectCopier:
        copier = DirectCopier(GpuCopier(CACHE.layout, tensors, FORMAT), FORMAT, CPU, cufile, **settings)
        self.made.append(copier)
        return copier


@pytest.fixture
def copiers() -> Iterator[Copiers]:
    made = Copiers()
    yield made
    for copier in made.made:
        copier.close()


def load(copier: DirectCopier, extents: list[FileExtent], last_token: int = 3 * CHUNK) -> Carried:
    carried = copier.load(extents, TABLE, block_tokens=TOKENS, first_token=0, last_token=last_token)
    carried.event.wait()
    return carried


def kept(tensors: list[torch.Tensor], slab: Slab) -> list[FileExtent]:
    """The chunks of these tensors in the file, written without any of what is tested."""
    copier = make_copier(CACHE.layout, tensors, FORMAT)
    pool = bytearray(3 * FORMAT.nbytes)
    copier.attach("pool", memoryview(pool))
    extents = [HostExtent("pool", at * FORMAT.nbytes, FORMAT.nbytes) for at in range(3)]
    plan = plan_transfer(extents, TABLE, chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=0, last_token=3 * CHUNK)
    copier.store(plan).wait()
    data = bytearray(slab.path.read_bytes())
    written = []
    for at in range(3):
        chunk = pool[at * FORMAT.nbytes : (at + 1) * FORMAT.nbytes]
        data[at * SLOT + 4096 : at * SLOT + 4096 + FORMAT.nbytes] = chunk
        written.append(FileExtent(str(slab.path), at * SLOT + 4096, FORMAT.nbytes, checksum_of(memoryview(chunk))))
    slab.path.write_bytes(data)
    return written


def same(one: list[torch.Tensor], other: list[torch.Tensor], blocks: list[int]) -> bool:
    return all(torch.equal(mine[blocks], theirs[blocks]) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("copy_path", ["direct", "staged"])
def test_what_is_in_files_is_in_its_blocks_and_in_no_other(slab: Slab, copiers: Copiers, copy_path: str) -> None:
    tensors, empty, counted = filled(), CACHE.make(), Broken()
    carried = load(copiers(empty, counted if copy_path == "direct" else MISSING), kept(tensors, slab))
    assert carried.outcomes == [Loaded(FORMAT.nbytes)] * 3
    assert same(tensors, empty, TABLE)
    assert not any(layer[4].any() for layer in empty), "a block that nobody asked for"
    assert counted.reads == 3 * (copy_path == "direct")


def test_what_has_no_thread_is_moved_by_those_who_wait_and_never_again(slab: Slab, copiers: Copiers) -> None:
    """An executor keeps what it could not start a thread for, and the ring's room is another chunk's later."""
    tensors, empty = filled(), CACHE.make()
    reader, written = copiers(empty, MISSING), kept(tensors, slab)
    with threads_left():
        assert load(reader, written).outcomes == [Loaded(FORMAT.nbytes)] * 3
    assert same(tensors, empty, TABLE)
    slab.path.write_bytes(bytes(3 * SLOT))
    assert [type(outcome) for outcome in load(reader, written).outcomes] == [Damaged] * 3
    assert same(tensors, empty, TABLE)


def test_more_chunks_than_the_ring_holds_take_turns(
    slab: Slab, copiers: Copiers, files: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves of one chunk, so that the first is used again while the last begins."""
    monkeypatch.setattr("kv_cuda.files.direct._MAX_CHUNKS_IN_HALF", 1)
    tensors, empty = filled(), CACHE.make()
    assert load(copiers(empty, files), kept(tensors, slab)).outcomes == [Loaded(FORMAT.nbytes)] * 3
    assert same(tensors, empty, TABLE)


@pytest.mark.parametrize("copy_path", ["direct", "staged"])
def test_of_a_chunk_in_part_only_what_is_asked_for_is_written(slab: Slab, copiers: Copiers, copy_path: str) -> None:
    tensors, empty = filled(), CACHE.make()
    extents = kept(tensors, slab)
    copier = copiers(empty, Broken() if copy_path == "direct" else MISSING)
    carried = copier.load(
        extents[1:], TABLE, block_tokens=TOKENS, first_token=CHUNK + TOKENS, last_token=2 * CHUNK + TOKENS
    )
    carried.event.wait()
    assert carried.outcomes == [Loaded(FORMAT.nbytes)] * 2
    assert same(tensors, empty, [6, 1])
    assert not any(layer[block].any() for layer in empty for block in (5, 0, 3, 2, 4))


FAILURES = {
    "cannot be opened": ("on_open", eio),
    "cannot be begun": ("on_begin", eio),
    "fails": ("on_end", lambda moved, memory: eio()),
    "is short": ("on_end", lambda moved, memory: FORMAT.nbytes - 1),
    "moves nothing": ("on_end", lambda moved, memory: 0),
    "brings wrong bytes": ("on_end", spoil),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_read_that_goes_wrong_is_staged_and_said_once(
    slab: Slab, copiers: Copiers, files: Broken, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    tensors, empty = filled(), CACHE.make()
    extents = kept(tensors, slab)
    copier = copiers(empty, files)
    assert copier.has_direct_path
    name, does = FAILURES[failure]
    setattr(files, name, does)
    with caplog.at_level(logging.WARNING, "kv_cuda.files.direct"):
        for _ in range(3):
            for tensor in empty:
                tensor.zero_()
            assert load(copier, extents).outcomes == [Loaded(FORMAT.nbytes)] * 3
            assert same(tensors, empty, TABLE)
    assert len(caplog.records) == 1
    assert "files are staged through host memory from now on" in caplog.text
    assert files.reads <= 3
    assert not files.registered, "memory that is not used is not kept"
    assert not copier.has_direct_path


def test_a_failure_of_one_chunk_is_that_chunks_alone(slab: Slab, copiers: Copiers, files: Broken) -> None:
    tensors, empty = filled(), CACHE.make()
    extents = kept(tensors, slab)
    moved: list[int] = []

    def second_fails(got: int, memory: torch.Tensor) -> int:
        moved.append(got)
        return 0 if len(moved) == 2 else got

    files.on_end = second_fails
    assert load(copiers(empty, files), extents).outcomes == [Loaded(FORMAT.nbytes)] * 3
    assert same(tensors, empty, TABLE)


@pytest.mark.parametrize("copy_path", ["direct", "staged"])
def test_a_bit_that_flipped_on_the_disk_is_damage_and_reaches_no_block(
    slab: Slab, copiers: Copiers, copy_path: str
) -> None:
    tensors, empty = filled(), CACHE.make()
    extents = kept(tensors, slab)
    slab.flip(1)
    copier = copiers(empty, Broken() if copy_path == "direct" else MISSING)
    carried = load(copier, extents)
    assert [type(outcome) for outcome in carried.outcomes] == [Loaded, Damaged, Loaded]
    assert "the checksum of the bytes at" in str(carried.outcomes[1])
    assert same(tensors, empty, [5, 0, 1, 2])
    assert not any(layer[block].any() for layer in empty for block in (3, 6))
    assert copier.has_direct_path == (copy_path == "direct"), "the path is not to blame for the disk"


@pytest.mark.parametrize("copy_path", ["direct", "staged"])
def test_a_file_that_ends_early_is_damage_and_one_that_is_gone_is_not(
    slab: Slab, copiers: Copiers, copy_path: str
) -> None:
    tensors, empty = filled(), CACHE.make()
    extents = kept(tensors, slab)
    copier = copiers(empty, Broken() if copy_path == "direct" else MISSING)
    os.truncate(slab.path, 2 * SLOT + 4096 + 100)
    assert [type(outcome) for outcome in load(copier, extents).outcomes] == [Loaded, Loaded, Damaged]
    slab.path.unlink()
    carried = load(copier, extents)
    assert [type(outcome) for outcome in carried.outcomes] == [ReadFailed] * 3
    assert "No such file" in str(carried.outcomes[0])


def test_another_file_in_the_place_of_one_that_is_open_is_opened(slab: Slab, copiers: Copiers, files: Broken) -> None:
    empty = CACHE.make()
    copier = copiers(empty, files)
    load(copier, kept(filled(1), slab))
    slab.path.unlink()
    slab.path.write_bytes(bytes(3 * SLOT))
    later = filled(2)
    assert load(copier, kept(later, slab)).outcomes == [Loaded(FORMAT.nbytes)] * 3
    assert same(later, empty, TABLE)
    assert copier.has_direct_path


def test_a_link_is_not_followed(slab: Slab, copiers: Copiers) -> None:
    extents = kept(filled(), slab)
    slab.path.rename(slab.path.with_name("other"))
    slab.path.symlink_to("other")
    carried = load(copiers(CACHE.make(), MISSING), extents)
    assert [type(outcome) for outcome in carried.outcomes] == [ReadFailed] * 3


def test_what_is_not_aligned_is_staged_and_the_path_stays(slab: Slab, copiers: Copiers, files: Broken) -> None:
    tensors, empty = filled(), CACHE.make()
    extents = [replace(extent, offset=extent.offset - 24) for extent in kept(tensors, slab)]
    slab.path.write_bytes(slab.path.read_bytes()[24:] + bytes(24))
    copier = copiers(empty, files)
    assert load(copier, extents).outcomes == [Loaded(FORMAT.nbytes)] * 3
    assert same(tensors, empty, TABLE)
    assert files.reads == 0
    assert copier.has_direct_path


def test_the_path_that_was_measured_to_be_faster_is_taken(slab: Slab, copiers: Copiers) -> None:
    tensors = filled()
    extents = kept(tensors, slab)
    above = str(slab.path.parent)
    for copy_paths, reads in (
        ({}, 3),
        ({above: "staged"}, 0),
        ({"/": "direct"}, 3),
        ({"/": "staged", above: "direct"}, 3),
        ({"/": "direct", above: "staged"}, 0),
    ):
        counted = Broken()
        load(copiers(tensors, counted, copy_paths=FileCopyPaths(copy_paths)), extents)
        assert counted.reads == reads


def test_memory_that_cannot_be_registered_leaves_the_staged_paths(
    slab: Slab, copiers: Copiers, files: Broken, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "register", lambda memory: eio())
    tensors, empty = filled(), CACHE.make()
    copier = copiers(empty, files)
    assert not copier.has_direct_path
    assert "Input/output error" in caplog.text
    assert load(copier, kept(tensors, slab)).outcomes == [Loaded(FORMAT.nbytes)] * 3
    assert same(tensors, empty, TABLE)


def test_a_half_of_the_ring_is_left_alone_until_its_chunk_was_scattered(
    slab: Slab, copiers: Copiers, files: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files know nothing of the device's queues: the host waits for the first chunk before it reads the third."""
    monkeypatch.setattr("kv_cuda.files.direct._MAX_CHUNKS_IN_HALF", 1)
    happened: list[str] = []

    class Scattered:
        def __init__(self, number: int) -> None:
            self.number = number

        def done(self) -> bool:
            return False

        def wait(self) -> None:
            happened.append(f"waited {self.number}")

    class Slow(GpuCopier):
        scatters = 0

        def load(self, plan: TransferPlan) -> Scattered:
            self.scatters += 1
            happened.append(f"scatter {self.scatters}")
            return Scattered(self.scatters)

    files.on_begin = lambda: happened.append(f"read {files.reads}")
    copier = DirectCopier(Slow(CACHE.layout, CACHE.make(), FORMAT), FORMAT, CPU, files)
    copiers.made.append(copier)
    load(copier, kept(filled(), slab))
    assert happened == [
        *("read 1", "read 2", "scatter 1"),
        *("waited 1", "read 3", "scatter 2", "scatter 3"),
        "waited 3",  # the caller
    ]
    happened.clear()
    load(copier, kept(filled(), slab))
    assert happened[:4] == ["waited 3", "read 4", "waited 2", "read 5"]


def test_a_device_that_fails_leaves_no_transfer_behind(
    slab: Slab, copiers: Copiers, files: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the call ends its files are given back, and are somebody else's. The second read is under way then."""
    monkeypatch.setattr("kv_cuda.files.direct._MAX_CHUNKS_IN_HALF", 1)
    extents = kept(filled(), slab)
    ended: list[int] = []

    def note(moved: int, memory: torch.Tensor) -> int:
        ended.append(moved)
        return moved

    class Failing(GpuCopier):
        def load(self, plan: TransferPlan) -> None:
            raise CopyFailed("the device failed")

    files.on_end = note
    copier = DirectCopier(Failing(CACHE.layout, CACHE.make(), FORMAT), FORMAT, CPU, files)
    copiers.made.append(copier)
    with pytest.raises(CopyFailed):
        load(copier, extents)
    assert len(ended) == files.reads == 2


def test_what_does_not_go_together_is_refused(slab: Slab, copiers: Copiers) -> None:
    extents = kept(filled(), slab)
    copier = copiers(CACHE.make(), MISSING)
    with pytest.raises(InputError, match="3 files for tokens 0 to 8, in 1 chunks"):
        load(copier, extents, CHUNK)
    with pytest.raises(InputError, match=r"an extent of 5 bytes for chunks of"):
        load(copier, [replace(extents[0], nbytes=5)], CHUNK)
    with pytest.raises(InputError, match="do not reach token"):
        copier.load(extents, TABLE[:3], block_tokens=TOKENS, first_token=0, last_token=3 * CHUNK)
    with pytest.raises(InputError, match="slots"):
        copier.load(extents[:1], [BLOCKS, 0], block_tokens=TOKENS, first_token=0, last_token=CHUNK)
    assert copier.load([], TABLE, block_tokens=TOKENS, first_token=3, last_token=3).outcomes == []


@pytest.mark.parametrize("kind", ["canonical", "blocks", "int8"])
def test_every_format_goes_by_files(tmp_path: Path, kind: str) -> None:
    """A quantised chunk is checked as it is kept, before it is made exact."""
    layout, tensors, empty = CACHE.layout, filled(), CACHE.make()
    described: ChunkFormat = {
        "canonical": lambda: FORMAT,
        "blocks": lambda: layout.blocks_format(CHUNK, "test"),
        "int8": lambda: layout.quantised_format("int8", CHUNK),
    }[kind]()
    writer, pool = make_copier(layout, tensors, described), bytearray(4096)
    writer.attach("pool", memoryview(pool))
    extents = [HostExtent("pool", 0, described.nbytes)]
    writer.store(
        plan_transfer(extents, TABLE[:2], chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=0, last_token=CHUNK)
    ).wait()
    writer.detach("pool")
    path = tmp_path / "slab-0000"
    path.write_bytes(bytes(4096) + pool)
    checksum = checksum_of(memoryview(pool)[: described.nbytes])
    reader = DirectCopier(make_copier(layout, empty, described), described, CPU, Broken())
    extent = FileExtent(str(path), 4096, described.nbytes, checksum)
    carried = reader.load([extent], TABLE[:2], block_tokens=TOKENS, first_token=0, last_token=CHUNK)
    carried.event.wait()
    assert carried.outcomes == [Loaded(described.nbytes)]
    for mine, theirs in zip(tensors, empty, strict=True):
        tolerance = 0.02 if kind == "int8" else 0.0
        assert torch.allclose(mine[TABLE[:2]], theirs[TABLE[:2]], rtol=0, atol=tolerance * float(mine.abs().max()))
    reader.close()


def test_on_a_cpu_files_are_staged(slab: Slab, copiers: Copiers) -> None:
    tensors, empty = filled(), CACHE.make()
    copier = make_direct_copier(CACHE.layout, empty, FORMAT, slab.path.parent)
    copiers.made.append(copier)
    assert not copier.has_direct_path
    assert load(copier, kept(tensors, slab)).outcomes == [Loaded(FORMAT.nbytes)] * 3
    assert same(tensors, empty, TABLE)


@pytest.mark.gpu
def test_the_gpu_reads_files(tmp_path: Path) -> None:
    """By cuFile where it is here, else staged; either way what the CPU wrote."""
    device = torch.device("cuda", torch.cuda.current_device())
    slab = Slab(tmp_path / "slab-0000")
    tensors, empty = filled(), CACHE.make("cuda")
    expected = kept(tensors, slab)
    reader, found = make_direct_copier(CACHE.layout, empty, FORMAT, tmp_path), find_cufile(device, tmp_path)
    assert isinstance(found, CuFiles | NoCuFile)
    assert reader.has_direct_path == isinstance(found, CuFiles)
    assert load(reader, expected).outcomes == [Loaded(FORMAT.nbytes)] * 3
    assert same(tensors, [layer.cpu() for layer in empty], TABLE)
    assert reader.has_direct_path == isinstance(found, CuFiles)
    reader.close()
