"""List and check suites, and convert suite files from and to other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from featcal.cli import opening
from featcal.cli.hand_over import check_folder, target_options
from featcal.cli.options import JSON, SUITE, file_to_write
from featcal.cli.terminal import print_document, print_json, print_message, print_table
from featcal.system.formatting import how_many, readable
from featcal.system.libraries import load_libraries

if TYPE_CHECKING:
    from featcal.preflight.check import Preflight


@click.command("list")
@JSON
def list_suites(as_json: bool) -> None:
    """List the suites that come with featcal.

    Embedded suites include models and samples; those of the published benchmarks are on the Hub.
    """
    from featcal.suite.facts import shipped_suites

    found = shipped_suites()
    rows = [(one["name"], one["where"], len(one["tasks"]), one["description"]) for one in found]
    print_document({"suites": found}, as_json, rows, ("suite", "where", "tasks", "what it is"))


@click.command()
@SUITE
@click.option("--probe/--no-probe", default=None, help="Score every expert on every task.  [if it takes seconds]")
@target_options("Check the folder of a model, named in place of a suite,", "a suite is checked")
@JSON
def check_command(suite: str, probe: bool | None, targets: tuple[str, ...], base: str | None, as_json: bool) -> int:
    """Find every problem of a suite at once; estimate the cost.

    The cost of a calibration is memory, disk, time and downloads. Exit status 1 if there is a problem.

    With --for it checks the folder of a model: it lists every obstacle between it and another program, and the exact
    commands to run next. Nothing is fetched or written.
    """
    if targets:
        if probe is not None:
            raise click.UsageError("--probe needs a suite; --for checks the folder of one model")
        return check_folder(Path(suite), targets, base, as_json)
    if base is not None:
        raise click.UsageError("--base needs --for; a suite names its own base")
    load_libraries()
    from featcal.preflight.check import check_suite as preflight

    found = preflight(opening.load(suite), probe)
    if as_json:
        print_json(found.to_json())
    else:
        show_check(found)
    return 1 if found.problems else 0


def show_check(found: Preflight) -> None:
    """Print problems on stderr; sizes, estimates, downloads and notes on stdout."""
    if found.problems:
        title = f"{len(found.problems)} problem(s) in suite '{found.suite}':"
        for line in [title, *(f"  - {problem}" for problem in found.problems)]:
            print_message(line, err=True)
    described = dict(found.description or {})
    # Shown with the estimates, in readable units.
    described.pop("bytes_written", None)
    if "bytes_of_weights_in_memory" in described:
        described["weights in memory at once"] = readable(described.pop("bytes_of_weights_in_memory"))
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
        if one.generation_seconds >= 1:
            rows.append(
                ("and to see if it still writes", f"up to {one.generation_seconds:.0f} s, if no answer is short")
            )
    if found.diagonal is not None:
        scored = found.diagonal
        rows.append(
            (
                "every expert on every task",
                f"{how_many(scored.counts.values())} samples of each, split {scored.split_words}",
            )
        )
    if rows:
        print_table(rows, ("", ""))
    if found.downloads:
        more = f", and {readable(found.prepared_bytes)} more to be written of it" if found.prepared_bytes else ""
        click.echo(f"\nto be fetched from the Hub, {readable(found.download_bytes)}{more}:")
        print_table([(one.kind, one.ref, readable(one.bytes)) for one in found.downloads], ("", "", ""))
    if found.notes:
        for line in ["\nnotes:", *(f"  - {note}" for note in found.notes)]:
            print_message(line)
    if not found.problems:
        click.echo("\nno problems found")


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--merged",
    help="Folder or Hub id of the merged model, if featcal does not have the method.  [merged by the recipe]",
)
@file_to_write("Suite file to write; must not exist.")
@JSON
def import_command(file: Path, merged: str | None, out: Path, as_json: bool) -> None:
    """Make a suite file of a mergekit recipe or a FusionBench pool."""
    from featcal.authoring.recipes import import_to_file

    document = import_to_file(file, merged, out)
    lines = [("to be filled in", line) for line in document["missing"]]
    lines += [("not quite the recipe", line) for line in document["notes"]]
    print_document(document, as_json, lines, ("", ""))
    if not as_json:
        print_message(f"written to {document['out']}")


@click.command("export-pool")
@SUITE
@file_to_write("YAML file to write; must not exist.")
@JSON
def export_pool_command(suite: str, out: Path, as_json: bool) -> None:
    """Write a suite's base and experts as a FusionBench pool."""
    from featcal.authoring.recipes import export_pool_to_file

    document = export_pool_to_file(opening.load(suite), out)
    print_document(document, as_json, [("models", ", ".join(document["models"]))], ("", ""))
    if not as_json:
        print_message(f"written to {document['out']}")
