"""Measure the numbers of a verdict, cheap ones first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from featcal.drift.ledger import DriftLedger
from featcal.evaluation.comparison import compare_scores
from featcal.figures import ledger_tables, tables
from featcal.figures.names import short_model
from featcal.figures.verdict.findings import Findings, LayerFinding
from featcal.figures.verdict.sentences import Verdict, judge_numbers
from featcal.session.model_names import holds_calibration
from featcal.session.model_ref import BASE, EVERY_EXPERT, MERGED, ModelId, ModelRef
from featcal.session.session import Session
from featcal.suite.methods import REFERENCE
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import InputError, NoScores
from featcal.system.formatting import how_many
from featcal.system.progress import Progress, silent

_LEFT = ("base", "expert", "calibrated", "anchor")
"""Kinds of models that are not meant to be calibrated."""


def diagnose_model(
    session: Session,
    model: ModelId = MERGED,
    on: EvaluationSamples = EvaluationSamples(),  # noqa: B008 - frozen
    repair: ModelId | None = None,
    progress: Progress = silent,
) -> Verdict:
    """Measure a model and return the verdict; parameters and errors are those of `judge_stepwise`."""
    *_, verdict = judge_stepwise(session, model, on, repair, progress)
    return verdict


def judge_stepwise(
    session: Session,
    model: ModelId = MERGED,
    on: EvaluationSamples = EvaluationSamples(),  # noqa: B008 - frozen
    repair: ModelId | None = None,
    progress: Progress = silent,
) -> Iterator[Verdict]:
    """Yield the verdict on a model as far as it is measured: scores and drift before the calibration, which takes as
    long again. Every verdict begins with the lines of the one before.

    Args:
        repair: the calibrated model to compare with; None leaves calibration out.

    Raises:
        InputError, NumericalError: as `Measurements.drift`; for a suite without answers the verdict says that there are
            no scores.
    """
    # First the drift, because scores of classes then need no walk of their own.
    session.measure.drift(model, attribution_options(on), progress)
    yield from map(judge_numbers, examine(session, model, on, repair, progress))


def verdict_json(session: Session, name: str, on: EvaluationSamples, verdict: Verdict) -> dict[str, Any]:
    """Return the document of `featcal diagnose --json` for a model: the measured models, the samples, and the
    verdict."""
    head = {"suite": session.family.suite.name, "split": on.split or session.split, "samples": on.samples}
    return {**head, "seed": on.seed, "model": name, **verdict.to_json()}


def examine(
    session: Session,
    model: ModelId,
    on: EvaluationSamples,
    repair: ModelId | None = None,
    progress: Progress = silent,
    unscored: str = "",
) -> Iterator[Findings]:
    """Yield the findings about a model after its scores, after its drift, and after the calibration; `diagnose_model`
    lists the errors.

    Args:
        unscored: reason not to score the models; "" to score them.
    """
    one = session.resolve(model)
    shown = short_model(one.name) if one.kind == REFERENCE else one.label  # a folder by its name, not its path
    named = "The merge" if one.kind == "merged" else shown
    found = Findings(named, no_scores=unscored, repairable=is_repairable(one), whole=False)
    if not unscored:
        found = _score(session, one, on, found, progress)
    yield found
    ledger = session.measure.drift(one, attribution_options(on), progress)
    seen = ", which flatters a calibration" if ledger.split == "calibration" else ""
    found = replace(found, on=tables.describe_samples(ledger) + seen, layers=_layers(ledger), final=_final(ledger))
    if repair is not None:
        yield found
        found = _repair(session, one, session.resolve(repair), on, found, progress)
    yield replace(found, whole=True)


def is_repairable(model: ModelRef) -> bool:
    """Say whether a model is a merge that is neither calibrated nor made from a calibrated one; a folder with a record
    of a calibration counts as calibrated."""
    if model.kind in _LEFT or (model.of is not None and not is_repairable(model.of)):
        return False
    return model.kind != REFERENCE or not holds_calibration(model.name)


def repair_of(session: Session, model: ModelId) -> ModelRef | None:
    """Return a model calibrated with the suite's own options; None if it is not a merge."""
    one = session.resolve(model)
    if not is_repairable(one):
        return None
    return session.resolve("calibrated" if one.kind == "merged" else f"calibrated@{one.name}")


def attribution_options(on: EvaluationSamples) -> DriftOptions:
    """Return the options of a drift measurement with attribution to layers, on these samples."""
    return DriftOptions(on.samples, on.split, on.seed, attribution=True)


def _score(session: Session, one: ModelRef, on: EvaluationSamples, found: Findings, progress: Progress) -> Findings:
    try:
        own, experts = (session.measure.answer_scores(model, on, progress) for model in (one, EVERY_EXPERT))
    except NoScores as error:
        return replace(found, no_scores=str(error))
    scored = replace(found, metric=tables.metric_name({"": own}), lost=compare_scores(experts, own))
    if not session.family.is_base_known:
        return scored
    base = session.measure.answer_scores(BASE, on, progress)
    gained = None if one.key == session.resolve(BASE).key else compare_scores(base, own)
    return replace(scored, gained=gained, taught=compare_scores(base, experts))


def _repair(
    session: Session, one: ModelRef, repair: ModelRef, on: EvaluationSamples, found: Findings, progress: Progress
) -> Findings:
    try:
        record = session.fit.record(repair, progress)
        after = session.measure.features(repair, on, progress)
    except InputError as error:  # a model that is more than its weights
        return replace(found, no_repair=str(error))
    answers = session.measure.answer_scores
    return replace(
        found,
        repaired=None if found.lost is None else compare_scores(answers(one, on), answers(repair, on, progress)),
        repair_samples=how_many(task["samples"] for task in record["tasks"].values()),
        repaired_final=float(tables.relative_drift_table(after).iloc[-1]),
    )


def _layers(ledger: DriftLedger) -> tuple[LayerFinding, ...]:
    """Return every layer in the form of the charts of attribution and of drift; none if nothing drifted."""
    booked = ledger_tables.attribution_table(ledger, tables.ALL_TASKS).set_index("layer")["share"]
    rows = tables.layer_rows(tables.drift_table(ledger), tables.ALL_TASKS, relative=True).set_index("layer")
    return tuple(
        LayerFinding(str(layer), float(share), float(rows["mismatch"][layer]), float(rows["propagation"][layer]))
        for layer, share in booked.dropna().items()
    )


def _final(ledger: DriftLedger) -> float:
    return float(tables.relative_drift_table(ledger).iloc[-1])
