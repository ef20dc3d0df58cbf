"""
Token by token
==============

Drift is not spread evenly over a text. A few tokens carry most of it.

``lm-mini`` is a small language model; one of its tasks is to rewrite a sentence.
"""

import pandas as pd
import plotly.express as px

import featcal
from featcal.figures.theme import apply_theme

session = featcal.open_session("lm-mini")
view = featcal.EvaluationSamples(8, "validation")

# %%
# The features of every token are held against the expert's, after every layer. The squares of all tokens add up to the
# drift of the layer.

found = session.measure.tokens("merged", "rewrite", view)
rows = pd.DataFrame(found.rows(0))
rows = rows[rows["layer"].str.startswith("block")]
first = rows[rows["layer"] == "block 0"]
words = [f"{one.position} {one.token}" for one in first.itertuples()]

# %%
# A text through the model
# ------------------------
# From left to right the text, from top to bottom the blocks.

grid = rows.pivot(index="layer", columns="position", values="relative_drift").to_numpy()
layers = list(rows["layer"].unique())
figure = px.imshow(
    grid, x=words, y=layers, color_continuous_scale="Oranges", aspect="auto"
)
figure.update_coloraxes(colorbar_title="drift")
figure.update_xaxes(tickangle=-60, title="token")
apply_theme(figure, 380)

# %%
# How much of the last block's squared drift the fullest quarter of the tokens carries, over eight texts:

squares = [
    one.square().sort(descending=True).values for one in found.find("block 3").drift
]
carried = [float(one[: len(one) // 4].sum() / one.sum()) for one in squares]
print(f"{sum(carried) / len(carried):.0%}")

# %%
# **What to keep:** a few tokens carry most of the drift, and an average over the text hides which.
