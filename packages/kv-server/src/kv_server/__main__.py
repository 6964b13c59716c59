"""`python -m kv_server` is `kv-server`: what engines start."""

import sys

from kv_core.tools.command import run_command

if __name__ == "__main__":
    sys.exit(run_command("kv_server.cli"))
