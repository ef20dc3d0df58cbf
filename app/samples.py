"""Show the picked samples of a task: pictures or texts, every model's answers, and the flips among them.

Every page that measures models shows them (`panel`), and any page can pick them (`pick_samples`, or the rows of a
table): the ids and their split are part of the selection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from textwrap import shorten

import pandas as pd
import streamlit as st

from app import compare, downloads, state, view
from app.downloads import Numbers
from app.selection import MOST_PICKED
from featcal.figures import sample_tables
from featcal.figures.names import plain
from featcal.figures.sample_tables import PerSample
from featcal.samples.sources import Samples
from featcal.server.lengths import is_long, seconds_to_score
from featcal.session.model_ref import BASE, EVERY_EXPERT, ModelRef
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError, NoScores
from featcal.system.formatting import duration

MOST_PICTURES, MOST_TEXTS, MOST_THUMBNAILS = 24, 6, 16
_TABLE = "table of samples"


def pick_samples(ids: Sequence[int], split: str | None = None) -> None:
    """Pick samples of the selected task, the first `MOST_PICKED` of them.

    Args:
        ids: numbers of samples in their view.
        split: None means the split of the measurements.
    """
    state.look_at(picked=tuple(sorted(set(ids)))[:MOST_PICKED], picked_of=split if ids else None)


def picked_samples(session: Session, on: EvaluationSamples) -> tuple[int, ...]:
    """Return the picked samples of a view; none if those of another split are picked."""
    chosen = state.selection()
    same = (chosen.picked_of or session.split) == (on.split or session.split)
    return chosen.picked if same else ()


def panel(session: Session, models: Mapping[str, ModelRef], *, details: bool = False) -> None:
    """Draw the picked samples at the foot of a page: a bar with their number, pictures or texts, and how many of them
    were fixed and broken; below it every model's answers. Nothing if none is picked.

    Models are measured here if that is quick; otherwise there are buttons, except for the test split, whose use the
    Accuracy page counts.

    Args:
        models: those of the page, the merge first; flips are those to the second.
        details: what every model says is unfolded.
    """
    chosen = state.selection()
    if not chosen.picked:
        return
    task, split = view.one_of(session.tasks, chosen.task), chosen.picked_of
    on = EvaluationSamples(chosen.n) if split in (None, session.split) else EvaluationSamples(None, split)
    try:
        data = session.viewable_samples(task, on)
    except InputError as error:  # an address may name a split that the suite does not have
        st.caption(f"Selected samples cannot be shown: {plain(str(error))}")
        return
    ids = [i for i in chosen.picked if i < len(data)]
    if not ids:
        return
    _measure_if_quick(session, models, on)
    found = measured_samples(session, models, task, on)
    with st.container(key="selected-samples", gap="xsmall"):
        with st.container(horizontal=True, vertical_alignment="center"):
            many = f"**{len(ids)}** of {len(data)} {on.split or session.split} samples of {plain(task)} selected"
            st.markdown(many + sample_tables.describe_picked(found, list(models), ids), width="content")
            clear = "Clear the selection"
            st.button(
                clear, "clear-picked", on_click=pick_samples, args=([],), type="tertiary", icon=":material/close:"
            )
        with st.container(horizontal=True, vertical_alignment="center"):
            _thumbnails(data, ids)
    title = "Every model's answers to the selected samples"
    # Folded, it costs nothing: what is in it is made when it is opened.
    fold = st.expander(title, details, key="selected-details", icon=":material/table:", on_change="rerun")
    if fold.open:
        with fold:
            _details(session, models, task, on, found, ids)


def _details(
    session: Session,
    models: Mapping[str, ModelRef],
    task: str,
    on: EvaluationSamples,
    found: Mapping[str, PerSample],
    ids: Sequence[int],
) -> None:
    """Show samples larger, every model's answers in a table, and buttons for missing measurements."""
    data = session.viewable_samples(task, on)
    frame = sample_tables.sample_table(data, found, *[*models, ""][:2]).iloc[list(ids)]
    gallery(data, frame)
    origin = downloads.sample_origin(session, on, with_ends(session, models)).with_task(task)
    kind = "answers" if on.samples is None else "margins" if any(" margin" in name for name in frame) else "samples"
    view.show_table(Numbers(f"selected samples {task}", frame, sample_tables.UNITS, origin, kind=kind))
    if on.samples is not None:
        offer_measurements(session, models, on)


