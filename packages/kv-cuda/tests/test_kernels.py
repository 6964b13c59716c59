"""Copies and formats in C: the bytes that numpy and torch make, and no access beyond a buffer, also under
sanitizers and on an emulated processor of another kind."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cuda import kernels as kernels_module
from kv_cuda.kernels import LIBRARY, SOURCES, CopyKernels, installed_kernels
from kv_testing.codec_fuzz import drawn_words
from kv_testing.copy_fuzz import misfits, wrong_copies, wrong_lists
from kv_testing.emulated import EmulatedLibrary, needs_emulator
from kv_testing.sanitized import COMPILER, WITHIN_S, compile_sanitized, needs_compiler, run_sanitized

needs_compiled = pytest.mark.skipif(installed_kernels() is None, reason="there is no C compiler: none were compiled")


@needs_compiler
def test_where_there_is_a_compiler_copies_run_what_it_made_of_this_source() -> None:
    found = installed_kernels()
    assert found is not None and COMPILER
    sources = b"".join(source.read_bytes() for source in SOURCES)
    assert found.source_checksum == zlib.crc32(sources), f"{LIBRARY} is old: install kv-cuda again"


@pytest.mark.parametrize("library", ["absent", "of another processor"])
def test_a_library_that_cannot_be_used_means_torch(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / LIBRARY.name
    if library == "of another processor":
        path.write_bytes(b"\x7fELF" + bytes(200))
    monkeypatch.setattr(kernels_module, "LIBRARY", path)
    installed_kernels.cache_clear()
    try:
        assert installed_kernels() is None
    finally:
        installed_kernels.cache_clear()
    assert bool(caplog.records) == (library != "absent")


@needs_compiled
@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_blocks_are_copied_as_numpy_copies_them_or_not_at_all(seed: int) -> None:
    """Into buffers of just the size they need, and refused where one lacks a byte."""
    compiled = installed_kernels()
    assert compiled is not None
    assert wrong_copies(compiled, seed, 1) == []
    assert wrong_lists(compiled, seed, 4) == []
    assert misfits(compiled) == []


@pytest.mark.slow
@pytest.mark.timeout(2 * WITHIN_S)
@needs_compiler
def test_no_access_is_beyond_a_buffer_nor_undefined(tmp_path: Path) -> None:
    environ = compile_sanitized(SOURCES, tmp_path / LIBRARY.name)
    assert run_sanitized("kv_testing.copy_fuzz", tmp_path / LIBRARY.name, environ) == []


class EmulatedKernels(EmulatedLibrary, CopyKernels):
    """The functions on another processor."""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedKernels]:
    kernels = EmulatedKernels(SOURCES, tmp_path_factory.mktemp("emulated"), "-DKV_COPIES")
    yield kernels
    kernels.close()


@pytest.mark.slow
@needs_emulator
def test_blocks_are_copied_there_as_numpy_copies_them_or_not_at_all(emulated: EmulatedKernels) -> None:
    assert wrong_copies(emulated, 11, 40) == []
    assert wrong_lists(emulated, 11, 40) == []
    assert misfits(emulated) == []


@pytest.mark.slow
@needs_emulator
@pytest.mark.parametrize("seed", range(4))
def test_int8_is_the_same_as_on_this_processor(seed: int, emulated: EmulatedKernels) -> None:
    """Where test_quantise.py holds it to torch's operations."""
    here = installed_kernels()
    if here is None:
        pytest.skip("there is no C compiler: none were compiled")
    planes, tokens, heads, dim, exact = 2, 48 + seed, 3, 64 - seed, 4
    shape = np.array([planes, tokens, heads, dim, exact, 5, tokens - seed], np.int64)
    words = drawn_words(np.random.default_rng(seed), planes * tokens * heads * dim)
    plane_bytes = tokens * heads * (dim + 4) + 2 * exact * heads * dim + (heads * dim + 3) // 4 * 4
    made = []
    for kernels in (here, emulated):
        chunk, scratch = np.zeros(planes * plane_bytes, np.uint8), np.empty(6 * heads * dim, np.uint8)
        peak = kernels.call("quantise", shape, words, chunk, scratch)
        back = np.zeros_like(words)
        kernels.call("dequantise", shape, chunk, back, scratch)
        assert np.count_nonzero(back)
        made.append((peak, chunk.tobytes(), back.tobytes()))
    assert made[0] == made[1]
