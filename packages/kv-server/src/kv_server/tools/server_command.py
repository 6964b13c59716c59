"""The entry point of `kv-server`. It is outside the server's package because importing that takes a while."""

from kv_core.tools.command import run_command


def main() -> int:
    return run_command("kv_server.cli")
