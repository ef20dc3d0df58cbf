"""
Four bits
=========

The weights of all blocks in four bits, rounded while the merge is repaired. It costs almost nothing.

``t5-mini`` is a small T5 with four experts.
"""

import pandas as pd
import plotly.express as px

import featcal
from featcal.figures import tables
from featcal.figures.theme import COLOUR, apply_theme

session = featcal.open_session("t5-mini")

# %%
# Two ways to round
# -----------------
# ``int4-nearest`` takes the nearest of sixteen values for every weight. ``int4`` rounds a matrix column by column, and
# what a column lost is made up for, as well as it can be, by the columns that are still to come. In both, the blocks
# after are fitted to what the rounded ones give.

drift = {}
for way in ("off", "int4", "int4-nearest"):
    config = featcal.CalibrationConfig(
        recipe="informed", samples=32, quantize=way, group_size=32
    )
    drift[way] = tables.relative_drift_table(
        featcal.measure_drift(session, config, samples=32)
    )
pd.DataFrame(drift).round(3)

# %%
# What rounding adds to the drift of the repaired model, layer by layer:

added = pd.DataFrame(
    {way: 100 * (drift[way] / drift["off"] - 1) for way in ("int4-nearest", "int4")}
).dropna()
figure = px.bar(
    added,
    barmode="group",
    labels={
        "value": "drift added by rounding, %",
        "index": "layer, in forward order",
        "variable": "",
    },
    color_discrete_sequence=[COLOUR["merged"], COLOUR["calibrated"]],
)
apply_theme(figure, 400)

# %%
# **What to keep:** what rounding takes from one column, others can give back while they are still to be rounded.
