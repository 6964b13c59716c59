"""Copies of blocks in C, held to numpy's strided views: drawn layouts that fit their buffers exactly, and ones that do
not fit.

    python -m kv_testing.copy_fuzz LIBRARY SEED ROUNDS      under a compiler's sanitizers
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from kv_core.errors import MisuseError
from kv_cuda.copy.cpu import CopyWay
from kv_cuda.kernels import OTHER, CopyKernels
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kv_testing.codec_fuzz import drawn_words

_AXES: Final = 7
"""Of the engine's memory: layers, blocks, tiles of tokens, tokens, heads, tiles of dims, dims."""
_STRANGE: Final = (-1, 0, 1 << 29, 1 << 31, (1 << 62) + 1)
_WORDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class DrawnCopy:
    """A layout and a copy that needs every byte of its buffers.

    shape, runs: as the C function takes them.
    engine: [layers, blocks, tiles, tokens, heads, tiles of dims, dims], strides of the engine's buffer.
    """

    word: int
    shape: NDArray[np.int64]
    runs: NDArray[np.int64]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    chunk_layer: int
    engine_words: int
    pool_words: int

    def expected(self, engine: NDArray[Any], pool: NDArray[Any], *, to_engine: bool) -> None:
        """The same copy by numpy."""
        word = self.word
        theirs = as_strided(engine[self.offset :], self.sizes, [stride * word for stride in self.strides])
        inside = self.sizes[2:]
        block_words = int(np.prod(inside))
        packed = [int(np.prod(inside[axis + 1 :])) for axis in range(len(inside))]
        for first, block, blocks in self.runs:
            shape = (self.sizes[0], int(blocks), *inside)
            strides = [step * word for step in (self.chunk_layer, block_words, *packed)]
            ours = as_strided(pool[first:], shape, strides)
            run = theirs[:, block : block + blocks]
            if to_engine:
                run[...] = ours
            else:
                ours[...] = run


def drawn_copy(chance: np.random.Generator) -> DrawnCopy:
    """Axes in any order, most often one with tokens or dims innermost, as engines have them."""
    word = int(chance.choice([1, 2, 2, 4, 4, 8]))
    in_pairs = word == 2 and chance.random() < 0.3  # of tokens, as matrix units have them
    most = (3, 5, 3, 2 if in_pairs else 40, 4, 3, 40)
    sizes = tuple(int(chance.integers(1, limit + 1)) for limit in most)
    order = list(chance.permutation(_AXES))
    if (innermost := 3 if in_pairs else int(chance.choice([-1, 3, 6]))) >= 0:
        order.remove(innermost)
        order.append(innermost)
        if in_pairs or chance.random() < 0.5:  # heads, tiles and blocks around it, as a paged cache is
            order = [0, 1, 4, 2, 5, 9 - innermost, innermost]
    strides, step = [0] * _AXES, 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * sizes[axis] + int(chance.integers(0, 3)) * (chance.random() < 0.3)
    offset = int(chance.integers(0, 4))
    pairs = [number for axis in range(2, _AXES) for number in (sizes[axis], strides[axis])]
    block_words = int(np.prod(sizes[2:]))
    runs, first, block = [], int(chance.integers(0, 5)), 0
    while block < sizes[1]:
        blocks = int(chance.integers(1, sizes[1] - block + 1))
        runs.append((first, block, blocks))
        first, block = first + blocks * block_words, block + blocks
    chunk_layer = first + int(chance.integers(0, 3))
    return DrawnCopy(
        word=word,
        shape=np.array([word, offset, sizes[0], strides[0], chunk_layer, strides[1], *pairs], np.int64),
        runs=np.array(runs, np.int64),
        sizes=sizes,
        strides=tuple(strides),
        offset=offset,
        chunk_layer=chunk_layer,
        engine_words=offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1,
        pool_words=first + (sizes[0] - 1) * chunk_layer,
    )


def wrong_copies(kernels: CopyKernels, seed: int, rounds: int) -> list[str]:
    """What was copied otherwise than by numpy, and what should have been refused or left alone and was not."""
    chance, wrong = np.random.default_rng(seed), []
    for number in range(rounds):
        drawn = drawn_copy(chance)
        kind = _WORDS[drawn.word]
        sizes = (drawn.engine_words * drawn.word, drawn.pool_words * drawn.word)
        engine, pool = (chance.integers(0, 256, nbytes, dtype=np.uint8) for nbytes in sizes)
        for way in CopyWay:
            made, expected = [engine.copy(), pool.copy()], [engine.copy().view(kind), pool.copy().view(kind)]
            kernels.call("copy_blocks", way, drawn.shape, drawn.runs, *made)
            drawn.expected(*expected, to_engine=way != CopyWay.TO_CHUNKS)
            if any(one.tobytes() != other.tobytes() for one, other in zip(made, expected, strict=True)):
                wrong.append(f"{number}: other bytes, {way.name}: {drawn}")
            for short in ((engine[:-1], pool), (engine, pool[:-1])):
                made = [one.copy() for one in short]
                if not _refused(kernels, "copy_blocks", way, drawn.shape, drawn.runs, *made):
                    wrong.append(f"{number}: a buffer that is too small was accepted: {drawn}")
                elif any(one.tobytes() != other.tobytes() for one, other in zip(made, short, strict=True)):
                    wrong.append(f"{number}: something was copied before it was refused: {drawn}")
        for unknown in (-1, len(CopyWay)):
            if not _refused(kernels, "copy_blocks", unknown, drawn.shape, drawn.runs, engine.copy(), pool.copy()):
                wrong.append(f"{number}: there is no way {unknown}: {drawn}")
        for place in range(drawn.shape.size + drawn.runs.size):  # whatever the answer, within the buffers
            bent = np.concatenate([drawn.shape, drawn.runs.reshape(-1)])
            bent[place] = chance.choice([*_STRANGE, bent[place] + 1])
            shape, runs = bent[: drawn.shape.size].copy(), bent[drawn.shape.size :].copy()
            _refused(kernels, "copy_blocks", CopyWay(place % len(CopyWay)), shape, runs, engine.copy(), pool.copy())
    return wrong


