"""Payloads of `floats` and `progressive` as an attacker who may write to a tier makes them, and what becomes of them.

Payloads of `progressive` have checksums, so whatever is changed in them gets the right ones again. Everything that
comes out goes into one digest: the same from all kernels, or they do not mean the same. `python -m
kv_testing.codec_fuzz LIBRARY SEED ROUNDS` does it with kernels of a library of one's own, such as one that was
compiled with sanitizers, which end the process where it touches what it must not.
"""

import sys
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from kv_codecs.floats import FloatsCodec
from kv_codecs.kernels import ALL_MISSING, SCALED_NUMBERS, Bytes, CompiledKernels, Cut, Words, packed_room
from kv_codecs.progressive import HEAD, HEAD_BYTES, PARTS, VERSION, ProgressiveCodec
from kv_core.errors import MisuseError
from kv_tiers.chunk_header import seal
from kv_tiers.codec import CodecError

SPECIAL: Final = (
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x007F,
    0x0080,
    0x7F80,
    0xFF80,
    0x7FC1,
    0xFFFF,
    0x7F7F,
    0xFF7F,
    0x0400,
)
"""bfloat16: zeros, subnormals, infinities, no numbers, the largest."""


def drawn_words(chance: np.random.Generator, count: int, special: int = 0) -> Words:
    """bfloat16 numbers as keys and values are, each channel of 64 with a width of its own, and special ones among
    them."""
    widths = np.exp(chance.normal(0, 1, 64)).astype(np.float32)
    values = chance.normal(0, 1, count).astype(np.float32) * np.resize(widths, count)
    words = (values.view(np.uint32) >> 16).astype("<u2")
    if count:
        words[chance.integers(0, count, special)] = chance.choice(np.array(SPECIAL, "<u2"), special)
    return words


def sealed_again(parts: list[bytes], chunk_bytes: int) -> bytes:
    """A payload of `progressive` with these parts, all checksums right."""
    sums = [xxhash.xxh3_64_intdigest(part) for part in parts]
    return seal(HEAD.pack(VERSION, chunk_bytes, *map(len, parts), *sums)) + b"".join(parts)


def parts_of(payload: bytes) -> list[bytes]:
    """The parts of a payload of `progressive`."""
    sizes = HEAD.unpack(payload[: HEAD.size])[2 : 2 + PARTS]
    ends = HEAD_BYTES + np.cumsum(sizes)
    return [payload[int(end) - size : int(end)] for end, size in zip(ends, sizes, strict=True)]


def spoilt(data: bytes, chance: np.random.Generator) -> bytes:
    """Cut, prolonged, with flipped bits or with other bytes in some places."""
    changed = bytearray(data)
    match int(chance.integers(0, 4)):
        case 0:
            del changed[int(chance.integers(0, len(changed) + 1)) :]
        case 1:
            changed += chance.bytes(int(chance.integers(1, 20)))
        case 2:
            for _ in range(int(chance.integers(1, 5))):
                if changed:
                    changed[int(chance.integers(0, len(changed)))] ^= 1 << int(chance.integers(0, 8))
        case _:
            at = int(chance.integers(0, len(changed) + 1))
            changed[at : at + 8] = chance.bytes(len(changed[at : at + 8]))
    return bytes(changed)


def outcomes(kernels: CompiledKernels, seed: int, rounds: int) -> str:
    """A digest of everything that these kernels computed for this many chunks and their mutated payloads."""
    chance, digest = np.random.default_rng(seed), xxhash.xxh3_128()
    floats, progressive = FloatsCodec(kernels), ProgressiveCodec(kernels)
    for _ in range(rounds):
        words = drawn_words(chance, int(chance.integers(0, 9000)), int(chance.integers(0, 100)))
        chunk = words.tobytes() + chance.bytes(int(chance.integers(0, 4)))
        for codec in (floats, progressive):
            room = memoryview(bytearray(len(chunk) + 64))
            size = codec.encode(memoryview(chunk), room)
            if size is None:
                continue
            payload = bytes(room[:size])
            digest.update(payload)
            for _ in range(4):
                if codec is progressive:
                    parts = parts_of(payload)
                    which = int(chance.integers(0, PARTS))
                    parts[which] = spoilt(parts[which], chance)
                    changed = sealed_again(parts, len(chunk))
                else:
                    changed = spoilt(payload, chance)
                _decode(codec, changed, len(chunk), digest)
                _decode(codec, changed, len(chunk) + int(chance.integers(-600, 600)), digest)
            if codec is progressive:
                for _ in range(3):
                    _decode_prefix(progressive, payload[: int(chance.integers(0, size + 1))], len(chunk), digest)
    return digest.hexdigest()


