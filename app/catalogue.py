"""List the content of the Models and data page: findings, models, tasks and example pictures or texts."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import state
from featcal.evaluation.evaluate import TaskScore
from featcal.figures import tables
from featcal.figures.names import plain, plain_lines
from featcal.preflight.check import Preflight, check_suite
from featcal.samples.sources import Samples
from featcal.server.lengths import is_long, seconds_to_score
from featcal.session.fingerprint import Stamp
from featcal.session.session import Session
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import SPLITS, Suite, Task
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError
from featcal.system.formatting import decimals, duration, how_many, readable
from featcal.system.resources import embedded_suites
from featcal.system.sandbox import without_places

EXAMPLES_PER_TASK = 6
MOST_ANSWERS = 8
WIDTHS = {"task": 110, "text": 640, "answer": 120}


def models(suite: Suite) -> pd.DataFrame:
    """Return role and place of every model."""
    merged = suite.merged
    if isinstance(merged, MergeRecipe):
        given = merged.model_dump()
        merged = f"merged here: {', '.join([given.pop('method'), *(f'{name} {given[name]}' for name in given)])}"
    rows = [("base", suite.base or "not known"), ("merged", merged)]
    rows += [(f"expert, {task}", spec.expert) for task, spec in suite.tasks.items()]
    return pd.DataFrame([(role, without_places(where)) for role, where in rows], columns=["role", "where"])


def preflight() -> Preflight:
    """Return all findings of `featcal check` for the selected suite; it runs again when one of its files changes."""
    suite, files = state.opened_files()
    with st.spinner("Checking models and samples …"):
        return _preflight(state.suite_reference(), files, suite)


# The suite is not hashed (its name begins with "_"): its reference and the stamp of its files tell it apart.
@st.cache_resource(max_entries=4, ttl="1h", show_spinner=False)
def _preflight(reference: str, files: Stamp, _suite: Suite) -> Preflight:
    return check_suite(_suite)


def show_suite_findings(place: DeltaGenerator) -> None:
    """Show problems of the suite from `featcal check`, on a page that shows its numbers."""
    # featcal's own suites were checked before they were published.
    if state.suite_reference() in embedded_suites():
        return
    # Called when the page is drawn: looking at every expert takes a while, and the page should not wait for it.
    with place:
        found = preflight()
        for line in found.problems:
            st.warning(plain_lines(line), icon=":material/rule:")
        if found.problems or found.notes:
            label = f"See what a check of this suite found (problems: {len(found.problems)}, notes: {len(found.notes)})"
            st.page_link("../pages/models.py", label=label, icon=":material/inventory_2:")


def findings(found: Preflight) -> None:
    """Show problems in red and notes in yellow, or a line that there are none."""
    for line in found.problems:
        st.error(plain_lines(line), icon=":material/error:")
    if found.notes:
        st.warning("\n".join(f"- {plain(note)}" for note in found.notes), icon=":material/info:")
    if not found.problems:
        what = "Every model fits the base's architecture, every source of samples opens."
        st.success(what, icon=":material/check_circle:")


def expectations(found: Preflight) -> None:
    """Show downloads and costs of a run, the distance of every model from the base, and every expert's score on every
    task."""
    if found.downloads:
        st.header("Would be fetched from the Hub")
        rows = [(one.ref, one.kind, readable(one.bytes)) for one in found.downloads]
        st.dataframe(pd.DataFrame(rows, columns=["id", "kind", "size"]), hide_index=True, alt="Downloads and sizes")
    if found.estimates is not None:
        own = found.estimates
        running = own.seconds - own.start_seconds
        more = own.generation_seconds
        writes = f", and up to {duration(more)} to see if it still writes" if more >= 1 else ""
        st.caption(
            f"Estimates for a calibration with {own.samples} samples per task on this machine's processor: "
            f"{readable(own.memory_bytes)} of memory, {readable(own.disk_bytes)} on disk, {duration(running)}{writes}."
        )
    if found.lineage is not None and found.lineage.models:
        with st.expander("Distance of every model to the base, layer by layer", icon=":material/straighten:"):
            models = {role: one.distance for role, one in found.lineage.models.items()}
            frame = pd.DataFrame(models, index=list(found.lineage.layers)).T
            st.dataframe(frame.style.format("{:.3f}"), alt="Relative distance of weights per model and layer")
            st.caption(
                "‖model - base‖ / ‖base‖ over the matrices of a layer. Models trained from the base stay well below 1; "
                "those of another origin are at about 1.4 or more."
            )
    if found.diagonal is not None:
        with st.expander("Every expert on every task", icon=":material/grid_on:"):
            frame = 100 * pd.DataFrame(found.diagonal.accuracy).T
            st.dataframe(frame.style.format("{:.0f}"), alt="Share of right answers, experts in rows, tasks in columns")
            st.caption(
                f"Right first answers in %, {how_many(found.diagonal.counts.values())} samples per task, split "
                f"{found.diagonal.split_words}; experts in rows, tasks in columns. An expert that does another's task "
                "better than its own is probably listed under the wrong task."
            )


def tasks_section(session: Session, on: EvaluationSamples) -> None:
    """Show the tasks with their experts' own scores, and warn of experts at chance level."""
    frame, missing = tabulate_tasks(session, on)
    st.dataframe(
        tables.lift_halves(frame, ["expert, %"]),
        hide_index=True,
        column_config={"expert, %": st.column_config.NumberColumn(format="%.1f")},
        alt="Tasks with classes, samples and the expert's own accuracy",
    )
    if missing:
        st.info(f"Experts are not scored: {plain(missing)}", icon=":material/info:")
        return
    of_classes = "rank correlation" if session.family.adapter.embeds else "accuracy"
    what = "whole generated answers" if session.is_text else of_classes
    counts = session.counts(on)
    st.caption(
        f"expert: {what} of the expert on {how_many(counts.values())} {session.split} samples of its own task. Far "
        "below what it should reach means that the file is the wrong one."
    )
    for task in guessing(frame, counts):
        score = frame.set_index("task").loc[task, "expert, %"]
        st.warning(
            f"The expert of {plain(task)} is right in {decimals(score, 1)}\u00a0%: as good as guessing. Is its file "
            "the right one, and are the classes in the order that it was trained with?",
            icon=":material/casino:",
        )


