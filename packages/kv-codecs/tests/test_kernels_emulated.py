"""The kernels compiled for 64-bit Arm, on an emulated processor: the same bytes as numpy's.

`scripts/setup.sh arm64` installs the cross compiler and the emulator. Without them these tests are skipped.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_codecs.floats import FloatsCodec
from kv_codecs.kernels import SOURCES, CompiledKernels
from kv_codecs.progressive import ProgressiveCodec
from kv_testing.codec_fuzz import misfits, outcomes
from kv_testing.emulated import EmulatedLibrary, needs_emulator
from kv_testing.kvtc_fuzz import kvtc_misfits, kvtc_outcomes
from kv_testing.numpy_kernels import NumpyKernels

HERE = Path(__file__).parent
RECORDED = sorted((HERE / "recorded").glob("*.bfloat16"))
NUMPY = NumpyKernels()
pytestmark = [pytest.mark.slow, needs_emulator]


class EmulatedKernels(EmulatedLibrary, CompiledKernels):
    """The kernels on another processor."""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedKernels]:
    kernels = EmulatedKernels(SOURCES, tmp_path_factory.mktemp("emulated"))
    yield kernels
    kernels.close()


def test_numbers_and_damaged_payloads_become_the_same(emulated: EmulatedKernels) -> None:
    assert outcomes(emulated, 11, 20) == outcomes(NUMPY, 11, 20)


def test_transformed_numbers_and_their_damaged_payloads_become_the_same(emulated: EmulatedKernels) -> None:
    assert kvtc_outcomes(emulated, 11, 20) == kvtc_outcomes(NUMPY, 11, 20)
    assert kvtc_misfits(emulated) == []


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
