"""Calibrate from the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli import opening
from featcal.cli.hand_over import say_where_to
from featcal.cli.options import (
    DEVICE,
    JSON,
    JSON_FILE,
    MAX_DEVICE_MEMORY,
    MAX_MEMORY,
    MODEL,
    OUT,
    SUITE,
    calibration_options,
    model_option,
    models_option,
)
from featcal.cli.terminal import (
    bar,
    print_document,
    print_message,
    require_new_file,
    say_notes,
    say_problems,
    write_document,
)
from featcal.suite.calibration_options import CHOSEN
from featcal.system.errors import InputError, UncheckedError
from featcal.system.formatting import percent, readable
from featcal.system.libraries import load_libraries
from featcal.system.progress import keep_memory, silent

if TYPE_CHECKING:
    from featcal.family.opening import Family
    from featcal.session.session import Session
    from featcal.suite.calibration_options import CalibrationConfig


@click.command()
@SUITE
@MODEL
@OUT
@calibration_options()
@MAX_MEMORY
@MAX_DEVICE_MEMORY
@click.option("--resume", is_flag=True, help="Go on from the finished blocks of an interrupted run.")
@click.option(
    "--require-canary",
    is_flag=True,
    help="End with status 1 if generation is broken or could not be checked (featcal study canary).",
)
@DEVICE
@JSON
def calibrate_command(
    suite: str,
    model: str,
    out: Path,
    max_memory: int | None,
    max_device_memory: int | None,
    resume: bool,
    require_canary: bool,
    device: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Calibrate a model in closed form and write the checkpoint.

    --model names the model to calibrate, from which --rho makes the ridge's anchor: any merge, baseline or checkpoint.

    [Brackets] give the default of an option, by recipe if it depends on that; a suite file may set its own under
    `calibration`.

    The table shows for every block and task the relative drift of the calibrated features from the expert's on the
    calibration samples. It is taken over the block's own tokens: in a T5 decoder over the decoder's, without the
    encoder's output. With torchrun (docs/scale.md) several processes share the tasks; one of them writes and prints.

    A model that generates text is then compared with the merged one as in `featcal study canary`. If its generation is
    broken, the model is written too, with warnings. A check that fails to run is a warning, and exit status 1.
    """
    load_libraries()
    from featcal.calibration.calibrate import calibrate_to_folder, config_for
    from featcal.calibration.memory import MemoryLimits
    from featcal.system.distributed import join_process_group, own_device

    if max_memory is None:
        keep_memory()
    device = own_device(device)
    with join_process_group(device) as ranks:
        # A model that is made in a session would be made once more by each process.
        if ranks.several and model != "merged" and not Path(model).exists():
            raise InputError(
                f"--model {model}: several processes calibrate the suite's merged model or one in a folder; write this "
                "one to a folder first, and name that"
            )
        session = opening.open_suite_session(suite, device)
        family = session.fit.family_with(model)
        if require_canary and not family.adapter.generates:
            raise InputError(f"--require-canary has no effect: a {family.adapter.family} model generates no text")
        # Notes and a progress bar once for all processes.
        config, progress = config_for(family, **chosen), silent if ranks.rank else bar()
        if not ranks.rank:
            _say_slow_precision(config, family)
        limits = MemoryLimits(max_memory, max_device_memory)
        try:
            document = calibrate_to_folder(family, config, out, resume=resume, max_memory=limits, progress=progress)
        except UncheckedError as error:
            document = error.document  # its warnings say what was not checked
    if not document:  # of several processes rank 0 alone prints
        return
    list_checkpoint(session, config, model, out)
    show_drift(document, as_json)
    if is_doubtful(document, require_canary):
        raise SystemExit(1)


def list_checkpoint(session: Session, config: CalibrationConfig, model: str, out: Path) -> None:
    """Add the folder to the app's list of checkpoints."""
    from featcal.studies.checkpoints import Checkpoints
    from featcal.studies.recording import run_of

    family, known = session.family, Checkpoints()
    run = run_of(session, session.resolve(config, model))
    known.add(out, run, family.adapter.loading(out, family.container.config))
    say_problems(known)


def show_drift(document: Mapping[str, Any], as_json: bool) -> None:
    """Print warnings and notes on stderr, and the document, or its drift after every block and the folder."""
    say_notes(document)
    rows = [(block, *(f"{value:.4f}" for value in one.values())) for block, one in document["relative_drift"].items()]
    print_document(document, as_json, rows, ("block, relative drift", *document["tasks"]))
    if not as_json:
        _say_written(document)


def is_doubtful(document: Mapping[str, Any], require_canary: bool) -> bool:
    """Say whether a check of a written model could not run, or generation is not known to work although that is
    required."""
    # A missing canary is a failure too: generation could not be checked.
    return "unchecked" in document or (require_canary and document.get("canary", {}).get("broken", True))


def _say_slow_precision(config: CalibrationConfig, family: Family) -> None:
    """Warn on stderr if the chosen precision is slow on this machine."""
    from featcal.preflight.estimates import note_slow_precision

    for note in note_slow_precision(config, family.compute.device):
        print_message(f"note: {note}", err=True)


def _say_written(document: Mapping[str, Any]) -> None:
    """Print the written folder and the next commands."""
    print_message(f"written to {document['out']} in {document['seconds']['total']:.1f} s")
    if "bytes" in document:
        packed, dense = document["bytes"]["packed"], document["bytes"]["dense"]
        print_message(
            f"packed weights: {readable(packed)}, {percent(packed / dense)} % of {readable(dense)} as calibrated"
        )
    say_where_to(document["out"])


