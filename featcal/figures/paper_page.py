"""Show a suite's measurements next to the paper's printed ones: a table, and a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from featcal.figures.study_tables import NOTHING
from featcal.studies.paper import PaperRow
from featcal.studies.reproduce import AVERAGE, Reproduction, TableCell
from featcal.system.formatting import escape_markdown, percent

HEADER = ("row of the paper", "task", "measured", "printed", "95 % interval", "verdict")
READING = (
    "Scores in %, measured ones the mean over calibration seeds. The printed score is of one run on the whole test "
    "split: it agrees if it lies within the interval that contains the score of an equally good model in 95 of 100 "
    "cases, with as many test samples of its own and, from three seeds on, calibration samples of its own. Both runs "
    "score the same test samples, so agreement on one task says little; the average over tasks has the narrow interval."
)


def cell_rows(cells: Iterable[TableCell]) -> list[list[str]]:
    """Return one row of text per score, with the columns of `HEADER`."""
    return [[one.method, one.task, *_numbers(one)] for one in cells]


def paper_page(found: Reproduction) -> str:
    """Return the page of a measured suite, in Markdown."""
    study, table = found.study, found.printed.table
    scores = study.on["scores"]
    seeds = sorted({row.point.seed for row in study.rows if row.point.seed is not None})
    drawn = f", calibration seeds {', '.join(map(str, seeds))}" if seeds else ""
    notes = [f"{row.method}: {note}" for row in _rows(found) for note in row.notes]
    notes += [f"{row.method}: compared in the order that was probably meant" for row in _rows(found) if row.probable]
    averages, tasks = ([one for one in found.cells if (one.task == AVERAGE) is wanted] for wanted in (True, False))
    parts = [
        f"# {escape_markdown(study.suite)} beside the paper's Table {table.table}",
        f"{table.title}. Made by `featcal study paper` on {scores['samples'] or 'all'} samples per task of the "
        f"{scores['split']} split{drawn}; {', '.join(f'{name} {one}' for name, one in study.by.items())}.",
        READING,
        found.summary(),
        *_list("Not as the paper does it:", found.departures),
        "## Averages over tasks",
        _table(
            ("row of the paper", "model", *HEADER[2:]),
            [[one.method, f"`{one.model}`", *_numbers(one)] for one in averages],
        ),
        "## Task by task",
        _table(HEADER, cell_rows(tasks)),
        *_list("Not measured:", found.missing),
        *_list("Odd in the printed table:", notes),
    ]
    return "\n\n".join(parts) + "\n"


def _rows(found: Reproduction) -> list[PaperRow]:
    shown = {one.method for one in found.cells}
    return [one.row for one in found.printed.rows if one.row.method in shown]


def _numbers(cell: TableCell) -> list[str]:
    interval = NOTHING if cell.low is None or cell.high is None else f"{percent(cell.low)} to {percent(cell.high)}"
    return [_percent(cell.measured), _percent(cell.printed), interval, cell.verdict or NOTHING]


def _percent(share: float | None) -> str:
    return NOTHING if share is None else percent(share)


def _list(title: str, sentences: Sequence[str]) -> list[str]:
    lines = [f"- {escape_markdown(' '.join(one.split()))}" for one in sentences]
    return [title, "\n".join(lines)] if lines else []


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
