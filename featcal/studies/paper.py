"""Read the paper's printed tables, for display beside measured tables, but never merged with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from pydantic import TypeAdapter

from featcal.suite.name_grammar import name_on
from featcal.system.errors import InputError
from featcal.system.resources import data_path


@dataclass(frozen=True)
class PaperRow:
    """One row as printed."""

    method: str
    values: tuple[float | None, ...]
    """Printed values by column; None if the paper has no number."""
    of: str = ""
    """The model of the row, if a table has several."""
    average: float | None = None
    """Number as the paper prints it."""
    deviations: tuple[float | None, ...] = ()
    """Standard deviations over seeds, if the paper has them."""
    probable: tuple[float | None, ...] = ()
    """Values that were probably meant, if the printed cells are in an impossible order."""
    notes: tuple[str, ...] = ()
    """Remarks on errors or oddities in the row."""

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
    suites: Mapping[str, str] = field(default_factory=dict)
    """Ready suites of the same models and tasks, by the rows' `of`."""
    tasks: tuple[str, ...] = ()
    """Tasks of these suites whose scores are the columns; empty if columns are something else."""
    note: str = ""

    @property
    def name(self) -> str:
        return f"Table {self.table}: {self.title}"


def paper_tables() -> tuple[PaperTable, ...]:
    """Return every table, in the paper's order."""
    return _read_file().tables


@dataclass(frozen=True)
class PrintedRow:
    """One row of a table of scores, with the name of its model in featcal."""

    row: PaperRow
    model: str
    """Name of the model, as for `--model`; "" if no such model can be made."""
    differences: tuple[str, ...]
    """Sentences on differences between the model here and in the paper."""

    def score(self, column: int) -> float | None:
        """Return the score in a column, in percent; the probably meant one if cells are in an impossible order."""
        return (self.row.probable or self.row.values)[column]


@dataclass(frozen=True)
class PrintedScores:
    """The printed scores of the tasks of one suite."""

    table: PaperTable
    rows: tuple[PrintedRow, ...]


def printed_scores(suite: str) -> PrintedScores:
    """Return the printed scores of a suite's tasks.

    Raises:
        InputError: the paper has none for this suite.
    """
    own = [(one, of) for one in paper_tables() if one.tasks for of, name in one.suites.items() if name == suite]
    if not own:
        known = [name for one in paper_tables() if one.tasks for name in one.suites.values()]
        raise InputError(f"the paper prints no scores of the tasks of suite '{suite}'; it does of {', '.join(known)}")
    (table, of), *_ = own
    return PrintedScores(table, tuple(_name_row(row) for row in table.rows if row.of == of))


def _name_row(row: PaperRow) -> PrintedRow:
    file = _read_file()
    # "Task Arithmetic w/ FEATCAL": a merger, and what is done to the model that it makes.
    steps = row.method.split(" w/ ")
    names = [file.models.get(one, "") for one in steps]
    model = name_on(names[1], names[0]) if len(names) == 2 else names[0]
    differences = tuple(file.differences[one] for one in steps if one in file.differences)
    return PrintedRow(row, model if all(names) else "", differences)


@dataclass(frozen=True)
class _File:
    paper: str
    reading: str
    models: Mapping[str, str]
    """Names of the rows' models in featcal, as for `--model`, by the paper's words."""
    differences: Mapping[str, str]
    """Sentences on differences between models in featcal and in the paper, by the paper's words."""
    tables: tuple[PaperTable, ...]


_FILE = TypeAdapter(_File)


@cache
def _read_file() -> _File:
    return _FILE.validate_json(data_path("paper.json").read_bytes())
