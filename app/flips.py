"""Samples that calibration turned from wrong to right, or from right to wrong: what they are and what was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st
from torch import Tensor

from app import view
from app.cloud import answers_of
from app.downloads import Numbers, Origin
from featcal.evaluation.evaluate import Scores, TaskScore
from featcal.figures.names import plain
from featcal.session import Session
from featcal.tasks.sources import Samples
from featcal.views import View

MOST_PICTURES = 12


def section(session: Session, pair: Mapping[str, Scores], task: str, origin: Origin) -> None:
    """How many samples flipped in every task, and those of one task as a table, with pictures where there are any."""
    first, second = pair
    st.subheader(f"What did {second} turn?")
    counted = counts(*pair.values())
    fixed, broken = int(counted["fixed"].sum()), int(counted["broken"].sum())
    st.markdown(f"**{fixed}** wrong answers of {first} became right in {second}, **{broken}** right ones became wrong.")
    data = session.seen(task, View(None, pair[first].split))
    frame = table(data, {shown: one.tasks[task] for shown, one in pair.items()})
    st.dataframe(counted, hide_index=True, width=360, alt="Samples that calibration fixed and broke, per task")
    if frame.empty:
        st.info(f"Nothing flipped in {plain(task)}.", icon=":material/info:")
        return
    st.caption(f"The samples of {plain(task)} that flipped (choose a task in the sidebar):")
    view.table(Numbers(f"flips {task}", frame, f"right, {first}, {second}: answers", origin.of_task(task)))
    if data.images is not None:
        shown = frame.head(MOST_PICTURES)
        said = [f"{row['flip']}: {row[first]} → {row[second]}" for _, row in shown.iterrows()]
        st.image([data.images[i] for i in shown["sample"]], caption=[plain(one) for one in said], width=96, alt=said)


def counts(first: Scores, second: Scores) -> pd.DataFrame:
    """One row per task: fixed, broken."""
    rows = []
    for task, before in first.tasks.items():
        was, now = _right(before), _right(second.tasks[task])
        pairs = list(zip(was, now, strict=True))
        rows.append({"task": task, "fixed": pairs.count((False, True)), "broken": pairs.count((True, False))})
    return pd.DataFrame(rows)


def table(data: Samples, pair: Mapping[str, TaskScore]) -> pd.DataFrame:
    """One row per flipped sample: its number, right answer, both models' answers, text where there is one."""
    right = answers_of(data) or []
    said = {shown: _words(data, one) for shown, one in pair.items()}
    rows = []
    for i, (was, now) in enumerate(zip(*map(_right, pair.values()), strict=True)):
        if was != now:
            answers = {shown: words[i] for shown, words in said.items()}
            text = {} if data.texts is None else {"text": data.texts[i]}
            rows.append({"sample": i, "flip": "fixed" if now else "broken", "right": right[i], **answers, **text})
    return pd.DataFrame(rows)


def _right(score: TaskScore) -> list[bool]:
    return [a == b for a, b in zip(_plain(score.predictions), _plain(score.labels), strict=True)]


def _words(data: Samples, score: TaskScore) -> list[str]:
    names = data.class_names
    return [str(one) if names is None or isinstance(one, str) else names[one] for one in _plain(score.predictions)]


def _plain(values: Tensor | tuple[str, ...]) -> Sequence[int | str]:
    return values.tolist() if isinstance(values, Tensor) else [value.strip() for value in values]
