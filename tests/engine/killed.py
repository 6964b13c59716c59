"""An engine that stops for ever in the middle of what it is told to, so that a test can kill it there.

    python killed.py MODEL SOCKET PHASE

Waits for a line before it begins, and prints PHASE once it is there. All of it is in this process, so that killing it
kills all of the engine.
"""

import json
import os
import sys
import threading
from typing import Any, NoReturn

PHASES = ("planned", "reading", "writing", "computing")
"""After the lookup's promise; with a read lease, in the copy to the blocks; with a write lease, in the gather; and
between two steps with nothing but a promise renewed or ended."""


def stop_here(phase: str) -> NoReturn:
    print(phase, flush=True)
    threading.Event().wait()
    raise AssertionError("nobody sets this")


def arm(phase: str) -> None:
    """Have the engine stop where the phase says."""
    from kv_connect.halves.scheduler import SchedulerHalf
    from kv_cuda import CpuCopier

    def stopping(*_: Any, **__: Any) -> NoReturn:
        stop_here(phase)

    if phase == "reading":
        CpuCopier.load = stopping  # type: ignore[method-assign]
    elif phase == "writing":
        CpuCopier.store = stopping  # type: ignore[method-assign]
    elif phase == "planned":
        real = SchedulerHalf.match

        def match(self: SchedulerHalf, *given: Any, **named: Any) -> Any:
            found = real(self, *given, **named)
            if found:
                stop_here(phase)
            return found

        SchedulerHalf.match = match  # type: ignore[method-assign]
    else:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        CPUModelRunner.execute_model = stopping


def main() -> None:
    model, socket, phase = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from engines import PROMPTS, started

    with started(model, cache={"server": {"socket": socket}}) as engine:
        sys.stdin.readline()
        arm(phase)
        # What is stored already is read; what is new is written.
        prompt = PROMPTS[0] if phase in ("planned", "reading") else [9 + (17 * i) % 1500 for i in range(600)]
        engine.ask([prompt])
    print(json.dumps("it was never there"), flush=True)


if __name__ == "__main__":
    main()
