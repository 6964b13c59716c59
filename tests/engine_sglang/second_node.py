"""The second of two nodes of an SGLang engine; it runs until it is killed.

    python second_node.py ARGUMENTS

ARGUMENTS: JSON of what `engines.in_this_process` takes.
"""

import json
import sys

from engines import in_this_process


def main() -> None:
    given = json.loads(sys.argv[1])
    with in_this_process(given.pop("model"), node_rank=1, **given):
        raise AssertionError("SGLang does not return to the caller of a second node")


if __name__ == "__main__":
    main()
