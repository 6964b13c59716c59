"""One side of a hand-over that stops itself (SIGSTOP) in the middle of a copy, so that a test can kill it there or have
it go on.

    python killed_handover.py MODEL SOCKET prefill|decode NUMBER

It computes the prompt of this number, or loads it, and stops at the NUMBERth copy. All of it is in this process, so
that a signal reaches all of the engine.
"""

import os
import signal
import sys
from typing import Any

CHUNK = 256
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt_of(number: int) -> list[int]:
    """Four whole chunks and a partial one, a step each, none of them any other prompt's."""
    return [3 + (101 * number + 7919 * i) % 2000 for i in range(4 * CHUNK + 100)]


def main() -> None:
    model, socket, side, number = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from engines import started
    from kv_cuda import CpuCopier

    copied = 0
    name = "store" if side == "prefill" else "load"
    real = getattr(CpuCopier, name)

    def copy(self: CpuCopier, plan: Any) -> Any:
        nonlocal copied
        if copied == (int(number) if side == "prefill" else 0):
            os.kill(os.getpid(), signal.SIGSTOP)
        copied += 1
        return real(self, plan)

    role = {"prefill": "kv_producer", "decode": "kv_consumer"}[side]
    cache = {"server": {"socket": socket}, "handover": {"hold_s": 2.0}}
    with started(model, cache=cache, role=role, max_num_batched_tokens=CHUNK) as engine:
        sys.stdin.readline()
        setattr(CpuCopier, name, copy)
        prompt = prompt_of(int(number))
        taken = {"do_remote_prefill": True, "remote_num_tokens": len(prompt)}
        params = PREFILL if side == "prefill" else taken
        engine.ask([prompt], 1, extra_args={"kv_transfer_params": params})
    print("it is done", flush=True)


if __name__ == "__main__":
    main()
