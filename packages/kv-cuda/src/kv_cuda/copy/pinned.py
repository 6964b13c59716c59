"""Host memory registered with the CUDA driver, so that it can be copied asynchronously and read over the bus.

The pool is ordinary mapped memory, independent of devices; a process that drives a GPU registers its own mapping of it.
This happens in slices, because registering costs time for every page (and makes it resident), and a pool may be large
and mostly empty. A pool is allocated from its start, so a thread registers what follows the slices in use, and the
engine's step waits only where it uses more than that at once. Pages that do not exist until then are placed near the
GPU, on its NUMA node: a page on another one is copied at the speed of the link between the processors, not the bus's.
Pages are placed when they are first touched, which may be before they are pinned; those that only this process maps are
moved.

A registration belongs to this process's mapping: two engines with one pool each register it, and a forked child has
none.

cudaHostRegister and cudaHostUnregister: CUDA Runtime API, Memory Management. Linux: mbind(2), and
Documentation/ABI/testing/sysfs-bus-pci, `numa_node`.
"""

import ctypes
import mmap
import os
import platform
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from kv_core.errors import ConfigError, MisuseError
from kv_core.log import limited_logger

_log = limited_logger(__name__)

SLICE_BYTES: Final = 64 << 20
"""Locking its pages takes 1 to 2 ms, creating them too 16 to 38 (an H100's host)."""
_PAUSE_S: Final = 0.0005
"""Pause after each slice that is registered ahead: a lock is not fair, and a thread that waits for it then gets it."""
_OUT_OF_MEMORY: Final = 2
_ALREADY_REGISTERED: Final = 712


