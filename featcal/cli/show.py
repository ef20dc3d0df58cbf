"""Show results from the command line: a report, the app, tools for agents."""

from __future__ import annotations

import re
from pathlib import Path

import click

from featcal.cli import opening
from featcal.cli.options import DRAWN, MEASURED, SUITE, Size, file_to_write, models_option
from featcal.cli.terminal import bar, print_document, say_notes
from featcal.system.extras import require_packages
from featcal.system.formatting import readable
from featcal.system.progress import half_of_available_bytes
from featcal.system.resources import bundle_root


@click.command()
@SUITE
@models_option(
    "Show this model, the first as the reference; may be repeated:", left_out="the merged model and the calibrated one"
)
@MEASURED
@file_to_write("File to write, report.html or report.md; must not exist.")
@DRAWN
def report_command(
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

    session = opening.open_suite_session(suite, device, one_shot=False)
    on = EvaluationSamples(samples, split, seed)
    document = write_report(session, suite, out, models=models or MODELS, on=on, progress=bar())
    say_notes(document)
    print_document(document, as_json, [(document["out"], readable(document["bytes"]))], ("written", "size"))


def parse_base(context: click.Context, param: click.Parameter, given: str) -> str:
    """Return a path as "/one/two", or "" for the root; raise BadParameter for what is no plain path."""
    base = f"/{given.strip('/')}".rstrip("/")
    if not re.fullmatch(r"(/[\w~-][\w.~-]*)*", base, re.ASCII):
        raise click.BadParameter(f"'{given}' is not a path of plain names, such as /featcal", context, param)
    return base


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--port", default=8501, show_default=True, help="Port that the app listens on.")
@click.option("--no-browser", is_flag=True, help="Do not open a browser, as on a server; --shared opens none either.")
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
    "--max-memory", type=Size(), help="With --shared: largest memory of all suites together.  [half of the free memory]"
)
@click.option(
    "--base-url",
    default="",
    envvar="STREAMLIT_SERVER_BASE_URL_PATH",
    callback=parse_base,
    help="Path below which a proxy serves the app, such as /featcal.  [/]",
)
@click.pass_context
def app_command(
    context: click.Context,
    port: int,
    no_browser: bool,
    shared: bool,
    roots: tuple[str, ...],
    max_memory: int | None,
    base_url: str,
) -> int:
    """Start the app in a browser, on 127.0.0.1.

    Further options go to streamlit. A shared server has no accounts: put it behind a server that asks for passwords
    (docs/serving.md).
    """
    from featcal.server.launch import start_app
    from featcal.system.sandbox import ServerRules

    if shared != bool(roots):
        raise click.UsageError("--shared and --root DIR need each other; give both")
    if max_memory is not None and not shared:
        raise click.UsageError("--max-memory needs --shared")
    main = bundle_root() / "app" / "main.py"
    if not shared:
        return start_app(main, port, context.args, opens_browser=not no_browser, base=base_url)
    rules = ServerRules(roots, max_memory or half_of_available_bytes())
    return start_app(main, port, context.args, rules, base=base_url)


@click.command()
@click.option(
    "--root",
    "roots",
    multiple=True,
    required=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="Folder whose suites, models and samples may be read; relative paths start from the first. May be repeated.",
)
@click.option("--allow-write", is_flag=True, help="Let agents write new folders below a root; nothing is overwritten.")
@click.option("--allow-test", is_flag=True, help="Let agents measure on the test split; looks are counted.")
@click.option(
    "--allow-hub", is_flag=True, help="Let agents ask the Hub about its models, and use those in its local cache."
)
@click.option("--max-memory", type=Size(), help="Largest estimated memory of a job.  [half of the free memory]")
@click.option(
    "--max-minutes",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Largest estimated minutes of a job.",
)
def mcp_command(
    roots: tuple[str, ...],
    allow_write: bool,
    allow_test: bool,
    allow_hub: bool,
    max_memory: int | None,
    max_minutes: float,
) -> None:
    """Serve ten tools to an agent, over MCP on stdin and stdout.

    A client of the Model Context Protocol starts this command itself (docs/serving.md has its configuration). Agents
    check, diagnose, choose and compare within the folders of --root; long work is a job with an estimate first. Needs
    the package mcp: pip install 'featcal[mcp]'.
    """
    from featcal.server.agents.access import Access
    from featcal.server.agents.serve import queue_name, serve
    from featcal.system.sandbox import ServerRules

    memory = max_memory or half_of_available_bytes()
    rules = ServerRules(roots, memory, hub=allow_hub, queue=queue_name(roots, allow_hub))
    serve(rules, Access(allow_write, allow_test, 60 * max_minutes))
