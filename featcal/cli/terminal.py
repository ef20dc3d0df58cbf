"""Print the output of commands: tables and documents on stdout, messages and progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.system.errors import InputError
from featcal.system.formatting import message, printable
from featcal.system.progress import Progress

if TYPE_CHECKING:
    from featcal.studies.records import Records

_LARGE = 1e6
"""Numbers from here on are printed with a power of ten."""


def print_document(document: Any, as_json: bool, rows: Sequence[Sequence[Any]], header: Sequence[str]) -> None:
    """Print the document as JSON, or its rows as an aligned table."""
    if as_json:
        print_json(document)
    else:
        print_table(rows, header)


def print_json(document: Any) -> None:
    """Print a document as JSON."""
    # NaN is not JSON: other readers would fail on it.
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def print_models_json(documents: Sequence[Any]) -> None:
    """Print the document of one model as JSON, and {"models": [...]} with a document for each of several."""
    print_json(documents[0] if len(documents) == 1 else {"models": documents})


def print_table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> None:
    """Print rows as an aligned table, below a header where one of its names is not empty."""
    titled = [[printable(name) for name in header]] if any(header) else []
    cells = [*titled, *([_cell(value) for value in row] for row in rows)]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(len(header))]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def require_new(out: Path | None) -> None:
    """Raise InputError if the file or folder to write exists."""
    if out is not None and out.exists():
        raise InputError(f"{out} exists; name another file or folder")


def require_new_file(out: Path | None) -> None:
    """Raise InputError if the file for a document exists, or its folder does not."""
    require_new(out)
    if out is not None and not out.parent.is_dir():
        raise InputError(f"{out} cannot be written: there is no folder {out.parent}; make it, or name another file")


def write_document(out: Path | None, text: str) -> None:
    """Write a document to a new file, if a file is named.

    Raises:
        InputError: the file exists, or its folder cannot be written to.
    """
    from featcal.system.atomic_files import put_new

    if out is None:
        return
    try:
        # Fails if the file has come into being since `require_new` looked.
        put_new(out, text)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}; name another file") from error


def print_message(text: str, err: bool = False, colour: str | None = None) -> None:
    """Print one message with its control characters escaped, since names in it may come from files."""
    click.secho(message(text), err=err, fg=colour)


def say_notes(document: Mapping[str, Any]) -> None:
    """Print warnings and notes about a written model on stderr."""
    for kind, colour in (("warning", "red"), ("note", None)):
        for one in document.get(f"{kind}s", ()):
            print_message(f"{kind}: {one}", err=True, colour=colour)


def say_problems(records: Records) -> None:
    """Print problems of the history or another list on stderr."""
    for problem in records.problems:
        print_message(f"warning: {problem}", err=True)


def bar() -> Progress:
    """Return a progress bar on stderr with the time left; it is silent if stderr is not a terminal."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def tell(label: str, done: int, total: int) -> None:
        if label not in bars:
            # disable=None: silent if stderr is not a terminal.
            bars[label] = tqdm(total=total, desc=printable(label), file=sys.stderr, disable=None, leave=False)
        bars[label].update(done - bars[label].n)
        if done == total:
            bars.pop(label).close()

    return tell


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < _LARGE else f"{value:.4g}"
    return printable(str(value))
