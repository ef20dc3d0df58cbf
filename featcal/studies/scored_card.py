"""Score a written model, the model before calibration and the experts, and write the scores into its card."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from featcal.evaluation.comparison import Difference, compare_scores
from featcal.evaluation.evaluate import Scores
from featcal.export.card import data_on_hub, pipeline_tag
from featcal.export.card_parts import CardScore, CardScores, load_card, save_card, with_final_drift, with_scores
from featcal.export.record_facts import require_same_start
from featcal.formats.hub import RECORD_FILE
from featcal.session.model_ref import EVERY_EXPERT, ModelId, ModelRef
from featcal.session.session import Session
from featcal.studies import recording
from featcal.studies.history import History, How
from featcal.studies.recording import count_looks
from featcal.suite.name_grammar import model_name
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError, NoScores
from featcal.system.json_files import read_json
from featcal.system.progress import Progress, silent


def score_into_card(
    session: Session,
    folder: Path,
    on: EvaluationSamples,
    history: History,
    *,
    model: ModelId | None = None,
    place: str = "featcal evaluate",
    progress: Progress = silent,
) -> list[Scores]:
    """Score a written model, the model before calibration and the experts on the same samples, and write the table and
    the metadata of the folder's card; the rest of the card stays.

    Args:
        history: records uses of the test split.
        model: the model of the folder, if the session has it already; None reads the folder.
        place: where the scores are shown.

    Returns:
        Scores of the model before calibration (unless the model is a merge of the experts), of the model and of the
            experts.

    Raises:
        InputError: the folder has no card or record, belongs to another suite, or the models cannot be scored.
    """
    card = load_card(folder)
    before = model_before(session, folder)
    written = session.resolve(str(folder.absolute()) if model is None else model)
    models = [*([] if before is None else [session.resolve(before)]), written, EVERY_EXPERT]
    with count_looks(session, models, on, place, history):
        scores = [session.measure.scores(one, on, progress) for one in models]
    differences = {}
    if before is not None:
        compared = session.measure.compare(before, written, on, progress)
        differences = {**compared.tasks, "": compared.average}
    *_, after, experts = scores
    suite = session.family.suite
    rows = _rows(after, experts, differences, data_on_hub(suite, after.split))
    found = CardScores(suite.name, after.split, folder.absolute().name, before or "", rows)
    save_card(folder, with_scores(card, found, pipeline_tag(session.family)))
    return scores


def tell_measured(session: Session, folder: Path, model: ModelRef, on: EvaluationSamples, how: How) -> None:
    """Write a session's measurements of a calibration, and of the model before it, into the card of its folder: scores
    with their number of samples and interval, and the drift of final features.

    Args:
        model: the calibration in the folder; missing measurements are made here.
        how: kind of the scores.

    Raises:
        InputError: the folder has no card, or the samples cannot be used.
    """
    _, before = model.require_calibration()
    card, split = load_card(folder), on.split or session.split
    first, second = (session.measure.features(one, on).tasks for one in (before, model))
    rows = {
        task: (first[task].layers[-1].relative_drift, one.layers[-1].relative_drift, session.counts(on)[task])
        for task, one in second.items()
    }
    text = with_final_drift(card, rows, split)
    with suppress(NoScores):
        old, new, experts = (recording.score_run(session, one, on, how) for one in (before, model, EVERY_EXPERT))
        compared = compare_scores(old, new)
        differences = {**compared.tasks, "": compared.average}
        table = _rows(new, experts, differences, data_on_hub(session.family.suite, split))
        found = CardScores(session.family.suite.name, split, folder.absolute().name, before.name, table)
        text = with_scores(type(card)(text), found, pipeline_tag(session.family))
    save_card(folder, text)


def model_before(session: Session, folder: Path) -> str | None:
    """Return the name of the model before calibration of a folder's model; None for a merge, which is made from the
    experts.

    Raises:
        InputError: the folder has no record, it is of another suite, or the suite's models have changed since.
    """
    missing = f"{folder} has no {RECORD_FILE}; give a folder that featcal has written"
    record = read_json(folder / RECORD_FILE, missing=missing)
    suite = session.family.suite
    if record.get("suite") != suite.name:
        raise InputError(
            f"{folder} was made from the suite '{record.get('suite')}', not from '{suite.name}'; name that suite"
        )
    if record.get("command") == "merge" or "model" not in record:
        return None
    if record.get("command") != "calibrate":
        return model_name(str(record["model"])).of
    before = str(record["model"])
    require_same_start(record, session.fit.family_with(session.resolve(before)), folder)
    return before


def _rows(
    after: Scores, experts: Scores, differences: Mapping[str, Difference], data: Mapping[str, str]
) -> list[CardScore]:
    """Return a row per task and one for the average; `differences` has the average under ""."""
    found = []
    total = sum(one.n for one in after.tasks.values())
    scored = {task: (one.metric, one.n, one.value, experts.tasks[task].value) for task, one in after.tasks.items()}
    for task, (metric, n, value, expert) in {**scored, "": ("", total, after.average, experts.average)}.items():
        row = CardScore(task or "average", metric, n, value, expert, data=data.get(task, ""))
        apart = differences.get(task)
        found.append(row if apart is None else replace(row, before=apart.a, low=apart.low, high=apart.high))
    return found
