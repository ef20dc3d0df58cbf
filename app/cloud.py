"""The parts of the Features page: the map, the true distances beside it, what a selected point is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from functools import partial
from textwrap import shorten, wrap

import numpy as np
import pandas as pd
import streamlit as st
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from app import maps, state, view
from app.downloads import Numbers, Origin
from featcal.figures import charts, tables
from featcal.figures.names import label, plain
from featcal.figures.theme import OTHERS
from featcal.model_ids import ModelId
from featcal.session import Session
from featcal.tasks.sources import Samples
from featcal.views import View

POLL_SECONDS = 1.0
_MAP, _SELECTED = "feature-map", "selected samples"
Job = Future[maps.Map]


def features_of(
    session: Session, models: Mapping[str, ModelId], task: str, on: View, pooled: bool
) -> dict[str, Tensor]:
    """Features of the expert and of `models` on one task: final ones, or states pooled over the input's tokens."""
    if pooled:
        return {name: session.pooled(model, task, on) for name, model in {"expert": "expert", **models}.items()}
    found = {name: session.features(model, on).tasks[task] for name, model in models.items()}
    expert = next(iter(found.values())).expert_features
    return {"expert": expert, **{name: one.model_features for name, one in found.items()}}


def map_section(
    session: Session,
    key: Hashable,
    features: Mapping[str, Tensor],
    pair: tuple[str, str] | None,
    data: Samples,
    origin: Origin,
) -> list[int]:
    """PCA at once, UMAP when its process is done; returns the ids of selected samples.

    Args:
        key: tells these features from others of the session.
        pair: models whose samples are joined by arrows.
    """
    (task,) = origin.counts
    cloud = tables.pooled(features)
    job: Job = session.once("map", key, lambda: state.map_worker().submit(cloud))
    answers = answers_of(data)

    def draw() -> list[int]:
        ready = job.done()
        if ready and waiting:
            st.rerun()
        left, right = st.columns(2)
        kind = view.choice("Map", ["UMAP", "PCA"], "map", left)
        by_answer = False
        if answers is not None:
            of_answers = ("answer", "model") if session.is_text else ("model", "class")
            by_answer = view.choice("Colour", of_answers, "colour", right) != "model"
        as_umap = kind == "UMAP" and ready and job.exception() is None
        flat = job.result().points if as_umap else maps.pca_map(cloud)
        points = dict(zip(features, np.split(flat, len(features)), strict=True))
        axes = "UMAP" if as_umap else "PCA"
        numbers = Numbers(f"map {task}", _coordinates(points, axes, answers), f"coordinates of the {axes} map", origin)
        st.plotly_chart(
            charts.feature_map(
                points,
                _hover(data),
                pair,
                axes,
                answers if by_answer else None,
                selected_samples(origin),
            ),
            key=_MAP,
            on_select=partial(_select, origin),
            selection_mode="points",
            config={**view.plotly(numbers.name), "scrollZoom": True, "modeBarButtons": [["toImage", "resetScale2d"]]},
            alt=f"{axes} map of {len(data)} samples' features of {', '.join(points)} on task {task}",
        )
        _say_how_far(job, as_umap, kind == "UMAP")
        if by_answer and answers is not None and len(set(answers)) > len(OTHERS):
            st.caption(f"{len(set(answers))} colours are hard to tell apart: hover a point for its class.")
        view.fold(numbers)
        return selected_samples(origin)

    waiting = not job.done()
    return st.fragment(draw, run_every=POLL_SECONDS)() if waiting else draw()


def selected_samples(origin: Origin) -> list[int]:
    """The ids of the samples that were last clicked on this map; none on another task's or with other samples."""
    drawn_for, ids = st.session_state.get(_SELECTED, (None, []))
    return ids if drawn_for == _drawn_for(origin) else []


def _drawn_for(origin: Origin) -> tuple[Hashable, ...]:
    """Samples are the same ones whichever models are shown and however they are coloured."""
    return origin.suite, origin.split, *origin.counts.items()


def _select(origin: Origin) -> None:
    """Keep what was clicked: a map that is drawn anew has forgotten its own selection."""
    points = st.session_state[_MAP].selection.points
    ids = sorted({int(point["customdata"]) for point in points if "customdata" in point})
    if ids:
        st.session_state[_SELECTED] = (_drawn_for(origin), ids)


def _coordinates(points: Mapping[str, maps.Points], axes: str, answers: list[str] | None) -> pd.DataFrame:
    """One row per model and sample."""
    frames = []
    for model, flat in points.items():
        columns = {"sample": range(len(flat)), f"{axes} 1": flat[:, 0], f"{axes} 2": flat[:, 1]}
        frames.append(pd.DataFrame({"model": model, **columns, **({"answer": answers} if answers else {})}))
    return tables.stacked(frames)


def distance_section(features: Mapping[str, Tensor], origin: Origin) -> None:
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
    means = ", ".join(f"{name} {one.mean():.3f}" for name, one in values.items())
    frames = [
        pd.DataFrame({"model": name, "sample": range(len(one)), "cosine": one, "L2 distance": distances[name]})
        for name, one in cosines.items()
    ]
    units = "cosine, and distance of unit features, to the expert's feature"
    view.chart(
        charts.histograms(values, axis),
        "distances",
        f"Histogram of the {axis}; means: {means}",
        numbers=Numbers(f"distances {next(iter(origin.counts))}", tables.stacked(frames), units, origin),
    )


def sample_section(data: Samples, selected: list[int]) -> None:
    """Pictures or texts of the selected points; a hint where nothing is selected."""
    if data.images is None and data.texts is None:
        st.caption("This suite's samples are tensors: there is nothing to show of them.")
        return
    if not selected:
        st.caption(f"Click a point of the map to see its {'picture' if data.images is not None else 'text'}.")
        return
    st.button("Clear the selection", on_click=lambda: st.session_state.pop(_SELECTED, None), icon=":material/close:")
    shown = selected[:6]
    answers = answers_of(data) or ["no label"] * len(data)
    if data.texts is not None:
        for i in shown:
            st.caption(f"sample {i}, answer: {plain(answers[i])}")
            st.text(data.texts[i])
        return
    assert data.images is not None
    st.image(
        [data.images[i] for i in shown],
        caption=[f"sample {i}: {plain(answers[i])}" for i in shown],
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
        return [label(answer) for answer in answers]
    short = [shorten(one, 160, placeholder=" …") for one in data.texts]
    lines = ["<br>".join(label(line) for line in wrap(one, 60)) for one in short]
    return [f"{text}<br>answer: <b>{label(answer)}</b>" for text, answer in zip(lines, answers, strict=True)]


def _say_how_far(job: Job, as_umap: bool, wanted: bool) -> None:
    if not job.done():
        hint = "UMAP is being prepared in the background (its first run compiles for some seconds)"
        st.caption(f"{hint}; this is PCA until then." if wanted else f"{hint}.")
    elif job.exception() is not None:
        st.warning("UMAP failed on these features; this is PCA.", icon=":material/warning:")
    else:
        trust = job.result().trust if as_umap else job.result().pca_trust
        st.caption(f"Trustworthiness of this map: {trust:.3f} ({maps.TRUST_NEIGHBOURS} neighbours; 1 is perfect).")
