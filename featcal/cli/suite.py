"""Commands about suites: which there are, and whether one is in order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from featcal.cli import opening
from featcal.cli.options import JSON, SUITE
from featcal.cli.terminal import say, show
from featcal.system.formatting import readable
from featcal.system.resources import embedded_suites, ready_suites

if TYPE_CHECKING:
    from featcal.preflight.check import Preflight


@click.command()
@JSON
def suites(as_json: bool) -> None:
    """List the suites that come with featcal: embedded ones, and benchmarks whose models are on the Hub."""
    from featcal.suite.schema import load_suite

    files = {"embedded": embedded_suites(), "hub": ready_suites()}
    loaded = [(where, load_suite(name)) for where, names in files.items() for name in names]
    document = {
        "suites": [
            {"name": s.name, "where": where, "description": s.description, "tasks": list(s.tasks)}
            for where, s in loaded
        ]
    }
    rows = [(s.name, where, len(s.tasks), s.description) for where, s in loaded]
    show(document, as_json, rows, ("suite", "where", "tasks", "what it is"))


@click.command()
@SUITE
@click.option("--probe/--no-probe", default=None, help="Score every expert on every task.  [where it takes seconds]")
@JSON
def check(suite: str, probe: bool | None, as_json: bool) -> int:
    """Report every problem of a suite at once, and what a calibration would take; exit 1 if there is a problem."""
    from featcal.preflight.check import check as preflight

    found = preflight(opening.load(suite), probe)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        show_check(found)
    return 1 if found.problems else 0


def show_check(found: Preflight) -> None:
    """Problems on stderr; sizes, estimates, downloads and notes as text."""
    if found.problems:
        title = f"{len(found.problems)} problem(s) in suite '{found.suite}':"
        for line in [title, *(f"  - {problem}" for problem in found.problems)]:
            say(line, err=True)
    described = dict(found.description or {})
    described.pop("bytes_written", None)
    described["weights in memory at once"] = readable(described.pop("bytes_of_weights_in_memory", 0))
    rows = [(name, ", ".join(value) if isinstance(value, list) else value) for name, value in described.items()]
    if found.estimates is not None:
        one = found.estimates
        rows += [
            ("peak memory, estimated", readable(one.memory_bytes)),
            ("written to disk", readable(one.disk_bytes)),
            (
                "time on this processor, estimated",
                f"{one.seconds:.0f} s for {one.samples} samples per task, {one.start_seconds:.0f} s of them to start",
            ),
        ]
    if found.diagonal is not None:
        scored = found.diagonal
        rows.append(("every expert on every task", f"{scored.samples} samples of each, split {scored.split_words}"))
    if rows:
        show(None, False, rows, ("", ""))
    if found.downloads:
        click.echo(f"\nto be fetched from the Hub, {readable(found.download_bytes)}:")
        show(None, False, [(one.kind, one.ref, readable(one.bytes)) for one in found.downloads], ("", "", ""))
    if found.notes:
        for line in ["\nnotes:", *(f"  - {note}" for note in found.notes)]:
            say(line)
    if not found.problems:
        click.echo("\nno problems found")


COMMANDS = (suites, check)
