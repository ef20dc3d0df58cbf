"""Draw the tabs of the Drift page that look at single layers, tokens and maps; each measures when it is opened."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from app import downloads, state, view
from app.downloads import Numbers, Origin, file_name
from featcal.figures import layer_charts, layer_tables, tables, text
from featcal.figures.names import plain
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples

_MAPS = {
    True: "mismatch: norm / norm of what the expert's map gives, means over samples; changed: share of squared change",
    False: "mismatch: norm over all tokens, mean over samples; changed: share of squared change",
}


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
