"""Whether cuFile is here, and what its library says where there is no driver."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kv_cuda.files.cufile import NoCuFile, find_cufile, kvikio_version, why_not

CPU = torch.device("cpu")


def test_a_cpu_needs_no_cufile(tmp_path: Path) -> None:
    assert isinstance(find_cufile(CPU, tmp_path), NoCuFile)


def test_without_kvikio_cufile_is_not_asked(tmp_path: Path) -> None:
    if kvikio_version() is not None:
        pytest.skip("kvikio is installed")
    found = find_cufile(torch.device("cuda", 0), tmp_path)
    assert isinstance(found, NoCuFile) and "kv-cuda[gds]" in found.advice


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        ("import sys, os; os.listdir(sys.argv[1])", ""),
        ("while True: pass", "does not answer within 0.5 s"),
        ("raise RuntimeError('no driver')", "cannot read a file of {place}: RuntimeError: no driver"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its process ended with -11"),
    ],
    ids=["yes", "spins", "no", "crashes"],
)
def test_cufile_is_probed_in_a_child_process_with_a_limit(tmp_path: Path, probe: str, why: str) -> None:
    """The directory does not exist yet: the file system is that of its parent."""
    limit_s = 0.5 if "while" in probe else 60.0
    said = why_not(CPU, tmp_path / "kv" / "later", limit_s=limit_s, probe=probe)
    assert why.format(place=tmp_path) in said and bool(why) == bool(said)


KVIKIO = """
import sys
import kvikio
import numpy
from kv_cuda.files.cufile import CuFiles

class Memory(numpy.ndarray):
    def numel(self):
        return self.size

memory = numpy.zeros(4096, numpy.uint8).view(Memory)
file = CuFiles(kvikio).open(sys.argv[1])
try:
    print("moved", file.read(memory, 0).wait())
except OSError as error:
    print("failed", error)
file.close()
try:
    CuFiles(kvikio).open(sys.argv[1] + " that is not there")
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
    assert len(said) == 2
    assert "libcuda" in said[0]
    assert "No such file" in said[1]
