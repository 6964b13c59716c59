"""How a command of ours starts and ends: Ctrl-C, at any moment that is ours, ends it without a traceback.

A console script imports this before anything that takes time. Until the command's own code runs the kernel may end the
process at once, as nothing is there to tidy up; from then on Ctrl-C is a KeyboardInterrupt, as anywhere in Python.
"""

import signal
from importlib import import_module

INTERRUPTED = 130
"""The exit status that shells give to what SIGINT has ended."""


def run_command(module: str) -> int:
    """Import this module and run its `main`; its exit status."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so where somebody has it ignored
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run = import_module(module).main
    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return int(run())
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> int:
    """The command `kv`."""
    return run_command("kv_core.tools.cli")
