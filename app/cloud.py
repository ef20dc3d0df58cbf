"""Draw the parts of the Features page: maps, the true distances, and the picked samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator
from torch import Tensor

from app import hover, maps, picking, samples, state, view
from app.downloads import Numbers, Origin
from app.selection import MOST_PICKED
from featcal.figures import cloud_charts, sample_tables, tables
from featcal.figures.cloud_charts import MapPosition
from featcal.figures.names import plain
from featcal.figures.sample_charts import Dots
from featcal.figures.sample_tables import answer_column as answers_of
from featcal.figures.theme import OTHERS
from featcal.models.adapter import LAST_LAYER
from featcal.samples.sources import Samples
from featcal.session.feature_maps import FeatureMaps, compare_with_expert, nearest_samples, visible_layers
from featcal.session.model_ref import ModelRef
from featcal.session.open_suite import ResultKind
from featcal.session.projection import MOST_POINTS, SEED
from featcal.session.session import Session
from featcal.suite.methods import EXPERT

POLL_SECONDS = 1.0
NEIGHBOURS = 8
"""Number of nearest samples listed for a picked one."""
_SMALL, _SEARCH = "feature-maps", "feature-search"
Job = Future[list[maps.Points]]
_UMAP, _TRUST = ResultKind[Job]("UMAP of clouds"), ResultKind[float]("trust in a map")


@dataclass(frozen=True)
class ComparedFeatures(FeatureMaps):
    """The models on the samples of one task after one layer, as shown on the page."""

    moved: tuple[str, str] | None
    """Two of the models, whose samples are joined by arrows."""
    task: str
    layer: str

    @property
    def data(self) -> Samples:
        return self.session.viewable_samples(self.task, self.on)

    @property
    def others(self) -> dict[str, ModelRef]:
        """Return the models besides the expert."""
        return {name: model for name, model in self.models.items() if name != EXPERT}

    @property
    def layers(self) -> list[str]:
        """Return the layers of the page's map."""
        return self.map_layers(self.layer)

    @property
    def own_key(self) -> Hashable:
        """Return a key that identifies the task's map."""
        return self.key(self.task, len(self.layers))

    @property
    def every_key(self) -> Hashable:
        """Return a key that identifies the small maps of all tasks."""
        return self.key("every task", self.layer)

    def forget_umaps(self) -> None:
        """Allow unfinished UMAPs of a dead process to be computed again."""
        for key in (self.own_key, self.every_key):
            self.session.forget(_UMAP, key)


def layer_slider(session: Session) -> str:
    """Draw the slider of layers and return its value; a part of a block that was chosen elsewhere becomes its block."""
    layers = visible_layers(session)
    chosen = state.selection().layer or LAST_LAYER
    alike = (one for one in layers if chosen == one or chosen.startswith(f"{one} "))
    layer = next(alike, layers[0] if chosen in session.family.adapter.layers() else LAST_LAYER)
    state.control(
        partial(st.select_slider, width=480),
        "layer",
        layer,
        None,
        "Layer",
        layers,
        help="Features after this layer. All layers but the head share one map, so positions can be compared.",
    )
    return layer


def say_which(session: Session, layer: str) -> None:
    """Explain the features of this layer."""
    if layer == LAST_LAYER:
        st.caption("Final features: after the last norm, and the projection where there is one.")
    elif any(layer in behind for behind in session.family.adapter.class_token_layers().values()):
        st.caption(f"State of the class token after {plain(layer)}.")
    else:
        st.caption(f"State after {plain(layer)}, mean over the stage's own tokens without padding.")


