"""Commands that measure many models alike: what they have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from featcal.cli.options import DEVICE, JSON, block
from featcal.cli.terminal import say, show
from featcal.errors import InputError

if TYPE_CHECKING:
    from featcal.studies.rows import Rows
    from featcal.studies.study import Study

SHOWN = block(
    click.option("--out", type=click.Path(path_type=Path), help="File for the JSON document; must not exist."),
    click.option("--csv", "as_csv", is_flag=True, help="Print CSV: a row for every model and seed, with everything."),
    click.option("--markdown", "as_markdown", is_flag=True, help="Print the table as Markdown."),
    DEVICE,
    JSON,
)
"""How every study ends."""


def refuse_written(out: Path | None, as_json: bool, as_csv: bool, as_markdown: bool) -> None:
    """Before anything is measured: the file must not be there, and one form is printed.

    Raises:
        InputError: the file is there; UsageError: several forms are asked for.
    """
    if as_json + as_csv + as_markdown > 1:
        raise click.UsageError("give one of --json, --csv and --markdown")
    if out is not None and out.exists():
        raise InputError(f"{out} exists; name another file")


def show_study(study: Study, rows: Rows, out: Path | None, as_json: bool, as_csv: bool, as_markdown: bool) -> None:
    """A study on stdout, in one form, in a file, and where pages find it."""
    from featcal.figures import study_tables
    from featcal.studies.kept import keep
    from featcal.whole_files import put_new

    if out is not None:
        try:
            put_new(out, study.text())
        except OSError as error:
            raise InputError(f"{out} cannot be written: {error.strerror}; name another file") from error
    for problem in filter(None, [*rows.problems, keep(study)]):
        say(f"warning: {problem}", err=True)
    if as_csv:
        click.echo(study_tables.row_table(study).to_csv(index=False), nl=False)
    elif as_markdown:
        click.echo(study_tables.markdown(study.summaries()), nl=False)
    else:
        cells, header = study_tables.printed(study.summaries())
        show(study.to_json() if as_json else None, as_json, cells, header)
