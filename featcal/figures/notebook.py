"""Show results in notebooks: a small table each, and one of the app's charts where plotly is installed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from featcal.calibration.calibrate import CalibrationResult
from featcal.drift.ledger import DriftLedger
from featcal.evaluation.comparison import Comparison
from featcal.evaluation.evaluate import Scores
from featcal.figures import ledger_tables, selection_table, tables
from featcal.figures.names import label, shorten
from featcal.studies.selection.outcome import Selection
from featcal.system.drawing import Drawable
from featcal.system.errors import InputError
from featcal.system.extras import is_installed, require_packages
from featcal.system.formatting import percent, points

if TYPE_CHECKING:  # plotly is an extra
    import plotly.graph_objects as go

    from featcal.figures.theme import Shown

_LONGEST = 36
"""Characters of a model's name in a picture."""
_MEAN = "mean"


def to_html(result: Drawable) -> str:
    """Return a heading, the picture and the table as HTML that loads nothing from anywhere; without plotly no picture.

    The picture is what plotly's renderer makes of it where that is HTML, else it brings plotly's script along.
    """
    picture = ""
    if is_installed("plotly"):
        figure = draw(result)
        bundle = figure._repr_mimebundle_()
        picture = bundle.get("text/html") or figure.to_html(full_html=False, include_plotlyjs=True)
    return f"{_write_heading(result)}{picture}{_write_table(result)}"


def show(result: Drawable) -> None:
    """Show in a notebook of IPython what `to_html` has, with the picture as plotly shows its figures there: a notebook
    then has a script of 5 MB at most once.

    Raises:
        NotImplementedError: it runs in a terminal, where a picture would open a browser; IPython then prints the text.
    """
    from IPython import get_ipython
    from IPython.display import HTML, display

    if not hasattr(get_ipython(), "kernel"):
        raise NotImplementedError
    display(HTML(_write_heading(result)))
    if is_installed("plotly"):
        display(draw(result))
    display(HTML(_write_table(result)))


def draw(result: Drawable) -> go.Figure:
    """Return the picture of a result.

    Raises:
        MissingPackage: plotly is not installed.
    """
    require_packages("plotly", label="pictures of results")
    return _draw(result)


@singledispatch
def tabulate(result: object) -> pd.DataFrame:
    """Return the small table of a result, with texts in all cells: numbers are rounded as everywhere."""
    raise TypeError(f"a {type(result).__name__} has no table")


@singledispatch
def describe(result: object) -> str:
    """Say in one line what a result is of."""
    raise TypeError(f"a {type(result).__name__} has no heading")


@singledispatch
def _draw(result: object) -> Any:
    raise TypeError(f"a {type(result).__name__} has no picture")


@describe.register
def _(ledger: DriftLedger) -> str:
    return f"Drift of {ledger.model} from the experts of {ledger.suite}, {tables.describe_samples(ledger)}"


@tabulate.register
def _(ledger: DriftLedger) -> pd.DataFrame:
    """Drift of the final features over the expert's norm and their cosine, and the layer that adds most of its own."""
    cosines, rows = tables.mean_cosines(ledger), {}
    drift = tables.drift_table(ledger)
    for task in ledger.tasks:
        layers = tables.layer_rows(drift, task, relative=True)
        largest = layers.loc[layers["mismatch"].idxmax()]
        worst = f"{largest['mismatch']:.3f}, {largest['layer']}"
        rows[task] = {"drift": layers["drift"].iloc[-1], "cosine": cosines[task], "largest mismatch": worst}
    frame = pd.DataFrame.from_dict(rows, orient="index")
    mean = frame[["drift", "cosine"]].mean().to_frame(_MEAN).T.assign(**{"largest mismatch": ""})
    whole = pd.concat([frame, mean]).rename_axis("task").reset_index()
    return whole.map(lambda one: one if isinstance(one, str) else f"{one:.3f}")


@_draw.register
def _(ledger: DriftLedger) -> Any:
    """Draw the layers that caused the final drift where that was measured, else what drift behind each is made of."""
    from featcal.figures import charts, ledger_charts

    (name,) = _name_models([ledger.model])
    if all(task.attribution is not None for task in ledger.tasks.values()):
        return ledger_charts.waterfall({name: ledger_tables.attribution(ledger, tables.ALL_TASKS)}, None)
    drift = tables.layer_rows(tables.drift_table(ledger), tables.ALL_TASKS, relative=True)
    return charts.drift_layers({name: drift}, relative=True)


@describe.register
def _(result: CalibrationResult) -> str:
    counts = tables.how_many(one["samples"] for one in result.record["tasks"].values())
    where = "of the final features" if result.record.get("final_drift") else "behind every block, mean over tasks"
    return (
        f"{result.record['suite']} calibrated by the recipe {result.config.recipe}, {counts} samples per task: "
        f"relative drift {where}, on these samples"
    )


