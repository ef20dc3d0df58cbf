"""Start without a suite file: make one of the models and samples that are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli import opening
from featcal.cli.completion import complete_suite
from featcal.cli.groups import OF_MEASUREMENTS, Command
from featcal.cli.options import DRAWN, JSON, MEASURED, Option, block, file_to_write, models_option
from featcal.cli.suite import show_check
from featcal.cli.terminal import bar, say, say_notes, show
from featcal.system.formatting import readable
from featcal.system.progress import keep_memory

if TYPE_CHECKING:
    from featcal.authoring.from_paths import Parts
    from featcal.drift.ledger import DriftLedger
    from featcal.session.session import Session
    from featcal.suite.views import EvaluationSamples


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


def _models_and_samples(required: bool = True) -> Option:
    """Return the options for the models and samples of a suite; where none is required, a suite may be named too."""
    alone = "" if required else "  [none: a suite is named]"
    return block(
        click.option(
            "--base",
            required=required,
            help=f"Folder or Hub id of the model that the experts were fine-tuned from.{alone}",
        ),
        click.option(
            "--expert",
            "experts",
            multiple=True,
            required=required,
            callback=_parse_tasks,
            help=f"TASK=REFERENCE, once per task: folder, Hub id, BASE+ADAPTER or open_clip:ARCH:FILE.{alone}",
        ),
        click.option(
            "--data",
            multiple=True,
            callback=_parse_tasks,
            help="TASK=SAMPLES, once per task: a folder of pictures, .jsonl, .parquet or .npz, with splits in it or "
            "beside each other; a Hub id; a task of the catalogue; or a source in YAML, '{jsonl: FILE, input: "
            '"{question}"}\'.  [none: the suite file asks for them]',
        ),
    )


@click.command()
@_models_and_samples()
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
@click.argument("model", metavar="SUITE|FOLDER", shell_complete=complete_suite)
@_models_and_samples(required=False)
@models_option("Judge this model of the suite, or show it beside FOLDER; may be repeated:", left_out="the merged one")
@MEASURED
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="With FOLDER: report.html or report.md to write; the suite is written beside it as report.yaml.  [no report]",
)
@DRAWN
def diagnose(
    model: str,
    base: str | None,
    experts: Mapping[str, str],
    data: Mapping[str, str],
    models: tuple[str, ...],
    out: Path | None,
    device: str,
    as_json: bool,
    **drawn: Any,
) -> int:
    """Say what is wrong with a merged model, and what to do.

    How much of the experts it keeps, which task suffers most, which layer causes most of the final drift, what a
    calibration with the suite's options brings: all measured, with intervals.

    A merged model of your own needs no suite: name its FOLDER (or Hub id), --base, --expert, --data and --out. It is
    checked, and its report and a suite file are written; --model calibrated adds what calibration would give. If a
    check finds a problem, the exit status is 1 and nothing is written.

    --json prints one document for one model, and {"models": [...]} with a document for each of several.
    """
    from featcal.authoring.from_paths import Parts
    from featcal.suite.views import EvaluationSamples

    on = EvaluationSamples(**drawn)
    if base is None and not (experts or data or out):
        keep_memory()
        _judge(opening.session(model, device, one_shot=False), models or ("merged",), on, as_json)
        return 0
    if base is None or not experts or out is None:
        raise click.UsageError("a model without a suite is named by FOLDER, --base, --expert, --data and --out")
    return _diagnose_own(Parts(base, experts, data, model), models, on, out, (device, as_json))


def _judge(session: Session, models: Sequence[str], on: EvaluationSamples, as_json: bool) -> None:
    """Print the verdict on models of a suite."""
    from featcal.figures.verdict.measure import diagnose as measure
    from featcal.figures.verdict.measure import repair_of

    found = {one: measure(session, one, on, repair_of(session, one), bar()) for one in models}
    for name, verdict in found.items() if not as_json else ():
        if len(found) > 1:
            say(f"{'' if name == models[0] else chr(10)}{name}:")
        for line in verdict.lines:
            say(line)
    head = {"suite": session.family.suite.name, "split": on.split or session.split, "samples": on.samples}
    documents = [{**head, "seed": on.seed, "model": name, **one.to_json()} for name, one in found.items()]
    show(documents[0] if len(documents) == 1 else {"models": documents}, as_json, (), ())


def _diagnose_own(parts: Parts, models: Sequence[str], on: EvaluationSamples, out: Path, how: tuple[str, bool]) -> int:
    """Check a model without a suite, print the verdict on it and write its report.

    Args:
        how: device, and whether one document is printed.
    """
    from featcal.authoring.from_form import read_draft, write_draft
    from featcal.authoring.from_paths import begin
    from featcal.family.opening import open_family
    from featcal.figures.report.write import free, write_report
    from featcal.figures.verdict.measure import attribution_options
    from featcal.preflight.check import check as preflight
    from featcal.session.session import Session

    (device, as_json), file = how, out.with_suffix(".yaml")
    free(out, file)
    begun = begin(parts, file)
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
    session, progress = Session(open_family(suite, device), one_shot=False), bar()
    ledger = session.measure.drift("merged", attribution_options(on), progress)
    # The report first: where it fails, no suite file is left behind.
    report = write_report(session, str(file), out, models=("merged", *models), on=on, progress=progress)
    write_draft(begun.text, file)
    say_notes(report)
    document |= {"suite": str(file), "drift": ledger.to_json(), "report": report}
    show(document, as_json, _worst_layers(ledger), ("task", "final relative drift", "most from layer", "share of it"))
    if not as_json:
        for line in report["verdict"]:
            say(line)
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
