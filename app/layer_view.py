"""Draw the tabs of the Drift page about single layers, tokens and maps; each measures when it is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd
import streamlit as st
import torch
from PIL import Image
from torch import Tensor

from app import downloads, ledger_view, samples, state, view
from app.downloads import Numbers, download_name
from featcal.drift.depth import DepthDecisions
from featcal.drift.tokens import CLASS_TOKEN, FEATURE, PICTURE
from featcal.figures import layer_charts, layer_tables, tables, token_charts
from featcal.figures.names import cut_text, plain
from featcal.figures.report.samples import data_address
from featcal.figures.sample_tables import answer_column
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
_TOKENS = (
    "drift, expert norm: norms of the token's state; relative drift: their ratio; share: of the layer's squared drift"
)
_PARTS = {
    "encoder": "Encoder: the text that it reads",
    "decoder": "Decoder: start token and answer, as it reads them",
    "prompt": "Prompt",
}
"""Headings above the parts of an encoder-decoder's states, and above prompts."""
_SIDE = 256
"""Largest number of pixels of the longer side of a picture under the patches."""
_DARKEST = 150
"""The darkest grey of that picture, of 255."""


def show_depth(subject: ledger_view.Subject) -> None:
    """Draw decisions after every block, and of one sample of the task."""
    session, models, on = subject.session, subject.models, subject.on
    over, task, layer = subject.over, subject.task, subject.layer
    st.caption("The head was trained for the last layer; earlier readouts are only indicative.")
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
    frames = {name: layer_tables.agreement_table({one: own[one] for one in tasks}) for name, own in found.items()}
    summary = tables.describe_ranges(
        {name: 100 * one.set_index("layer")["agreement"] for name, one in frames.items()}, 0
    )
    view.chart(
        layer_charts.agreement_chart(frames, layer),
        "depth",
        f"Decisions after every block that are the expert's final one, %, on {over}: {summary}",
        Numbers(
            "decisions through depth",
            tables.stack_models(frames),
            _DEPTH,
            downloads.sample_origin(session, on, models, over),
            kind="depth",
        ),
        layer_charts.DEPTH,
    )
    of_task = {name: own[task] for name, own in found.items()}
    sample = int(_choose_sample(task, of_task))
    rows = layer_tables.course_table(of_task, sample)
    stays = rows[rows["stays"] & (rows["rank"] == 1)].groupby("model", sort=False).first()
    summary = "; ".join(f"{model}: {one['answer']} from {one['layer']} on" for model, one in stays.iterrows())
    view.chart(
        layer_charts.course_chart(rows),
        "course",
        f"First answer after every block for sample {sample} of {task}: {summary}",
        Numbers(
            f"course of sample {sample}",
            rows,
            _COURSE,
            downloads.sample_origin(session, on, models, task),
            kind="course",
            sample=sample,
        ),
        layer_charts.DEPTH,
    )


def _choose_sample(task: str, found: Mapping[str, DepthDecisions]) -> str:
    """Draw the choice of a sample by the final decisions of expert and models; by default the first on which they
    differ."""
    first = next(iter(found.values()))
    ends = {"expert": first.beside or first, **found}
    decisions = {name: [one.words[answer] for answer in one.answers[-1, :, 0].tolist()] for name, one in ends.items()}
    numbers = [str(i) for i in range(len(decisions["expert"]))]
    parted = next((i for i, words in enumerate(zip(*decisions.values(), strict=True)) if len({*words}) > 1), 0)
    chosen = view.one_of(numbers, state.selection().sample, parted)

    def words(number: str) -> str:
        return f"{number}: {', '.join(f'{name} {one[int(number)]}' for name, one in decisions.items())}"

    label = f"Sample of {plain(task)}, and the final decisions"
    state.control(st.selectbox, "sample", chosen, None, label, numbers, format_func=words)
    return chosen


