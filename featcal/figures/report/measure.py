"""Measure the content of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import pandas as pd
from torch import Tensor

from featcal.drift.ledger import DriftLedger
from featcal.evaluation.comparison import FLIPS, compare_scores
from featcal.evaluation.evaluate import Scores
from featcal.figures import charts, ledger_charts, ledger_tables, sample_tables, tables
from featcal.figures.cloud_charts import feature_map
from featcal.figures.commands import ChartSource
from featcal.figures.names import label
from featcal.figures.report import samples, settings
from featcal.figures.report.content import Figure, ReportContent, ReportSection, ReportTable
from featcal.figures.sample_charts import Dots
from featcal.figures.theme import Shown
from featcal.figures.verdict.measure import attribution_options, diagnose_model
from featcal.figures.verdict.sentences import Verdict
from featcal.session.model_ref import BASE, EVERY_EXPERT, ModelRef
from featcal.session.projection import pca_map, pool_models
from featcal.session.session import Session
from featcal.studies.history import History
from featcal.studies.recording import count_looks
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import NoScores
from featcal.system.formatting import exactly, how_many, p_value, points
from featcal.system.progress import Progress
from featcal.system.versions import versions

MOST_MAPS = 8
"""Most tasks whose features are drawn."""


@dataclass(frozen=True)
class ReportOrder:
    """Request for a report.

    Args:
        reference: name or file of the suite in commands.
        names: of the models, by their names in charts; the reference of comparisons first.
        on: samples of the drift measurement.
        about: its first lines; None for the verdict on the first model.
    """

    session: Session
    reference: str
    names: Mapping[str, str]
    on: EvaluationSamples
    about: Sequence[str] | None = None

    @property
    def models(self) -> dict[str, ModelRef]:
        return {shown: self.session.resolve(name) for shown, name in self.names.items()}

    def verdict(self, progress: Progress) -> Verdict:
        """Return the verdict on the first model, compared with the first calibrated one in the report."""
        first, *others = self.models.values()
        calibrated = next((one for one in others if self.session.fit.find_calibration(one) is not None), None)
        return diagnose_model(self.session, first, self.on, calibrated, progress)

    def measurement(self, what: str, on: EvaluationSamples, *more: str) -> ChartSource:
        """Return the origin of numbers of the report's models, and of `more`."""
        return ChartSource(what, self.reference, tuple(dict.fromkeys([*self.names.values(), *more])), on)


def gather(asked: ReportOrder, progress: Progress) -> ReportContent:
    """Measure everything.

    Raises:
        InputError, NumericalError: as `Measurements.drift` and `Measurements.scores`; a suite without answers has no
            scores.
    """
    session = asked.session
    options = attribution_options(asked.on)
    ledgers = {shown: session.measure.drift(model, options, progress) for shown, model in asked.models.items()}
    final = EvaluationSamples(None, session.family.suite.scored_split)
    scores, missing = _scores(asked, final, progress)
    summary = _summary(ledgers, scores)
    parts = [
        ReportSection("At a glance", "Means over tasks.", tables=(summary,)),
        *_score_parts(asked, scores, final, missing),
        *_drift_parts(asked, ledgers),
        _feature_part(asked, ledgers),
    ]
    suite = session.family.suite
    return ReportContent(
        suite.name,
        suite.description,
        f"featcal {versions(['featcal'])['featcal']}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        tuple(asked.about) if asked.about is not None else asked.verdict(progress).lines,
        tuple(parts),
        settings.settings(session, asked.names, asked.on, final),
    )


def _scores(asked: ReportOrder, final: EvaluationSamples, progress: Progress) -> tuple[dict[str, Scores], str]:
    """Score base, models of the report and experts; without answers in the suite, return no scores and the reason."""
    base: dict[str, ModelRef] = {Shown("base", "base"): BASE} if asked.session.family.is_base_known else {}
    models = {**base, **asked.models, Shown("expert", "expert"): EVERY_EXPERT}
    try:
        with count_looks(asked.session, models.values(), final, "featcal report", History()):
            return {shown: asked.session.measure.scores(model, final, progress) for shown, model in models.items()}, ""
    except NoScores as error:
        return {}, str(error)


