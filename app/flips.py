"""Show the samples that the second model fixed or broke, and the uncertainty of the counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import streamlit as st

from app import downloads, samples, state, view
from app.downloads import Numbers, Origin
from app.selection import HOME
from featcal.evaluation.comparison import Comparison
from featcal.figures import sample_charts, sample_tables
from featcal.figures.names import plain
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError

MOST_UNASKED = 12
"""Largest number of pictures shown without a selection."""


def comparison(session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples) -> Comparison | None:
    """Compare both models of a page on the same samples; None, with the reason on the page, if that fails."""
    try:
        a, b = models.values()
        return session.measure.compare(a, b, on)
    except FeatcalError as error:
        view.problem(error)
        return None


def show_differences(found: Comparison, pair: tuple[str, str], metric: str, origin: Origin) -> None:
    """Show the difference of two models per task with its interval."""
    rows = {**found.tasks, "average": found.average}
    summary = "; ".join(f"{task} {sample_tables.difference_words(one)}" for task, one in rows.items())
    st.header(f"What {pair[1]} gains over {pair[0]}")
    figure = sample_charts.differences_chart(found, pair, metric)
    view.picture(
        figure, "differences", f"Difference per task: {summary}", downloads.download_name("differences", origin)
    )
    st.caption(f"95\u00a0% intervals of {found.draws:,} bootstrap draws of the samples, seed {found.seed}.")
    units = f"a is {pair[0]}, b {pair[1]}: scores, difference and interval are shares; p: McNemar's exact test"
    of_pair = replace(origin, models={name: origin.models[name] for name in pair})
    view.tools(Numbers("differences", found.to_frame(), units, of_pair, 4, "differences"), sample_charts.DIFFERENCES)


def show_flips(
    session: Session, models: Mapping[str, ModelRef], task: str, on: EvaluationSamples, found: Comparison
) -> None:
    """Show the number of changed answers, and every sample of a task in a table with a filter.

    Args:
        models: the merge and the model that it is compared with, scored on `on` like base and experts.
    """
    a, b = models
    st.header(f"Which answers did {b} change?")
    counts, one = found.average.counts, found.tasks[task]
    if counts is not None:
        st.markdown(
            f"Over all tasks **{counts.fixed}** wrong answers of {a} became right in {b}, **{counts.broken}** right "
            f"ones became wrong. Below are those of {plain(task)}."
        )
    if one.counts is None:
        st.info(f"No answer of {plain(task)} is right or wrong: it is scored by a rank correlation.")
    everyone = samples.with_ends(session, models)
    data = session.viewable_samples(task, on)
    frame = sample_tables.sample_table(data, samples.measured_samples(session, models, task, on), a, b)
    row = st.container(horizontal=True, vertical_alignment="bottom")
    show = view.choice(f"Samples of {plain(task)}", list(sample_tables.SHOWN), "flips", row) if one.counts else "all"
    sorts = ["sample", *(name for name in frame if str(name).endswith((" margin", " drift", " cosine")))]
    sort = view.one_of(sorts, state.selection().sort)
    state.control(row.selectbox, "sort", sort, HOME.sort or sorts[0], "Sort by", sorts)
    kept = sample_tables.select_rows(frame, show, sort)
    split = on.split
    origin = downloads.sample_origin(session, on, everyone).with_task(task)
    if kept.empty:
        st.info(f"No sample of {plain(task)} is {show}.", icon=":material/info:")
    else:
        name = "flips" if show == "flipped" else f"samples {show}"
        samples.show_sample_table(
            Numbers(f"{name} {task}", kept, f"answers; {sample_tables.UNITS}", origin, kind="answers"), split
        )
    samples.offer_measurements(session, models, on)
    if not samples.picked_samples(session, on) and data.images is not None and not kept.empty:
        samples.gallery(data, kept.head(MOST_UNASKED))