def tabulate_tasks(session: Session, on: EvaluationSamples) -> tuple[pd.DataFrame, str]:
    """Return, per task, answers, prompts, splits and the expert's own score; and the reason for missing scores."""
    scores: Mapping[str, TaskScore] = {}
    try:
        seconds = seconds_to_score(session, on)
        if is_long(session, seconds) and not session.measure.has_scores("expert", on):
            missing = f"that takes about {duration(seconds)}"
            if "test" in session.family.suite.splits():
                missing += "; the page Accuracy does it as a job, on the test split"
        else:
            with state.progress() as report:
                scores, missing = session.measure.scores("expert", on, report).tasks, ""
    except FeatcalError as error:
        missing = str(error)
    samples = {task: session.viewable_samples(task, on) for task in session.tasks}
    rows = []
    for task, spec in session.family.suite.tasks.items():
        row: dict[str, Any] = {"task": task}
        if scores:
            row["expert, %"] = 100 * scores[task].value
        row["splits"] = ", ".join(split for split in SPLITS if spec.source(split))
        prompted = session.family.adapter.scores_with == "prompts"
        rows.append(row | (_text(spec, samples[task]) if session.is_text else _classes(spec, samples[task], prompted)))
    return pd.DataFrame(rows), missing


def guessing(frame: pd.DataFrame, counts: Mapping[str, int]) -> list[str]:
    """Return tasks whose expert may be guessing: its score is within two standard errors of 1 / classes.

    Args:
        frame: as `tasks` returns it.
        counts: number of samples of each expert's score.
    """
    found = []
    for row in frame.to_dict("records"):
        if "expert, %" in row and (row.get("classes") or 0) > 1:
            chance = 1 / row["classes"]
            beyond = chance + 2 * sqrt(chance * (1 - chance) / counts[row["task"]])
            # So few samples that not even all of them right would tell.
            if row["expert, %"] / 100 < beyond < 1:
                found.append(row["task"])
    return found


def _classes(spec: Task, samples: Samples, prompted: bool) -> dict[str, Any]:
    names = samples.class_names or ()
    listed = ", ".join(names) or "–"
    prompts = {"prompts": " | ".join(spec.templates)} if prompted else {}
    return {"classes": len(names) or None, "class names": listed} | prompts


def _text(spec: Task, samples: Samples) -> dict[str, Any]:
    source = spec.calibration or spec.validation or spec.test
    answers = sorted(set(samples.targets or ()))
    listed = ", ".join(answers[:MOST_ANSWERS]) + (", …" if len(answers) > MOST_ANSWERS else "")
    return {
        "metric": spec.metric,
        "answers": listed or "–",
        "input": (source and (source.input or ", ".join(source.turn_columns))) or "token ids",
    }


def examples(session: Session) -> None:
    """Show some calibration samples of every task: pictures with their classes, or texts with their answers."""
    few = EvaluationSamples(EXAMPLES_PER_TASK, "calibration")
    samples = {task: session.viewable_samples(task, few) for task in session.tasks}
    if any(one.texts is not None for one in samples.values()):
        rows = [
            {"task": task, "text": text, "answer": answer}
            for task, one in samples.items()
            if one.texts is not None
            for text, answer in zip(one.texts, one.targets or _label_names(one) or ["–"] * len(one), strict=True)
        ]
        wide = {name: st.column_config.TextColumn(width=size) for name, size in WIDTHS.items()}
        st.dataframe(pd.DataFrame(rows), hide_index=True, column_config=wide, height=420, alt="Texts and their answers")
    elif any(one.images is not None for one in samples.values()):
        _show_pictures(samples)
    else:
        st.caption("The samples of this suite are tensors: they cannot be shown.")


def _label_names(one: Samples) -> list[str]:
    """Return the class name of every sample; none if classes have no names."""
    return [one.class_names[int(i)] for i in one.labels] if one.class_names and one.labels is not None else []


def _show_pictures(samples: Mapping[str, Samples]) -> None:
    # Two tasks side by side; an odd one gets an empty place beside it.
    for left, right in zip(*[iter([*samples, *([None] * (len(samples) % 2))])] * 2, strict=True):
        for column, task in zip(st.columns(2), (left, right), strict=True):
            one = samples.get(task or "")
            if one is None or one.images is None:
                continue
            names = _label_names(one)
            with column:
                st.caption(f"**{plain(str(task))}**")
                st.image(
                    list(one.images),
                    caption=[plain(name) for name in names] or None,
                    width=72,
                    alt=[f"{task}: {n}" for n in names] or None,
                )
