"""Show the picked samples of a task: what they are, what every model makes of them, which flips they hold.

Any page can show them (`panel`) and any page can pick them (`pick`, or the rows of `table`): the ids are part of the
selection, and with them the split whose samples they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pandas as pd
import streamlit as st

from app import compare, downloads, state, view
from app.downloads import Numbers
from app.selection import MOST_PICKED
from featcal.figures import sample_tables
from featcal.figures.names import plain
from featcal.figures.sample_tables import PerSample
from featcal.samples.sources import Samples
from featcal.session.model_names import ModelId
from featcal.session.session import Session
from featcal.suite.views import View
from featcal.system.errors import NoScores

MOST_PICTURES, MOST_TEXTS = 24, 6
_TABLE = "table of samples"


def pick(ids: Sequence[int], split: str | None = None) -> None:
    """Pick samples of the selected task, the first `MOST_PICKED` of them.

    Args:
        ids: numbers of samples in their view.
        split: None is the one that models are measured on.
    """
    state.select(picked=tuple(sorted(set(ids)))[:MOST_PICKED], picked_of=split if ids else None)


def picked_samples(session: Session, on: View) -> tuple[int, ...]:
    """Return the picked samples of a view; none where those of another split are picked."""
    chosen = state.selection()
    same = (chosen.picked_of or session.split) == (on.split or session.split)
    return chosen.picked if same else ()


def panel(session: Session, models: Mapping[str, ModelId], task: str, on: View, picked: Sequence[int]) -> None:
    """Show the picked samples: pictures or texts, right answers, those of base, `models` and expert, margins and drift,
    and which part of the flips they hold; a hint where none is picked.

    Args:
        models: those of the page, A first; flips are those from A to B.
        on: the view whose samples are numbered; models are measured on it here, unless it is a whole split, for which
            the page has a button (`offer_measurements`).
        picked: numbers of samples; those beyond the view's are passed over.
    """
    data = session.viewable_samples(task, on)
    ids = [i for i in picked if 0 <= i < len(data)]
    if not ids:
        _hint(session, on)
        return
    st.subheader("Selected samples")
    everyone = with_ends(models)
    if on.samples is not None:
        measure(session, everyone, on)
    found = measured_samples(session, everyone, task, on)
    a, b = [*models, ""][0], [*models, "", ""][1]
    frame = sample_tables.sample_table(data, found, a, b)
    st.markdown(_summary(frame, ids, models, task))
    gallery(data, frame.iloc[ids])
    origin = downloads.sample_origin(session, on, everyone).with_task(task)
    kind = "answers" if on.samples is None else "margins" if any(" margin" in name for name in frame) else "samples"
    numbers = Numbers(f"selected samples {task}", frame.iloc[ids], sample_tables.UNITS, origin, kind=kind)
    view.table(numbers)
    with st.container(horizontal=True):
        st.button("Clear the selection", on_click=pick, args=([],), icon=":material/close:", key="clear-picked")
        if on.samples is not None:
            offer_measurements(session, everyone, on)


def with_ends(models: Mapping[str, ModelId]) -> dict[str, ModelId]:
    """Return the models of a page between base and expert."""
    return {compare.BASE: "base", **models, compare.EXPERT: "expert"}


def measure(session: Session, models: Mapping[str, ModelId], on: View) -> None:
    """Take every model through the samples of a view, where that was not done."""
    with state.progress() as report:
        for model in models.values():
            session.features(model, on, report)


def measured_samples(session: Session, models: Mapping[str, ModelId], task: str, on: View) -> dict[str, PerSample]:
    """Return what every model makes of a task's samples, as far as it was measured.

    Answers are whole ones where all models were scored, else those that final features decide: the same classes, but
    for a text no more than whether the first token is right.
    """
    data = session.viewable_samples(task, on)
    whole = all(session.has_scores(model, on) for model in models.values())
    found = {}
    for shown, model in models.items():
        one, walked = PerSample(), session.has_features(model, on)
        with suppress(NoScores):  # no labels, no answers: then there is drift alone
            if walked and model != "expert":
                one = one.with_features(session.features(model, on).tasks[task])
            if whole or walked:
                scores = session.scores(model, on) if whole else session.quick_scores(model, on)
                one = one.with_scores(data, scores.tasks[task])
            if walked:
                one = replace(one, margin=session.margins(model, on)[task].numpy())
        found[shown] = one
    return found


def offer_measurements(session: Session, models: Mapping[str, ModelId], on: View) -> None:
    """Offer buttons for what is not known yet: margins and drift on a whole split, full answers of language models."""
    walked = all(session.has_features(model, on) for model in models.values())
    label = f"Measure margin and drift on the {on.split or session.split} split"
    if not walked and st.button(label, icon=":material/straighten:"):
        measure(session, models, on)
        st.rerun()
    if not session.is_text or all(session.has_scores(model, on) for model in models.values()):
        return
    if st.button("Let all models answer in full", icon=":material/chat:"):
        with state.progress() as report:
            for model in models.values():
                session.scores(model, on, report)
        st.rerun()
    st.caption("Right and wrong are those of the answer's first token.")


def gallery(data: Samples, rows: pd.DataFrame) -> None:
    """Show pictures or the first texts of some rows of a sample table, with right answer and flip."""
    ids = rows["sample"].tolist()
    said = [_caption(row) for row in rows.to_dict("records")]
    if data.images is not None:
        shown = ids[:MOST_PICTURES]
        captions = [plain(one) for one in said[:MOST_PICTURES]]
        alt = [f"Picture of sample {one}" for one in said[:MOST_PICTURES]]
        st.image([data.images[i] for i in shown], caption=captions, width=96, alt=alt)
    elif data.texts is not None:
        shown = ids[:MOST_TEXTS]
        for i, words in zip(shown, said[:MOST_TEXTS], strict=True):
            st.caption(f"sample {plain(words)}")
            st.text(data.texts[i])
    else:
        st.caption("This suite's samples are tensors: there is nothing to show of them.")
        return
    if len(shown) < len(ids):
        st.caption(f"The first {len(shown)} of {len(ids)} are shown; the table has all.")


def table(numbers: Numbers, split: str | None = None) -> None:
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
    pick([*hidden, *rows], split)
    # The table shows its new selection already: it need not be replaced by the next run.
    st.session_state[_TABLE] = version, (ids, state.selection().picked)


def _hint(session: Session, on: View) -> None:
    elsewhere = state.selection().picked
    split = on.split or session.split
    if elsewhere and (state.selection().picked_of or session.split) != split:
        other = state.selection().picked_of or session.split
        st.caption(f"{len(elsewhere)} samples of the {other} split are selected; those of this page are of {split}.")
    else:
        st.caption("Select points of a map or rows of a table of samples to see what they are and who is right.")


def _summary(frame: pd.DataFrame, ids: list[int], models: Mapping[str, ModelId], task: str) -> str:
    """Say how many samples are selected and, for two scored models, the part of the flips among them."""
    text = f"**{len(ids)}** of {len(frame)} samples of {plain(task)}"
    if "flip" not in frame:
        return f"{text}."
    (a, b), parts = list(models)[:2], sample_tables.share_of_flips(frame["flip"].tolist(), ids)
    (fixed, all_fixed), (broken, all_broken) = parts["fixed"], parts["broken"]
    turned = f"**{fixed + broken}** of the {all_fixed + all_broken} that flipped from {a} to {b}"
    detail = f"{fixed} of {all_fixed} fixed, {broken} of {all_broken} broken"
    rest = f"{parts['both right'][0]} both have right, {parts['both wrong'][0]} both wrong"
    return f"{text}, and {turned} ({detail}); {rest}."


def _caption(row: Mapping[str, object]) -> str:
    """Return number, right answer and flip of a sample."""
    words = [f"{row['sample']}: {row['right']}" if "right" in row else str(row["sample"])]
    return ", ".join([*words, str(row["flip"])] if "flip" in row else words)
