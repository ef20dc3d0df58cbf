"""Draw numbers as plotly figures; only means and differences are computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from featcal.figures.names import label
from featcal.figures.theme import COLOUR, apply_theme, colour, dash, label_task_rows, layer_axis, rows_apart, symbol
from featcal.system.formatting import decimals, with_sign

Array = NDArray[np.floating]
MEANS = ("average", "mean")
"""Names of rows that stand for all tasks."""
_UNIT = {
    False: ("norm over the whole token state", ".2f"),
    True: ("norm / norm of the expert's feature", ".3f"),
}

DRIFT = r"""
**What this shows.** For every layer $\ell$ and sample the difference between the model's feature and the task
expert's, $e^\ell = h^\ell_\text{model} - h^\ell_\text{expert}$, split into two parts:

- *local mismatch* $m^\ell = f^\ell_\text{model}(h^{\ell-1}_\text{expert}) - h^\ell_\text{expert}$: the error that this
  layer makes even on the expert's own input;
- *propagation* $p^\ell = h^\ell_\text{model} - f^\ell_\text{model}(h^{\ell-1}_\text{expert})$: the effect of earlier
  errors on this layer's output.

**Formula.** $e = m + p$ exactly, as vectors (Prop. 1). Bars and line are means over samples of the norms.

**When it misleads.** Norms do not add: $\|e\| \le \|m\| + \|p\|$, so the line can be below either bar if the
parts cancel (negative cosine of $m$ and $p$, in the table). The norm runs over all
tokens, but only one reaches the head: CLIP's class token, a language model's token before the answer. A layer of an
encoder-decoder's decoder holds its own tokens and the encoder's normed output, both of which later layers see, under
one norm: it is not the decoder's drift alone. Layers differ in scale: compare them in relative units. A small drift is
not yet a right answer; see Accuracy.
"""

DRIFT_TASKS = r"""
**What this shows.** The drift of the chosen layer, task by task, in the parts and units of the chart above.

**When it misleads.** Every task is compared with its own expert, so tasks whose expert moved far from the base show
large drift even if the answer is still right.
"""

CALIBRATE = r"""
**What this shows.** The drift $\|e\|$ of the merged and of the calibrated model, per layer, mean over samples and
tasks, on **validation** samples, which calibration never sees (on calibration samples if a suite has none). Every
calibration is the exact closed form in forward order, and replaces the preview above:

$$
W = \Big(\sum_i \omega_i W_i C_i + \lambda\, W_\text{anchor}\Big)
\Big(\sum_i \omega_i G_i + (\lambda+\varepsilon) I\Big)^{-1}
$$

$$
W_\text{anchor} = \rho\, W_\text{merged} + (1-\rho)\, W_\text{base}
$$

with $C_i = \alpha X_i^\text{exp} {X_i}^\top + (1-\alpha)\, G_i$ and $G_i$ the Gram matrix of the deployed inputs.

- $\lambda$: how strongly the anchor holds; large values return to the anchor, small ones trust the samples.
- $\rho$: 1 anchors at the merged model, above 1 beyond it, 0 at the base.
- $\alpha$: share of the expert's own inputs in the targets.
- Recipe: *paper* is the method as published. *refined* is featcal's own: the pieces of a block are solved one after
  the other, each on the final outputs of those before it, and the maps that write into the residual stream are asked
  to close a share $\beta$ of its gap to the expert. *informed* is refined, and adds to every map's objective
  $\mu \sum_i \|(W - W_0 - \rho\tau_i) K_i^{1/2}\|^2$ with the task vector $\tau_i = W_i - W_0$ and
  $K_i \propto \tau_i^\top\tau_i$: information in the experts' weights on their training inputs.

**When it misleads.** Options that are chosen on few validation samples fit those samples; the score on the test
split (page Accuracy) is for the final choice. With few calibration samples and a small $\lambda$ drift can grow in
directions that the samples do not contain.
"""

COSINES = r"""
**What this shows.** (a) Mean cosine of final features to the task's expert. (b) This cosine, one point per sample
of the chosen task: above the diagonal calibration brought it closer. (c) Per task, how much cosine and how much
score the second model gained over the first. (d) In parameter space: cosine of
$\theta_\text{model} - \theta_\text{base}$ to $\theta_\text{expert} - \theta_\text{base}$.

