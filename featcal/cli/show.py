"""Commands that show what was measured: the history, a report, the app."""

from __future__ import annotations

from pathlib import Path

import click

from featcal.cli import opening
from featcal.cli.options import DRAWN, JSON, SUITE, Size, file_to_write, view_options
from featcal.cli.terminal import bar, say_notes, say_problems, show
from featcal.suite.name_grammar import grammar
from featcal.system.formatting import readable
from featcal.system.progress import available_bytes, keep_memory
from featcal.system.resources import bundle_root


@click.group(invoke_without_command=True)
@click.option("--suite", help="Only runs of a suite of this name.")
@JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV on stdout, with everything that was recorded.")
@click.pass_context
def runs(context: click.Context, suite: str | None, as_json: bool, as_csv: bool) -> None:
    """List what was measured, in the app and by sweeps; name, pin or delete it.

    Runs are kept in the user's cache folder, which FEATCAL_CACHE moves.
    """
    from featcal.figures import run_tables
    from featcal.studies.history import History

    if context.invoked_subcommand:
        return
    if as_csv and as_json:
        raise click.UsageError("give one of --json and --csv")
    history = History()
    found = [run for run in history.runs() if suite in (None, run.suite)]
    say_problems(history)
    if as_csv:
        click.echo(run_tables.run_export(found).to_csv(index=False), nl=False)
        return
    columns = ["run", "suite", "model", "name", "pinned", "measured on", "mean", "worst", "drift"]
    table = run_tables.run_table(found)
    table["pinned"] = ["*" if one else "" for one in table["pinned"]]
    show({"runs": [run.to_json() for run in found]}, as_json, table[columns].to_numpy().tolist(), columns)


@runs.command()
@click.argument("run")
@click.argument("name")
def rename(run: str, name: str) -> None:
    """Give a run a name; "" takes it away."""
    from featcal.studies.history import History

    History().mark(run, "name", name)


@runs.command()
@click.argument("run")
@click.option("--off", is_flag=True, help="Unpin it.")
def pin(run: str, off: bool) -> None:
    """Keep a run from being deleted."""
    from featcal.studies.history import History

    History().mark(run, "pinned", not off)


@runs.command()
@click.argument("run", nargs=-1, required=True)
def delete(run: tuple[str, ...]) -> None:
    """Forget runs that are not pinned."""
    from featcal.studies.history import History

    for one in run:
        History().delete(one)


@click.command()
@SUITE
@click.option("--model", "models", multiple=True, help=f"Once per model, the first is the reference: {grammar()}.")
@view_options(
    "Samples per task that drift is measured on.", "Of these samples. Default: validation where every task has it."
)
@file_to_write("report.html, or report.md.")
@DRAWN
def report(
    suite: str,
    models: tuple[str, ...],
    samples: int,
    split: str | None,
    out: Path,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Write a report: scores, drift, attribution, flips, features, settings, and the commands that reproduce them.

    report.html is one file that needs no other and asks no host for anything; report.md is Markdown with its figures
    as SVG beside it. Without --model the merged model and the calibrated one are compared.
    """
    from featcal.figures.report.write import MODELS, write_report
    from featcal.suite.views import EvaluationSamples

    keep_memory()
    session = opening.session(suite, device, one_shot=False)
    on = EvaluationSamples(samples, split, seed)
    document = write_report(session, suite, out, models=models or MODELS, on=on, progress=bar())
    say_notes(document)
    show(document, as_json, [(document["out"], readable(document["bytes"]))], ("written", "size"))


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--port", default=8501, show_default=True)
@click.option("--shared", is_flag=True, help="For others too: on every address, within the folders of --root.")
@click.option(
    "--root",
    "roots",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="With --shared: a folder whose suites, models and samples visitors may read and write. Repeatable.",
)
@click.option(
    "--max-memory", type=Size(), help="With --shared: what suites may need together. Default: half of what is free."
)
@click.pass_context
def app(context: click.Context, port: int, shared: bool, roots: tuple[str, ...], max_memory: int | None) -> int:
    """Start the app on 127.0.0.1; further options go to streamlit.

    A shared server has no accounts: put one that asks for passwords in front of it. docs/serving.md has recipes.
    """
    from featcal.server.launch import start_app
    from featcal.system.sandbox import Shared

    if shared != bool(roots):
        raise click.UsageError("--shared and --root DIR belong together")
    if max_memory is not None and not shared:
        raise click.UsageError("--max-memory is for --shared")
    main = bundle_root() / "app" / "main.py"
    if not shared:
        return start_app(main, port, context.args)
    return start_app(main, port, context.args, Shared(roots, max_memory or (available_bytes() or 2**33) // 2))


COMMANDS = (runs, report, app)