def distance(reached: int) -> int:
    """How many bytes are kept registered beyond the first `reached`: about as far as a pool is populated ahead."""
    return min(1 << 30, max(256 << 20, reached // 4))


class Registrar(Protocol):
    """The driver's two calls; each returns a cudaError_t as a number."""

    def register(self, address: int, nbytes: int) -> int: ...

    def unregister(self, address: int) -> int: ...


class CudaRegistrar:
    """Through torch's runtime, for one device: a thread that has not chosen one would create a context on the first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> int:
        return self._call("cudaHostRegister", address, nbytes, 0)

    def unregister(self, address: int) -> int:
        return self._call("cudaHostUnregister", address)

    def _call(self, name: str, *arguments: int) -> int:
        with torch.cuda.device(self._device):
            status = int(getattr(torch.cuda.cudart(), name)(*arguments))  # type: ignore[no-untyped-call]
            if status:
                self._clear_error()
        return status

    def _clear_error(self) -> None:
        """Clear the runtime's stored error, which the engine would otherwise find after a launch of its own."""
        with suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(1.0)


class PinnedMapping:
    """One mapping of a pool in this process, registered slice by slice. Safe to call from any thread."""

    def __init__(
        self,
        address: int,
        nbytes: int,
        registrar: Registrar,
        *,
        slice_bytes: int = SLICE_BYTES,
        ahead_bytes: Callable[[int], int] = distance,
        node: int | None = None,
    ) -> None:
        """Nothing is registered yet. Slices begin and end at multiples of `slice_bytes` from the mapping's start.

        ahead_bytes: how much is registered beyond a given number of bytes, at least one slice.
        node: the NUMA node where the pages should be, if there are several.
        """
        self._node = node
        self._address, self._bytes, self._slice = address, nbytes, slice_bytes
        self._ahead_bytes = ahead_bytes
        self._registrar = registrar
        self._lock = threading.Lock()
        self._registered: set[int] = set()
        self._ahead: threading.Thread | None = None
        self._is_ending = False  # True: the thread that registers ahead stops after its slice
        self._is_refused = False  # True: a slice not needed yet was refused, so do not retry it every time
        self._process = os.getpid()

    @property
    def pinned_bytes(self) -> int:
        """The bytes registered, including the slices that are registered ahead."""
        return sum(min(self._slice, self._bytes - number * self._slice) for number in tuple(self._registered))

    def is_inherited(self) -> bool:
        """Whether it belongs to a parent process, and is useless here."""
        return os.getpid() != self._process

    def pin(self, *offsets: int, nbytes: int) -> None:
        """Register as many bytes at each of these offsets. Costs nothing if they are registered already.

        Raises:
            ConfigError: the system does not let this process lock that much memory.
            MisuseError: called in a forked child; registrations do not survive a fork.
        """
        if self.is_inherited():
            raise MisuseError("this pool was pinned by the parent process; attach it again after a fork")
        size, last = self._slice, max(1, nbytes) - 1
        slices = {number for at in offsets for number in range(at // size, (at + last) // size + 1)}
        if not self._registered.issuperset(slices):
            with self._lock:
                for number in sorted(slices):
                    self._register(number)
        self.pin_ahead(max(slices) + 1)

    def pin_ahead(self, first: int = 0) -> None:
        """Have a thread register the slices from `first` on that are likely to be used next."""
        count = max(1, self._ahead_bytes(first * self._slice) // self._slice)
        following = range(first, min(first + count, -(-self._bytes // self._slice)))
        if self._is_refused or self._registered.issuperset(following):
            return
        if self._ahead is None or not self._ahead.is_alive():
            ahead = threading.Thread(target=self._register_all, args=(following,), name="kv-pin", daemon=True)
            try:
                ahead.start()
            except RuntimeError as error:  # the system has no more threads for us; the next call tries again
                _log.debug("the host pool is not pinned ahead for now: %s", error)
                return
            self._ahead = ahead

    def unpin(self) -> None:
        """Unregister everything: nothing may be copied to or from it any more. Does nothing in a forked child."""
        if self.is_inherited():
            return
        self._is_ending = True
        if self._ahead is not None:
            self._ahead.join()
        self._is_ending = False
        with self._lock:
            while self._registered:
                self._registrar.unregister(self._address + self._registered.pop() * self._slice)

    def _register_all(self, slices: range) -> None:
        try:
            for number in slices:
                if self._is_ending:
                    return
                with self._lock:
                    self._register(number)
                time.sleep(_PAUSE_S)
        except ConfigError:
            self._is_refused = True  # the caller that needs the slice gets the error

    def _register(self, number: int) -> None:
        """Register this slice; nothing, if it is registered already. Call it under the lock."""
        if number in self._registered:
            return
        start = number * self._slice
        nbytes = min(self._slice, self._bytes - start)
        if self._node is not None and not prefer(self._address + start, nbytes, self._node):
            _log.warning(
                "the system does not allow placing the host pool's pages near the GPU, on NUMA node %d", self._node
            )
            self._node = None
        status = self._registrar.register(self._address + start, nbytes)
        if status not in (0, _ALREADY_REGISTERED):
            reason = _limit_text() if status == _OUT_OF_MEMORY else "The driver's manual says what that number means"
            raise ConfigError(
                f"{nbytes >> 20} MiB of the host pool cannot be pinned for the GPU (cudaError {status}). {reason}"
            )
        self._registered.add(number)


@dataclass(slots=True)
class _Shared:
    """A mapping and its users. memory: keeps the bytes mapped until they are no longer registered."""

    mapping: PinnedMapping
    memory: object
    users: int


_shared: dict[tuple[int, int], _Shared] = {}
_shared_lock = threading.Lock()


def share_mapping(
    address: int, nbytes: int, registrar: Registrar, *, memory: object, slice_bytes: int, node: int | None = None
) -> PinnedMapping:
    """The one registration of this memory in this process, for all copiers that use it (one per group of layers).

    It must outlive them all, because a kernel that reads memory that is no longer registered destroys the GPU's whole
    context.

    memory: keeps these bytes mapped. If they were unmapped first, the driver would hold on to their old pages and give
        those to the next mapping at this address.
    slice_bytes, node: those of the first copier apply; all of a pool's copiers give the same.
    """
    with _shared_lock:
        shared = _shared.get((address, nbytes))
        if shared is None or shared.mapping.is_inherited():
            mapping = PinnedMapping(address, nbytes, registrar, slice_bytes=slice_bytes, node=node)
            shared = _shared[address, nbytes] = _Shared(mapping, memory, 0)
        shared.users += 1
        return shared.mapping


def give_back_mapping(mapping: PinnedMapping) -> None:
    """Remove one user; after the last one the memory is unregistered."""
    with _shared_lock:
        for key, shared in list(_shared.items()):
            if shared.mapping is mapping:
                shared.users -= 1
                if not shared.users:
                    del _shared[key]
                    mapping.unpin()
                return


def _limit_text() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "Locked memory is not limited here, so the machine is short of memory: make the host tier smaller"
    return (
        f"This process may lock {soft >> 10} KiB (RLIMIT_MEMLOCK): raise it with `ulimit -l unlimited`, in a container "
        "with `--ulimit memlock=-1`, under systemd with LimitMEMLOCK=infinity"
    )


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
