"""Pages are where they were asked for, asked of the kernel; and what cannot be had is said, not pretended."""

import ctypes
import mmap
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kv_cuda.copy.pinned import PinnedMapping, node_at, node_of, prefer

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_OF_ADDRESS, _PREFERRED = 2, 1
NBYTES = 4 * mmap.PAGESIZE


def policy_of(address: int) -> tuple[int, int]:
    """(policy, mask of the first nodes), as get_mempolicy(2) has it."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    number = _GET_MEMPOLICY[platform.machine()]
    status = ctypes.CDLL(None).syscall(
        number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), ctypes.c_void_p(address), _OF_ADDRESS
    )
    assert status == 0
    return mode.value, mask[0]


@pytest.fixture
def memory() -> Iterator[int]:
    """The address of some pages that nobody has touched."""
    mapping = mmap.mmap(-1, NBYTES)
    held = ctypes.c_char.from_buffer(mapping)
    yield ctypes.addressof(held)
    del held
    mapping.close()


@pytest.fixture
def may_bind(memory: int) -> None:
    if not prefer(memory, NBYTES, 0):
        pytest.skip("this system, or the container, does not allow mbind")


@pytest.mark.usefixtures("may_bind")
def test_the_kernel_knows_what_is_preferred_and_where(memory: int) -> None:
    last = memory + 3 * mmap.PAGESIZE
    assert policy_of(last) == (_PREFERRED, 1)


@pytest.mark.usefixtures("may_bind")
def test_the_pages_are_asked_for_before_they_are_registered_and_only_those() -> None:
    mapping = mmap.mmap(-1, NBYTES)
    held = ctypes.c_char.from_buffer(mapping)
    start = ctypes.addressof(held)
    seen = []

    class Driver:
        def register(self, address: int, nbytes: int) -> int:
            seen.append((address - start, policy_of(address), policy_of(start + NBYTES - 1)))
            return 0

        def unregister(self, address: int) -> int:
            return 0

    pinned = PinnedMapping(
        start, NBYTES, Driver(), slice_bytes=mmap.PAGESIZE, ahead_bytes=lambda reached: mmap.PAGESIZE, node=0
    )
    pinned.pin(mmap.PAGESIZE, nbytes=1)
    pinned.unpin()
    used, ahead = mmap.PAGESIZE, 2 * mmap.PAGESIZE
    assert seen == [(used, (_PREFERRED, 1), (0, 0)), (ahead, (_PREFERRED, 1), (0, 0))]
    del held
    mapping.close()


def test_a_node_that_is_not_there_is_said_once_and_pinning_goes_on(
    memory: int, caplog: pytest.LogCaptureFixture
) -> None:
    registered = []

    class Driver:
        def register(self, address: int, nbytes: int) -> int:
            registered.append(address)
            return 0

        def unregister(self, address: int) -> int:
            return 0

    assert not prefer(memory, NBYTES, 1000)
    assert not prefer(memory, NBYTES, 5000)
    pinned = PinnedMapping(memory, NBYTES, Driver(), slice_bytes=mmap.PAGESIZE, node=1000)
    pinned.pin(0, nbytes=NBYTES)
    assert len(registered) == 4
    assert caplog.text.count("NUMA node 1000") == 1


@pytest.mark.parametrize(("text", "nodes", "node"), [("1", 2, 1), ("-1", 2, None), ("0", 1, None), ("?", 2, None)])
def test_a_gpus_node_is_read_where_there_are_several(tmp_path: Path, text: str, nodes: int, node: int | None) -> None:
    for number in range(nodes):
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(text + "\n")
    assert node_at("0000:3b:00.0", tmp_path) == node
    assert node_at("0000:99:00.0", tmp_path) is None


@pytest.mark.gpu
def test_this_gpus_node_exists() -> None:
    node = node_of(torch.device("cuda", 0))
    assert node is None or Path(f"/sys/devices/system/node/node{node}").is_dir()