def _summary(ledgers: Mapping[str, DriftLedger], scores: Mapping[str, Scores]) -> ReportTable:
    rows = []
    for shown in dict.fromkeys([*scores, *ledgers]):
        row: dict[str, object] = {"model": shown}
        if scores:
            row[f"{tables.metric_name(scores)}, %"] = 100 * scores[shown].average
        if shown in ledgers:
            row["final drift, relative"] = float(tables.relative_drift_table(ledgers[shown]).iloc[-1])
            row["cosine to the experts"] = ledgers[shown].macro_cosine
        rows.append(row)
    return ReportTable("Models", pd.DataFrame(rows), "drift: norm / norm of the expert's feature")


def _score_parts(
    asked: ReportOrder, scores: Mapping[str, Scores], on: EvaluationSamples, missing: str
) -> Iterator[ReportSection]:
    if not scores:
        yield ReportSection("Scores", f"There are none: {missing}")
        return
    first, *others = asked.names
    frame, metric = tables.score_table(scores)[["task", *scores]], tables.metric_name(scores)
    gains = {one: tables.difference_column((first, one)) for one in others}
    for one, column in gains.items():
        frame[column] = frame[one] - frame[first]
    split = f"{how_many(one.n for one in scores[first].tasks.values())} {on.split} samples per task"
    drawn = frame.iloc[:-1]
    ranges = tables.describe_ranges({name: drawn.set_index("task")[name] for name in scores}, 1)
    known = ["base"] if asked.session.family.is_base_known else []
    pair = (first, others[0]) if others else ("base", first) if known and first != "base" else None
    chart = charts.score_dots(frame, list(scores), f"{metric}, %", pair)
    ends = "Base and experts are the floor and the ceiling" if known else "Experts are the ceiling"
    yield ReportSection(
        "Scores",
        f"{metric.capitalize()} on {split}. {ends}.",
        (Figure("scores", chart, f"{metric.capitalize()} per task and model: {ranges}"),),
        (
            ReportTable(
                "Scores", frame, f"{metric} in %; differences in points", 1, dict.fromkeys(gains.values(), _points)
            ),
        ),
        measured=asked.measurement("scores", on, *known, "expert"),
    )
    for one in others:
        yield _flip_part(asked, scores, (first, one), on)


def _flip_part(
    asked: ReportOrder, scores: Mapping[str, Scores], pair: tuple[str, str], on: EvaluationSamples
) -> ReportSection:
    first, second = pair
    found = compare_scores(scores[first], scores[second])
    table = sample_tables.with_intervals(tables.score_table({name: scores[name] for name in pair}, pair), found)
    seen = {task: asked.session.viewable_samples(task, on) for task in asked.session.tasks}
    thumbnails = {
        task: tuple(samples.pick_thumbnails(data, {name: scores[name].tasks[task] for name in pair}))
        for task, data in seen.items()
    }
    counts = found.average.counts
    turned = (
        "No answer by itself is right or wrong. "
        if counts is None
        else (f"{counts.fixed} wrong answers of {first} are right in {second}, {counts.broken} right ones are wrong. ")
    )
    sentences = (
        f"{second} minus {first}: {sample_tables.difference_words(found.average)} (95 % interval of {found.draws:,} "
        f"bootstrap draws within tasks, McNemar's exact test). {turned}Of every task at most {samples.MOST} are "
        "shown; a sample's number is its place in the source."
    )
    title = f"Answers that changed from {first} to {second}"
    formats = {
        **dict.fromkeys((tables.difference_column(pair), "from", "to"), _points),
        "McNemar p": p_value,
        **dict.fromkeys(FLIPS, exactly),  # pandas holds them as floats if a task has none
    }
    # `featcal compare` takes exactly two models, however many the report shows.
    measured = replace(asked.measurement("differences", on), models=(asked.names[first], asked.names[second]))
    return ReportSection(
        title,
        sentences,
        (),
        (
            ReportTable(
                "Difference and samples whose answer changed", table, "scores in %, differences in points", 1, formats
            ),
        ),
        thumbnails,
        measured,
    )


def _points(difference: float) -> str:
    """Return a difference of per cents as the command line and the report's sentences write it."""
    return points(difference / 100)


