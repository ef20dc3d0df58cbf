"""Draw where a calibration helped."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from featcal.figures.names import cut_text, label
from featcal.figures.theme import COLOUR, apply_theme, layer_axis, task_axis
from featcal.system.formatting import decimals

_BETTER_TO_WORSE = [[0.0, COLOUR["calibrated"]], [0.5, "#ECEEF1"], [1.0, COLOUR["merged"]]]
"""Blue and orange, which every kind of colour vision distinguishes on any background."""
_INK = "#14171C"
"""Colour of numbers in cells, with a contrast of at least 4.5 to 1 on every colour of the scale."""
_WRITTEN = 120
"""Number of cells up to which each has its number written in it."""

WHERE_IT_HELPS = r"""
**What this shows.** The change by calibration for every task and layer: blue is less than before, orange is more.

**Formula.** *Drift*: change of $\|e\| / \|h_\text{expert}\|$, means over samples. *Booked to the layer*: change of the
layer's share of the final drift (Prop. 2) times the final relative drift, so that a row sums to the change of the
final drift.

**When it misleads.** A layer whose drift falls need not be where the repair happened: less drift comes in from the
layers before it. The share of a layer is its own; yet large contributions can cancel (see the Drift page).
"""

ANCHOR_ONLY = r"""
**What this shows.** These numbers for the anchor alone: base + ρ (merged − base), which needs no samples. For a merge
by Task Arithmetic with scale $s$, it is Task Arithmetic with scale $\rho s$. The gain of calibration is its
difference to this row, not to the merged model's.

**Formula.** Eq. (11), in every tensor; calibration pulls to it with strength $\lambda$.

**When it misleads.** The anchor moves embeddings and final norm as well, which calibration leaves as merged.
"""

CONDITIONING = r"""
**What this shows.** Every linear system of the calibration. The smallest eigenvalue stays near $\lambda$ if the
samples miss a direction, in which the solution is then the anchor; a large ratio magnifies rounding and noise.

**Formula.** Eigenvalues of $\sum_i \omega_i G_i + (\lambda + \varepsilon) I$ (Eq. 17). *Effective rank*
$= \sum_j \mu_j / (\mu_j + \lambda + \varepsilon)$, $\mu_j$ the eigenvalues without $\lambda$: how many directions
the samples decide. *Tokens* are the counted tokens of all tasks; fewer than the width cannot fill it.

**When it misleads.** Many tokens of few pictures are alike: the effective rank says more than their number. A low rank
is not bad if the model uses no other directions.
"""

SPREAD = r"""
**What this shows.** The scores of three calibrations with the same options on other samples: the seed selects
them. Symbols are means, lines reach from the lowest to the highest.

**When it misleads.** Three seeds can show that a difference may be chance, not that there is none. If a task has no
more samples than requested, every seed draws the same ones in another order.
"""


def change_map(frame: pd.DataFrame, unit: str) -> go.Figure:
    """Draw a heat map of `change` by layer (across, in forward order) and task (down); blue is less, orange is more.

    Args:
        frame: columns task, layer, before, after and change.
        unit: of the change.
    """
    layers, tasks = (list(dict.fromkeys(frame[name])) for name in ("layer", "task"))
    table = {name: frame.pivot(index="task", columns="layer", values=name) for name in ("before", "after", "change")}
    ordered = {name: one.reindex(index=tasks, columns=layers).to_numpy() for name, one in table.items()}
    change = ordered["change"]
    # The scale is symmetric, so that its middle colour means no change; it needs a width where nothing changed.
    most = float(abs(change).max()) or 1.0
    figure = go.Figure(
        go.Heatmap(
            x=layers,
            y=[label(task) for task in tasks],
            z=change,
            customdata=pd.DataFrame({name: ordered[name].ravel() for name in ("before", "after")})
            .to_numpy()
            .reshape(*change.shape, 2),
            zmin=-most,
            zmax=most,
            colorscale=_BETTER_TO_WORSE,
            xgap=2,
            ygap=2,
            texttemplate="%{z:+.2f}" if change.size <= _WRITTEN else None,
            textfont={"color": _INK},
            colorbar={"title": {"text": unit, "side": "right"}, "thickness": 12},
            hovertemplate="%{y}, %{x}: %{customdata[0]:.3f} → %{customdata[1]:.3f} (%{z:+.3f})<extra></extra>",
        )
    )
    layer_axis(figure, layers)
    figure.update_yaxes(
        tickvals=[label(task) for task in tasks],
        ticktext=[label(cut_text(task, 18)) for task in tasks],
        autorange="reversed",
        title=None,
    )
    apply_theme(figure, 110 + 24 * len(tasks)).update_layout(margin={"t": 24})
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False)
    return figure


def spread_bars(frame: pd.DataFrame, unit: str) -> go.Figure:
    """Draw the mean score per task as a symbol, from the lowest to the highest score as a line.

    Args:
        frame: columns task, mean, lowest and highest.
    """
    figure = go.Figure()
    figure.add_scatter(
        x=frame["task"].map(label),
        y=frame["mean"],
        mode="markers",
        name="mean over seeds, from the lowest to the highest",
        marker={"color": COLOUR["calibrated"], "size": 10},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": frame["highest"] - frame["mean"],
            "arrayminus": frame["mean"] - frame["lowest"],
            "thickness": 2,
            "width": 8,
        },
        customdata=[[decimals(one, 1) for one in row] for row in frame[["mean", "lowest", "highest"]].to_numpy()],
        hovertemplate="%{x}: %{customdata[0]} (%{customdata[1]} to %{customdata[2]})<extra></extra>",
        showlegend=True,
    )
    figure.update_yaxes(title=unit)
    task_axis(figure, frame["task"])
    return apply_theme(figure, 340)
