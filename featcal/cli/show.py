"""Show results from the command line: a report, the app."""

from __future__ import annotations

from pathlib import Path

import click

from featcal.cli import opening
from featcal.cli.groups import OF_MEASUREMENTS, Command
from featcal.cli.options import DRAWN, MEASURED, SUITE, Size, file_to_write, models_option
from featcal.cli.terminal import bar, say_notes, show
from featcal.system.extras import require_packages
from featcal.system.formatting import readable
from featcal.system.progress import available_bytes, keep_memory
from featcal.system.resources import bundle_root


@click.command(cls=Command, old=OF_MEASUREMENTS)
@SUITE
@models_option(
    "Show this model, the first as the reference; may be repeated:", left_out="the merged model and the calibrated one"
)
@MEASURED
@file_to_write("File to write, report.html or report.md; must not exist.")
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
    """Write a report of models: scores, drift, features, commands.

    It also has attribution, flips and settings; its commands give the same numbers again.

    report.html is one file that needs no other file and no network; report.md is Markdown, with its figures as SVG in
    a folder beside it.
    """
    require_packages("plotly", "jinja2")
    from featcal.figures.report.write import MODELS, write_report
    from featcal.suite.views import EvaluationSamples

    keep_memory()
    session = opening.session(suite, device, one_shot=False)
    on = EvaluationSamples(samples, split, seed)
    document = write_report(session, suite, out, models=models or MODELS, on=on, progress=bar())
    say_notes(document)
    show(document, as_json, [(document["out"], readable(document["bytes"]))], ("written", "size"))


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--port", default=8501, show_default=True, help="Port that the app listens on.")
@click.option("--shared", is_flag=True, help="Serve others too: on every address, within the folders of --root.")
@click.option(
    "--root",
    "roots",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="With --shared: a folder whose suites, models and samples visitors may read and write; may be repeated.  "
    "[none]",
)
@click.option(
    "--max-memory", type=Size(), help="With --shared: memory that suites may need together.  [half of what is free]"
)
@click.pass_context
def app(context: click.Context, port: int, shared: bool, roots: tuple[str, ...], max_memory: int | None) -> int:
    """Start the app in a browser, on 127.0.0.1.

    Further options go to streamlit. A shared server has no accounts: put a server that asks for passwords in front of
    it (docs/serving.md).
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
    # Where the system does not tell its memory, 4 GiB are left to suites.
    return start_app(main, port, context.args, Shared(roots, max_memory or (available_bytes() or 2**33) // 2))
