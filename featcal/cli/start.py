"""Start without a suite file: make one from named models and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli import opening
from featcal.cli.completion import complete_suite
from featcal.cli.options import DRAWN, JSON, MEASURED, NewPath, Option, block, file_to_write, models_option
from featcal.cli.terminal import bar, print_document, print_message, print_models_json

if TYPE_CHECKING:
    from featcal.session.session import Session
    from featcal.suite.views import EvaluationSamples


def parse_tasks(context: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
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
    """Return the options for the models and samples of a suite; options that are not required can come from files."""
    alone = "" if required else "  [as the files of FOLDER say]"
    without = "none: the suite file asks for them" if required else "texts that experts write"
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
            callback=parse_tasks,
            help=f"TASK=REFERENCE, once per task: folder, Hub id, BASE+ADAPTER or open_clip:ARCH:FILE.{alone}",
        ),
        click.option(
            "--data",
            multiple=True,
            callback=parse_tasks,
            help="TASK=SAMPLES, once per task: a folder of pictures, .jsonl, .parquet or .npz, with splits in it or "
            "beside each other; a Hub id; a task of the catalogue; or a source in YAML, '{jsonl: FILE, input: "
            f'"{{question}}"}}\'.  [{without}]',
        ),
    )


@click.command()
@_models_and_samples()
@click.option("--merged", help="Folder or Hub id of the merged model, or a merge method.  [task-arithmetic, scale 0.3]")
@file_to_write("Suite file to write; must not exist.")
@JSON
def init_command(
    base: str, experts: Mapping[str, str], data: Mapping[str, str], merged: str | None, out: Path, as_json: bool
) -> int:
    """Write a suite file from models and samples, and check it.

    featcal finds splits and columns, prints its assumptions and what it could not find, and writes these lines at the
    head of the file, which you can edit. Exit status 1 if something is wrong or to be filled in.
    """
    from featcal.authoring.from_form import read_draft, write_draft
    from featcal.authoring.from_paths import SuiteParts, write_suite_text
    from featcal.preflight.check import check_suite as preflight

    begun = write_suite_text(SuiteParts(base, experts, data, merged), out)
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
    print_document(document, as_json, lines, ("", ""))
    if not as_json:
        print_message(f"written to {out}")
    for line in begun.missing:
        print_message(f"to be filled in: {line}", err=True)
    for line in found.problems:
        print_message(f"featcal check: {line}", err=True)
    return 1 if begun.missing or found.problems else 0


@click.command()
@click.argument("model", metavar="SUITE|FOLDER", shell_complete=complete_suite)
@_models_and_samples(required=False)
@models_option("Judge this model of the suite, or show it beside FOLDER; may be repeated:", left_out="the merged one")
@MEASURED
@click.option(
    "--out",
    type=NewPath(),
    help="With FOLDER: report.html or report.md to write; the suite is written beside it as report.yaml.  [no report]",
)
@DRAWN
def diagnose_command(
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

    It measures, with intervals: how much of the experts the merge keeps, which task suffers most, which layer causes
    most of the final drift, and the gain of a calibration with the suite's options.

    A merged model of your own needs no suite: name its FOLDER (or Hub id). Base and experts come from its
    mergekit_config.yml or card, unless --base and --expert name others; without --data the experts write the texts to
    measure on. The files beside the weights are compared first: tokenizer, chat template, configuration. --out writes a
    report and the suite; --model calibrated adds a calibrated model to it. If base, experts or samples are not in
    order, the exit status is 1 and nothing is written.

    --json prints one document for one model, and {"models": [...]} with a document for each of several.
    """
    from featcal.suite.views import EvaluationSamples

    on = EvaluationSamples(**drawn)
    if _is_suite(model):
        if base is not None or experts or data or out:
            raise click.UsageError(
                f"'{model}' is a suite, which names models and samples itself; leave out --base, --expert, --data and "
                "--out, which are for the folder of a merged model (featcal report writes the report of a suite)"
            )
        _judge(opening.open_suite_session(model, device, one_shot=False), models or ("merged",), on, as_json)
        return 0
    if models and out is None:
        raise click.UsageError("--model needs --out: it names the models of the report on FOLDER")
    from featcal.cli.own_merge import DiagnosisOrder, diagnose_own

    return diagnose_own(DiagnosisOrder(model, base, experts, data, models, out), on, device, as_json)


def _is_suite(named: str) -> bool:
    """Say whether the name is a suite's, rather than a model's.

    Raises:
        InputError: it is neither.
    """
    from featcal.formats.hub import hub_model
    from featcal.formats.lora import split_lora
    from featcal.formats.open_clip_config import PREFIXES
    from featcal.suite.schema import suite_file
    from featcal.system.errors import InputError

    try:
        suite_file(named)
    except InputError as error:
        parts = [part for part in split_lora(named, Path.cwd()) if part is not None]
        if named.startswith(PREFIXES) or all(Path(part).is_dir() or hub_model(part) for part in parts):
            return False
        raise InputError(
            *error.problems, f"nor is '{named}' the folder of a merged model, or its id on the Hub"
        ) from error
    return True


def _judge(session: Session, models: Sequence[str], on: EvaluationSamples, as_json: bool) -> None:
    """Print the verdict on models of a suite, every line as soon as it is known."""
    from featcal.figures.verdict.measure import judge_stepwise, repair_of, verdict_json

    documents = []
    for number, name in enumerate(models):
        if len(models) > 1 and not as_json:
            print_message(f"{chr(10) if number else ''}{name}:")
        printed_lines = 0
        for verdict in judge_stepwise(session, name, on, repair_of(session, name), bar()):
            for line in () if as_json else verdict.lines[printed_lines:]:
                print_message(line)
            printed_lines = len(verdict.lines)
        documents.append(verdict_json(session, name, on, verdict))
    if as_json:
        print_models_json(documents)