@tabulate.register
def _(result: CalibrationResult) -> pd.DataFrame:
    return _calibrated_drift(result).reset_index().map(lambda one: one if isinstance(one, str) else f"{one:.3f}")


@_draw.register
def _(result: CalibrationResult) -> Any:
    from featcal.figures import charts

    drift = _calibrated_drift(result)
    if "merged" in drift:
        return charts.score_bars(drift.reset_index(), ["merged", "calibrated"], "drift / norm of the expert's feature")
    return charts.compare_drift({"calibrated": drift["calibrated"]})


def _calibrated_drift(result: CalibrationResult) -> pd.DataFrame:
    """Return the final drift of every task before and after, and its mean; behind the blocks, where the run did not
    follow the merged model."""
    if final := result.record.get("final_drift"):
        frame = pd.DataFrame.from_dict(final, orient="index")[["merged", "calibrated"]].rename_axis("task")
        return pd.concat([frame, frame.mean().to_frame(_MEAN).T.rename_axis("task")])
    blocks = pd.DataFrame(result.record["relative_drift"]).mean()
    return blocks.to_frame("calibrated").rename_axis("layer")


@describe.register
def _(scores: Scores) -> str:
    metric = tables.metric_name({"": scores})
    count = tables.how_many(one.n for one in scores.tasks.values())
    return f"{scores.model} on {scores.suite}: {metric} in %, {count} {scores.split} samples per task"


@tabulate.register
def _(scores: Scores) -> pd.DataFrame:
    rows = [{"task": task, "%": percent(one.value), "samples": str(one.n)} for task, one in scores.tasks.items()]
    return pd.DataFrame([*rows, {"task": "average", "%": percent(scores.average), "samples": ""}])


@_draw.register
def _(scores: Scores) -> Any:
    from featcal.figures import charts

    (name,) = _name_models([scores.model])
    shown: dict[str, Scores] = {name: scores}
    return charts.score_bars(tables.score_table(shown), [name], f"{tables.metric_name(shown)}, %")


@describe.register
def _(found: Comparison) -> str:
    metric = tables.metric_words(one.metric for one in found.tasks.values())
    return f"{found.b} against {found.a} on {found.suite}: {metric} in % on the same {found.split} samples"


@tabulate.register
def _(found: Comparison) -> pd.DataFrame:
    first, second = _shorten_names([found.a, found.b])
    return pd.DataFrame(
        {
            "task": task,
            first: percent(one.a),
            second: percent(one.b),
            "difference": points(one.difference),
            "95 % interval": f"{points(one.low)} to {points(one.high)}",
            "": "within noise" if one.is_within_noise else "",
        }
        for task, one in {**found.tasks, "average": found.average}.items()
    )


@_draw.register
def _(found: Comparison) -> Any:
    from featcal.figures import sample_charts

    first, second = _name_models([found.a, found.b])
    metric = tables.metric_words(one.metric for one in found.tasks.values())
    return sample_charts.differences(found, (first, second), metric)


@describe.register
def _(chosen: Selection) -> str:
    return f"Chosen for {chosen.family.suite.name}, without labels: {chosen.model}"


@tabulate.register
def _(chosen: Selection) -> pd.DataFrame:
    rows, columns = selection_table.candidates(chosen.to_json())
    frame = pd.DataFrame(rows, columns=columns).map(lambda one: one if isinstance(one, str) else f"{one:.4f}")
    return frame.loc[:, [name == "score" or frame[name].nunique() > 1 for name in frame]]


@_draw.register
def _(chosen: Selection) -> Any:
    from featcal.figures import study_charts

    return study_charts.candidates(chosen)


def _shorten_names(names: Sequence[str]) -> list[str]:
    """Return different short names for models: of a folder its own, else without options, where these do not tell them
    apart."""
    bare = [Path(name).name if Path(name).is_absolute() else name.partition(":")[0] for name in names]
    short = bare if len({*bare}) == len(bare) else [shorten(name, _LONGEST) for name in names]
    return [name if name not in short[:place] else f"{name} (B)" for place, name in enumerate(short)]


def _name_models(names: Sequence[str]) -> list[Shown]:
    """Return what pictures call models, in the colours of their roles."""
    from featcal.figures.theme import Shown

    roles = [_role(name) for name in names]
    return [
        Shown(label(name), role, role in roles[:place])
        for place, (name, role) in enumerate(zip(_shorten_names(names), roles, strict=True))
    ]


def _role(name: str) -> str:
    """Return the role of a model by its name; of an object a name is its label, which nobody chose by the grammar."""
    from featcal.figures.report.models import find_role

    try:
        return find_role(name) if not name.startswith("calibrated") else "calibrated"
    except InputError:
        return "merged"


def _write_heading(result: Drawable) -> str:
    return f"<p>{escape(describe(result))}</p>"


def _write_table(result: Drawable) -> str:
    return str(tabulate(result).to_html(index=False, border=0, justify="left"))
