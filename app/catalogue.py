"""What the Suite page lists: models, tasks and example pictures."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from app import state
from app.workspace import Workspace
from featcal.suite import SPLITS, MergeRecipe, Suite

PICTURES_PER_TASK = 6


def models(suite: Suite) -> pd.DataFrame:
    """Role and place of every model."""
    merged = suite.merged
    if isinstance(merged, MergeRecipe):
        scale = "" if merged.scale is None else f", scale {merged.scale:g}"
        merged = f"merged here: {merged.method}{scale}"
    rows = [("base", suite.base), ("merged", merged)]
    rows += [(f"expert, {task}", spec.expert) for task, spec in suite.tasks.items()]
    return pd.DataFrame(rows, columns=["role", "where"])


def tasks(ws: Workspace, n: int) -> list[dict[str, Any]]:
    """Per task its classes, templates, splits and the expert's accuracy on its own samples."""
    scores, _ = state.quick_scores(ws, {"expert": "expert"}, n)
    samples = ws.samples(ws.split, n)
    rows = []
    for task, spec in ws.family.suite.tasks.items():
        names = samples[task].class_names or ()
        row: dict[str, Any] = {"task": task}
        if scores:
            row["expert, %"] = 100 * scores["expert"].tasks[task].value
        row |= {
            "classes": len(names) or None,
            "class names": ", ".join(names) or "–",
            "splits": ", ".join(split for split in SPLITS if spec.source(split)),
            "prompts": " | ".join(spec.templates),
        }
        rows.append(row)
    return rows


def pictures(ws: Workspace) -> None:
    """A row of calibration pictures for every task, with their classes."""
    samples = ws.samples("calibration", PICTURES_PER_TASK)
    if all(one.images is None for one in samples.values()):
        st.caption("The samples of this suite are tensors: there are no pictures to show.")
        return
    st.subheader("Pictures")
    for left, right in zip(*[iter([*samples, *([None] * (len(samples) % 2))])] * 2, strict=True):
        for column, task in zip(st.columns(2), (left, right), strict=True):
            one = samples.get(task or "")
            if one is None or one.images is None:
                continue
            names = [one.class_names[int(i)] for i in one.labels] if one.class_names and one.labels is not None else []
            with column:
                st.caption(f"**{task}**")
                st.image(list(one.images), caption=names or None, width=72, alt=[f"{task}: {n}" for n in names] or None)
