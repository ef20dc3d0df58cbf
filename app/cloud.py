"""The parts of the Features page: the map, the true distances beside it, the picture of a selected point."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np
import streamlit as st
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from app import charts, maps, state, tables, view
from app.workspace import ModelId, Workspace
from featcal.tasks.sources import Samples

POLL_SECONDS = 1.0
Job = Future[maps.Map]


def map_section(
    ws: Workspace, models: Mapping[str, ModelId], task: str, n: int, features: Mapping[str, Tensor], data: Samples
) -> list[int]:
    """PCA at once, UMAP when its process is done; returns the ids of selected samples."""
    cloud = tables.pooled(features)
    job: Job = ws.once("map", (tuple(models.items()), task, n), lambda: state.map_worker().submit(cloud))

    def draw() -> list[int]:
        ready = job.done()
        if ready and waiting:
            st.rerun()
        kind = view.choice("Map", ["UMAP", "PCA"], "map")
        as_umap = kind == "UMAP" and ready and job.exception() is None
        flat = job.result().points if as_umap else maps.pca_map(cloud)
        points = dict(zip(features, np.split(flat, len(features)), strict=True))
        event = st.plotly_chart(
            charts.feature_map(points, _names(data), "calibrated" in points, "UMAP" if as_umap else "PCA"),
            key="feature-map",
            on_select="rerun",
            selection_mode="points",
            config={**view.PLOTLY, "scrollZoom": True, "modeBarButtons": [["toImage", "resetScale2d"]]},
            alt=f"{'UMAP' if as_umap else 'PCA'} map of the features of {', '.join(points)} on task {task}",
        )
        _say_how_far(job, as_umap, kind == "UMAP")
        return sorted({int(point["customdata"]) for point in event.selection.points if "customdata" in point})

    waiting = not job.done()
    return st.fragment(draw, run_every=POLL_SECONDS)() if waiting else draw()


def distance_section(features: Mapping[str, Tensor]) -> None:
    """Cosine and distance to the expert in the full space, per model: means and a histogram."""
    expert = normalize(features["expert"].double(), dim=1)
    others = {name: normalize(own.double(), dim=1) for name, own in features.items() if name != "expert"}
    cosines = {name: cosine_similarity(own, expert).numpy() for name, own in others.items()}
    distances = {name: (own - expert).norm(dim=1).numpy() for name, own in others.items()}
    for measure, values in (("cosine", cosines), ("L2 distance", distances)):
        view.metrics([(f"{measure}, {name}", f"{one.mean():.3f}", None) for name, one in values.items()])
    what = view.choice("Per sample", ["cosine", "L2 distance"], "distance")
    values, axis = (
        (cosines, "cosine to the expert") if what == "cosine" else (distances, "distance to the expert, unit features")
    )
    view.chart(charts.histograms(values, axis), "distances", f"Histogram of the {axis}, per model")


def picture_section(data: Samples, selected: list[int]) -> None:
    """Pictures of the selected points; a hint where nothing is selected."""
    if data.images is None:
        st.caption("This suite's samples are tensors: there are no pictures to show.")
        return
    if not selected:
        st.caption("Click a point of the map to see its picture.")
        return
    names = _names(data)
    st.image(
        [data.images[i] for i in selected[:6]],
        caption=[f"sample {i}: {names[i]}" for i in selected[:6]],
        width=110,
        alt=[f"Picture of sample {i}, {names[i]}" for i in selected[:6]],
    )


def _names(data: Samples) -> list[str]:
    """The class of every sample, or nothing to say."""
    if data.labels is None:
        return ["no label"] * len(data)
    if data.class_names is None:
        return [f"class {int(label)}" for label in data.labels]
    return [data.class_names[int(label)] for label in data.labels]


def _say_how_far(job: Job, as_umap: bool, wanted: bool) -> None:
    if not job.done():
        hint = "UMAP is being prepared in the background (its first run compiles for some seconds)"
        st.caption(f"{hint}; this is PCA until then." if wanted else f"{hint}.")
    elif job.exception() is not None:
        st.warning("UMAP failed on these features; this is PCA.", icon=":material/warning:")
    else:
        trust = job.result().trust if as_umap else job.result().pca_trust
        st.caption(f"Trustworthiness of this map: {trust:.3f} ({maps.TRUST_NEIGHBOURS} neighbours; 1 is perfect).")
