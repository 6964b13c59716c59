"""A line between two network namespaces that delays, reorders and loses packets, as `tc netem` does: few kernels of
small machines have that.

Each namespace has a TUN device called `line`, and this process carries IP packets between the two. It is started by
`kv_testing.two_hosts` in the user namespace that both belong to:

    python -m kv_testing.disturbed_line PID PID --delay-s 0.02 --jitter-s 0.01 --loss 0.02
"""

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import time
from collections.abc import Sequence
from typing import Final

TUN: Final = "/dev/net/tun"
DEVICE: Final = "line"
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_CLONE_NEWNET: Final = 0x40000000
_MAX_PACKET_BYTES: Final = 1 << 16


def end_in(pid: int) -> int:
    """Enter the network namespace of this process, and open its end of the line. The namespace stays entered."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network of process {pid} cannot be entered")
    finally:
        os.close(namespace)
    end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def carry(ends: Sequence[int], *, delay_s: float, jitter_s: float, loss: float, seed: int) -> None:
    """Never returns. A packet is lost with probability `loss`, or arrives after `delay_s` and up to `jitter_s` more, so
    that later ones may overtake it."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    chance = random.Random(seed)
    arriving: list[tuple[float, int, int, bytes]] = []
    packets = 0
    while True:
        now_s = time.monotonic()
        while arriving and arriving[0][0] <= now_s:
            _, _, end, packet = heapq.heappop(arriving)
            try:
                os.write(end, packet)
            except OSError:  # the other end is down: what is sent to it is lost
                continue
        wait_s = arriving[0][0] - now_s if arriving else None
        for end in select.select(ends, (), (), wait_s)[0]:
            try:
                packet = os.read(end, _MAX_PACKET_BYTES)
            except OSError:
                continue
            if chance.random() >= loss:
                packets += 1
                due_s = time.monotonic() + delay_s + chance.uniform(0, jitter_s)
                heapq.heappush(arriving, (due_s, packets, other[end], packet))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    options.add_argument("pids", type=int, nargs=2, help="processes that are in the two network namespaces")
    options.add_argument("--delay-s", type=float, default=0.0)
    options.add_argument("--jitter-s", type=float, default=0.0)
    options.add_argument("--loss", type=float, default=0.0, help="probability that a packet is lost")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    ends = [end_in(pid) for pid in chosen.pids]
    print("READY", flush=True)
    carry(ends, delay_s=chosen.delay_s, jitter_s=chosen.jitter_s, loss=chosen.loss, seed=chosen.seed)


if __name__ == "__main__":
    main()
