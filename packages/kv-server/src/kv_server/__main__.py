"""`kv-server` and `python -m kv_server`, which engines start."""

import sys

from kv_core.tools.command import run_command


def main() -> int:
    return run_command("kv_server.cli")


if __name__ == "__main__":
    sys.exit(main())