def map_section(shown: ComparedFeatures, origin: Origin) -> None:
    """Draw PCA at once, and UMAP when its process is done; points, boxes and lassos pick samples."""
    ids, cloud = shown.cloud(shown.task, shown.layer)
    job: Job = shown.session.get_or_make(_UMAP, shown.own_key, lambda: state.map_worker().submit([cloud]))
    answers = answers_of(shown.data)

    row = st.container(horizontal=True, vertical_alignment="bottom")
    wanted, framed = view.choice("Map", ["UMAP", "PCA"], "map", row), False
    column = _choose_colour(shown, row)
    if len(shown.layers) > 1:
        framed = view.choice("Frame", ["all layers", "this layer"], "frame", row) == "all layers"

    def draw() -> None:
        axes = _axes(job, wanted)
        flat = job.result()[0] if axes == "UMAP" else shown.pca(shown.task, shown.layer)
        points, depth = _layer_points(shown, flat, framed)
        dots = picking.make_dots(shown.session, shown.others, shown.task, shown.on, ids, column=column)
        numbers = Numbers(
            f"map {shown.task} {shown.layer}",
            _coordinates(points, axes, dots, answers),
            f"coordinates of the {axes} map",
            origin,
            kind="features" if axes == "PCA" else "UMAP",
            layer=shown.layer if axes == "PCA" or len(shown.layers) == 1 else None,  # a UMAP is made of all its layers
        )
        _say_which_map(job, axes, shown.forget_umaps)
        picking.scatter(
            cloud_charts.feature_map(points, dots, axes, shown.moved, depth),
            "feature-map",
            f"{axes} map of {len(ids)} samples of {shown.task}: features of {', '.join(points)}, {shown.layer}",
            numbers.name,
            zoom=True,
        )
        _say_how_far(shown, (axes, cloud, flat))
        hover.add_hover_pictures("feature-map", shown.session, shown.task, shown.on)
        _say_how_many(len(ids), len(shown.data))
        if dots.answers and len(set(dots.answers)) > len(OTHERS):
            st.caption(f"{len(set(dots.answers))} colours are hard to tell apart: hover a point for what it is.")
        view.tools(numbers)

    _draw_until_there(job, wanted, draw)


def every_task_section(shown: ComparedFeatures, origin: Origin) -> None:
    """Draw one small map per task, each fitted separately."""
    clouds = {task: shown.cloud(task, shown.layer, alone=True) for task in shown.session.tasks}
    job: Job = shown.session.get_or_make(
        _UMAP, shown.every_key, lambda: state.map_worker().submit([one for _, one in clouds.values()])
    )
    wanted = _wanted_axes()

    def draw() -> None:
        axes = _axes(job, wanted)
        flats = job.result() if axes == "UMAP" else [shown.pca(task, shown.layer, alone=True) for task in clouds]
        points, dots, trust = {}, {}, {}
        for (task, (ids, cloud)), flat in zip(clouds.items(), flats, strict=True):
            points[task] = dict(zip(shown.models, np.split(flat, len(shown.models)), strict=True))
            # The selection belongs to one task: positions in another's samples would be other samples.
            lit = None if task == shown.task else ()
            dots[task] = picking.make_dots(shown.session, shown.others, task, shown.on, ids, picked=lit)
            trust[task] = _trust(shown.session, shown.key(task, shown.layer, axes, "alone"), cloud, flat)
        rows = pd.concat([_coordinates(points[task], axes, dots[task], None).assign(task=task) for task in points])
        units = f"coordinates; every task has a {axes} map of its own"
        kind = "small maps" if axes == "PCA" else "small UMAPs"
        numbers = Numbers(f"maps of all tasks {shown.layer}", rows, units, origin, kind=kind, layer=shown.layer)
        alt = f"Small {axes} maps of every task's features of {', '.join(shown.models)}, {shown.layer}"
        figure = cloud_charts.small_maps(points, dots, shown.task)
        view.picture(figure, _SMALL, alt, numbers.name, on_select=partial(_pick_task, shown.session.tasks))
        if axes != wanted:
            _offer_again(job, shown.forget_umaps, "small-umaps-again")
        trust_text = ", ".join(f"{plain(task)} {one:.3f}" for task, one in trust.items() if not np.isnan(one))
        st.caption(
            f"{axes} 1 across, {axes} 2 up; every map is one of its own. Trustworthiness: {trust_text}. "
            "Click a point to see its task above."
        )
        _say_how_many(max(len(ids) for ids, _ in clouds.values()), max(origin.counts.values()))
        view.tools(numbers)

    _draw_until_there(job, wanted, draw)


def _choose_colour(shown: ComparedFeatures, row: DeltaGenerator) -> pd.Series | None:
    """Draw the choice of colour: models, or any column of the table of samples; None for models. For texts the answer
    comes first."""
    frame = _table(shown)
    right = "answer" if shown.session.is_text else "class"
    columns = {right if name == "right" else name: name for name in sample_tables.colour_columns(frame)}
    names = ["model", *columns]
    if right in names and shown.session.is_text:
        names.insert(0, names.pop(names.index(right)))
    chosen = view.one_of(names, state.selection().colour)
    state.control(row.selectbox, "colour", chosen, names[0], "Colour", names, width=200)
    return None if chosen == "model" else frame[columns[chosen]].rename(chosen)


def _table(shown: ComparedFeatures) -> pd.DataFrame:
    """Return the table of samples of the map's task, as far as it is measured."""
    found = samples.measured_samples(shown.session, shown.others, shown.task, shown.on)
    return sample_tables.sample_table(shown.data, found, *(shown.moved or ()))


