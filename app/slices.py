"""Select samples of a task by their class, by which model is right, or by a low margin, wherever samples are shown."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import streamlit as st

from app import samples, state, view
from featcal.figures import sample_slices
from featcal.figures.names import plain
from featcal.figures.sample_slices import Mask
from featcal.figures.sample_tables import answer_column
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples

ANY = "any"


def draw_slices(session: Session, models: Mapping[str, ModelRef], task: str, on: EvaluationSamples) -> None:
    """Draw a button that opens a choice of a part of a task's samples and, with another button, selects it.

    Args:
        models: those of the page, A first.
    """
    data, found = session.viewable_samples(task, on), samples.measured_samples(session, models, task, on)
    answers, last = answer_column(data), [*models][-1]
    margin = found[last].margin
    by_class = {} if answers is None else sample_slices.mask_classes(answers)
    by_answers = sample_slices.mask_answers(found, list(models))
    by_margin = {} if margin is None else sample_slices.mask_margins(margin)
    with st.popover("Select by class, answers or margin", icon=":material/filter_alt:"):
        state.control(st.selectbox, "task", task, session.tasks[0], "Task", session.tasks, variant="slice")
        mask = np.ones(len(data), bool)
        mask &= _choose("slice_class", "Class", by_class)
        mask &= _choose("slice_answers", "Answers", by_answers)
        mask &= _choose("slice_margin", f"Margin of {plain(last)}", by_margin)
        if not samples.are_measured(session, models, on):
            st.caption("Answers and margins are known after the models have run on these samples.")
            if st.button("Measure answers and margins", icon=":material/straighten:"):
                samples.measure_samples(session, models, on)
                st.rerun()
        ids = np.flatnonzero(mask).tolist()
        st.caption(f"{len(ids)} of {len(data)} samples of {plain(task)}")
        st.button(
            f"Select these {len(ids)}", on_click=samples.pick_samples, args=(ids,), disabled=not ids, type="primary"
        )


def _choose(field: str, label: str, masks: Mapping[str, Mask]) -> Mask | bool:
    """Draw the choice of one part, or all; nothing if there is no choice."""
    if not masks:
        return True
    words = [ANY, *masks]
    chosen = view.one_of(words, getattr(state.selection(), field))
    state.control(st.selectbox, field, chosen, ANY, label, words)
    return True if chosen == ANY else masks[chosen]
