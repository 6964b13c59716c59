"""What `kv doctor` says of GPUs, here and elsewhere."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kv_core.tools.doctor import DoctorOptions
from kv_cuda import doctor
from kv_cuda.copy.copy_paths import FileCopyPaths
from kv_cuda.files.cufile import NoCuFile
from kv_cuda.files.host_files import HostFiles


def test_without_a_driver_the_cpu_is_all_right() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    findings = list(doctor.check(DoctorOptions(".", measure=True)))
    assert [finding.what for finding in findings] == ["kv-cuda", "GPU", "GPUDirect Storage"]
    assert findings[1].state == "ok"
    assert "on the CPU" in findings[1].found
    assert "files are staged through host memory" in findings[2].found


def test_a_driver_without_a_cuda_build_of_torch_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: "libcuda.so.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    finding = doctor._no_gpu()
    assert finding.state == "wrong"
    assert "install the CUDA build of torch" in finding.advice
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "older than CUDA 13.0" in doctor._no_gpu().advice


@pytest.mark.parametrize(("limit", "state"), [(resource.RLIM_INFINITY, "ok"), (8 << 30, "note"), (64 << 10, "wrong")])
def test_a_low_limit_on_locked_memory_says_how_to_raise_it(limit: int, state: str) -> None:
    finding = doctor._locked_memory(limit)
    assert finding.state == state
    assert state == "ok" or "ulimit -l unlimited" in finding.advice


def test_gpudirect_storage_says_what_is_missing_and_which_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.gpudirect_storage(NoCuFile("neither is here", "install both"), FileCopyPaths())
    assert (finding.state, finding.advice) == ("ok", "install both")
    assert finding.found == "neither is here: files are staged through host memory"
    assert doctor.gpudirect_storage(NoCuFile("no devices", "", is_installed=True), FileCopyPaths()).state == "note"
    monkeypatch.setattr(doctor, "kvikio_version", lambda: "26.10")
    files = HostFiles()
    assert "kv bench copy --file" in doctor.gpudirect_storage(files, FileCopyPaths()).advice
    finding = doctor.gpudirect_storage(files, FileCopyPaths({"/nvme": "direct"}))
    assert finding.state == "ok"
    assert finding.found == "kvikio 26.10; /nvme: direct"
    files.close()


def test_a_second_gpu_s_bus_is_timed_on_its_own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where events are recorded in the current device's, which is idle, all copies seem to take no time."""
    second, current, recorded = torch.device("cuda", 1), [torch.device("cuda", 0)], []

    @contextmanager
    def chosen(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Event:
        def __init__(self, **_options: Any) -> None: ...

        def record(self) -> None:
            recorded.append(current[-1])

        def synchronize(self) -> None: ...

        def elapsed_time(self, _end: "Event") -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "device", chosen)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    memory = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda *_sizes, **_options: memory)
    monkeypatch.setattr(torch, "empty_like", lambda _like, device: memory.clone())
    assert doctor.bus_gbps(second) == (4 * (256 << 20) / 1e6,) * 2
    assert recorded == [second] * 4


@pytest.mark.gpu
def test_the_gpu_its_bus_and_its_paths_are_found() -> None:
    findings = {finding.what: finding for finding in doctor.check(DoctorOptions(".", measure=True))}
    assert torch.cuda.get_device_name(0) in findings["GPU 0"].found
    assert float(findings["GPU 0, bus"].found.split()[0]) > 1
