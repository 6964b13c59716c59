"""`kv doctor` on the GPU: driver, bus, pinned memory, copies and GPUDirect Storage."""

import ctypes.util
import importlib.util
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from kv_core.errors import ConfigError
from kv_core.tools.doctor import DoctorOptions, Finding, version_of

from kv_cuda.copy import driver
from kv_cuda.copy.copy_paths import CopyPaths, FileCopyPaths
from kv_cuda.copy.pinned import node_of
from kv_cuda.files.cufile import NoCuFile, find_cufile, kvikio_version
from kv_cuda.files.host_files import Files

_COPIED_BYTES: Final = 256 << 20
_LOCKED_ENOUGH: Final = 1 << 30


def check(options: DoctorOptions) -> Iterator[Finding]:
    """The check for the entry-point group `kv_core.doctor`."""
    yield Finding("ok", "kv-cuda", f"{version_of('kv-cuda')} on torch {torch.__version__}")
    if not torch.cuda.is_available():
        yield _no_gpu()
        yield gpudirect_storage(find_cufile(torch.device("cpu"), Path(options.path)), FileCopyPaths())
        return
    for number in range(torch.cuda.device_count()):
        yield from _device(number, options)
    yield _locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield from _copies()
    first = torch.device("cuda", 0)
    yield gpudirect_storage(
        find_cufile(first, Path(options.path)),
        FileCopyPaths.of_device(first),
    )


def _no_gpu() -> Finding:
    if ctypes.util.find_library("cuda") is None:
        return Finding("ok", "GPU", "no NVIDIA driver here: chunks are copied by torch, on the CPU")
    if torch.version.cuda is None:
        advice = "install the CUDA build of torch (https://pytorch.org/get-started/locally) if a GPU is to be used"
        return Finding(
            "wrong", "GPU", f"there is a driver, but torch {torch.__version__} was built without CUDA", advice
        )
    advice = "see nvidia-smi: the driver may be older than CUDA " + str(torch.version.cuda)
    return Finding("wrong", "GPU", "there is a driver, but torch finds no GPU", advice)


def _device(number: int, options: DoctorOptions) -> Iterator[Finding]:
    device = torch.device("cuda", number)
    properties = torch.cuda.get_device_properties(device)
    name = f"GPU {number}"
    chip = f"sm_{properties.major}{properties.minor}"
    found = f"{properties.name}, {properties.total_memory >> 30} GiB, {chip}, {properties.multi_processor_count} SMs"
    yield Finding("ok", name, found)
    if (node := node_of(device)) is not None:
        yield Finding("ok", f"{name}, NUMA", f"its bus is at node {node}: the host pool's pages are allocated there")
    if (properties.major, properties.minor) < (8, 0):
        advice = "the kernels are compiled and tested for sm_80, sm_90 and sm_100; expect torch's own copies to be used"
        yield Finding("note", name, f"older than sm_80 (it is {chip})", advice)
    if options.measure:
        to_device, to_host = bus_gbps(device)
        yield Finding("ok", f"{name}, bus", f"{to_device:.1f} GB/s in, {to_host:.1f} GB/s out, pinned memory")
    yield from copy_paths(f"{name}, copy paths", properties.name)


def copy_paths(what: str, device_name: str) -> Iterator[Finding]:
    """Whether the paths of this kind of device were measured; nothing to say if they were."""
    try:
        if not CopyPaths.file(device_name).exists():
            yield Finding("note", what, "not measured: the built-in table is used", "run kv bench copy once")
    except ConfigError as error:
        yield Finding("note", what, f"{error}; the built-in table is used", "then run kv bench copy once")


def bus_gbps(device: torch.device) -> tuple[float, float]:
    """To the device and from it, in GB/s, of one large copy from pinned memory."""
    rates = []
    # Copies go to the queue of the memory's device, and events to that of the current one.
    with torch.cuda.device(device):
        on_host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty_like(on_host, device=device)
        for to, origin in ((on_device, on_host), (on_host, on_device)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            to.copy_(origin, non_blocking=True)
            start.record()
            for _ in range(4):
                to.copy_(origin, non_blocking=True)
            end.record()
            end.synchronize()
            rates.append(4 * _COPIED_BYTES / start.elapsed_time(end) / 1e6)
    return rates[0], rates[1]


def _locked_memory(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return Finding("ok", "pinned memory", "no limit")
    found = f"a process may lock {limit >> 20} MiB"
    if limit >= _LOCKED_ENOUGH:
        return Finding("note", "pinned memory", found, "the host tier must fit: ulimit -l unlimited")
    advice = "ulimit -l unlimited; in a container --ulimit memlock=-1; under systemd LimitMEMLOCK=infinity"
    return Finding("wrong", "pinned memory", found, advice)


def _copies() -> Iterator[Finding]:
    if importlib.util.find_spec("triton") is None:
        yield Finding("wrong", "triton", "not installed: chunks are copied by torch, slowly", "pip install triton")
    else:
        yield Finding("ok", "triton", str(version_of("triton")))
    if torch.cuda.is_available() and not driver.is_available(torch.device("cuda")):
        advice = "a driver of CUDA 12.8 or later has them, for blocks that are long runs of bytes"
        yield Finding("note", "batched copies", "this driver has none", advice)


def gpudirect_storage(cufile: Files | NoCuFile, copy_paths: FileCopyPaths) -> Finding:
    """Whether files can be read into the GPU without passing through host memory, and where that is faster."""
    what = "GPUDirect Storage"
    if isinstance(cufile, NoCuFile):
        found = f"{cufile.why}: files are staged through host memory"
        return Finding("note" if cufile.is_installed else "ok", what, found, cufile.advice)
    if not copy_paths.measured:
        found = f"kvikio {kvikio_version()}: files of this directory are read straight into the GPU"
        return Finding("note", what, found, "see whether that is faster: kv bench copy --file DIRECTORY")
    faster = [f"{directory}: {copy_path}" for directory, copy_path in sorted(copy_paths.measured.items())]
    return Finding("ok", what, f"kvikio {kvikio_version()}; {'; '.join(faster)}")
