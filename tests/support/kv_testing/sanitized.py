"""Libraries of ours in C, compiled with the compiler's sanitizers and run in a process that they end where it errs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
FLAGS = ["-std=gnu11", "-fPIC", "-shared", "-g", "-O1", "-DKV_ONE_VERSION", "-ffp-contract=off"]
_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
WITHIN_S = 300
"""For compiling, and for running: on a slow machine beside other tests."""
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


def compile_sanitized(sources: Sequence[Path], library: Path, *options: str) -> dict[str, str]:
    """The environment of a process that loads this library. Skips the test if the compiler has no sanitizers."""
    compiled = [source for source in sources if source.suffix == ".c"]
    command = [COMPILER or "", *FLAGS, *options, *_SANITIZERS, "-o", str(library), *map(str, compiled)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    runtimes = [
        subprocess.check_output([str(COMPILER), f"-print-file-name={name}"], text=True, timeout=60).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if made.returncode or not all(map(os.path.isabs, runtimes)):
        pytest.skip("this compiler has no sanitizers")
    return os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",  # or small buffers lie in blocks of Python's own
    }


def run_sanitized(fuzz: str, library: Path, environ: dict[str, str]) -> list[str]:
    """The lines that this module of fuzz says of 40 rounds."""
    command = [sys.executable, "-m", fuzz, str(library), "11", "40"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=WITHIN_S)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.splitlines()
