"""The kernels compiled for 64-bit Arm, on an emulated processor: the same bytes as numpy's.

`scripts/setup.sh arm64` installs the cross compiler and the emulator. Without them these tests are skipped.
"""

import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_codecs.compiled_kernels import MISFIT, SOURCES, CompiledKernels, installed_kernels
from kv_codecs.floats import FloatsCodec
from kv_codecs.numpy_kernels import NumpyKernels
from kv_codecs.progressive import ProgressiveCodec
from kv_core.errors import MisuseError
from kv_testing.codec_fuzz import drawn_words, misfits, outcomes
from kv_testing.copy_fuzz import wrong_copies
from kv_testing.kvtc_fuzz import kvtc_misfits, kvtc_outcomes
from numpy.typing import NDArray

HERE = Path(__file__).parent
RECORDED = sorted((HERE / "recorded").glob("*.bfloat16"))
COMPILER = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
REQUEST = struct.Struct("<16sqQ")
NUMPY = NumpyKernels()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (COMPILER and EMULATOR), reason="no cross compiler or no emulator: scripts/setup.sh arm64 installs them"
    ),
]


class EmulatedKernels(CompiledKernels):
    """The kernels in a process of another processor. Arrays are copied there and back."""

    def __init__(self, program: Path) -> None:
        assert EMULATOR
        self._process = subprocess.Popen([EMULATOR, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, name: str, *arguments: int | NDArray[Any]) -> int:
        assert self._process.stdin and self._process.stdout
        number = next((one for one in arguments if isinstance(one, int)), 0)
        arrays = [one for one in arguments if not isinstance(one, int)]
        self._process.stdin.write(REQUEST.pack(name.encode(), number, len(arrays)))
        for array in arrays:
            self._process.stdin.write(struct.pack("<Q", array.nbytes) + array.tobytes())
        self._process.stdin.flush()
        (answer,) = struct.unpack("<q", self._process.stdout.read(8))
        for array in arrays:
            there = np.frombuffer(self._process.stdout.read(array.nbytes), array.dtype).reshape(array.shape)
            if array.flags.writeable:
                array[...] = there
        if answer == MISFIT:
            raise MisuseError(f"kernel {name}: arrays whose sizes do not match")
        return int(answer)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedKernels]:
    assert COMPILER
    program = tmp_path_factory.mktemp("emulated") / "driver"
    flags = [
        "-std=gnu11",
        "-O3",
        "-static",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-ffp-contract=off",
        f"-I{SOURCES[0].parent}",
    ]
    sources = [HERE / "emulated" / "driver.c", *(source for source in SOURCES if source.suffix == ".c")]
    subprocess.run([COMPILER, *flags, "-o", program, *sources], check=True, timeout=60)
    kernels = EmulatedKernels(program)
    yield kernels
    kernels.close()


def test_numbers_and_damaged_payloads_become_the_same(emulated: EmulatedKernels) -> None:
    assert outcomes(emulated, 11, 20) == outcomes(NUMPY, 11, 20)


def test_transformed_numbers_and_their_damaged_payloads_become_the_same(emulated: EmulatedKernels) -> None:
    assert kvtc_outcomes(emulated, 11, 20) == kvtc_outcomes(NUMPY, 11, 20)
    assert kvtc_misfits(emulated) == []


def test_blocks_are_copied_as_numpy_copies_them_or_not_at_all(emulated: EmulatedKernels) -> None:
    assert wrong_copies(emulated, 11, 40) == []


def test_arrays_whose_sizes_do_not_fit_are_refused(emulated: EmulatedKernels) -> None:
    assert misfits(emulated) == []


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("codec", [FloatsCodec, ProgressiveCodec], ids=lambda codec: codec.name)
def test_payloads_of_real_keys_and_values_are_the_same_bytes(
    path: Path, codec: type[FloatsCodec] | type[ProgressiveCodec], emulated: EmulatedKernels
) -> None:
    chunk = path.read_bytes()
    payloads = []
    for kernels in (NUMPY, emulated):
        out = memoryview(bytearray(len(chunk)))
        size = codec(kernels).encode(memoryview(chunk), out)
        assert size is not None
        payloads.append(bytes(out[:size]))
    assert payloads[0] == payloads[1]
    decoded = bytearray(len(chunk))
    codec(emulated).decode(memoryview(payloads[0]), memoryview(decoded))
    assert decoded == chunk


@pytest.mark.parametrize("seed", range(4))
def test_int8_is_the_same_as_on_this_processor(seed: int, emulated: EmulatedKernels) -> None:
    """Where `kv_cuda`'s tests hold it to torch's operations."""
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