def _measure_if_quick(session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples) -> None:
    """Run the models of a page, base and expert on picked samples if that takes a moment."""
    left = [one for one in with_ends(session, models).values() if not _decides(session, one, on)]
    if on.samples is not None and left and not is_long(session, len(left) * seconds_to_score(session, on)):
        measure_samples(session, with_ends(session, models), on)


def _thumbnails(data: Samples, ids: Sequence[int]) -> None:
    """Show the first of some samples small, and the number of further ones."""
    first = ids[: MOST_THUMBNAILS if data.images is not None else 2]
    words = [f"and {len(ids) - len(first)} more"] if len(ids) > len(first) else []
    if data.images is not None:
        pictures = (data.images[i] for i in first)
        # Every so many pixels of a large picture: it is drawn anew with every page.
        small = [one[:: max(1, min(one.shape[:2]) // 96), :: max(1, min(one.shape[:2]) // 96)] for one in pictures]
        st.image(small, width=40, alt=[f"Picture of sample {i}" for i in first])
    elif data.texts is not None:
        words = [*(plain(shorten(data.texts[i], 60, placeholder=" …")) for i in first), *words]
    if words:
        st.caption(" · ".join(words))


def with_ends(session: Session, models: Mapping[str, ModelRef]) -> dict[str, ModelRef]:
    """Return the models of a page between base, if that is known, and expert."""
    base: dict[str, ModelRef] = {compare.SHOWN_BASE: BASE} if session.family.is_base_known else {}
    return {**base, **models, compare.SHOWN_EXPERT: EVERY_EXPERT}


def measure_samples(session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples) -> None:
    """Run every model on the samples of a view, if not done yet, and take its answers from its final features."""
    with state.progress() as report:
        for model in models.values():
            session.measure.features(model, on, report)
            with suppress(NoScores):
                session.measure.quick_scores(model, on)


def are_measured(session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples) -> bool:
    """Say whether margin, drift and decisions of final features are known for all models,
    or can be computed in a moment.
    """
    return all(_decides(session, model, on) for model in models.values())


def _decides(session: Session, model: ModelRef, on: EvaluationSamples) -> bool:
    if not session.measure.has_features(model, on):
        return False
    known = session.is_text or session.measure.has_quick_scores(model, on)
    return known or not is_long(session, seconds_to_score(session, on))


def measured_samples(
    session: Session, models: Mapping[str, ModelRef], task: str, on: EvaluationSamples
) -> dict[str, PerSample]:
    """Return the answers of the models of a page, base and expert on a task's samples, as far as they are measured.

    Answers of language models are whole ones if the page scored these, else those of the final features: only whether
    the first token is right.
    """
    data = session.viewable_samples(task, on)
    whole = _answers_are_whole(session, models, on)
    found = {}
    for shown, model in with_ends(session, models).items():
        one, decided = PerSample(), _decides(session, model, on)
        with suppress(NoScores):  # no labels, no answers: then there is drift alone
            if session.measure.has_features(model, on) and not model.is_every_expert:
                one = one.with_features(session.measure.features(model, on).tasks[task])
            if session.measure.has_scores(model, on) and (whole or not session.is_text):
                one = one.with_scores(data, session.measure.scores(model, on).tasks[task])
            elif decided and not whole:
                one = one.with_scores(data, session.measure.quick_scores(model, on).tasks[task])
            if decided:
                one = replace(one, margin=session.measure.margins(model, on)[task].numpy())
        found[shown] = one
    return found


def offer_measurements(session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples) -> None:
    """Draw buttons for missing measurements of the models of a page, base and expert: margins and drift, full answers
    of language models."""
    everyone = with_ends(session, models)
    label = f"Measure margin and drift on the {on.split or session.split} split"
    if not are_measured(session, everyone, on) and st.button(label, icon=":material/straighten:"):
        measure_samples(session, everyone, on)
        st.rerun()
    if not session.is_text or all(session.measure.has_scores(model, on) for model in everyone.values()):
        return
    seconds = seconds_to_score(session, on) * sum(not session.measure.has_scores(one, on) for one in everyone.values())
    if is_long(session, seconds):
        st.caption(
            f"Whole answers of all models take about {duration(seconds)}; `featcal evaluate SUITE --split "
            f"{on.split or session.split} --model MODEL` gives them."
        )
    elif st.button("Let all models answer in full", icon=":material/chat:"):
        with state.progress() as report:
            for model in everyone.values():
                session.measure.scores(model, on, report)
        st.rerun()
    if not _answers_are_whole(session, models, on):
        st.caption("Right and wrong refer to the answer's first token.")


def _answers_are_whole(session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples) -> bool:
    """Say whether both models of a page have generated full answers; classes are not such answers."""
    return session.is_text and all(session.measure.has_scores(model, on) for model in models.values())


def gallery(data: Samples, rows: pd.DataFrame) -> None:
    """Show pictures or the first texts of some rows of a sample table, with right answer and flip."""
    ids = rows["sample"].tolist()
    lines = [_caption(row) for row in rows.to_dict("records")]
    if data.images is not None:
        shown = ids[:MOST_PICTURES]
        captions = [plain(one) for one in lines[:MOST_PICTURES]]
        alt = [f"Picture of sample {one}" for one in lines[:MOST_PICTURES]]
        st.image([data.images[i] for i in shown], caption=captions, width=96, alt=alt)
    elif data.texts is not None:
        shown = ids[:MOST_TEXTS]
        for i, words in zip(shown, lines[:MOST_TEXTS], strict=True):
            st.caption(f"sample {plain(words)}")
            st.text(data.texts[i])
    else:
        st.caption("This suite's samples are tensors: they cannot be shown.")
        return
    if len(shown) < len(ids):
        st.caption(f"The first {len(shown)} of {len(ids)} are shown; the table has all.")


def show_sample_table(numbers: Numbers, split: str | None = None) -> None:
    """Show a table of samples with its CSV; rows selected in it are picked, and picked rows selected.

    Args:
        numbers: with a column "sample".
        split: as in `pick`.
    """
    ids = tuple(numbers.frame["sample"].tolist())
    chosen = state.selection()
    mine = chosen.picked if chosen.picked_of == split else ()
    version, drawn = st.session_state.get(_TABLE, (0, None))
    if drawn != (ids, mine):  # streamlit cannot change the selection of a table that is drawn, so a new one is
        version += 1
    st.session_state[_TABLE] = version, (ids, mine)
    key = f"samples-{version}"
    st.dataframe(
        numbers.frame,
        hide_index=True,
        column_config=view.formats(numbers),
        key=key,
        on_select=partial(_pick_rows, key, split),
        selection_mode="multi-row",
        selection_default={"selection": {"rows": [row for row, i in enumerate(ids) if i in mine]}},
        alt=f"The numbers of {numbers.what}; select rows to see their samples",
    )
    view.csv(numbers)


def _pick_rows(key: str, split: str | None) -> None:
    """Pick the rows that are selected in the table, beside samples that it does not show."""
    version, (ids, mine) = st.session_state[_TABLE]
    hidden = set(mine) - set(ids)
    rows = [ids[row] for row in st.session_state[key].selection.rows if row < len(ids)]
    pick_samples([*hidden, *rows], split)
    # The table shows its new selection already: it need not be replaced by the next run.
    st.session_state[_TABLE] = version, (ids, state.selection().picked)


def _caption(row: Mapping[str, object]) -> str:
    """Return number, right answer and flip of a sample."""
    words = [f"{row['sample']}: {row['right']}" if "right" in row else str(row["sample"])]
    return ", ".join([*words, str(row["flip"])] if "flip" in row else words)