def _drift_parts(asked: ReportOrder, ledgers: Mapping[str, DriftLedger]) -> Iterator[ReportSection]:
    first = next(iter(ledgers.values()))
    where = f"Mean over tasks, {tables.describe_samples(first)}."
    drift = {shown: tables.drift_table(ledger) for shown, ledger in ledgers.items()}
    layers = {shown: tables.layer_rows(one, tables.ALL_TASKS, relative=True) for shown, one in drift.items()}
    last = first.tasks[asked.session.tasks[0]].layers[-1].layer
    of_tasks = {shown: tables.task_table(one, last, relative=True) for shown, one in drift.items()}
    spoken = tables.describe_ranges({shown: one.set_index("layer")["drift"] for shown, one in layers.items()})
    spoken_tasks = tables.describe_ranges({shown: one.set_index("task")["drift"] for shown, one in of_tasks.items()})
    columns = ["model", "task", "drift", "mismatch", "propagation", "alignment"]
    units = "norms / norm of the expert's feature; alignment: cosine of mismatch and propagation"
    yield ReportSection(
        "Drift",
        f"How far features are from the experts', split into what a layer adds by itself (local mismatch) and what "
        f"earlier errors became on their way (propagation). {where} Norms do not add: the drift is at most their sum.",
        (
            Figure("drift", charts.drift_layers(layers, relative=True), f"Drift per layer: {spoken}"),
            Figure("drift-tasks", charts.drift_tasks(of_tasks, relative=True), f"Drift at {last}: {spoken_tasks}"),
        ),
        (
            ReportTable("Drift per layer", tables.stack_models(layers), units),
            ReportTable(f"Drift per task at {last}", tables.stack_models(of_tasks)[columns], units),
        ),
        measured=asked.measurement("drift", replace(asked.on, split=first.split)),
    )
    booked = {shown: ledger_tables.attribution_table(ledger, tables.ALL_TASKS) for shown, ledger in ledgers.items()}
    shares = tables.describe_ranges({shown: one.set_index("layer")["share"] for shown, one in booked.items()})
    yield ReportSection(
        "Which layer caused the final drift",
        f"Every layer's local mismatch, carried through all later layers (Prop. 2). Shares of a model add up to 1. "
        f"{where}",
        (Figure("attribution", ledger_charts.waterfall(booked, None), f"Share of every layer: {shares}"),),
        (
            ReportTable(
                "Attribution",
                tables.stack_models(booked),
                "contribution, final: norm / norm of the expert's",
            ),
        ),
        measured=asked.measurement("attribution", replace(asked.on, split=first.split)),
    )


def _feature_part(asked: ReportOrder, ledgers: Mapping[str, DriftLedger]) -> ReportSection:
    first = next(iter(ledgers.values()))
    figures = tuple(_map(ledgers, task, number) for number, task in enumerate(asked.session.tasks[:MOST_MAPS], 1))
    cosines = pd.DataFrame({shown: tables.mean_cosines(ledger) for shown, ledger in ledgers.items()})
    left = len(asked.session.tasks) - len(figures)
    return ReportSection(
        "Features",
        "Final features of the experts and of the models on the same samples, each divided by its norm, in the two "
        f"directions of largest variance of all of them together (PCA). {tables.describe_samples(first)}. Distances in "
        "two dimensions are not the true ones; the table has the cosine in the full space."
        + (f" {left} tasks are not drawn." if left else ""),
        figures,
        (ReportTable("Cosine to the expert", cosines.rename_axis("task").reset_index(), "mean over samples", 4),),
        measured=asked.measurement("cosines", replace(asked.on, split=first.split)),
    )


def _map(ledgers: Mapping[str, DriftLedger], task: str, number: int) -> Figure:
    found = {shown: ledger.tasks[task] for shown, ledger in ledgers.items()}
    features: dict[str, Tensor] = {"expert": next(iter(found.values())).expert_features}
    features |= {shown: one.model_features for shown, one in found.items()}
    flat = np.split(pca_map(pool_models(features)), len(features))
    points = dict(zip(features, flat, strict=True))
    indices = list(next(iter(found.values())).indices)
    dots = Dots(list(range(len(indices))), [f"sample {index}" for index in indices])
    chart = feature_map(points, dots, f"PCA of {label(task)},")
    return Figure(f"features-{number}", chart, f"PCA of the final features on {task}, {', '.join(points)}")
