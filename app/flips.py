"""Samples that calibration turned from wrong to right, or from right to wrong: what they are and what was said."""

from __future__ import annotations

from collections.abc import Sequence

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


def section(session: Session, merged: Scores, calibrated: Scores, task: str, origin: Origin) -> None:
    """How many samples flipped in every task, and those of one task as a table, with pictures where there are any."""
    st.subheader("What did calibration turn?")
    counted = counts(merged, calibrated)
    fixed, broken = int(counted["fixed"].sum()), int(counted["broken"].sum())
    st.markdown(f"**{fixed}** wrong answers of the merged model became right, **{broken}** right ones became wrong.")
    data = session.seen(task, View(None, merged.split))
    frame = table(data, merged.tasks[task], calibrated.tasks[task])
    st.dataframe(counted, hide_index=True, width=360, alt="Samples that calibration fixed and broke, per task")
    if frame.empty:
        st.info(f"Nothing flipped in {plain(task)}.", icon=":material/info:")
        return
    st.caption(f"The samples of {plain(task)} that flipped (choose a task in the sidebar):")
    view.table(Numbers(f"flips {task}", frame, "right, merged, calibrated: answers", origin.of_task(task)))
    if data.images is not None:
        shown = frame.head(MOST_PICTURES)
        said = [f"{row.flip}: {row.merged} → {row.calibrated}" for row in shown.itertuples()]
        st.image([data.images[i] for i in shown["sample"]], caption=[plain(one) for one in said], width=96, alt=said)


def counts(merged: Scores, calibrated: Scores) -> pd.DataFrame:
    """One row per task: fixed, broken."""
    rows = []
    for task, before in merged.tasks.items():
        was, now = _right(before), _right(calibrated.tasks[task])
        pairs = list(zip(was, now, strict=True))
        rows.append({"task": task, "fixed": pairs.count((False, True)), "broken": pairs.count((True, False))})
    return pd.DataFrame(rows)


def table(data: Samples, merged: TaskScore, calibrated: TaskScore) -> pd.DataFrame:
    """One row per flipped sample: its number, right answer, both models' answers, text where there is one."""
    right = answers_of(data) or []
    said = {"merged": _words(data, merged), "calibrated": _words(data, calibrated)}
    rows = []
    for i, (was, now) in enumerate(zip(_right(merged), _right(calibrated), strict=True)):
        if was != now:
            answers = {model: words[i] for model, words in said.items()}
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
