"""Start without a suite file: make one of the models and samples that are named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli.groups import OF_MEASUREMENTS, Command
from featcal.cli.options import DRAWN, JSON, MEASURED, block, file_to_write, models_option
from featcal.cli.suite import show_check
from featcal.cli.terminal import bar, say, say_notes, show
from featcal.system.formatting import readable
from featcal.system.progress import keep_memory

if TYPE_CHECKING:
    from featcal.drift.ledger import DriftLedger


def _parse_tasks(context: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Return task → value of every `TASK=VALUE`; raise BadParameter for another form or a task given twice."""
    found: dict[str, str] = {}
    for one in given:
        task, equals, value = one.partition("=")
        if not (equals and task.strip() and value.strip()):
            raise click.BadParameter(f"'{one}' is not TASK=VALUE, such as cars=./cars", context, param)
        if task.strip() in found:
            raise click.BadParameter(f"the task '{task.strip()}' is given twice", context, param)
        found[task.strip()] = value.strip()
    return found


MODELS_AND_SAMPLES = block(
    click.option("--base", required=True, help="Folder or Hub id of the model that the experts were fine-tuned from."),
    click.option(
        "--expert",
        "experts",
        multiple=True,
        required=True,
        callback=_parse_tasks,
        help="TASK=REFERENCE, once per task: folder, Hub id, BASE+ADAPTER or open_clip:ARCH:FILE.",
    ),
    click.option(
        "--data",
        multiple=True,
        callback=_parse_tasks,
        help="TASK=SAMPLES, once per task: a folder of pictures, .jsonl, .parquet or .npz, with splits in it or beside "
        "each other; a Hub id; a task of the catalogue; or a source in YAML, '{jsonl: FILE, input: \"{question}\"}'.  "
        "[none: the suite file asks for them]",
    ),
)
"""The models and samples of a suite."""


@click.command()
@MODELS_AND_SAMPLES
@click.option("--merged", help="Folder or Hub id of the merged model, or a merge method.  [task-arithmetic, scale 0.3]")
@file_to_write("Suite file to write; must not exist.")
@JSON
def init(
    base: str, experts: Mapping[str, str], data: Mapping[str, str], merged: str | None, out: Path, as_json: bool
) -> int:
    """Write a suite file of models and samples, and check it.

    Splits and columns are found; everything that was assumed is printed, and so is what could not be found out. The
    same lines head the file, which is then yours to edit. Exit status 1 if something is wrong or to be filled in.
    """
    from featcal.authoring.from_form import read_draft, write_draft
    from featcal.authoring.from_paths import Parts, begin
    from featcal.preflight.check import check as preflight

    begun = begin(Parts(base, experts, data, merged), out)
    # Checked before it is written; a probe would score experts, which takes as long as a command.
    found = preflight(read_draft(begun.text, out), probe=False)
    write_draft(begun.text, out)
    document = {
        "out": str(out),
        "assumed": list(begun.assumed),
        "missing": list(begun.missing),
        "problems": list(found.problems),
        "notes": list(found.notes),
    }
    lines = [("taken for granted", line) for line in begun.assumed]
    show(document, as_json, lines, ("", ""))
    if not as_json:
        say(f"written to {out}")
    for line in begun.missing:
        say(f"to be filled in: {line}", err=True)
    for line in found.problems:
        say(f"featcal check: {line}", err=True)
    return 1 if begun.missing or found.problems else 0


@click.command(cls=Command, old=OF_MEASUREMENTS)
@click.argument("folder")
@MODELS_AND_SAMPLES
@models_option("Show this model as well; may be repeated:", left_out="the one in FOLDER alone")
@MEASURED
@file_to_write("File to write, report.html or report.md; the suite is written beside it as report.yaml.")
@DRAWN
def diagnose(
    folder: str,
    base: str,
    experts: Mapping[str, str],
    data: Mapping[str, str],
    models: tuple[str, ...],
    samples: int,
    split: str | None,
    out: Path,
    seed: int,
    device: str,
    as_json: bool,
) -> int:
    """Check a merged model of your own and report its drift.

    No suite is needed; FOLDER may also be a Hub id. A suite file is written beside the report, whose commands name it.
    --model calibrated adds what calibration would give. If a check finds a problem, the exit status is 1 and nothing
    is written.
    """
    from featcal.authoring.from_form import read_draft, write_draft
    from featcal.authoring.from_paths import Parts, begin
    from featcal.family.opening import open_family
    from featcal.figures.report.write import free, write_report
    from featcal.preflight.check import check as preflight
    from featcal.session.session import Session
    from featcal.suite.views import DriftOptions, EvaluationSamples

    file = out.with_suffix(".yaml")
    free(out, file)
    begun = begin(Parts(base, experts, data, folder), file)
    suite = read_draft(begun.text, file)
    found = preflight(suite, probe=False)
    document: dict[str, Any] = {
        "assumed": list(begun.assumed),
        "missing": list(begun.missing),
        "check": found.to_json(),
    }
    if not as_json:
        show(None, False, [("taken for granted", line) for line in begun.assumed], ("", ""))
        show_check(found)
    if begun.missing or found.problems:
        for line in begun.missing:
            say(f"not given: {line}", err=True)
        show(document, as_json, (), ())
        return 1
    keep_memory()
    on, progress = EvaluationSamples(samples, split, seed), bar()
    session = Session(open_family(suite, device), one_shot=False)
    ledger = session.measure.drift("merged", DriftOptions(samples, split, seed, attribution=True), progress)
    # The report first: where it fails, no suite file is left behind.
    report = write_report(session, str(file), out, models=("merged", *models), on=on, progress=progress)
    write_draft(begun.text, file)
    say_notes(report)
    document |= {"suite": str(file), "drift": ledger.to_json(), "report": report}
    show(document, as_json, _worst_layers(ledger), ("task", "final relative drift", "most from layer", "share of it"))
    if not as_json:
        say(f"written to {out} ({readable(report['bytes'])}) and {file}")
    return 0


def _worst_layers(ledger: DriftLedger) -> list[tuple[str, float, str, float]]:
    """Return every task with its final drift, the layer that caused most of it (Prop. 2), and that layer's share."""
    rows = []
    for task, entry in ledger.to_json()["tasks"].items():
        layers = entry["layers"]
        worst = max(layers, key=lambda layer: layer["share"] or 0.0)
        rows.append((task, layers[-1]["relative_drift"], worst["layer"], worst["share"] or 0.0))
    return rows
