"""Commands that calibrate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from featcal.cli import opening
from featcal.cli.options import DEVICE, JSON, MAX_MEMORY, MODEL, OUT, SUITE, calibration_options
from featcal.cli.terminal import bar, say, say_notes, say_problems, show
from featcal.suite.calibration_options import OF_A_RECIPE
from featcal.system.errors import InputError
from featcal.system.progress import keep_memory, silent


@click.command()
@SUITE
@MODEL
@OUT
@calibration_options()
@MAX_MEMORY
@click.option("--resume", is_flag=True, help="Go on from the finished blocks of an interrupted run.")
@click.option(
    "--require-canary", is_flag=True, help="Exit status 1 where generation is broken or was not checked; see canary."
)
@DEVICE
@JSON
def calibrate(
    suite: str,
    model: str,
    out: Path,
    max_memory: int | None,
    resume: bool,
    require_canary: bool,
    device: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Calibrate the merged model, or another one, in closed form and write the checkpoint.

    --model names what is calibrated and what the ridge pulls to: any merge, baseline or checkpoint.

    In [brackets] stands what holds where an option is left out; a suite file may set its own under `calibration`. The
    recipe "refined" has its own numbers: rho 2, alpha 0.6, beta 0.5, lam 0.001 from 64 samples on and more for fewer;
    so has "informed": the same, lam 0.001 for any number of samples, and mu 0.1.

    The table gives, per block and task, how far the calibrated features on the calibration samples are from the
    expert's, over all of a block's own tokens: of a T5 decoder block the decoder's, without the encoder's output.
    Started by torchrun (docs/scale.md), several processes share the tasks; one of them writes and prints.

    A model that generates text is then held against the merged one, as `featcal canary` does; a repair that breaks
    generation is written all the same, with warnings.
    """
    from featcal.calibration.calibrate import calibrate_to_folder, config_for
    from featcal.system.distributed import join_process_group, own_device

    if max_memory is None:
        keep_memory()
    device = own_device(device)
    with join_process_group(device) as ranks:
        if ranks.several and model != "merged" and not Path(model).exists():
            raise InputError(
                f"--model {model}: several processes calibrate the suite's merged model or one in a folder; write this "
                "one to a folder first, and name that"
            )
        family = opening.session(suite, device).fit.family_with(model)
        if require_canary and not family.adapter.generates:
            raise InputError(f"--require-canary means nothing here: a {family.adapter.family} model generates no text")
        config, said = config_for(family, **chosen), silent if ranks.rank else bar()
        document = calibrate_to_folder(family, config, out, resume=resume, max_memory=max_memory, progress=said)
    if not document:  # rank 0 says it
        return
    say_notes(document)
    rows = [
        (block, *(f"{value:.4f}" for value in drift.values())) for block, drift in document["relative_drift"].items()
    ]
    show(document, as_json, rows, ("block, relative drift", *document["tasks"]))
    if not as_json:
        say(f"written to {document['out']} in {document['seconds']['total']:.1f} s")
    if require_canary and document.get("canary", {}).get("broken", True):
        raise SystemExit(1)


@click.command()
@SUITE
@click.option(
    "--model",
    default="calibrated",
    show_default=True,
    help="The options, as calibrated:lam=0.05,rho=2,alpha=0.3,…; those not given are the suite's own.",
)
@DEVICE
@JSON
def conditioning(suite: str, model: str, device: str, as_json: bool) -> None:
    """Measure how well posed every linear system of a calibration is: eigenvalues of its left matrix (Eq. 17)."""
    keep_memory()
    session = opening.session(suite, device)
    found = [one.to_json() for one in session.fit.conditioning(session.resolve(model), bar())]
    document = {"suite": session.family.suite.name, "model": model, "systems": found}
    columns = ["layer", "maps", "width", "tokens", "smallest", "largest", "condition", "effective_rank"]
    show(document, as_json, [[one[name] for name in columns] for one in found], columns)