def search_section(shown: ComparedFeatures) -> None:
    """Draw a field whose words select the samples that have them."""
    frame = _table(shown)
    words = st.text_input(
        "Search",
        key=_SEARCH,
        placeholder="a class, an answer, a word of a text, fixed, a number",
        icon=":material/search:",
        on_change=_search,
        args=(frame,),
    )
    if words.strip():
        found = len(sample_tables.find_samples(frame, words))
        more = f"; the first {MOST_PICKED} are selected" if found > MOST_PICKED else ""
        st.caption(f"{found} of {len(frame)} samples have it{more}.")


def _search(frame: pd.DataFrame) -> None:
    """Select the samples that match the search; nothing if none matches."""
    samples.pick_samples(sample_tables.find_samples(frame, st.session_state[_SEARCH]))


def neighbour_section(shown: ComparedFeatures, features: Mapping[str, Tensor]) -> None:
    """Show the nearest samples of a single picked one, by the cosine of features in the full space of every model, and
    how many of them it shares with the expert."""
    picked = [one for one in samples.picked_samples(shown.session, shown.on) if one < len(shown.data)]
    if len(picked) != 1 or len(shown.data) < 3:
        return
    (sample,), answers = picked, answers_of(shown.data)
    near = nearest_samples(features, sample, NEIGHBOURS)
    rows = [
        {
            "model": name,
            "nearest": ", ".join(map(str, found)),
            **({} if answers is None else {"same class": sum(answers[one] == answers[sample] for one in found)}),
            "shared": len({*found} & {*near[EXPERT]}),
        }
        for name, found in near.items()
    ]
    st.markdown(f"**Neighbours of sample {sample}**, the {len(near[EXPERT])} nearest by cosine, {plain(shown.layer)}")
    shared = st.column_config.NumberColumn(help="How many of them are among the expert's nearest too.")
    formats = {"shared": shared}
    st.dataframe(
        pd.DataFrame(rows), hide_index=True, column_config=formats, alt=f"Neighbours of sample {sample} in every model"
    )
    together = sorted({sample, *(one for found in near.values() for one in found)})
    st.button("Select all of them", on_click=samples.pick_samples, args=(together,), icon=":material/hub:")


def pick_section(shown: ComparedFeatures) -> None:
    """Draw a list of samples by name, for keyboard users."""
    picked, answers = samples.picked_samples(shown.session, shown.on), answers_of(shown.data)
    known = range(len(shown.data))

    def format_answer(one: int) -> str:
        return f"{one}: {answers[one]}" if answers is not None and one in known else str(one)

    state.control(
        st.multiselect,
        "picked",
        list(picked),
        (),
        "Picked samples",
        sorted({*known, *picked}),
        format_func=format_answer,
        max_selections=MOST_PICKED,
        placeholder="Draw around points of the map, click one, or choose here",
    )
    if len(picked) == MOST_PICKED:
        st.caption(f"At most {MOST_PICKED} samples are picked at once: these are the first.")


def distance_section(features: Mapping[str, Tensor], origin: Origin, layer: str) -> None:
    """Show cosine and distance to the expert in the full space, per model, as means and a histogram."""
    cosines, distances = (
        {n: one for n, one in found.items() if n != EXPERT} for found in compare_with_expert(features)
    )
    for measure, values in (("cosine", cosines), ("L2 distance", distances)):
        view.metrics([(f"{measure}, {name}", f"{one.mean():.3f}", None) for name, one in values.items()])
    what = view.choice("Per sample", ["cosine", "L2 distance"], "distance")
    values, axis = (
        (cosines, "cosine to the expert") if what == "cosine" else (distances, "distance to the expert, unit features")
    )
    means = ", ".join(f"{name} {one.mean():.3f}" for name, one in values.items())
    frames = {
        name: pd.DataFrame({"sample": range(len(one)), "cosine": one, "L2 distance": distances[name]})
        for name, one in cosines.items()
    }
    units = f"cosine, and distance of unit features, to the expert's feature, {layer}"
    view.chart(
        cloud_charts.histograms(values, axis),
        "distances",
        f"Histogram of the {axis}, {layer}; means: {means}",
        numbers=Numbers(
            f"distances {next(iter(origin.counts))} {layer}",
            tables.stack_models(frames),
            units,
            origin,
            kind="features",
            layer=layer,
        ),
    )


def _pick_task(tasks: Sequence[str], key: str) -> None:
    points = [one for one in st.session_state[key].selection.points if one.get("customdata")]
    if points:
        state.look_at(task=tasks[int(points[0]["customdata"][0])], picked=picking.ids_of(points[:1]), picked_of=None)


