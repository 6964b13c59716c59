"""`python -m kv_sglang flags`: the arguments that make SGLang use this cache."""

from kv_core.tools.command import run_command

if __name__ == "__main__":
    raise SystemExit(run_command("kv_sglang.cli"))
