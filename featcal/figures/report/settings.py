"""List everything that the numbers of a report depend on: models and their options, samples, versions, files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pandas as pd

from featcal.export.record_facts import input_hashes
from featcal.figures.report.content import ReportTable
from featcal.session.session import Session
from featcal.suite.recipe import MergeRecipe
from featcal.suite.views import EvaluationSamples
from featcal.system.versions import all_versions


def settings(
    session: Session, names: Mapping[str, str], on: EvaluationSamples, final: EvaluationSamples
) -> tuple[ReportTable, ...]:
    """Return tables of models, calibrations, samples, versions and hashes.

    Args:
        names: of the models, by their names in the report.
        on: samples of the drift measurement.
        final: samples of the scores.
    """
    suite = session.family.suite
    merged = suite.merged
    recipe = merged.model_dump_json() if isinstance(merged, MergeRecipe) else merged
    models = [("base", suite.base or "not known"), ("merged model of the suite", recipe)]
    models += [(f"expert, {task}", spec.expert) for task, spec in suite.tasks.items()]
    shown = [(f"shown as {one}", name) for one, name in names.items()]
    counts = {what: session.counts(view) for what, view in (("drift", on), ("scores", final))}
    drawn = [
        (task, what, view.split or session.split, counts[what][task], view.seed)
        for what, view in (("drift", on), ("scores", final))
        for task in session.tasks
    ]
    made = {one: session.fit.find_calibration(name) for one, name in names.items()}
    calibrations = {one: found[0].settings() for one, found in made.items() if found is not None}
    compute = session.family.compute
    machine = [("device", str(compute.device)), ("features", str(compute.dtype).removeprefix("torch."))]
    return (
        ReportTable("Models", pd.DataFrame([*models, *shown], columns=["role", "reference"])),
        *(
            ReportTable(
                f"Calibration of {one}", pd.DataFrame([(n, str(v)) for n, v in of_it.items()], columns=["", "value"])
            )
            for one, of_it in calibrations.items()
        ),
        ReportTable("Samples", pd.DataFrame(drawn, columns=["task", "for", "split", "samples", "seed"])),
        ReportTable("Versions", pd.DataFrame([*all_versions().items(), *machine], columns=["", "version"])),
        ReportTable("Files (SHA-256)", pd.DataFrame(_hashes(session), columns=["of", "file", "hash"])),
    )


def _hashes(session: Session) -> list[tuple[str, str, str]]:
    """Return origin, file and hash of the suite's content and of every file of weights."""
    content = hashlib.sha256(session.family.suite.model_dump_json().encode()).hexdigest()
    weights = input_hashes(session.family).items()
    return [
        ("suite", "its content as JSON", content),
        *((of, file, digest) for of, files in weights for file, digest in files.items()),
    ]