@click.command()
@SUITE
@model_option(
    "calibrated",
    "The calibration, as calibrated:lam=0.05,rho=2,…; the suite sets the options that are left out. Names: ",
)
@DEVICE
@JSON
def conditioning_command(suite: str, model: str, device: str, as_json: bool) -> None:
    """Measure how well posed a calibration's linear systems are.

    It prints the eigenvalues of their left matrices (Eq. 17).
    """
    session = opening.open_suite_session(suite, device)
    found = [one.to_json() for one in session.fit.conditioning(model, bar())]
    document = {"suite": session.family.suite.name, "model": model, "systems": found}
    columns = ["layer", "maps", "width", "tokens", "smallest", "largest", "condition", "effective_rank"]
    print_document(document, as_json, [[one[name] for name in columns] for one in found], columns)


@click.command()
@SUITE
@MODEL
@click.option("--lam", "lams", help="Ridge strengths between commas, such as 0.01,0.05.  [the suite's own]")
@click.option("--rho", "rhos", help="Anchors between commas.  [the suite's own]")
@click.option("--alpha", "alphas", help="Shares of the experts' features between commas.  [the suite's own]")
@click.option(
    "--eval-samples", default=64, show_default=True, help="Samples per task on which every calibration is measured."
)
@calibration_options("lam", "rho", "alpha")
@DEVICE
@JSON
def sweep_command(
    suite: str,
    model: str,
    lams: str | None,
    rhos: str | None,
    alphas: str | None,
    eval_samples: int,
    device: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Calibrate with every combination of lam, rho and alpha.

    --model names the model to calibrate: any merge, baseline or checkpoint.

    Each is measured on validation samples, and so are baselines without calibration. The history (`featcal history
    list`) keeps every point: an interrupted sweep continues where it stopped, and the app draws it.
    """
    from featcal.calibration.calibrate import config_for
    from featcal.figures import run_tables
    from featcal.studies.history import History
    from featcal.studies.sweep import Grid, front, numbers, run_sweep, sweep_json
    from featcal.suite.views import EvaluationSamples

    # The grid would set alpha again, after `cautious` was resolved to a value of its own.
    if alphas is not None and chosen.get("cautious"):
        raise InputError("cautious sets alpha and beta of featcal's own recipes; leave alpha out")
    session, history = opening.open_suite_session(suite, device, one_shot=False), History()
    config = config_for(session.family, **chosen)
    _say_slow_precision(config, session.family)
    given = {"lam": lams, "rho": rhos, "alpha": alphas}
    values = {o: (getattr(config, o),) if text is None else numbers(text, o) for o, text in given.items()}
    view = EvaluationSamples(eval_samples)
    points = run_sweep(session, Grid(**values, options=config, of=model), bar(), on=view, history=history)
    table = run_tables.sweep_table(points, front(points))
    if session.split == "calibration":
        print_message(
            "note: the suite has no validation split; calibration samples flatter what was fitted on them", err=True
        )
    say_problems(history)
    columns = ["run", "model", "mean", "worst", "worst task", "drift", "front"]
    shown = table.assign(front=["*" if one else "" for one in table["front"]])[columns].to_numpy()
    print_document(sweep_json(session, points, view), as_json, shown.tolist(), columns)


@click.command()
@SUITE
@JSON_FILE
@model_option(help="Merge on which all recipes are tried: ", flag="--of")
@models_option("Try this model too, as it is and calibrated; may be repeated:", left_out="that merge alone")
@click.option(
    "--minutes", type=float, help="Approximate time limit; without --model every merger is tried too.  [no limit]"
)
@calibration_options(*CHOSEN, "cautious")
@DEVICE
@JSON
def select_command(
    suite: str,
    out: Path | None,
    of: str,
    models: tuple[str, ...],
    minutes: float | None,
    device: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Choose without labels whether and how a merge is repaired.

    Every candidate is calibrated on three quarters of the calibration samples and scored on the last quarter, four
    times: how probable are the experts' decisions under it? Candidates are the merge (--of) as it is, the recipes at
    their defaults, and "informed" with errors weighed by decisions, with other values of mu and rho, and with
    --cautious.
    "informed" with errors weighed by decisions (at its defaults with fewer than 16 samples of a task) stays unless
    another one is better by more than the paired interval; the chosen one is then calibrated on all samples. Only
    calibration samples are read. Results are cached, so an interrupted choice continues where it stopped. With fewer
    than 8 samples of a task no candidate can be judged, and "informed" at its defaults stays.

    With --minutes every merger that needs neither samples nor training is tried too, as it is and calibrated: a quarter
    of the time goes to the first fold, the rest to those that are best on it.
    """
    from featcal.figures import selection_table
    from featcal.studies.selection.candidates import config_asked
    from featcal.studies.selection.choose import select

    require_new_file(out)
    session = opening.open_suite_session(suite, device, one_shot=False)
    asked = config_asked(session.family, **chosen)
    _say_slow_precision(asked, session.family)
    found = select(session, asked, of=of, starts=models, minutes=minutes, progress=bar())
    document = found.to_json(suite)
    write_document(out, json.dumps(document, indent=2, allow_nan=False) + "\n")
    say_notes(document)
    rows, columns = selection_table.candidate_table(document)
    print_document(document, as_json, rows, columns)
    if not as_json:
        lines = [*selection_table.describe_selection(document), f"model: {document['model']}"]
        if document["suite_lines"]:
            lines += ["in the suite file:", *(f"  {one}" for one in document["suite_lines"].splitlines())]
        for line in [*lines, document["command"]]:
            print_message(line)
