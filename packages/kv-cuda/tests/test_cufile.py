"""Whether cuFile is here, and what its library says where there is no driver."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kv_cuda.files.cufile import NoCuFile, find_cufile, what_is_missing


def test_cufile_is_looked_for_without_touching_it(tmp_path: Path) -> None:
    proc, dev = tmp_path / "proc", tmp_path / "dev"
    dev.mkdir()

    def missing(kvikio: str | None) -> NoCuFile | None:
        return what_is_missing(kvikio, proc=proc, dev=dev)

    assert "neither" in str(missing(None))
    assert "without the nvidia-fs module" in str(missing("26.10"))
    (proc / "driver/nvidia-fs").mkdir(parents=True)
    (proc / "driver/nvidia-fs/version").write_text("version: 2.20")
    assert "its devices are missing" in str(missing("26.10"))
    (dev / "nvidia-fs0").touch()
    without = missing(None)
    assert without is not None and without.advice == "pip install 'kv-cuda[gds]'"
    assert missing("26.10") is None
    assert isinstance(find_cufile(torch.device("cpu"), proc=proc, dev=dev), NoCuFile)


KVIKIO = """
import sys
import kvikio
import numpy
from kv_cuda.files.cufile import CuFiles

class Memory(numpy.ndarray):
    def numel(self):
        return self.size

memory = numpy.zeros(4096, numpy.uint8).view(Memory)
for move in ("read", "write"):
    file = CuFiles(kvikio).open(sys.argv[1], writable=move == "write")
    try:
        print("moved", getattr(file, move)(memory, 0).wait())
    except OSError as error:
        print("failed", error)
    file.close()
try:
    CuFiles(kvikio).open(sys.argv[1] + " that is not there", writable=False)
except OSError as error:
    print("failed", error)
"""


def test_the_real_library_fails_in_ways_that_we_expect(tmp_path: Path) -> None:
    """Without a driver it says so at the read. In a process of its own, with a limit: it has been seen to spin."""
    pytest.importorskip("kvikio", reason="kvikio is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    done = subprocess.run(
        [sys.executable, "-c", KVIKIO, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    said = done.stdout.splitlines()
    assert all(line.startswith("failed") and "cuFile could not" in line for line in said), done.stderr
    assert len(said) == 3
    assert all("libcuda" in line for line in said[:2])
    assert "No such file" in said[2]
