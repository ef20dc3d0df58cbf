"""Read what the paper printed: facts of its tables, to stand beside what is measured and never in one table with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from pydantic import TypeAdapter

from featcal.system.resources import data_path


@dataclass(frozen=True)
class PaperRow:
    """One row as printed."""

    method: str
    values: tuple[float | None, ...]
    """By column; None where the paper has no number."""
    of: str = ""
    """The model that the row is of, where a table has several."""
    average: float | None = None
    """As printed."""
    deviations: tuple[float | None, ...] = ()
    """Over seeds, where the paper has them."""
    probable: tuple[float | None, ...] = ()
    """Values that were probably meant, where cells stand in an impossible order."""
    notes: tuple[str, ...] = ()
    """Remarks on what is wrong or odd about it."""

    @property
    def mean(self) -> float | None:
        """Return the mean of the cells as printed."""
        known = [one for one in self.values if one is not None]
        return sum(known) / len(known) if known and self.average is not None else None


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper."""

    table: int
    title: str
    columns: tuple[str, ...]
    rows: tuple[PaperRow, ...]
    suite: str = ""
    """The ready suite of the same models and tasks, if there is one."""
    note: str = ""

    @property
    def name(self) -> str:
        return f"Table {self.table}: {self.title}"


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """Return every table, in the paper's order."""
    return _FILE.validate_json(data_path("paper.json").read_bytes()).tables


@dataclass(frozen=True)
class _File:
    paper: str
    reading: str
    tables: tuple[PaperTable, ...]


_FILE = TypeAdapter(_File)
