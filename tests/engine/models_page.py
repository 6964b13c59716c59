"""docs/models.md: its table, read and written. Pure text, so that a test without an engine can hold the page to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "models.md"
COLUMNS: Final = ("groups", "chunk", "cold", "warm", "disk", "restart", "half forgotten", "control")
_BEGIN, _END = "<!-- rows -->\n", "<!-- end of rows -->\n"
_HEAD: Final = (
    "| model | dtype | groups | chunk | cold | warm | disk | restart | half forgotten | control |\n"
    + "|---" * 10
    + "|\n"
)


@dataclass(frozen=True)
class Row:
    """One model's.

    dtype: in which it was run.
    shown: by column what a run has shown; or, under "cannot" or "left alone", why nothing was.
    """

    name: str
    dtype: str
    shown: Mapping[str, str] = field(default_factory=dict)

    def to_text(self) -> str:
        for why in ("cannot", "left alone"):
            if why in self.shown:
                said = "not run here" if why == "cannot" else "left alone"
                return f"| {self.name} | {self.dtype} | {said}: {self.shown[why]} |" + " |" * (len(COLUMNS) - 1) + "\n"
        return f"| {self.name} | {self.dtype} | " + " | ".join(self.shown[column] for column in COLUMNS) + " |\n"

    @classmethod
    def from_text(cls, line: str) -> "Row":
        name, dtype, *cells = [cell.strip() for cell in line.strip().strip("|").split(" |")]
        for why, said in (("cannot", "not run here"), ("left alone", "left alone")):
            if cells[0].startswith(f"{said}: "):
                return cls(name, dtype, {why: cells[0].removeprefix(f"{said}: ")})
        return cls(name, dtype, dict(zip(COLUMNS, cells, strict=True)))


def read_rows() -> dict[str, Row]:
    """By name."""
    table = PAGE.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]
    rows = [Row.from_text(line) for line in table.splitlines()[2:]]
    return {row.name: row for row in rows}


def write_row(row: Row) -> None:
    """Put a row in the place of the one with its name."""
    write_rows({**read_rows(), row.name: row})


def write_rows(rows: Mapping[str, Row]) -> None:
    """In the order of `models.MODELS`."""
    from models import MODELS

    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    table = "".join(rows[model.name].to_text() for model in MODELS if model.name in rows)
    PAGE.write_text(before + _BEGIN + _HEAD + table + _END + rest.partition(_END)[2], encoding="utf-8")
