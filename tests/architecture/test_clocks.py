"""Leases, time-outs and back-offs are measured by the machine's uptime: the wall clock may be set forward or back."""

import ast
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "packages"
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "time.localtime", "time.gmtime"}
MAY_BE_WRONG = {
    "bus.py": "shown to people",
    "otel.py": "sent to a collector",
    "neighbours.py": "how old a note of another process is, for a warning",
    "file_digests.py": "whether a file changed just now: if in doubt it is read again",
    "adapters.py": "whether a file changed since: if in doubt nothing is cached",
    "authority.py": "from when and until when a certificate is valid",
    "signatures.py": "whether a certificate is valid now",
    "shared_fs.py": "whether a file's age is renewed early or late",
}
"""Modules that read it, and for what."""


def read_in(tree: ast.AST) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & WALL_CLOCKS


def test_only_what_may_be_wrong_comes_from_the_wall_clock() -> None:
    found = {path.name for path in PACKAGES.glob("*/src/**/*.py") if read_in(ast.parse(path.read_text()))}
    assert found == set(MAY_BE_WRONG)
