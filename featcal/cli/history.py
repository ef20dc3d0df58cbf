"""Show and edit the history of measured runs, with names and pins."""

from __future__ import annotations

import click

from featcal.cli.options import JSON
from featcal.cli.terminal import print_document, say_problems


@click.command("list")
@click.option("--suite", help="Only runs of the suite with this name.  [all]")
@JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with everything that was recorded.")
def list_runs(suite: str | None, as_json: bool, as_csv: bool) -> None:
    """List the runs of the app and of sweeps.

    Runs are stored in the user's cache folder; the environment variable FEATCAL_CACHE sets another.
    """
    from featcal.figures import run_tables
    from featcal.studies.history import History

    if as_csv and as_json:
        # Both would go to stdout, where neither could be read.
        raise click.UsageError("--json and --csv exclude each other; give one")
    history = History()
    found = [run for run in history.runs() if suite in (None, run.suite)]
    say_problems(history)
    if as_csv:
        click.echo(run_tables.run_export(found).to_csv(index=False), nl=False)
        return
    columns = ["run", "suite", "model", "name", "pinned", "measured on", "mean", "worst", "drift"]
    table = run_tables.run_table(found)
    table["pinned"] = ["*" if one else "" for one in table["pinned"]]
    print_document({"runs": [run.to_json() for run in found]}, as_json, table[columns].to_numpy().tolist(), columns)


@click.command()
@click.argument("run")
@click.argument("name")
def rename_command(run: str, name: str) -> None:
    """Give a run a name; an empty name removes it."""
    from featcal.studies.history import History

    History().mark(run, "name", name)


@click.command()
@click.argument("run")
@click.option("--off", is_flag=True, help="Remove the protection.")
def pin_command(run: str, off: bool) -> None:
    """Protect a run from being deleted."""
    from featcal.studies.history import History

    History().mark(run, "pinned", not off)


@click.command()
@click.argument("run", nargs=-1, required=True)
def delete_command(run: tuple[str, ...]) -> None:
    """Delete runs that are not pinned."""
    from featcal.studies.history import History

    for one in run:
        History().delete(one)