@click.command()
@SUITE
@MODEL
@OUT
@click.option("--steps", default=30, show_default=True, help="Steps of Adam.")
@click.option("--rate", default=1e-4, show_default=True, help="Step size of Adam.")
@click.option("--samples", type=int, help="Unlabelled calibration samples per task.  [256]")
@click.option("--seed", type=int, help="Decides which samples are drawn, and their order.  [42]")
@DEVICE
@JSON
def polish(
    suite: str,
    model: str,
    out: Path,
    steps: int,
    rate: float,
    samples: int | None,
    seed: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Bring a model's final features closer to the experts' by a few steps of gradient descent, and write it.

    No labels are needed. The model is `polished:steps=30,rate=0.0001@MODEL` wherever a model is named.
    """
    keep_memory()
    given = {"steps": steps, "rate": rate, "samples": samples, "seed": seed}
    options = ",".join(f"{name}={value}" for name, value in given.items() if value is not None)
    found = opening.session(suite, device).fit.baseline(f"polished:{options}@{model}", bar())
    document = found.save(out)
    say_notes(document)
    rows = [(name, document[key]) for name, key in (("before", "loss_before"), ("after", "loss"))]
    show(document, as_json, rows, ("", "loss"))
    if not as_json:
        say(f"written to {document['out']} after {document['seconds']['total']:.1f} s")


@click.command()
@SUITE
@click.option("--lam", "lams", help="Values between commas, such as 0.01,0.05.  [the suite's own]")
@click.option("--rho", "rhos", help="Values between commas.  [the suite's own]")
@click.option("--alpha", "alphas", help="Values between commas.  [the suite's own]")
@click.option("--n", default=64, show_default=True, help="Samples per task to measure on.")
@calibration_options("lam", "rho", "alpha")
@DEVICE
@JSON
def sweep(
    suite: str,
    lams: str | None,
    rhos: str | None,
    alphas: str | None,
    n: int,
    device: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Calibrate with every combination of lam, rho and alpha and measure each on validation samples.

    Beside them stand baselines that need no calibration. Every point is kept in the history (`featcal runs`), so a
    sweep that was interrupted goes on where it stopped, and the app draws it.
    """
    from featcal.calibration.calibrate import config_for
    from featcal.figures import run_tables
    from featcal.studies.history import History
    from featcal.studies.sweep import Grid, front, numbers, run_sweep, sweep_json
    from featcal.suite.views import EvaluationSamples

    if alphas is not None and chosen.get("cautious"):
        raise InputError("cautious sets alpha and beta of featcal's own recipes; leave alpha out")
    keep_memory()
    session, history = opening.session(suite, device, one_shot=False), History()
    config = config_for(session.family, **chosen)
    given = {"lam": lams, "rho": rhos, "alpha": alphas}
    values = {o: (getattr(config, o),) if text is None else numbers(text, o) for o, text in given.items()}
    view = EvaluationSamples(n)
    points = run_sweep(session, Grid(**values, options=config), bar(), on=view, history=history)
    table = run_tables.sweep_table(points, front(points))
    if session.split == "calibration":
        say("note: the suite has no validation split; calibration samples flatter what was fitted on them", err=True)
    say_problems(history)
    columns = ["run", "model", "mean", "worst", "worst task", "drift", "front"]
    shown = table.assign(front=["*" if one else "" for one in table["front"]])[columns].to_numpy()
    show(sweep_json(session, points, view), as_json, shown.tolist(), columns)


@click.command()
@SUITE
@click.option("--out", type=click.Path(path_type=Path), help="File for the JSON document; must not exist.")
@click.option("--starts", help="Other merges between commas: each is tried as it is and calibrated, as tsv-m,ace.")
@calibration_options("recipe", *OF_A_RECIPE, "cautious")
@DEVICE
@JSON
def select(suite: str, out: Path | None, starts: str | None, device: str, as_json: bool, **chosen: Any) -> None:
    """Choose without labels whether and how the merged model is repaired.

    Every candidate is calibrated on three quarters of the calibration samples and scored on the fourth, four times:
    how probable the experts' decisions are under it. Candidates are the merged model as it is, the recipes at their
    defaults, "informed" with more or less of its prior and with --cautious. "informed" at its defaults stays unless
    another one is better by more than the paired interval; what is chosen is then calibrated on all samples. Nothing
    but calibration samples is read. What was found is kept, so a choice that was interrupted goes on where it stopped.
    With fewer than 8 samples of a task nothing can be told, and the default stays.
    """
    from featcal.calibration.calibrate import config_for
    from featcal.figures import selection_table
    from featcal.studies.method_lists import parse_methods
    from featcal.studies.selection.choose import select as choose
    from featcal.system.atomic_files import put_new

    if out is not None and out.exists():
        raise InputError(f"{out} exists; name another file")
    keep_memory()
    session = opening.session(suite, device, one_shot=False)
    config = config_for(session.family, **chosen)
    found = choose(session, config, starts=parse_methods(starts) if starts else (), progress=bar())
    document = found.to_json(suite)
    if out is not None:
        try:
            put_new(out, json.dumps(document, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise InputError(f"{out} cannot be written: {error.strerror}; name another file") from error
    say_notes(document)
    rows, columns = selection_table.candidates(found)
    show(document, as_json, rows, columns)
    if not as_json:
        for line in selection_table.describe_selection(found, suite):
            say(line)


COMMANDS = (calibrate, conditioning, polish, sweep, select)
