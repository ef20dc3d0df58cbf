"""Read what the paper printed: facts of its tables, to stand beside what is measured and never in one table with it."""

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
    suites: Mapping[str, str] = field(default_factory=dict)
    """Ready suites of the same models and tasks, by the model that rows are `of`."""
    tasks: tuple[str, ...] = ()
    """Tasks of these suites that the columns are scores of; empty where columns are something else."""
    note: str = ""

    @property
    def name(self) -> str:
        return f"Table {self.table}: {self.title}"


def paper_tables() -> tuple[PaperTable, ...]:
    """Return every table, in the paper's order."""
    return _read_file().tables


@dataclass(frozen=True)
class PrintedRow:
    """One row of a table of scores, and what it is called here."""

    row: PaperRow
    model: str
    """Name of the model, as `--model` takes it; "" where nobody can have it."""
    differences: tuple[str, ...]
    """Sentences on how making the model here is not as the paper describes it."""

    def score(self, column: int) -> float | None:
        """Return the score in a column, in percent: what was probably meant, where cells stand in an impossible
        order."""
        return (self.row.probable or self.row.values)[column]


@dataclass(frozen=True)
class PrintedScores:
    """The printed scores of the tasks of one suite."""

    table: PaperTable
    rows: tuple[PrintedRow, ...]


def printed_scores(suite: str) -> PrintedScores:
    """Return what the paper printed of a suite's tasks.

    Raises:
        InputError: it printed nothing of it.
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
    """Names of the models that rows are of, as `--model` takes them, by the rows' words."""
    differences: Mapping[str, str]
    """Sentences on where a model is made otherwise here than in the paper, by the same words."""
    tables: tuple[PaperTable, ...]


_FILE = TypeAdapter(_File)


@cache
def _read_file() -> _File:
    return _FILE.validate_json(data_path("paper.json").read_bytes())
