"""Every logger of ours is limited, so that no fault outside fills a disk with lines."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNLIMITED = {
    "kv_core/log.py",  # makes them
    "kv_observe/log.py",  # limits its lines itself, by tier and cache
    "kv_vllm/plugin.py",  # gives loggers their handlers
}


def test_every_module_takes_its_logger_where_lines_are_limited() -> None:
    sources = {
        str(path.relative_to(package)): path.read_text()
        for package in ROOT.glob("packages/*/src")
        for path in package.rglob("*.py")
    }
    other = re.compile(r"\bgetLogger\(|\blogging\.(info|warning|error|exception)\(")
    assert {name for name, text in sources.items() if other.search(text)} == UNLIMITED
    assert sum("limited_logger(__name__)" in text for text in sources.values()) > 20
