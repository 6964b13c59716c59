"""`python -m kv_blend.sglang flags`: the arguments of `python -m kv_sglang flags`, for an engine that blends."""

import sys

from kv_sglang import cli

from kv_blend.sglang.plugin import engine_arguments

if __name__ == "__main__":
    sys.exit(cli.main(package="kv_blend.sglang", make=engine_arguments))