**When it misleads.** Cosines ignore feature length, as a zero-shot head does; a language model's head does not.
In (c) the score is a count over few samples: one sample is one step. (d) need not grow: features can come closer to
the expert's while the weights do not.
"""

ACCURACY = r"""
**What this shows.** Top-1 accuracy on the whole **test** split: image features against class prompts through the
base's own text tower. *gap closed* $= \dfrac{\text{calibrated} - \text{merged}}{\text{expert} - \text{merged}}$.

**When it misleads.** Choose options on validation samples (page Calibrate): a test split that is scored at every
slider position becomes a validation split. The gap closed is unstable if expert and merged model are close, and left
out if the expert is not better.
"""

ACCURACY_OF_TEXT = r"""
**What this shows.** Every model answers the whole **test** split: greedy generation by the library's own `generate`,
compared with the right answer as a whole string (exact match). *gap closed*
$= \dfrac{\text{calibrated} - \text{merged}}{\text{expert} - \text{merged}}$.

**When it misleads.** The page Calibrate scores whole answers too, of fewer samples; if these take long it shows
the first token of the answer, which can be right although the answer is wrong. Exact match counts a right answer in
other words as wrong. Choose options on validation samples; the gap closed is unstable if expert and merged model are
close, and left out if the expert is not better.
"""

ACCURACY_OF_HEADS = r"""
**What this shows.** How good every model's answers on the whole **test** split are, after the expert's own head for
each task: accuracy for classes, Spearman's rank correlation for the similarity of two texts. *gap closed*
$= \dfrac{\text{calibrated} - \text{merged}}{\text{expert} - \text{merged}}$.

**When it misleads.** Choose options on validation samples (page Calibrate): a test split that is scored at every
slider position becomes a validation split. The gap closed is unstable if expert and merged model are close, and left
out if the expert is not better.
"""

PREVIEW = r"""
**What this shows.** The first calibrated block, solved again with the current options; the exact run of all blocks
follows and replaces it.

**Formula.** Eq. (17) from kept sums: the targets $\alpha X_i^\text{exp} {X_i}^\top + (1-\alpha) G_i$ are affine in
$\alpha$ (and in $\beta$, if the recipe has one), so sums at the ends give them for every value; $\lambda$, $\rho$
and $\mu$ enter the solve alone.

**When it misleads.** It is the exact result of this block; for recipes that go piece by piece, only of the first
pieces, since later pieces keep the result of the last exact run. Nothing after the block is computed.
"""

ACCURACY_BY_SCORES = {"prompts": ACCURACY, "vocabulary": ACCURACY_OF_TEXT, "own": ACCURACY_OF_HEADS}
"""Sentences on scores by the kind of a model's scores (`Adapter.scores_with`)."""


def drift_layers(frames: Mapping[str, pd.DataFrame], relative: bool, chosen: str | None = None) -> go.Figure:
    """Draw ||m|| and ||p|| per layer side by side, because they do not add up, and ||e|| as a line; all models on one
    axis, with the bars of each framed in its colour, those of the second paler."""
    figure = _parts(frames, "layer", relative)
    layers = list(next(iter(frames.values()))["layer"])
    if chosen is not None:
        place = layers.index(chosen)
        figure.add_vrect(place - 0.5, place + 0.5, fillcolor=COLOUR["base"], opacity=0.2, line_width=0, layer="below")
    layer_axis(figure, layers)
    figure.update_yaxes(title=_UNIT[relative][0], rangemode="tozero")
    return apply_theme(figure, 380)


def drift_tasks(frames: Mapping[str, pd.DataFrame], relative: bool) -> go.Figure:
    """Draw ||m||, ||p|| and ||e|| at one layer, task by task, the largest drift of the first model on top."""
    order = next(iter(frames.values())).set_index("task")["drift"].sort_values().index
    sorted_frames = {model: frame.set_index("task").loc[order].reset_index() for model, frame in frames.items()}
    figure = _parts(sorted_frames, "task", relative)
    label_task_rows(figure, order)
    figure.update_xaxes(title=_UNIT[relative][0], rangemode="tozero")
    return apply_theme(figure, 110 + (12 + 13 * len(frames)) * len(order))


