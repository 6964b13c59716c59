"""Compiles this package's C into the wheel, or beside its source for an editable install.

Without a compiler, or for a machine that the source is not for, the package is the same without it: numpy or torch then
does the work. CC and CFLAGS are honoured. The packages with C share this file.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "_kernels.so"
COMPILE_S = 600


def find_compiler() -> list[str]:
    """Its command; empty: there is none."""
    if named := os.environ.get("CC"):
        return shlex.split(named)
    return [found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))][:1]


def compile_library(sources: list[Path], library: Path) -> str:
    """Why there is no library; "" where it has been made, in one step, so that nobody ever loads half of it."""
    compiler = find_compiler()
    if not compiler:
        return "there is no C compiler"
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        options = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]
        options += ["-ffp-contract=off"]  # each product is rounded, as torch and numpy round it
        options += shlex.split(os.environ.get("CFLAGS", ""))
        checksum = f"-DKV_SOURCE={zlib.crc32(b''.join(source.read_bytes() for source in sources))}u"
        compiled = [str(source) for source in sources if source.suffix == ".c"]
        try:
            ran = subprocess.run(  # noqa: S603  # the compiler that the builder has or names
                [*compiler, *options, checksum, "-o", str(made), *compiled],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMPILE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if ran.returncode or not made.exists():
            return ran.stderr.strip() or f"{shlex.join(compiler)} failed with {ran.returncode}"
        os.replace(made, library)
    return ""


class CompiledKernels(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.config["sources"])  # all of C in it
        sources = sorted((Path(self.root) / folder).glob("*.[ch]"))
        if version == "editable":
            library = sources[0].with_name(LIBRARY)
        else:
            self.scratch = tempfile.mkdtemp()
            library = Path(self.scratch) / LIBRARY
        missing = compile_library(sources, library)
        if missing:
            self.app.display_warning(f"{folder} is not compiled, and what it does will be slower: {missing}")
            if version == "editable":
                library.unlink(missing_ok=True)  # it may be of an older source
        elif version != "editable":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["force_include"][str(library)] = str(folder.relative_to("src") / LIBRARY)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"  # of no Python in particular: it is called through ctypes

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self.scratch, ignore_errors=True)