def block_maps(
    session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples, over: str, layer: str, relative: bool
) -> None:
    """Draw the mismatch of every linear map of a block over `over` (a task or the mean), and its change by calibration.

    Args:
        relative: to the norm of the output of the expert's own map.
    """
    with state.progress() as report:
        found = {name: session.measure.maps(model, on, report) for name, model in models.items()}
    frames = {name: layer_tables.maps_table(one, over, layer, relative) for name, one in found.items()}
    if all(frame.empty for frame in frames.values()):
        st.caption(f"There are no linear maps of a block in {plain(layer)}: choose a block above.")
        return
    origin = downloads.sample_origin(session, on, models, over)
    st.caption(f"{plain(layer)}, map by map, on {plain(over)}")
    changed = {name: frame for name, frame in frames.items() if frame["changed"].notna().any()}
    left, right = st.columns(2)
    with left:
        axis = "mismatch / norm of the expert's output" if relative else "mismatch"
        summary = tables.describe_ranges({name: one.set_index("map")["mismatch"] for name, one in frames.items()})
        figure = layer_charts.maps_chart(frames, "mismatch", axis, ".3f" if relative else ".2f")
        view.picture(
            figure, "maps", f"Mismatch of every linear map of {layer}: {summary}", download_name("maps", origin)
        )
    with right:
        if changed:
            summary = tables.describe_ranges({name: one.set_index("map")["changed"] for name, one in changed.items()})
            figure = layer_charts.maps_chart(changed, "changed", "share of what calibration changed", ".1%")
            alt = f"Share of every linear map of {layer} in what calibration changed: {summary}"
            view.picture(figure, "changed", alt, download_name("changed", origin))
        else:
            st.caption("The changes by calibration appear here when one of the two models is calibrated.")
    rows = tables.stack_models(frames)
    view.tools(Numbers(f"maps of {layer}", rows, _MAPS[relative], origin, kind="maps"), layer_charts.MAPS)


def show_tokens(
    session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples, task: str, layer: str, relative: bool
) -> None:
    """Draw the drift of every token of one sample of `task` after a layer: over its picture, or as its text.

    Args:
        relative: to the norm of the expert's state of the same token.
    """
    # Side by side, so that the page stays short where samples are picked, whose bar stands below.
    left, words = st.columns([1, 3], vertical_alignment="bottom")
    with left:
        sample = int(_choose_shown(session, task, on))
    with state.progress() as report:
        found = {name: session.measure.tokens(model, task, on, report) for name, model in models.items()}
    frame = layer_tables.token_table(found, sample, layer)
    frames = {name: frame[frame["model"] == name] for name in models}
    words.caption(" · ".join([f"Sample {sample} of {plain(task)}, {plain(layer)}", *_describe_whole(frames, relative)]))
    if session.family.adapter.class_token and layer == session.family.adapter.layers()[-2]:
        words.caption("After the last block the head reads the class token alone: other tokens have no effect there.")
    column, digits = ("relative drift", 3) if relative else ("drift", 2)
    origin = downloads.sample_origin(session, on, models, task)
    what = f"tokens of sample {sample} at {layer}"
    numbers = Numbers(what, frame, _TOKENS, origin, kind="tokens", layer=layer, sample=sample)
    if frame["token"].notna().any():
        _mark_words(frames, column, digits)
    elif set(frame["part"]) == {FEATURE}:
        st.caption("After the head a sample has one feature and no tokens: choose a layer before it.")
    else:
        pixels = session.samples(on)[task].inputs["pixel_values"][sample]
        _draw_patches(frames, column, digits, pixels, numbers)
    view.tools(numbers, token_charts.TOKENS)


def _choose_shown(session: Session, task: str, on: EvaluationSamples) -> str:
    """Draw the choice of a sample by its right answer; by default the first that is picked on any page."""
    data = session.viewable_samples(task, on)
    answers = answer_column(data)
    numbers = [str(i) for i in range(len(data))]
    picked = [i for i in samples.picked_samples(session, on) if i < len(data)]
    chosen = view.one_of(numbers, state.selection().sample, next(iter(picked), 0))

    def words(number: str) -> str:
        return number if answers is None else f"{number}: {cut_text(answers[int(number)], 40)}"

    state.control(st.selectbox, "sample", chosen, None, f"Sample of {plain(task)}", numbers, format_func=words)
    return chosen