def compare_drift(
    drifts: Mapping[str, pd.Series], ghost: pd.Series | None = None, preview: tuple[str, float] | None = None
) -> go.Figure:
    """Draw ||e|| / ||h_expert|| by layer, one line per model.

    Args:
        ghost: drift of the last model with its previous options; drawn faintly.
        preview: a layer, and the previewed drift of the last model after it; drawn as a point on a thin line from the
            unchanged layer before.
    """
    figure = go.Figure()
    axis, form = _UNIT[True]
    for model, drift in drifts.items():
        figure.add_scatter(
            x=drift.index,
            y=drift,
            name=model,
            cliponaxis=False,
            mode="lines+markers",
            line={"color": colour(model), "width": 3, "dash": dash(model)},
            marker={"symbol": symbol(model), "size": 10},
            hovertemplate=f"%{{x}}: %{{y:{form}}}",
        )
    if ghost is not None:
        line = {"color": colour(model), "width": 1.5, "dash": "dot"}
        figure.add_scatter(x=ghost.index, y=ghost, name="before", mode="lines", line=line, opacity=0.6)
    if preview is not None:
        place = drift.index.get_loc(preview[0])
        figure.add_scatter(
            x=drift.index[place - 1 : place + 1],
            y=[drift.iloc[place - 1], preview[1]],
            name="preview",
            mode="lines+markers",
            line={"color": colour(model), "width": 1.5},
            marker={"symbol": "star-diamond", "size": [0, 16], "opacity": 1, "color": colour(model)},
            hovertemplate=f"%{{x}}: %{{y:{form}}}",
        )
    figure.update_yaxes(title=f"drift, {axis}", rangemode="tozero")
    layer_axis(figure, list(next(iter(drifts.values())).index))
    return apply_theme(figure, 380)


def score_dots(
    frame: pd.DataFrame, models: Sequence[str], unit: str = "accuracy, %", pair: tuple[str, str] | None = None
) -> go.Figure:
    """Draw one line per row of `frame` (column "task") and one dot per model on it, the average apart below.

    Args:
        pair: two of the models, joined on every line; rows are sorted by the gain of the second, which is written at
            their end. Without a pair rows are sorted by the first model, whose value is written there.
    """
    digits, (first, second) = (1 if "%" in unit else 3), pair or (models[0], models[0])
    write = with_sign if pair else decimals
    gain = frame[second] - frame[first] if pair else frame[first]
    order = frame.assign(_gain=gain, _last=frame["task"].isin(MEANS)).sort_values(
        ["_last", "_gain"], ascending=[True, False]
    )
    places = rows_apart(order["_last"])
    figure = go.Figure()
    if pair is not None:
        joined = [value for one in zip(order[first], order[second], strict=True) for value in (*one, None)]
        line = {"color": colour(second), "width": 2}
        figure.add_scatter(
            x=joined, y=np.repeat(places, 3), mode="lines", line=line, showlegend=False, hoverinfo="skip"
        )
    for model in models:
        figure.add_scatter(
            x=order[model],
            y=places,
            name=model,
            mode="markers",
            cliponaxis=False,
            marker={
                "color": colour(model),
                "symbol": symbol(model),
                "size": 11,
                "line": {"width": 1.5, "color": colour(model)},
            },
            customdata=order["task"].map(label),
            hovertext=[decimals(value, digits) for value in order[model]],
            hovertemplate=f"%{{customdata}}, {label(model)}: %{{hovertext}}<extra></extra>",
        )
    ends = order[list(models)]
    low, high = float(ends.min(axis=None)), float(ends.max(axis=None))
    wide = high - low or 1.0
    figure.add_scatter(
        x=[high + 0.1 * wide] * len(order),
        y=places,
        mode="text",
        text=[write(value, digits) for value in order["_gain"]],
        textposition="middle right",
        showlegend=False,
        hoverinfo="skip",
        cliponaxis=False,
    )
    step = next(one for one in (20, 10, 5, 2, 1, 0.5, 0.2, 0.1) if wide > 2.5 * one or one == 0.1)
    # Values at the end stand beyond 100.
    ticks = [round(place * step, 1) for place in range(round(100 / step) + 1)] if "%" in unit else None
    figure.update_xaxes(title=unit, range=[low - 0.05 * wide, high + 0.3 * wide], tickvals=ticks)
    label_task_rows(figure, order["task"], places)
    return apply_theme(figure, 110 + 28 * len(order))


_SIZE = 300.0, 260.0
"""Pixels between the first and the last point of the chart of gains at its narrowest."""
_SIDES = (("top", "center", 0, 1), ("bottom", "center", 0, -1), ("middle", "right", 1, 0), ("middle", "left", -1, 0))


