"""Host memory near a GPU: finds the GPU's NUMA node and places pages there.

A page on another node is copied at the speed of the link between the processors, not the bus's. Pages are placed when
they are first touched, which for a pool may be before they are pinned; those that only this process maps are moved.

Linux: mbind(2), and Documentation/ABI/testing/sysfs-bus-pci, `numa_node`.
"""

import ctypes
import mmap
import platform
from pathlib import Path
from typing import Any, Final

import torch

_MBIND: Final = {"x86_64": 237, "aarch64": 235}
"""The system call's number: libc has no function for it."""
_PREFERRED: Final = 1
_MOVE: Final = 1 << 1
_MAX_NODES: Final = 1024
_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of(device: torch.device, sys: Path = Path("/sys")) -> int | None:
    """The NUMA node of this GPU's bus; None if there is only one, or it is unknown. sys: the path of /sys."""
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):  # not in every version of torch
        return None
    pci_address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return node_at(pci_address, sys)


def node_at(pci_address: str, sys: Path) -> int | None:
    """pci_address: such as 0000:3b:00.0."""
    if len(list((sys / "devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    try:
        node = int((sys / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer(address: int, nbytes: int, node: int) -> bool:
    """Place the pages of this memory on `node`, if it has room. False: the system refuses."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MAX_NODES:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // _BITS))()
    mask[node // _BITS] = 1 << (node % _BITS)
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    length = ctypes.c_ulong(address + nbytes - start)
    status: int = libc.syscall(
        number, ctypes.c_void_p(start), length, _PREFERRED, ctypes.byref(mask), ctypes.c_ulong(_MAX_NODES), _MOVE
    )
    return status == 0
