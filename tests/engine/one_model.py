"""One model of the table in a process of its own, since what fails there leaves much behind: NAME DIRECTORY."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))  # pytest's `pythonpath`, which is not here

from engines import started
from models import BY_NAME

if __name__ == "__main__":
    name, directory = sys.argv[1:]
    cache = {"host": {"capacity_bytes": "64MiB"}}
    with started(directory, cache=cache, chunk_tokens=None, **BY_NAME[name].arguments) as engine:
        print(engine.ask([[3 + (7919 * i) % 1900 for i in range(300)]]))