def gains(frame: pd.DataFrame, metric: str, model: str) -> go.Figure:
    """Draw a model's gain in cosine against its gain in a score, one labelled point per task."""
    figure = go.Figure()
    figure.add_scatter(
        x=frame["cosine gain"],
        y=frame["score gain"],
        text=frame["task"].map(label),
        mode="markers+text",
        textposition=_text_sides(frame),
        cliponaxis=False,
        marker={"color": colour(model), "size": 11},
        hovertext=[with_sign(value, 1) for value in frame["score gain"]],
        hovertemplate=f"%{{text}}: cosine %{{x:+.3f}}, {metric} %{{hovertext}} points<extra></extra>",
        showlegend=False,
    )
    figure.add_hline(y=0, line={"color": COLOUR["base"], "dash": "dot"})
    figure.add_vline(x=0, line={"color": COLOUR["base"], "dash": "dot"})
    x = frame["cosine gain"]
    reach = max(float(x.max()), 0.0) - min(float(x.min()), 0.0) or 1.0
    figure.update_xaxes(
        title="gain in mean cosine to the expert",
        range=[min(float(x.min()), 0) - 0.12 * reach, max(float(x.max()), 0) + 0.12 * reach],
    )
    figure.update_yaxes(title=f"gain in {metric}, points")
    return apply_theme(figure, 400)


def _parts(frames: Mapping[str, pd.DataFrame], key: str, relative: bool) -> go.Figure:
    """Draw bars of mismatch and propagation, and drift as a line or dots; layers go to the right, tasks upwards."""
    form, across = _UNIT[relative][1], key == "layer"
    figure = go.Figure()

    def places(names: pd.Series, values: pd.Series) -> dict[str, pd.Series]:
        return {"x": names, "y": values} if across else {"x": values, "y": names}

    name, value = ("%{x}", "%{y") if across else ("%{y}", "%{x")
    for number, (model, given) in enumerate(frames.items()):
        frame = given.assign(**{key: given[key].map(label)})
        for part, pattern in (("mismatch", ""), ("propagation", "/")):
            look: dict[str, object] = {"shape": pattern, "fillmode": "overlay", "size": 8, "solidity": 0.15}
            figure.add_bar(
                **places(frame[key], frame[part]),
                orientation="v" if across else "h",
                name=f"{'local ' if part == 'mismatch' else ''}{part}",
                legendgroup=part,
                showlegend=number == 0,
                opacity=0.45 if number else 1.0,
                marker={
                    "color": COLOUR[part],
                    "line": {"color": colour(model), "width": 2 if len(frames) > 1 else 0},
                    "pattern": look | {"fgcolor": "rgba(0,0,0,0.4)"},
                },
                customdata=frame[key],
                hovertemplate=f"{name}<br>{part} {value}:{form}}}<extra>{label(model)}</extra>",
            )
        figure.add_scatter(
            **places(frame[key], frame["drift"]),
            name=f"drift, {model}",
            cliponaxis=False,
            mode="lines+markers" if across else "markers",
            line={"color": colour(model), "width": 3, "dash": dash(model)},
            marker={
                "symbol": symbol(model),
                "color": colour(model),
                "size": 11,
                "line": {"width": 1.5, "color": "white"},
            },
            customdata=np.stack([frame[key], frame["alignment"]], axis=1),
            hovertemplate=f"{name}<br>drift {value}:{form}}}<br>cosine of m and p %{{customdata[1]:.2f}}"
            f"<extra>{label(model)}</extra>",
        )
    return figure.update_layout(barmode="group")


def _text_sides(frame: pd.DataFrame) -> list[str]:
    """Place labels beside their points where they overlap no other point or label, if possible; else above and below in
    turn."""
    wide, high = _SIZE
    x = [wide * one for one in _share(frame["cosine gain"])]
    y = [high * one for one in _share(frame["score gain"])]
    taken = [_box(one, other, 10, 10) for one, other in zip(x, y, strict=True)]
    sides = []
    for i, (one, other, text) in enumerate(zip(x, y, frame["task"].map(str), strict=True)):
        boxes = {
            f"{row} {column}": _box(one + across * (10 + 3.5 * len(text)), other + up * 15, 7 * len(text), 15)
            for row, column, across, up in _SIDES
        }
        others = taken[:i] + taken[i + 1 :]
        free = (name for name, box in boxes.items() if not any(_overlap(box, two) for two in others))
        side = next(free, ["top center", "bottom center"][i % 2])
        taken.append(boxes[side])
        sides.append(side)
    return sides


def _share(values: pd.Series[float]) -> list[float]:
    """Return the positions of values along an axis from 0 (or the least) to the largest, as shares."""
    least, most = min(values.min(), 0.0), max(values.max(), 0.0)
    return [(one - least) / (most - least or 1.0) for one in values]


def _box(x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _overlap(one: tuple[float, ...], two: tuple[float, ...]) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]
