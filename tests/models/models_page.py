"""docs/models.md: its tables, read and written. Pure text, so that a test without an engine can hold the page to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

USUAL_DTYPE: Final = "float32"
AS_IT_SHOULD_BE: Final = "equal"
"""In one word: the tokens are equal in every phase, and differ in the control for each group or cache."""
CONTROL: Final = "differs for each"
PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@dataclass(frozen=True)
class Table:
    """One engine's. It lies between two marks that say its `name`.

    columns: what stands in a cell of its own.
    phases: what is one cell together, the last of them the control.
    """

    name: str
    columns: tuple[str, ...]
    phases: tuple[str, ...]

    @property
    def begin(self) -> str:
        return f"<!-- {self.name} -->\n"

    @property
    def end(self) -> str:
        return f"<!-- end of {self.name} -->\n"

    @property
    def head(self) -> str:
        names = ("model", *self.columns, "tokens")
        return f"| {' | '.join(names)} |\n" + "|---" * len(names) + "|\n"


VLLM: Final = Table("rows", ("groups", "chunk"), ("cold", "warm", "disk", "restart", "half forgotten", "control"))
SGLANG: Final = Table(
    "SGLang's rows", ("pools", "page"), ("cold", "warm", "at once", "restart", "calls fail", "control")
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

    def to_text(self, table: Table = VLLM) -> str:
        name = self.name if self.dtype == USUAL_DTYPE else f"{self.name}, {self.dtype}"
        for why, said in _NOT_RUN.items():
            if why in self.shown:
                return f"| {name} | {said}: {self.shown[why]} |\n"
        found = {phase: self.shown[phase] for phase in table.phases}
        usual = dict.fromkeys(table.phases, AS_IT_SHOULD_BE) | {table.phases[-1]: CONTROL}
        tokens = AS_IT_SHOULD_BE if found == usual else "; ".join(f"{phase}: {is_so}" for phase, is_so in found.items())
        return "| " + " | ".join([name, *(self.shown[column] for column in table.columns), tokens]) + " |\n"

    @classmethod
    def from_text(cls, line: str, table: Table = VLLM) -> "Row":
        named, *cells = [cell.strip() for cell in line.strip().strip("|").split(" |")]
        name, _, dtype = named.partition(", ")
        dtype = dtype or USUAL_DTYPE
        for why, said in _NOT_RUN.items():
            if cells[0].startswith(f"{said}: "):
                return cls(name, dtype, {why: cells[0].removeprefix(f"{said}: ")})
        shown = dict(zip(table.columns, islice(cells, len(table.columns)), strict=True))
        tokens = cells[len(table.columns)]
        if tokens == AS_IT_SHOULD_BE:
            phases = dict.fromkeys(table.phases, AS_IT_SHOULD_BE) | {table.phases[-1]: CONTROL}
        else:
            phases = dict(said.split(": ", 1) for said in tokens.split("; "))
        return cls(name, dtype, {**shown, **phases})


_NOT_RUN: Final = {"cannot": "not run here", "left alone": "left alone"}


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