def _draw_until_there(job: Job, wanted: str, draw: Callable[[], None]) -> None:
    """Draw now, and check every second while a UMAP is being computed; rerun the whole page when it is ready, or when a
    sample was picked on its substitute."""
    # A PCA that is wanted waits for nothing: to draw it anew would end the lasso that somebody is drawing on it.
    waiting, looked_at = wanted == "UMAP" and not job.done(), state.selection()

    def look() -> None:
        if waiting and (job.done() or state.selection() != looked_at):
            st.rerun()
        draw()

    # A fragment redraws itself alone; only the whole page can draw what follows from a finished map.
    st.fragment(look, run_every=POLL_SECONDS)() if waiting else draw()


def _wanted_axes() -> str:
    """Return the chosen kind of map."""
    return view.one_of(["UMAP", "PCA"], state.selection().map)


def _axes(job: Job, wanted: str) -> str:
    """Return the available kind of map: UMAP if it is wanted and ready and did not fail."""
    return "UMAP" if wanted == "UMAP" and job.done() and job.exception() is None else "PCA"


def _layer_points(
    shown: ComparedFeatures, flat: maps.Points, framed: bool
) -> tuple[dict[str, maps.Points], MapPosition | None]:
    """Return the chosen layer's points by model, and their indices in the map of all layers, if it is one.

    Args:
        framed: whether the frame is that of all layers.
    """
    layers = shown.layers
    whole = flat.reshape(len(layers), len(shown.models), -1, 2)
    points = dict(zip(shown.models, whole[layers.index(shown.layer)], strict=True))
    if len(layers) == 1:
        return points, None
    low, high = flat.min(0), flat.max(0)
    edges = np.stack([low, high], axis=1) + 0.04 * (high - low)[:, None] * np.array([-1, 1])
    (x, y), means = edges.tolist(), whole.mean(2)
    trails = {name: means[:, place] for place, name in enumerate(shown.models)}
    return points, MapPosition(layers, shown.layer, trails, (tuple(x), tuple(y)) if framed else None)


def _coordinates(points: Mapping[str, maps.Points], axes: str, dots: Dots, answers: list[str] | None) -> pd.DataFrame:
    """Return one row per model and sample."""
    column = {"answer": [answers[i] for i in dots.ids]} if answers else {}
    return tables.stack_models(
        {
            model: pd.DataFrame({"sample": list(dots.ids), f"{axes} 1": flat[:, 0], f"{axes} 2": flat[:, 1], **column})
            for model, flat in points.items()
        }
    )


def _say_which_map(job: Job, axes: str, forget: Callable[[], None]) -> None:
    """Explain which map is shown, and why it is not the other one, in one line except for a failure, so that nothing
    moves when a UMAP replaces the PCA.

    Args:
        forget: allows a failed UMAP to be computed again.
    """
    if axes == _wanted_axes():
        st.caption(f"This is the {axes}.")
    elif job.done():
        st.warning("UMAP failed on these features; this is PCA.", icon=":material/warning:")
        _offer_again(job, forget, "umap-again")
    else:
        st.caption("Showing PCA while UMAP is computed (about 10 s the first time).")


def _offer_again(job: Job, forget: Callable[[], None], key: str) -> None:
    """Draw a button that computes a failed UMAP again."""
    if job.done() and job.exception() is not None:
        st.button("Compute the UMAP again", key, on_click=forget, icon=":material/refresh:")


def _say_how_far(shown: ComparedFeatures, made: tuple[str, maps.Points, maps.Points]) -> None:
    """Show the trustworthiness of the map.

    Args:
        made: axes, features and map of all its layers.
    """
    axes, cloud, flat = made
    layers = shown.layers
    place = layers.index(shown.layer)
    parts = (np.split(one, len(layers))[place] for one in (cloud, flat))
    found = _trust(shown.session, shown.key(shown.task, shown.layer, axes), *parts)
    if not np.isnan(found):
        of = "this map" if len(layers) == 1 else f"this layer's part of the {axes} map"
        st.caption(f"Trustworthiness of {of}: {found:.3f} ({maps.TRUST_NEIGHBOURS} neighbours; 1 is perfect).")


def _trust(session: Session, key: Hashable, cloud: maps.Points, flat: maps.Points) -> float:
    return session.get_or_make(_TRUST, key, lambda: maps.trust(cloud, flat))


def _say_how_many(drawn: int, count: int) -> None:
    if drawn < count:
        st.caption(
            f"{drawn} of {count} samples are on the map, drawn with seed {SEED}: "
            f"more than {MOST_POINTS} points would hide each other."
        )
