"""The parts of the Features page: the map, the true distances beside it, what a selected point is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from html import escape
from textwrap import shorten, wrap

import numpy as np
import streamlit as st
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from app import charts, maps, state, tables, view
from app.workspace import ModelId, Workspace
from featcal.tasks.sources import Samples

POLL_SECONDS = 1.0
Job = Future[maps.Map]


def features_of(ws: Workspace, models: Mapping[str, ModelId], task: str, n: int, pooled: bool) -> dict[str, Tensor]:
    """Features of the expert and of `models` on one task: final ones, or states pooled over the input's tokens."""
    if pooled:
        return {name: ws.pooled(model, task, n) for name, model in {"expert": "expert", **models}.items()}
    found = {name: ws.features(model, n).tasks[task] for name, model in models.items()}
    return {"expert": found["merged"].expert_features, **{name: one.model_features for name, one in found.items()}}


def map_section(ws: Workspace, key: Hashable, task: str, features: Mapping[str, Tensor], data: Samples) -> list[int]:
    """PCA at once, UMAP when its process is done; returns the ids of selected samples.

    Args:
        key: tells these features from others of the workspace.
    """
    cloud = tables.pooled(features)
    job: Job = ws.once("map", key, lambda: state.map_worker().submit(cloud))
    answers = answers_of(data)

    def draw() -> list[int]:
        ready = job.done()
        if ready and waiting:
            st.rerun()
        left, right = st.columns(2)
        kind = view.choice("Map", ["UMAP", "PCA"], "map", left)
        by_answer = False
        if answers is not None:
            of_answers = ("answer", "model") if ws.is_text else ("model", "class")
            by_answer = view.choice("Colour", of_answers, "colour", right) != "model"
        as_umap = kind == "UMAP" and ready and job.exception() is None
        flat = job.result().points if as_umap else maps.pca_map(cloud)
        points = dict(zip(features, np.split(flat, len(features)), strict=True))
        event = st.plotly_chart(
            charts.feature_map(
                points,
                _hover(data),
                "calibrated" in points,
                "UMAP" if as_umap else "PCA",
                answers if by_answer else None,
            ),
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


def sample_section(data: Samples, selected: list[int]) -> None:
    """Pictures or texts of the selected points; a hint where nothing is selected."""
    if data.images is None and data.texts is None:
        st.caption("This suite's samples are tensors: there is nothing to show of them.")
        return
    if not selected:
        st.caption(f"Click a point of the map to see its {'picture' if data.images is not None else 'text'}.")
        return
    shown = selected[:6]
    answers = answers_of(data) or ["no label"] * len(data)
    if data.texts is not None:
        for i in shown:
            st.caption(f"sample {i}, answer: {answers[i]}")
            st.text(data.texts[i])
        return
    assert data.images is not None
    st.image(
        [data.images[i] for i in shown],
        caption=[f"sample {i}: {answers[i]}" for i in shown],
        width=110,
        alt=[f"Picture of sample {i}, {answers[i]}" for i in shown],
    )


def answers_of(data: Samples) -> list[str] | None:
    """The right answer or class of every sample; None where the source has none."""
    if data.targets is not None:
        return list(data.targets)
    if data.labels is None:
        return None
    if data.class_names is None:
        return [f"class {int(label)}" for label in data.labels]
    return [data.class_names[int(label)] for label in data.labels]


def _hover(data: Samples) -> list[str]:
    """What a point is: its class, or its text in lines and its answer."""
    answers = answers_of(data) or ["no label"] * len(data)
    if data.texts is None:
        return answers
    short = [shorten(one, 160, placeholder=" …") for one in data.texts]
    lines = ["<br>".join(escape(line) for line in wrap(one, 60)) for one in short]
    return [f"{text}<br>answer: <b>{escape(answer)}</b>" for text, answer in zip(lines, answers, strict=True)]


def _say_how_far(job: Job, as_umap: bool, wanted: bool) -> None:
    if not job.done():
        hint = "UMAP is being prepared in the background (its first run compiles for some seconds)"
        st.caption(f"{hint}; this is PCA until then." if wanted else f"{hint}.")
    elif job.exception() is not None:
        st.warning("UMAP failed on these features; this is PCA.", icon=":material/warning:")
    else:
        trust = job.result().trust if as_umap else job.result().pca_trust
        st.caption(f"Trustworthiness of this map: {trust:.3f} ({maps.TRUST_NEIGHBOURS} neighbours; 1 is perfect).")
