"""What the Suite page lists: models, tasks and example pictures or texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from app import state
from app.workspace import Workspace
from featcal.errors import FeatcalError
from featcal.mergers.schema import MergeRecipe
from featcal.suite import SPLITS, Suite, Task
from featcal.tasks.sources import Samples

EXAMPLES_PER_TASK = 6
MOST_ANSWERS = 8
WIDTHS = {"task": 110, "text": 640, "answer": 120}


def models(suite: Suite) -> pd.DataFrame:
    """Role and place of every model."""
    merged = suite.merged
    if isinstance(merged, MergeRecipe):
        given = merged.model_dump(exclude_none=True)
        merged = f"merged here: {', '.join([given.pop('method'), *(f'{name} {given[name]}' for name in given)])}"
    rows = [("base", suite.base), ("merged", merged)]
    rows += [(f"expert, {task}", spec.expert) for task, spec in suite.tasks.items()]
    return pd.DataFrame(rows, columns=["role", "where"])


def tasks(ws: Workspace, n: int) -> tuple[pd.DataFrame, str]:
    """Per task its answers, prompts, splits and the expert's score on its own samples; and why a score is missing."""
    try:
        with state.progress() as report:
            scores, missing = ws.scores("expert", ws.split, n, report).tasks, ""
    except FeatcalError as error:
        scores, missing = {}, str(error)
    samples = ws.samples(ws.split, n)
    rows = []
    for task, spec in ws.family.suite.tasks.items():
        row: dict[str, Any] = {"task": task}
        if scores:
            row["expert, %"] = 100 * scores[task].value
        row["splits"] = ", ".join(split for split in SPLITS if spec.source(split))
        rows.append(row | (_text(spec, samples[task]) if ws.is_text else _pictures(spec, samples[task])))
    return pd.DataFrame(rows), missing


def _pictures(spec: Task, samples: Samples) -> dict[str, Any]:
    names = samples.class_names or ()
    listed = ", ".join(names) or "–"
    return {"classes": len(names) or None, "class names": listed, "prompts": " | ".join(spec.templates)}


def _text(spec: Task, samples: Samples) -> dict[str, Any]:
    source = spec.calibration or spec.validation or spec.test
    answers = sorted(set(samples.targets or ()))
    listed = ", ".join(answers[:MOST_ANSWERS]) + (", …" if len(answers) > MOST_ANSWERS else "")
    return {"metric": spec.metric, "answers": listed or "–", "input": (source and source.input) or "token ids"}


def examples(ws: Workspace) -> None:
    """Some calibration samples of every task: pictures with their classes, or texts with their answers."""
    samples = ws.samples("calibration", EXAMPLES_PER_TASK)
    if any(one.texts is not None for one in samples.values()):
        st.subheader("Texts")
        rows = [
            {"task": task, "text": text, "answer": answer}
            for task, one in samples.items()
            for text, answer in zip(one.texts or (), one.targets or [None] * len(one), strict=False)
        ]
        wide = {name: st.column_config.TextColumn(width=size) for name, size in WIDTHS.items()}
        st.dataframe(pd.DataFrame(rows), hide_index=True, column_config=wide, height=420, alt="Texts and their answers")
    elif any(one.images is not None for one in samples.values()):
        _show_pictures(samples)
    else:
        st.caption("The samples of this suite are tensors: there is nothing to show of them.")


def _show_pictures(samples: Mapping[str, Samples]) -> None:
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
