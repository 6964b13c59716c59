"""The command `kv-server`, from its first moment. It is outside its package, whose import takes a while."""

from kv_core.tools.command import run_command


def main() -> int:
    return run_command("kv_tiers.server.cli")