def _decode(codec: FloatsCodec | ProgressiveCodec, payload: bytes, nbytes: int, digest: "xxhash.xxh3_128") -> None:
    out = bytearray(max(0, nbytes))
    try:
        codec.decode(memoryview(payload), memoryview(out))
        digest.update(bytes(out))
    except CodecError as error:
        digest.update(str(error).encode())


def _decode_prefix(codec: ProgressiveCodec, prefix: bytes, nbytes: int, digest: "xxhash.xxh3_128") -> None:
    out = bytearray(nbytes)
    try:
        digest.update(b"%d" % codec.decode_prefix(memoryview(prefix), memoryview(out)))
        digest.update(bytes(out))
    except CodecError as error:
        digest.update(str(error).encode())


def misfits(kernels: CompiledKernels) -> list[str]:
    """Calls with an array of a size that does not fit the others, and that were not refused."""
    accepted = []
    n = 4 * SCALED_NUMBERS
    chance = np.random.default_rng(1)
    words, marks = drawn_words(chance, n), np.zeros(n, np.uint8)
    marks[::7] = 5
    marked = int(np.count_nonzero(marks == 5))
    missing = chance.integers(0, 9, n, dtype=np.uint8)
    empty, cut = np.zeros(n, "<u2"), Cut.empty(n)
    counts = np.zeros(3, np.int64)
    longs, _, whole = kernels.cut(words, 0, cut)
    packed, lists = kernels.pack(words, cut.missing, _bytes(packed_room(n))), (cut.long_codes[:longs], _words(n))
    stored = kernels.select(words, cut.missing, ALL_MISSING, whole)
    restored = (cut.exponents, cut.signs, cut.codes, *lists, cut.nibbles, stored, packed, empty, np.zeros(4, np.int64))
    calls: dict[str, tuple[Words | int, ...]] = {
        "split": (1, words, _bytes(n), _bytes(n)),
        "join": (1, _bytes(n), _bytes(n), empty),
        "cut": (0, words, *Cut.empty(n), counts),
        "restore": (3, *restored),
        "pack": (words, missing, _bytes(packed_room(n))),
        "select": (5, words, marks, _words(marked)),
        "histogram": (_bytes(n), np.zeros(256, np.int64)),
    }
    of_any_number = {("histogram", 0), *(("restore", place) for place in (4, 5, 7, 8))}
    for name, arguments in calls.items():
        kernels.call(name, *arguments)
        for place, one in enumerate(arguments):
            if isinstance(one, int) or (name, place) in of_any_number:
                continue
            for other in (one[:-1].copy(), one[: one.size // 2].copy(), np.resize(one, one.size + 1)):
                try:
                    kernels.call(name, *arguments[:place], other, *arguments[place + 1 :])
                except MisuseError:
                    continue
                accepted.append(f"{name}, array {place} of {other.nbytes} bytes instead of {one.nbytes}")
    for kind in (0, 4, -1, 1 << 40):
        try:
            kernels.call("split", kind, words, _bytes(n), _bytes(n))
            accepted.append(f"split of kind {kind}")
        except MisuseError:
            continue
    return accepted


def _bytes(count: int) -> Bytes:
    return np.zeros(count, np.uint8)


def _words(count: int) -> Words:
    return np.zeros(count, "<u2")


if __name__ == "__main__":
    library, seed, rounds = sys.argv[1:]
    sanitized = CompiledKernels(Path(library))
    sys.stdout.write("\n".join([outcomes(sanitized, int(seed), int(rounds)), *misfits(sanitized)]))
