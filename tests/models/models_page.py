"""docs/models.md: its tables, read and written. Pure text, so that a test without an engine can hold the page to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@dataclass(frozen=True)
class Table:
    """One engine's. It lies between two marks that say its `name`."""

    name: str
    columns: tuple[str, ...]

    @property
    def begin(self) -> str:
        return f"<!-- {self.name} -->\n"

    @property
    def end(self) -> str:
        return f"<!-- end of {self.name} -->\n"

    @property
    def head(self) -> str:
        names = ("model", "dtype", *self.columns)
        return f"| {' | '.join(names)} |\n" + "|---" * len(names) + "|\n"


VLLM: Final = Table("rows", ("groups", "chunk", "cold", "warm", "disk", "restart", "half forgotten", "control"))
SGLANG: Final = Table("SGLang's rows", ("pools", "page", "cold", "warm", "at once", "restart", "calls fail", "control"))


@dataclass(frozen=True)
class Row:
    """One model's.

    dtype: in which it was run.
    shown: by column what a run has shown; or, under "cannot" or "left alone", why nothing was.
    """

    name: str
    dtype: str
    shown: Mapping[str, str] = field(default_factory=dict)

    def to_text(self, table: Table = VLLM) -> str:
        for why in ("cannot", "left alone"):
            if why in self.shown:
                said = "not run here" if why == "cannot" else "left alone"
                return (
                    f"| {self.name} | {self.dtype} | {said}: {self.shown[why]} |"
                    + " |" * (len(table.columns) - 1)
                    + "\n"
                )
        return f"| {self.name} | {self.dtype} | " + " | ".join(self.shown[column] for column in table.columns) + " |\n"

    @classmethod
    def from_text(cls, line: str, table: Table = VLLM) -> "Row":
        name, dtype, *cells = [cell.strip() for cell in line.strip().strip("|").split(" |")]
        for why, said in (("cannot", "not run here"), ("left alone", "left alone")):
            if cells[0].startswith(f"{said}: "):
                return cls(name, dtype, {why: cells[0].removeprefix(f"{said}: ")})
        return cls(name, dtype, dict(zip(table.columns, cells, strict=True)))


def read_rows(table: Table = VLLM) -> dict[str, Row]:
    """By name."""
    text = PAGE.read_text(encoding="utf-8").partition(table.begin)[2].partition(table.end)[0]
    rows = [Row.from_text(line, table) for line in text.splitlines()[2:]]
    return {row.name: row for row in rows}


def write_row(row: Row, table: Table = VLLM) -> None:
    """Put a row in the place of the one with its name."""
    write_rows({**read_rows(table), row.name: row}, table)


def write_rows(rows: Mapping[str, Row], table: Table = VLLM) -> None:
    """In the order of `models.BY_NAME`."""
    from models import BY_NAME

    before, _, rest = PAGE.read_text(encoding="utf-8").partition(table.begin)
    text = "".join(rows[name].to_text(table) for name in BY_NAME if name in rows)
    PAGE.write_text(
        before + table.begin + table.head + text + table.end + rest.partition(table.end)[2], encoding="utf-8"
    )
