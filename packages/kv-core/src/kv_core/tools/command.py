"""Start and end of our commands: Ctrl-C ends them without a traceback at any moment.

A console script imports this before anything slow. Until the command's own code runs, SIGINT has its default action and
ends the process, because there is nothing to clean up yet; from then on Ctrl-C raises KeyboardInterrupt as usual.
"""

import signal
from importlib import import_module

INTERRUPTED = 130
"""The exit status that shells report for a process ended by SIGINT."""


def run_command(module: str) -> int:
    """Import this module and run its `main`; its exit status."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so where SIGINT is ignored
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
