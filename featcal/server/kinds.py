"""List the kinds of jobs by name, each a function that runs in the worker and returns a document.

Modules that need torch are imported inside the functions, because pages and the manager read this table too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.server.queue import RESULT
from featcal.system.errors import InputError, UncheckedError
from featcal.system.extras import require_packages
from featcal.system.json_files import read_json
from featcal.system.progress import Progress

if TYPE_CHECKING:
    from featcal.calibration.calibrate import CalibrationResult
    from featcal.evaluation.evaluate import Scores
    from featcal.family.opening import Family
    from featcal.session.session import Session
    from featcal.suite.calibration_options import CalibrationConfig
    from featcal.suite.views import EvaluationSamples

CHECKPOINT = "checkpoint"
"""Name of a calibrated folder in the folder of its job."""


@dataclass(frozen=True)
class Work:
    """The input of a kind of job."""

    suite: str
    args: Mapping[str, Any]
    """Arguments that the function of the kind describes, and `made`: by name, the folders of models that other jobs
    have calibrated, which are read instead of calibrated again."""
    folder: Path
    """The job's own folder; it is kept with the job's document."""
    progress: Progress

    def open_session(self, *, one_shot: bool = False, resident: bool = False) -> Session:
        """Open the suite, with its models in memory if it is to be resident."""
        from featcal.family.opening import open_family
        from featcal.session.session import Session
        from featcal.suite.schema import load_suite

        family = open_family(load_suite(self.suite))
        session = Session(family.resident() if resident else family, one_shot=one_shot)
        for name, folder in self.args.get("made", {}).items():
            _adopt(session, name, Path(folder))
        return session

    @property
    def view(self) -> EvaluationSamples:
        """Return the view in the arguments `samples`, `split` and `seed`."""
        from featcal.suite.views import EvaluationSamples

        return EvaluationSamples(self.args["samples"], self.args["split"], self.args["seed"])


def run_calibration(work: Work) -> dict[str, Any]:
    """Calibrate to a folder, going on from the blocks that a process which died had finished.

    `args`: `options`, fields of `CalibrationConfig` (a missing one is the suite's, else the paper's), `model`, the name
    of the model to calibrate (left out: the merged model), and `out`, a folder to write; without it the checkpoint
    stays with the job.

    Returns:
        The document of `featcal calibrate --json`; its warnings say what could not be checked.
    """
    from featcal.calibration.calibrate import calibrate_to_folder
    from featcal.formats.output import partial_folder, remove_partial

    session = work.open_session(one_shot=True)
    family = session.fit.family_with(work.args.get("model", "merged"))
    config = _config(family, work.args.get("options", {}))
    kept = work.folder / CHECKPOINT
    out = Path(work.args["out"]).expanduser().absolute() if "out" in work.args else kept
    if out == kept:
        shutil.rmtree(kept, ignore_errors=True)  # without a document nobody knows that it is whole
    begun = partial_folder(out).exists()
    try:
        return calibrate_to_folder(family, config, out, resume=begun, progress=work.progress)
    except UncheckedError as error:
        return error.document
    except BaseException:  # cancelled too
        if out == kept or not begun:
            remove_partial(out, of_others=out == kept)
        raise


def job_options(config: CalibrationConfig) -> dict[str, Any]:
    """Return all options of a calibration in the form of a job's arguments, so that the suite decides none of them;
    "all parts" is an empty list."""
    return {name: [] if value is None else value for name, value in asdict(config).items()}


def _config(family: Family, options: Mapping[str, Any]) -> CalibrationConfig:
    from featcal.calibration.calibrate import config_for
    from featcal.calibration.config import all_parts, idle_options

    idle = idle_options(family.adapter)  # an order names every option, also those that this architecture leaves idle
    every = all_parts(family.adapter, family.suite.tasks)
    named = {n: every[n] if v == [] else v for n, v in options.items() if n not in idle}
    return config_for(family, **named)


def run_scores(work: Work) -> dict[str, Any]:
    """Score a model on a split.

    `args`: `model` (a name, a folder or a Hub id), `split`, `samples` per task (None: all), `seed`.

    Returns:
        The document of `featcal evaluate --json`, with the model's and the right answer to every sample.
    """
    from featcal.suite.views import EvaluationSamples

    session = work.open_session(one_shot=True)
    view = EvaluationSamples(work.args.get("samples"), work.args.get("split", "test"), work.args.get("seed", 42))
    found = session.measure.scores(work.args["model"], view, work.progress)
    answers = {
        task: {"predictions": list(_to_list(one.predictions)), "labels": list(_to_list(one.labels))}
        for task, one in found.tasks.items()
    }
    return {**found.to_json(), "answers": answers}


def run_sweep_job(work: Work) -> dict[str, Any]:
    """Calibrate with every combination of values and measure each; results in the history are not computed again, so a
    sweep that was cancelled or died goes on where it stopped.

    `args`: `lam`, `rho`, `alpha`, lists of values; `options`, the other fields of `CalibrationConfig`; `model`, the
    name of the model to calibrate (left out: the merged model); `n`, samples per task to measure on.

    Returns:
        The document of `featcal study sweep --json`.
    """
    from featcal.studies.sweep import Grid, run_sweep, sweep_json
    from featcal.suite.views import EvaluationSamples

    session, on = work.open_session(resident=True), EvaluationSamples(work.args["n"])
    values = {name: tuple(work.args[name]) for name in ("lam", "rho", "alpha")}
    options = _config(session.family, work.args["options"])
    grid = Grid(**values, options=options, of=work.args.get("model", "merged"))
    return sweep_json(session, run_sweep(session, grid, work.progress, on=on), on)


def run_report(work: Work) -> dict[str, Any]:
    """Write a report as one HTML file in the job's folder.

    `args`: `models`, their names, and the view that drift is measured on: `samples`, `split`, `seed`.

    Returns:
        The document of `featcal report --json`.
    """
    require_packages("plotly", "jinja2")
    from featcal.figures.report.write import write_report

    session, out = work.open_session(), work.folder / "report.html"
    out.unlink(missing_ok=True)  # left by a process that died before its document was kept
    return write_report(session, work.suite, out, models=work.args["models"], on=work.view, progress=work.progress)


def run_comparison(work: Work) -> dict[str, Any]:
    """Measure methods side by side; finished rows are kept, so a study that ended early goes on where it stopped.

    `args`: `methods`, their names; `seeds`; `samples`, calibration samples per task.

    Returns:
        The document of `featcal compare --model all --json`, which the page of studies finds as well.
    """
    from featcal.studies.compare import compare_methods
    from featcal.studies.library import keep_study
    from featcal.studies.plan import StudyPlan
    from featcal.studies.runner import Views
    from featcal.suite.views import EvaluationSamples

    methods, seeds, samples = (work.args[name] for name in ("methods", "seeds", "samples"))
    session = work.open_session()
    on = Views(EvaluationSamples(None, session.family.suite.scored_split))
    study = compare_methods(session, StudyPlan(tuple(methods), tuple(seeds), samples, on, progress=work.progress))
    problem = keep_study(study)
    if problem:
        raise InputError(problem)
    return study.to_json()


def run_selection(work: Work) -> dict[str, Any]:
    """Choose without labels whether and how the merge is repaired; the result of a candidate is kept, so a choice that
    was cancelled or died goes on where it stopped.

    `args`: `options`, those of `featcal select`, by name; `model`, the name of the merge that recipes are tried on
    (left out: the merged model); and `minutes` to spend (left out: no limit).

    Returns:
        The document of `featcal select --json`.
    """
    from featcal.studies.selection.candidates import config_asked
    from featcal.studies.selection.choose import select

    session = work.open_session(resident=True)
    config = config_asked(session.family, **work.args["options"])
    of, minutes = work.args.get("model", "merged"), work.args.get("minutes")
    found = select(session, config, of=of, minutes=minutes, progress=work.progress)
    return found.to_json(work.suite)


def run_diagnosis(work: Work) -> dict[str, Any]:
    """Diagnose a model, and measure the gain of a calibration with the suite's options.

    `args`: `model`, its name, and the view that it is measured on: `samples`, `split`, `seed`.

    Returns:
        The document of `featcal diagnose --json`.
    """
    from featcal.figures.verdict.measure import diagnose_model, repair_of, verdict_json

    session, model, on = work.open_session(), work.args["model"], work.view
    verdict = diagnose_model(session, model, on, repair_of(session, model), work.progress)
    return verdict_json(session, model, on, verdict)


def run_difference(work: Work) -> dict[str, Any]:
    """Compare two models sample by sample; a look at the test split is counted.

    `args`: `models`, the names of both, and the view that they are scored on: `samples`, `split`, `seed`.

    Returns:
        The document of `featcal compare --model A --model B --json`.
    """
    from featcal.studies.history import History
    from featcal.studies.recording import count_looks

    session, (a, b), on = work.open_session(one_shot=True), work.args["models"], work.view
    with count_looks(session, (a, b), on, "featcal compare", History()):
        return session.measure.compare(a, b, on, work.progress).to_json()


KINDS: Mapping[str, Callable[[Work], dict[str, Any]]] = {
    "calibrate": run_calibration,
    "scores": run_scores,
    "sweep": run_sweep_job,
    "report": run_report,
    "compare": run_comparison,
    "select": run_selection,
    "diagnose": run_diagnosis,
    "difference": run_difference,
}
"""Name of a kind → the function that the worker calls."""


def calibration_from(family: Family, config: CalibrationConfig, document: Mapping[str, Any]) -> CalibrationResult:
    """Return the result of a "calibrate" job in the form of `calibrate`; its blocks stay in the job's folder and are
    read on demand. Checks that could not run concern only that folder: a copy written from here is checked again.

    Raises:
        InputError: the folder no longer exists, or belongs to another suite.
    """
    from featcal.calibration.calibrate import CalibrationResult
    from featcal.calibration.column_rounding import calibrated_weights
    from featcal.export.kept_work import UNCHECKED
    from featcal.formats.grid import PackedCheckpoint
    from featcal.formats.weights import OnDemand

    written = family.model(str(document["out"]))
    scales = written.scales if isinstance(written, PackedCheckpoint) else ()
    blocks = OnDemand(written, (*(name for block in family.adapter.blocks() for name in block.names), *scales))
    weights = calibrated_weights(family.merged, config, blocks)
    unchecked = document.get(UNCHECKED, ())
    record = {name: value for name, value in document.items() if name != UNCHECKED}
    record["warnings"] = [one for one in document["warnings"] if one not in unchecked]
    return CalibrationResult(family, config, weights, record)


def _adopt(session: Session, name: str, checkpoint: Path) -> None:
    """Let a session take the calibrated model of a "calibrate" job from its folder."""
    config, start = session.resolve(name).require_calibration()
    document = read_json(checkpoint.parent / RESULT)
    make = partial(calibration_from, session.fit.family_with(start), config, document)
    session.fit.adopt_calibration(name, make, is_gone)


def is_gone(result: CalibrationResult) -> bool:
    """Say whether the folder behind a result of `calibration_from` was removed; False for other results."""
    return "out" in result.record and not Path(result.record["out"]).is_dir()


def scores_from(document: Mapping[str, Any]) -> Scores:
    """Return the result of a "scores" job in the form of `Measurements.scores`."""
    import torch

    from featcal.evaluation.evaluate import Scores, TaskScore

    def read(values: list[Any]) -> Any:
        return tuple(values) if values and isinstance(values[0], str) else torch.tensor(values)

    tasks = {}
    for task, one in document["tasks"].items():
        answers = document["answers"][task]
        tasks[task] = TaskScore(one["metric"], one["value"], read(answers["predictions"]), read(answers["labels"]))
    return Scores(document["suite"], document["model"], document["split"], tasks)


def _to_list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, tuple) else list(values.tolist())
