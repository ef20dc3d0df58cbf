"""Draw results like the app: one chart for each kind of result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

import plotly.graph_objects as go

from featcal.calibration.calibrate import CalibrationResult
from featcal.drift.ledger import DriftLedger
from featcal.evaluation.comparison import Comparison
from featcal.evaluation.evaluate import Scores
from featcal.figures import charts, ledger_charts, ledger_tables, sample_charts, study_charts, tables
from featcal.figures.names import label
from featcal.figures.report.models import find_role
from featcal.figures.result_tables import calibrated_drift, shorten_names
from featcal.figures.theme import Shown
from featcal.studies.selection.outcome import Selection
from featcal.system.errors import InputError


@singledispatch
def result_chart(result: object) -> go.Figure:
    """Return the picture of a result."""
    raise TypeError(f"a {type(result).__name__} has no picture")


@result_chart.register
def _(ledger: DriftLedger) -> go.Figure:
    """Draw the layers that caused the final drift if that was measured, else the parts of the drift after each
    layer."""
    (name,) = _name_models([ledger.model])
    if all(task.attribution is not None for task in ledger.tasks.values()):
        return ledger_charts.waterfall({name: ledger_tables.attribution_table(ledger, tables.ALL_TASKS)}, None)
    drift = tables.layer_rows(tables.drift_table(ledger), tables.ALL_TASKS, relative=True)
    return charts.drift_layers({name: drift}, relative=True)


@result_chart.register
def _(result: CalibrationResult) -> go.Figure:
    drift = calibrated_drift(result)
    if "merged" in drift:
        pair = ("merged", "calibrated")
        return charts.score_dots(drift.reset_index(), pair, "drift / norm of the expert's feature", pair)
    return charts.compare_drift({"calibrated": drift["calibrated"]})


@result_chart.register
def _(scores: Scores) -> go.Figure:
    (name,) = _name_models([scores.model])
    shown: dict[str, Scores] = {name: scores}
    return charts.score_dots(tables.score_table(shown), [name], f"{tables.metric_name(shown)}, %")


@result_chart.register
def _(found: Comparison) -> go.Figure:
    first, second = _name_models([found.a, found.b])
    metric = tables.metric_words(one.metric for one in found.tasks.values())
    return sample_charts.differences_chart(found, (first, second), metric)


@result_chart.register
def _(chosen: Selection) -> go.Figure:
    return study_charts.candidate_chart(chosen)


def _name_models(names: Sequence[str]) -> list[Shown]:
    """Return the names of models in pictures, in the colours of their roles."""
    roles = [_role(name) for name in names]
    return [
        Shown(label(name), role, role in roles[:place])
        for place, (name, role) in enumerate(zip(shorten_names(names), roles, strict=True))
    ]


def _role(name: str) -> str:
    """Return the role of a model by its name; the name of an object is its label, which does not follow the grammar."""
    try:
        return find_role(name) if not name.startswith("calibrated") else "calibrated"
    except InputError:
        return "merged"