def _describe_whole(frames: Mapping[str, pd.DataFrame], relative: bool) -> Iterator[str]:
    """Yield, by model, the drift of all tokens together, and of the class token, which is not a patch."""
    for name, frame in frames.items():
        whole, size = (float((frame[column] ** 2).sum() ** 0.5) for column in ("drift", "expert norm"))
        line = f"**{plain(name)}**: ‖e‖ {whole:.2f}" + (f" ({whole / size:.3f} of the expert's norm)" if size else "")
        for row in frame[frame["part"] == CLASS_TOKEN].to_dict("records"):
            number = f"{row['relative drift']:.3f}" if relative else f"{row['drift']:.2f}"
            line += f", class token {number}"
        yield line


def _draw_patches(
    frames: Mapping[str, pd.DataFrame], column: str, digits: int, pixels: Tensor, numbers: Numbers
) -> None:
    """Draw patches over the picture in the model's input; by their positions if they do not form a grid."""
    own = {name: frame[frame["part"] == PICTURE].set_index("position", drop=False) for name, frame in frames.items()}
    count, form = len(next(iter(own.values()))), f".{digits}f"
    summaries = {name: tables.describe_ranges({name: one[column]}, digits) for name, one in own.items()}
    grid = token_charts.patch_grid(count, *pixels.shape[1:]) if pixels.ndim == 3 else None
    if grid is None:
        st.caption("These patches form no grid of square cells over the picture, so they are in the model's own order.")
        alt = f"Drift of every patch, {column}: {'; '.join(summaries.values())}"
        view.picture(token_charts.places(own, column, form), "tokens", alt, numbers.name)
        return
    top, picture = _find_top(own, column), data_address(_draw_grey(pixels), _SIDE)
    for number, (place, (name, frame)) in enumerate(zip(st.columns(len(own)), own.items(), strict=True)):
        place.markdown(f"**{plain(name)}**")
        figure = token_charts.patches(frame, column, top, grid, picture, form)
        file = download_name(f"{numbers.what} {name}", numbers.origin)
        view.picture(figure, f"tokens-{number}", f"Drift of every patch, {column}: {summaries[name]}", file, place)


def _draw_grey(pixels: Tensor) -> Image.Image:
    """Return a model's input `[channels, height, width]` in light grey, so that dark colours are drift."""
    grey = pixels.float().mean(0)
    low, high = grey.min(), grey.max()
    scaled = _DARKEST + (255 - _DARKEST) * (grey - low) / (high - low).clamp_min(torch.finfo().tiny)
    larger = max(1, _SIDE // max(scaled.shape))
    # Enlarged here, since a browser would blur the few pixels of a small picture.
    large = scaled.round().to(torch.uint8).repeat_interleave(larger, 0).repeat_interleave(larger, 1)
    return Image.fromarray(large.numpy())


def _find_top(frames: Mapping[str, pd.DataFrame], column: str) -> float:
    """Return the largest drift of all models, for the top of the colour scale."""
    return max(float(frame[column].max()) for frame in frames.values())


def _mark_words(frames: Mapping[str, pd.DataFrame], column: str, digits: int) -> None:
    """Draw the tokens of texts, part by part, a column per model, with one colour scale."""
    top = _find_top(frames, column)
    for place, (name, frame) in zip(st.columns(len(frames)), frames.items(), strict=True):
        with place:
            st.markdown(f"**{plain(name)}**")
            for part, own in frame.groupby("part", sort=False):
                if frame["part"].nunique() > 1 or part in _PARTS:
                    st.caption(_PARTS.get(str(part), str(part)))
                st.html(token_charts.mark_words(own, column, top, digits))
    st.caption(f"No colour is 0, the fullest {top:.{digits}f} ({column}); point at a token for its number.")


VIEWS = {"Through depth": show_depth}
"""Name of a view on the Drift page → the function that draws it."""