def wrong_lists(kernels: CopyKernels, seed: int, rounds: int) -> list[str]:
    """What `submit` lists otherwise than it should, and sizes that it accepts although they do not fit."""
    chance, wrong = np.random.default_rng(seed), []
    for number in range(rounds):
        size = int(chance.integers(1, 9))
        step, most_blocks = size * int(chance.integers(1, 4)), 60
        free_blocks, free_chunks = (chance.permutation(count).tolist() for count in (most_blocks, 12))
        moves, tables, offsets, expected = [], [], [], []
        for _ in range(int(chance.integers(1, 4))):
            chunks, from_chunk = int(chance.integers(1, 4)), int(chance.integers(0, 3))
            end = (from_chunk + chunks) * step
            first, last = from_chunk * step + int(chance.integers(0, step)), end - int(chance.integers(0, step))
            blocks = -(-last // size) - from_chunk * step // size
            if first >= last or blocks > len(free_blocks):
                continue
            table, free_blocks = free_blocks[:blocks], free_blocks[blocks:]
            places, free_chunks = [64 * chunk for chunk in free_chunks[:chunks]], free_chunks[chunks:]
            moves += [first, last, 1]
            tables += table
            offsets += places
            expected += [*table, *(place + (1 << 40) for place in places)]
        place = np.array([step, size, most_blocks, 1 << 40, 64 * 12, 64, 64], np.int64)
        written, listed = np.zeros((most_blocks + 7) // 8, np.uint8), np.zeros(len(expected), np.int64)
        of_moves = np.array(moves, np.int64), np.array(tables, np.int32), np.array(offsets, np.int64)
        nothing = np.zeros(0, np.int64)  # no device, so no more than the lists
        arrays: list[NDArray[Any]] = [place, *of_moves, written, listed, nothing, nothing, nothing]
        if kernels.call("submit", *arrays) != 0:
            wrong.append(f"{number}: they were not listed: {arrays}")
        if listed.tolist() != expected:
            wrong.append(f"{number}: they were listed otherwise: {arrays}")
        if moves and kernels.call("submit", *arrays) != OTHER:
            wrong.append(f"{number}: blocks are written twice: {arrays}")
        for short in range(6 if moves else 0):
            bent = [one.copy() for one in arrays]
            bent[short] = bent[short][:-1].copy()
            bent[4][:] = 0
            if not _refused(kernels, "submit", *bent):
                wrong.append(f"{number}: array {short} is too short: {bent}")
        for at in (2, 4, 5) if moves else ():
            bent = [one.copy() for one in arrays]
            bent[0][at] = -(1 << 63)
            if not _refused(kernels, "submit", *bent):
                wrong.append(f"{number}: a count or size is negative: {bent}")
        for array, at in [(0, at) for at in range(place.size)] + [(1, at) for at in range(len(moves))]:
            bent = [one.copy() for one in arrays]  # whatever the answer, within the buffers
            bent[array][at] = chance.choice([*_STRANGE, bent[array][at] + 1])
            _refused(kernels, "submit", *bent)
    return wrong


def _refused(kernels: CopyKernels, name: str, *arguments: int | NDArray[Any]) -> bool:
    try:
        kernels.call(name, *arguments)
    except MisuseError:
        return True
    return False


def misfits(kernels: CopyKernels) -> list[str]:
    """What the functions of `int8` accept although sizes do not fit each other."""
    chance, accepted = np.random.default_rng(3), []
    # Planes, tokens, heads, numbers of a head, tokens that are kept, and the range that is wanted.
    shape, numbers, channels = np.array([2, 9, 3, 7, 4, 2, 8], np.int64), 2 * 9 * 21, 21
    plane_bytes = 9 * 21 + 4 * 9 * 3 + 2 * 4 * 21 + 24
    chunk, scratch = chance.integers(0, 256, 2 * plane_bytes, dtype=np.uint8), np.zeros(6 * channels, np.uint8)
    calls: dict[str, tuple[NDArray[Any], ...]] = {
        "quantise": (shape, drawn_words(chance, numbers), np.zeros_like(chunk), scratch),
        "dequantise": (shape, chunk, np.zeros(numbers, "<u2"), scratch),
    }
    shapes = [(at, size) for at in range(7) for size in (-1, 1 << 40)] + [(4, 9), (5, 9), (6, 10)]
    for name, arguments in calls.items():
        kernels.call(name, *arguments)
        bent = []
        for place, one in enumerate(arguments):
            for other in (one[:-1].copy(), one[: one.size // 2].copy(), np.resize(one, one.size + 1)):
                bent.append((*arguments[:place], other, *arguments[place + 1 :]))
        for place, wrong in shapes:
            other = shape.copy()
            other[place] = wrong
            bent.append((other, *arguments[1:]))
        for number, these in enumerate(bent):
            try:
                kernels.call(name, *these)
                accepted.append(f"{name}: {number}")
            except MisuseError:
                continue
    return accepted


if __name__ == "__main__":
    library, seed, rounds = sys.argv[1:]
    kernels = CopyKernels(Path(library))
    found = [*wrong_copies(kernels, int(seed), int(rounds)), *wrong_lists(kernels, int(seed), int(rounds))]
    sys.stdout.write("\n".join(found))
