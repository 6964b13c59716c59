"""Start and end of our commands: Ctrl-C ends them without a traceback at any moment.

A console script imports this before anything slow. Until the command's own code runs, SIGINT has its default action and
ends the process, because there is nothing to clean up yet; from then on Ctrl-C raises KeyboardInterrupt as usual.
"""

import io
import signal
import sys
from importlib import import_module
from pathlib import Path

INTERRUPTED = 130
"""The exit status that shells report for a process ended by SIGINT."""


def run_command(module: str) -> int:
    """Import this module and run its `main`; its exit status."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so where SIGINT is ignored
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _accept_all_output()
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


def _accept_all_output() -> None:
    """Whatever a command prints is no error: the encoding may lack characters such as → and …, which are then
    spelled out, and the shell may have closed standard output (`>&-`)."""
    if sys.stdout is None:
        sys.stdout = Path("/dev/null").open("w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> int:
    """The command `kv`."""
    return run_command("kv_core.tools.cli")
