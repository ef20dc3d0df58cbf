"""Draw the tabs of the Drift page that look at single layers, tokens and maps; each measures when it is opened."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from app import downloads, ledger_view, state, view
from app.downloads import Numbers, Origin, file_name
from featcal.drift.depth import Depth
from featcal.figures import layer_charts, layer_tables, tables, text
from featcal.figures.names import plain
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import NoScores

_DEPTH = "agreement, expert_agreement, turned: share of samples"
_COURSE = "probability: softmax over all scores; stays: the decision is the final one from here on"
_MAPS = {
    True: "mismatch: norm / norm of what the expert's map gives, means over samples; changed: share of squared change",
    False: "mismatch: norm over all tokens, mean over samples; changed: share of squared change",
}


def depth(
    session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples, over: str, task: str, layer: str
) -> None:
    """Draw decisions behind every block over `over` (a task or the mean), and of one sample of `task`."""
    st.caption("A head is made for the last layer: behind earlier blocks it shows where decisions turn, and no more.")
    tasks = session.tasks if over == tables.ALL_TASKS else [over]
    try:
        with state.progress() as report:
            found = {
                name: {one: session.measure.depth(model, one, on, report) for one in dict.fromkeys([*tasks, task])}
                for name, model in models.items()
            }
    except NoScores:
        ledger_view.say_needs_of_scores(session)
        return
    frames = {name: layer_tables.agreement({one: own[one] for one in tasks}) for name, own in found.items()}
    said = tables.describe_ranges({name: 100 * one.set_index("layer")["agreement"] for name, one in frames.items()}, 0)
    view.chart(
        layer_charts.agreement(frames, layer),
        "depth",
        f"Decisions behind every block that are the expert's final one, %, on {over}: {said}",
        Numbers(
            "decisions through depth",
            tables.stack_models(frames),
            _DEPTH,
            _origin(session, on, models, over),
            kind="depth",
        ),
        text.DEPTH,
    )
    of_task = {name: own[task] for name, own in found.items()}
    sample = int(_choose_sample(task, of_task))
    rows = layer_tables.course(of_task, sample)
    stays = rows[rows["stays"] & (rows["rank"] == 1)].groupby("model", sort=False).first()
    said = "; ".join(f"{model}: {one['answer']} from {one['layer']} on" for model, one in stays.iterrows())
    view.chart(
        layer_charts.course(rows),
        "course",
        f"First answer behind every block for sample {sample} of {task}: {said}",
        Numbers(
            f"course of sample {sample}",
            rows,
            _COURSE,
            _origin(session, on, models, task),
            kind="course",
            sample=sample,
        ),
        text.DEPTH,
    )


def _choose_sample(task: str, found: Mapping[str, Depth]) -> str:
    """Let a sample be chosen by what expert and models decide in the end; by default the first that they part on."""
    first = next(iter(found.values()))
    ends = {"expert": first.beside or first, **found}
    said = {name: [one.words[answer] for answer in one.answers[-1, :, 0].tolist()] for name, one in ends.items()}
    numbers = [str(i) for i in range(len(said["expert"]))]
    parted = next((i for i, words in enumerate(zip(*said.values(), strict=True)) if len({*words}) > 1), 0)
    chosen = view.one_of(numbers, state.selection().sample, parted)

    def words(number: str) -> str:
        return f"{number}: {', '.join(f'{name} {one[int(number)]}' for name, one in said.items())}"

    label = f"Sample of {plain(task)}, and what is decided in the end"
    state.control(st.selectbox, "sample", chosen, None, label, numbers, format_func=words)
    return chosen


def block_maps(
    session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples, over: str, layer: str, relative: bool
) -> None:
    """Draw the mismatch of every linear map of a block over `over` (a task or the mean), and what calibration changed.

    Args:
        relative: to the norm of what the expert's own map gives.
    """
    with state.progress() as report:
        found = {name: session.measure.maps(model, on, report) for name, model in models.items()}
    frames = {name: layer_tables.maps(one, over, layer, relative) for name, one in found.items()}
    if all(frame.empty for frame in frames.values()):
        st.caption(f"There are no linear maps of a block in {plain(layer)}: choose a block above.")
        return
    origin = _origin(session, on, models, over)
    st.caption(f"{plain(layer)}, map by map, on {plain(over)}")
    changed = {name: frame for name, frame in frames.items() if frame["changed"].notna().any()}
    left, right = st.columns(2)
    with left:
        axis = "mismatch / norm of the expert's output" if relative else "mismatch"
        said = tables.describe_ranges({name: one.set_index("map")["mismatch"] for name, one in frames.items()})
        figure = layer_charts.maps(frames, "mismatch", axis, ".3f" if relative else ".2f")
        view.picture(figure, "maps", f"Mismatch of every linear map of {layer}: {said}", file_name("maps", origin))
    with right:
        if changed:
            said = tables.describe_ranges({name: one.set_index("map")["changed"] for name, one in changed.items()})
            figure = layer_charts.maps(changed, "changed", "share of what calibration changed", ".1%")
            alt = f"Share of every linear map of {layer} in what calibration changed: {said}"
            view.picture(figure, "changed", alt, file_name("changed", origin))
        else:
            st.caption("What calibration changed stands here when one of the two models is calibrated.")
    rows = tables.stack_models(frames)
    view.tools(Numbers(f"maps of {layer}", rows, _MAPS[relative], origin, kind="maps"), text.MAPS)


def _origin(session: Session, on: EvaluationSamples, models: Mapping[str, ModelRef], over: str) -> Origin:
    origin = downloads.sample_origin(session, on, models)
    return origin if over == tables.ALL_TASKS else origin.with_task(over)
