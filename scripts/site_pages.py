"""Writes the documentation site's pages: the documents, the files that they link to, a reference from the code.

    python scripts/site_pages.py build/pages

Every page stands where its file stands in the repository, so the documents' links lead to the same places in both. A
link to a file that is no document leads to a page that shows it; one to a folder to its README, or a list of its files.
"""

import argparse
import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from kv_server import launch
from kv_tiers.events import events

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("*.md", "docs/**/*.md", "packages/*/*.md", "benchmarks/traces/*/*.md")
SHOWN_AS_THEY_ARE = {".png", ".svg", ".json"}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if number % 2 else change(part) for number, part in enumerate(FENCE.split(text)))


def page_of_file(path: Path) -> str:
    """A page that shows a text file, or the names in a folder."""
    name = path.relative_to(ROOT)
    if path.is_dir():
        return f"{NOT_SEARCHED}# `{name}`\n\n" + "".join(f"- `{one.name}`\n" for one in sorted(path.iterdir()))
    language = path.suffix.removeprefix(".").replace("txt", "text")
    return f"{NOT_SEARCHED}# `{name}`\n\n````{language}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"


def write_documents(pages: Path) -> None:
    """Raises `FileNotFoundError` for a link to a file that is not there."""
    for document in sorted({path for pattern in DOCUMENTS for path in ROOT.glob(pattern)}):

        def lead(link: re.Match[str], here: Path = document.parent) -> str:
            before, target, after = link.groups()
            if ":" in target:
                return link[0]
            found = (here / target).resolve(strict=True)
            if found.is_dir() and (found / "README.md").exists():
                found /= "README.md"
            if found.suffix in SHOWN_AS_THEY_ARE:
                write(pages, found.relative_to(ROOT), found.read_bytes())
            elif found.suffix != ".md":
                shown = found.with_name(found.name + ".md")
                write(pages, shown.relative_to(ROOT), page_of_file(found).encode())
                found = shown
            return before + os.path.relpath(found, here) + after

        text = outside_fences(document.read_text(encoding="utf-8"), lambda part: LINK.sub(lead, part))
        write(pages, document.relative_to(ROOT), text.encode())


def write(pages: Path, name: Path, data: bytes) -> None:
    (pages / name).parent.mkdir(parents=True, exist_ok=True)
    (pages / name).write_bytes(data)


def helps(*command: str, depth: int = 0) -> Iterator[str]:
    """What a command says of itself, and then each of its own commands."""
    said = subprocess.run(  # noqa: S603  # our own commands
        [*command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "100", "XDG_RUNTIME_DIR": "/run/user/1000"},
    ).stdout
    name = " ".join(["python" if part == sys.executable else Path(part).name for part in command])
    yield f"{'#' * (2 + depth)} {name}\n\n```text\n{said.strip()}\n```\n"
    if below := re.search(r"^positional arguments:\n  \S+\n((?: {4}.*\n)+)", said, re.MULTILINE):
        for one in re.findall(r"^ {4}([\w-]+)", below[1], re.MULTILINE):
            yield from helps(*command, one, depth=depth + 1)


def commands() -> str:
    beside = Path(sys.executable).parent
    all_helps = (
        *helps(f"{beside}/kv"),
        *helps(f"{beside}/kv-server"),
        *helps(sys.executable, "-m", "kv_sglang", "flags"),
    )
    return "# Commands\n\nWhat `--help` prints.\n\n" + "\n".join(all_helps)


def event_page() -> str:
    """Of each record its docstring, and the type of each field."""
    parts = [f"# Events\n\n{inspect.getdoc(events)}\n"]
    for node in ast.parse(inspect.getsource(events)).body:
        if isinstance(node, ast.ClassDef):
            fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
            said = inspect.cleandoc(ast.get_docstring(node) or "")
            parts.append(f"## {node.name}\n\n```text\n{said}\n```\n\n```python\n" + "\n".join(fields) + "\n```\n")
    return "\n".join(parts)


def type_of(schema: dict[str, Any]) -> str:
    """In a few words. A component of the document is named, with a link to it."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(type_of(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    if schema.get("type") == "array":
        return "list of " + (type_of(schema["items"]) if schema.get("items") else "fixed length")
    return str(schema.get("type", "any"))


def http_page(described: dict[str, Any]) -> str:
    """Of the OpenAPI document: each operation, and each record that is asked for or answered."""
    parts = [
        "# HTTP\n\nFrom the server's own `GET /openapi.json`. [How to use it](../http.md).\n",
        f"{described['info']['description']}\n",
    ]
    for path, methods in described["paths"].items():
        for method, one in methods.items():
            if method == "parameters":
                continue
            lines = [f"## {method.upper()} {path}\n", f"{one['summary']}."]
            if "security" in one:
                lines.append("Needs the token.")
            if body := one.get("requestBody"):
                lines.append(f"Body: {type_of(next(iter(body['content'].values()))['schema'])}.")
            for status, answer in one["responses"].items():
                if status.startswith("2") and "content" in answer:
                    lines.append(f"Answer {status}: {type_of(next(iter(answer['content'].values()))['schema'])}.")
            errors = [status for status in one["responses"] if not status.startswith("2")]
            parts.append("\n".join([*lines, f"Errors: {', '.join(errors)}.\n"]))
    for name, schema in described["components"]["schemas"].items():
        needed = schema.get("required", [])
        rows = [
            f"- `{field}`{'' if field in needed else ' (may be left out)'}: {type_of(of)}"
            + (f". {of['description']}" if "description" in of else "")
            for field, of in schema.get("properties", {}).items()
        ]
        parts.append("\n".join([f"### {name}\n", schema.get("description", ""), "", *rows, ""]))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, help="the directory, which is made anew")
    pages: Path = parser.parse_args().pages
    shutil.rmtree(pages, ignore_errors=True)
    write_documents(pages)
    server = launch({"host": {"capacity_bytes": "1MiB"}, "http": {"listen": "127.0.0.1:0"}})
    try:
        with urlopen(f"{server.url}openapi.json", timeout=30) as answer:  # noqa: S310  # our own server
            described = json.load(answer)
    finally:
        server.stop()
    for name, text in {"commands": commands(), "events": event_page(), "http": http_page(described)}.items():
        write(pages, Path("docs", "reference", f"{name}.md"), text.encode())


if __name__ == "__main__":
    main()
