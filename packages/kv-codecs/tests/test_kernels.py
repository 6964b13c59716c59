"""Compiled kernels and numpy's: the same bytes from both, whatever the numbers and whatever a payload says; and no
access beyond a buffer, under the compiler's sanitizers."""

import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_codecs import kernels as kernels_module
from kv_codecs.floats import FloatsCodec
from kv_codecs.kernels import (
    ALL_MISSING,
    ESCAPED,
    ESCAPED_CODE,
    LEAST_EXPONENT,
    LIBRARY,
    LONG_CODE,
    MOST_EXPONENT,
    SCALED_NUMBERS,
    SECTION_NUMBERS,
    SOURCES,
    Bytes,
    CompiledKernels,
    Cut,
    Known,
    installed_kernels,
    packed_room,
)
from kv_codecs.progressive import ProgressiveCodec
from kv_core.errors import ConfigError, MisuseError
from kv_testing.codec_fuzz import drawn_words, misfits, outcomes
from kv_testing.kvtc_fuzz import kvtc_outcomes
from kv_testing.numpy_kernels import NumpyKernels, kernels_here
from kv_testing.sanitized import COMPILER, FLAGS, WITHIN_S, compile_sanitized, needs_compiler, run_sanitized
from kv_tiers.codec import Codec, CodecError

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.bfloat16"))
NUMPY = NumpyKernels()
SEEDS = st.integers(0, 2**32 - 1)
BLOCKS = st.one_of(st.integers(1, 9), st.just(SECTION_NUMBERS // SCALED_NUMBERS))
needs_compiled = pytest.mark.skipif(installed_kernels() is None, reason="there is no C compiler: none were compiled")


@pytest.fixture
def compiled() -> CompiledKernels:
    found = installed_kernels()
    assert found is not None
    return found


def test_where_there_is_a_compiler_the_codecs_run_what_it_made_of_this_source() -> None:
    assert [kernels.name for kernels in kernels_here()] == (["compiled", "numpy"] if COMPILER else ["numpy"])
    if COMPILER:
        found = installed_kernels()
        assert found is not None
        sources = b"".join(source.read_bytes() for source in SOURCES)
        assert found.source_checksum == zlib.crc32(sources), f"{LIBRARY} is old: install kv-codecs again"
        assert FloatsCodec().kernels.name == ProgressiveCodec().kernels.name == "compiled"


@pytest.mark.parametrize("library", ["absent", "of another processor", "of another version"])
def test_a_library_that_cannot_be_used_leaves_floats_in_numpy(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / LIBRARY.name
    if library == "of another processor":
        path.write_bytes(b"\x7fELF" + bytes(200))
    elif library == "of another version":
        if not COMPILER:
            pytest.skip("there is no C compiler")
        for source in SOURCES:
            text = source.read_text().replace("#define KV_VERSION ", "#define KV_VERSION 99")
            (tmp_path / source.name).write_text(text)
        subprocess.run(
            [COMPILER, *FLAGS, "-o", path, tmp_path / "kernels.c"], check=True, timeout=60
        )  # has the version
    monkeypatch.setattr(kernels_module, "LIBRARY", path)
    installed_kernels.cache_clear()
    try:
        assert FloatsCodec().kernels.name == "numpy"
        with pytest.raises(ConfigError, match=r"codec progressive needs kernels in C.*install a C compiler"):
            ProgressiveCodec()
    finally:
        installed_kernels.cache_clear()
    assert bool(caplog.records) == (library != "absent")


def unset(n: int) -> Cut:
    """Arrays for n numbers, all bytes the same."""
    return Cut(*(np.full_like(array, 0xA5) for array in Cut.empty(n)))


@needs_compiled
@settings(deadline=None, max_examples=100)
@given(seed=SEEDS, blocks=BLOCKS, offset=st.integers(0, 1023))
def test_numbers_are_cut_and_put_together_alike(seed: int, blocks: int, offset: int) -> None:
    """Drawn ones, special ones, and any bits at all; and put together from any bytes."""
    compiled = installed_kernels()
    assert compiled is not None
    chance, n = np.random.default_rng(seed), blocks * SCALED_NUMBERS
    words = drawn_words(chance, n, n // 20) if seed % 3 else chance.integers(0, 1 << 16, n, dtype=np.uint16)
    cuts = []
    for kernels in (NUMPY, compiled):
        made = unset(n)
        longs, escaped, whole = kernels.cut(words, offset, made)
        cuts.append(
            [
                *made._replace(long_codes=made.long_codes[:longs]),
                kernels.pack(words, made.missing, np.empty(packed_room(n), np.uint8)),
                kernels.select(words, made.missing, ESCAPED, escaped),
                kernels.select(words, made.missing, ALL_MISSING, whole),
                kernels.histogram(made.codes),
            ]
        )
    for one, other in zip(*cuts, strict=True):
        assert np.array_equal(one, other)
    steps, signs, codes, long_codes, nibbles, missing, packed, escapes, wholes, _ = cuts[0]
    assert packed.size == (int(np.where(missing < ALL_MISSING, missing, 0).sum(dtype=np.int64)) + 7) // 8
    for kernels in (NUMPY, compiled):
        restored = np.empty(n, "<u2")
        known = Known(steps, signs, codes, long_codes, escapes, nibbles, wholes, packed)
        used = kernels.restore(3, known, restored)
        assert used == (long_codes.size, escapes.size, wholes.size, packed.size)
        assert np.array_equal(restored, words)


@needs_compiled
@settings(deadline=None, max_examples=100)
@given(
    seed=SEEDS, blocks=st.one_of(BLOCKS, st.just(2 * SECTION_NUMBERS // SCALED_NUMBERS + 3)), parts=st.integers(1, 3)
)
def test_numbers_are_put_together_alike_from_any_bytes(seed: int, blocks: int, parts: int) -> None:
    """Of several sections too, and with too few long codes, numbers that are stored unchanged, and packed bits."""
    compiled = installed_kernels()
    assert compiled is not None
    chance, n = np.random.default_rng(seed), blocks * SCALED_NUMBERS

    def drawn(count: int) -> Bytes:
        return chance.integers(0, 256, count, dtype=np.uint8)

    def some(*shares: int) -> int:
        """A number of numbers: all, or one of so many."""
        return n // int(chance.choice(shares))

    codes = drawn(n // 2)
    known = Known(
        exponents=chance.integers(LEAST_EXPONENT, MOST_EXPONENT + 1, n // SCALED_NUMBERS, dtype=np.uint8),
        signs=drawn(n // 8),
        codes=codes if seed % 2 else codes & drawn(n // 2),  # with more zeros
        long_codes=chance.integers(LONG_CODE, ESCAPED_CODE + 1, some(1, 4, 16), dtype=np.uint8),
        escaped=drawn(2 * some(1, 128)).view("<u2"),
        nibbles=drawn(n // 2 if parts > 1 else 0),
        whole=drawn(2 * some(1, 64) if parts > 2 else 0).view("<u2"),
        packed=drawn(some(1, 3) if parts > 2 else 0),
    )
    both: list[tuple[object, bytes]] = []
    for kernels in (NUMPY, compiled):
        restored = np.empty(n, "<u2")
        try:
            both.append((kernels.restore(parts, known, restored), restored.tobytes()))
        except CodecError as error:
            both.append((str(error), b""))
    assert both[0] == both[1]


@needs_compiled
@settings(deadline=None, max_examples=100)
@given(seed=SEEDS, n=st.one_of(st.integers(0, 600), st.just(SECTION_NUMBERS)), kind=st.sampled_from([1, 2, 3]))
def test_numbers_are_taken_apart_alike_at_any_address(seed: int, n: int, kind: int) -> None:
    compiled = installed_kernels()
    assert compiled is not None
    word = np.dtype("<u4" if kind == 3 else "<u2")
    raw = np.random.default_rng(seed).bytes(n * word.itemsize + 1)
    words = np.frombuffer(raw, word, n, seed % 2)  # at an odd address, perhaps
    split = []
    for kernels in (NUMPY, compiled):
        coded, rest = np.empty(n, np.uint8), np.empty(n * (word.itemsize - 1), np.uint8)
        kernels.split(kind, words, coded, rest)
        back = np.empty(n, word)
        kernels.join(kind, coded, rest, back)
        assert np.array_equal(back, words)
        split.append((coded.tobytes(), rest.tobytes()))
    assert split[0] == split[1]


@needs_compiled
@settings(deadline=None, max_examples=200)
@given(seed=SEEDS, n=st.integers(0, 600), marks=st.integers(1, 20))
def test_marked_numbers_are_selected_alike_at_any_length(seed: int, n: int, marks: int) -> None:
    compiled = installed_kernels()
    assert compiled is not None
    random = np.random.default_rng(seed)
    words, marked = np.frombuffer(random.bytes(2 * n), "<u2"), random.integers(0, marks, n, np.uint8)
    count = int(np.count_nonzero(marked == 0))
    for kernels in (NUMPY, compiled):
        assert np.array_equal(kernels.select(words, marked, 0, count), words[marked == 0])


@needs_compiled
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("codec", [FloatsCodec, ProgressiveCodec], ids=lambda codec: codec.name)
def test_payloads_of_real_keys_and_values_are_the_same_bytes(
    path: Path, codec: type[FloatsCodec] | type[ProgressiveCodec], compiled: CompiledKernels
) -> None:
    chunk = path.read_bytes()
    payloads = [encoded(codec(kernels), chunk) for kernels in (NUMPY, compiled)]
    assert payloads[0] == payloads[1]
    for kernels in (NUMPY, compiled):
        decoded = bytearray(len(chunk))
        codec(kernels).decode(memoryview(payloads[0]), memoryview(decoded))
        assert decoded == chunk


def encoded(codec: Codec, chunk: bytes) -> bytes:
    out = memoryview(bytearray(len(chunk)))
    size = codec.encode(memoryview(chunk), out)
    assert size is not None
    return bytes(out[:size])


@needs_compiled
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_what_becomes_of_damaged_payloads_is_the_same_too(seed: int) -> None:
    compiled = installed_kernels()
    assert compiled is not None
    assert outcomes(compiled, seed, 2) == outcomes(NUMPY, seed, 2)


@needs_compiled
def test_arrays_whose_sizes_do_not_fit_are_refused(compiled: CompiledKernels) -> None:
    assert misfits(compiled) == []
    with pytest.raises(MisuseError, match="kernel split"):
        compiled.split(1, np.zeros(4, "<u2"), np.zeros(4, np.uint8), np.zeros(5, np.uint8))


@pytest.fixture(scope="module")
def expected_of() -> dict[str, list[str]]:
    """Numpy's outcomes, by the module of fuzz."""
    return {"codec_fuzz": [outcomes(NUMPY, 11, 40)], "kvtc_fuzz": [kvtc_outcomes(NUMPY, 11, 40)]}


HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()


@pytest.mark.slow
@pytest.mark.timeout(2 * WITHIN_S)
@needs_compiler
@pytest.mark.parametrize("variant", ["-DKV_ONE_VERSION", *["-DKV_NO_AVX512"] * HAS_AVX512, "-DKV_PORTABLE"])
def test_no_access_is_beyond_a_buffer_nor_undefined(
    variant: str, expected_of: dict[str, list[str]], tmp_path: Path
) -> None:
    """A library with sanitizers, in a process that they end where it errs, and the same outcomes from it: with what
    this processor has, without its AVX-512, and without any of it."""
    environ = compile_sanitized(SOURCES, tmp_path / LIBRARY.name, variant)
    library = tmp_path / LIBRARY.name
    for fuzz, expected in expected_of.items():
        assert run_sanitized(f"kv_testing.{fuzz}", library, environ) == expected
